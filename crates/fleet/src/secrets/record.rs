//! Records of secrets, and the terms from which they are made.

use std::{fmt, path::PathBuf};

use proto::{
    Failure, Kind,
    egress::{Policy, SecretFields, SshLogin, is_placeholder_byte},
    text::visible,
};
use serde::{Deserialize, Serialize};
use vault::Zeroizing;

use super::{SecretService, ssh};

/// Longest name of a secret.
const NAME_LEN_MAX: usize = 63;
/// Most hosts, headers and variables of a secret.
pub(super) const LIST_LEN_MAX: usize = 32;
/// Longest host, name of a header or of a variable, in bytes.
pub(super) const ITEM_LEN_MAX: usize = 255;
/// Longest beginning of placeholders.
const PREFIX_LEN_MAX: usize = 32;
/// Headers in which no value belongs: servers and proxies read, echo or record them.
const REFUSED_HEADERS: &[&str] = &[
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "upgrade",
    "te",
    "trailer",
    "expect",
    "user-agent",
    "referer",
    "origin",
    "access-control-request-headers",
    "access-control-request-method",
];

/// A secret that Bodies may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretRecord {
    /// Its name.
    pub name: String,
    /// The place of its value.
    pub source: SecretSource,
    /// The hosts to which it may go, over TLS.
    pub hosts: Vec<String>,
    /// The parts of a request in which it may stand.
    pub fields: SecretFields,
    /// The variables that hold its placeholder in a Body.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Whether git gets the placeholder as the password for its hosts.
    #[serde(default)]
    pub git: bool,
    /// The beginning of its placeholders, for programs that check the shape of a key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// How it logs in, if it is a private key of ssh. Then its hosts have a port, and it stands in no request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssh: Option<SshLogin>,
    /// The time at which it was last set.
    pub created_at: String,
}

/// The place of a secret's value.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SecretSource {
    /// The record, sealed with the data directory's key.
    Sealed(String),
    /// A file of the host.
    File(PathBuf),
    /// An environment variable of the `pal` that starts a Body.
    Env(String),
    /// The output of a command of the host.
    Command(Vec<String>),
}

impl SecretSource {
    /// Its kind in one word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sealed(_) => "stored",
            Self::File(_) => "file",
            Self::Env(_) => "env",
            Self::Command(_) => "command",
        }
    }
}

impl fmt::Debug for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())
    }
}

/// The value of a new secret, or the place where it is.
#[derive(Clone)]
pub enum SecretOrigin {
    /// The value itself.
    Value(Zeroizing<String>),
    /// A file of the host.
    File(PathBuf),
    /// An environment variable of the `pal` that starts a Body.
    Env(String),
    /// A command of the host, and its arguments; no shell runs it.
    Command(Vec<String>),
}

impl fmt::Debug for SecretOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretOrigin")
    }
}

/// A secret to store.
#[derive(Debug, Clone)]
pub struct SecretTerms {
    /// Its name.
    pub name: String,
    /// Its value, or the place of it.
    pub origin: SecretOrigin,
    /// A known service, which adds hosts, fields and variables.
    pub service: Option<String>,
    /// The hosts to which it may go: `HOST[:PORTS]` or a pattern of names.
    pub hosts: Vec<String>,
    /// The parts of a request in which it may stand; the header `authorization` if none is named.
    pub fields: SecretFields,
    /// The variables that hold its placeholder; if none is named, one with the name of the secret in upper case.
    pub env: Vec<String>,
    /// Whether git gets the placeholder as the password for its hosts.
    pub git: bool,
    /// The beginning of its placeholders.
    pub prefix: Option<String>,
    /// For a private key of ssh: how it logs in. As `git` if no user is named; the known hosts of this user tell the keys of
    /// hosts that are not named.
    pub ssh: Option<SshLogin>,
}

impl SecretTerms {
    /// A secret with nothing but a name and an origin.
    pub fn new(name: impl Into<String>, origin: SecretOrigin) -> Self {
        Self {
            name: name.into(),
            origin,
            service: None,
            hosts: Vec::new(),
            fields: SecretFields::default(),
            env: Vec::new(),
            git: false,
            prefix: None,
            ssh: None,
        }
    }

