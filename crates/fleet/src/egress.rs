//! Egress proxies of Bodies: their directories, the environment variables that point programs to them, and the import
//! of their decisions into the event log.
//!
//! The proxy process, `pal-egress`, belongs to the Body's supervisor. It writes each decision to a spool file before
//! it forwards a byte. Any `pal` imports the spool's lines into the event log: when it reads events, when a Body stops
//! or is removed, in `gc`, and in `pal serve` every few seconds.
//!
//! Invariant: each line of a spool becomes exactly one event, even if a `pal` is killed while it imports the line.
//! Invariant: the directory of a proxy is removed only after its last line is in the log.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use body::egress::{CERTIFICATES, EgressDir, Position};
use proto::{
    BodyId, Draft, Event, EventData, Failure, Kind, Spec,
    egress::{
        BodyIdentity, Decision, DecisionKind, EgressOrders, EgressRule, JAVA_CERTIFICATES, ORDERS, Policy,
        RuleAction, SpoolLine,
    },
    event_data::{
        DecodedEvent, NetworkAllowed, NetworkAsked, NetworkCounted, NetworkDenied, NetworkNamed, NetworkSpent,
    },
    spec::{self, BodyRole},
};
use serde::{Deserialize, Serialize};
use store::EventQuery;

use crate::{
    Fleet, Log,
    network::{check, check_accept, corporate_proxy, names_hosts},
    records::{KEYS, key_of},
    secrets::BodyAuthority,
};

/// Paths at which distributions keep the bundle of trusted certificates.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
const BUNDLE_LEN_MAX: u64 = 8 << 20;

/// Checks the rules of install and build steps, before any work starts. They may come from a repository, so each names a
/// host.
pub fn check_rules(allow: &[String]) -> Result<(), Failure> {
    let rules: Vec<EgressRule> = allow.iter().map(EgressRule::allow).collect();
    check(&rules)?;
    match rules.iter().find(|rule| !names_hosts(rule)) {
        Some(rule) => {
            let to = proto::egress::fit_to_show(&rule.to);
            Err(Failure::new(
                Kind::Usage,
                format!("{to:?} names no host; install and build steps reach hosts by name"),
            )
            .hint("for example: --allow git.example.org:443"))
        }
        None => Ok(()),
    }
}

/// The bundle of certificates that this host trusts: the one that its user chose, or the distribution's. If the host has
/// none, programs use the bundle in the Body's own root.
fn find_bundle(chosen: Option<PathBuf>) -> Option<PathBuf> {
    let fits = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() <= BUNDLE_LEN_MAX)
    };
    chosen.into_iter().chain(BUNDLES.iter().map(PathBuf::from)).find(fits)
}

