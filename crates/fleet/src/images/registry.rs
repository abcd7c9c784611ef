//! A client for one repository of a registry: authentication, manifests and blobs.

use std::sync::Mutex;

use base64::{Engine, engine::general_purpose::STANDARD};
use http_auth::ChallengeRef;
use hyper::{
    HeaderMap, Response, StatusCode, Uri,
    body::Incoming,
    header::{self, HeaderValue},
};
use oci_spec::image::{Digest, DigestAlgorithm};
use proto::event::hex;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::{
    RegistryCredentials,
    web::{self, HttpClient, RedirectMark, WebError},
};
use crate::lock_mutex;

/// Longest manifest, and longest configuration of an image, in bytes.
pub const MANIFEST_LEN_MAX: usize = 4 << 20;
/// Longest answer of a token service, and longest error message of a registry, in bytes.
const SHORT_LEN_MAX: usize = 256 << 10;
const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// Why a request to a registry failed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The HTTP request failed.
    #[error(transparent)]
    Web(#[from] WebError),
    /// The registry refuses the credentials, or requires some.
    #[error("{0} refuses the credentials, or requires some")]
    Unauthorized(String),
    /// The registry does not have the object.
    #[error("{0} does not have this image")]
    NotFound(String),
    /// The registry answered with another error status.
    #[error("{host} answers {status}: {said}")]
    Refused {
        /// The registry.
        host: String,
        /// The HTTP status.
        status: u16,
        /// The registry's message, safe for a terminal.
        said: String,
    },
    /// The object does not have the requested digest.
    #[error("{host} sent data that does not match {digest}")]
    Forged {
        /// The registry.
        host: String,
        /// The requested digest.
        digest: String,
    },
    /// The answer is malformed.
    #[error("{0}")]
    Senseless(String),
    /// The object cannot be stored on this host.
    #[error("cannot store the download")]
    Keep(#[from] std::io::Error),
}

impl RegistryError {
    /// Whether a retry may succeed.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Web(error) => error.may_pass(),
            Self::Refused { status, .. } => matches!(status, 429 | 500 | 502 | 503 | 504),
            _ => false,
        }
    }
}

/// A client for one repository of a registry.
pub struct RegistryClient {
    web: HttpClient,
    host: String,
    repository: String,
    credentials: Option<RegistryCredentials>,
    /// The `Authorization` header, once the registry has asked for one.
    pass: Mutex<Option<HeaderValue>>,
}

