//! A Body's root: overlays of read-only lowers and one private upper.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use guest::fsmonitor::FollowedOverlay;
use proto::{
    Mechanism,
    launch::{LaunchPlan, OverlayAccess, OverlayMount, SeedEntry, Upper},
};
use rustix::{
    fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid},
    io::Errno,
};
use sys::mount::{MountAttrs, Overlay, Submounts};

use crate::{
    lower_dirs::LowerDirs,
    report::{StepError, StepExt},
};

/// The directory in which the root is assembled: a tmpfs over a directory that every host has, in the Body's mount
/// namespace only. Everything needed from below that directory is opened before.
pub const STAGE: &str = "/tmp";
/// Bounds of the stage before the Body's own data is in it.
const STAGE_OPTIONS: &str = "mode=0755,size=64k,nr_inodes=1024";

/// The assembled root.
pub struct AssembledRoot {
    /// The mechanisms that enforce it.
    pub told: Vec<Mechanism>,
    /// Read-only directories of its overlays, for the guest's fsmonitor.
    pub followed: Vec<FollowedOverlay>,
}

/// Mounts the stage. Everything needed from the directory below it must have been opened before.
pub fn mount_stage() -> Result<(), StepError> {
    rustix::process::umask(Mode::empty());
    sys::mount::mount_new("tmpfs", Path::new(STAGE), MountAttrs::default(), STAGE_OPTIONS)
        .step("mount the Body's memory")?;
    rustix::fs::mkdir(Path::new(STAGE).join("root"), Mode::from_raw_mode(0o755))
        .step("make the root's directory")
}

/// Mounts every overlay on the stage and leaves the caller in the directory of the new root.
///
/// The root of a kept Body without lowers is its upper directory itself: an overlay without lowers would slow each
/// file access by a third. It is not a mount of its own either, because the mount table shows the source path of a
/// bind mount: the mount begins two directories above the root, and the table omits mounts that begin outside the
/// reader's root.
pub fn assemble(plan: &LaunchPlan, trees: &LowerDirs) -> Result<AssembledRoot, StepError> {
    let stage = Path::new(STAGE);
    if let Upper::Memory { bytes, inodes } = plan.upper {
        sys::mount::resize(stage, &format!("size={bytes},nr_inodes={inodes}"))
            .step("bound the Body's memory")?;
    }
    let private = stage.join("private");
    match &trees.disk {
        Some(disk) => put(disk.as_fd(), &private).step("mount the upper")?,
        None => memory_upper(plan, &private).step("make the upper")?,
    }
    let mut lowers = Vec::new();
    for (index, lower) in trees.lowers.iter().enumerate() {
        let place = stage.join(format!("lower-{index}"));
        put(lower.tree.as_fd(), &place).step("mount a snapshot")?;
        lowers.push((lower.path.clone(), place));
    }
    let upper = sys::fd::open_path(&private.join("upper")).step("open the upper")?;
    plan.seeds.iter().try_for_each(|seed| place_seeds(plan, upper.as_fd(), seed))?;
    for area in plan.areas.iter().filter(|area| area.owner != 0 && plan.ids.has_root()) {
        let owner = (Some(Uid::from_raw(area.owner)), Some(Gid::from_raw(area.owner)));
        rustix::fs::chownat(&upper, area.dir_name(), owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW)
            .step("give the workspace to its user")?;
    }
    let stack = MountSources { plan, private, lowers };
    let mut told = vec![upper_record(plan)];
    for area in &plan.areas {
        told.extend(mount_area(&stack, area)?);
    }
    // If a directory cannot be followed, git stats every file, which is slower but still correct.
    let followed = plan.followed.iter().filter_map(|followed| stack.follow(followed).ok()).collect();
    Ok(AssembledRoot { told, followed })
}

/// Whether the root is the upper directory itself, inside a mount that begins above it.
fn is_upper_itself(plan: &LaunchPlan) -> bool {
    let nothing_below = plan.areas.iter().any(|area| area.at.is_empty() && area.lowers.is_empty());
    plan.upper == Upper::Disk && nothing_below && !plan.setuid
}

/// Makes the current directory, in which the root was assembled, the root, and detaches the host's.
pub fn enter(plan: &LaunchPlan) -> io::Result<()> {
    if is_upper_itself(plan) {
        sys::mount::pivot_and_enter_here(Path::new(STAGE))
    } else {
        sys::mount::pivot_here()
    }
}

fn put(tree: BorrowedFd<'_>, place: &Path) -> io::Result<()> {
    rustix::fs::mkdir(place, Mode::from_raw_mode(0o755))?;
    sys::mount::attach(tree, place)
}

fn upper_record(plan: &LaunchPlan) -> Mechanism {
    let name = "private root";
    match plan.upper {
        Upper::Memory { .. } => {
            Mechanism::enforced(name, "writes go to memory of the Body's own and end with it")
        }
        Upper::Disk => Mechanism::enforced(name, "writes go to the Body's own upper on disk"),
    }
}

