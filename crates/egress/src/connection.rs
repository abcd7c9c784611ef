//! One way for every connection, whether a program asked the proxy for it or the kernel redirected it: judge the target,
//! connect, judge the first bytes by the protocol of the rule, record, forward.
//!
//! Invariant: the decision about a connection is in the spool before its first byte goes to the host; if it cannot be
//! written, the connection is refused.
//! Trust: every byte from a Body is hostile: heads and hellos have a maximum length and a deadline, and names are
//! compared in their canonical form.

use std::{collections::BTreeMap, io, rc::Rc};

use proto::egress::{Decision, Permit, Protocol, fit_to_show};
use tokio::{io::AsyncWriteExt, time::timeout};

use crate::{
    client::{ClientStream, PATIENCE, ProxyClient},
    client_hello::HelloReader,
    flows::OpenFlow,
    http_gate::{OutgoingRequest, exchange},
    http_head::HttpRequest,
    peers::HostStream,
    proxy::Proxy,
    refusal::{Denial, RefusalForm, refuse},
    splice::splice,
    target::{Host, Target},
};

pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// The way by which a connection came.
pub enum ConnectionOrigin {
    /// A program asked for a tunnel, and waits for an answer.
    Tunnel,
    /// A program sent this request for the proxy to forward. Its URL names the target, and its `Host` is written anew.
    Forward(HttpRequest),
    /// The kernel redirected it: the program takes it for one to the target.
    Redirect,
}

/// A connection that ended by a refusal.
type RefusedConnection = (RefusalForm, Denial);

impl Proxy {
    /// Serves a connection to a target to its end.
    pub async fn connect<S: ClientStream>(
        self: &Rc<Self>,
        mut client: ProxyClient<S>,
        target: &Target,
        origin: &ConnectionOrigin,
    ) -> io::Result<()> {
        let opened = match self.open(target) {
            Err(why) => self.ask(target, why).await,
            opened => opened,
        };
        let (permit, flow) = match opened {
            Ok(opened) => opened,
            Err(why) => {
                let form = match origin {
                    ConnectionOrigin::Redirect => RefusalForm::of_port(target.port),
                    _ => RefusalForm::Http,
                };
                return self.deny(&mut client, form, &target.to_string(), Denial::forbidden(why)).await;
            }
        };
        if permit.inspect && permit.protocol == Protocol::Tls {
            return tokio::select! {
                done = self.inspect(client, target, &permit, origin) => done,
                () = flow.closed() => Ok(()),
            };
        }
        let done = tokio::select! {
            done = self.forward(&mut client, target, &permit, origin) => done,
            () = flow.closed() => {
                client.stream.reset();
                return Ok(());
            }
        };
        drop(flow);
        match done? {
            Ok(()) => Ok(()),
            Err((form, denial)) => self.deny(&mut client, form, &target.to_string(), denial).await,
        }
    }

    /// Judges a target, and enters its connection in the table in the same step, so that no change of the policy comes
    /// between.
    pub fn open(&self, target: &Target) -> Result<(Permit, OpenFlow), String> {
        let permit = target.judge(&self.policy.borrow())?;
        let flow = self.flows.add(target.clone(), permit.clone());
        Ok((permit, flow))
    }

