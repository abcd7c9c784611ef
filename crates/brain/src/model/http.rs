//! The client of model endpoints.
//!
//! Invariant: the key goes only to the endpoint of the address; the client follows no redirect and uses no proxy.
//! Invariant: no error text contains the key.
//! Invariant: connecting, silence, the whole call and the length of an answer are bounded.

use std::{
    error::Error,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use reqwest::{
    Client, Response, StatusCode,
    header::{HeaderMap, HeaderName, HeaderValue},
    redirect,
};

use super::{
    Answer, AnswerFuture, ApiKey, Model, ModelAddress, ModelDelta, ModelError, ModelProgress, ModelRequest,
    Wire,
    codec::{self, AnswerReader, fault},
    retry::RetryPolicy,
};

const ANTHROPIC_VERSION: &str = "2023-06-01";
const USER_AGENT: &str = concat!("palisade/", env!("CARGO_PKG_VERSION"));
/// The longest body of an error that the client reads.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// The bounds of a client.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HttpOptions {
    /// The time to connect, TLS included.
    pub connect_timeout: Duration,
    /// The longest silence of an endpoint, also before its first byte.
    pub idle_timeout: Duration,
    /// The time of one attempt as a whole.
    pub total_timeout: Duration,
    /// The attempts of one call.
    pub retry: RetryPolicy,
}

impl Default for HttpOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(15),
            // Models think for minutes, and few endpoints send a sign of life meanwhile.
            idle_timeout: Duration::from_secs(300),
            total_timeout: Duration::from_secs(1800),
            retry: RetryPolicy::default(),
        }
    }
}

/// Why a client cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum HttpModelError {
    /// The address is no HTTP address.
    #[error("{0} has no endpoint")]
    NoEndpoint(String),
    /// The key has characters that no HTTP header can carry.
    #[error("the key of the model endpoint has a line break or a control character")]
    Key,
    /// The TLS library does not start.
    #[error("cannot set up TLS for model endpoints")]
    Tls(#[from] rustls::Error),
    /// The HTTP library does not start.
    #[error("cannot set up the HTTP client for model endpoints")]
    Client(#[from] reqwest::Error),
}

/// A model behind an HTTP endpoint.
pub struct HttpModel {
    address: ModelAddress,
    endpoint: String,
    key: Option<ApiKey>,
    headers: HeaderMap,
    client: Client,
    options: HttpOptions,
}

impl HttpModel {
    /// Makes a client; the first request connects.
    pub fn new(
        address: ModelAddress,
        key: Option<ApiKey>,
        options: HttpOptions,
    ) -> Result<Self, HttpModelError> {
        let endpoint = address.endpoint().ok_or_else(|| HttpModelError::NoEndpoint(address.to_string()))?;
        let headers = make_headers(address.wire(), key.as_ref())?;
        let client = client_with(options.connect_timeout)?;
        Ok(Self { address, endpoint, key, headers, client, options })
    }

    async fn attempt(
        &self,
        request: &ModelRequest,
        body: &str,
        progress: &(dyn Fn(ModelProgress) + Send + Sync),
    ) -> Result<Answer, ModelError> {
        let work = self.exchange(request, body, progress);
        let result = match tokio::time::timeout(self.options.total_timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(timeout(self.options.total_timeout, "the whole answer")),
        };
        result.map_err(|error| self.mask_key(error))
    }

    async fn exchange(
        &self,
        request: &ModelRequest,
        body: &str,
        progress: &(dyn Fn(ModelProgress) + Send + Sync),
    ) -> Result<Answer, ModelError> {
        let call =
            self.client.post(&self.endpoint).headers(self.headers.clone()).body(body.to_owned()).send();
        let limit = self.options.idle_timeout;
        let response = match tokio::time::timeout(limit, call).await {
            Ok(response) => response.map_err(|error| self.explain(&error))?,
            Err(_) => return Err(timeout(limit, "the first byte")),
        };
        if response.status() != StatusCode::OK {
            return Err(self.read_refusal(response).await);
        }
        self.read_answer(request, response, progress).await
    }

    async fn read_answer(
        &self,
        request: &ModelRequest,
        mut response: Response,
        progress: &(dyn Fn(ModelProgress) + Send + Sync),
    ) -> Result<Answer, ModelError> {
        let mut tell = |delta: ModelDelta| progress(ModelProgress::Delta(delta));
        let mut reader = AnswerReader::new(self.address.wire(), self.address.model(), request);
        let limit = self.options.idle_timeout;
        while !reader.is_complete() {
            let piece = match tokio::time::timeout(limit, response.chunk()).await {
                Ok(piece) => piece.map_err(|error| ModelError::StreamCut { message: to_text(&error) })?,
                Err(_) => return Err(timeout(limit, "the next part of the answer")),
            };
            let Some(piece) = piece else { break };
            reader.push(&piece, &mut tell)?;
        }
        reader.finish(&mut tell)
    }

    async fn read_refusal(&self, mut response: Response) -> ModelError {
        let status = response.status().as_u16();
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
        let wait =
            fault::read_retry_after(header("retry-after-ms"), header("retry-after"), SystemTime::now());
        let mut body = Vec::new();
        // An error whose body does not arrive is still the error that its status says.
        while body.len() < ERROR_BYTES_MAX
            && let Ok(Ok(Some(piece))) =
                tokio::time::timeout(self.options.idle_timeout, response.chunk()).await
        {
            body.extend_from_slice(&piece);
        }
        body.truncate(ERROR_BYTES_MAX);
        fault::read_status(status, &String::from_utf8_lossy(&body), wait)
    }

    fn explain(&self, error: &reqwest::Error) -> ModelError {
        let message = to_text(error);
        if error.is_timeout() {
            return timeout(self.options.connect_timeout, "the connection");
        }
        if error.is_connect() || error.is_builder() {
            return ModelError::Unreachable { endpoint: self.endpoint.clone(), message };
        }
        ModelError::StreamCut { message }
    }

    /// A provider may repeat a wrong key in its error.
    fn mask_key(&self, error: ModelError) -> ModelError {
        match &self.key {
            Some(key) if !key.expose().is_empty() => {
                error.map_message(|message| message.replace(key.expose(), "…"))
            }
            _ => error,
        }
    }
}

impl Model for HttpModel {
    fn address(&self) -> &ModelAddress {
        &self.address
    }

    fn answer<'a>(
        &'a self,
        request: &'a ModelRequest,
        progress: &'a (dyn Fn(ModelProgress) + Send + Sync),
    ) -> AnswerFuture<'a> {
        Box::pin(async move {
            let body = codec::encode(&self.address, request)?;
            self.options.retry.run(progress, |_| self.attempt(request, &body, progress)).await
        })
    }
}