    /// The record of these terms.
    pub(super) fn into_record(
        self,
        source: SecretSource,
        created_at: String,
    ) -> Result<SecretRecord, Failure> {
        check_name(&self.name)?;
        if self.ssh.is_some() {
            return ssh::record(self, source, created_at);
        }
        let Self { name, mut hosts, mut fields, mut env, mut git, mut prefix, service, .. } = self;
        fields.headers.iter_mut().for_each(|header| header.make_ascii_lowercase());
        if let Some(service) = service {
            let known = SecretService::find(&service)?;
            let own = known.fields();
            hosts.extend(known.hosts.iter().map(|host| (*host).to_owned()));
            fields.headers.extend(own.headers);
            fields.basic |= own.basic;
            fields.query |= own.query;
            fields.sigv4 |= own.sigv4;
            env.extend(known.env.iter().map(|variable| (*variable).to_owned()));
            git |= known.git;
            prefix = prefix.or(known.prefix.map(str::to_owned));
        }
        if fields == SecretFields::default() {
            fields.headers.push("authorization".to_owned());
        }
        if git {
            fields.basic = true;
        }
        if env.is_empty() {
            env.push(default_variable(&name));
        }
        [&mut hosts, &mut fields.headers, &mut env].into_iter().for_each(remove_repetitions);
        let record = SecretRecord { name, source, hosts, fields, env, git, prefix, ssh: None, created_at };
        record.check()?;
        Ok(record)
    }
}

impl SecretRecord {
    fn check(&self) -> Result<(), Failure> {
        let usage = |message: String| Failure::new(Kind::Usage, message);
        if self.hosts.is_empty() {
            return Err(usage(format!("the secret {} names no host to which it may go", self.name))
                .hint(format!("name one: pal secret set {} --to api.example.org", self.name))
                .hint("or a known service: --for github"));
        }
        for (what, list) in
            [("hosts", &self.hosts), ("headers", &self.fields.headers), ("variables", &self.env)]
        {
            if list.len() > LIST_LEN_MAX || list.iter().any(|item| item.len() > ITEM_LEN_MAX) {
                return Err(usage(format!(
                    "the secret {} may name {LIST_LEN_MAX} {what} of {ITEM_LEN_MAX} bytes",
                    self.name
                )));
            }
        }
        for host in &self.hosts {
            Policy::default().inspecting([host]).map_err(|_| {
                usage(format!("{:?} is not a host to which a secret may go", visible(host)))
                    .hint("name a host, such as api.example.org, api.example.org:8443 or *.example.org")
            })?;
        }
        for header in &self.fields.headers {
            let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
            if header.is_empty() || !header.bytes().all(is_token) {
                return Err(usage(format!("{:?} is not the name of a header", visible(header))));
            }
            if REFUSED_HEADERS.contains(&header.as_str()) {
                return Err(usage(format!("no secret belongs in the header {header}"))
                    .hint("name the header in which the service takes it, such as authorization"));
            }
        }
        for variable in &self.env {
            let is_plain = |byte: u8| byte.is_ascii_graphic() && byte != b'=';
            if variable.is_empty() || !variable.bytes().all(is_plain) || variable.starts_with("GIT_CONFIG_") {
                let name = visible(variable);
                return Err(usage(format!("{name:?} cannot be a variable with a placeholder"))
                    .hint("for example: --env API_TOKEN"));
            }
        }
        let prefix = self.prefix.as_deref().unwrap_or_default();
        if prefix.len() > PREFIX_LEN_MAX || !prefix.bytes().all(is_placeholder_byte) {
            return Err(usage(format!(
                "a placeholder begins with at most {PREFIX_LEN_MAX} letters, digits, `-` and `_`"
            )));
        }
        Ok(())
    }
}

/// Checks the name of a secret.
pub(super) fn check_name(name: &str) -> Result<(), Failure> {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let first = name.bytes().next().is_some_and(is_plain);
    let rest = name.bytes().all(|byte| is_plain(byte) || byte == b'-' || byte == b'_');
    if first && rest && name.len() <= NAME_LEN_MAX {
        return Ok(());
    }
    Err(Failure::new(Kind::Usage, format!("{:?} cannot be the name of a secret", visible(name)))
        .hint(format!("use at most {NAME_LEN_MAX} lower-case letters, digits, `-` and `_`, such as github")))
}

