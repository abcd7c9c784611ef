//! The requests of one inspected connection: each is judged, counted, and answered by its rule or by a host.

use std::{cell::RefCell, collections::HashMap, convert::Infallible, io, rc::Rc};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode, Version,
    body::{Body, Incoming},
    header,
    http::request,
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use proto::egress::{Decision, Permit, RequestPermit, RuleResponse, fit_to_show};
use tokio::sync::{Mutex, Notify};

use super::{
    H2, HTTP1,
    body::{AnyBody, BodyError, DrainableBody, MeteredBody, Replacements, RewrittenBody, headers_len},
    mask::Mask,
    request::{Injector, check_authority, judged_headers, readdress, request_target},
    sigv4,
    tasks::ConnectionTasks,
    upstream::Upstream,
};
use crate::{
    budgets::Meter,
    connection::{NEEDS_NAME, forwarding_reason},
    idle::IdleClock,
    proxy::Proxy,
    refusal::{Denial, explanation},
    secrets::{OpenSecret, SecretTable},
    target::{Host, Target},
};

/// Longest body whose hash is computed for a signature.
const SIGNED_BODY_LEN_MAX: usize = 10 << 20;

/// One inspected connection.
pub struct InspectedSession {
    proxy: Rc<Proxy>,
    target: Target,
    /// Whether the target may be an address of this host or of a private network.
    private: bool,
    /// The protocols that are offered to further hosts.
    protocols: &'static [&'static [u8]],
    /// The connections to hosts, by the target and whether it may be private.
    hosts: Mutex<HashMap<(String, bool), Rc<Upstream>>>,
    tasks: ConnectionTasks,
    /// The two ends of a connection that became a WebSocket.
    upgraded: RefCell<Option<([OnUpgrade; 2], Rc<Meter>)>>,
}

/// A request that may go out.
struct JudgedRequest {
    request: Request<AnyBody>,
    /// Whether it may have the value of a secret.
    has_secret: bool,
    /// Hides the values of all secrets of the host in the answer: an earlier request may have left one there.
    mask: Mask,
}

impl InspectedSession {
    /// A session without connections to hosts.
    pub fn new(
        proxy: Rc<Proxy>,
        target: &Target,
        permit: &Permit,
        tasks: &ConnectionTasks,
        is_h2: bool,
    ) -> Self {
        Self {
            proxy,
            target: target.clone(),
            private: permit.private,
            // Only HTTP/2 becomes the other one, because nothing of HTTP/1.1 is lost so.
            protocols: if is_h2 { &[H2, HTTP1] } else { &[HTTP1] },
            hosts: Mutex::default(),
            tasks: tasks.clone(),
            upgraded: RefCell::default(),
        }
    }

    /// Keeps a connection to the target.
    pub async fn keep(&self, upstream: Option<Upstream>) {
        if let Some(upstream) = upstream {
            let key = (self.target.to_string(), self.private);
            self.hosts.lock().await.insert(key, Rc::new(upstream));
        }
    }

    /// Splices the two ends of a connection that became a WebSocket.
    pub async fn serve_upgraded(&self) -> io::Result<()> {
        let upgraded = self.upgraded.borrow_mut().take();
        let Some(([program, host], meter)) = upgraded else { return Ok(()) };
        let (Ok(program), Ok(host)) = (program.await, host.await) else { return Ok(()) };
        let (from_program, to_program) = tokio::io::split(TokioIo::new(program));
        let (from_host, to_host) = tokio::io::split(TokioIo::new(host));
        let clock = IdleClock::new();
        tokio::select! {
            done = async {
                tokio::try_join!(
                    clock.copy(from_program, to_host, &meter),
                    clock.copy(from_host, to_program, &meter),
                )
            } => done.map(drop),
            error = clock.expired() => Err(error),
        }
    }

