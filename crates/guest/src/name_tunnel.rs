//! Carries DNS queries through the Body's egress proxy to its resolver: one kept tunnel, in which each message follows
//! its length, as over TCP.
//!
//! Invariant: an answer is matched to its query by a number that this module gave; programs choose ids as they like.
//! Trust: queries come from programs of the Body, and answers from the proxy, which the host runs.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    rc::Rc,
    time::Duration,
};

use proto::egress::RESOLVER;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Mutex, Semaphore, mpsc, oneshot},
};

use crate::tunnel;

/// How long the resolver may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a query is sent, if the tunnel breaks meanwhile.
const ATTEMPTS_MAX: usize = 2;
/// Queries that wait to be written.
const QUEUE_LEN: usize = 64;
/// Connections for DNS over TCP at once; further ones wait.
const CONNECTIONS_MAX: usize = 12;
const BUFFER_LEN: usize = 4 * 1024;
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The length of the id that begins a message.
const ID_LEN: usize = 2;

/// The way to the resolver.
#[derive(Debug)]
pub struct NameTunnel {
    socket: String,
    kept: Mutex<Option<Rc<KeptTunnel>>>,
}

/// One tunnel.
#[derive(Debug)]
struct KeptTunnel {
    next: Cell<u16>,
    /// The queries without an answer, by the number that stands for their id. Dropping an entry tells its query that
    /// the tunnel broke.
    waiting: RefCell<HashMap<u16, oneshot::Sender<Vec<u8>>>>,
    queries: mpsc::Sender<Vec<u8>>,
}

impl NameTunnel {
    /// The way to the resolver through the proxy at this socket; opens no tunnel yet.
    pub fn new(socket: &str) -> Self {
        Self { socket: socket.to_owned(), kept: Mutex::default() }
    }

    /// Asks the resolver. None if it does not answer in time.
    pub async fn ask(&self, query: &[u8]) -> Option<Vec<u8>> {
        let asked = async {
            for _ in 0..ATTEMPTS_MAX {
                if let Some(answer) = self.tunnel().await.ok()?.ask(query).await {
                    return Some(answer);
                }
            }
            None
        };
        tokio::time::timeout(PATIENCE, asked).await.ok().flatten()
    }

    /// The kept tunnel, opened again if it has ended.
    async fn tunnel(&self) -> io::Result<Rc<KeptTunnel>> {
        let mut kept = self.kept.lock().await;
        if let Some(tunnel) = kept.as_ref().filter(|tunnel| !tunnel.queries.is_closed()) {
            return Ok(tunnel.clone());
        }
        let (outside, first) = tunnel::open(&self.socket, RESOLVER).await?;
        let (from, mut to) = outside.into_split();
        let (queries, mut queue) = mpsc::channel::<Vec<u8>>(QUEUE_LEN);
        let tunnel = Rc::new(KeptTunnel { next: Cell::new(0), waiting: RefCell::default(), queries });
        let reading = tunnel.clone();
        tokio::task::spawn_local(async move {
            let write = async {
                while let Some(frame) = queue.recv().await {
                    to.write_all(&frame).await?;
                }
                Ok(())
            };
            let _: io::Result<()> = tokio::select! {
                ended = write => ended,
                ended = reading.read(io::Cursor::new(first).chain(from)) => ended,
            };
            drop(queue);
            reading.waiting.borrow_mut().clear();
        });
        *kept = Some(tunnel.clone());
        Ok(tunnel)
    }

    /// Carries connections to this listener to the resolver, for as long as the guest runs.
    pub async fn serve_tcp(self: Rc<Self>, listener: TcpListener) {
        let free = std::sync::Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            let Ok(turn) = free.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((inside, _)) => {
                    let names = self.clone();
                    tokio::task::spawn_local(async move {
                        // A connection that fails is closed, and its program asks again.
                        let _ = names.splice(inside).await;
                        drop(turn);
                    });
                }
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            }
        }
    }

    async fn splice(&self, mut inside: TcpStream) -> io::Result<()> {
        let (mut outside, first) = tunnel::open(&self.socket, RESOLVER).await?;
        inside.write_all(&first).await?;
        tokio::io::copy_bidirectional_with_sizes(&mut inside, &mut outside, BUFFER_LEN, BUFFER_LEN).await?;
        Ok(())
    }
}

impl KeptTunnel {
    /// Asks over this tunnel. None if it breaks.
    async fn ask(&self, query: &[u8]) -> Option<Vec<u8>> {
        let (id, rest) = query.split_at_checked(ID_LEN)?;
        let number = self.unused_number()?;
        let len = u16::try_from(query.len()).ok()?;
        let frame = [&len.to_be_bytes(), &number.to_be_bytes(), rest].concat();
        let (sender, receiver) = oneshot::channel();
        self.waiting.borrow_mut().insert(number, sender);
        let _gone = NumberGuard { tunnel: self, number };
        self.queries.send(frame).await.ok()?;
        let mut answer = receiver.await.ok()?;
        answer.get_mut(..ID_LEN)?.copy_from_slice(id);
        Some(answer)
    }

