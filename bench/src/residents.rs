//! Sandboxes of peers that keep running: for commands in a running sandbox, and for memory.

use std::{io, process::Child, thread, time::Duration};

use crate::{
    context::BenchContext,
    memory, oci,
    peers::{AbsentPeer, podman},
    run::{CommandLine, RunPlace, find},
};

const SLEEP: [&str; 2] = ["sleep", "100000"];

/// A peer's sandbox that runs `sleep`.
pub struct Resident {
    /// Its name in tables.
    pub name: &'static str,
    /// How `true` is run in it; none if the peer has no such command.
    pub exec: Option<CommandLine>,
    /// Its top processes; their descendants count, too.
    pub heads: Vec<i32>,
    end: Option<CommandLine>,
    child: Option<Child>,
}

impl Resident {
    /// PSS of all its processes.
    pub fn pss(&self) -> io::Result<u64> {
        self.heads.iter().map(|head| memory::pss_of_family(*head)).sum()
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        if let Some(end) = &self.end {
            let _ = end.output();
        }
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

type StartFn = fn(&BenchContext) -> io::Result<Resident>;

/// All peers that can keep a sandbox on this host.
pub fn start_all(context: &BenchContext) -> io::Result<(Vec<Resident>, Vec<AbsentPeer>)> {
    let starts: [(&str, StartFn); 5] = [
        ("bwrap", bwrap),
        ("crun", |context| runtime(context, "crun")),
        ("runc", |context| runtime(context, "runc")),
        ("podman", podman_stays),
        ("firejail", firejail),
    ];
    let (mut residents, mut absent) = (Vec::new(), Vec::new());
    for (name, start) in starts {
        let started = match find(name) {
            Some(_) => start(context),
            None => Err(io::Error::other("not installed")),
        };
        match started {
            Ok(resident) => residents.push(resident),
            Err(error) => absent.push((name.to_owned(), error.to_string())),
        }
    }
    Ok((residents, absent))
}

fn bwrap(_: &BenchContext) -> io::Result<Resident> {
    let words = "bwrap --unshare-all --die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp --";
    let child = CommandLine::new(words.split_ascii_whitespace()).and(SLEEP).start()?;
    stay("bwrap", child, None)
}

fn firejail(_: &BenchContext) -> io::Result<Resident> {
    let name = format!("palbench{}", std::process::id());
    let words = "firejail --quiet --noprofile --net=none";
    let child = CommandLine::new(words.split_ascii_whitespace())
        .and([format!("--name={name}"), "--".into()])
        .and(SLEEP)
        .start()?;
    let exec = CommandLine::new(["firejail", "--quiet", &format!("--join={}", child.id()), "--", "true"]);
    stay("firejail", child, Some(exec))
}

/// Waits until the process of the sandbox exists, and a command in it works.
fn stay(name: &'static str, child: Child, exec: Option<CommandLine>) -> io::Result<Resident> {
    let head = child.id() as i32;
    let resident = Resident { name, exec, heads: vec![head], end: None, child: Some(child) };
    for _ in 0..200 {
        let sleeps = memory::family(head)?.iter().any(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "sleep")
        });
        if sleeps && resident.exec.as_ref().is_none_or(|exec| exec.output().is_ok()) {
            return Ok(resident);
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err(io::Error::other("it did not come up"))
}

fn runtime(context: &BenchContext, name: &'static str) -> io::Result<Resident> {
    let bundle = oci::bundle(context, "sleep", &SLEEP)?.to_string_lossy().into_owned();
    let state = format!("--root={}/{name}", context.scratch.display());
    let id = format!("palbench{}-{name}", std::process::id());
    let place = if name == "crun" { RunPlace::WithoutUnified } else { RunPlace::Here };
    let say = |words: &[&str]| CommandLine::new([name, &state]).and(words.iter().copied()).at(place);
    if !say(&["run", "--detach", "--bundle", &bundle, &id]).start()?.wait()?.success() {
        return Err(io::Error::other("it could not start a container in the background"));
    }
    let end = Some(say(&["delete", "--force", &id]));
    let mut resident =
        Resident { name, exec: Some(say(&["exec", &id, "true"])), heads: Vec::new(), end, child: None };
    let told: serde_json::Value = serde_json::from_str(&say(&["state", &id]).output()?)?;
    resident.heads.extend(told["pid"].as_i64().map(|pid| pid as i32));
    Ok(resident)
}

fn podman_stays(context: &BenchContext) -> io::Result<Resident> {
    let root = oci::rootfs(context)?.to_string_lossy().into_owned();
    let id = format!("palbench{}", std::process::id());
    let say =
        |words: &[&str]| CommandLine::new(["podman"]).and(words.iter().copied()).at(RunPlace::WithoutUnified);
    let start = say(&["run", "--detach", "--rm", "--name", &id]).and(podman(&root)).and(SLEEP);
    if !start.start()?.wait()?.success() {
        return Err(io::Error::other("it could not start a container in the background"));
    }
    let end = Some(say(&["rm", "--force", "--time", "0", &id]));
    let mut resident = Resident {
        name: "podman",
        exec: Some(say(&["exec", &id, "true"])),
        heads: Vec::new(),
        end,
        child: None,
    };
    let printed = say(&["inspect", "--format", "{{.State.ConmonPid}}", &id]).output()?;
    // Its monitor is the parent of the container's first process.
    resident.heads.extend(printed.trim().parse::<i32>());
    Ok(resident)
}