    /// Answers a request: with the answer of a host or of a rule, or with a refusal.
    pub async fn answer(&self, request: Request<Incoming>) -> Response<AnyBody> {
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
        let (parts, body) = request.into_parts();
        let permit = self.permit(&parts)?;
        let meter = Rc::new(self.proxy.budgets.admit(&permit.terms)?);
        if let Some(response) = &permit.respond {
            self.allow(&format!("the rule `{}` answers the request", permit.rule))?;
            return answered(response, parts.method == Method::HEAD);
        }
        let (destination, private) = match &permit.forward {
            Some(host) => (self.proxy.forward_target(host)?, host.private),
            None => (self.target.clone(), self.private),
        };
        // The memory that bodies take is bounded: few wait for their hash at once.
        let needs_hash =
            self.proxy.secrets.borrow().signs_requests() && sigv4::needs_body_hash(&parts.headers);
        let signing = match needs_hash {
            true => Some(self.proxy.signing.acquire().await.map_err(|_| Denial::bad("the process ends"))?),
            false => None,
        };
        let (body, hash) = match &signing {
            Some(_) => hashed(body).await?,
            None => (Box::pin(body) as AnyBody, None),
        };
        let upstream = self.upstream(&destination, private).await?;
        let body: AnyBody = Box::pin(MeteredBody::new(body, Rc::clone(&meter)));
        let JudgedRequest { request, has_secret, mask } =
            self.judge((parts, body), &permit, &destination, hash.as_deref())?;
        let over = |error: io::Error| Denial::forbidden(error.to_string());
        meter.spend(request.uri().to_string().len() + headers_len(request.headers())).map_err(over)?;
        let sent = upstream.send(request).await;
        drop(signing);
        let mut response = sent.map_err(|error| {
            Denial::unreachable(format!("its host broke off: {}", fit_to_show(&error.to_string())))
        })?;
        meter.spend(headers_len(response.headers())).map_err(over)?;
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let program =
                program.ok_or_else(|| Denial::unreachable("its host changed the protocol unasked"))?;
            let ends = [program, hyper::upgrade::on(&mut response)];
            *self.upgraded.borrow_mut() = Some((ends, Rc::clone(&meter)));
        }
        let response = response.map(|body| -> AnyBody { Box::pin(MeteredBody::new(boxed(body), meter)) });
        masked(response, mask, has_secret)
    }

    /// The rule that allows a request.
    fn permit(&self, parts: &request::Parts) -> Result<RequestPermit, Denial> {
        let Host::Name(name) = &self.target.host else { return Err(Denial::forbidden(NEEDS_NAME)) };
        check_authority(parts, &self.target)?;
        if let Some(upgrade) = parts.headers.get(header::UPGRADE)
            && !upgrade.as_bytes().eq_ignore_ascii_case(b"websocket")
        {
            return Err(Denial::forbidden("it asks for another protocol than WebSocket"));
        }
        let headers = judged_headers(parts);
        let request = request_target(parts, &headers)?;
        let permit = self.proxy.policy.borrow().judge_request(name, self.target.port, &request);
        permit.map_err(Denial::forbidden)
    }

    /// A connection to a host.
    async fn upstream(&self, destination: &Target, private: bool) -> Result<Rc<Upstream>, Denial> {
        let Host::Name(name) = &destination.host else { return Err(Denial::forbidden(NEEDS_NAME)) };
        let mut hosts = self.hosts.lock().await;
        let key = (destination.to_string(), private);
        if let Some(open) = hosts.get(&key).filter(|open| !open.is_closed()) {
            return Ok(Rc::clone(open));
        }
        let stream = self.proxy.reach(destination, private).await?;
        let stream = self.proxy.connect_tls(stream, name, self.protocols).await?;
        let open = Rc::new(Upstream::open(stream, &self.tasks, Rc::new(Notify::new())).await?);
        hosts.insert(key, Rc::clone(&open));
        Ok(open)
    }

    /// Records that a rule allows a request.
    fn allow(&self, why: &str) -> Result<(), Denial> {
        let decision = Decision::allowed(&self.target.to_string(), why);
        self.proxy.record(decision).map_err(|error| Denial::unrecorded(&error))
    }

    /// Judges a request again at the moment at which it goes out, gives it its secrets, and records the decision.
    fn judge(
        &self,
        (mut parts, body): (request::Parts, AnyBody),
        permit: &RequestPermit,
        destination: &Target,
        body_hash: Option<&str>,
    ) -> Result<JudgedRequest, Denial> {
        if self.permit(&parts)? != *permit {
            return Err(Denial::policy_changed());
        }
        if permit.forward.is_some() {
            readdress(&mut parts, &self.target, destination)?;
        }
        let secrets = Rc::clone(&self.proxy.secrets.borrow());
        let mut injector = Injector::new(&secrets, destination);
        injector.rewrite(&mut parts, permit, body_hash)?;
        let mut used = std::mem::take(&mut injector.used);
        let replaced = match body.is_end_stream() {
            true => Vec::new(),
            false => body_secrets(&secrets, destination),
        };
        for (secret, _) in &replaced {
            if !used.iter().any(|known| Rc::ptr_eq(known, secret)) {
                used.push(Rc::clone(secret));
            }
        }
        let mut why = match &permit.forward {
            Some(host) => forwarding_reason(&permit.rule, host),
            None => format!("the rule `{}` allows the request", permit.rule),
        };
        if !used.is_empty() {
            let names: Vec<&str> = used.iter().map(|secret| secret.name.as_str()).collect();
            why = format!("with the secret {}: {why}", names.join(" and "));
        }
        self.allow(&why)?;
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
        let values: Vec<Vec<u8>> =
            secrets.iter().flat_map(|secret| secret.masked_values(destination)).collect();
        let mask = Mask::of(values.iter().map(Vec::as_slice));
        Ok(JudgedRequest { request: Request::from_parts(parts, body), has_secret: !used.is_empty(), mask })
    }
}

