//! The place of a Body that is about to be created: an id, a locked directory and host ids.

use std::io;

use body::{
    BodyDir,
    dir::BodyLock,
    driver::DriverContext,
    ids::{self, MapRoot},
};
use proto::{BodyId, Failure, Kind, spec::Ids};

use crate::failures;

/// A claimed place. It is not a Body yet: its directory has no spec.
#[derive(Debug)]
pub(crate) struct BodyPlace {
    pub id: BodyId,
    pub dir: BodyDir,
    pub ids: Ids,
    #[expect(dead_code, reason = "held for its descriptor")]
    lock: BodyLock,
}

impl BodyPlace {
    /// Claims a place that no other process uses.
    pub fn claim(context: &DriverContext, root: MapRoot) -> Result<Self, Failure> {
        // The directory comes first: another process may claim the host ids of a Body without a directory.
        let (id, dir, lock) = make_locked_dir(context)?;
        match ids::claim(&context.data, &id, root) {
            Ok(ids) => Ok(Self { id, dir, ids, lock }),
            Err(error) => {
                let _ = std::fs::remove_dir_all(dir.path());
                Err(failures::ids(error))
            }
        }
    }

    /// Removes the files of an ended Body and releases its host ids.
    pub fn clear(&self, context: &DriverContext) {
        if self.dir.path().exists() {
            body::groups::remove_cgroups_by_name(&self.id);
            let _ = body::snapshot::remove(&context.launch.programs, &self.ids, self.dir.path());
        }
        ids::release(&context.data, &self.ids, &self.id);
    }
}

/// Creates a directory and locks it. `gc` may remove it in between; then it creates another.
fn make_locked_dir(context: &DriverContext) -> Result<(BodyId, BodyDir, BodyLock), Failure> {
    let cannot = |what: &str, error: io::Error| {
        Failure::new(Kind::Host, what.to_owned()).because(error).hint("make room: pal gc")
    };
    loop {
        let id = sys::random::bytes()
            .map(BodyId::from_random)
            .map_err(|error| cannot("cannot read random bytes from the kernel", error))?;
        let dir = BodyDir::create(context.body_path(&id))
            .map_err(|error| cannot("cannot create the Body's directory", error))?;
        match dir.try_lock() {
            Ok(Some(lock)) => return Ok((id, dir, lock)),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                let _ = std::fs::remove_dir_all(dir.path());
                return Err(cannot("cannot lock the Body", error));
            }
        }
    }
}
