//! Resolves a start request into program file, directory and environment.

use std::{
    collections::BTreeMap,
    ffi::{CString, OsStr},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

use proto::{
    guest::{GuestConfig, StartRefusal},
    wire::process::ProcessConfig,
};

use crate::{
    connect::{Code, ConnectError},
    paths,
    users::GuestUser,
};

const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Variables of programs in a Body without a way out: package managers that try again for minutes fail at once.
const NO_RETRIES: &[(&str, &str)] = &[
    ("BUNDLE_RETRY", "0"),
    ("CARGO_NET_RETRY", "0"),
    ("PIP_RETRIES", "0"),
    ("UV_HTTP_RETRIES", "0"),
    ("YARN_HTTP_RETRY", "0"),
    ("npm_config_fetch_retries", "0"),
];

/// Arguments for `execve`.
#[derive(Debug)]
pub struct Program {
    pub file: CString,
    pub args: Vec<CString>,
    pub envs: Vec<CString>,
    pub cwd: CString,
}

impl Program {
    pub fn new(asked: &ProcessConfig, user: &GuestUser, config: &GuestConfig) -> Result<Self, ConnectError> {
        let cwd = directory(asked, user, config)?;
        let envs = environment(asked, user, config);
        let path = envs.get("PATH").map_or(PATH_DEFAULT, String::as_str);
        let file = find(&asked.cmd, path, &cwd)?;
        let args = std::iter::once(&asked.cmd).chain(&asked.args);
        Ok(Self {
            file: text(file.into_os_string().into_vec())?,
            args: args.map(|arg| text(arg.as_bytes())).collect::<Result<_, _>>()?,
            envs: envs.iter().map(|(name, value)| variable(name, value)).collect::<Result<_, _>>()?,
            cwd: text(cwd.into_os_string().into_vec())?,
        })
    }
}

/// The environment of every process: the variables by which the E2B SDKs recognise a sandbox, and the Body's own.
pub fn body_environment(config: &GuestConfig) -> BTreeMap<String, String> {
    let mut envs = BTreeMap::from([
        ("E2B_SANDBOX".to_owned(), "true".to_owned()),
        ("E2B_SANDBOX_ID".to_owned(), config.body.to_string()),
        ("E2B_TEMPLATE_ID".to_owned(), config.template.clone()),
    ]);
    envs.extend(config.envs.clone());
    envs
}

fn environment(asked: &ProcessConfig, user: &GuestUser, config: &GuestConfig) -> BTreeMap<String, String> {
    let mut envs = BTreeMap::from([
        ("PATH".to_owned(), PATH_DEFAULT.to_owned()),
        ("HOME".to_owned(), user.home.to_string_lossy().into_owned()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
    ]);
    if config.forward.is_none() {
        envs.extend(NO_RETRIES.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    }
    envs.extend(body_environment(config));
    envs.extend(asked.envs.iter().map(|(name, value)| (name.clone(), value.clone())));
    envs
}

fn directory(asked: &ProcessConfig, user: &GuestUser, config: &GuestConfig) -> Result<PathBuf, ConnectError> {
    let named = asked.cwd.as_deref().unwrap_or_default();
    let cwd = paths::resolve(named.as_bytes(), user, config.workdir.as_deref())?;
    match std::fs::metadata(&cwd) {
        Ok(found) if found.is_dir() => Ok(cwd),
        Ok(_) => Err(ConnectError::invalid(format!("cwd '{}' is not a directory", cwd.display()))),
        // The request did not ask for the home directory, so a missing one must not keep the command from running.
        Err(_) if named.is_empty() && config.workdir.is_none() => Ok(PathBuf::from("/")),
        Err(_) => Err(ConnectError::invalid(format!("cwd '{}' does not exist", cwd.display()))),
    }
}

/// Finds the file of a command: the command itself if it contains a `/`, else the first match on PATH.
fn find(cmd: &str, path: &str, cwd: &Path) -> Result<PathBuf, ConnectError> {
    if cmd.is_empty() {
        return Err(ConnectError::invalid("no command is given"));
    }
    if cmd.contains('/') {
        return check(&cwd.join(cmd), cmd).map(|()| PathBuf::from(cmd));
    }
    let mut refused = None;
    for dir in path.split(':') {
        let file = cwd.join(dir).join(cmd);
        match check(&file, cmd) {
            Ok(()) => return Ok(file),
            Err(fault) if fault.code == Code::PermissionDenied => refused = refused.or(Some(fault)),
            Err(_) => {}
        }
    }
    Err(refused.unwrap_or_else(|| not_found(cmd)))
}

fn check(file: &Path, cmd: &str) -> Result<(), ConnectError> {
    use std::os::unix::fs::PermissionsExt;
    let Ok(found) = std::fs::metadata(file) else { return Err(not_found(cmd)) };
    if found.is_file() && found.permissions().mode() & 0o111 != 0 {
        return Ok(());
    }
    Err(not_executable(cmd))
}

/// The error for a command that does not exist.
pub fn not_found(cmd: &str) -> ConnectError {
    ConnectError::new(Code::NotFound, format!("command not found: {cmd}"))
        .reason(StartRefusal::CommandNotFound)
}

/// The error for a command that exists but cannot be executed.
pub fn not_executable(cmd: &str) -> ConnectError {
    ConnectError::new(Code::PermissionDenied, format!("not executable: {cmd}"))
        .reason(StartRefusal::CommandNotExecutable)
}

fn variable(name: &str, value: &str) -> Result<CString, ConnectError> {
    if name.is_empty() || name.contains('=') {
        return Err(ConnectError::invalid(format!("{name:?} is not the name of a variable")));
    }
    text(format!("{name}={value}"))
}

fn text(bytes: impl Into<Vec<u8>>) -> Result<CString, ConnectError> {
    CString::new(bytes).map_err(|error| {
        let shown =
            OsStr::from_bytes(&error.into_vec()).to_string_lossy().chars().take(64).collect::<String>();
        ConnectError::invalid(format!("{shown:?} holds a NUL byte"))
    })
}

#[cfg(test)]
mod tests {
    use proto::guest::Forward;

    use super::*;

    fn config() -> GuestConfig {
        GuestConfig {
            body: "b1".parse().unwrap(),
            template: "t".into(),
            token: None,
            envs: BTreeMap::from([("A".into(), "body".into()), ("B".into(), "body".into())]),
            user: "root".into(),
            workdir: None,
            ring_bytes: 0,
            forward: Some(Forward { port: 1, socket: "/x".into(), transparent: false }),
        }
    }

    fn user() -> GuestUser {
        GuestUser { name: "u".into(), uid: 1, gid: 1, home: "/usr".into(), groups: vec![] }
    }

    #[test]
    fn the_request_overrides_the_body_and_the_body_the_defaults() {
        let envs = [("B".to_owned(), "asked".to_owned())].into_iter().collect();
        let asked = ProcessConfig { cmd: "sh".into(), envs, ..Default::default() };
        let program = Program::new(&asked, &user(), &config()).unwrap();
        let envs: Vec<_> = program.envs.iter().map(|env| env.to_str().unwrap()).collect();
        let path = format!("PATH={PATH_DEFAULT}");
        let wanted =
            ["A=body", "B=asked", "E2B_SANDBOX=true", "E2B_SANDBOX_ID=b1", "E2B_TEMPLATE_ID=t", "HOME=/usr"];
        assert_eq!(envs, [&wanted[..], &["LOGNAME=u", &path, "USER=u"]].concat());
        assert_eq!(program.cwd.to_str(), Ok("/usr"));
    }

    #[test]
    fn package_managers_try_once_in_a_body_without_a_way_out() {
        let asked = ProcessConfig {
            cmd: "sh".into(),
            envs: [("PIP_RETRIES".to_owned(), "3".to_owned())].into_iter().collect(),
            ..Default::default()
        };
        let (open, closed) = (config(), GuestConfig { forward: None, ..config() });
        let value =
            |config: &GuestConfig, name: &str| environment(&asked, &user(), config).get(name).cloned();
        assert_eq!(value(&closed, "npm_config_fetch_retries").as_deref(), Some("0"));
        assert_eq!(value(&open, "npm_config_fetch_retries"), None);
        assert_eq!(value(&closed, "PIP_RETRIES").as_deref(), Some("3"), "the request decides");
    }

    #[test]
    fn commands_are_searched_and_misses_are_named() {
        let find =
            |cmd, path| find(cmd, path, Path::new("/etc")).map_err(|fault| (fault.code, fault.message));
        assert_eq!(find("sh", "/no:/bin"), Ok("/bin/sh".into()));
        assert_eq!(find("/bin/sh", ""), Ok("/bin/sh".into()));
        assert_eq!(find("no-such", "/bin"), Err((Code::NotFound, "command not found: no-such".into())));
        assert_eq!(
            find("passwd", "/etc:/no"),
            Err((Code::PermissionDenied, "not executable: passwd".into()))
        );
        assert_eq!(
            find("./passwd", "/bin"),
            Err((Code::PermissionDenied, "not executable: ./passwd".into()))
        );
        assert_eq!(find("./x", "/bin"), Err((Code::NotFound, "command not found: ./x".into())));
    }

    #[test]
    fn a_directory_that_was_asked_for_must_be_there() {
        let asked = |cwd: Option<&str>| ProcessConfig { cwd: cwd.map(Into::into), ..Default::default() };
        let homeless = GuestUser { home: "/no/such".into(), ..user() };
        assert_eq!(directory(&asked(None), &homeless, &config()), Ok("/".into()));
        assert_eq!(directory(&asked(Some("bin")), &user(), &config()), Ok("/usr/bin".into()));
        let missing = ConnectError::invalid("cwd '/no' does not exist");
        assert_eq!(directory(&asked(Some("/no")), &user(), &config()), Err(missing));
    }

    #[test]
    fn odd_variables_are_refused() {
        assert!(variable("", "x").is_err() && variable("a=b", "x").is_err() && variable("a", "x\0").is_err());
    }
}