/// The egress policy for the Bodies of one preparation or build, and the denials that they met.
#[derive(Debug)]
pub(crate) struct EgressSession {
    /// The policy, as it appears in the spec of each Body.
    pub spec: spec::Egress,
    /// The bundle of certificates that this host trusts.
    bundle: Option<PathBuf>,
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
        check_rules(&allow)?;
        Ok(EgressSession {
            spec: spec::Egress { allow, ..spec::Egress::default() },
            bundle: self.bundle(),
            denied: Vec::new(),
            pos: self.fleet.log().last_pos()?,
        })
    }

    /// Creates the directory of a Body's egress proxy with its orders, if the spec has an egress policy.
    pub(crate) fn prepare(&self, spec: &Spec) -> Result<(), Failure> {
        if spec.egress.is_none() {
            return Ok(());
        }
        let cannot = |error: std::io::Error| {
            Failure::new(Kind::Host, "cannot prepare the Body's egress proxy")
                .because(error)
                .hint("make room: pal gc")
        };
        let dir = self.dir(&spec.id);
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir.path()).map_err(cannot)?;
        let authority = self.authority(spec)?;
        let orders = self.orders(spec, None)?;
        check(&orders.rules)?;
        check_accept(&orders.accept)?;
        dir.prepare(self.bundle().as_deref(), &authority.certificate).map_err(cannot)?;
        dir.write_orders(&orders).map_err(cannot)
    }

    /// The orders of a Body's egress proxy. `kept` has those of a proxy that runs: secrets whose source cannot be read now
    /// stay as they are.
    pub(crate) fn orders(&self, spec: &Spec, kept: Option<&EgressOrders>) -> Result<EgressOrders, Failure> {
        let egress = spec.egress.clone().unwrap_or_default();
        let key = self.fleet.secrets().key()?;
        let flush = self.fleet.launch_context.flush;
        let body = self.identity(spec)?;
        let ceiling = self.ceiling(body.owner.as_deref())?;
        let mut orders = EgressOrders {
            body: Some(body),
            accept: egress.accept.clone(),
            ceiling,
            corporate_proxy: corporate_proxy(self.fleet, kept, &key)?,
            ..EgressOrders::new(egress.all_rules(), egress.generation, flush)
        };
        self.fleet.secrets().give_to_process(&mut orders, &egress.secrets, kept, &key)?;
        let authority = self.authority(spec)?.sign(&orders, &key)?;
        Ok(EgressOrders { authority, ..orders })
    }

    /// The Body, as the rules of others know it.
    fn identity(&self, spec: &Spec) -> Result<BodyIdentity, Failure> {
        let owner = self.fleet.leases().get(&spec.id)?.and_then(|lease| lease.owner);
        Ok(BodyIdentity { id: spec.id.clone(), name: spec.name.clone(), owner })
    }

    /// The ceiling for the Bodies of an owner. Keys never change and stay in the records, so no Body keeps a copy.
    fn ceiling(&self, owner: Option<&str>) -> Result<Option<Vec<EgressRule>>, Failure> {
        let Some(owner) = owner else { return Ok(None) };
        let key = self.fleet.table::<KeyCeiling>(KEYS).get(&key_of([owner])?)?;
        Ok(key.map(|key| key.value.network).filter(|rules| !rules.is_empty()).map(with_floor_only))
    }

    /// The ceiling of the key that owns a Body; none without one.
    pub(crate) fn ceiling_of(&self, id: &BodyId) -> Result<Option<Vec<EgressRule>>, Failure> {
        let owner = self.fleet.leases().get(id)?.and_then(|lease| lease.owner);
        self.ceiling(owner.as_deref())
    }

    /// The orders that the Body's egress proxy has; none without a proxy.
    pub(crate) fn current_orders(&self, id: &BodyId) -> Option<EgressOrders> {
        serde_json::from_slice(&fs::read(self.dir(id).path().join(ORDERS)).ok()?).ok()
    }

    fn authority(&self, spec: &Spec) -> Result<BodyAuthority, Failure> {
        BodyAuthority::read_or_create(self.dir(&spec.id).path(), &spec.id, &self.fleet.secrets().key()?)
    }

    /// The policy of a Body that gets one now, and the environment with the variables of the proxy.
    pub(crate) fn with_policy(&self, spec: &Spec) -> (spec::Egress, BTreeMap<String, String>) {
        let mut env = spec.env.clone();
        if spec.egress.is_none() && spec.role == BodyRole::Work {
            // Programs find the proxy by these variables from the next start on.
            env = self.env().into_iter().chain(env).collect();
        }
        (spec.egress.clone().unwrap_or_default(), env)
    }

    /// The environment variables of Bodies with an egress policy.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        proxy_env(self.bundle().as_deref())
    }

    fn bundle(&self) -> Option<PathBuf> {
        find_bundle((self.fleet.host_variables)("SSL_CERT_FILE").map(PathBuf::from))
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

/// The part of a key's record that limits the networks of its Bodies.
#[derive(Serialize, Deserialize)]
struct KeyCeiling {
    #[serde(default)]
    network: Vec<EgressRule>,
}

/// The ceiling of a key; denials alone leave everything else as it is.
fn with_floor_only(mut rules: Vec<EgressRule>) -> Vec<EgressRule> {
    if rules.iter().all(|rule| rule.action == RuleAction::Deny) {
        rules.extend(["*:*+private", "**.body.internal:*"].map(EgressRule::allow));
    }
    rules
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
        | DecodedEvent::Known(EventData::NetworkCounted(NetworkCounted { spool, .. }))
        | DecodedEvent::Known(EventData::NetworkAsked(NetworkAsked { spool, .. }))
        | DecodedEvent::Known(EventData::NetworkSpent(NetworkSpent { spool, .. }))
        | DecodedEvent::Known(EventData::NetworkNamed(NetworkNamed { spool, .. })) => spool,
        _ => None,
    }
}

