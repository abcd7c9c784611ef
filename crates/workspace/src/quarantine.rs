//! The repository of ours, beside a Body, where its work becomes git objects before anybody else sees them.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use proto::workspace::Workspace;

use crate::{
    error::{During, WorkspaceError},
    git::Git,
    scratch::{self, Stage},
};

/// The quarantine of one workspace.
#[derive(Debug, Clone)]
pub struct Quarantine {
    dir: PathBuf,
}

impl Quarantine {
    /// Opens it, and makes it if need be. It sees the objects of the user's repository, and changes none.
    pub fn open(body_dir: &Path, workspace: &Workspace) -> Result<Self, WorkspaceError> {
        if !workspace.repository.join("objects").is_dir() {
            return Err(WorkspaceError::NotFound("the repository that the workspace came from is no longer there".into()));
        }
        let top = body_dir.join("git");
        std::fs::create_dir_all(&top).during("make a quarantine")?;
        let dir = top.join(&workspace.name);
        if !dir.join("HEAD").exists() {
            let shallow = workspace.repository.join("shallow");
            scratch::make(&dir, &[&workspace.repository.join("objects")], Some(&shallow)).during("make a quarantine")?;
        }
        Ok(Self { dir })
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// git in it, with little memory: what it reads was made by a Body.
    pub fn git(&self) -> Git {
        Git::at(&self.dir).tight()
    }

    /// Has git index a pack, apart from everything else: `index-pack` keeps some of what it then refuses. Only a pack
    /// that it found sound is moved here.
    pub fn take_pack(&self, args: &[&str], pack: File) -> Result<(), WorkspaceError> {
        let stage = self.stage()?;
        let apart = stage.join("git");
        scratch::make(&apart, &[&self.dir.join("objects")], Some(&self.dir.join("shallow"))).during("make room for a pack")?;
        Git::at(&apart).tight().feed_file(args, pack)?;
        let mut files: Vec<_> = std::fs::read_dir(apart.join("objects/pack")).during("list a pack")?.flatten().map(|entry| entry.file_name()).collect();
        // The index last: a pack without one is none.
        files.sort_by_key(|name| name.to_string_lossy().ends_with(".idx"));
        for name in files {
            std::fs::rename(apart.join("objects/pack").join(&name), self.dir.join("objects/pack").join(&name)).during("move a pack")?;
        }
        Ok(())
    }

    /// A directory of ours that goes away.
    pub fn stage(&self) -> Result<Stage, WorkspaceError> {
        let drawn = proto::event::hex(&sys::random::bytes::<8>().during("draw a name")?);
        Stage::make(self.dir.join(format!("stage-{drawn}"))).during("make room for a copy")
    }
}
