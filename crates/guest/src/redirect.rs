//! Carries the connections that the kernel of a microVM redirects to the guest: each one goes to the egress proxy, with
//! the address that the program dialled.
//!
//! The proxy decides what is allowed; this module decides nothing.
//!
//! Invariant: a connection that the proxy refuses ends with a reset, and so does every connection when the microVM is
//! restored: the tunnels of its parent do not exist there.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsFd,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use proto::egress::REDIRECT_PORT;
use sys::redirect::IpVersion;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};

use crate::tunnel;

/// Connections at once; further ones wait. With those of the proxy's port and those of name lookups they are fewer than
/// the streams that a guest may open.
const CONNECTIONS_MAX: usize = 112;
const BUFFER_LEN: usize = 16 * 1024;
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The listener to which the kernel redirects connections.
pub fn listen(version: IpVersion) -> io::Result<TcpListener> {
    let address: IpAddr = match version {
        IpVersion::V4 => Ipv4Addr::LOCALHOST.into(),
        IpVersion::V6 => Ipv6Addr::LOCALHOST.into(),
    };
    let listener = std::net::TcpListener::bind((address, REDIRECT_PORT))?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Cuts all tunnels of a guest: each restore of its microVM does.
#[derive(Debug, Clone)]
pub struct TunnelCutter(Rc<watch::Sender<()>>);

impl Default for TunnelCutter {
    fn default() -> Self {
        Self(Rc::new(watch::Sender::new(())))
    }
}

impl TunnelCutter {
    /// Ends every tunnel that exists.
    pub fn cut(&self) {
        self.0.send_replace(());
    }

    /// Returns when [`TunnelCutter::cut`] is called.
    fn wait(&self) -> impl Future<Output = ()> + use<> {
        let mut receiver = self.0.subscribe();
        // The sender outlives every connection of the guest, so there is no error to handle.
        async move { drop(receiver.changed().await) }
    }
}

/// Carries connections for as long as the guest runs.
pub fn serve(listeners: Vec<TcpListener>, socket: &str, cutter: &TunnelCutter) {
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    for listener in listeners {
        let (free, socket, cutter) = (free.clone(), Rc::from(socket), cutter.clone());
        tokio::task::spawn_local(accept(listener, free, socket, cutter, dialled));
    }
}

/// Finds the address that the program dialled.
type FindTarget = fn(&TcpStream) -> Option<SocketAddr>;

async fn accept(
    listener: TcpListener,
    free: Arc<Semaphore>,
    socket: Rc<str>,
    cutter: TunnelCutter,
    find: FindTarget,
) {
    loop {
        let Ok(turn) = free.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((mut inside, _)) => {
                let (socket, cut) = (socket.clone(), cutter.wait());
                tokio::task::spawn_local(async move {
                    let carried = tokio::select! {
                        carried = carry(&mut inside, &socket, find) => carried,
                        () = cut => Err(io::ErrorKind::ConnectionReset.into()),
                    };
                    if carried.is_err() {
                        // Without time to linger, the kernel closes the connection with a reset.
                        let _ = rustix::net::sockopt::set_socket_linger(&inside, Some(Duration::ZERO));
                    }
                    drop(turn);
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn carry(inside: &mut TcpStream, socket: &str, find: FindTarget) -> io::Result<()> {
    let Some(target) = find(inside) else { return Err(io::ErrorKind::AddrNotAvailable.into()) };
    let _ = inside.set_nodelay(true);
    let (mut outside, first) = tunnel::open(socket, &target.to_string()).await?;
    inside.write_all(&first).await?;
    tokio::io::copy_bidirectional_with_sizes(inside, &mut outside, BUFFER_LEN, BUFFER_LEN).await?;
    Ok(())
}

/// The address that the program dialled; none if it dialled this listener, because the kernel redirects no connection
/// to the loopback.
fn dialled(inside: &TcpStream) -> Option<SocketAddr> {
    let target = sys::redirect::original_destination(inside.as_fd()).ok()?;
    (!target.ip().is_loopback()).then(|| SocketAddr::new(target.ip(), target.port()))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::tunnel::scripted::{ScriptedProxy, run};

    const OPEN: &str = "HTTP/1.1 200 OK\r\n\r\n";

    async fn listening(proxy: &ScriptedProxy, cutter: &TunnelCutter, find: FindTarget) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let free = Arc::new(Semaphore::new(1));
        let socket = proxy.socket().into();
        tokio::task::spawn_local(accept(listener, free, socket, cutter.clone(), find));
        address
    }

    fn anywhere(_: &TcpStream) -> Option<SocketAddr> {
        Some("198.18.0.5:443".parse().unwrap())
    }

    async fn exchange(address: SocketAddr) -> io::Result<Vec<u8>> {
        let mut program = TcpStream::connect(address).await?;
        program.write_all(b"ping").await?;
        program.shutdown().await?;
        let mut answer = Vec::new();
        program.read_to_end(&mut answer).await?;
        Ok(answer)
    }

    async fn echo(mut stream: tokio::net::UnixStream) {
        let mut asked = Vec::new();
        stream.read_to_end(&mut asked).await.unwrap();
        stream.write_all(&asked).await.unwrap();
    }

    #[test]
    fn a_connection_is_carried_to_what_the_program_dialled() {
        run(async {
            let proxy = ScriptedProxy::start("carry", OPEN, echo);
            let address = listening(&proxy, &TunnelCutter::default(), anywhere).await;
            for _ in 0..2 {
                assert_eq!(exchange(address).await.unwrap(), b"ping");
            }
            assert_eq!(*proxy.asked.borrow(), ["198.18.0.5:443"; 2]);
        });
    }

    #[test]
    fn a_refused_connection_and_a_direct_dial_are_reset() {
        run(async {
            let proxy = ScriptedProxy::start("reset", "HTTP/1.1 403 Forbidden\r\n\r\n", echo);
            let finds: [FindTarget; 3] = [anywhere, |_| None, dialled];
            for find in finds {
                let address = listening(&proxy, &TunnelCutter::default(), find).await;
                let error = exchange(address).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            }
            assert_eq!(proxy.asked.borrow().len(), 1, "only the first one reaches the proxy");
        });
    }

    #[test]
    fn a_restore_cuts_connections_and_the_listener_goes_on() {
        run(async {
            let proxy = ScriptedProxy::start("cut", OPEN, echo);
            let cutter = TunnelCutter::default();
            let address = listening(&proxy, &cutter, anywhere).await;
            let mut program = TcpStream::connect(address).await.unwrap();
            while proxy.asked.borrow().is_empty() {
                tokio::task::yield_now().await;
            }
            cutter.cut();
            assert_eq!(program.read_u8().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
            assert_eq!(exchange(address).await.unwrap(), b"ping");
        });
    }
}
