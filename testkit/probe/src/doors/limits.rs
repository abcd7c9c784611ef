//! Limits: how much of the shared resources one Body can use up.
//!
//! Invariant: the probe gives back what it used, also when it is killed: its children die with it, its files
//! are in the directory that the runner removes, and memory and descriptors are its own.

use std::os::fd::{AsRawFd, OwnedFd};

use super::{behind, settle};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{self, Errno, ForkSide, SyscallResult, c, call, open};
use crate::verdict::{ProbeOutcome, broken, denied, judge, judge_more, reached};

/// How far a probe exceeds a limit.
const MORE: usize = 50;
const MIB: usize = 1 << 20;
const STAND_INS: usize = 8;

pub const PROBES: &[Probe] = &behind(
    "limits",
    [
        Probe::user("rlimit-core", "core files may be written", |_| {
            hard_limit(libc::RLIMIT_CORE, |max| max > 0)
        }),
        Probe::door("rlimit-memlock", "no limit on locked memory (the test lifts it)", |_| {
            unlimited(libc::RLIMIT_MEMLOCK)
        }),
        Probe::user("rlimit-fsize", "no limit on the size of a file", |_| unlimited(libc::RLIMIT_FSIZE)),
        Probe::host("nice", "the highest priority", |_| {
            judge("setpriority", call!(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, -20), &[])
        }),
        Probe::host("realtime", "real-time scheduling", |_| {
            let parameter = 1i32;
            judge("sched_setscheduler", call!(libc::SYS_sched_setscheduler, 0, 1, &raw const parameter), &[])
        }),
        Probe::host("io-realtime", "real-time input and output", |_| {
            judge("ioprio_set", call!(libc::SYS_ioprio_set, 1, 0, 1 << 13), &[])
        }),
        Probe::limit("processes", "more processes than pids=N", processes).needs(&["pids"]),
        Probe::limit("threads", "more threads than pids=N", threads).needs(&["pids"]),
        Probe::limit("memory", "more memory than memory=BYTES", memory).needs(&["memory"]),
        Probe::limit("locked-memory", "more locked memory than mlock=BYTES", locked_memory).needs(&["mlock"]),
        Probe::limit("memfd", "more memory than memory=BYTES in a file without a name", memfd)
            .needs(&["memory"]),
        Probe::limit("disk", "more bytes than disk=BYTES in dir=", |c| fill(c, "disk", MapPlace::Scratch))
            .needs(&["disk"]),
        Probe::limit("sparse-file", "a file longer than fsize=BYTES in dir=", sparse).needs(&["fsize"]),
        Probe::limit("inodes", "more files than inodes=N in dir=", inodes).needs(&["inodes"]),
        Probe::limit("shared-memory", "more bytes than shm=BYTES in /dev/shm", |c| {
            fill(c, "shm", MapPlace::Shm)
        })
        .needs(&["shm"]),
        Probe::limit("open-files", "more descriptors than nofile=N", open_files).needs(&["nofile"]),
        Probe::limit("ptys", "more terminals than ptys=N", ptys).needs(&["ptys"]),
    ],
);

/// The errors of a limit that works.
const HELD: &[i32] = &[
    libc::EAGAIN,
    libc::ENOMEM,
    libc::ENOSPC,
    libc::EDQUOT,
    libc::EFBIG,
    libc::EMFILE,
    libc::ENFILE,
    libc::EIO,
];

/// The outcome after `done` of `wanted` objects were made.
fn bounded(what: &str, done: usize, wanted: usize, stopped: Option<Errno>) -> ProbeOutcome {
    match stopped {
        None => reached(format!("{done} {what}")),
        Some(error) => {
            let mut outcome = judge_more(what, Err(error), &[], HELD);
            outcome.detail.push_str(&format!(" after {done} of {wanted}"));
            outcome
        }
    }
}

/// Makes objects until there are enough or one fails; keeps them until all are counted.
fn make<T>(
    what: &str,
    wanted: usize,
    mut one: impl FnMut(usize) -> Result<T, Errno>,
) -> (Vec<T>, ProbeOutcome) {
    let mut made = Vec::new();
    for index in 0..wanted {
        match one(index) {
            Ok(thing) => made.push(thing),
            Err(error) => {
                let outcome = bounded(what, made.len(), wanted, Some(error));
                return (made, outcome);
            }
        }
    }
    let outcome = bounded(what, wanted, wanted, None);
    (made, outcome)
}

fn hard_limit(resource: libc::__rlimit_resource_t, open: impl FnOnce(u64) -> bool) -> ProbeOutcome {
    match sys::rlimit(resource) {
        Ok(limit) if open(limit.rlim_max) => reached(format!("hard limit {}", shown(limit.rlim_max))),
        Ok(limit) => denied(format!("hard limit {}", shown(limit.rlim_max))),
        Err(error) => broken(format!("prlimit: {error}")),
    }
}

