//! Connections that the egress process of a Body needs and may not open itself: to the egress process of another Body, and
//! to a port of its own Body.
//!
//! The supervisor finds the other Body, and alone sends the token of its own guest. Both calls that connect return at once,
//! so no Body can hold the supervisor up.
//!
//! Invariant: a request gets a connection only if the newest orders on the disk allow it, so a `pal-egress` that was taken
//! over by a Body reaches no port that the policies do not name.
//! Trust: requests come from a process that parses a Body's bytes. They have a maximum length, and are judged again.

use std::{
    fs,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::Path,
};

use proto::{
    BodyId, BodyName,
    egress::{
        AcceptList, BODY_DOMAIN, EgressOrders, MESSAGE_LEN_MAX, ORDERS, PEER_LINE_LEN_MAX, PEERS, PeerCall,
        PeerRefusal, PeerRequest, no_such_body,
    },
    guest::DIAL_UPGRADE,
};
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::Deserialize;

const SPEC_LEN_MAX: u64 = 4 << 20;
const GUEST_SOCKET: &str = "guest.sock";

/// The socket to a running `pal-egress`.
pub struct EgressLink {
    socket: UnixStream,
    /// The beginning of a request.
    pending: Vec<u8>,
}

/// Connects for the egress process of one Body.
pub struct PeerConnector<'a> {
    /// The directory of the Body's egress process.
    pub dir: &'a Path,
    /// The token of its guest.
    pub token: Option<&'a str>,
}

/// The part of a spec that names a Body.
#[derive(Deserialize)]
struct NamedSpec {
    id: BodyId,
    #[serde(default)]
    name: Option<BodyName>,
}

impl EgressLink {
    /// The link over a socket, from which the answer to the start was read.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self { socket, pending: Vec::new() })
    }

    /// Answers the requests that are there; an error ends the link.
    pub fn answer(&mut self, connector: &PeerConnector<'_>) -> io::Result<()> {
        let mut piece = [0; PEER_LINE_LEN_MAX];
        match (&self.socket).read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => self.pending.extend_from_slice(&piece[..len]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            // A process that was started again sends its answer to the start first.
            let Ok(request) = serde_json::from_slice::<PeerRequest>(&line) else { continue };
            match connector.connect(&request) {
                Ok(connected) => sys::fd::send(self.socket.as_fd(), connected.as_fd())?,
                Err(why) => {
                    let mut line = serde_json::to_vec(&PeerRefusal { why })?;
                    line.push(b'\n');
                    (&self.socket).write_all(&line)?;
                }
            }
        }
        match self.pending.len() > PEER_LINE_LEN_MAX {
            true => Err(io::ErrorKind::InvalidData.into()),
            false => Ok(()),
        }
    }
}

impl AsFd for EgressLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl PeerConnector<'_> {
    fn connect(&self, request: &PeerRequest) -> Result<OwnedFd, String> {
        let orders = read_orders(self.dir).map_err(|_| "the orders of its egress process cannot be read")?;
        match request {
            PeerRequest::Body { to, port } => self.connect_body(&orders, to, *port),
            PeerRequest::Own { port } => self.connect_own(&orders, *port),
        }
    }

    fn connect_body(&self, orders: &EgressOrders, to: &BodyName, port: u16) -> Result<OwnedFd, String> {
        let policy = orders.policy().map_err(|error| error.to_string())?;
        let name = format!("{to}.{BODY_DOMAIN}");
        if policy.judge_name(&name, port).is_err() && policy.asking_name(&name, port).is_none() {
            return Err(format!("no rule names {name}:{port}"));
        }
        let missing = || no_such_body(to);
        let from = orders.body.clone().ok_or_else(missing)?;
        let all = self.dir.parent().ok_or_else(missing)?;
        let connected =
            find_body(all, to).and_then(|dir| connect_now(&dir, PEERS).ok()).ok_or_else(missing)?;
        let mut line = serde_json::to_vec(&PeerCall { from, to: to.clone(), port }).map_err(|_| missing())?;
        line.push(b'\n');
        send_now(&connected, &line).map_err(|_| missing())?;
        Ok(connected)
    }

    fn connect_own(&self, orders: &EgressOrders, port: u16) -> Result<OwnedFd, String> {
        let accept = AcceptList::new(&orders.accept).map_err(|error| error.to_string())?;
        if !accept.has_port(port) {
            return Err(format!("the Body accepts no connection on port {port}"));
        }
        let token = self.token.map(|token| format!("x-access-token: {token}\r\n")).unwrap_or_default();
        let request = format!(
            "GET /v1/dial?port={port} HTTP/1.1\r\nhost: guest\r\n{token}connection: upgrade\r\nupgrade: {DIAL_UPGRADE}\r\n\r\n"
        );
        // The supervisor's working directory is that of the Body.
        let connected = connect_now(Path::new("."), GUEST_SOCKET);
        let connected = connected.and_then(|guest| send_now(&guest, request.as_bytes()).map(|()| guest));
        connected.map_err(|_| "the Body does not answer".to_owned())
    }
}

/// Reads the newest orders of an egress process, which `pal` replaces atomically.
pub fn read_orders(dir: &Path) -> io::Result<EgressOrders> {
    Ok(serde_json::from_str(&sys::fd::read_small(&dir.join(ORDERS), MESSAGE_LEN_MAX)?)?)
}

/// The directory of the egress process of a Body with this id or name, among those of all Bodies. A Body that does not run
/// has no socket there.
fn find_body(all: &Path, label: &BodyName) -> Option<std::path::PathBuf> {
    let bodies = all.parent()?.join("bodies");
    let spec_of = |id: &str| {
        let text = sys::fd::read_small(&bodies.join(id).join("spec.json"), SPEC_LEN_MAX).ok()?;
        serde_json::from_str::<NamedSpec>(&text).ok().filter(|spec| spec.id.as_str() == id)
    };
    if spec_of(label.as_str()).is_some() {
        return Some(all.join(label.as_str()));
    }
    let has_name = |id: &str| spec_of(id).is_some_and(|spec| spec.name.as_ref() == Some(label));
    let entries = fs::read_dir(all).ok()?.flatten().filter(|entry| entry.path().join(PEERS).exists());
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .find(|id| has_name(id))
        .map(|id| all.join(id))
}

/// Connects to a socket without waiting: the kernel completes a connection to a process that listens, and refuses one
/// that no longer fits into its queue.
fn connect_now(dir: &Path, name: &str) -> io::Result<OwnedFd> {
    // Connects by a descriptor, because a socket's path may have at most 107 bytes.
    let dir = sys::fd::open_path(dir)?;
    let address = SocketAddrUnix::new(sys::fd::path_of(dir.as_fd()).join(name))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Sends a short message on a new connection, which has room for it.
fn send_now(socket: &OwnedFd, message: &[u8]) -> io::Result<()> {
    match rustix::net::send(socket, message, SendFlags::NOSIGNAL)? {
        len if len == message.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

#[cfg(test)]
#[path = "peers_tests.rs"]
mod tests;
