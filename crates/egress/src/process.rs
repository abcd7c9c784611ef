//! The process: it takes its orders, confines itself, and serves until the Body ends.

use std::{
    cell::RefCell,
    fs::File,
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::ExitCode,
    rc::Rc,
};

use proto::egress::{EgressAnswer, TRANSPARENT};
use rustix::fs::FlockOperation;
use tokio::{
    io::unix::AsyncFd,
    net::{TcpListener, UdpSocket, UnixListener},
    task::LocalSet,
};
use vault::SealKey;

use crate::{
    budgets::RecordedBytes,
    confine,
    corporate::CorporateProxy,
    inputs::{ProxyInputs, RedirectInputs},
    inspect::Certificates,
    journal::{Journal, read_lines},
    names::NameTable,
    peers::PeerTable,
    proxy::Proxy,
    secrets::SecretTable,
    ssh_agent::SshAgent,
    supervisor::SupervisorLink,
};

const STDIN: i32 = 0;

/// Runs the process. Its standard input is a socket to its supervisor.
pub fn main() -> ExitCode {
    let _ = sys::process::set_name(c"pal-egress");
    let supervisor = match sys::fd::inherited(STDIN) {
        Ok(supervisor) => Rc::new(UnixStream::from(supervisor)),
        Err(_) => return ExitCode::FAILURE,
    };
    match run(&supervisor) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ProxyStepError { step, cause }) => {
            let _ = writeln!(io::stderr(), "pal-egress: cannot {step}: {cause}");
            tell(&supervisor, &EgressAnswer::Failed { step: step.into(), cause: cause.to_string() });
            ExitCode::FAILURE
        }
    }
}

/// A step that failed.
struct ProxyStepError {
    step: &'static str,
    cause: io::Error,
}

/// The sockets, once tokio watches them.
struct ProxySockets {
    listener: UnixListener,
    control: UnixListener,
    peers: UnixListener,
    redirect: Option<RedirectListeners>,
    body: AsyncFd<OwnedFd>,
}

struct RedirectListeners {
    tcp: [TcpListener; 2],
    dns_udp: UdpSocket,
    dns_tcp: TcpListener,
}

/// Confines the process, and serves until the Body ends.
fn run(supervisor: &Rc<UnixStream>) -> Result<(), ProxyStepError> {
    let is_transparent = std::env::args_os().nth(1).is_some_and(|argument| argument == TRANSPARENT);
    let inputs = ProxyInputs::receive(supervisor, is_transparent)
        .map_err(at("receive the supervisor's descriptors and orders"))?;
    let mut proxy = open(&inputs)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(at("create the runtime"))?;
    let entered = runtime.enter();
    let link = Rc::new(SupervisorLink::new(Rc::clone(supervisor)).map_err(at("listen"))?);
    proxy.link = Rc::clone(&link);
    let proxy = Rc::new(proxy);
    let sockets = ProxySockets::watch(inputs).map_err(at("listen"))?;
    drop(entered);
    let landlock = confine::confine().map_err(at("confine itself"))?;
    tell(supervisor, &EgressAnswer::Ready { landlock });
    LocalSet::new()
        .block_on(&runtime, async {
            tokio::task::spawn_local(link.serve());
            sockets.serve(&proxy).await;
            proxy.journal.borrow_mut().finish()
        })
        .map_err(at("write the counts of its decisions"))
}

