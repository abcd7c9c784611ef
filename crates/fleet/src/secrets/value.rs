//! Reads the values of secrets from their sources.
//!
//! Invariant: no error holds a value, or what a command printed.
//! Invariant: a command ends, with all processes of its group, after ten seconds at the latest.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use proto::{Failure, Kind, text::visible};
use rustix::process::{Pid, Signal};
use vault::{SealKey, Zeroizing};

use super::{SecretRecord, SecretSource, ssh};

/// Longest value.
const VALUE_LEN_MAX: usize = 16 << 10;
/// Most bytes of a file or of a command's output.
const SOURCE_LEN_MAX: u64 = 64 << 10;
const COMMAND_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Reads environment variables of the process that opened the fleet.
pub type HostVariables = fn(&str) -> Option<OsString>;

/// The context for which a value in a record is sealed.
pub(super) fn stored_context(name: &str) -> String {
    format!("stored {name}")
}

/// Reads the value of a secret.
pub(super) fn read(
    record: &SecretRecord,
    key: &SealKey,
    variables: HostVariables,
) -> Result<Zeroizing<String>, Failure> {
    let name = &record.name;
    let fault = |message: String| Failure::new(Kind::Host, format!("the secret {name} {message}"));
    let again = format!("set it again: pal secret set {name}");
    let bytes = match &record.source {
        SecretSource::Sealed(sealed) => key
            .open(&stored_context(name), sealed)
            .map_err(|error| fault("cannot be opened".into()).because(error).hint(again.clone()))?,
        SecretSource::File(path) => read_file(path).map_err(|error| {
            fault(format!("is in the file {}, which cannot be read", visible(&path.to_string_lossy())))
                .because(error)
                .hint(format!("write the file, or name another one: pal secret set {name} --file FILE"))
        })?,
        SecretSource::Env(variable) => {
            let value = variables(variable).and_then(|value| value.into_string().ok());
            let value = value.ok_or_else(|| {
                fault(format!("is in the variable {variable}, which this `pal` does not have"))
                    .hint(format!("export {variable}, or {again}"))
            })?;
            Zeroizing::new(value.into_bytes())
        }
        SecretSource::Command(argv) => run(argv).map_err(|error| {
            let program = visible(argv.first().map_or("", String::as_str));
            fault(format!("comes from a command, `{program}`, which gave none")).because(error).hint(format!(
                "run it yourself to see why, or name another one: pal secret set {name} -- COMMAND"
            ))
        })?,
    };
    check(name, bytes, record.ssh.is_some()).map_err(|failure| failure.hint(again))
}

/// Checks a value: a private key of ssh, or one line, of which it removes the end.
pub(super) fn check(
    name: &str,
    mut bytes: Zeroizing<Vec<u8>>,
    is_ssh_key: bool,
) -> Result<Zeroizing<String>, Failure> {
    if is_ssh_key {
        return ssh::check_key(name, &bytes);
    }
    let fault =
        |message: &str| Failure::new(Kind::Usage, format!("the value of the secret {name} {message}"));
    if bytes.ends_with(b"\n") {
        let end = if bytes.ends_with(b"\r\n") { 2 } else { 1 };
        let len = bytes.len() - end;
        bytes.truncate(len);
    }
    if bytes.is_empty() {
        return Err(fault("is empty"));
    }
    if bytes.len() > VALUE_LEN_MAX {
        return Err(fault("is longer than 16 KiB"));
    }
    if bytes.iter().any(u8::is_ascii_control) {
        return Err(fault("has line ends or control characters, which no header may have"));
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| fault("is not UTF-8"))?;
    Ok(Zeroizing::new(text.to_owned()))
}

fn read_file(path: &Path) -> io::Result<Zeroizing<Vec<u8>>> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    read_bounded(file)
}

fn read_bounded(source: impl Read) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(VALUE_LEN_MAX));
    source.take(SOURCE_LEN_MAX + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > SOURCE_LEN_MAX {
        true => Err(io::Error::other("it has more than 64 KiB")),
        false => Ok(bytes),
    }
}

