//! TLS whose requests are read: the program talks to a certificate of its Body's authority, the proxy talks to the host,
//! and every request between them is judged by the policy, gets its secrets, and is recorded.
//!
//! Both ends speak the same protocol, HTTP/1.1 or HTTP/2, so that bodies, trailers and event streams go through as they
//! come. A WebSocket is judged by its first request.
//!
//! Invariant: the host's certificate is checked before the program gets one.
//! Invariant: a request is judged by the policy of its moment, and its decision is in the spool before it goes out.
//! Absent on purpose: HTTP/2 tunnels (extended CONNECT), early data, and certificates of clients.

mod body;
mod mask;
mod request;
mod sigv4;
mod tasks;
mod tls;
mod upstream;

use std::{cell::RefCell, convert::Infallible, io, rc::Rc};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Request, Response, StatusCode, Version,
    body::{Body, Incoming},
    header,
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use proto::egress::{Decision, Permit, fit_to_show};
use rustls::pki_types::ServerName;
use tokio::{io::AsyncWriteExt, net::TcpStream, sync::Notify, time::timeout};
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, TlsConnector};

#[cfg(feature = "fuzzing")]
pub use self::body::Rewrite;
use self::{
    body::{AnyBody, BodyError, DrainableBody, Replacements, RewrittenBody},
    request::{check_authority, request_target},
    tasks::ConnectionTasks,
    upstream::Upstream,
};
pub use self::{mask::Mask, request::Injector, sigv4::parts_of_key, tls::Certificates};
use crate::{
    client::{ClientStream, PATIENCE, ProxyClient},
    connection::{ConnectionOrigin, ESTABLISHED, judge_hello},
    dial::dial,
    proxy::Proxy,
    refusal::{Denial, RefusalForm, explanation},
    secrets::{Secret, SecretTable},
    target::{Host, Target},
};

/// Longest body whose hash is computed for a signature.
const SIGNED_BODY_LEN_MAX: usize = 10 << 20;
const H2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// One inspected connection.
struct Session {
    proxy: Rc<Proxy>,
    target: Target,
    upstream: Upstream,
    /// The two ends of a connection that became a WebSocket.
    upgraded: RefCell<Option<[OnUpgrade; 2]>>,
}

/// A request that may go out.
struct JudgedRequest {
    request: Request<AnyBody>,
    /// The secrets whose values it may have.
    used: Vec<Rc<Secret>>,
}

