//! Egress proxies of Bodies: their directories, the environment variables that point programs to them, and the import
//! of their decisions into the event log.
//!
//! The proxy process, `pal-egress`, belongs to the Body's supervisor. It writes each decision to a spool file before
//! it forwards a byte. Any `pal` imports the spool's lines into the event log: when it reads events, when a Body stops
//! or is removed, in `gc`, and in `pal serve` every few seconds.
//!
//! Invariant: each line of a spool becomes exactly one event, even if a `pal` is killed while it imports the line.
//! Invariant: the directory of a proxy is removed only after its last line is in the log.

use std::{collections::BTreeMap, fs, path::Path};

use body::egress::{CERTIFICATES, EgressDir, Position};
use proto::{
    BodyId, Draft, Event, EventData, Failure, Kind, Spec,
    egress::{Decision, DecisionKind, Policy, SpoolLine},
    event_data::{DecodedEvent, NetworkAllowed, NetworkCounted, NetworkDenied},
    spec,
};
use store::EventQuery;

use crate::{Fleet, Log};

/// Paths at which distributions keep the bundle of trusted certificates.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const BUNDLE_LEN_MAX: u64 = 8 << 20;

/// Mirrors of distributions, each with the reason why it is allowed. Package managers check the signatures of packages
/// that they fetch over plain http.
const MIRRORS: &[(&str, &str)] = &[
    ("deb.debian.org:443", "apt"),
    ("deb.debian.org:80+plain", "apt, whose packages are signed"),
    ("security.debian.org:443", "apt"),
    ("security.debian.org:80+plain", "apt, whose packages are signed"),
    ("archive.ubuntu.com:443", "apt of Ubuntu"),
    ("archive.ubuntu.com:80+plain", "apt of Ubuntu, whose packages are signed"),
    ("security.ubuntu.com:443", "apt of Ubuntu"),
    ("security.ubuntu.com:80+plain", "apt of Ubuntu, whose packages are signed"),
    ("ports.ubuntu.com:443", "apt of Ubuntu on other architectures"),
    ("ports.ubuntu.com:80+plain", "apt of Ubuntu on other architectures, whose packages are signed"),
    ("dl-cdn.alpinelinux.org:443", "apk"),
    ("dl-cdn.alpinelinux.org:80+plain", "apk, whose packages are signed"),
];

/// The rules that the commands of a build have by default: package registries and mirrors of distributions.
pub fn registries() -> Vec<String> {
    let mirrors = MIRRORS.iter().map(|(rule, _)| (*rule).to_owned());
    workspace::registries().into_iter().map(str::to_owned).chain(mirrors).collect()
}

/// Checks the syntax of egress rules before any work starts.
pub fn check_rules(allow: &[String]) -> Result<(), Failure> {
    parse(allow).map(drop)
}

fn parse(allow: &[String]) -> Result<Policy, Failure> {
    Policy::parse(allow).map_err(|error| {
        Failure::new(Kind::Usage, error.to_string()).hint("for example: --allow git.example.org:443")
    })
}

/// The bundle of certificates that this host trusts. If the host has none, programs use the bundle in the Body's own
/// root.
fn find_bundle() -> Option<&'static Path> {
    let fits =
        |path: &&str| fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() <= BUNDLE_LEN_MAX);
    BUNDLES.iter().copied().find(fits).map(Path::new)
}

/// The egress policy for the Bodies of one preparation or build, and the denials that they met.
#[derive(Debug)]
pub(crate) struct EgressSession {
    /// The policy, as it appears in the spec of each Body.
    pub spec: spec::Egress,
    /// The denials since the session began, without duplicates.
    pub denied: Vec<EgressDenial>,
    /// Position in the log of the last event that was examined.
    pos: u64,
}

/// A target that the egress proxy denied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EgressDenial {
    pub to: String,
    pub why: String,
}

impl std::fmt::Display for EgressDenial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.to, self.why)
    }
}