/// The event for a spool line that ends at offset `end`.
fn draft(id: &BodyId, end: u64, line: SpoolLine) -> Draft {
    let decided = std::time::UNIX_EPOCH + std::time::Duration::from_micros(line.at_us);
    let decided_at = Some(store::clock::rfc3339(decided));
    let spool = Some(end);
    let Decision { to, allowed, why, count, address, spent, from } = line.data;
    let from = from.map(|from| from.to_string());
    let data: EventData = match (line.kind, address) {
        (DecisionKind::Named, Some(address)) => NetworkNamed { to, address, decided_at, spool }.into(),
        // A line without an address is no such line, and the spool's parser refuses it.
        (DecisionKind::Spent, _) => {
            let bytes = spent.map_or(0, |spent| spent.bytes);
            NetworkSpent { to, bytes, why, decided_at, spool }.into()
        }
        (DecisionKind::Allowed | DecisionKind::Named, _) => {
            NetworkAllowed { to, allowed, why, decided_at, spool, from }.into()
        }
        (DecisionKind::Asked, _) => NetworkAsked { to, allowed, why, decided_at, spool }.into(),
        (DecisionKind::Denied, _) => NetworkDenied { to, allowed, why, decided_at, spool, from }.into(),
        (DecisionKind::Counted, _) => {
            NetworkCounted { to, allowed, why, count: count.unwrap_or(1), decided_at, spool, from }.into()
        }
    };
    Draft::about(id, data)
}

/// Downloads of browsers and the like by install scripts of packages, each with its host and the variable that skips it.
/// The hosts are no registries, and without the variable their denial would end the installation of all packages.
const DOWNLOADS: &[(&str, &str, &str)] = &[
    ("cdn.playwright.dev", "PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD", "1"),
    ("storage.googleapis.com", "PUPPETEER_SKIP_DOWNLOAD", "true"),
    ("storage.googleapis.com", "PUPPETEER_SKIP_CHROMIUM_DOWNLOAD", "true"),
    ("download.cypress.io", "CYPRESS_INSTALL_BINARY", "0"),
    ("github.com", "ELECTRON_SKIP_BINARY_DOWNLOAD", "1"),
];

impl EgressSession {
    /// The environment variables that point programs to the proxy and to the certificates that this host trusts.
    pub(crate) fn env(&self) -> BTreeMap<String, String> {
        let policy = Policy::new(&self.spec.all_rules()).unwrap_or_default();
        let skipped = DOWNLOADS.iter().filter(|(host, ..)| !policy.resolves(host));
        let skipped = skipped.map(|(_, name, value)| ((*name).to_owned(), (*value).to_owned()));
        proxy_env(self.bundle.as_deref()).into_iter().chain(skipped).collect()
    }
}