impl Proxy {
    /// Serves a connection whose requests are judged one by one.
    pub async fn inspect<S: ClientStream>(
        self: &Rc<Self>,
        mut client: ProxyClient<S>,
        target: &Target,
        permit: &Permit,
        origin: &ConnectionOrigin,
    ) -> io::Result<()> {
        let before = match origin {
            ConnectionOrigin::Redirect => RefusalForm::TlsAlert,
            _ => RefusalForm::Http,
        };
        let opened = match (&target.host, origin) {
            (Host::Address(_), _) => Err(Denial::forbidden("its rule inspects requests, which needs a name")),
            (_, ConnectionOrigin::Forward(_)) => {
                Err(Denial::forbidden("its rule allows no plain http: use https"))
            }
            (Host::Name(name), _) => {
                let denied = |address| self.policy.borrow().denial_of_address(address, target.port);
                dial(&self.addresses, target, permit, denied).await.map(|upstream| (name, upstream))
            }
        };
        let shown = target.to_string();
        let (name, upstream) = match opened {
            Ok(opened) => opened,
            Err(denial) => return self.deny(&mut client, before, &shown, denial).await,
        };
        if matches!(origin, ConnectionOrigin::Tunnel) {
            client.stream.write_all(ESTABLISHED).await?;
        }
        let judged = timeout(PATIENCE, judge_hello(&mut client, target)).await;
        if let Err(denial) = judged.map_err(|_| io::ErrorKind::TimedOut)?? {
            return self.deny(&mut client, RefusalForm::TlsAlert, &shown, denial).await;
        }
        let accepting = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), client);
        let mut start = timeout(PATIENCE, accepting).await.map_err(|_| io::ErrorKind::TimedOut)??;
        match self.session(&start, upstream, name, target).await {
            Ok((session, config, serving)) => {
                let accepted = timeout(PATIENCE, start.into_stream(config)).await;
                match accepted.map_err(|_| io::ErrorKind::TimedOut)? {
                    Ok(stream) => serving.serve(stream, Rc::new(session)).await,
                    Err(error) => self.record(Decision::denied(&shown, &not_accepted(&error))),
                }
            }
            Err(denial) => self.deny(&mut start.io, RefusalForm::TlsAlert, &shown, denial).await,
        }
    }

    /// Connects to the host by TLS, with the protocols that the program offers.
    async fn session<S: ClientStream>(
        self: &Rc<Self>,
        start: &StartHandshake<ProxyClient<S>>,
        upstream: TcpStream,
        name: &str,
        target: &Target,
    ) -> Result<(Session, std::sync::Arc<rustls::ServerConfig>, Serving), Denial> {
        let hello = start.client_hello();
        let offered: Vec<Vec<u8>> = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect();
        let known: Vec<Vec<u8>> = [H2, HTTP1]
            .into_iter()
            .filter(|protocol| offered.iter().any(|offer| offer == protocol))
            .map(<[u8]>::to_vec)
            .collect();
        if known.is_empty() && !offered.is_empty() {
            return Err(Denial::forbidden(
                "its rule inspects HTTP, and the program offers other protocols only",
            ));
        }
        let config = self.certificates.client(known).map_err(Denial::unreachable)?;
        let server = ServerName::try_from(name.to_owned())
            .map_err(|_| Denial::forbidden("its name is too odd for TLS"))?;
        let connecting = TlsConnector::from(config).connect(server, upstream);
        let connected =
            timeout(PATIENCE, connecting).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let stream = connected.map_err(|error| {
            let why = fit_to_show(&error.to_string());
            Denial::forbidden(format!("no TLS connection to the host that this machine trusts: {why}"))
        })?;
        let is_h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
        let chosen = match (is_h2, offered.is_empty()) {
            (true, _) => Some(H2),
            (false, true) => None,
            // A host without protocols speaks HTTP/1.1.
            (false, false) if offered.iter().any(|offer| offer == HTTP1) => Some(HTTP1),
            (false, false) => {
                return Err(Denial::forbidden("its host speaks no HTTP/2, and the program nothing else"));
            }
        };
        let config = self.certificates.server(name, chosen).map_err(Denial::forbidden)?;
        let (tasks, guard) = ConnectionTasks::guarded();
        let gone = Rc::new(Notify::new());
        let upstream = Upstream::open(TokioIo::new(stream), is_h2, &tasks, Rc::clone(&gone)).await;
        let upstream =
            upstream.map_err(|error| Denial::unreachable(format!("its host speaks no HTTP: {error}")))?;
        let session = Session {
            proxy: Rc::clone(self),
            target: target.clone(),
            upstream,
            upgraded: RefCell::default(),
        };
        Ok((session, config, Serving { is_h2, tasks, gone, _guard: guard }))
    }
}

/// How the program's end of a connection is served.
struct Serving {
    is_h2: bool,
    tasks: ConnectionTasks,
    /// Told when the host's end is gone.
    gone: Rc<Notify>,
    _guard: tasks::TasksGuard,
}

impl Serving {
    async fn serve<S: ClientStream>(
        self,
        stream: tokio_rustls::server::TlsStream<ProxyClient<S>>,
        session: Rc<Session>,
    ) -> io::Result<()> {
        let answering = Rc::clone(&session);
        let service = service_fn(move |request| {
            let session = Rc::clone(&answering);
            async move { Ok::<_, BodyError>(session.answer(request).await) }
        });
        let stream = TokioIo::new(stream);
        // A connection that breaks off is the program's or the host's business, and its requests are recorded.
        if self.is_h2 {
            let mut builder = hyper::server::conn::http2::Builder::new(self.tasks.clone());
            let mut serving =
                std::pin::pin!(builder.timer(TokioTimer::new()).serve_connection(stream, service));
            let is_over = tokio::select! {
                _ = serving.as_mut() => true,
                () = self.gone.notified() => false,
            };
            if !is_over {
                serving.as_mut().graceful_shutdown();
                let _ = serving.await;
            }
            return Ok(());
        }
        let mut builder = hyper::server::conn::http1::Builder::new();
        let builder = builder.timer(TokioTimer::new()).header_read_timeout(None);
        let mut serving = std::pin::pin!(builder.serve_connection(stream, service).with_upgrades());
        let is_over = tokio::select! {
            _ = serving.as_mut() => true,
            () = self.gone.notified() => false,
        };
        if !is_over {
            serving.as_mut().graceful_shutdown();
            let _ = serving.await;
        }
        let upgraded = session.upgraded.borrow_mut().take();
        if let Some([program, host]) = upgraded
            && let (Ok(program), Ok(host)) = (program.await, host.await)
        {
            let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(program), &mut TokioIo::new(host)).await;
        }
        Ok(())
    }
}

