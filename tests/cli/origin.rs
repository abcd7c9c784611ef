//! The arguments and the environment of `pal run` stay out of the Body.

use std::{
    fs,
    io::{Read, Seek, SeekFrom},
};

use crate::{
    cli_test,
    pal::{await_word, signal},
};

const SECRET: &str = "xyzzy-only-for-the-host";

/// How often a process holds a text in its memory; none without permission to read it.
fn held(pid: i64, text: &str) -> Option<usize> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let mut memory = fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    let mut count = 0;
    for line in maps.lines().filter(|line| line.contains(" rw") && !line.contains("[vv")) {
        let (range, _) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let mut bytes = Vec::new();
        memory.seek(SeekFrom::Start(start)).ok()?;
        // An untouched part of a stack cannot be read; the bytes before it were.
        let _ = memory.by_ref().take(end - start).read_to_end(&mut bytes);
        count += bytes.windows(text.len()).filter(|window| *window == text.as_bytes()).count();
    }
    Some(count)
}

cli_test! {
    fn a_body_has_every_processor_of_its_maker(pal) {
        let allowed = |status: &str| status.lines().find(|line| line.starts_with("Cpus_allowed_list")).unwrap_or_default().to_owned();
        let own = allowed(&fs::read_to_string("/proc/self/status").unwrap());
        assert_eq!(allowed(&pal.ok("run -- cat /proc/self/status")), own);
    }
}

cli_test! {
    fn no_argument_and_no_variable_of_the_host_is_in_the_body(pal) {
        // The second word is an argument without meaning for the Body.
        let look = "tr '\\0' ' ' < /proc/1/cmdline; cat /proc/1/environ 2>/dev/null; env; echo ready; sleep 1000";
        let data = format!("--data={}", pal.data().display());
        let mut command = pal.command(["run", data.as_str(), "--", "sh", "-c", look]);
        let mut child = command.env("TOKEN_OF_THE_HOST", SECRET).spawn().unwrap();
        let seen = await_word(&mut child, "ready\n");
        assert!(seen.starts_with("pal-launch") && !seen.contains(SECRET) && !seen.contains("--data"), "{seen}");
        let run = pal.data().join("bodies").join(pal.running()).join("run.json");
        let run: serde_json::Value = serde_json::from_slice(&fs::read(run).unwrap()).unwrap();
        let own = held(child.id().into(), SECRET);
        assert!(own.is_some_and(|count| count > 0), "where it may be it is found: {own:?}");
        // Only root may read the guest's memory.
        if rustix::process::geteuid().is_root() {
            assert_eq!(held(run["pid"].as_i64().unwrap(), SECRET), Some(0), "the Body's first process");
            assert_eq!(held(run["keeper"].as_i64().unwrap(), SECRET), Some(0), "its keeper");
        }
        signal(&child, rustix::process::Signal::TERM);
        child.wait().unwrap();
    }
}
