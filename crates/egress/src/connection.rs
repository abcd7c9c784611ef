//! One way for every connection, whether a program asked the proxy for it or the kernel redirected it: judge the target,
//! connect, judge the first bytes by the protocol of the rule, record, forward.
//!
//! Invariant: the decision about a connection is in the spool before its first byte goes to the host; if it cannot be
//! written, the connection is refused.
//! Trust: every byte from a Body is hostile: heads and hellos have a maximum length and a deadline, and names are
//! compared in their canonical form.

use std::{io, rc::Rc};

use proto::egress::{Decision, ForwardHost, Permit, Protocol, RequestPermit, fit_to_show};
use tokio::{io::AsyncWriteExt, time::timeout};

use crate::{
    budgets::{Meter, is_allowance_end},
    client::{ClientStream, PATIENCE, ProxyClient},
    client_hello::HelloReader,
    flows::OpenFlow,
    http_body::BodyLength,
    http_gate::{OutgoingRequest, exchange, respond},
    http_head::HttpRequest,
    peers::HostStream,
    proxy::Proxy,
    refusal::{Denial, RefusalForm, refuse},
    splice::splice,
    target::{Host, Target},
};

/// The reason for a refusal of requests to an address.
pub const NEEDS_NAME: &str = "its rule judges requests, which needs a name";
/// The reason for a connection that a rule allows.
const NAMED: &str = "a rule names it";
const HTTP_PORT: u16 = 80;
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
        if done.as_ref().is_err_and(is_allowance_end) {
            // Not an end that the program could take for the host's.
            client.stream.reset();
        }
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
        // Where requests are judged, the budgets are those of the rule that allows the request.
        let meter = match is_http && permit.inspect {
            true => Ok(None),
            false => self.budgets.admit(&permit.terms).map(Some),
        };
        let meter = match meter {
            Ok(meter) => meter,
            Err(denial) => return Ok(Err((before, denial))),
        };
        if matches!(origin, ConnectionOrigin::Forward(_)) && !is_http {
            let why = "its rule allows no plain http: use https, or a rule that ends with `+http`";
            return Ok(Err((before, Denial::forbidden(why))));
        }
        let upstream = match is_http && permit.connects_late {
            true => Ok(None),
            false => self.reach(target, permit.private).await.map(Some),
        };
        let upstream = match upstream {
            Ok(upstream) => upstream,
            Err(denial) => return Ok(Err((before, denial))),
        };
        if matches!(origin, ConnectionOrigin::Tunnel) {
            client.stream.write_all(ESTABLISHED).await?;
        }
        let done = match (permit.protocol, origin, upstream) {
            (Protocol::Tls, _, Some(upstream)) => {
                self.tls(client, upstream, target, &meter.unwrap_or_else(Meter::unlimited)).await?
            }
            (Protocol::Tcp, _, Some(upstream)) => {
                self.tcp(client, upstream, target, &meter.unwrap_or_else(Meter::unlimited)).await?
            }
            (_, ConnectionOrigin::Forward(request), upstream) => {
                self.http(client, upstream, target, (permit, meter), request).await?
            }
            (_, _, upstream) => self.inner_http(client, upstream, target, (permit, meter)).await?,
        };
        Ok(done.map_err(|denial| (RefusalForm::of_protocol(permit), denial)))
    }

    /// TLS whose server name is the name of the target.
    async fn tls<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: HostStream,
        target: &Target,
        meter: &Meter,
    ) -> io::Result<Result<(), Denial>> {
        let judged =
            timeout(PATIENCE, judge_hello(client, target)).await.map_err(|_| io::ErrorKind::TimedOut)?;
        if let Err(denial) = judged? {
            return Ok(Err(denial));
        }
        if let Err(denial) = self.allow(target, NAMED) {
            return Ok(Err(denial));
        }
        splice(client, upstream, None, None, meter).await
    }

    /// Any protocol. A server may speak first, so the decision is recorded before the program has sent a byte.
    async fn tcp<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: HostStream,
        target: &Target,
        meter: &Meter,
    ) -> io::Result<Result<(), Denial>> {
        match self.allow(target, NAMED) {
            Ok(()) => splice(client, upstream, Some(target), self.ssh.watch(target), meter).await,
            Err(denial) => Ok(Err(denial)),
        }
    }

    /// A request inside a tunnel or a redirected connection.
    async fn inner_http<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: Option<HostStream>,
        target: &Target,
        terms: (&Permit, Option<Meter>),
    ) -> io::Result<Result<(), Denial>> {
        let head = match client.read_head().await? {
            Ok(head) => head,
            Err(denial) => return Ok(Err(denial)),
        };
        let request =
            HttpRequest::parse(&head).and_then(|request| request.check_host(target).map(|()| request));
        match request {
            Ok(request) => self.http(client, upstream, target, terms, &request).await,
            Err(denial) => Ok(Err(denial)),
        }
    }

    /// One request, and its answer: of the host, of the rule, or of the host that the rule names.
    async fn http<S: ClientStream>(
        &self,
        client: &mut ProxyClient<S>,
        upstream: Option<HostStream>,
        target: &Target,
        (permit, meter): (&Permit, Option<Meter>),
        request: &HttpRequest,
    ) -> io::Result<Result<(), Denial>> {
        let (body, judged, meter) = match self.admit_plain(target, (permit, meter), request) {
            Ok(admitted) => admitted,
            Err(denial) => return Ok(Err(denial)),
        };
        if let Some(response) = &judged.respond {
            return match self.allow(target, &reason(&judged)) {
                Ok(()) => respond(client, response, request.is_head()).await.map(Ok),
                Err(denial) => Ok(Err(denial)),
            };
        }
        let (upstream, destination) = match self.upstream(upstream, target, permit, &judged).await {
            Ok(connected) => connected,
            Err(denial) => return Ok(Err(denial)),
        };
        // The policy may have changed while the proxy connected.
        let again = self.judge_plain(target, permit, request).and_then(|again| match again == judged {
            true => self.allow(target, &reason(&judged)),
            false => Err(Denial::policy_changed()),
        });
        if let Err(denial) = again {
            return Ok(Err(denial));
        }
        let mut headers = judged.set_headers;
        if judged.forward.is_some() {
            headers.insert("forwarded".into(), target.forwarded(HTTP_PORT));
        }
        let head = request.for_host(&destination, permit, body, &headers);
        let expects_continue = request.expects_continue();
        exchange(client, upstream, &OutgoingRequest { head, body, expects_continue, meter }).await
    }

    /// Judges a request, and counts it, unless its connection is counted.
    fn admit_plain(
        &self,
        target: &Target,
        (permit, meter): (&Permit, Option<Meter>),
        request: &HttpRequest,
    ) -> Result<(BodyLength, RequestPermit, Meter), Denial> {
        let body = request.check_protocol(permit)?;
        let judged = self.judge_plain(target, permit, request)?;
        let meter = match meter {
            Some(meter) => meter,
            None => self.budgets.admit(&judged.terms)?,
        };
        Ok((body, judged, meter))
    }

    /// Connects to the host that a request goes to, unless the proxy is connected to it.
    async fn upstream(
        &self,
        upstream: Option<HostStream>,
        target: &Target,
        permit: &Permit,
        judged: &RequestPermit,
    ) -> Result<(HostStream, Target), Denial> {
        match (&judged.forward, upstream) {
            (Some(host), _) => {
                let destination = self.forward_target(host)?;
                Ok((self.reach(&destination, host.private).await?, destination))
            }
            (None, Some(upstream)) => Ok((upstream, target.clone())),
            (None, None) => Ok((self.reach(target, permit.private).await?, target.clone())),
        }
    }

    /// The target of requests that a rule sends to another host, unless another rule denies it.
    pub fn forward_target(&self, host: &ForwardHost) -> Result<Target, Denial> {
        match self.policy.borrow().denial_of_forward(host) {
            Some(why) => Err(Denial::forbidden(why)),
            None => Ok(Target { host: Host::Name(host.name.clone()), port: host.port }),
        }
    }

    /// Judges a request that everybody on its way can read: it gets the headers of its rule, and no secret.
    pub fn judge_plain(
        &self,
        target: &Target,
        permit: &Permit,
        request: &HttpRequest,
    ) -> Result<RequestPermit, Denial> {
        if request.has_placeholder() {
            return Err(Denial::forbidden(
                "a placeholder of a secret is in it, and no secret goes over plain http",
            ));
        }
        let name = match (permit.inspect, &target.host) {
            (true, Host::Name(name)) => name,
            (true, Host::Address(_)) => return Err(Denial::forbidden(NEEDS_NAME)),
            (false, _) => {
                return Ok(RequestPermit { terms: permit.terms.clone(), ..RequestPermit::default() });
            }
        };
        let headers = request.judged_headers();
        let request = request.judged_part(&headers)?;
        let judged = self.policy.borrow().judge_request(name, target.port, &request);
        let judged = judged.map_err(Denial::forbidden)?;
        match judged.set_headers.values().any(|value| value.contains("${")) {
            true => Err(Denial::forbidden(
                "its rule sets a header with a secret, and no secret goes over plain http",
            )),
            false => Ok(judged),
        }
    }

    /// Records that a rule allows a connection.
    fn allow(&self, target: &Target, why: &str) -> Result<(), Denial> {
        let decision = Decision::allowed(&target.to_string(), why);
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

/// The reason for a request that a rule allows, for the record.
fn reason(permit: &RequestPermit) -> String {
    match (&permit.respond, &permit.forward) {
        (Some(_), _) => format!("the rule `{}` answers the request", permit.rule),
        (None, Some(host)) => forwarding_reason(&permit.rule, host),
        (None, None) => NAMED.to_owned(),
    }
}

/// The reason for a request that a rule sends to another host, for the record.
pub fn forwarding_reason(rule: &str, host: &ForwardHost) -> String {
    format!("the rule `{rule}` sends the request to {}:{}", host.name, host.port)
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
