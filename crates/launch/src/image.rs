//! `pal-launch image`: makes a read-only file system image of a tree, with the rights of the tree's ids only.
//!
//! A user who starts a microVM is root in it, so files that this host protects must not get into an image. The tree
//! is read with ids that have no rights on the host, and files that those cannot read are left out.

use std::{
    fs::File,
    io::{self, BufRead, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use proto::vm::{ImageOrder, ImageSource, PACK};
use rustix::fs::{Access, AtFlags, CWD};
use sys::{
    mount::{MountAttrs, Submounts},
    namespace::ForkResult,
};

use crate::{
    report::{StepError, StepExt},
    userns_fs,
};

const ORDER_LEN_MAX: u64 = 1 << 20;
/// The directory where the tree of this host is assembled, in a mount namespace of this process only.
const STAGE: &str = "/tmp";
const DEPTH_MAX: usize = 256;

/// Makes one image; the order is a line of JSON on standard input.
pub fn main() -> ExitCode {
    match make_image() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = io::stderr().write_all(error.to_string().as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn make_image() -> Result<(), StepError> {
    let order = read_order().step("read the order")?;
    // Before the ids change, because the new ids may not search the path.
    let out: OwnedFd = File::options().read(true).write(true).open(&order.out).step("open the image")?.into();
    // An ordinary user opens the layers in the new namespaces, because it may do so only there.
    let layers = if sys::caps::is_host_root() { Some(open_layers(&order.source)?) } else { None };
    let (ready, notify) = rustix::pipe::pipe().step("make a pipe")?;
    match sys::namespace::fork_into(sys::namespace::USER | sys::namespace::MOUNTS, None)
        .step("make a user namespace")?
    {
        ForkResult::Child => {
            drop(notify);
            let _ = rustix::io::read(&ready, &mut [0u8; 1]);
            let error = exec_mkfs(&order, &out, layers);
            let _ = io::stderr().write_all(error.to_string().as_bytes());
            std::process::exit(1)
        }
        ForkResult::Parent(pid) => {
            userns_fs::map(pid, &order.ids)?;
            rustix::io::write(&notify, b"1").step("report the mapped ids")?;
            let waited =
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).step("wait")?;
            std::process::exit(waited.and_then(|(_, status)| status.exit_status()).unwrap_or(1))
        }
    }
}

fn read_order() -> io::Result<ImageOrder> {
    let mut line = String::new();
    io::Read::take(io::stdin().lock(), ORDER_LEN_MAX).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

fn open_layers(source: &ImageSource) -> Result<Vec<OwnedFd>, StepError> {
    let roots = match source {
        ImageSource::Layer(root) => std::slice::from_ref(root),
        ImageSource::Pack(roots) => roots,
        ImageSource::Host { .. } => &[],
    };
    roots.iter().map(|root| sys::mount::clone_tree(root, Submounts::No).step("open the layer")).collect()
}

/// Executes mkfs; returns only on failure.
fn exec_mkfs(order: &ImageOrder, out: &OwnedFd, layers: Option<Vec<OwnedFd>>) -> StepError {
    match prepare(order, out, layers) {
        Ok(mut command) => StepError::new("run the image builder", command.exec().to_string()),
        Err(error) => error,
    }
}

fn prepare(order: &ImageOrder, out: &OwnedFd, layers: Option<Vec<OwnedFd>>) -> Result<Command, StepError> {
    sys::namespace::become_ids(0, 0, order.ids.has_root()).step("take the tree's ids")?;
    let mut command = Command::new(&order.program);
    command.args(["--quiet", "--preserve-mtime"]);
    let layers = layers.map_or_else(|| open_layers(&order.source), Ok)?;
    let root = Path::new(STAGE).join("root");
    match &order.source {
        ImageSource::Host { areas, links, .. } => stage(areas, links)?,
        ImageSource::Layer(_) => {
            mount_tmpfs()?;
            layers.iter().try_for_each(|tree| attach_layer(tree, &root))?;
        }
        ImageSource::Pack(_) => {
            mount_tmpfs()?;
            std::fs::create_dir(&root).step("make a directory")?;
            std::fs::write(root.join(PACK), layers.len().to_string()).step("count the layers")?;
            for (index, tree) in layers.iter().enumerate() {
                attach_layer(tree, &root.join(index.to_string()))?;
            }
        }
    }
    rustix::process::chdir(&root).step("enter the tree")?;
    if let ImageSource::Host { hidden, .. } = &order.source {
        command.arg("--all-root").arg("-x-1");
        let mut left_out: Vec<PathBuf> = hidden.iter().map(PathBuf::from).collect();
        unreadable(Path::new(""), 0, &mut left_out);
        command.args(left_out.iter().map(|path| format!("--exclude-path={}", path.display())));
    }
    rustix::io::fcntl_setfd(out, rustix::io::FdFlags::empty()).step("keep the image open")?;
    command
        .arg(format!("/proc/self/fd/{}", out.as_raw_fd()))
        .arg(".")
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    Ok(command)
}

fn attach_layer(layer: &OwnedFd, place: &Path) -> Result<(), StepError> {
    std::fs::create_dir(place).step("make a directory")?;
    sys::mount::attach(layer.as_fd(), place).step("mount the layer")
}

fn mount_tmpfs() -> Result<(), StepError> {
    sys::mount::make_private().step("make mounts private")?;
    sys::mount::mount_new("tmpfs", Path::new(STAGE), MountAttrs::default(), "mode=0755,size=16m")
        .step("mount a tmpfs")
}

fn stage(areas: &[String], links: &[(String, String)]) -> Result<(), StepError> {
    mount_tmpfs()?;
    let root = Path::new(STAGE).join("root");
    let read_only = MountAttrs { read_only: true, ..MountAttrs::default() };
    for area in areas {
        let place = root.join(area);
        std::fs::create_dir_all(&place).step("make a directory")?;
        sys::mount::bind(&Path::new("/").join(area), &place, read_only, Submounts::Too)
            .step(format!("mount /{area}"))?;
    }
    for (name, target) in links {
        std::os::unix::fs::symlink(target, root.join(name)).step("make a link")?;
    }
    Ok(())
}

/// Collects the paths below the current directory that these ids cannot read.
fn unreadable(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let here = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    for entry in std::fs::read_dir(here).into_iter().flatten().flatten() {
        let path = dir.join(entry.file_name());
        let Ok(kind) = entry.file_type() else { continue };
        let wanted = if kind.is_dir() { Access::READ_OK | Access::EXEC_OK } else { Access::READ_OK };
        // Reading a symbolic link needs no permission, and devices, FIFOs and sockets have no contents to read.
        let readable = !(kind.is_dir() || kind.is_file())
            || rustix::fs::accessat(CWD, &path, wanted, AtFlags::empty()).is_ok();
        match (readable, kind.is_dir()) {
            (false, _) => found.push(path),
            (true, true) if depth < DEPTH_MAX => unreadable(&path, depth + 1, found),
            _ => {}
        }
    }
}
