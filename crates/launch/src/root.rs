//! A Body's root: areas of read-only lowers under one private upper.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use proto::{
    Mechanism,
    launch::{Area, Plan, Seed, Upper},
};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid},
    io::Errno,
};
use sys::mount::{Attrs, Below, Overlay};

use crate::{
    child::Luggage,
    report::{Step, StepError},
};

/// Where the root is put together: a tmpfs over the Body's own directory, in the Body's mount namespace only.
pub const STAGE: &str = "root";

/// Mounts every area and leaves the caller in the new root's directory.
pub fn assemble(plan: &Plan, luggage: &Luggage) -> Result<Vec<Mechanism>, StepError> {
    // Opened before the stage covers it.
    let disk = |name| open_below(luggage.dir.as_fd(), name);
    let (upper, work) = match plan.upper {
        Upper::Disk => (Some(disk("upper").step("open the upper")?), Some(disk("work").step("open the work directory")?)),
        Upper::Memory { .. } => (None, None),
    };
    let stage = mount_stage(plan, luggage)?;
    let (upper, work) = match (upper, work) {
        (Some(upper), Some(work)) => (upper, work),
        _ => memory_upper(plan, stage.as_fd())?,
    };
    plan.seeds.iter().try_for_each(|seed| plant(plan, upper.as_fd(), seed))?;
    let stack = Stack { plan, luggage, stage, upper, work };
    let mut told = vec![upper_record(plan)];
    for area in &plan.areas {
        told.extend(mount_area(&stack, area)?);
    }
    Ok(told)
}

fn upper_record(plan: &Plan) -> Mechanism {
    let name = "private root";
    match plan.upper {
        Upper::Memory { .. } => Mechanism::enforced(name, "writes go to memory of the Body's own and end with it"),
        Upper::Disk => Mechanism::enforced(name, "writes go to the Body's own upper on disk"),
    }
}

fn mount_stage(plan: &Plan, luggage: &Luggage) -> Result<OwnedFd, StepError> {
    let (bytes, inodes) = match plan.upper {
        Upper::Memory { bytes, inodes } => (bytes, inodes),
        Upper::Disk => (64 << 10, 16),
    };
    let options = [("mode", "0755"), ("size", &bytes.to_string()), ("nr_inodes", &inodes.to_string())];
    let stage = sys::mount::new_detached("tmpfs", &options).step("make the Body's memory")?;
    rustix::fs::mkdirat(&stage, STAGE, Mode::from_raw_mode(0o755)).step("make the root's directory")?;
    sys::mount::attach(stage.as_fd(), &sys::fd::path_of(luggage.dir.as_fd())).step("mount the Body's memory")?;
    Ok(stage)
}

fn memory_upper(plan: &Plan, stage: BorrowedFd<'_>) -> Result<(OwnedFd, OwnedFd), StepError> {
    let make = |name: &str| -> io::Result<OwnedFd> {
        rustix::fs::mkdirat(stage, name, Mode::from_raw_mode(0o755))?;
        let dir = open_below(stage, name)?;
        for area in &plan.areas {
            rustix::fs::mkdirat(&dir, area.dir_name(), Mode::from_raw_mode(0o755))?;
        }
        Ok(dir)
    };
    Ok((make("upper").step("make the upper")?, make("work").step("make the work directory")?))
}

fn open_below(dir: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(dir, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Puts a seed into the upper, unless something is there.
fn plant(plan: &Plan, upper: BorrowedFd<'_>, seed: &Seed) -> Result<(), StepError> {
    let planted = match seed {
        Seed::Dir { path, mode, owner } => make_dir(plan, upper, path, *mode, *owner),
        Seed::Link { path, target } => rustix::fs::symlinkat(target, upper, path).map_err(io::Error::from),
        Seed::File { path, contents } => make_file(upper, path, contents),
        Seed::Hidden { path } => {
            rustix::fs::mknodat(upper, path, FileType::CharacterDevice, Mode::empty(), 0).map_err(io::Error::from)
        }
    };
    match planted {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        planted => planted.step(format!("prepare the root ({seed:?})")),
    }
}

fn make_dir(plan: &Plan, upper: BorrowedFd<'_>, path: &str, mode: u32, owner: u32) -> io::Result<()> {
    rustix::fs::mkdirat(upper, path, Mode::RWXU)?;
    rustix::fs::chmodat(upper, path, Mode::from_raw_mode(mode), AtFlags::empty())?;
    if plan.ids.has_root() && owner != 0 {
        rustix::fs::chownat(upper, path, Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner)), AtFlags::empty())?;
    }
    Ok(())
}

fn make_file(upper: BorrowedFd<'_>, path: &str, contents: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(upper, path, flags, Mode::from_raw_mode(0o644))?;
    File::from(file).write_all(contents.as_bytes())
}

/// What every area is mounted from.
struct Stack<'a> {
    plan: &'a Plan,
    luggage: &'a Luggage,
    stage: OwnedFd,
    upper: OwnedFd,
    work: OwnedFd,
}

fn mount_area(stack: &Stack<'_>, area: &Area) -> Result<Option<Mechanism>, StepError> {
    let step = || format!("mount the area /{}", area.at);
    if area.at.is_empty() {
        let place = sys::fd::path_of(stack.stage.as_fd()).join(STAGE);
        stack.mount(area, &place).step(step())?;
        rustix::process::chdir(&place).step("enter the root's directory")?;
        return Ok(None);
    }
    let place = Path::new(".").join(&area.at);
    match stack.mount(area, &place) {
        Ok(()) => Ok(None),
        // EINVAL: the lower has mounts below it, which a user namespace may not leave out.
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => read_only_area(area, &place),
        Err(error) => Err(error).step(step()),
    }
}

impl Stack<'_> {
    fn mount(&self, area: &Area, place: &Path) -> io::Result<()> {
        let private = sys::fd::path_of(self.upper.as_fd()).join(area.dir_name());
        if area.lowers.is_empty() {
            return sys::mount::bind(&private, place, Attrs::default(), Below::No);
        }
        let lowers: Vec<PathBuf> = area.lowers.iter().map(|lower| self.lower(&lower.path)).collect();
        let lowers: Vec<&Path> = lowers.iter().map(PathBuf::as_path).collect();
        let work = sys::fd::path_of(self.work.as_fd()).join(area.dir_name());
        let volatile = matches!(self.plan.upper, Upper::Memory { .. });
        Overlay { lowers: &lowers, upper: &private, work: &work, volatile }.mount(place)
    }

    /// The lower itself, or its view under this Body's ids.
    fn lower(&self, path: &Path) -> PathBuf {
        let opened = self.luggage.lowers.iter().find(|opened| opened.path == path);
        opened.map_or_else(|| path.to_owned(), |opened| sys::fd::path_of(opened.tree.as_fd()))
    }
}

fn read_only_area(area: &Area, place: &Path) -> Result<Option<Mechanism>, StepError> {
    let Some(lowest) = area.lowers.last() else { return Ok(None) };
    let attrs = Attrs { read_only: true, ..Attrs::default() };
    sys::mount::bind(&lowest.path, place, attrs, Below::Too).step(format!("show /{} read-only", area.at))?;
    let reason = "the host has mounts below it, so it is shown read-only and without the Body's own changes";
    Ok(Some(Mechanism::degraded(format!("private /{}", area.at), reason)))
}