fn timeout(after: Duration, phase: &str) -> ModelError {
    ModelError::Timeout { after, phase: phase.to_owned() }
}

/// The text of an error and of its causes, without the URL that the library puts before them.
fn to_text(error: &reqwest::Error) -> String {
    let causes: Vec<String> =
        std::iter::successors(error.source(), |cause| (**cause).source()).map(ToString::to_string).collect();
    if causes.is_empty() { error.to_string() } else { causes.join(": ") }
}

fn make_headers(wire: Wire, key: Option<&ApiKey>) -> Result<HeaderMap, HttpModelError> {
    let mut headers = HeaderMap::new();
    headers.insert(reqwest::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(reqwest::header::ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
    if wire == Wire::Anthropic {
        headers.insert("anthropic-version", HeaderValue::from_static(ANTHROPIC_VERSION));
    }
    if let Some(key) = key {
        let (name, text) = match wire {
            Wire::Anthropic => (HeaderName::from_static("x-api-key"), key.expose().to_owned()),
            _ => (reqwest::header::AUTHORIZATION, format!("Bearer {}", key.expose())),
        };
        let mut value = HeaderValue::from_str(&text).map_err(|_| HttpModelError::Key)?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

/// A client that follows no redirect, uses no proxy and trusts the roots of the host.
pub fn http_client() -> Result<Client, HttpModelError> {
    client_with(HttpOptions::default().connect_timeout)
}

fn client_with(connect_timeout: Duration) -> Result<Client, HttpModelError> {
    let builder = Client::builder().user_agent(USER_AGENT).redirect(redirect::Policy::none()).no_proxy();
    Ok(builder.connect_timeout(connect_timeout).tls_backend_preconfigured(make_tls()?).build()?)
}

/// TLS with the provider of the whole program and the roots of the host, which are read once.
fn make_tls() -> Result<rustls::ClientConfig, rustls::Error> {
    static ROOTS: OnceLock<Arc<rustls::RootCertStore>> = OnceLock::new();
    let roots = ROOTS.get_or_init(|| {
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    });
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = config.with_root_certificates(Arc::clone(roots)).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests;