fn shown(limit: u64) -> String {
    if limit == libc::RLIM64_INFINITY { "unlimited".to_owned() } else { limit.to_string() }
}

fn unlimited(resource: libc::__rlimit_resource_t) -> ProbeOutcome {
    hard_limit(resource, |max| max == libc::RLIM64_INFINITY)
}

fn processes(call: &ProbeCall<'_>) -> ProbeOutcome {
    let wanted = match call.number::<usize>("pids") {
        Ok(pids) => pids + MORE,
        Err(outcome) => return outcome,
    };
    sys::lift(libc::RLIMIT_NPROC);
    let (made, outcome) = make("processes", wanted, |_| match sys::fork()? {
        ForkSide::Parent(pid) => Ok(pid),
        ForkSide::Child => {
            sys::die_with_parent();
            wait_forever()
        }
    });
    dismiss(&made);
    outcome
}

fn threads(call: &ProbeCall<'_>) -> ProbeOutcome {
    let wanted = match call.number::<usize>("pids") {
        Ok(pids) => pids + MORE,
        Err(outcome) => return outcome,
    };
    // They are never joined: the runner's child ends and takes them with it.
    let (_, outcome) = make("threads", wanted, |_| {
        let builder = std::thread::Builder::new().stack_size(64 * 1024);
        builder.spawn(|| std::thread::sleep(std::time::Duration::from_secs(600))).map_err(Errno::from)
    });
    outcome
}

/// One anonymous mapping of a MiB.
fn map_mib() -> Result<*mut u8, Errno> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), MIB, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED { Err(Errno::last()) } else { Ok(address.cast()) }
}

/// The mappings are never undone: the process ends.
fn memory(call: &ProbeCall<'_>) -> ProbeOutcome {
    let wanted = match call.number::<usize>("memory") {
        Ok(bytes) => bytes / MIB + MORE,
        Err(outcome) => return outcome,
    };
    // The kernel should kill this process for memory, not the one that reports.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let touch = |_| {
        let start = map_mib()?;
        // SAFETY: the mapping is a MiB long, ours, and writable.
        unsafe { std::ptr::write_bytes(start, 0x5a, MIB) };
        Ok(())
    };
    make("MiB touched", wanted, touch).1
}

fn locked_memory(call: &ProbeCall<'_>) -> ProbeOutcome {
    let wanted = match call.number::<usize>("mlock") {
        Ok(bytes) => bytes / MIB + MORE,
        Err(outcome) => return outcome,
    };
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    sys::lift(libc::RLIMIT_MEMLOCK);
    make("MiB locked", wanted, |_| map_mib().and_then(|start| call!(libc::SYS_mlock, start, MIB))).1
}

fn memfd(call: &ProbeCall<'_>) -> ProbeOutcome {
    let stand_ins = stand_ins();
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let outcome = match (
        call.number::<usize>("memory"),
        call!(libc::SYS_memfd_create, c("probe").as_ptr(), 1).map(sys::own),
    ) {
        (Ok(bytes), Ok(file)) => grow(&file, bytes),
        (Err(outcome), _) => outcome,
        (_, Err(error)) => judge("memfd_create", Err(error), &[]),
    };
    dismiss(&stand_ins);
    outcome
}

/// Processes that the kernel may kill for memory instead of the one that reports: the memory of such a file
/// is free only after the killed process has closed it, and until then the kernel kills the next one.
fn stand_ins() -> Vec<i32> {
    let stand_in = |_| match sys::fork().ok()? {
        ForkSide::Parent(pid) => Some(pid),
        ForkSide::Child => {
            sys::die_with_parent();
            let _ = std::fs::write("/proc/self/oom_score_adj", "900");
            wait_forever()
        }
    };
    (0..STAND_INS).filter_map(stand_in).collect()
}

enum MapPlace {
    Scratch,
    Shm,
}

fn fill(call: &ProbeCall<'_>, key: &str, place: MapPlace) -> ProbeOutcome {
    settle((|| {
        let bytes = call.number::<usize>(key)?;
        let directory = match place {
            MapPlace::Scratch => call.scratch()?.to_path_buf(),
            MapPlace::Shm => "/dev/shm".into(),
        };
        Ok(match unnamed(&directory.to_string_lossy()) {
            Ok(file) => grow(&file, bytes),
            Err(error) => judge("create a file", Err(error), &[]),
        })
    })())
}

/// A file without a name, so that it cannot outlive the probe.
fn unnamed(directory: &str) -> Result<OwnedFd, Errno> {
    let path = format!("{directory}/probe-fill-{}", std::process::id());
    let file = open(&path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL)?;
    call!(libc::SYS_unlinkat, libc::AT_FDCWD, c(&path).as_ptr(), 0)?;
    Ok(file)
}