fn memory_upper(plan: &LaunchPlan, private: &Path) -> io::Result<()> {
    let mode = Mode::from_raw_mode(0o755);
    rustix::fs::mkdir(private, mode)?;
    for kind in ["upper", "work"] {
        let dir = private.join(kind);
        rustix::fs::mkdir(&dir, mode)?;
        let private = plan.areas.iter().filter(|area| area.kind == OverlayAccess::Private);
        private.into_iter().try_for_each(|area| rustix::fs::mkdir(dir.join(area.dir_name()), mode))?;
    }
    Ok(())
}

/// Writes a seed into the upper, unless its path exists.
///
/// Trust: an upper may come from an earlier run of the Body, and hold links to anywhere. None is followed on the path
/// to a seed; if the Body changed that path, the seed is skipped.
fn place_seeds(plan: &LaunchPlan, upper: BorrowedFd<'_>, seed: &SeedEntry) -> Result<(), StepError> {
    let (SeedEntry::Dir { path, .. }
    | SeedEntry::Link { path, .. }
    | SeedEntry::File { path, .. }
    | SeedEntry::Hidden { path }) = seed;
    let step = || format!("prepare the root ({seed:?})");
    if matches!(plan.upper, Upper::Memory { .. }) {
        // The upper is new, so it contains no link of a Body.
        let above = path.rsplit_once('/').map_or(".", |(above, _)| above);
        return match place_seed(plan, upper, path, seed) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !is_planned(plan, above) => Ok(()),
            put => put.step(step()),
        };
    }
    let (above, name) = path.rsplit_once('/').unwrap_or((".", path));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let above = match rustix::fs::openat2(upper, above, flags, Mode::empty(), resolve) {
        Err(Errno::LOOP | Errno::NOTDIR | Errno::NOENT | Errno::XDEV) if !is_planned(plan, above) => {
            return Ok(());
        }
        opened => opened.step(step())?,
    };
    place_seed(plan, above.as_fd(), name, seed).step(step())
}

fn place_seed(plan: &LaunchPlan, above: BorrowedFd<'_>, name: &str, seed: &SeedEntry) -> io::Result<()> {
    let put = match seed {
        SeedEntry::Dir { mode, owner, .. } => make_dir(plan, above, name, *mode, *owner),
        SeedEntry::Link { target, .. } => make_link(above, name, target),
        SeedEntry::File { contents, .. } => make_file(above, name, contents),
        SeedEntry::Hidden { .. } => {
            rustix::fs::mknodat(above, name, FileType::CharacterDevice, Mode::empty(), 0)
                .map_err(io::Error::from)
        }
    };
    put.or_else(|error| if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })
}

/// Whether this is the directory of an overlay, which no Body can change.
fn is_planned(plan: &LaunchPlan, dir: &str) -> bool {
    plan.areas.iter().any(|area| area.dir_name() == dir)
}

fn make_dir(plan: &LaunchPlan, upper: BorrowedFd<'_>, path: &str, mode: u32, owner: u32) -> io::Result<()> {
    // The umask is empty here, so the mode is exact.
    rustix::fs::mkdirat(upper, path, Mode::from_raw_mode(mode))?;
    if plan.ids.has_root() && owner != 0 {
        rustix::fs::chownat(
            upper,
            path,
            Some(Uid::from_raw(owner)),
            Some(Gid::from_raw(owner)),
            AtFlags::empty(),
        )?;
    }
    Ok(())
}

/// Makes a link. An empty directory gives way: it was a mount point, before the host's directory became a link.
fn make_link(upper: BorrowedFd<'_>, path: &str, target: &str) -> io::Result<()> {
    match rustix::fs::symlinkat(target, upper, path) {
        Err(Errno::EXIST) if rustix::fs::unlinkat(upper, path, AtFlags::REMOVEDIR).is_ok() => {
            Ok(rustix::fs::symlinkat(target, upper, path)?)
        }
        made => Ok(made?),
    }
}

fn make_file(upper: BorrowedFd<'_>, path: &str, contents: &str) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(upper, path, flags, Mode::from_raw_mode(0o644))?;
    File::from(file).write_all(contents.as_bytes())
}

/// The sources of all overlays.
struct MountSources<'a> {
    plan: &'a LaunchPlan,
    /// The directory with `upper` and `work`.
    private: PathBuf,
    /// Lowers of the plan, and the paths at which they are mounted instead.
    lowers: Vec<(PathBuf, PathBuf)>,
}

fn mount_area(stack: &MountSources<'_>, area: &OverlayMount) -> Result<Option<Mechanism>, StepError> {
    let step = || format!("mount /{}", area.at);
    if area.at.is_empty() {
        let place =
            if is_upper_itself(stack.plan) { stack.upper(area) } else { Path::new(STAGE).join("root") };
        if !is_upper_itself(stack.plan) {
            stack.mount(area, &place).step(step())?;
        }
        rustix::process::chdir(&place).step("enter the root's directory")?;
        return Ok(None);
    }
    // On the path to a mount point, an earlier run of the Body may have left a link.
    let held = match make_area_place(area) {
        Ok(held) => held,
        Err(error) if is_host_place(area) => return Ok(Some(hidden_record(area, &error))),
        Err(error) => return Err(error).step(step()),
    };
    let place = sys::fd::path_of(held.as_fd());
    if is_host_place(area) && area.lowers.last().is_some_and(|lower| !lower.path.is_dir()) {
        return Ok(Some(hidden_record(area, &io::ErrorKind::NotFound.into())));
    }
    if area.kind == OverlayAccess::ReadOnly {
        return bind_read_only(area, &place).map(|()| None);
    }
    match stack.mount(area, &place) {
        Ok(()) => Ok(None),
        // EINVAL: the lower has submounts, which a user namespace may not leave out.
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            read_only_area(area, &place)
        }
        Err(error) => Err(error).step(step()),
    }
}

