//! The network of a microVM with an egress policy: its kernel redirects the connections of programs to the guest, and the
//! guest carries them over the channel to the egress proxy of the host.
//!
//! A microVM has no network device. Every address is local to its loopback, so a connection gets as far as the redirect
//! and no further.
//!
//! Invariant: the microVM boots and its proxy's port works also where its kernel cannot redirect; the receipt tells.

use std::{
    cell::{Cell, RefCell},
    fs, io,
    net::TcpListener as StdTcpListener,
    os::unix::fs::PermissionsExt,
    path::Path,
    rc::Rc,
    time::Duration,
};

use proto::{
    egress::{REDIRECT_PORT, SOCKET},
    guest::{EGRESS_DIR, Forward, GuestConfig},
    vm::NOT_TRANSPARENT,
};
use sys::redirect::IpVersion;
use tokio::net::{TcpListener, UnixListener};

use crate::{
    channel::Channel,
    forward,
    name_tunnel::NameTunnel,
    redirect::{self, TunnelCutter},
    resolver::{self, Resolver},
};

const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The ways from programs of a microVM to the egress proxy.
#[derive(Debug, Default)]
pub struct GuestNetwork {
    /// The port that the guest forwards, and its socket.
    led: RefCell<Option<Forward>>,
    redirects: Cell<bool>,
    cutter: TunnelCutter,
    names: RefCell<Option<Rc<NameTunnel>>>,
}

impl GuestNetwork {
    /// Leads programs to the egress proxy, if the Body has an egress policy: at boot, and after each restore, when the
    /// policy may be the first one. Returns why connections cannot be redirected, if they should be.
    pub fn follow(&self, channel: &Rc<Channel>, config: &GuestConfig, resolver: &Resolver) -> Option<String> {
        let Some(forward) = &config.forward else {
            resolver.deny();
            if self.led.borrow().is_none() {
                // A start with an egress proxy, for a preparation, left its socket on the disk.
                let _ = fs::remove_file(Path::new(EGRESS_DIR).join(SOCKET));
            }
            return None;
        };
        if self.led.replace(Some(forward.clone())).is_none() {
            tokio::task::spawn_local(lead_out(channel.clone(), forward.socket.clone()));
            tokio::task::spawn_local(forward::serve(forward.clone()));
        }
        if !forward.transparent {
            return None;
        }
        let done = if self.redirects.get() { Ok(()) } else { self.set_up(forward) };
        match (done, &*self.names.borrow()) {
            (Ok(()), Some(names)) => resolver.ask(names.clone()),
            (Ok(()), None) => {}
            (Err(error), _) => return Some(format!("{NOT_TRANSPARENT}: {error}")),
        }
        None
    }

    /// Whether the kernel redirects the connections of a Body with this configuration.
    pub fn is_transparent(&self, config: &GuestConfig) -> bool {
        self.redirects.get() && config.forward.as_ref().is_some_and(|forward| forward.transparent)
    }

    /// Ends the connections of the microVM from which this one was restored.
    pub fn cut(&self) {
        self.cutter.cut();
    }

    fn set_up(&self, forward: &Forward) -> io::Result<()> {
        let mut listeners = vec![redirect::listen(IpVersion::V4)?];
        // A kernel may be without IPv6.
        listeners.extend(redirect::listen(IpVersion::V6));
        let names = StdTcpListener::bind(resolver::ADDRESS)?;
        names.set_nonblocking(true)?;
        let names = TcpListener::from_std(names)?;
        for version in [IpVersion::V4, IpVersion::V6].into_iter().take(listeners.len()) {
            sys::redirect::redirect(version, REDIRECT_PORT)?;
            sys::redirect::add_local_routes(version)?;
        }
        redirect::serve(listeners, &forward.socket, &self.cutter);
        let tunnel = Rc::new(NameTunnel::new(&forward.socket));
        tokio::task::spawn_local(tunnel.clone().serve_tcp(names));
        *self.names.borrow_mut() = Some(tunnel);
        self.redirects.set(true);
        Ok(())
    }
}

/// Opens a stream to the host's egress proxy for each connection to a socket of the microVM.
async fn lead_out(channel: Rc<Channel>, socket: String) {
    let place = Path::new(&socket);
    let _ = fs::create_dir_all(place.parent().unwrap_or(Path::new("/")));
    // One of an earlier start.
    let _ = fs::remove_file(place);
    let Ok(listener) = UnixListener::bind(place) else { return };
    // Clients of ssh take it for their agent, with any user id.
    let _ = fs::set_permissions(place, fs::Permissions::from_mode(0o666));
    loop {
        match listener.accept().await {
            Ok((inside, _)) => drop(channel.open(inside).await),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}
