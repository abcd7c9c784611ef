//! The probe: where it is, what it can try, what it said.

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
    /// Nobody knows.
    Broken,
}

/// How the same probe is shown to succeed with the door open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeControl {
    /// As root on the host.
    Host,
    /// As anybody on the host.
    HostUser,
    /// On the host, once the test has prepared what its arguments name.
    Door,
    /// In the Body, below the bound.
    NoneLimit,
    /// Nowhere on this machine.
    AbsentHere,
}

/// A probe, as `probe list` shows it.
#[derive(Debug, Clone, Deserialize)]
pub struct ListedProbe {
    /// Its name.
    pub name: String,
    /// What it tries.
    pub about: String,
    /// Its control.
    pub control: ProbeControl,
    /// Arguments without which it cannot run.
    pub needs: Vec<String>,
}

/// What a probe said.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ProbeAnswer {
    /// Which probe.
    pub name: String,
    /// Whether its door is open.
    pub verdict: ProbeVerdict,
    /// What that rests on.
    pub detail: String,
}

/// Where the probe is on this host.
pub fn path() -> PathBuf {
    std::env::var_os("TESTKIT_PROBE").map_or_else(|| env!("PROBE").into(), PathBuf::from)
}

/// Every probe there is.
pub fn list() -> Vec<ListedProbe> {
    let output =
        Command::new(path()).arg("list").stdin(Stdio::null()).output().expect("the probe can be run");
    serde_json::from_slice(&output.stdout).expect("the probe lists itself")
}

/// Reads what `probe all` printed.
pub fn reports(printed: &[u8]) -> Vec<ProbeAnswer> {
    serde_json::from_slice(printed).unwrap_or_else(|error| {
        panic!("{error} in what the probe said: {:?}", String::from_utf8_lossy(printed))
    })
}

/// Reads what `probe run` printed.
pub fn report(printed: &[u8]) -> ProbeAnswer {
    serde_json::from_slice(printed).unwrap_or_else(|error| {
        panic!("{error} in what the probe said: {:?}", String::from_utf8_lossy(printed))
    })
}
