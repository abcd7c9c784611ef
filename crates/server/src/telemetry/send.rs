//! The transport of telemetry: HTTP, one connection for each message, on the server's own runtime.

use std::{io, pin::Pin, sync::Arc, time::Duration};

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Uri, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::{net::TcpStream, runtime::Handle};
use tokio_rustls::TlsConnector;

const ANSWER_LEN_MAX: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends to one collector.
#[derive(Clone)]
pub struct OtlpSender {
    host: String,
    port: u16,
    tls: Option<Arc<ClientConfig>>,
    runtime: Handle,
}

impl std::fmt::Debug for OtlpSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sender({}:{})", self.host, self.port)
    }
}

impl OtlpSender {
    /// A sender to the collector at this address.
    pub fn new(url: &str, runtime: Handle) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|_| "it is not a URL")?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or("it names no host")?.to_owned();
        let (port, tls) = match uri.scheme_str() {
            Some("http") => (80, None),
            Some("https") => (443, Some(trust())),
            _ => return Err("it begins with neither http:// nor https://".into()),
        };
        Ok(Self { host, port: uri.port_u16().unwrap_or(port), tls, runtime })
    }

    async fn send(self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let bare = self.host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((bare, self.port)).await?;
        match self.tls {
            None => exchange(stream, request).await,
            Some(trust) => {
                let name = ServerName::try_from(bare.to_owned())?;
                exchange(TlsConnector::from(trust).connect(name, stream).await?, request).await
            }
        }
    }
}

impl HttpClient for OtlpSender {
    fn send_bytes<'life, 'sent>(
        &'life self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'sent>>
    where
        'life: 'sent,
        Self: 'sent,
    {
        // The exporter calls this on a thread of its own, which has no runtime for sockets.
        let sender = self.clone();
        let sent = self.runtime.spawn(async { tokio::time::timeout(PATIENCE, sender.send(request)).await });
        Box::pin(async move { sent.await?.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))? })
    }
}

async fn exchange<S>(stream: S, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut request = request.map(Full::new);
    if let Some(authority) = request.uri().authority() {
        let host = authority.as_str().parse()?;
        request.headers_mut().insert(header::HOST, host);
    }
    *request.uri_mut() = request.uri().path_and_query().map_or("/", |path| path.as_str()).parse()?;
    let (parts, body) = sender.send_request(request).await?.into_parts();
    Ok(Response::from_parts(parts, Limited::new(body, ANSWER_LEN_MAX).collect().await?.to_bytes()))
}

/// The certificate authorities that this host trusts.
fn trust() -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn collectors_have_an_address_of_the_web() {
        let place = |url: &str| OtlpSender::new(url, Handle::current()).map(|sender| format!("{sender:?}"));
        assert_eq!(place("http://127.0.0.1:4318").as_deref(), Ok("Sender(127.0.0.1:4318)"));
        assert_eq!(place("https://collector.example").as_deref(), Ok("Sender(collector.example:443)"));
        for bad in ["", "127.0.0.1:4318", "grpc://a", "http://", "/v1"] {
            assert!(place(bad).is_err(), "{bad:?}");
        }
    }
}