/// Manages the directories of the Bodies' egress proxies and imports their decisions into the log.
#[derive(Debug, Clone, Copy)]
pub struct EgressProxies<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl EgressProxies<'_> {
    /// Opens a session with these rules for a Body that is about to be created.
    pub(crate) fn open_session(&self, allow: Vec<String>) -> Result<EgressSession, Failure> {
        parse(&allow)?;
        Ok(EgressSession {
            spec: spec::Egress { allow },
            denied: Vec::new(),
            pos: self.fleet.log().last_pos()?,
        })
    }

    /// Creates the directory of a Body's egress proxy, if the spec has an egress policy.
    pub(crate) fn prepare(&self, spec: &Spec) -> Result<(), Failure> {
        let Some(egress) = &spec.egress else { return Ok(()) };
        parse(&egress.allow)?;
        self.dir(&spec.id).prepare(find_bundle()).map_err(|error| {
            Failure::new(Kind::Host, "cannot prepare the Body's egress proxy")
                .because(error)
                .hint("make room: pal gc")
        })
    }

    fn dir(&self, id: &BodyId) -> EgressDir {
        EgressDir::of(&self.fleet.data, id)
    }

    /// Imports the last decisions of an ended Body's egress proxy into the log, and removes the proxy's directory.
    pub(crate) fn close(&self, id: &BodyId) -> Result<(), Failure> {
        let dir = self.dir(id);
        if !dir.path().exists() {
            return Ok(());
        }
        dir.wait_ended().map_err(|error| {
            Failure::new(Kind::Host, format!("the egress proxy of Body {id} has not ended"))
                .because(error)
                .hint(format!("try again in a moment: pal rm --force {id}"))
        })?;
        self.fleet.log().drain_egress(id)?;
        dir.remove().map_err(|error| {
            Failure::new(Kind::Host, format!("cannot remove the egress proxy of Body {id}")).because(error)
        })
    }

    /// Adds the denials since the last call, and returns the new ones.
    pub(crate) fn note_denials(
        &self,
        body: &BodyId,
        session: &mut EgressSession,
    ) -> Result<Vec<EgressDenial>, Failure> {
        let log = self.fleet.log();
        log.drain_egress(body)?;
        let events = log.read(&EventQuery { after: session.pos, ..EventQuery::of_body(body) })?;
        let mut new: Vec<EgressDenial> = Vec::new();
        for event in events {
            session.pos = event.pos;
            let DecodedEvent::Known(EventData::NetworkDenied(NetworkDenied { to, why, .. })) = event.decode()
            else {
                continue;
            };
            let denied = EgressDenial { to, why };
            if !session.denied.contains(&denied) {
                session.denied.push(denied.clone());
                new.push(denied);
            }
        }
        Ok(new)
    }
}

impl Log {
    /// Imports the decisions of every egress proxy into the log.
    pub fn drain_all_egress(&self) -> Result<(), Failure> {
        EgressDir::bodies(self.data()).iter().try_for_each(|id| self.drain_egress(id))
    }

    /// Imports the decisions of one Body's egress proxy into the log.
    pub(crate) fn drain_egress(&self, id: &BodyId) -> Result<(), Failure> {
        let cannot = |error| {
            Failure::new(Kind::Host, format!("cannot read the egress decisions of Body {id}")).because(error)
        };
        let Some(mut drain) = EgressDir::of(self.data(), id).drain().map_err(cannot)? else { return Ok(()) };
        // A killed `pal` may have imported lines without saving its position in the spool.
        let Position { mut spool, mut pos } = drain.position();
        for event in self.read(&EventQuery { after: pos, ..EventQuery::of_body(id) })? {
            spool = spool.max(spool_end(&event).unwrap_or(0));
        }
        while let Some(batch) = drain.read(spool).map_err(cannot)? {
            if !batch.lines.is_empty() {
                pos = self.append_all(batch.lines.into_iter().map(|(end, line)| draft(id, end, line)))?.pos;
            }
            spool = batch.end;
        }
        drain.note(Position { spool, pos }).map_err(cannot)
    }
}