/// The environment variables of Bodies with an egress policy: they point programs to the proxy, which explains a denial
/// in its answer, and to the certificates that they may trust, if this host has a bundle of them.
pub(crate) fn proxy_env(bundle: Option<&Path>) -> BTreeMap<String, String> {
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
    // Programs that know no such variable: Node's own http and fetch, Java, and Electron's downloader.
    let (host, port) = ("127.0.0.1", proto::guest::EGRESS_PORT);
    let mut java: Vec<String> = ["http", "https"]
        .iter()
        .map(|scheme| format!("-D{scheme}.proxyHost={host} -D{scheme}.proxyPort={port}"))
        .collect();
    if bundle.is_some() {
        java.push(format!("-Djavax.net.ssl.trustStore={}/{JAVA_CERTIFICATES}", proto::guest::EGRESS_DIR));
    }
    env.insert("JAVA_TOOL_OPTIONS".into(), java.join(" "));
    env.extend(
        ["NODE_USE_ENV_PROXY", "ELECTRON_GET_USE_PROXY"].map(|name| (name.to_owned(), "1".to_owned())),
    );
    // The proxy would deny checks for newer versions, and the denials would confuse the user.
    let quiet = [
        ("npm_config_update_notifier", "false"),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
        ("YARN_ENABLE_TELEMETRY", "0"),
        ("DO_NOT_TRACK", "1"),
    ];
    env.extend(quiet.map(|(name, value)| (name.to_owned(), value.to_owned())));
    // Programs reach servers inside the Body without the proxy.
    env.extend(["no_proxy", "NO_PROXY"].map(|name| (name.to_owned(), "localhost,127.0.0.1,::1".to_owned())));
    if bundle.is_some() {
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
            "AWS_CA_BUNDLE",
            "DENO_CERT",
            "npm_config_cafile",
            "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
            "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
            "PERL_LWP_SSL_CA_FILE",
            "HTTPLIB2_CA_CERTS",
        ];
        env.extend(names.iter().map(|name| ((*name).to_owned(), bundle.clone())));
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_find_the_proxy_and_the_servers_of_their_own_body() {
        let env = proxy_env(Some(Path::new("/etc/bundle.pem")));
        assert_eq!(env["https_proxy"], format!("http://127.0.0.1:{}", proto::guest::EGRESS_PORT));
        assert_eq!(env["no_proxy"], "localhost,127.0.0.1,::1");
        assert_eq!(env["SSL_CERT_FILE"], "/run/palisade/certificates.pem");
        assert!(
            env["JAVA_TOOL_OPTIONS"].ends_with(" -Djavax.net.ssl.trustStore=/run/palisade/certificates.p12")
        );
        assert!(!proxy_env(None).contains_key("SSL_CERT_FILE"));
        assert!(!proxy_env(None)["JAVA_TOOL_OPTIONS"].contains("trustStore"));
    }

    #[test]
    fn the_bundle_that_the_user_chose_comes_first() {
        let chosen = std::env::temp_dir().join(format!("palisade-bundle-{}", std::process::id()));
        let usual = find_bundle(None);
        assert_eq!(find_bundle(Some(chosen.clone())), usual, "a file that is not there is passed over");
        fs::write(&chosen, "certificates").unwrap();
        assert_eq!(find_bundle(Some(chosen.clone())), Some(chosen.clone()));
        fs::remove_file(chosen).unwrap();
    }

    #[test]
    fn a_line_about_a_name_becomes_its_event() {
        let address = "198.18.0.7".parse().unwrap();
        let line =
            SpoolLine { kind: DecisionKind::Named, at_us: 1, data: Decision::named("pypi.org", address) };
        let named = draft(&"b1".parse().unwrap(), 90, line);
        assert_eq!(named.kind, "network.named");
        assert_eq!(
            named.data,
            serde_json::json!({
                "to": "pypi.org", "address": "198.18.0.7", "decided_at": "1970-01-01T00:00:00.000001Z", "spool": 90
            })
        );
    }

    #[test]
    fn rules_are_checked_before_work_starts() {
        check_rules(&crate::registries()).unwrap();
        for bad in ["https://pypi.org", "*:443", "*", "192.0.2.7:443", "0.0.0.0/0:*", "[::]/0"] {
            assert!(check_rules(&[bad.into()]).is_err(), "{bad}");
        }
    }
}
