//! Connections from Body to Body: to the egress process of another Body, and from one to a port of the own Body.
//!
//! Invariant: the accepting Body's process judges and records a connection before its own Body gets a byte of it, and
//! closes it when the policy no longer accepts it.
//! Trust: the first line of an incoming connection comes from a supervisor, because only processes of the host's user
//! reach the socket; the bytes behind it come from the other Body and are hostile. The answer of another egress process
//! is hostile, too.

use std::{
    cell::RefCell,
    collections::HashMap,
    io,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
};

use proto::egress::{
    AcceptList, BodyIdentity, Decision, EgressOrders, PEER_LINE_LEN_MAX, PeerAnswer, PeerCall, PeerRequest,
    body_label, fit_to_show, is_body_domain, no_such_body,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpStream, UnixListener, UnixStream},
    sync::{Notify, Semaphore},
    time::timeout,
};

use crate::{
    budgets::Meter,
    client::{PATIENCE, ProxyClient},
    dial::dial,
    proxy::{Proxy, accept_all},
    refusal::Denial,
    splice::splice,
    target::{Host, Target},
};

/// Connections of other Bodies at once; further ones wait.
pub const PEERS_MAX: usize = 256;
const NO_ANSWER: &str = "its egress process does not answer";

/// A connection to the host of a target.
pub enum HostStream {
    Tcp(TcpStream),
    /// To the egress process of another Body.
    Body(UnixStream),
}

/// The Body itself, whom it accepts, and the connections of others that are open.
#[derive(Default)]
pub struct PeerTable {
    own: RefCell<Option<BodyIdentity>>,
    accept: RefCell<AcceptList>,
    open: RefCell<HashMap<u64, OpenPeer>>,
    last: std::cell::Cell<u64>,
}

struct OpenPeer {
    call: PeerCall,
    closed: Rc<Notify>,
}

/// A connection in the table; it leaves the table when this is dropped.
struct PeerFlow<'a> {
    table: &'a PeerTable,
    nr: u64,
    closed: Rc<Notify>,
}

impl Drop for PeerFlow<'_> {
    fn drop(&mut self) {
        self.table.open.borrow_mut().remove(&self.nr);
    }
}

impl PeerTable {
    /// The list in these orders, if it can be used.
    pub fn read(orders: &EgressOrders) -> Result<AcceptList, String> {
        AcceptList::new(&orders.accept).map_err(|error| error.to_string())
    }

    /// Puts another list in force, and returns how many connections it closed.
    pub fn replace(&self, own: Option<BodyIdentity>, accept: AcceptList) -> usize {
        *self.own.borrow_mut() = own;
        *self.accept.borrow_mut() = accept;
        let mut open = self.open.borrow_mut();
        let before = open.len();
        open.retain(|_, peer| {
            let keeps = self.judge(&peer.call).is_ok();
            if !keeps {
                peer.closed.notify_one();
            }
            keeps
        });
        before - open.len()
    }

    /// The number of open connections.
    pub fn len(&self) -> usize {
        self.open.borrow().len()
    }

    fn judge(&self, call: &PeerCall) -> Result<(), String> {
        match &*self.own.borrow() {
            Some(own) => self.accept.borrow().judge(own, call),
            None => Err(no_such_body(&call.to)),
        }
    }

    /// Judges a connection, and enters it in the same step, so that no change of the policy comes between.
    fn open(&self, call: &PeerCall) -> Result<PeerFlow<'_>, String> {
        self.judge(call)?;
        let nr = self.last.get() + 1;
        self.last.set(nr);
        let closed = Rc::new(Notify::new());
        self.open.borrow_mut().insert(nr, OpenPeer { call: call.clone(), closed: closed.clone() });
        Ok(PeerFlow { table: self, nr, closed })
    }
}

impl Proxy {
    /// Connects to the host of a target that is permitted: another Body, or a host of the Internet.
    pub async fn reach(&self, target: &Target, private: bool) -> Result<HostStream, Denial> {
        match &target.host {
            Host::Name(name) if is_body_domain(name) => {
                self.call(name, target.port).await.map(HostStream::Body)
            }
            _ => {
                let denied = |address| self.policy.borrow().denial_of_address(address, target.port);
                let corporate = self.corporate.borrow().clone();
                dial(&self.addresses, corporate.as_deref(), target, private, denied)
                    .await
                    .map(HostStream::Tcp)
            }
        }
    }

    async fn call(&self, name: &str, port: u16) -> Result<UnixStream, Denial> {
        let to = body_label(name).ok_or_else(|| {
            Denial::forbidden("no Body has such a name: it is one label before body.internal")
        })?;
        let connecting = async {
            let request = PeerRequest::Body { to, port };
            let mut stream = self.link.ask(&request).await.map_err(Denial::unreachable)?;
            match read_answer(&mut stream).await {
                Some(PeerAnswer::Ready) => Ok(stream),
                Some(PeerAnswer::Refused { why, unreachable: false }) => {
                    Err(Denial::forbidden(fit_to_show(&why)))
                }
                Some(PeerAnswer::Refused { why, unreachable: true }) => {
                    Err(Denial::unreachable(fit_to_show(&why)))
                }
                None => Err(Denial::unreachable(NO_ANSWER)),
            }
        };
        timeout(PATIENCE, connecting).await.unwrap_or_else(|_| Err(Denial::unreachable(NO_ANSWER)))
    }

