//! `GET /v1/processes`: every process of the Body, as the kernel describes it.
//!
//! Trust: command lines are whatever the processes wrote there; they are cut and sent as text.

use proto::guest::{BodyProcess, ProcessList};

use crate::{
    reply::{self, HttpReply},
    users::IdNames,
};

/// Most processes of one answer.
const PROCESSES_MAX: usize = 4096;
/// Longest command line; the rest is cut.
const COMMAND_LEN_MAX: u64 = 2048;

/// Answers with the processes.
pub async fn answer() -> HttpReply {
    // On a helper thread, because there may be thousands.
    let list = tokio::task::spawn_blocking(read).await.unwrap_or_default();
    reply::json(&list)
}

fn read() -> ProcessList {
    let pids = sys::proc::pids().unwrap_or_default();
    let names = IdNames::read();
    let processes = pids.iter().take(PROCESSES_MAX).filter_map(|pid| describe(*pid, &names)).collect();
    ProcessList { processes, left_out: pids.len().saturating_sub(PROCESSES_MAX) as u64 }
}

/// Describes a process; `None` if it has ended, or is a thread of the kernel.
fn describe(pid: i32, names: &IdNames) -> Option<BodyProcess> {
    let stat = sys::proc::stat(pid).ok().filter(|stat| !stat.kernel)?;
    let status = sys::proc::status(pid)?;
    let ms = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    Some(BodyProcess {
        pid,
        parent: stat.parent,
        user: names.user(status.user),
        cpu_ms: ms(stat.busy),
        memory_bytes: status.resident,
        age_ms: ms(sys::proc::age(stat.ticks)),
        command: command(pid),
    })
}

fn command(pid: i32) -> Vec<String> {
    let read = |name: &str| read_cut(&format!("/proc/{pid}/{name}"));
    let name = || String::from_utf8_lossy(&read("comm")).trim_end().to_owned();
    // The guest's own arguments are those of the launcher that it was.
    if pid == rustix::process::getpid().as_raw_nonzero().get() {
        return vec![name()];
    }
    let line = read("cmdline");
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    if line.is_empty() {
        return vec![format!("[{}]", name())];
    }
    line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

fn read_cut(path: &str) -> Vec<u8> {
    use std::io::Read;
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path) {
        let _ = file.take(COMMAND_LEN_MAX).read_to_end(&mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_listed_with_its_arguments_and_its_parent() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "read line", "a b", ""])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let own = std::process::id() as i32;
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let found = loop {
            let found = read().processes.into_iter().find(|process| process.pid == pid);
            if let Some(found) = found.filter(|found| found.command[0] == "sh") {
                break found;
            }
            assert!(std::time::Instant::now() < deadline, "the child is not listed");
        };
        assert_eq!(
            (found.parent, &found.command[1..]),
            (own, &["-c", "read line", "a b", ""].map(String::from)[..])
        );
        assert!(found.memory_bytes > 0 && found.age_ms < 60_000, "{found:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(read().processes.iter().all(|process| process.pid != pid));
    }
}
