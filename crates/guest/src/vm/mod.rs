//! The guest as the init of a microVM: from the first process of a kernel to the service of every Body.
//!
//! The kernel starts it from the first file system, which holds this program and modules. It finds the line to its
//! host, waits for its welcome, mounts its disks as one root, and then serves as everywhere else.
//!
//! Invariant: the machine was frozen at most between two frames, so whoever thaws it begins with a clean line.
//! Absent on purpose: walls inside. The machine is the wall; root in it has a kernel of its own.

mod disks;
mod freezer;
mod host_channel;
mod identity;
mod last_words;
mod modules;
mod tree;

use std::{
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use proto::{mux::FrameKind, vm::GuestSetup};
use rustix::system::RebootCommand;

pub use freezer::programs;
pub use host_channel::{prove_tree, serve};

/// A machine whose root is in place.
#[derive(Debug)]
pub struct GuestMachine {
    /// The line, until it is served.
    pub port: std::cell::RefCell<Option<OwnedFd>>,
    /// The same, for the last word.
    last: std::cell::RefCell<OwnedFd>,
    /// Where its host calls again, if the line does not survive being frozen.
    listener: Option<OwnedFd>,
    /// Where the Body's writes go.
    pub upper: OwnedFd,
    /// Where the files that name the machine are, below what the Body wrote.
    pub names: OwnedFd,
    /// What it was told first.
    pub welcome: GuestSetup,
    /// How often it was thawed.
    pub generation: std::cell::Cell<u64>,
    /// When that was.
    pub welcomed: Instant,
    /// What could not be done on the way.
    pub trouble: Vec<String>,
    /// Its kernel.
    pub kernel: String,
}

/// Set once, before there is a second thread.
static MACHINE: AtomicBool = AtomicBool::new(false);

/// Whether this is the init of a whole machine.
pub fn is_machine() -> bool {
    MACHINE.load(Ordering::Relaxed)
}

/// How long the host may take to say its first word.
const WELCOME_PATIENCE: Duration = Duration::from_secs(60);

/// The whole life of a machine's first process. Never returns: its end is the machine's.
pub fn main() -> ! {
    MACHINE.store(true, Ordering::Relaxed);
    if let Err(error) = run() {
        last_words::say(&error);
    }
    rustix::fs::sync();
    loop {
        let _ = rustix::system::reboot(RebootCommand::Restart);
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn run() -> io::Result<()> {
    disks::kernel_views()?;
    let mut trouble = modules::load()?;
    let host_channel::HostPort { port, listener } = host_channel::find(WELCOME_PATIENCE)?;
    let welcome = host_channel::first_word(port.as_fd(), WELCOME_PATIENCE)?;
    let welcomed = Instant::now();
    let disks::GuestRoot { upper, names } = disks::enter_root(&welcome)?;
    trouble.extend(disks::bounds(&welcome));
    let last = port.try_clone()?.into();
    let machine = GuestMachine {
        port: Some(port).into(),
        last,
        listener,
        upper,
        names,
        generation: welcome.generation.into(),
        welcome,
        welcomed,
        trouble,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
    };
    let config = machine.welcome.config.clone();
    let machine = std::rc::Rc::new(machine);
    let order = crate::GuestOptions {
        config: config.into(),
        listener: crate::Listener::Machine(machine.clone()),
        followed: Vec::new(),
    };
    let served = crate::run(order, || {});
    rustix::fs::sync();
    let last = machine.last.borrow().try_clone()?;
    let _ = rustix::io::ioctl_fionbio(&last, false);
    let mut bye = std::fs::File::from(last);
    bye.write_all(&proto::mux::seal(FrameKind::Bye, 0, &[]))?;
    served.map_err(io::Error::other)
}