    /// Serves connections of other Bodies forever.
    pub async fn serve_peers(self: Rc<Self>, listener: UnixListener) {
        let free = Arc::new(Semaphore::new(PEERS_MAX));
        accept_all(
            &free,
            || listener.accept(),
            |(stream, _)| {
                let proxy = Rc::clone(&self);
                async move { proxy.peer(stream).await }
            },
        )
        .await;
    }

    async fn peer(&self, stream: UnixStream) -> io::Result<()> {
        let mut client = ProxyClient::new(stream);
        let call = timeout(PATIENCE, read_call(&mut client)).await.map_err(|_| io::ErrorKind::TimedOut)??;
        let to = format!("{}.{}:{}", call.to, proto::egress::BODY_DOMAIN, call.port);
        let flow = match self.peers.open(&call) {
            Ok(flow) => flow,
            Err(why) => return self.refuse_peer(&mut client, &call, &to, Denial::forbidden(why)).await,
        };
        let mut port = match timeout(PATIENCE, self.own_port(call.port)).await {
            Ok(Ok(port)) => port,
            Ok(Err(denial)) => return self.refuse_peer(&mut client, &call, &to, denial).await,
            Err(_) => {
                let denial = Denial::unreachable("the Body does not answer");
                return self.refuse_peer(&mut client, &call, &to, denial).await;
            }
        };
        if let Err(error) = self.record(Decision::allowed(&to, "a rule accepts it").of_peer(&call.from)) {
            return self.refuse_peer(&mut client, &call, &to, Denial::unrecorded(&error)).await;
        }
        let served = async {
            write_line(&mut client.stream, &PeerAnswer::Ready).await?;
            // A server may speak first.
            client.stream.write_all(&std::mem::take(&mut port.ahead)).await?;
            splice(&mut client, port.stream, None, None, &Meter::unlimited()).await.map(drop)
        };
        tokio::select! {
            done = served => done,
            () = flow.closed.notified() => Ok(()),
        }
    }

    /// Connects to a port in the own Body, through its guest.
    async fn own_port(&self, port: u16) -> Result<ProxyClient<UnixStream>, Denial> {
        let stream = self.link.ask(&PeerRequest::Own { port }).await.map_err(Denial::unreachable)?;
        // The supervisor has sent the request already.
        let mut guest = ProxyClient::new(stream);
        let broken = |_| Denial::unreachable("the Body does not answer");
        let head = guest.read_head().await.map_err(broken)??;
        match head.starts_with(b"HTTP/1.1 101 ") {
            true => Ok(guest),
            false => Err(Denial::unreachable(format!("no program in the Body listens on port {port}"))),
        }
    }

    /// Records a refusal, and tells the other egress process the reason.
    async fn refuse_peer(
        &self,
        client: &mut ProxyClient<UnixStream>,
        call: &PeerCall,
        to: &str,
        denial: Denial,
    ) -> io::Result<()> {
        let denial = match self.record(Decision::denied(to, &denial.why).of_peer(&call.from)) {
            Ok(()) => denial,
            Err(error) => Denial::unrecorded(&error),
        };
        let unreachable = denial.status == crate::refusal::UNREACHABLE;
        write_line(&mut client.stream, &PeerAnswer::Refused { why: denial.why, unreachable }).await
    }
}

async fn write_line(stream: &mut UnixStream, message: &PeerAnswer) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line).await
}

/// Reads the line of a supervisor; what follows it stays ahead.
async fn read_call(client: &mut ProxyClient<UnixStream>) -> io::Result<PeerCall> {
    loop {
        if let Some(end) = client.ahead.iter().position(|byte| *byte == b'\n') {
            let rest = client.ahead.split_off(end + 1);
            let line = std::mem::replace(&mut client.ahead, rest);
            return Ok(serde_json::from_slice(&line)?);
        }
        if client.ahead.len() > PEER_LINE_LEN_MAX || client.read_more().await? == 0 {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

/// Reads the answer of another egress process byte by byte, because bytes of the program behind its port follow.
async fn read_answer(stream: &mut UnixStream) -> Option<PeerAnswer> {
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await.ok()? {
            b'\n' => return serde_json::from_slice(&line).ok(),
            byte if line.len() < PEER_LINE_LEN_MAX => line.push(byte),
            _ => return None,
        }
    }
}

impl AsyncRead for HostStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Body(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for HostStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Body(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Body(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Body(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
