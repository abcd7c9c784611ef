//! The repository of ours, beside a Body, where its work becomes git objects before anybody else sees them.
//!
//! What a Body's git made is kept there from one look to the next, so that it is checked once; what is made of its
//! files lies in a stage, and goes when it was looked at or saved.
//!
//! Invariant: nothing here is needed: whatever is lost, torn or too much is made again from the Body's own files.

use std::{
    ffi::OsString,
    fs::{self, File},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use proto::workspace::Workspace;

use crate::{
    bare_repo::{self, StageDir},
    error::{ErrorContext, WorkspaceError},
    git::Git,
};

/// How long one look, one save or one landing may take.
pub const TIME_MAX: Duration = Duration::from_secs(1800);
/// What may lie here from one save to the next.
const KEPT_MAX: u64 = 1 << 30;

/// The quarantine of one workspace.
#[derive(Debug, Clone)]
pub struct Quarantine {
    dir: PathBuf,
    until: Instant,
}

impl Quarantine {
    /// Opens it, and makes it if need be. It sees the objects of the user's repository, and changes none.
    /// Whatever git does there and in the user's repository ends within `time_max`.
    pub fn open(
        body_dir: &Path,
        name: &str,
        repository: &Path,
        time_max: Duration,
    ) -> Result<Self, WorkspaceError> {
        if !repository.join("objects").is_dir() {
            return Err(WorkspaceError::NotFound(
                "the repository that the workspace came from is no longer there".into(),
            ));
        }
        let top = body_dir.join("git");
        fs::create_dir_all(&top).during("make a quarantine")?;
        let dir = top.join(name);
        if !dir.join("HEAD").exists() {
            let shallow = repository.join("shallow");
            bare_repo::make(&dir, &[&repository.join("objects")], Some(&shallow))
                .during("make a quarantine")?;
        }
        bare_repo::clear_stale(&dir);
        Ok(Self { dir, until: Instant::now() + time_max })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// git in it, with little memory: what it reads was made by a Body.
    pub fn git(&self) -> Git {
        Git::at(&self.dir).rlimited().deadline(self.until)
    }

    /// The same in the user's repository.
    pub fn user(&self, workspace: &Workspace) -> Git {
        Git::at(&workspace.repository).deadline(self.until)
    }

    /// Has git index a pack, apart from everything else: `index-pack` keeps some of what it then refuses. Only a pack
    /// that it found sound is moved here.
    pub fn take_pack(&self, args: &[&str], pack: File) -> Result<(), WorkspaceError> {
        let stage = self.stage()?;
        let apart = stage.join("git");
        bare_repo::make(&apart, &[&self.dir.join("objects")], Some(&self.dir.join("shallow")))
            .during("make room for a pack")?;
        Git::at(&apart).rlimited().deadline(self.until).scratch().feed_file(args, pack)?;
        let mut files: Vec<_> = fs::read_dir(apart.join("objects/pack"))
            .during("list a pack")?
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        // The index last: a pack without one is none.
        files.sort_by_key(|name| name.to_string_lossy().ends_with(".idx"));
        for name in files {
            fs::rename(apart.join("objects/pack").join(&name), self.dir.join("objects/pack").join(&name))
                .during("move a pack")?;
        }
        Ok(())
    }

    /// A directory of ours that goes away.
    pub fn stage(&self) -> Result<StageDir, WorkspaceError> {
        let drawn = proto::event::hex(&sys::random::bytes::<8>().during("draw a name")?);
        StageDir::make(self.dir.join(format!("stage-{}-{drawn}", std::process::id())))
            .during("make room for a copy")
    }

    /// A place for objects that goes away, with everything that lies here.
    pub fn view(&self) -> Result<QuarantineView, WorkspaceError> {
        let stage = self.stage()?;
        fs::create_dir_all(stage.join("objects/pack")).during("make room for objects")?;
        Ok(QuarantineView { quarantine: self.clone(), stage })
    }

    /// Whether something lies here from before.
    pub fn has_objects(&self) -> bool {
        fs::read_dir(self.dir.join("objects/pack")).is_ok_and(|mut packs| packs.next().is_some())
    }

    /// Throws away what was taken: it is damaged, or too much.
    pub fn forget(&self) {
        let _ = fs::remove_dir_all(self.dir.join("taken"));
        for entry in fs::read_dir(self.dir.join("objects/pack")).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Keeps it small, once everything in it is elsewhere.
    pub fn tidy(&self) {
        let packs = fs::read_dir(self.dir.join("objects/pack")).into_iter().flatten().flatten();
        let bytes: u64 = packs.filter_map(|entry| entry.metadata().ok()).map(|found| found.len()).sum();
        if bytes > KEPT_MAX {
            self.forget();
        }
    }
}

/// A quarantine, with objects that nobody needs for long.
#[derive(Debug)]
pub struct QuarantineView {
    /// What it is a view of.
    pub quarantine: Quarantine,
    stage: StageDir,
}

impl QuarantineView {
    /// git that sees all of it.
    pub fn git(&self) -> Git {
        let place = bare_repo::quoted(&self.stage.join("objects"));
        self.quarantine.git().env("GIT_ALTERNATE_OBJECT_DIRECTORIES", OsString::from_vec(place))
    }

    /// The same where git itself makes objects: they go away, too.
    pub fn writing(&self) -> Git {
        let below = bare_repo::quoted(&self.quarantine.dir.join("objects"));
        let git = self.quarantine.git().env("GIT_OBJECT_DIRECTORY", self.stage.join("objects"));
        git.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", OsString::from_vec(below))
    }

    /// Where a pack of ours may be.
    pub fn pack(&self, number: u32) -> PathBuf {
        // git wants forty digits in a pack's name.
        self.stage.join(&format!("objects/pack/pack-{number:040}.pack"))
    }

    /// Something that goes away with it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.stage.join(name)
    }
}
