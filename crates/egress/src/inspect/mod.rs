//! TLS whose requests are read: the program talks to a certificate of its Body's authority, the proxy talks to the host,
//! and every request between them is judged by the policy, gets its secrets, and is recorded.
//!
//! Both ends speak the same protocol, HTTP/1.1 or HTTP/2, so that bodies, trailers and event streams go through as they
//! come. A WebSocket is judged by its first request.
//!
//! Where a rule may answer requests itself or send them elsewhere, the program is answered first, and a connection to a host
//! is made when a request goes there; then HTTP/2 of the program may become HTTP/1.1.
//!
//! Invariant: a host's certificate is checked before it gets a request, and where a connection to it is made first, before
//! the program gets a certificate.
//! Invariant: a request is judged by the policy of its moment, and its decision is in the spool before it goes out.
//! Absent on purpose: HTTP/2 tunnels (extended CONNECT), early data, and certificates of clients.

mod body;
mod mask;
mod request;
mod session;
mod sigv4;
mod tasks;
mod tls;
mod upstream;

use std::{io, rc::Rc, sync::Arc};

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use proto::egress::{Decision, Permit, fit_to_show};
use rustls::{ServerConfig, pki_types::ServerName};
use tokio::{io::AsyncWriteExt, sync::Notify, time::timeout};
use tokio_rustls::{LazyConfigAcceptor, StartHandshake, TlsConnector, client::TlsStream};

use self::{body::BodyError, session::InspectedSession, tasks::ConnectionTasks, upstream::Upstream};
#[cfg(feature = "fuzzing")]
pub use self::{body::Rewrite, mask::Mask, request::Injector};
pub use self::{sigv4::parts_of_key, tls::Certificates};
use crate::{
    client::{ClientStream, PATIENCE, ProxyClient},
    connection::{ConnectionOrigin, ESTABLISHED, NEEDS_NAME, judge_hello},
    peers::HostStream,
    proxy::Proxy,
    refusal::{Denial, RefusalForm},
    target::{Host, Target},
};

const H2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

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
            (Host::Address(_), _) => Err(Denial::forbidden(NEEDS_NAME)),
            (_, ConnectionOrigin::Forward(_)) => {
                Err(Denial::forbidden("its rule allows no plain http: use https"))
            }
            (Host::Name(name), _) if permit.connects_late => Ok((name, None)),
            (Host::Name(name), _) => {
                self.reach(target, permit.private).await.map(|upstream| (name, Some(upstream)))
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
        match self.session(&start, upstream, name, (target, permit)).await {
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

    /// Agrees with the program on a protocol. With a connection to the host it is the one that the host chooses.
    async fn session<S: ClientStream>(
        self: &Rc<Self>,
        start: &StartHandshake<ProxyClient<S>>,
        upstream: Option<HostStream>,
        name: &str,
        (target, permit): (&Target, &Permit),
    ) -> Result<(InspectedSession, Arc<ServerConfig>, Serving), Denial> {
        let hello = start.client_hello();
        let offered: Vec<Vec<u8>> = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect();
        let offers = |protocol: &[u8]| offered.iter().any(|offer| offer == protocol);
        if !offered.is_empty() && !offers(H2) && !offers(HTTP1) {
            return Err(Denial::forbidden(
                "its rule inspects HTTP, and the program offers other protocols only",
            ));
        }
        let (tasks, guard) = ConnectionTasks::guarded();
        let gone = Rc::new(Notify::new());
        let upstream = match upstream {
            Some(stream) => {
                let known: Vec<&[u8]> = [H2, HTTP1].into_iter().filter(|protocol| offers(protocol)).collect();
                let stream = self.connect_tls(stream, name, &known).await?;
                Some(Upstream::open(stream, &tasks, Rc::clone(&gone)).await?)
            }
            None => None,
        };
        let is_h2 = upstream.as_ref().map_or(offers(H2), Upstream::is_h2);
        let chosen = match (is_h2, offered.is_empty()) {
            (true, _) => Some(H2),
            (false, true) => None,
            // A host without protocols speaks HTTP/1.1.
            (false, false) if offers(HTTP1) => Some(HTTP1),
            (false, false) => {
                return Err(Denial::forbidden("its host speaks no HTTP/2, and the program nothing else"));
            }
        };
        let config = self.certificates.server(name, chosen).map_err(Denial::forbidden)?;
        let session = InspectedSession::new(Rc::clone(self), target, permit, &tasks, is_h2);
        session.keep(upstream).await;
        Ok((session, config, Serving { is_h2, tasks, gone, _guard: guard }))
    }

    /// Connects to a host by TLS, whose certificate must be one that this machine trusts.
    async fn connect_tls(
        &self,
        stream: HostStream,
        name: &str,
        protocols: &[&[u8]],
    ) -> Result<TlsStream<HostStream>, Denial> {
        let protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let config = self.certificates.client(protocols).map_err(Denial::unreachable)?;
        let server = ServerName::try_from(name.to_owned())
            .map_err(|_| Denial::forbidden("its name is too odd for TLS"))?;
        let connecting = TlsConnector::from(config).connect(server, stream);
        let connected =
            timeout(PATIENCE, connecting).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        connected.map_err(|error| {
            let why = fit_to_show(&error.to_string());
            Denial::forbidden(format!("no TLS connection to the host that this machine trusts: {why}"))
        })
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
        session: Rc<InspectedSession>,
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
        session.serve_upgraded().await
    }
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
