//! Signed file URLs that name no Body: the signature identifies the Body by its token.

use axum::http::{Method, Uri};
use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use sha2::{Digest, Sha256};

use crate::keys;

/// A signature and the text that it signs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UrlSignature {
    signature: String,
    /// `path:operation:user:`.
    before: String,
    /// `:expiration`, if it expires.
    after: String,
}

impl UrlSignature {
    /// The signature of a request for `/files`.
    pub fn of(method: &Method, uri: &Uri) -> Self {
        let pairs: Vec<(String, String)> =
            form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
        let value = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        let operation = if method == Method::POST { "write" } else { "read" };
        let text = |name: &str| value(name).unwrap_or_default();
        Self {
            signature: text("signature").to_owned(),
            before: format!("{}:{operation}:{}:", text("path"), text("username")),
            after: value("signature_expiration").map(|at| format!(":{at}")).unwrap_or_default(),
        }
    }

    /// Whether this token made the signature.
    pub fn is_by(&self, token: &str) -> bool {
        let digest = Sha256::digest(format!("{}{token}{}", self.before, self.after));
        keys::same(self.signature.as_bytes(), format!("v1_{}", STANDARD_NO_PAD.encode(digest)).as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_leads_to_the_token_that_made_it() {
        let digest = STANDARD_NO_PAD.encode(Sha256::digest("a b:read:user:tok:99"));
        let digest = digest.replace('+', "%2B").replace('/', "%2F");
        let uri: Uri =
            format!("/files?path=a%20b&username=user&signature=v1_{digest}&signature_expiration=99")
                .parse()
                .unwrap();
        let signature = UrlSignature::of(&Method::GET, &uri);
        assert!(signature.is_by("tok"));
        assert!(!signature.is_by("other"));
        assert!(!UrlSignature::of(&Method::POST, &uri).is_by("tok"));
    }
}
