//! An HTTP client for registries: one connection per request, with a deadline and a size limit for everything.
//!
//! Invariant: a name is resolved once; the client connects to the same addresses that it checked.
//! Invariant: headers for one server are not sent to another server when a redirect leads there.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode, Uri,
    body::Incoming,
    client::conn::http1,
    header,
    header::HeaderValue,
    http::uri::{Authority, Scheme},
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::TlsConnector;

use super::{PrivateAddresses, RegistryAccess, address::is_public};

const CONNECT: Duration = Duration::from_secs(15);
const ANSWER: Duration = Duration::from_secs(60);
/// How long a server may pause in the middle of an answer.
pub const STALL: Duration = Duration::from_secs(60);
const REDIRECTS_MAX: usize = 5;
const USER_AGENT: &str = concat!("palisade/", env!("CARGO_PKG_VERSION"));

/// Why an HTTP request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum WebError {
    /// The host name does not resolve, or no server listens.
    #[error("cannot reach {host}")]
    Unreachable {
        /// The host.
        host: String,
        /// The error of the kernel.
        #[source]
        source: io::Error,
    },
    /// The server is on a private address, which the policy forbids.
    #[error("{0} is a private address: of this host or its networks")]
    Within(String),
    /// The request would go over plain HTTP.
    #[error("{0} would be reached without encryption")]
    Plain(String),
    /// Too many redirects, or a redirect to an invalid address.
    #[error("{0} redirects too often, or to an invalid address")]
    Astray(String),
    /// The connection broke, or the server does not speak HTTP.
    #[error("the connection to {host} broke")]
    Broken {
        /// The host.
        host: String,
        /// The error of the HTTP library.
        #[source]
        source: hyper::Error,
    },
    /// The server did not answer in time.
    #[error("{0} does not answer")]
    Silent(String),
    /// The answer is longer than its limit.
    #[error("{0} sends more than it may")]
    TooMuch(String),
}

impl WebError {
    /// Whether a retry may succeed.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Broken { .. } | Self::Silent(_))
    }
}

/// Marks an answer of another server, to which a redirect led.
#[derive(Debug, Clone, Copy)]
pub struct RedirectMark;

/// An HTTP client whose allowed targets depend on the first server.
#[derive(Debug, Clone)]
pub struct HttpClient {
    reach: RegistryAccess,
    /// `HOST[:PORT]` of the first server.
    host: String,
    /// Whether the first server is on a private address; then redirects may lead to private addresses.
    within: bool,
    /// Whether the first server uses plain HTTP; then redirects may lead to plain HTTP.
    plain: bool,
}

impl HttpClient {
    /// Creates a client for a registry, given as `HOST[:PORT]`, and checks its addresses against the policy.
    pub async fn from(host: &str, reach: RegistryAccess) -> Result<Self, WebError> {
        let plain = is_loopback(host) || reach.plain.iter().any(|known| known == host);
        let web = Self { within: true, plain, host: host.to_owned(), reach };
        let uri = web.address("/")?;
        let found = look_up(&uri).await?;
        let within = found.iter().any(|address| !is_public(address.ip()));
        if within
            && web.reach.inside == PrivateAddresses::Refused
            && !web.reach.trusted.iter().any(|known| known == host)
        {
            return Err(WebError::Within(host.to_owned()));
        }
        Ok(Self { within, ..web })
    }

    /// The URL of a path on the first server.
    pub fn address(&self, path: &str) -> Result<Uri, WebError> {
        let scheme = if self.plain { "http" } else { "https" };
        format!("{scheme}://{}{path}", self.host).parse().map_err(|_| WebError::Astray(self.host.clone()))
    }