impl Session {
    /// Answers a request: with the host's answer, or with a refusal.
    async fn answer(&self, request: Request<Incoming>) -> Response<AnyBody> {
        let shown = format!("{} {}{}", request.method(), self.target, fit_to_show(request.uri().path()));
        // A program that asks first sends nothing after a refusal.
        let asks_first = request.headers().contains_key(header::EXPECT);
        let request = request.map(DrainableBody::new);
        let rest = request.body().clone();
        let denial = match self.forward(request).await {
            Ok(response) => return response,
            Err(denial) => denial,
        };
        if !asks_first {
            rest.drain().await;
        }
        let recorded = self.proxy.record(Decision::denied(&shown, &denial.why));
        let denial = recorded.map_or_else(|error| Denial::unrecorded(&error), |()| denial);
        refusal(&shown, &denial)
    }

    async fn forward(&self, mut request: Request<DrainableBody>) -> Result<Response<AnyBody>, Denial> {
        let is_upgrade = request.headers().contains_key(header::UPGRADE);
        let program = is_upgrade.then(|| hyper::upgrade::on(&mut request));
        // The memory that bodies take is bounded: few wait for their hash at once.
        let needs_hash =
            self.proxy.secrets.borrow().signs_requests() && sigv4::needs_body_hash(request.headers());
        let signing = match needs_hash {
            true => Some(self.proxy.signing.acquire().await.map_err(|_| Denial::bad("the process ends"))?),
            false => None,
        };
        let (request, hash) = match &signing {
            Some(_) => hashed(request).await?,
            None => (request.map(|body| -> AnyBody { Box::pin(body) }), None),
        };
        let JudgedRequest { request, used } = self.judge(request, hash.as_deref())?;
        let sent = self.upstream.send(request).await;
        drop(signing);
        let mut response = sent.map_err(|error| {
            Denial::unreachable(format!("its host broke off: {}", fit_to_show(&error.to_string())))
        })?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let program =
                program.ok_or_else(|| Denial::unreachable("its host changed the protocol unasked"))?;
            *self.upgraded.borrow_mut() = Some([program, hyper::upgrade::on(&mut response)]);
        }
        let values: Vec<Vec<u8>> =
            used.iter().flat_map(|secret| secret.masked_values(&self.target)).collect();
        masked(response, Mask::of(values.iter().map(Vec::as_slice)))
    }

    /// Judges a request and records the decision.
    fn judge(&self, request: Request<AnyBody>, body_hash: Option<&str>) -> Result<JudgedRequest, Denial> {
        let (mut parts, body) = request.into_parts();
        let Host::Name(name) = &self.target.host else {
            return Err(Denial::forbidden("its connection has no name"));
        };
        check_authority(&parts, &self.target)?;
        if let Some(upgrade) = parts.headers.get(header::UPGRADE)
            && !upgrade.as_bytes().eq_ignore_ascii_case(b"websocket")
        {
            return Err(Denial::forbidden("it asks for another protocol than WebSocket"));
        }
        let target = request_target(&parts)?;
        let permit = self.proxy.policy.borrow().judge_request(name, self.target.port, &target);
        let permit = permit.map_err(Denial::forbidden)?;
        let secrets = Rc::clone(&self.proxy.secrets.borrow());
        let mut injector = Injector::new(&secrets, &self.target);
        injector.rewrite(&mut parts, &permit, body_hash)?;
        let mut used = std::mem::take(&mut injector.used);
        let replaced = match body.is_end_stream() {
            true => Vec::new(),
            false => body_secrets(&secrets, &self.target),
        };
        for (secret, _) in &replaced {
            if !used.iter().any(|known| Rc::ptr_eq(known, secret)) {
                used.push(Rc::clone(secret));
            }
        }
        let mut why = format!("the rule `{}` allows the request", permit.rule);
        if !used.is_empty() {
            let names: Vec<&str> = used.iter().map(|secret| secret.name.as_str()).collect();
            why = format!("with the secret {}: {why}", names.join(" and "));
        }
        let decision = Decision::allowed(&self.target.to_string(), &why);
        self.proxy.record(decision).map_err(|error| Denial::unrecorded(&error))?;
        let body: AnyBody = match replaced.is_empty() {
            true => body,
            false => {
                // Values are longer or shorter than placeholders.
                parts.headers.remove(header::CONTENT_LENGTH);
                if parts.version < Version::HTTP_2 {
                    parts
                        .headers
                        .insert(header::TRANSFER_ENCODING, header::HeaderValue::from_static("chunked"));
                }
                Box::pin(RewrittenBody::new(body, Replacements::new(replaced)))
            }
        };
        Ok(JudgedRequest { request: Request::from_parts(parts, body), used })
    }
}

