//! `pal-egress`: the process that connects one Body to the names of its policy, and to nothing else.
//!
//! The Body's supervisor starts it, restarts it when it dies, and ends it with the Body; it needs no `pal`. It
//! decides by the policy, writes the decision to the Body's spool, and only then forwards. Any `pal` copies the
//! spool's lines into the event log.
//!
//! Invariant: it has one thread, from start to end.
//! Invariant: the spool is its only file descriptor of a file; it opens files only for reading, and starts no
//! program.
//! Invariant: it ends with the Body's first process, even if the supervisor was killed.
//! Absent on purpose: the event log. A process that parses hostile bytes does not write to it.

mod address;
mod confine;
mod http_forward;
mod journal;
mod proxy;
mod resolve;
mod sni;

use std::{
    cell::RefCell,
    fs::File,
    io::{self, BufRead, BufReader, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    process::ExitCode,
    rc::Rc,
};

use proto::egress::{EgressAnswer, EgressOrders, Policy};
use rustix::fs::FlockOperation;
use tokio::{io::unix::AsyncFd, task::LocalSet};

use journal::Journal;
use proxy::Proxy;

const ORDERS_LEN_MAX: u64 = 1 << 20;
const STDIN: i32 = 0;

/// Runs the process. Its standard input is a socket to its supervisor.
pub fn main() -> ExitCode {
    let _ = sys::process::set_name(c"pal-egress");
    let supervisor = match sys::fd::inherited(STDIN) {
        Ok(supervisor) => UnixStream::from(supervisor),
        Err(_) => return ExitCode::FAILURE,
    };
    match begin(&supervisor).and_then(|egress| egress.run(&supervisor)) {
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

/// Everything that the supervisor sends to the process.
struct ProxyInputs {
    proxy: Proxy,
    listener: UnixListener,
    /// A pidfd of the Body's first process.
    body: OwnedFd,
}

fn begin(supervisor: &UnixStream) -> Result<ProxyInputs, ProxyStepError> {
    let take = || sys::fd::receive(supervisor.as_fd()).map_err(at("receive the supervisor's descriptors"));
    let (listener, spool, body) = (UnixListener::from(take()?), File::from(take()?), take()?);
    let orders = read_orders(supervisor).map_err(at("read the policy"))?;
    let policy = Policy::parse(&orders.allow)
        .map_err(|error| at("read the policy")(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    // Held until this process ends: a `pal` that gets the exclusive lock knows that no further line comes.
    rustix::fs::flock(&spool, FlockOperation::NonBlockingLockShared)
        .map_err(|errno| at("lock the spool")(errno.into()))?;
    let journal = RefCell::new(Journal::new(spool, orders.flush));
    Ok(ProxyInputs { proxy: Proxy { policy, journal }, listener, body })
}

impl ProxyInputs {
    /// Confines the process, and serves until the Body ends.
    fn run(self, supervisor: &UnixStream) -> Result<(), ProxyStepError> {
        let Self { proxy, listener, body } = self;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(at("create the runtime"))?;
        let entered = runtime.enter();
        listener.set_nonblocking(true).map_err(at("listen"))?;
        let listener = tokio::net::UnixListener::from_std(listener).map_err(at("listen"))?;
        let body = readable(body).map_err(at("watch the Body"))?;
        drop(entered);
        let landlock = confine::confine().map_err(at("confine itself"))?;
        tell(supervisor, &EgressAnswer::Ready { landlock });
        let proxy = Rc::new(proxy);
        LocalSet::new()
            .block_on(&runtime, async {
                tokio::select! {
                    () = proxy.clone().serve(listener) => {}
                    _ = body.readable() => {}
                }
                proxy.journal.borrow_mut().finish()
            })
            .map_err(at("write the counts of its decisions"))
    }
}

#[expect(
    deprecated,
    reason = "unsound only for types whose descriptor may close or change; an OwnedFd's does not"
)]
fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(fd)
}

fn read_orders(supervisor: &UnixStream) -> io::Result<EgressOrders> {
    let mut line = String::new();
    BufReader::new(supervisor.take(ORDERS_LEN_MAX)).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}

/// Answers the supervisor. After a restart the supervisor does not read the answer.
fn tell(mut supervisor: &UnixStream, answer: &EgressAnswer) {
    let line = serde_json::to_string(answer).unwrap_or_default() + "\n";
    let _ = supervisor.write_all(line.as_bytes());
}

fn at(step: &'static str) -> impl Fn(io::Error) -> ProxyStepError {
    move |cause| ProxyStepError { step, cause }
}