    /// Sends a GET request and follows redirects. The headers go to the first server only; the answer of another
    /// server carries a [`RedirectMark`].
    pub async fn get(&self, uri: &Uri, headers: &HeaderMap) -> Result<Response<Incoming>, WebError> {
        let first = uri;
        let (mut uri, mut headers) = (uri.clone(), headers.clone());
        for _ in 0..=REDIRECTS_MAX {
            let mut response = self.ask(&uri, &headers).await?;
            if !response.status().is_redirection() || response.status() == StatusCode::NOT_MODIFIED {
                if origin(&uri) != origin(first) {
                    response.extensions_mut().insert(RedirectMark);
                }
                return Ok(response);
            }
            let next = response
                .headers()
                .get(header::LOCATION)
                .and_then(|place| place.to_str().ok())
                .and_then(|place| join(&uri, place));
            let next = next.ok_or_else(|| WebError::Astray(shown(&uri)))?;
            if origin(&next) != origin(&uri) {
                headers.remove(header::AUTHORIZATION);
            }
            uri = next;
        }
        Err(WebError::Astray(shown(&uri)))
    }

    async fn ask(&self, uri: &Uri, headers: &HeaderMap) -> Result<Response<Incoming>, WebError> {
        let host = shown(uri);
        let encrypted = uri.scheme() == Some(&Scheme::HTTPS);
        if !encrypted && !self.plain {
            return Err(WebError::Plain(host));
        }
        let unreachable = |source| WebError::Unreachable { host: host.clone(), source };
        let broken = |source| WebError::Broken { host: host.clone(), source };
        let addresses = look_up(uri).await?;
        if !self.within && addresses.iter().any(|address| !is_public(address.ip())) {
            return Err(WebError::Within(host));
        }
        let silent = |_| WebError::Silent(host.clone());
        let stream = timeout(CONNECT, TcpStream::connect(&addresses[..]))
            .await
            .map_err(silent)?
            .map_err(unreachable)?;
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.method_mut() = Method::GET;
        *request.uri_mut() = uri
            .path_and_query()
            .map_or("/", |path| path.as_str())
            .parse()
            .map_err(|_| WebError::Astray(host.clone()))?;
        *request.headers_mut() = headers.clone();
        let named = HeaderValue::from_str(&host).map_err(|_| WebError::Astray(host.clone()))?;
        request.headers_mut().insert(header::HOST, named);
        request.headers_mut().insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
        let answered = async {
            if encrypted {
                let name =
                    uri.host().map(unbracketed).and_then(|name| ServerName::try_from(name.to_owned()).ok());
                let name = name.ok_or_else(|| WebError::Astray(host.clone()))?;
                let stream = TlsConnector::from(trust()).connect(name, stream).await.map_err(unreachable)?;
                exchange(stream, request).await.map_err(broken)
            } else {
                exchange(stream, request).await.map_err(broken)
            }
        };
        timeout(ANSWER, answered).await.map_err(silent)?
    }
}

async fn exchange<S>(stream: S, request: Request<Empty<Bytes>>) -> Result<Response<Incoming>, hyper::Error>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    sender.send_request(request).await
}

/// Reads the next chunk of an answer.
pub async fn piece(body: &mut Incoming, host: &str) -> Result<Option<Bytes>, WebError> {
    loop {
        match timeout(STALL, body.frame()).await.map_err(|_| WebError::Silent(host.to_owned()))? {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => return Ok(Some(data)),
                Err(_) => continue,
            },
            Some(Err(source)) => return Err(WebError::Broken { host: host.to_owned(), source }),
            None => return Ok(None),
        }
    }
}

