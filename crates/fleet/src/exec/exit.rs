//! Exit codes of commands.

use proto::wire::process::process_event::EndEvent;

/// Exit code of a command that was killed at its timeout; `timeout(1)` uses it too.
pub(super) const TIMED_OUT: i32 = 124;
/// Exit code of a command whose Body ended before the command did.
pub(super) const BODY_GONE: i32 = 137;

/// The exit code that a shell would report, and the signal if one ended the command.
pub(crate) fn exit_of(end: &EndEvent) -> (i32, Option<i32>) {
    if end.exited {
        return (end.exit_code, None);
    }
    let signal = end.status.strip_prefix("signal: ").and_then(signal_number);
    (signal.map_or(BODY_GONE, |signal| 128 + signal), signal)
}

/// Parses the name that envd gives to a signal.
fn signal_number(name: &str) -> Option<i32> {
    const NAMES: [(&str, i32); 22] = [
        ("hangup", 1),
        ("interrupt", 2),
        ("quit", 3),
        ("illegal instruction", 4),
        ("trace/breakpoint trap", 5),
        ("aborted", 6),
        ("bus error", 7),
        ("floating point exception", 8),
        ("killed", 9),
        ("user defined signal 1", 10),
        ("segmentation fault", 11),
        ("user defined signal 2", 12),
        ("broken pipe", 13),
        ("alarm clock", 14),
        ("terminated", 15),
        ("stack fault", 16),
        ("CPU time limit exceeded", 24),
        ("file size limit exceeded", 25),
        ("virtual timer expired", 26),
        ("profiling timer expired", 27),
        ("power failure", 30),
        ("bad system call", 31),
    ];
    let name = name.trim_end_matches(" (core dumped)");
    let numbered = || name.strip_prefix("signal ").and_then(|number| number.parse().ok());
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, number)| *number).or_else(numbered)
}
