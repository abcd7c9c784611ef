//! The secrets that the Body may use.
//!
//! Invariant: a value goes only to a host of its secret, over TLS whose certificate was checked, and only into a part of a
//! request that the secret names. A request with a placeholder anywhere else in its head is refused.

use std::rc::Rc;

use proto::egress::{EgressSecret, PLACEHOLDER_MARK, SecretFields, is_secret_host};
use vault::{SealKey, Zeroizing};

use crate::{
    inspect::parts_of_key,
    target::{Host, Target},
};

/// A secret with its value.
pub struct OpenSecret {
    pub name: String,
    pub placeholder: String,
    pub fields: SecretFields,
    hosts: Vec<String>,
    /// None if it cannot be opened: requests with its placeholder are refused.
    value: Option<Zeroizing<Vec<u8>>>,
}

/// The secrets of a Body.
#[derive(Default)]
pub struct SecretTable(Vec<Rc<OpenSecret>>);

/// The context for which the value of a secret is sealed.
fn context(name: &str) -> String {
    format!("secret {name}")
}

/// Opens the value of a secret; none if it cannot be opened, or is empty.
pub fn open_value(name: &str, sealed: &str, key: Option<&SealKey>) -> Option<Zeroizing<Vec<u8>>> {
    key?.open(&context(name), sealed).ok().filter(|value| !value.is_empty())
}

impl SecretTable {
    /// Opens the secrets of orders.
    pub fn open(secrets: &[EgressSecret], key: Option<&SealKey>) -> Self {
        let open = |secret: &EgressSecret| Rc::new(OpenSecret::open(secret, key));
        Self(secrets.iter().map(open).collect())
    }

    /// The secrets in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Rc<OpenSecret>> {
        self.0.iter()
    }

    /// Whether a secret signs requests.
    pub fn signs_requests(&self) -> bool {
        self.0.iter().any(|secret| secret.fields.sigv4)
    }

    /// The secret of a name.
    pub fn find(&self, name: &str) -> Option<&Rc<OpenSecret>> {
        self.0.iter().find(|secret| secret.name == name)
    }
}

impl OpenSecret {
    fn open(secret: &EgressSecret, key: Option<&SealKey>) -> Self {
        Self {
            name: secret.name.clone(),
            placeholder: secret.placeholder.clone(),
            fields: secret.fields.clone(),
            hosts: secret.hosts.clone(),
            value: open_value(&secret.name, &secret.sealed, key),
        }
    }

    /// The value, if it may go to a target; otherwise the reason why not.
    pub fn value_for(&self, target: &Target) -> Result<&[u8], String> {
        let Host::Name(name) = &target.host else {
            return Err(format!("the secret {} does not go to addresses", self.name));
        };
        if !self.hosts.iter().any(|host| is_secret_host(host, name, target.port)) {
            return Err(format!("the secret {} does not belong to {target}", self.name));
        }
        self.value.as_ref().map(|value| value.as_slice()).ok_or_else(|| {
            format!("the secret {} cannot be opened: set it again with `pal secret set {0}`", self.name)
        })
    }

    /// The texts that must not come back in an answer of a target.
    pub fn masked_values(&self, target: &Target) -> Vec<Vec<u8>> {
        let value = self.value_for(target).unwrap_or_default();
        if self.fields.sigv4 { parts_of_key(value) } else { vec![value.to_vec()] }
    }

    /// Whether the secret may stand in a header of this name.
    pub fn is_for_header(&self, header: &str) -> bool {
        self.fields.headers.iter().any(|own| own.eq_ignore_ascii_case(header))
    }
}

/// Whether a text has a placeholder, also one of no secret of this Body.
pub fn has_placeholder(text: &[u8]) -> bool {
    memchr::memmem::find(text, PLACEHOLDER_MARK.as_bytes()).is_some()
}

/// Replaces all occurrences of a text by others of any length.
pub fn replace_all(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut done = Vec::with_capacity(text.len());
    let mut at = 0;
    for found in memchr::memmem::find_iter(text, from) {
        done.extend_from_slice(&text[at..found]);
        done.extend_from_slice(to);
        at = found + from.len();
    }
    done.extend_from_slice(&text[at..]);
    done
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A secret of `hosts` with the value `value-of-NAME`.
    pub fn secret(name: &str, hosts: &[&str], fields: SecretFields) -> Rc<OpenSecret> {
        Rc::new(OpenSecret {
            name: name.into(),
            placeholder: format!("{name}-{PLACEHOLDER_MARK}aaaa"),
            fields,
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            value: Some(Zeroizing::new(format!("value-of-{name}").into_bytes())),
        })
    }

    /// A table of secrets.
    pub fn table(secrets: Vec<Rc<OpenSecret>>) -> SecretTable {
        SecretTable(secrets)
    }

    #[test]
    fn a_value_goes_to_its_hosts_only() {
        let secret = secret("key", &["api.test", "*.api.test:8443"], SecretFields::default());
        let may =
            |name: &str, port| secret.value_for(&Target { host: Host::Name(name.into()), port }).is_ok();
        assert!(may("api.test", 443) && may("x.api.test", 8443));
        assert!(!may("api.test", 80) && !may("api.test", 8443) && !may("x.api.test", 443));
        assert!(!may("api.test.evil.io", 443) && !may("evil.io", 443) && !may("x.y.api.test", 8443));
        let address = Target { host: Host::Address([192, 0, 2, 7].into()), port: 443 };
        assert!(secret.value_for(&address).is_err());
    }

    #[test]
    fn a_secret_opens_with_its_key() {
        let key = SealKey::generate().unwrap();
        let sealed = EgressSecret {
            name: "a".into(),
            placeholder: format!("{PLACEHOLDER_MARK}b"),
            hosts: vec!["a.test".into()],
            fields: SecretFields::default(),
            sealed: key.seal("secret a", b"v").unwrap(),
        };
        let target = Target { host: Host::Name("a.test".into()), port: 443 };
        let value = |secret: EgressSecret, key: Option<&SealKey>| {
            SecretTable::open(&[secret], key).0[0].value_for(&target).map(<[u8]>::to_vec)
        };
        assert_eq!(value(sealed.clone(), Some(&key)).unwrap(), b"v");
        assert!(value(sealed.clone(), None).unwrap_err().contains("cannot be opened"));
        assert!(value(EgressSecret { name: "other".into(), ..sealed }, Some(&key)).is_err());
    }

    #[test]
    fn every_occurrence_is_replaced() {
        assert_eq!(replace_all(b"a-b-a", b"a", b"xyz"), b"xyz-b-xyz");
        assert_eq!(replace_all(b"aaa", b"aa", b""), b"a");
        assert!(has_placeholder(b"xpalph0y") && !has_placeholder(b"palph1"));
    }
}
