//! A way out for a Body that is being prepared or built: opened, told to its programs, written down.
//!
//! Invariant: a Body's way out ends with whoever opened it; nobody else can open it again.
//! Invariant: what was decided about each connection is an event.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt, path::Path};

use body::egress::{Egress, Policy};
use proto::{BodyId, Draft, Failure, Kind, event::hex, spec};
use serde_json::json;

use crate::Fleet;

/// Where systems keep whom they trust.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// The same for a Body, beside the socket of its way out.
const CERTIFICATES: &str = "certificates.pem";
const BUNDLE_LEN_MAX: u64 = 8 << 20;

/// Mirrors of distributions, and why each may be reached. What comes over plain http is signed, and checked by who fetches it.
const MIRRORS: &[(&str, &str)] = &[
    ("deb.debian.org:443", "apt"),
    ("deb.debian.org:80+plain", "apt, whose packages are signed"),
    ("security.debian.org:443", "apt"),
    ("security.debian.org:80+plain", "apt, whose packages are signed"),
    ("archive.ubuntu.com:443", "apt of Ubuntu"),
    ("archive.ubuntu.com:80+plain", "apt of Ubuntu, whose packages are signed"),
    ("security.ubuntu.com:443", "apt of Ubuntu"),
    ("security.ubuntu.com:80+plain", "apt of Ubuntu, whose packages are signed"),
    ("ports.ubuntu.com:443", "apt of Ubuntu on other processors"),
    ("ports.ubuntu.com:80+plain", "apt of Ubuntu on other processors, whose packages are signed"),
    ("dl-cdn.alpinelinux.org:443", "apk"),
    ("dl-cdn.alpinelinux.org:80+plain", "apk, whose packages are signed"),
];

/// Names that commands of a build may reach where nobody says otherwise: registries of packages and mirrors of
/// distributions.
pub fn registries() -> Vec<String> {
    let mirrors = MIRRORS.iter().map(|(rule, _)| (*rule).to_owned());
    workspace::registries().into_iter().map(str::to_owned).chain(mirrors).collect()
}

/// Checks rules before anything is begun.
pub fn check_rules(allow: &[String]) -> Result<(), Failure> {
    Policy::parse(allow).map(drop).map_err(|error| {
        Failure::new(Kind::Usage, error.to_string()).hint("for example: --allow git.example.org:443")
    })
}

/// A way out that is open.
#[derive(Debug)]
pub(crate) struct WayOut {
    egress: Egress,
    /// What the Body's spec says of it.
    pub spec: spec::Egress,
    trusted: bool,
}

impl Fleet {
    /// Opens a way out to these names.
    pub(crate) fn open_way_out(&self, allow: Vec<String>) -> Result<WayOut, Failure> {
        let policy = Policy::parse(&allow).map_err(|error| Failure::new(Kind::Usage, error.to_string()))?;
        let drawn = sys::random::bytes::<8>()
            .map_err(|error| Failure::new(Kind::Host, "cannot draw a name").because(error))?;
        let dir = self.data.join("egress").join(hex(&drawn));
        let egress = Egress::open(&dir, policy)
            .map_err(|error| Failure::new(Kind::Host, "cannot open a way out for the Body").because(error))?;
        let trusted = put_certificates(&dir);
        Ok(WayOut { egress, spec: spec::Egress { dir, allow }, trusted })
    }

    /// Writes down what was decided since the last time, and gives the denials.
    pub(crate) fn note_decisions(&self, body: &BodyId, way: &mut WayOut) -> Result<Vec<Denied>, Failure> {
        let mut denied: Vec<Denied> = Vec::new();
        for decision in way.egress.decisions() {
            let kind = if decision.allowed { "network.allowed" } else { "network.denied" };
            self.append(Draft::body(kind, body, json!(decision)))?;
            if !decision.allowed {
                denied.push(Denied { to: decision.to, why: decision.why });
            }
        }
        denied.dedup();
        Ok(denied)
    }
}

/// Where a Body was not let out to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Denied {
    pub to: String,
    pub why: String,
}

impl std::fmt::Display for Denied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.to, self.why)
    }
}

impl WayOut {
    /// How programs find the way out, and whom they may trust there: whom this machine trusts.
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
        // Who asks whether there is a newer one asks for nothing that was asked for.
        let quiet = [
            ("npm_config_update_notifier", "false"),
            ("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
            ("YARN_ENABLE_TELEMETRY", "0"),
            ("DO_NOT_TRACK", "1"),
        ];
        env.extend(quiet.map(|(name, value)| (name.to_owned(), value.to_owned())));
        // What listens in the Body itself is no business of the way out.
        env.extend(
            ["no_proxy", "NO_PROXY"].map(|name| (name.to_owned(), "localhost,127.0.0.1,::1".to_owned())),
        );
        if self.trusted {
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

/// Puts whom this machine trusts where the Body sees it. A machine that trusts nobody leaves that to the Body's own root.
fn put_certificates(dir: &Path) -> bool {
    let fits =
        |path: &&&str| fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() <= BUNDLE_LEN_MAX);
    let Some(bundle) = BUNDLES.iter().find(fits) else { return false };
    let place = dir.join(CERTIFICATES);
    // The Body's ids are others than ours.
    fs::copy(bundle, &place)
        .and_then(|_| fs::set_permissions(&place, fs::Permissions::from_mode(0o644)))
        .is_ok()
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