fn default_variable(name: &str) -> String {
    let upper = name.to_ascii_uppercase().replace('-', "_");
    if upper.starts_with(|first: char| first.is_ascii_digit()) { format!("SECRET_{upper}") } else { upper }
}

pub(super) fn remove_repetitions(list: &mut Vec<String>) {
    let mut kept: Vec<String> = Vec::with_capacity(list.len());
    for item in list.drain(..) {
        if !kept.contains(&item) {
            kept.push(item);
        }
    }
    *list = kept;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(name: &str, hosts: &[&str]) -> SecretTerms {
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        SecretTerms { hosts, ..SecretTerms::new(name, SecretOrigin::Env("X".into())) }
    }

    fn record(terms: SecretTerms) -> Result<SecretRecord, Failure> {
        terms.into_record(SecretSource::Env("X".into()), "now".into())
    }

    #[test]
    fn terms_without_fields_mean_the_usual_ones() {
        let plain = record(terms("deploy-key", &["api.example.org"])).unwrap();
        assert_eq!(
            (plain.fields.headers, plain.env),
            (vec!["authorization".into()], vec!["DEPLOY_KEY".into()])
        );
        assert_eq!(record(terms("2fa", &["a.test"])).unwrap().env, ["SECRET_2FA"]);
        let service =
            SecretTerms { service: Some("github".into()), ..terms("gh", &["git.corp:8443", "github.com"]) };
        let github = record(service).unwrap();
        assert_eq!(github.hosts[..3], ["git.corp:8443", "github.com", "api.github.com"]);
        assert!(github.git && github.fields.basic && github.prefix.as_deref() == Some("ghp_"));
        let aws = SecretTerms { service: Some("aws".into()), ..terms("aws", &[]) };
        assert!(record(aws).unwrap().fields.sigv4);
        let query = SecretFields { query: true, ..SecretFields::default() };
        let query = record(SecretTerms { fields: query.clone(), ..terms("q", &["a.test"]) }).unwrap();
        assert!(query.fields.headers.is_empty() && query.fields.query);
    }

    #[test]
    fn terms_that_cannot_work_are_refused() {
        for name in ["", "A", "-a", "a b", "a/b", "ä", &"a".repeat(64)] {
            assert!(record(terms(name, &["a.test"])).is_err(), "{name}");
        }
        for host in ["*", "192.0.2.7", "a.test+private", "a.test/path", "GET a.test", "https://a.test", ""] {
            assert!(record(terms("a", &[host])).is_err(), "{host}");
        }
        assert!(record(terms("a", &[])).unwrap_err().hints[0].contains("--to"));
        for header in ["host", "User-Agent", "a b", "a:b", ""] {
            let fields = SecretFields { headers: vec![header.into()], ..SecretFields::default() };
            assert!(record(SecretTerms { fields, ..terms("a", &["a.test"]) }).is_err(), "{header}");
        }
        for variable in ["", "A=B", "A B", "GIT_CONFIG_COUNT"] {
            let env = vec![variable.to_owned()];
            assert!(record(SecretTerms { env, ..terms("a", &["a.test"]) }).is_err(), "{variable}");
        }
        let prefix = Some("sk ".to_owned());
        assert!(record(SecretTerms { prefix, ..terms("a", &["a.test"]) }).is_err());
        assert!(record(SecretTerms { service: Some("none".into()), ..terms("a", &[]) }).is_err());
    }

    #[test]
    fn neither_terms_nor_records_show_a_value() {
        let value = SecretOrigin::Value("hunter2".to_owned().into());
        let terms = SecretTerms { origin: value, ..terms("a", &["a.test"]) };
        assert!(!format!("{terms:?}").contains("hunter2"));
        let record = terms.into_record(SecretSource::Sealed("c2VhbGVk".into()), "now".into()).unwrap();
        assert!(!format!("{record:?}").contains("c2VhbGVk"));
    }
}
