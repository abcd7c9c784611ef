//! The root authority of a Body, whose certificate the Body's programs trust.
//!
//! Invariant: a Body keeps its authority over its starts, so programs that have read its certificate go on to trust it.
//! Invariant: the key of an authority is on the disk only sealed with the data directory's key.

use std::{fs, io, path::Path};

use proto::{
    BodyId, Failure, Kind,
    egress::{AuthorityOrder, EgressOrders},
};
use serde::{Deserialize, Serialize};
use vault::{RootAuthority, SealKey};

/// The file in the directory of a Body's egress process.
const FILE: &str = "authority.json";

/// The root authority of a Body, as it is stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct BodyAuthority {
    /// The text that tells authorities of Bodies apart.
    id: String,
    /// Its certificate, in PEM.
    pub certificate: String,
    sealed_key: String,
}

fn root_context(id: &str) -> String {
    format!("root {id}")
}

fn cannot(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::new(Kind::Host, "cannot make the certificate authority of a Body")
        .because(error)
        .hint("make room: pal gc")
}

impl BodyAuthority {
    /// Reads the authority in a directory, or makes it.
    pub fn read_or_create(dir: &Path, body: &BodyId, key: &SealKey) -> Result<Self, Failure> {
        let path = dir.join(FILE);
        match fs::read(&path) {
            Ok(text) => {
                // One that was cut short or sealed with another key is of no use.
                let stored = serde_json::from_slice::<Self>(&text).ok();
                if let Some(stored) = stored.filter(|stored| stored.root(key).is_ok()) {
                    return Ok(stored);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(cannot(error)),
        }
        let id = body.to_string();
        let root = RootAuthority::generate(&id).map_err(cannot)?;
        let sealed_key = key.seal(&root_context(&id), &root.key()).map_err(cannot)?;
        let certificate = root.certificate().map_err(cannot)?;
        let made = Self { id, certificate, sealed_key };
        let text = serde_json::to_vec(&made).map_err(cannot)?;
        sys::fd::write_whole(&path, &text).map_err(cannot)?;
        Ok(made)
    }

    /// Signs an authority for the names that these orders inspect; none if they inspect none.
    pub fn sign(&self, orders: &EgressOrders, key: &SealKey) -> Result<Option<AuthorityOrder>, Failure> {
        let policy = orders.policy().map_err(|error| Failure::new(Kind::Usage, error.to_string()))?;
        let names = policy.inspected_names();
        if names.as_ref().is_some_and(Vec::is_empty) {
            return Ok(None);
        }
        let signed = self.root(key)?.sign_authority(names.as_deref()).map_err(cannot)?;
        let sealed_key = key.seal(&format!("authority {}", self.id), &signed.key).map_err(cannot)?;
        Ok(Some(AuthorityOrder { id: self.id.clone(), names, certificate: signed.certificate, sealed_key }))
    }

    fn root(&self, key: &SealKey) -> Result<RootAuthority, Failure> {
        let opened = key.open(&root_context(&self.id), &self.sealed_key).map_err(cannot)?;
        RootAuthority::with_key(&self.id, &opened).map_err(cannot)
    }
}

#[cfg(test)]
mod tests {
    use proto::egress::{EgressRule, Flush};

    use super::*;

    #[test]
    fn an_authority_is_kept_and_signs_for_inspected_names_only() {
        let dir = std::env::temp_dir().join(format!("palisade-authority-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (id, key) = ("b1".parse().unwrap(), SealKey::generate().unwrap());
        let first = BodyAuthority::read_or_create(&dir, &id, &key).unwrap();
        let again = BodyAuthority::read_or_create(&dir, &id, &key).unwrap();
        assert_eq!(first.certificate, again.certificate);
        let sign = |rule: &str| {
            let orders = EgressOrders::new(vec![EgressRule::allow(rule)], 0, Flush::Kernel);
            again.sign(&orders, &key).unwrap()
        };
        assert!(sign("a.test:443").is_none(), "nothing is inspected");
        let signed = sign("GET a.test:443").unwrap();
        assert_eq!(signed.names, Some(vec!["a.test".into()]));
        assert!(key.open("authority b1", &signed.sealed_key).is_ok());
        assert!(key.open("root b1", &signed.sealed_key).is_err());
        assert_eq!(sign("*:443+inspect").unwrap().names, None);
        let text = fs::read_to_string(dir.join(FILE)).unwrap();
        fs::write(dir.join(FILE), &text[..text.len() / 2]).unwrap();
        let other = BodyAuthority::read_or_create(&dir, &id, &key).unwrap();
        assert_ne!(other.certificate, first.certificate);
        fs::remove_dir_all(dir).unwrap();
    }
}
