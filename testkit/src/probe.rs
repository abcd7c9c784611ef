//! The probe: its path, its list of doors, its answers.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use serde::Deserialize;

/// Whether a door is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeVerdict {
    /// Open.
    Reached,
    /// Closed.
    Denied,
    /// Unknown, because the probe could not try.
    Broken,
}

/// How the control shows that the same probe succeeds with the door open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeControl {
    /// As root on the host.
    Host,
    /// As any user on the host.
    HostUser,
    /// On the host, after the test has prepared the resource that its arguments name.
    Door,
    /// In the Body, below the limit.
    NoneLimit,
    /// Nowhere on this host.
    AbsentHere,
}

/// A probe in the output of `probe list`.
#[derive(Debug, Clone, Deserialize)]
pub struct ListedProbe {
    /// Its name.
    pub name: String,
    /// A description of the attempt.
    pub about: String,
    /// Its control.
    pub control: ProbeControl,
    /// The required arguments.
    pub needs: Vec<String>,
}

/// The answer of a probe.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ProbeAnswer {
    /// The name of the probe.
    pub name: String,
    /// Whether its door is open.
    pub verdict: ProbeVerdict,
    /// The evidence.
    pub detail: String,
}

/// The path of the probe on this host.
pub fn path() -> PathBuf {
    std::env::var_os("TESTKIT_PROBE").map_or_else(|| env!("PROBE").into(), PathBuf::from)
}

/// All probes.
pub fn list() -> Vec<ListedProbe> {
    let output =
        Command::new(path()).arg("list").stdin(Stdio::null()).output().expect("the probe can be run");
    serde_json::from_slice(&output.stdout).expect("the probe lists itself")
}

/// Parses the output of `probe all`.
pub fn reports(printed: &[u8]) -> Vec<ProbeAnswer> {
    serde_json::from_slice(printed).unwrap_or_else(|error| {
        panic!("{error} in what the probe said: {:?}", String::from_utf8_lossy(printed))
    })
}

/// Parses the output of `probe run`.
pub fn report(printed: &[u8]) -> ProbeAnswer {
    serde_json::from_slice(printed).unwrap_or_else(|error| {
        panic!("{error} in what the probe said: {:?}", String::from_utf8_lossy(printed))
    })
}
