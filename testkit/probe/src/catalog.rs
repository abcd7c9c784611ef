//! The table of probes: the name of each, the door that it tries, and how its control runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::doors;
use crate::run::InitialState;
use crate::verdict::{ProbeOutcome, broken};

/// How the control shows that the same probe succeeds with the door open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PositiveControl {
    /// As root on the host, outside of any sandbox.
    Host,
    /// As an ordinary user on the host: the door is open to every user.
    HostUser,
    /// On the host, after the test has prepared the resource that the arguments (or `about`) name.
    Door,
    /// Not on the host: it would use up the resource that the limit in its argument protects.
    NoneLimit,
    /// This host lacks the resource, so the probe proves nothing here.
    AbsentHere,
}

/// The input of a probe.
pub struct ProbeCall<'a> {
    pub args: &'a ProbeArgs,
    /// The path that the table gives to this probe, or nothing.
    pub target: &'static str,
    /// A private directory, removed after the probe; none if nothing can be written.
    pub scratch: Option<PathBuf>,
    pub start: &'a InitialState,
}

impl ProbeCall<'_> {
    /// An argument that `needs` requires.
    pub fn arg(&self, key: &str) -> &str {
        self.args.get(key).unwrap_or_default()
    }

    /// A numeric argument.
    pub fn number<N: std::str::FromStr>(&self, key: &str) -> Result<N, ProbeOutcome> {
        let text = self.arg(key);
        text.parse().map_err(|_| broken(format!("{key}={text} is not a number")))
    }

    /// The private directory, or why the probe cannot continue.
    pub fn scratch(&self) -> Result<&Path, ProbeOutcome> {
        self.scratch.as_deref().ok_or_else(|| broken("no writable directory to try it in (give dir=)"))
    }
}

/// One attempt at one door.
pub struct Probe {
    pub name: &'static str,
    pub door: &'static str,
    pub about: &'static str,
    pub control: PositiveControl,
    pub needs: &'static [&'static str],
    pub target: &'static str,
    pub run: fn(&ProbeCall<'_>) -> ProbeOutcome,
}

impl Probe {
    const fn new(
        control: PositiveControl,
        name: &'static str,
        about: &'static str,
        run: fn(&ProbeCall<'_>) -> ProbeOutcome,
    ) -> Self {
        Self { name, door: "", about, control, needs: &[], target: "", run }
    }

    /// A door that is open to root on the host only.
    pub const fn host(
        name: &'static str,
        about: &'static str,
        run: fn(&ProbeCall<'_>) -> ProbeOutcome,
    ) -> Self {
        Self::new(PositiveControl::Host, name, about, run)
    }

    /// A door that is open to every user on the host.
    pub const fn user(
        name: &'static str,
        about: &'static str,
        run: fn(&ProbeCall<'_>) -> ProbeOutcome,
    ) -> Self {
        Self::new(PositiveControl::HostUser, name, about, run)
    }

    /// A door that the test prepares.
    pub const fn door(
        name: &'static str,
        about: &'static str,
        run: fn(&ProbeCall<'_>) -> ProbeOutcome,
    ) -> Self {
        Self::new(PositiveControl::Door, name, about, run)
    }

    /// A limit that the test names.
    pub const fn limit(
        name: &'static str,
        about: &'static str,
        run: fn(&ProbeCall<'_>) -> ProbeOutcome,
    ) -> Self {
        Self::new(PositiveControl::NoneLimit, name, about, run)
    }

    /// Sets the required arguments.
    pub const fn needs(mut self, keys: &'static [&'static str]) -> Self {
        self.needs = keys;
        self
    }

    /// Sets the path.
    pub const fn at(mut self, path: &'static str) -> Self {
        self.target = path;
        self
    }

    /// The first missing argument.
    pub fn missing(&self, args: &ProbeArgs) -> Option<&'static str> {
        self.needs.iter().copied().find(|key| args.get(key).is_none())
    }
}

/// Every probe, door by door.
pub fn all() -> impl Iterator<Item = &'static Probe> {
    doors::TABLES.iter().flat_map(|table| table.iter())
}

/// A probe in the output of `probe list`.
#[derive(Serialize)]
pub struct ProbeListing {
    name: &'static str,
    door: &'static str,
    about: &'static str,
    control: PositiveControl,
    needs: &'static [&'static str],
}

impl From<&'static Probe> for ProbeListing {
    fn from(probe: &'static Probe) -> Self {
        let Probe { name, door, about, control, needs, target, .. } = *probe;
        let here = target.is_empty() || Path::new(target).symlink_metadata().is_ok();
        Self { name, door, about, control: if here { control } else { PositiveControl::AbsentHere }, needs }
    }
}

/// The `key=value` words of the command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ProbeArgs(BTreeMap<String, String>);

impl ProbeArgs {
    /// Splits each word at its first `=`; returns a word that has none as the error.
    pub fn parse<'a>(words: &[&'a str]) -> Result<Self, &'a str> {
        let pair =
            |word: &&'a str| word.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())).ok_or(*word);
        words.iter().map(pair).collect::<Result<_, _>>().map(Self)
    }

    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_enough() {
        let names: Vec<_> = all().map(|p| p.name).collect();
        let distinct: BTreeSet<_> = names.iter().copied().collect();
        assert_eq!(names.len(), distinct.len());
        assert!(names.len() >= 80, "{}", names.len());
        assert!(
            names
                .iter()
                .all(|n| n.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'))
        );
    }

    #[test]
    fn every_probe_says_where_it_stands() {
        let doors = ["files", "procfs", "processes", "network", "kernel", "limits", "identity"];
        for probe in all() {
            assert!(doors.contains(&probe.door), "{}", probe.name);
            assert!(!probe.about.is_empty(), "{}", probe.name);
        }
        for door in doors {
            assert!(all().any(|p| p.door == door), "{door}");
        }
    }

    #[test]
    fn what_uses_up_a_limit_never_runs_unasked() {
        for probe in all().filter(|p| p.control == PositiveControl::NoneLimit) {
            assert!(!probe.needs.is_empty(), "{}", probe.name);
        }
    }

    #[test]
    fn no_process_is_attacked_that_the_caller_did_not_name() {
        let named = |p: &&Probe| p.about.contains("INIT") || p.about.contains("process of the host");
        for probe in all().filter(named) {
            assert!(probe.needs.iter().any(|key| ["init", "pid", "comm"].contains(key)), "{}", probe.name);
        }
    }

    #[test]
    fn arguments_split_at_the_first_equals_sign() {
        let args = ProbeArgs::parse(&["env=A=B", "port=1"]).unwrap();
        assert_eq!((args.get("env"), args.get("port"), args.get("x")), (Some("A=B"), Some("1"), None));
        assert_eq!(ProbeArgs::parse(&["port"]), Err("port"));
    }
}
