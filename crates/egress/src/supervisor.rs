//! The supervisor, as a place to get connections from that the cage does not let this process open: to the egress process
//! of another Body, and to a port of the own Body.
//!
//! Each request is a line on standard input, the socket of the start. The answers come in the order of the requests: a dot
//! with a descriptor, or a line with a refusal.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    rc::Rc,
    sync::Arc,
};

use proto::egress::{PEER_LINE_LEN_MAX, PeerRefusal, PeerRequest, fit_to_show};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
};

/// Requests that may wait for their answers at once; so few answers fit into the socket at any time.
const WAITING_MAX: usize = 64;
/// The reason for connections that nothing can open any more.
const GONE: &str = "the supervisor of the Body has ended: stop and start the Body";

/// The answer to a request.
type ConnectionAnswer = Result<OwnedFd, String>;

/// The socket to the supervisor.
pub struct SupervisorLink {
    socket: Option<AsyncFd<Rc<StdUnixStream>>>,
    waiting: RefCell<VecDeque<WaitingRequest>>,
    free: Arc<Semaphore>,
    gone: Cell<bool>,
}

struct WaitingRequest {
    answer: oneshot::Sender<ConnectionAnswer>,
    /// Held until the answer is there, even if no connection waits for it any more.
    _turn: OwnedSemaphorePermit,
}

impl SupervisorLink {
    /// The link over a socket; must be called within a runtime.
    pub fn new(socket: Rc<StdUnixStream>) -> io::Result<Self> {
        Ok(Self { socket: Some(watched(socket)?), ..Self::none() })
    }

    /// A link to no supervisor: every request is refused.
    pub fn none() -> Self {
        Self {
            socket: None,
            waiting: RefCell::default(),
            free: Arc::new(Semaphore::new(WAITING_MAX)),
            gone: Cell::new(false),
        }
    }

    /// Asks for a connection; the error is a reason for the record.
    pub async fn ask(&self, request: &PeerRequest) -> Result<UnixStream, String> {
        let turn = self.free.clone().acquire_owned().await.map_err(|_| GONE.to_owned())?;
        let (answer, answered) = oneshot::channel();
        let mut line = serde_json::to_vec(request).map_err(|error| error.to_string())?;
        line.push(b'\n');
        let socket = self.socket.as_ref().filter(|_| !self.gone.get()).ok_or(GONE)?;
        // Entered before the request goes out, in the same order.
        self.waiting.borrow_mut().push_back(WaitingRequest { answer, _turn: turn });
        if (&**socket.get_ref()).write_all(&line).is_err() {
            self.end();
        }
        let descriptor = answered.await.map_err(|_| GONE.to_owned())??;
        UnixStream::from_std(descriptor.into()).map_err(|error| error.to_string())
    }

    /// Takes answers until the supervisor ends.
    pub async fn serve(self: Rc<Self>) {
        let Some(socket) = &self.socket else { return };
        let (mut bytes, mut descriptors) = (Vec::new(), VecDeque::new());
        loop {
            let Ok(mut ready) = socket.readable().await else { return self.end() };
            let mut piece = [0; PEER_LINE_LEN_MAX];
            match sys::fd::read_with_descriptor(socket.get_ref().as_fd(), &mut piece) {
                Ok((0, _)) => return self.end(),
                Ok((len, descriptor)) => {
                    bytes.extend_from_slice(&piece[..len]);
                    descriptors.extend(descriptor);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(_) => return self.end(),
            }
            while let Some(answered) = next_answer(&mut bytes, &mut descriptors) {
                if let Some(request) = self.waiting.borrow_mut().pop_front() {
                    // The connection may have stopped waiting.
                    let _ = request.answer.send(answered);
                }
            }
        }
    }

    /// Refuses all requests that wait, and all later ones.
    fn end(&self) {
        self.gone.set(true);
        self.waiting.borrow_mut().clear();
    }
}

/// Takes the first whole answer.
fn next_answer(bytes: &mut Vec<u8>, descriptors: &mut VecDeque<OwnedFd>) -> Option<ConnectionAnswer> {
    if bytes.first() == Some(&b'.') {
        bytes.drain(..1);
        return Some(descriptors.pop_front().ok_or_else(|| GONE.to_owned()));
    }
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let line: Vec<u8> = bytes.drain(..=end).collect();
    let refusal = serde_json::from_slice(&line).unwrap_or_else(|_| PeerRefusal { why: GONE.into() });
    Some(Err(fit_to_show(&refusal.why)))
}

#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor may close or change; this one stays open to the end"
)]
fn watched(socket: Rc<StdUnixStream>) -> io::Result<AsyncFd<Rc<StdUnixStream>>> {
    AsyncFd::with_interest(socket, Interest::READABLE)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn own(port: u16) -> PeerRequest {
        PeerRequest::Own { port }
    }

    #[tokio::test]
    async fn answers_belong_to_requests_in_their_order_and_end_with_the_supervisor() {
        let (near, mut far) = StdUnixStream::pair().unwrap();
        let link = Rc::new(SupervisorLink::new(Rc::new(near)).unwrap());
        tokio::task::LocalSet::new()
            .run_until(async move {
                tokio::task::spawn_local(link.clone().serve());
                let supervisor = async {
                    tokio::task::yield_now().await;
                    let (one, other) = StdUnixStream::pair().unwrap();
                    one.set_nonblocking(true).unwrap();
                    far.write_all(b"{\"why\":\"no\\u001b\"}\n").unwrap();
                    sys::fd::send(far.as_fd(), one.as_fd()).unwrap();
                    other
                };
                let requests = [own(1), own(2)];
                let (first, second, mut other) =
                    tokio::join!(link.ask(&requests[0]), link.ask(&requests[1]), supervisor);
                assert_eq!(first.unwrap_err(), "no\\u{1b}");
                let stream = second.unwrap();
                stream.writable().await.unwrap();
                stream.try_write(b"x").unwrap();
                let mut byte = [0];
                other.read_exact(&mut byte).unwrap();
                let mut lines = vec![0; 4096];
                let len = far.read(&mut lines).unwrap();
                assert_eq!(
                    String::from_utf8_lossy(&lines[..len]),
                    "{\"own\":{\"port\":1}}\n{\"own\":{\"port\":2}}\n"
                );
                let last = own(3);
                let (waiting, ()) = tokio::join!(link.ask(&last), async move {
                    tokio::task::yield_now().await;
                    drop(far);
                });
                assert_eq!(waiting.unwrap_err(), GONE);
                assert_eq!(link.ask(&own(4)).await.unwrap_err(), GONE);
            })
            .await;
        assert_eq!(SupervisorLink::none().ask(&own(5)).await.unwrap_err(), GONE);
    }
}
