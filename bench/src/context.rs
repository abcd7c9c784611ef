//! Where the measuring happens: a directory of its own, the programs, and what is removed in the end.

use std::{
    fs, io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use fleet::{Durability, Fleet, FleetConfig, Force};

use crate::{args::BenchArgs, groups};

/// Everything sections need.
pub struct BenchContext {
    /// How to measure.
    pub args: BenchArgs,
    /// The `pal` that is measured: a copy, as an installed one is. The linker writes a program through a mapping, so it
    /// is cached page by page, and every run of that very file pays for it until it was read from the disk again.
    pub pal: PathBuf,
    /// This program, for work inside.
    pub me: PathBuf,
    /// A directory for peers, removed in the end.
    pub scratch: PathBuf,
    /// Where Bodies are, removed in the end.
    pub data: PathBuf,
    groups: groups::CgroupsBefore,
}

impl BenchContext {
    /// Finds `pal` beside this program, installs it and makes the directories.
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
        // Bodies read what is mounted from here, with ids of their own.
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

    /// The fleet of the data directory, as the command line opens it.
    pub fn fleet(&self) -> io::Result<Fleet> {
        self.fleet_with(Durability::Process)
    }

    /// The same without anything made ahead.
    pub fn plain_fleet(&self) -> io::Result<Fleet> {
        Fleet::open(FleetConfig { data: self.data.clone(), durability: Durability::Process })
            .map_err(io::Error::other)
    }

    /// The same with another promise.
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
