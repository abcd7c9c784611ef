//! Names of Bodies: each is in the spec of its Body, and unique among the Bodies of the data directory.
//!
//! Invariant: two processes that create Bodies with one name at the same time do not both succeed.

use std::fs::File;

use body::BodyDir;
use proto::{BodyId, BodyName, Failure, Kind, Spec};
use rustix::fs::FlockOperation;

use crate::{BodyView, Fleet};

/// The lock under which names are given; the kernel releases it with its descriptor.
#[derive(Debug)]
pub(crate) struct NameLock(#[expect(dead_code, reason = "held for its descriptor")] File);

/// Finds Bodies by their names, and keeps the names unique.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    fleet: &'a Fleet,
}

impl Fleet {
    /// Finds a Body by its whole id, by its name, or by a prefix of the id that only one Body has, in this order.
    pub fn find(&self, key: &str) -> Result<BodyView, Failure> {
        let shown = proto::text::visible(key);
        let unknown =
            || Failure::new(Kind::NotFound, format!("there is no Body {shown}")).hint("list them: pal ls");
        let name: BodyName = key.parse().map_err(|_| unknown())?;
        if let Some(id) = Names::of(self).find_exact(&name)? {
            return self.view(&id);
        }
        let is_body = |id: &BodyId| self.body_path(id).join("spec.json").exists();
        let mut found = self.ids()?.into_iter().filter(|id| id.as_str().starts_with(key) && is_body(id));
        match (found.next(), found.next()) {
            (Some(id), None) => self.view(&id),
            (Some(_), Some(_)) => {
                Err(Failure::new(Kind::Usage, format!("several Bodies begin with {shown}"))
                    .hint("write more of the id: pal ls"))
            }
            _ => Err(unknown()),
        }
    }
}

impl<'a> Names<'a> {
    /// The names of a fleet's Bodies.
    pub fn of(fleet: &'a Fleet) -> Self {
        Self { fleet }
    }

    /// The Body with this whole id, else the one with this name.
    pub fn find_exact(&self, key: &BodyName) -> Result<Option<BodyId>, Failure> {
        let whole = key.as_str().parse::<BodyId>().ok();
        match whole.filter(|id| self.fleet.body_path(id).join("spec.json").exists()) {
            Some(id) => Ok(Some(id)),
            None => self.find_name(key, |dir| dir.name().ok().flatten()),
        }
    }

    fn find_name(
        &self,
        name: &BodyName,
        name_of: impl Fn(&BodyDir) -> Option<BodyName>,
    ) -> Result<Option<BodyId>, Failure> {
        let has_it = |id: &BodyId| name_of(&BodyDir::at(self.fleet.body_path(id))).as_ref() == Some(name);
        Ok(self.fleet.ids()?.into_iter().find(has_it))
    }

    /// Refuses a name that a Body has, also one that another process is creating right now.
    pub(crate) fn check(&self, name: &BodyName) -> Result<(), Failure> {
        if name.as_str().parse::<BodyId>().is_ok_and(|id| self.fleet.body_path(&id).exists()) {
            return Err(taken(&format!("{name} is the id of a Body")));
        }
        // A draft without a process that holds its directory is a leftover, whose name is free.
        let drafted = |dir: &BodyDir| {
            let draft = dir.draft_name().ok().flatten();
            draft.filter(|draft| draft == name && matches!(dir.try_lock(), Ok(None)))
        };
        match self.find_name(name, |dir| dir.name().ok().flatten().or_else(|| drafted(dir)))? {
            Some(_) => Err(taken(&format!("a Body is named {name} already"))),
            None => Ok(()),
        }
    }

    /// Checks the name of a Body that is being created. The caller holds the lock until the draft of the spec is written.
    pub(crate) fn lock(&self, spec: &Spec) -> Result<Option<NameLock>, Failure> {
        let Some(name) = &spec.name else { return Ok(None) };
        let cannot = |error: std::io::Error| {
            Failure::new(Kind::Host, "cannot lock the names of the Bodies").because(error)
        };
        let bodies = File::open(self.fleet.data.join("bodies")).map_err(cannot)?;
        rustix::fs::flock(&bodies, FlockOperation::LockExclusive).map_err(|errno| cannot(errno.into()))?;
        self.check(name)?;
        Ok(Some(NameLock(bodies)))
    }

    /// The names of `count` Bodies that a request creates; none of them is taken.
    pub(crate) fn number(
        &self,
        name: Option<&BodyName>,
        count: u32,
    ) -> Result<Vec<Option<BodyName>>, Failure> {
        let Some(name) = name else { return Ok(vec![None; count as usize]) };
        let names = name.number(count).map_err(|error| Failure::new(Kind::Usage, error.to_string()))?;
        names.iter().try_for_each(|name| self.check(name))?;
        Ok(names.into_iter().map(Some).collect())
    }
}

fn taken(why: &str) -> Failure {
    Failure::new(Kind::Conflict, why.to_owned())
        .hint("choose another name, or remove that Body: pal ls, then pal rm BODY")
}