/// Opens the mount point of an area, and creates it if it is missing. Follows no link.
fn make_area_place(area: &OverlayMount) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let at = Path::new(".").join(&area.at);
    let opened =
        if area.at.contains('/') { Err(Errno::NOENT) } else { rustix::fs::open(&at, flags, Mode::empty()) };
    match opened {
        Err(Errno::NOENT) => {
            let place = crate::kernel_mounts::make_place(Path::new(&area.at), true)?;
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&place)?.st_mode);
            if kind == FileType::Directory { Ok(place) } else { Err(io::ErrorKind::NotADirectory.into()) }
        }
        opened => Ok(opened?),
    }
}

/// The record of a directory of the host that this root cannot show. The Body starts without it.
fn hidden_record(area: &OverlayMount, error: &io::Error) -> Mechanism {
    let reason = match error.kind() {
        io::ErrorKind::NotFound => "the host has lost it".to_owned(),
        _ => format!("the Body has something else there: {error}"),
    };
    Mechanism::degraded(format!("host /{}", area.at), reason)
}

/// Whether the directory above belongs to the host, so that no Body can change it.
fn is_host_place(area: &OverlayMount) -> bool {
    area.lowers.iter().any(|lower| lower.written_as.is_none())
}

impl MountSources<'_> {
    fn mount(&self, area: &OverlayMount, place: &Path) -> io::Result<()> {
        let upper = self.upper(area);
        let mut lowers: Vec<&Path> = area.lowers.iter().map(|lower| self.lower(&lower.path)).collect();
        if lowers.is_empty() && matches!(self.plan.upper, Upper::Memory { .. }) {
            return sys::mount::bind_plain(&upper, place);
        }
        let empty = Path::new(STAGE).join("empty");
        if lowers.is_empty() {
            // The mount table shows the source path of a bind mount; of an overlay it shows only paths on the stage.
            match rustix::fs::mkdir(&empty, Mode::from_raw_mode(0o755)) {
                // Several overlays may have no lowers.
                Ok(()) | Err(Errno::EXIST) => lowers.push(&empty),
                Err(errno) => return Err(errno.into()),
            }
        }
        let work = self.private.join("work").join(area.dir_name());
        let volatile = matches!(self.plan.upper, Upper::Memory { .. });
        Overlay { lowers: &lowers, upper: &upper, work: &work, volatile, setuid: self.plan.setuid }
            .mount(place)
    }

    fn upper(&self, area: &OverlayMount) -> PathBuf {
        self.private.join("upper").join(area.dir_name())
    }

    /// Opens read-only directories of an overlay that appear in no mount table.
    fn follow(&self, wanted: &proto::launch::FollowedMount) -> io::Result<FollowedOverlay> {
        let area = self.plan.areas.iter().find(|area| area.at == wanted.at).ok_or(io::ErrorKind::NotFound)?;
        let view = |path: &Path| -> io::Result<OwnedFd> {
            let tree = sys::mount::clone_tree(path, Submounts::No)?;
            sys::mount::restrict(
                tree.as_fd(),
                MountAttrs { read_only: true, no_exec: true, ..MountAttrs::default() },
            )?;
            Ok(tree)
        };
        let lowers = area.lowers.iter().map(|lower| view(self.lower(&lower.path)));
        Ok(FollowedOverlay {
            at: wanted.at.clone(),
            token: wanted.token.clone(),
            upper: view(&self.upper(area))?,
            lowers: lowers.collect::<io::Result<_>>()?,
            above: wanted.above,
        })
    }

    fn lower<'a>(&'a self, path: &'a Path) -> &'a Path {
        self.lowers.iter().find(|(asked, _)| asked == path).map_or(path, |(_, found)| found)
    }
}

fn read_only_area(area: &OverlayMount, place: &Path) -> Result<Option<Mechanism>, StepError> {
    bind_read_only(area, place)?;
    let reason = "the host has mounts below it, so it is read-only and without the Body's own changes";
    Ok(Some(Mechanism::degraded(format!("private /{}", area.at), reason)))
}

/// Mounts the host's own directory read-only, with its submounts.
fn bind_read_only(area: &OverlayMount, place: &Path) -> Result<(), StepError> {
    let Some(lowest) = area.lowers.last() else { return Ok(()) };
    let attrs = MountAttrs { read_only: true, ..MountAttrs::default() };
    sys::mount::bind(&lowest.path, place, attrs, Submounts::Too).step(format!("mount /{}", area.at))
}