    async fn forward<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        target: &Target,
        permit: &Permit,
        origin: &ConnectionOrigin,
    ) -> io::Result<Result<(), RefusedConnection>> {
        let is_http = matches!(permit.protocol, Protocol::Http | Protocol::PlainHttp);
        let before = match origin {
            ConnectionOrigin::Redirect => RefusalForm::of_protocol(permit),
            ConnectionOrigin::Tunnel | ConnectionOrigin::Forward(_) => RefusalForm::Http,
        };
        if matches!(origin, ConnectionOrigin::Forward(_)) && !is_http {
            let why = "its rule allows no plain http: use https, or a rule that ends with `+http`";
            return Ok(Err((before, Denial::forbidden(why))));
        }
        let upstream = match self.reach(target, permit).await {
            Ok(upstream) => upstream,
            Err(denial) => return Ok(Err((before, denial))),
        };
        if matches!(origin, ConnectionOrigin::Tunnel) {
            client.stream.write_all(ESTABLISHED).await?;
        }
        let done = match (permit.protocol, origin) {
            (Protocol::Http | Protocol::PlainHttp, ConnectionOrigin::Forward(request)) => {
                self.http(client, upstream, target, permit, request).await?
            }
            (Protocol::Http | Protocol::PlainHttp, _) => {
                self.inner_http(client, upstream, target, permit).await?
            }
            (Protocol::Tls, _) => self.tls(client, upstream, target).await?,
            (Protocol::Tcp, _) => self.tcp(client, upstream, target).await?,
        };
        Ok(done.map_err(|denial| (RefusalForm::of_protocol(permit), denial)))
    }

    /// TLS whose server name is the name of the target.
    async fn tls<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: HostStream,
        target: &Target,
    ) -> io::Result<Result<(), Denial>> {
        let judged =
            timeout(PATIENCE, judge_hello(client, target)).await.map_err(|_| io::ErrorKind::TimedOut)?;
        if let Err(denial) = judged? {
            return Ok(Err(denial));
        }
        if let Err(denial) = self.allow(target) {
            return Ok(Err(denial));
        }
        splice(client, upstream, None).await
    }

    /// Any protocol. A server may speak first, so the decision is recorded before the program has sent a byte.
    async fn tcp<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: HostStream,
        target: &Target,
    ) -> io::Result<Result<(), Denial>> {
        match self.allow(target) {
            Ok(()) => splice(client, upstream, Some(target)).await,
            Err(denial) => Ok(Err(denial)),
        }
    }

    /// A request inside a tunnel or a redirected connection.
    async fn inner_http<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: HostStream,
        target: &Target,
        permit: &Permit,
    ) -> io::Result<Result<(), Denial>> {
        let head = match client.read_head().await? {
            Ok(head) => head,
            Err(denial) => return Ok(Err(denial)),
        };
        let request =
            HttpRequest::parse(&head).and_then(|request| request.check_host(target).map(|()| request));
        match request {
            Ok(request) => self.http(client, upstream, target, permit, &request).await,
            Err(denial) => Ok(Err(denial)),
        }
    }

    async fn http<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: HostStream,
        target: &Target,
        permit: &Permit,
        request: &HttpRequest,
    ) -> io::Result<Result<(), Denial>> {
        let judged = request.check_protocol(permit).and_then(|body| {
            let headers = self.judge_plain(target, permit, request)?;
            self.allow(target).map(|()| (body, headers))
        });
        let (body, headers) = match judged {
            Ok(judged) => judged,
            Err(denial) => return Ok(Err(denial)),
        };
        let head = request.for_host(target, permit, body, &headers);
        let expects_continue = request.expects_continue();
        exchange(client, upstream, &OutgoingRequest { head, body, expects_continue }).await
    }

    /// Judges a request that everybody on its way can read: it gets the headers of its rule, and no secret.
    fn judge_plain(
        &self,
        target: &Target,
        permit: &Permit,
        request: &HttpRequest,
    ) -> Result<BTreeMap<String, String>, Denial> {
        if request.has_placeholder() {
            return Err(Denial::forbidden(
                "a placeholder of a secret is in it, and no secret goes over plain http",
            ));
        }
        let (true, Host::Name(name)) = (permit.inspect, &target.host) else { return Ok(BTreeMap::new()) };
        let judged = self.policy.borrow().judge_request(name, target.port, &request.judged_part()?);
        let headers = judged.map_err(Denial::forbidden)?.headers;
        match headers.values().any(|value| value.contains("${")) {
            true => Err(Denial::forbidden(
                "its rule sets a header with a secret, and no secret goes over plain http",
            )),
            false => Ok(headers),
        }
    }

    /// Records that a rule allows a connection.
    fn allow(&self, target: &Target) -> Result<(), Denial> {
        let decision = Decision::allowed(&target.to_string(), "a rule names it");
        self.record(decision).map_err(|error| Denial::unrecorded(&error))
    }

    /// Records a refusal, and answers the program inside with the reason.
    pub async fn deny<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        form: RefusalForm,
        to: &str,
        denial: Denial,
    ) -> io::Result<()> {
        let denial = match self.record(Decision::denied(to, &denial.why)) {
            Ok(()) => denial,
            Err(error) => Denial::unrecorded(&error),
        };
        refuse(client, form, to, &denial).await
    }
}

/// Reads a hello, which stays among the bytes that are forwarded.
pub async fn judge_hello<S: ClientStream>(
    client: &mut ProxyClient<S>,
    target: &Target,
) -> io::Result<Result<(), Denial>> {
    let (mut reader, mut seen) = (HelloReader::default(), 0);
    loop {
        let hello = match reader.push(&client.ahead[seen..]) {
            Ok(hello) => hello,
            Err(error) => return Ok(Err(Denial::forbidden(error.why()))),
        };
        if let Some(hello) = hello {
            let wrong = match hello.server_name {
                Some(name) if target.is_server_name(&name) => return Ok(Ok(())),
                Some(name) => format!("its TLS server name is {}", fit_to_show(&name)),
                None if target.is_server_name("") => return Ok(Ok(())),
                None => "its TLS hello has no server name".to_owned(),
            };
            return Ok(Err(Denial::forbidden(wrong)));
        }
        seen = client.ahead.len();
        if client.read_more().await? == 0 {
            let why = if seen == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            } else {
                "its TLS hello is incomplete"
            };
            return Ok(Err(Denial::forbidden(why)));
        }
    }
}