/// An authentication scheme that a registry offers.
#[derive(Debug, PartialEq, Eq)]
enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl RegistryClient {
    /// Creates a client for the repository of that name.
    pub fn new(
        web: HttpClient,
        host: String,
        repository: String,
        credentials: Option<RegistryCredentials>,
    ) -> Self {
        Self { web, host, repository, credentials, pass: Mutex::default() }
    }

    /// The registry: `HOST[:PORT]`.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Fetches a manifest by tag or digest, and returns it with its digest.
    pub async fn manifest(&self, key: &str) -> Result<(Vec<u8>, String), RegistryError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static(ACCEPTED));
        let response = self.get(&format!("manifests/{key}"), headers).await?;
        let bytes = web::whole(response, MANIFEST_LEN_MAX, &self.host).await?;
        let digest = format!("sha256:{}", hex(&Sha256::digest(&bytes)));
        // A manifest requested by digest must match it; the digest of one requested by tag is what the tag means.
        if key.contains(':') && *key != digest {
            return Err(self.forged(key));
        }
        Ok((bytes, digest))
    }

    /// Fetches a small blob into memory.
    pub async fn small(&self, digest: &Digest) -> Result<Vec<u8>, RegistryError> {
        let response = self.blob(digest, 0).await?;
        let bytes = web::whole(response, MANIFEST_LEN_MAX, &self.host).await?;
        if hex(&Sha256::digest(&bytes)) == sha256(digest)? {
            Ok(bytes)
        } else {
            Err(self.forged(digest.as_ref()))
        }
    }

    /// Fetches a blob from a byte offset on. The answer says whether the registry honoured the offset.
    pub async fn blob(&self, digest: &Digest, from: u64) -> Result<Response<Incoming>, RegistryError> {
        sha256(digest)?;
        let mut headers = HeaderMap::new();
        if from > 0 {
            headers.insert(
                header::RANGE,
                HeaderValue::try_from(format!("bytes={from}-")).map_err(|_| malformed("a length"))?,
            );
        }
        self.get(&format!("blobs/{digest}"), headers).await
    }

    /// The error for an object that does not have the requested digest.
    pub fn forged(&self, digest: &str) -> RegistryError {
        RegistryError::Forged { host: self.host.clone(), digest: proto::text::visible(digest) }
    }

    async fn get(&self, path: &str, headers: HeaderMap) -> Result<Response<Incoming>, RegistryError> {
        let uri = self.web.address(&format!("/v2/{}/{path}", self.repository))?;
        let response = self.ask(&uri, headers.clone()).await?;
        // The target of a redirect gets no credentials, even if it asks for some.
        if response.status() != StatusCode::UNAUTHORIZED
            || response.extensions().get::<RedirectMark>().is_some()
        {
            return self.good(response).await;
        }
        // One attempt only: a registry that refuses a fresh token will refuse the next one too.
        let pass = self.answer(response.headers()).await?;
        *lock_mutex(&self.pass) = Some(pass);
        let response = self.ask(&uri, headers).await?;
        self.good(response).await
    }

    async fn ask(&self, uri: &Uri, mut headers: HeaderMap) -> Result<Response<Incoming>, RegistryError> {
        let pass = lock_mutex(&self.pass).clone();
        if let Some(pass) = pass {
            headers.insert(header::AUTHORIZATION, pass);
        }
        Ok(self.web.get(uri, &headers).await?)
    }

    async fn good(&self, response: Response<Incoming>) -> Result<Response<Incoming>, RegistryError> {
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(RegistryError::Unauthorized(self.host.clone()))
            }
            StatusCode::NOT_FOUND => Err(RegistryError::NotFound(self.host.clone())),
            status => {
                let said = web::whole(response, SHORT_LEN_MAX, &self.host).await.unwrap_or_default();
                let said = proto::text::visible_bytes(&said[..said.len().min(300)]);
                Err(RegistryError::Refused { host: self.host.clone(), status: status.as_u16(), said })
            }
        }
    }

    /// Computes the `Authorization` header that answers the registry's challenge.
    async fn answer(&self, headers: &HeaderMap) -> Result<HeaderValue, RegistryError> {
        let closed = || RegistryError::Unauthorized(self.host.clone());
        let said = headers.get_all(header::WWW_AUTHENTICATE).iter().filter_map(|said| said.to_str().ok());
        let challenges: Vec<Challenge> = said.flat_map(challenges).collect();
        let basic = || self.credentials.as_ref().and_then(basic);
        for challenge in &challenges {
            match challenge {
                Challenge::Bearer { realm, service } => {
                    return self.token(realm, service.as_deref(), basic()).await;
                }
                Challenge::Basic => match basic() {
                    Some(pass) => return Ok(pass),
                    None => continue,
                },
            }
        }
        Err(closed())
    }

    async fn token(
        &self,
        realm: &str,
        service: Option<&str>,
        basic: Option<HeaderValue>,
    ) -> Result<HeaderValue, RegistryError> {
        let wrong = || malformed("the address of its token service");
        let mut query = form(&[("scope", &format!("repository:{}:pull", self.repository))]);
        if let Some(service) = service {
            query = format!("{}&{query}", form(&[("service", service)]));
        }
        let joined = format!("{realm}{}{query}", if realm.contains('?') { '&' } else { '?' });
        let uri: Uri = joined.parse().map_err(|_| wrong())?;
        if uri.host().is_none() {
            return Err(wrong());
        }
        let mut headers = HeaderMap::new();
        if let Some(basic) = basic {
            headers.insert(header::AUTHORIZATION, basic);
        }
        let response = self.good(self.web.get(&uri, &headers).await?).await?;
        let bytes = web::whole(response, SHORT_LEN_MAX, &web::shown(&uri)).await?;
        let token: Token = serde_json::from_slice(&bytes).map_err(|_| malformed("a token"))?;
        let token = token.token.or(token.access_token).ok_or_else(|| malformed("a token"))?;
        let mut pass = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| malformed("a token"))?;
        pass.set_sensitive(true);
        Ok(pass)
    }
}

/// The hexadecimal digits of a SHA-256 digest, the only supported algorithm.
pub fn sha256(digest: &Digest) -> Result<&str, RegistryError> {
    match digest.algorithm() {
        DigestAlgorithm::Sha256 => Ok(digest.digest()),
        _ => Err(RegistryError::Senseless("it uses a digest other than SHA-256".into())),
    }
}

fn malformed(what: &str) -> RegistryError {
    RegistryError::Senseless(format!("the registry's answer is malformed: {what}"))
}

fn basic(credentials: &RegistryCredentials) -> Option<HeaderValue> {
    let joined = format!("{}:{}", credentials.username, credentials.password);
    let mut pass = HeaderValue::try_from(format!("Basic {}", STANDARD.encode(joined))).ok()?;
    pass.set_sensitive(true);
    Some(pass)
}

fn challenges(said: &str) -> Vec<Challenge> {
    let known = |challenge: &ChallengeRef<'_>| {
        let parameter = |name: &str| {
            challenge
                .params
                .iter()
                .find(|(known, _)| known.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.to_unescaped())
        };
        match challenge.scheme.to_ascii_lowercase().as_str() {
            "basic" => Some(Challenge::Basic),
            "bearer" => Some(Challenge::Bearer { realm: parameter("realm")?, service: parameter("service") }),
            _ => None,
        }
    };
    http_auth::parse_challenges(said).unwrap_or_default().iter().filter_map(known).collect()
}

fn form(pairs: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doors_say_what_opens_them() {
        let bearer = |realm: &str, service: Option<&str>| Challenge::Bearer {
            realm: realm.into(),
            service: service.map(str::to_owned),
        };
        for (said, expected) in [
            (
                r#"Bearer realm="https://auth.docker.io/token",service="registry.docker.io""#,
                vec![bearer("https://auth.docker.io/token", Some("registry.docker.io"))],
            ),
            (
                r#"Basic realm="x", Bearer realm="https://t""#,
                vec![Challenge::Basic, bearer("https://t", None)],
            ),
            ("basic realm=x", vec![Challenge::Basic]),
            ("Bearer service=x", vec![]),
            ("Negotiate", vec![]),
            ("\"", vec![]),
        ] {
            assert_eq!(challenges(said), expected, "{said}");
        }
    }
}