/// Reads a whole answer of at most `max` bytes.
pub async fn whole(response: Response<Incoming>, max: usize, host: &str) -> Result<Vec<u8>, WebError> {
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    let collected = async {
        while let Some(piece) = piece(&mut body, host).await? {
            if bytes.len() + piece.len() > max {
                return Err(WebError::TooMuch(host.to_owned()));
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(())
    };
    timeout(ANSWER, collected).await.map_err(|_| WebError::Silent(host.to_owned()))??;
    Ok(bytes)
}

async fn look_up(uri: &Uri) -> Result<Vec<SocketAddr>, WebError> {
    let port = uri.port_u16().unwrap_or(if uri.scheme() == Some(&Scheme::HTTP) { 80 } else { 443 });
    let unreachable = |source| WebError::Unreachable { host: shown(uri), source };
    let host = unbracketed(uri.host().unwrap_or_default());
    let found = timeout(CONNECT, tokio::net::lookup_host((host, port)))
        .await
        .map_err(|_| WebError::Silent(shown(uri)))?;
    let found: Vec<SocketAddr> = found.map_err(unreachable)?.collect();
    if found.is_empty() { Err(unreachable(io::ErrorKind::NotFound.into())) } else { Ok(found) }
}

/// Resolves the target of a redirect: an absolute URL, or a path on the same server.
fn join(from: &Uri, place: &str) -> Option<Uri> {
    let next: Uri = if place.starts_with('/') && !place.starts_with("//") {
        format!("{}://{}{place}", from.scheme_str()?, from.authority()?).parse().ok()?
    } else {
        place.parse().ok()?
    };
    let known = matches!(next.scheme_str(), Some("http" | "https"))
        && next.host().is_some_and(|host| !host.is_empty());
    // User information before the host (`user@host`) would become part of the `Host` header.
    (known && !next.authority()?.as_str().contains('@')).then_some(next)
}

fn origin(uri: &Uri) -> (Option<&Scheme>, Option<&Authority>) {
    (uri.scheme(), uri.authority())
}

/// Formats a URL as `HOST[:PORT]`.
pub fn shown(uri: &Uri) -> String {
    uri.authority().map_or_else(String::new, |authority| proto::text::visible(authority.as_str()))
}

fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn is_loopback(host: &str) -> bool {
    let name = host.parse::<Authority>().map(|authority| authority.host().to_owned()).unwrap_or_default();
    name == "localhost" || unbracketed(&name).parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// The TLS configuration with the certificates that this host trusts, read once.
fn trust() -> Arc<ClientConfig> {
    static TRUST: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    TRUST
        .get_or_init(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
        })
        .clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_to_addresses_of_the_web() {
        let from: Uri = "https://a.example/v2/x?y".parse().unwrap();
        let next = |place: &str| join(&from, place).map(|uri| uri.to_string());
        assert_eq!(next("/z?q=1").as_deref(), Some("https://a.example/z?q=1"));
        assert_eq!(next("https://b.example/z").as_deref(), Some("https://b.example/z"));
        for bad in [
            "",
            "z",
            "//b.example/z",
            "ftp://b/z",
            "file:///etc/passwd",
            "https:///z",
            "https://user:pass@b.example/",
        ] {
            assert_eq!(next(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn only_this_machine_is_asked_in_plain_text_unasked() {
        for (host, expected) in [
            ("localhost:5000", true),
            ("127.0.0.1", true),
            ("[::1]:5000", true),
            ("127.1.2.3:80", true),
            ("localhost.example", false),
            ("10.0.0.1:5000", false),
            ("registry.example", false),
        ] {
            assert_eq!(is_loopback(host), expected, "{host}");
        }
    }

    #[tokio::test]
    async fn whoever_asks_from_outside_does_not_look_around_inside() {
        let refused = RegistryAccess { inside: PrivateAddresses::Refused, ..RegistryAccess::default() };
        let inside = |reach: RegistryAccess| async move { HttpClient::from("127.0.0.1:9", reach).await };
        assert!(matches!(inside(refused.clone()).await, Err(WebError::Within(_))));
        assert!(inside(RegistryAccess::default()).await.is_ok());
        assert!(inside(RegistryAccess { trusted: vec!["127.0.0.1:9".into()], ..refused }).await.is_ok());
        // A public server that leads to a private address, by a redirect or as its token service.
        let web = HttpClient {
            reach: RegistryAccess::default(),
            host: "registry.example".into(),
            within: false,
            plain: true,
        };
        let named: Uri = "http://127.0.0.1:9/".parse().unwrap();
        assert!(matches!(web.get(&named, &HeaderMap::new()).await, Err(WebError::Within(_))));
        let web = HttpClient { plain: false, within: true, ..web };
        assert!(matches!(web.get(&named, &HeaderMap::new()).await, Err(WebError::Plain(_))));
    }
}