/// Reads a whole body, and returns its hash for a signature.
async fn hashed(request: Request<DrainableBody>) -> Result<(Request<AnyBody>, Option<String>), Denial> {
    let (parts, body) = request.into_parts();
    let whole = Limited::new(body, SIGNED_BODY_LEN_MAX).collect().await;
    let whole =
        whole.map_err(|_| Denial::forbidden("its body is too large for a signature, or broke off"))?;
    let whole = whole.to_bytes();
    let hash = sigv4::body_hash(&whole);
    Ok((Request::from_parts(parts, whole_body(whole)), Some(hash)))
}

fn whole_body(bytes: Bytes) -> AnyBody {
    Box::pin(Full::new(bytes).map_err(|never: Infallible| -> BodyError { match never {} }))
}

/// The secrets that may stand in a body for a target, with their values.
fn body_secrets(secrets: &SecretTable, target: &Target) -> Vec<(Rc<Secret>, Vec<u8>)> {
    let fitting = secrets.iter().filter(|secret| secret.fields.body);
    let valued =
        fitting.filter_map(|secret| Some((Rc::clone(secret), secret.value_for(target).ok()?.to_vec())));
    valued.collect()
}

/// An answer in which the values of secrets are masked.
fn masked(response: Response<Incoming>, mask: Mask) -> Result<Response<AnyBody>, Denial> {
    let (mut parts, body) = response.into_parts();
    if mask.is_empty() {
        return Ok(Response::from_parts(parts, boxed(body)));
    }
    let is_coded = |value: &header::HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"identity");
    if parts.headers.get_all(header::CONTENT_ENCODING).iter().any(is_coded) {
        return Err(Denial::unreachable(
            "its host compresses the answer, in which a secret could not be masked",
        ));
    }
    for value in parts.headers.values_mut() {
        let mut text = value.as_bytes().to_vec();
        if mask.apply(&mut text) {
            *value = header::HeaderValue::from_bytes(&text).unwrap_or(header::HeaderValue::from_static("*"));
        }
    }
    Ok(Response::from_parts(parts, Box::pin(RewrittenBody::new(body, mask))))
}

fn boxed(body: Incoming) -> AnyBody {
    Box::pin(body.map_err(Into::into))
}

fn refusal(shown: &str, denial: &Denial) -> Response<AnyBody> {
    let mut response = Response::new(whole_body(explanation(shown, denial).into()));
    *response.status_mut() = StatusCode::from_u16(denial.status).unwrap_or(StatusCode::FORBIDDEN);
    let plain = header::HeaderValue::from_static("text/plain");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

fn not_accepted(error: &io::Error) -> String {
    format!(
        "the program did not accept the certificate of its Body's authority ({}): a program that trusts one certificate \
         only needs a rule that ends with `+tunnel`",
        fit_to_show(&error.to_string())
    )
}

#[cfg(test)]
mod tests;