/// The answer of a rule.
fn answered(response: &RuleResponse, is_head: bool) -> Result<Response<AnyBody>, Denial> {
    let RuleResponse { status, headers, body } = response;
    let mut built = Response::builder().status(*status);
    for (name, value) in headers {
        built = built.header(name, value);
    }
    if is_head {
        built = built.header(header::CONTENT_LENGTH, body.len());
    }
    let body = if is_head { Bytes::new() } else { body.clone().into() };
    built.body(whole_body(body)).map_err(|_| Denial::bad("the answer of its rule is malformed"))
}

/// Reads a whole body, and returns its hash for a signature.
async fn hashed(body: DrainableBody) -> Result<(AnyBody, Option<String>), Denial> {
    let whole = Limited::new(body, SIGNED_BODY_LEN_MAX).collect().await;
    let whole =
        whole.map_err(|_| Denial::forbidden("its body is too large for a signature, or broke off"))?;
    let whole = whole.to_bytes();
    let hash = sigv4::body_hash(&whole);
    Ok((whole_body(whole), Some(hash)))
}

fn whole_body(bytes: Bytes) -> AnyBody {
    Box::pin(Full::new(bytes).map_err(|never: Infallible| -> BodyError { match never {} }))
}

/// The secrets that may stand in a body for a target, with their values.
fn body_secrets(secrets: &SecretTable, target: &Target) -> Vec<(Rc<OpenSecret>, Vec<u8>)> {
    let fitting = secrets.iter().filter(|secret| secret.fields.body);
    let valued =
        fitting.filter_map(|secret| Some((Rc::clone(secret), secret.value_for(target).ok()?.to_vec())));
    valued.collect()
}

/// An answer in which the values of secrets are masked.
fn masked(response: Response<AnyBody>, mask: Mask, has_secret: bool) -> Result<Response<AnyBody>, Denial> {
    let (mut parts, body) = response.into_parts();
    if mask.is_empty() {
        return Ok(Response::from_parts(parts, body));
    }
    let is_coded = |value: &header::HeaderValue| !value.as_bytes().eq_ignore_ascii_case(b"identity");
    if parts.headers.get_all(header::CONTENT_ENCODING).iter().any(is_coded) {
        // The request asked for an answer as it is. A host that keeps compressed files sends them so to everybody.
        if !has_secret {
            return Ok(Response::from_parts(parts, body));
        }
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