/// The offset in the spool at which this event's decision ends; `None` for other events.
fn spool_end(event: &Event) -> Option<u64> {
    match event.decode() {
        DecodedEvent::Known(EventData::NetworkAllowed(NetworkAllowed { spool, .. }))
        | DecodedEvent::Known(EventData::NetworkDenied(NetworkDenied { spool, .. }))
        | DecodedEvent::Known(EventData::NetworkCounted(NetworkCounted { spool, .. })) => spool,
        _ => None,
    }
}

/// The event for a spool line that ends at offset `end`.
fn draft(id: &BodyId, end: u64, line: SpoolLine) -> Draft {
    let decided = std::time::UNIX_EPOCH + std::time::Duration::from_micros(line.at_us);
    let decided_at = Some(store::clock::rfc3339(decided));
    let spool = Some(end);
    let Decision { to, allowed, why, count } = line.data;
    let data: EventData = match line.kind {
        DecisionKind::Allowed => NetworkAllowed { to, allowed, why, decided_at, spool }.into(),
        DecisionKind::Denied => NetworkDenied { to, allowed, why, decided_at, spool }.into(),
        DecisionKind::Counted => {
            NetworkCounted { to, allowed, why, count: count.unwrap_or(1), decided_at, spool }.into()
        }
    };
    Draft::about(id, data)
}

impl EgressSession {
    /// The environment variables that point programs to the proxy and to the certificates that this host trusts.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let proxy = format!("http://127.0.0.1:{}", proto::guest::EGRESS_PORT);
        let names = [
            "http_proxy",
            "https_proxy",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "CARGO_HTTP_PROXY",
            "npm_config_proxy",
            "npm_config_https_proxy",
            "PIP_PROXY",
            "YARN_HTTP_PROXY",
            "YARN_HTTPS_PROXY",
        ];
        let mut env: BTreeMap<String, String> =
            names.iter().map(|name| ((*name).to_owned(), proxy.clone())).collect();
        // The proxy would deny checks for newer versions, and the denials would confuse the user.
        let quiet = [
            ("npm_config_update_notifier", "false"),
            ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
            ("YARN_ENABLE_TELEMETRY", "0"),
            ("DO_NOT_TRACK", "1"),
        ];
        env.extend(quiet.map(|(name, value)| (name.to_owned(), value.to_owned())));
        // Programs reach servers inside the Body without the proxy.
        env.extend(
            ["no_proxy", "NO_PROXY"].map(|name| (name.to_owned(), "localhost,127.0.0.1,::1".to_owned())),
        );
        if find_bundle().is_some() {
            let bundle = format!("{}/{CERTIFICATES}", proto::guest::EGRESS_DIR);
            let names = [
                "SSL_CERT_FILE",
                "CURL_CA_BUNDLE",
                "GIT_SSL_CAINFO",
                "NODE_EXTRA_CA_CERTS",
                "CARGO_HTTP_CAINFO",
                "REQUESTS_CA_BUNDLE",
                "PIP_CERT",
                "YARN_HTTPS_CA_FILE_PATH",
                "BUNDLE_SSL_CA_CERT",
            ];
            env.extend(names.iter().map(|name| ((*name).to_owned(), bundle.clone())));
        }
        env
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_the_list_is_a_rule() {
        check_rules(&registries()).unwrap();
        for rule in
            ["pypi.org:443", "registry.npmjs.org:443", "index.crates.io:443", "deb.debian.org:80+plain"]
        {
            assert!(registries().iter().any(|known| known == rule), "{rule}");
        }
        assert!(
            !registries().iter().any(|rule| rule.contains("private") || rule.contains('*')),
            "nothing inside, and no whole domain"
        );
        assert!(
            MIRRORS.iter().all(|(rule, why)| !rule.contains("plain") || why.contains("signed")),
            "plain http needs a reason"
        );
    }
}