    fn unused_number(&self) -> Option<u16> {
        let waiting = self.waiting.borrow();
        let first = self.next.get();
        let number = (0..=u16::MAX)
            .map(|step| first.wrapping_add(step))
            .find(|number| !waiting.contains_key(number))?;
        self.next.set(number.wrapping_add(1));
        Some(number)
    }

    /// Delivers answers until the tunnel ends.
    async fn read(&self, mut from: impl AsyncRead + Unpin) -> io::Result<()> {
        loop {
            let len = from.read_u16().await?;
            let mut answer = vec![0; len.into()];
            from.read_exact(&mut answer).await?;
            let number = answer.first_chunk().map(|number| u16::from_be_bytes(*number));
            if let Some(sender) = number.and_then(|number| self.waiting.borrow_mut().remove(&number)) {
                // The program's patience may have ended.
                let _ = sender.send(answer);
            }
        }
    }
}

/// Forgets a query whose time is over.
struct NumberGuard<'a> {
    tunnel: &'a KeptTunnel,
    number: u16,
}

impl Drop for NumberGuard<'_> {
    fn drop(&mut self) {
        self.tunnel.waiting.borrow_mut().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;
    use crate::tunnel::scripted::{ScriptedProxy, run};

    const OPEN: &str = "HTTP/1.1 200 OK\r\n\r\n";

    async fn read_frame(stream: &mut UnixStream) -> Vec<u8> {
        let mut frame = vec![0; stream.read_u16().await.unwrap().into()];
        stream.read_exact(&mut frame).await.unwrap();
        frame
    }

    async fn write_frame(stream: &mut UnixStream, frame: &[u8]) {
        let len = u16::try_from(frame.len()).unwrap();
        stream.write_all(&[&len.to_be_bytes(), frame].concat()).await.unwrap();
    }

    #[test]
    fn answers_find_their_queries_in_any_order() {
        run(async {
            let proxy = ScriptedProxy::start("names", OPEN, |mut stream| async move {
                let frames = [read_frame(&mut stream).await, read_frame(&mut stream).await];
                write_frame(&mut stream, b"").await;
                write_frame(&mut stream, b"\xff\xffunasked").await;
                for frame in frames.iter().rev() {
                    write_frame(&mut stream, &[frame, &b"!"[..]].concat()).await;
                }
                // A tunnel stays open.
                drop(stream.read_u8().await);
            });
            let names = NameTunnel::new(&proxy.socket());
            let (one, two) = tokio::join!(names.ask(b"\x12\x34one"), names.ask(b"\x12\x34two"));
            assert_eq!(one.as_deref(), Some(&b"\x12\x34one!"[..]));
            assert_eq!(two.as_deref(), Some(&b"\x12\x34two!"[..]), "two programs may choose the same id");
            assert_eq!(*proxy.asked.borrow(), [RESOLVER]);
        });
    }

    #[test]
    fn a_broken_tunnel_is_opened_again_and_the_query_is_repeated() {
        run(async {
            let round = Rc::new(Cell::new(0));
            let proxy = ScriptedProxy::start("again", OPEN, move |mut stream| {
                round.set(round.get() + 1);
                let breaks = round.get() == 1;
                async move {
                    let frame = read_frame(&mut stream).await;
                    if !breaks {
                        write_frame(&mut stream, &frame).await;
                        drop(stream.read_u8().await);
                    }
                }
            });
            let names = NameTunnel::new(&proxy.socket());
            assert_eq!(names.ask(b"\x12\x34one").await.as_deref(), Some(&b"\x12\x34one"[..]));
            assert_eq!(proxy.asked.borrow().len(), 2);
            assert_eq!(NameTunnel::new("/nowhere/at/all").ask(b"\x12\x34one").await, None);
        });
    }

    #[test]
    fn a_connection_is_spliced() {
        run(async {
            let proxy = ScriptedProxy::start("splice", OPEN, |mut stream| async move {
                let frame = read_frame(&mut stream).await;
                write_frame(&mut stream, &frame).await;
            });
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::task::spawn_local(Rc::new(NameTunnel::new(&proxy.socket())).serve_tcp(listener));
            let mut program = TcpStream::connect(address).await.unwrap();
            program.write_all(b"\0\x03one").await.unwrap();
            let mut answer = Vec::new();
            program.read_to_end(&mut answer).await.unwrap();
            assert_eq!(answer, b"\0\x03one");
        });
    }
}
