//! The environment of a run: its own directory, the programs, and the cleanup.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use fleet::{Durability, Fleet, FleetConfig, Force};

use crate::{args::BenchArgs, groups};

/// Everything that sections need.
pub struct BenchContext {
    /// The options.
    pub args: BenchArgs,
    /// The measured `pal`: a copy, like an installed one. The linker writes a program through a mapping, so
    /// its page cache is fragmented, and every run of that very file is slower until it is read from disk
    /// again.
    pub pal: PathBuf,
    /// This program, for the workload inside.
    pub me: PathBuf,
    /// A directory for peers, removed at the end.
    pub scratch: PathBuf,
    /// The data directory, removed at the end.
    pub data: PathBuf,
    groups: groups::CgroupsBefore,
}

impl BenchContext {
    /// Finds `pal` beside this program, copies it and makes the directories.
    pub fn prepare(args: BenchArgs) -> io::Result<Self> {
        let me = std::env::current_exe()?;
        let built = me.with_file_name("pal");
        if !built.exists() {
            return Err(io::Error::other(format!(
                "there is no {}; build it: cargo build --release -p cli",
                built.display()
            )));
        }
        let scratch = PathBuf::from(format!("/var/tmp/palisade-bench-{}", std::process::id()));
        // Bodies read mounts from here, with ids of their own.
        fs::DirBuilder::new().mode(0o755).create(&scratch)?;
        let data = args.data.clone().unwrap_or_else(|| scratch.join("data"));
        if data.exists() {
            fs::remove_dir_all(&scratch)?;
            return Err(io::Error::other(format!(
                "{} exists; it would be removed in the end",
                data.display()
            )));
        }
        let pal = scratch.join("pal");
        fs::copy(&built, &pal)?;
        Ok(Self { args, pal, me, scratch, data, groups: groups::CgroupsBefore::look() })
    }

    /// The fleet of the data directory, opened as the command line does.
    pub fn fleet(&self) -> io::Result<Fleet> {
        self.fleet_with(Durability::Process)
    }

    /// The fleet of the data directory, without a pool.
    pub fn plain_fleet(&self) -> io::Result<Fleet> {
        Fleet::open(FleetConfig { data: self.data.clone(), durability: Durability::Process })
            .map_err(io::Error::other)
    }

    /// The fleet of the data directory, with another durability.
    pub fn fleet_with(&self, durability: Durability) -> io::Result<Fleet> {
        Fleet::open_to_serve(FleetConfig { data: self.data.clone(), durability }).map_err(io::Error::other)
    }

    /// A directory below the scratch one.
    pub fn dir(&self, name: &str) -> io::Result<PathBuf> {
        let dir = self.scratch.join(name);
        fs::create_dir_all(&dir)?;
        Ok(dir)
    }

    fn tidy(&self) -> io::Result<()> {
        self.groups.restore();
        if self.data.exists() {
            let fleet = self.fleet()?;
            let runtime = crate::library::runtime()?;
            for view in fleet.list().map_err(io::Error::other)? {
                runtime.block_on(fleet.remove(view.id(), Force::Yes)).map_err(io::Error::other)?;
            }
            drop(fleet);
            remove(&self.data)?;
        }
        remove(&self.scratch)
    }
}

fn remove(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Drop for BenchContext {
    fn drop(&mut self) {
        if let Err(error) = self.tidy() {
            eprintln!(
                "warning: cannot remove {} and {}: {error}",
                self.scratch.display(),
                self.data.display()
            );
        }
    }
}
