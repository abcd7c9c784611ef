//! The quarantine: a bare repository in the Body's directory in which its work becomes git objects first.
//!
//! It keeps the objects of the Body's git between saves, so that git checks them only once. Objects made from
//! the Body's files are in a stage directory, which is removed after the save.
//!
//! Invariant: the quarantine is only a cache. Lost, torn or discarded objects are made again from the Body's
//! files.

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

/// Time limit of one look, save or landing.
pub const TIME_MAX: Duration = Duration::from_secs(1800);
/// Size that the quarantine may keep between saves.
const KEPT_MAX: u64 = 1 << 30;

/// The quarantine of one workspace.
#[derive(Debug, Clone)]
pub struct Quarantine {
    dir: PathBuf,
    until: Instant,
}

impl Quarantine {
    /// Opens or creates it. It reads the objects of the user's repository and changes none. Every git in it
    /// and in the user's repository ends within `time_max`.
    pub fn open(
        body_dir: &Path,
        name: &str,
        repository: &Path,
        time_max: Duration,
    ) -> Result<Self, WorkspaceError> {
        if !repository.join("objects").is_dir() {
            return Err(WorkspaceError::NotFound(
                "the repository of the workspace no longer exists on the host".into(),
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

    /// The directory of the quarantine.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// git in the quarantine, with limited memory, because it reads objects that a Body made.
    pub fn git(&self) -> Git {
        Git::at(&self.dir).rlimited().deadline(self.until)
    }

    /// git in the user's repository, with the quarantine's deadline.
    pub fn user(&self, workspace: &Workspace) -> Git {
        Git::at(&workspace.repository).deadline(self.until)
    }

    /// Indexes a pack with `index-pack` in a stage directory, because `index-pack` leaves files behind when
    /// it refuses a pack. A pack that passes is moved into the quarantine.
    pub fn take_pack(&self, args: &[&str], pack: File) -> Result<(), WorkspaceError> {
        let stage = self.stage()?;
        let apart = stage.join("git");
        bare_repo::make(&apart, &[&self.dir.join("objects")], Some(&self.dir.join("shallow")))
            .during("create a directory for a pack")?;
        Git::at(&apart).rlimited().deadline(self.until).scratch().feed_file(args, pack)?;
        let mut files: Vec<_> = fs::read_dir(apart.join("objects/pack"))
            .during("list a pack")?
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        // The index is moved last: git ignores a pack without one.
        files.sort_by_key(|name| name.to_string_lossy().ends_with(".idx"));
        for name in files {
            fs::rename(apart.join("objects/pack").join(&name), self.dir.join("objects/pack").join(&name))
                .during("move a pack")?;
        }
        Ok(())
    }

    /// Creates a temporary directory.
    pub fn stage(&self) -> Result<StageDir, WorkspaceError> {
        let drawn =
            proto::event::hex(&sys::random::bytes::<8>().during("read random bytes from the kernel")?);
        StageDir::make(self.dir.join(format!("stage-{}-{drawn}", std::process::id())))
            .during("create a temporary directory")
    }

    /// Opens a view: the quarantine's objects, and a temporary directory for more.
    pub fn view(&self) -> Result<QuarantineView, WorkspaceError> {
        let stage = self.stage()?;
        fs::create_dir_all(stage.join("objects/pack")).during("create a directory for objects")?;
        Ok(QuarantineView { quarantine: self.clone(), stage })
    }

    /// Whether the quarantine holds objects of an earlier save.
    pub fn has_objects(&self) -> bool {
        fs::read_dir(self.dir.join("objects/pack")).is_ok_and(|mut packs| packs.next().is_some())
    }

    /// Deletes all objects: they are damaged or too large.
    pub fn forget(&self) {
        let _ = fs::remove_dir_all(self.dir.join("taken"));
        for entry in fs::read_dir(self.dir.join("objects/pack")).into_iter().flatten().flatten() {
            let _ = fs::remove_file(entry.path());
        }
    }

    /// Deletes all objects if they are too large, after they were saved.
    pub fn tidy(&self) {
        let packs = fs::read_dir(self.dir.join("objects/pack")).into_iter().flatten().flatten();
        let bytes: u64 = packs.filter_map(|entry| entry.metadata().ok()).map(|found| found.len()).sum();
        if bytes > KEPT_MAX {
            self.forget();
        }
    }
}

/// A quarantine with temporary objects, which go when the view is dropped.
#[derive(Debug)]
pub struct QuarantineView {
    /// The quarantine.
    pub quarantine: Quarantine,
    stage: StageDir,
}

impl QuarantineView {
    /// git that reads the objects of the view.
    pub fn git(&self) -> Git {
        let place = bare_repo::quoted(&self.stage.join("objects"));
        self.quarantine.git().env("GIT_ALTERNATE_OBJECT_DIRECTORIES", OsString::from_vec(place))
    }

    /// git that also writes new objects to the view's temporary directory.
    pub fn writing(&self) -> Git {
        let below = bare_repo::quoted(&self.quarantine.dir.join("objects"));
        let git = self.quarantine.git().env("GIT_OBJECT_DIRECTORY", self.stage.join("objects"));
        git.env("GIT_ALTERNATE_OBJECT_DIRECTORIES", OsString::from_vec(below))
    }

    /// The path of a temporary pack.
    pub fn pack(&self, number: u32) -> PathBuf {
        // git requires forty hexadecimal digits in a pack's name.
        self.stage.join(&format!("objects/pack/pack-{number:040}.pack"))
    }

    /// A path in the view's temporary directory.
    pub fn join(&self, name: &str) -> PathBuf {
        self.stage.join(name)
    }
}
