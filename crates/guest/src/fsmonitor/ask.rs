//! The program that git runs as its fsmonitor hook: `changes VERSION TOKEN`.
//!
//! Invariant: after any failure it tells git that every file may have changed, and prints nothing else.
//! It checks the version of the git that runs it: before 2.37, git took each path for a file, and would miss changes
//! below a directory.

use std::{
    ffi::OsString,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::MetadataExt,
            net::{SocketAddr, UnixStream},
            process::CommandExt,
        },
    },
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use super::{SOCKET, since::FsmonitorAnswer};

/// How long the guest may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);
const ANSWER_LEN_MAX: u64 = 4 << 20;
/// The first git version that also looks below a path.
const GIT_MIN: (u32, u32) = (2, 37);
/// A token that the guest does not know.
const UNKNOWN: &str = "palisade";

/// Runs the program: takes its arguments and returns its exit code.
pub fn main(mut arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let version = arguments.next();
    let token = arguments.next().and_then(|token| token.into_string().ok()).unwrap_or_default();
    let said = match version.as_deref().and_then(|version| version.to_str()) {
        Some("2") => ask(&token).ok().filter(|said| is_for(said, git_version)),
        // Version 1 of the hook protocol has no tokens.
        _ => return end(b"/\0"),
    };
    end(&said.unwrap_or_else(|| encode_token(UNKNOWN, &FsmonitorAnswer::All)))
}

/// Encodes an answer as git's hook protocol wants it.
pub fn encode_token(token: &str, answer: &FsmonitorAnswer) -> Vec<u8> {
    let mut said = [token.as_bytes(), b"\0"].concat();
    match answer {
        FsmonitorAnswer::All => said.extend(b"/\0"),
        FsmonitorAnswer::Paths(paths) => paths.iter().for_each(|path| said.extend(path.iter().chain(b"\0"))),
    }
    said
}

fn end(said: &[u8]) -> ExitCode {
    let written = io::stdout().write_all(said).and_then(|()| io::stdout().flush());
    if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn ask(token: &str) -> io::Result<Vec<u8>> {
    let mut guest = UnixStream::connect_addr(&SocketAddr::from_abstract_name(SOCKET)?)?;
    guest.set_read_timeout(Some(PATIENCE))?;
    guest.set_write_timeout(Some(PATIENCE))?;
    let here = std::fs::metadata(".")?;
    write!(guest, "{} {}\0{token}", here.dev(), here.ino())?;
    guest.shutdown(Shutdown::Write)?;
    let mut len = [0; 8];
    guest.read_exact(&mut len)?;
    let len = u64::from_be_bytes(len);
    let mut said = Vec::new();
    guest.take(len.min(ANSWER_LEN_MAX)).read_to_end(&mut said)?;
    if said.len() as u64 == len { Ok(said) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Whether the calling git understands the answer.
fn is_for(said: &[u8], version: impl FnOnce() -> Option<(u32, u32)>) -> bool {
    let paths = said.iter().position(|byte| *byte == 0).map(|end| &said[end + 1..]);
    match paths {
        None => false,
        Some(b"" | b"/\0") => true,
        Some(_) => version().is_some_and(|version| version >= GIT_MIN),
    }
}

/// The version of the git that runs this program.
fn git_version() -> Option<(u32, u32)> {
    let git = rustix::process::getppid()?.as_raw_nonzero();
    let mut command = Command::new(format!("/proc/{git}/exe"));
    let said = command.arg0("git").arg("version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    parse_version(std::str::from_utf8(&said.stdout).ok()?)
}

fn parse_version(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.strip_prefix("git version ")?.split(['.', '-', ' ', '\n']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        for (said, version) in [
            ("git version 2.47.3\n", Some((2, 47))),
            ("git version 2.39.5 (Apple Git-154)\n", Some((2, 39))),
            ("git version 2.37-rc1\n", Some((2, 37))),
            ("git version 3.0\n", Some((3, 0))),
            ("git version x\n", None),
            ("usage: perl", None),
            ("", None),
        ] {
            assert_eq!(parse_version(said), version, "{said}");
        }
    }

    #[test]
    fn only_who_looks_below_paths_is_given_some() {
        let check =
            |said: &[u8], version, expected| assert_eq!(is_for(said, || version), expected, "{said:?}");
        check(b"t\0", None, true);
        check(b"t\0/\0", None, true);
        check(b"t\0a\0", None, false);
        check(b"t\0a\0", Some((2, 36)), false);
        check(b"t\0a\0", Some((2, 37)), true);
        check(b"t\0a\0", Some((3, 1)), true);
        check(b"", Some((3, 1)), false);
    }

    #[test]
    fn answers_are_spelled_with_zeroes() {
        let paths = FsmonitorAnswer::Paths([b"a".to_vec(), b"b c".to_vec()].into());
        assert_eq!(encode_token("t", &paths), b"t\0a\0b c\0");
        assert_eq!(encode_token("t", &FsmonitorAnswer::All), b"t\0/\0");
    }
}