/// Runs a command without a shell, and returns its output.
fn run(argv: &[String]) -> io::Result<Zeroizing<Vec<u8>>> {
    let (program, arguments) = argv.split_first().ok_or_else(|| io::Error::other("it has no words"))?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Its messages could hold the value.
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    let output = collect(&mut child);
    if output.is_err() {
        kill_group(&child);
        let _ = child.wait();
    }
    output
}

fn collect(child: &mut Child) -> io::Result<Zeroizing<Vec<u8>>> {
    let deadline = Instant::now() + COMMAND_PATIENCE;
    let late = || io::Error::new(io::ErrorKind::TimedOut, "it did not end within 10 seconds");
    let stdout = child.stdout.take().ok_or_else(|| io::Error::other("it has no output"))?;
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(read_bounded(stdout)));
    let output = receive.recv_timeout(COMMAND_PATIENCE).map_err(|_| late())??;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break status,
            None if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            None => return Err(late()),
        }
    };
    match status.success() {
        true => Ok(output),
        false => Err(io::Error::other(format!("it failed: {status}"))),
    }
}

fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use proto::egress::SecretFields;

    use super::*;

    fn value(source: SecretSource) -> Result<String, Failure> {
        let record = SecretRecord {
            name: "a".into(),
            source,
            hosts: vec!["a.test".into()],
            fields: SecretFields::default(),
            env: Vec::new(),
            git: false,
            prefix: None,
            ssh: None,
            created_at: "now".into(),
        };
        let variables: HostVariables = |name| (name == "KEY").then(|| "from the host\n".into());
        read(&record, &SealKey::generate().unwrap(), variables).map(|value| value.to_string())
    }

    fn command(argv: &[&str]) -> Result<String, Failure> {
        value(SecretSource::Command(argv.iter().map(|word| (*word).to_owned()).collect()))
    }

    #[test]
    fn a_value_is_one_line_of_text() {
        let check =
            |bytes: &[u8]| check("a", bytes.to_vec().into(), false).map(|value| value.to_string()).ok();
        assert_eq!(check(b"v\n").as_deref(), Some("v"));
        assert_eq!(check(b" v \r\n").as_deref(), Some(" v "));
        assert!(check(&[b'v'; VALUE_LEN_MAX]).is_some());
        for bad in [&b""[..], b"\n", b"a\nb", b"v\n\n", b"v\r", b"a\0", b"\xff", &[b'v'; VALUE_LEN_MAX + 1]] {
            assert_eq!(check(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn values_come_from_files_variables_and_commands() {
        let path = std::env::temp_dir().join(format!("palisade-secret-{}", std::process::id()));
        std::fs::write(&path, "in a file\n").unwrap();
        assert_eq!(value(SecretSource::File(path.clone())).unwrap(), "in a file");
        std::fs::remove_file(&path).unwrap();
        let missing = value(SecretSource::File(path.clone())).unwrap_err();
        assert!(missing.message.contains(path.to_str().unwrap()), "{missing:?}");
        assert!(value(SecretSource::File("/dev/null".into())).is_err());
        assert_eq!(value(SecretSource::Env("KEY".into())).unwrap(), "from the host");
        let unset = value(SecretSource::Env("NO_KEY".into())).unwrap_err();
        assert!(unset.hints[0].contains("export NO_KEY"), "{unset:?}");
        assert_eq!(command(&["printf", "%s", "$HOME `id`"]).unwrap(), "$HOME `id`", "no shell reads it");
        assert!(
            value(SecretSource::Sealed("AAAA".into())).unwrap_err().hints[0].contains("pal secret set a")
        );
    }

    #[test]
    fn a_command_that_fails_tells_nothing_of_its_output() {
        let failed = command(&["sh", "-c", "echo hunter2; echo hunter2 >&2; exit 3"]).unwrap_err();
        assert!(!format!("{failed:?}").contains("hunter2") && failed.causes()[0].contains('3'), "{failed:?}");
        assert!(
            command(&["sh", "-c", "head -c 70000 /dev/zero"]).unwrap_err().causes()[0].contains("64 KiB")
        );
        assert!(command(&["/nonexistent/program"]).is_err() && command(&[]).is_err());
        assert!(command(&["true"]).unwrap_err().message.contains("is empty"));
    }
}