/// The proxy, with the names that earlier processes of the Body recorded.
fn open(inputs: &ProxyInputs) -> Result<Proxy, ProxyStepError> {
    let orders = &inputs.start.orders;
    let policy = orders
        .policy()
        .map_err(|error| at("read the policy")(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    let bundle = inputs.start.bundle.as_ref().map(File::open).transpose();
    let bundle = bundle.map_err(at("open the certificates that this host trusts"))?;
    let key = inputs.start.key.as_deref().and_then(SealKey::from_hex);
    let spool = inputs.spool.try_clone().map_err(at("open the spool"))?;
    // Held until this process ends: a `pal` that gets the exclusive lock knows that no further line comes.
    rustix::fs::flock(&spool, FlockOperation::NonBlockingLockShared)
        .map_err(|errno| at("lock the spool")(errno.into()))?;
    // The supervisor's descriptor may only append.
    let (mut names, mut recorded) = (NameTable::default(), RecordedBytes::default());
    let read = File::open(sys::fd::path_of(spool.as_fd())).and_then(|spool| {
        read_lines(spool, |line| {
            names.note(&line);
            recorded.note(&line);
        })
    });
    read.map_err(at("read the names and budgets in the spool"))?;
    let journal = Journal::new(spool, orders.flush);
    let certificates = Certificates::new(bundle);
    let authority = certificates.set_authority(orders.authority.as_ref(), key.as_ref());
    authority.map_err(|why| at("use the authority of the Body")(io::Error::other(why)))?;
    let secrets = RefCell::new(Rc::new(SecretTable::open(&orders.secrets, key.as_ref())));
    let ssh = SshAgent::default();
    ssh.set(&orders.ssh_keys, key.as_ref());
    let proxy = Proxy::with_spent(policy, orders.generation, journal, names, recorded);
    let accept = PeerTable::read(orders).map_err(|why| at("read the policy")(io::Error::other(why)))?;
    proxy.peers.replace(orders.body.clone(), accept);
    let corporate = CorporateProxy::open(orders.corporate_proxy.as_ref(), key.as_ref());
    let corporate = corporate.map_err(|why| at("use the corporate proxy")(io::Error::other(why)))?;
    Ok(Proxy { secrets, ssh, certificates, key, corporate: RefCell::new(corporate), ..proxy })
}

impl ProxySockets {
    fn watch(inputs: ProxyInputs) -> io::Result<Self> {
        Ok(Self {
            listener: UnixListener::from_std(inputs.listener)?,
            control: UnixListener::from_std(inputs.control)?,
            peers: UnixListener::from_std(inputs.peers)?,
            redirect: inputs.redirect.map(RedirectListeners::watch).transpose()?,
            body: readable(inputs.body)?,
        })
    }

    /// Serves until the Body's first process ends.
    async fn serve(self, proxy: &Rc<Proxy>) {
        tokio::task::spawn_local(proxy.clone().serve(self.listener));
        tokio::task::spawn_local(proxy.clone().serve_control(self.control));
        tokio::task::spawn_local(proxy.clone().serve_peers(self.peers));
        if let Some(RedirectListeners { tcp, dns_udp, dns_tcp }) = self.redirect {
            for listener in tcp {
                tokio::task::spawn_local(proxy.clone().serve_redirected(listener));
            }
            tokio::task::spawn_local(proxy.clone().resolve_datagrams(dns_udp));
            tokio::task::spawn_local(proxy.clone().resolve_streams(dns_tcp));
        }
        tokio::task::spawn_local(proxy.clone().close_outside_windows());
        let _ = self.body.readable().await;
    }
}

impl RedirectListeners {
    fn watch(inputs: RedirectInputs) -> io::Result<Self> {
        let [tcp4, tcp6] = inputs.tcp;
        Ok(Self {
            tcp: [TcpListener::from_std(tcp4)?, TcpListener::from_std(tcp6)?],
            dns_udp: UdpSocket::from_std(inputs.dns_udp)?,
            dns_tcp: TcpListener::from_std(inputs.dns_tcp)?,
        })
    }
}

#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor may close or change; an OwnedFd's does not"
)]
fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

/// Answers the supervisor. After a restart the supervisor does not read the answer.
fn tell(mut supervisor: &UnixStream, answer: &EgressAnswer) {
    let line = serde_json::to_string(answer).unwrap_or_default() + "\n";
    let _ = supervisor.write_all(line.as_bytes());
}

fn at(step: &'static str) -> impl Fn(io::Error) -> ProxyStepError {
    move |cause| ProxyStepError { step, cause }
}
