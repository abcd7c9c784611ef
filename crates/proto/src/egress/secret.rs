//! Secrets in the orders of an egress process: their placeholders, the hosts and fields they belong to, their sealed
//! values, and keys of ssh.

use serde::{Deserialize, Serialize};

/// Most secrets of one Body.
pub const SECRETS_MAX: usize = 64;
/// The text in every placeholder by which the egress process finds one, also one that belongs to no secret of the Body.
pub const PLACEHOLDER_MARK: &str = "palph0";

/// A secret that a Body uses and never sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressSecret {
    /// Its name.
    pub name: String,
    /// The text that stands for it in the Body: letters, digits, `-` and `_`, with [`PLACEHOLDER_MARK`] among them.
    pub placeholder: String,
    /// The hosts it may go to, over TLS: `HOST[:PORTS]` or a pattern of names; port 443 without ports.
    pub hosts: Vec<String>,
    /// The parts of a request in which it may stand.
    pub fields: SecretFields,
    /// The sealed value.
    pub sealed: String,
}

/// The parts of a request in which a secret may stand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretFields {
    /// Names of headers, in lower case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<String>,
    /// The user or the password of `Authorization: Basic`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub basic: bool,
    /// The query of the URL.
    #[serde(default, skip_serializing_if = "is_false")]
    pub query: bool,
    /// The body.
    #[serde(default, skip_serializing_if = "is_false")]
    pub body: bool,
    /// Signatures of AWS (SigV4), which are made anew: the secret is a key of AWS, `ID:SECRET` or JSON.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sigv4: bool,
}

/// A private key of ssh with which programs of a Body log in, and which they never see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SshKeyOrder {
    /// The name of the secret.
    pub name: String,
    /// The hosts at which it logs in: `NAME:PORT`.
    pub hosts: Vec<String>,
    /// How it logs in.
    pub login: SshLogin,
    /// The sealed key, in the format of OpenSSH.
    pub sealed: String,
}

/// The terms on which a key of ssh logs in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SshLogin {
    /// The users of the hosts as whom it logs in.
    pub users: Vec<String>,
    /// The keys of the hosts, each as a line of `known_hosts`.
    pub host_keys: Vec<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Whether a placeholder may have this byte: one that JSON, forms, URLs and shells leave as it is.
pub fn is_placeholder_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

/// An authority of a Body: it signs certificates for inspected names, and programs of that Body trust it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuthorityOrder {
    /// The text that tells authorities of Bodies apart.
    pub id: String,
    /// The names for which it may sign, and those below them; none for all names.
    pub names: Option<Vec<String>>,
    /// Its certificate, in PEM.
    pub certificate: String,
    /// Its sealed key.
    pub sealed_key: String,
}
