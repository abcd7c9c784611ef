//! The guest as init of a microVM: from the kernel's first process to the service of every Body.
//!
//! The kernel starts it from the initramfs, which holds this program and modules. It opens the channel to its host,
//! waits for its setup, mounts its disks as one root, and then serves as in every other Body.
//!
//! Invariant: a microVM is saved only between two frames of the channel, so a restored one begins with a clean
//! channel.
//! Absent on purpose: a sandbox inside. The microVM is the boundary; root inside it has a kernel of its own.

mod disks;
mod freezer;
mod host_channel;
mod identity;
mod last_words;
mod modules;
mod network;
mod tree;

use std::{
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use proto::{mux::FrameKind, vm::GuestSetup};
use rustix::system::RebootCommand;

pub use freezer::programs;
pub use host_channel::{prove_tree, serve};

/// A microVM whose root is mounted.
#[derive(Debug)]
pub struct GuestMachine {
    /// The port of the channel, until it is served.
    pub port: std::cell::RefCell<Option<OwnedFd>>,
    /// The port once more, for a message after the channel has ended.
    last: std::cell::RefCell<OwnedFd>,
    /// The vsock listener for reconnects, if the hypervisor does not save the connection.
    listener: Option<OwnedFd>,
    /// The upper: the Body's writes go there.
    pub upper: OwnedFd,
    /// The uppers of directories that are mounts of their own.
    pub areas: Vec<OwnedFd>,
    /// The directory of the identity files, below the Body's upper.
    pub names: OwnedFd,
    /// The setup that the host sent at boot.
    pub welcome: GuestSetup,
    /// How often it was restored.
    pub generation: std::cell::Cell<u64>,
    /// When the setup was received.
    pub welcomed: Instant,
    /// Descriptions of steps that failed during boot.
    pub trouble: Vec<String>,
    /// The kernel's release.
    pub kernel: String,
    /// Its ways to the egress proxy.
    network: network::GuestNetwork,
}

impl GuestMachine {
    /// All directories that the Body's writes go to.
    fn uppers(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(&self.upper).chain(&self.areas).map(AsFd::as_fd)
    }
}

/// Set once, before there is a second thread.
static MACHINE: AtomicBool = AtomicBool::new(false);

/// Whether this process is the init of a microVM.
pub fn is_machine() -> bool {
    MACHINE.load(Ordering::Relaxed)
}

/// How long the host may take to send its first message.
const WELCOME_PATIENCE: Duration = Duration::from_secs(60);

/// Runs the first process of a microVM. It never returns: the microVM ends with it.
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
    let disks::GuestRoot { upper, areas, names } = disks::enter_root(&welcome)?;
    trouble.extend(disks::bounds(&welcome));
    let last = port.try_clone()?.into();
    let machine = GuestMachine {
        port: Some(port).into(),
        last,
        listener,
        upper,
        areas,
        names,
        generation: welcome.generation.into(),
        welcome,
        welcomed,
        trouble,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        network: network::GuestNetwork::default(),
    };
    let config = machine.welcome.config.clone();
    let machine = std::rc::Rc::new(machine);
    let order = crate::GuestOptions {
        config: config.into(),
        listener: crate::Listener::Machine(machine.clone()),
        resolver: std::net::UdpSocket::bind(crate::resolver::ADDRESS).ok(),
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