/// Allocates a MiB at a time if the file system can, else writes.
fn grow(file: &OwnedFd, bytes: usize) -> ProbeOutcome {
    sys::lift(libc::RLIMIT_FSIZE);
    // SAFETY: sets the disposition to a constant of the kernel; the write then says EFBIG.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let block = vec![0x5au8; MIB];
    let one = |index: usize| -> SyscallResult {
        match call!(libc::SYS_fallocate, file.as_raw_fd(), 0, index * MIB, MIB) {
            Err(Errno(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM)) => {
                let written = call!(libc::SYS_pwrite64, file.as_raw_fd(), block.as_ptr(), MIB, index * MIB)?;
                if written == MIB as i64 { Ok(written) } else { Err(Errno(libc::ENOSPC)) }
            }
            tried => tried,
        }
    };
    make("MiB kept", bytes / MIB + MORE, one).1
}

fn sparse(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let bytes = call.number::<u64>("fsize")?;
        let directory = call.scratch()?.to_string_lossy().into_owned();
        let file = unnamed(&directory).map_err(|e| broken(format!("create a file: {e}")))?;
        sys::lift(libc::RLIMIT_FSIZE);
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        Ok(judge_more("ftruncate", call!(libc::SYS_ftruncate, file.as_raw_fd(), bytes + 1), &[], HELD))
    })())
}

fn inodes(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let wanted = call.number::<usize>("inodes")? + MORE;
        let directory = call.scratch()?.to_string_lossy().into_owned();
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        Ok(make("files", wanted, |index| open(&format!("{directory}/{index}"), flags).map(drop)).1)
    })())
}

fn open_files(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let wanted = call.number::<usize>("nofile")? + MORE;
        sys::lift(libc::RLIMIT_NOFILE);
        let first = open("/", libc::O_RDONLY).map_err(|e| broken(format!("open /: {e}")))?;
        Ok(make("descriptors", wanted, |_| call!(libc::SYS_dup, first.as_raw_fd()).map(sys::own)).1)
    })())
}

/// Opens terminals from many processes, because the descriptor limit of one process says nothing about
/// terminals.
fn ptys(call: &ProbeCall<'_>) -> ProbeOutcome {
    const EACH: usize = 100;
    settle((|| {
        let wanted = call.number::<usize>("ptys")? + MORE;
        let (mut made, mut holders, mut stopped) = (0, Vec::new(), None);
        while made < wanted && stopped.is_none() {
            match holder(EACH.min(wanted - made)) {
                Ok((pid, count, error)) => {
                    holders.push(pid);
                    made += count;
                    // A holder without free descriptors has still added its terminals; the next one
                    // continues.
                    stopped = error.filter(|e| count == 0 || *e != Errno(libc::EMFILE));
                }
                Err(error) => stopped = Some(error),
            }
        }
        dismiss(&holders);
        Ok(bounded("terminals", made, wanted, stopped))
    })())
}

/// A child that opens terminals and keeps them until it is killed: its pid, their number, and the error that
/// stopped it.
fn holder(wanted: usize) -> Result<(i32, usize, Option<Errno>), Errno> {
    let (read, write) = sys::pipe()?;
    let pid = match sys::fork()? {
        ForkSide::Parent(pid) => pid,
        ForkSide::Child => {
            sys::die_with_parent();
            let mut kept = Vec::new();
            let mut stopped = 0;
            while kept.len() < wanted && stopped == 0 {
                match open("/dev/ptmx", libc::O_RDWR) {
                    Ok(terminal) => kept.push(terminal),
                    Err(Errno(number)) => stopped = number,
                }
            }
            let word = [i32::try_from(kept.len()).unwrap_or(0), stopped];
            let _ = call!(libc::SYS_write, write.as_raw_fd(), word.as_ptr(), size_of_val(&word));
            wait_forever()
        }
    };
    drop(write);
    let mut word = [0i32; 2];
    match call!(libc::SYS_read, read.as_raw_fd(), word.as_mut_ptr(), size_of_val(&word)) {
        Ok(8) => Ok((pid, usize::try_from(word[0]).unwrap_or(0), (word[1] != 0).then_some(Errno(word[1])))),
        _ => {
            dismiss(&[pid]);
            Err(Errno(libc::ECHILD))
        }
    }
}

/// Waits for the signal that ends it.
fn wait_forever() -> ! {
    loop {
        // SAFETY: takes nothing and changes nothing.
        unsafe { libc::pause() };
    }
}

/// Kills and reaps children of this process.
fn dismiss(children: &[i32]) {
    for pid in children {
        let _ = call!(libc::SYS_kill, *pid, libc::SIGKILL);
    }
    for pid in children {
        let _ = sys::reap(*pid);
    }
}
