//! `pal-launch tree copy FROM TO`, `tree remove DIR`, `tree unpack DIR` and `tree extract DISK FROM TO`: file
//! operations with the rights of a Body's ids.
//!
//! An ordinary user's Body may leave files that belong to the Body's own ids, or directories without any permission.
//! So the work is done as root in a user namespace with the same ids. The ids are the first line of standard input; a
//! layer to unpack follows it.

use std::{
    ffi::{CString, OsString},
    fs::File,
    io::{self, BufRead},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    process::ExitCode,
};

use proto::spec::Ids;
use rustix::fs::{Mode, OFlags};
use sys::namespace::{ForkResult, IdMapLine};

use crate::{
    ext4, idmap,
    report::{StepError, StepExt},
    unpack,
};

const IDS_LEN_MAX: u64 = 1 << 20;

/// Files and directories that were opened before the ids change.
enum HeldPlace {
    Nothing,
    Layer(OwnedFd),
    Copy { disk: File, to: OwnedFd },
}

/// Runs one command.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    match perform(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = io::Write::write_all(&mut io::stderr(), error.to_string().as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn perform(arguments: &[OsString]) -> Result<(), StepError> {
    let ids = read_ids().step("read the ids")?;
    // Before the ids change, because the new ids may not search the path.
    let place = match arguments {
        [verb, dir] if verb == "unpack" => HeldPlace::Layer(open(dir).step("open the layer")?),
        [verb, disk, _, to] if verb == "extract" => HeldPlace::Copy {
            disk: File::open(disk).step("open the disk")?,
            to: open(to).step("open the copy")?,
        },
        _ => HeldPlace::Nothing,
    };
    let (ready, notify) = rustix::pipe::pipe().step("make a pipe")?;
    match sys::namespace::fork_into(sys::namespace::USER, None).step("make a user namespace")? {
        ForkResult::Child => {
            drop(notify);
            let _ = rustix::io::read(&ready, &mut [0u8; 1]);
            let done = sys::namespace::become_ids(0, 0, ids.has_root()).step("become root of the Body");
            match done.and_then(|()| serve_requests(arguments, place)) {
                Ok(()) => std::process::exit(0),
                Err(error) => {
                    let _ = io::Write::write_all(&mut io::stderr(), error.to_string().as_bytes());
                    std::process::exit(1)
                }
            }
        }
        ForkResult::Parent(pid) => {
            map(pid, &ids)?;
            rustix::io::write(&notify, b"1").step("report the mapped ids")?;
            let waited =
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).step("wait")?;
            std::process::exit(waited.and_then(|(_, status)| status.exit_status()).unwrap_or(1))
        }
    }
}

fn read_ids() -> io::Result<Ids> {
    let mut line = String::new();
    io::Read::take(io::stdin().lock(), IDS_LEN_MAX).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

fn open(dir: &OsString) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(Path::new(dir), OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Maps the Body's ids; if it has only one, that one becomes root of this namespace.
pub fn map(pid: sys::namespace::Pid, ids: &Ids) -> Result<(), StepError> {
    let lines = |ranges: &[proto::spec::IdRange]| -> Vec<IdMapLine> {
        let first = if ids.has_root() { None } else { Some(0) };
        ranges
            .iter()
            .map(|r| IdMapLine { inside: first.unwrap_or(r.inside), outside: r.outside, count: r.count })
            .collect()
    };
    if sys::caps::is_host_root() {
        return sys::namespace::write_maps(pid, &lines(&ids.users), &lines(&ids.groups), true)
            .step("map the ids");
    }
    if ids.has_root() {
        return idmap::write_with_helpers(pid, &lines(&ids.users), &lines(&ids.groups));
    }
    sys::namespace::write_maps(pid, &lines(&ids.users), &lines(&ids.groups), false).step("map the id")
}

fn serve_requests(arguments: &[OsString], place: HeldPlace) -> Result<(), StepError> {
    match place {
        HeldPlace::Layer(layer) => return unpack::receive(layer.as_fd(), &mut io::stdin().lock()),
        HeldPlace::Copy { disk, to } => {
            let from = arguments.get(2).and_then(|from| from.to_str()).unwrap_or_default();
            let disk = ext4::Disk::open(disk).step("read the disk")?;
            // A directory that the Body never made is an empty one.
            return ext4::extract(&disk, from, to.as_fd()).map(drop).step("read the disk");
        }
        HeldPlace::Nothing => {}
    }
    match arguments {
        [verb, from, to] if verb == "copy" => {
            let (from, to) = (open(from).step("open the tree")?, open(to).step("open the copy")?);
            sys::tree::copy(from.as_fd(), to.as_fd()).map(drop).step("copy the tree")
        }
        [verb, from, to] if verb == "show" => {
            let (from, to) = (open(from).step("open the tree")?, open(to).step("open the copy")?);
            sys::tree::copy_open(from.as_fd(), to.as_fd()).map(drop).step("copy the tree")
        }
        [verb, dir] if verb == "remove" => {
            let path = Path::new(dir);
            let parent = path.parent().unwrap_or(Path::new("/"));
            let name = CString::new(path.file_name().unwrap_or_default().as_bytes())
                .map_err(io::Error::from)
                .step("read the name")?;
            let parent = rustix::fs::open(parent, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .step("open the tree")?;
            sys::tree::remove(parent.as_fd(), &name).step("remove the tree")
        }
        _ => Err(io::Error::from(io::ErrorKind::InvalidInput)).step("parse the arguments"),
    }
}
