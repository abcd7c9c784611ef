//! The guest's end of the channel to its host.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    rc::Rc,
    time::{Duration, Instant},
};

use proto::{
    mux::{FrameKind, FrameReader, HEADER_LEN, MuxSide},
    vm::{FreezeReport, GuestReceipt, GuestSetup, LINE_PORT, LINE_WORD, PORT},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::{Mode, OFlags},
};

use super::{GuestMachine, freezer, identity, tree};
use crate::{
    channel::{Channel, ChannelEvent, ChannelPort},
    server::{self, GuestServer},
};

const PORT_PATIENCE: Duration = Duration::from_secs(10);
/// Drivers that a virtio port needs, and the sysfs paths that show their presence.
const PORT_DRIVERS: [(&str, &str); 2] = [
    ("virtio_mmio", "/sys/bus/platform/drivers/virtio-mmio"),
    ("virtio_console", "/sys/bus/virtio/drivers/virtio_console"),
];

/// The port of the channel.
#[derive(Debug)]
pub struct HostPort {
    /// The port itself.
    pub port: OwnedFd,
    /// The vsock listener on which the host may connect again.
    pub listener: Option<OwnedFd>,
}

/// Finds the port: a virtio port, or where the kernel command line says so, a vsock connection from the host.
pub fn find(patience: Duration) -> io::Result<HostPort> {
    let words = fs::read_to_string("/proc/cmdline")?;
    if !words.split_ascii_whitespace().any(|word| word == LINE_WORD) {
        return Ok(HostPort { port: find_port()?, listener: None });
    }
    let listener = sys::vsock::listen(LINE_PORT)?;
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
    loop {
        if rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&timeout))? == 0 {
            return Err(io::Error::other("the host did not connect over vsock"));
        }
        // Only the host may connect; a connection that is closed already is skipped.
        if let Ok((port, sys::vsock::HOST)) = sys::vsock::accept(listener.as_fd()) {
            return Ok(HostPort { port, listener: Some(listener) });
        }
    }
}

/// Accepts later connections of the host, and moves an idle channel to each.
async fn accept_reconnects(channel: Rc<Channel>, machine: Rc<GuestMachine>) {
    let Some(listener) = machine.listener.as_ref().and_then(|listener| listener.try_clone().ok()) else {
        return;
    };
    let Ok(listener) = crate::channel::readable(listener) else { return };
    loop {
        let Ok(mut ready) = listener.readable().await else { return };
        let Ok(called) = ready.try_io(|listener| sys::vsock::accept(listener.get_ref().as_fd())) else {
            continue;
        };
        if let Ok((port, sys::vsock::HOST)) = called
            && channel.may_move()
            && let Ok(last) = port.try_clone()
            && let Ok(port) = ChannelPort::new(port)
        {
            *machine.last.borrow_mut() = last;
            channel.move_to(port);
            // The host may be saved again before its first message arrives, so another move stays possible until
            // then.
            channel.expect_move();
        }
    }
}

/// Finds the virtio port by the name that the host gave it.
fn find_port() -> io::Result<OwnedFd> {
    if let Some((name, _)) = PORT_DRIVERS.iter().find(|(_, place)| !Path::new(place).exists()) {
        return Err(io::Error::other(format!("the kernel has no driver {name}, built in or loaded")));
    }
    let deadline = Instant::now() + PORT_PATIENCE;
    loop {
        for entry in fs::read_dir("/sys/class/virtio-ports").into_iter().flatten().flatten() {
            let called = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            let device = Path::new("/dev").join(entry.file_name());
            if called.trim() == PORT && device.exists() {
                return Ok(rustix::fs::open(&device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?);
            }
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!(
                "no virtio port named {PORT} appeared within {} s",
                PORT_PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Announces the guest and reads the host's first message, which holds its setup.
pub fn first_word(port: BorrowedFd<'_>, patience: Duration) -> io::Result<GuestSetup> {
    let mut line = File::from(port.try_clone_to_owned()?);
    io::Write::write_all(&mut line, &proto::mux::seal(FrameKind::Here, 0, &[]))?;
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
    if rustix::event::poll(&mut [PollFd::new(&port, PollFlags::IN)], Some(&timeout))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut intake = FrameReader::default();
    let mut header = [0; HEADER_LEN];
    line.read_exact(&mut header)?;
    intake.push(&header);
    let len = u32::from_le_bytes([header[1], header[2], header[3], 0]);
    let mut contents = vec![0; len as usize];
    line.read_exact(&mut contents)?;
    intake.push(&contents);
    match intake.next().map_err(io::Error::other)? {
        Some(frame) if frame.kind == FrameKind::Welcome => Ok(serde_json::from_slice(&frame.contents)?),
        _ => Err(io::Error::other("the host's first message is not the guest's setup")),
    }
}

/// Serves the channel for as long as the microVM runs.
pub async fn serve(guest: &Rc<GuestServer>, machine: &Rc<GuestMachine>) -> io::Result<()> {
    *guest.machine.borrow_mut() = Some(machine.clone());
    let Some(port) = machine.port.borrow_mut().take() else { return Err(io::ErrorKind::NotFound.into()) };
    let channel = Channel::new(MuxSide::Guest, ChannelPort::new(port)?);
    let writing = channel.clone();
    tokio::task::spawn_local(async move { drop(writing.write().await) });
    tokio::task::spawn_local(accept_reconnects(channel.clone(), machine.clone()));
    let taken = identity::take(&machine.welcome, machine.welcomed);
    let closed = machine.network.follow(&channel, &machine.welcome.config, &guest.resolver);
    let trouble = closed.into_iter().chain(machine.trouble.iter().cloned()).chain(taken.trouble).collect();
    let mut first = receipt(guest, machine, &machine.welcome, taken.reseeded, trouble, None);
    stamp(&mut first, machine.welcomed);
    channel.send_word(FrameKind::Receipt, &serde_json::to_vec(&first)?).await;
    let mut looked = None;
    let mut stopped = false;
    loop {
        let event = channel.read().await.map_err(io::Error::other)?;
        match event {
            ChannelEvent::Opened(stream) => {
                let caller = channel.attach_here(stream);
                server::accept_stream(guest, caller);
            }
            ChannelEvent::Word(FrameKind::Hold, _) => {
                // No program changes files from here until the guest is resumed or has sent its receipt.
                let still = freezer::freeze_programs();
                rustix::fs::sync();
                let tree = tree::look(machine.uppers(), None);
                looked = Some(tree.entries);
                let held = FreezeReport { tree, processes: processes(guest), still: still.is_ok() };
                if machine.listener.is_some() {
                    channel.expect_move();
                }
                channel.send_word_and_stop(FrameKind::Held, &serde_json::to_vec(&held)?).await;
                stopped = true;
            }
            ChannelEvent::Word(FrameKind::GoOn, _) => {
                freezer::thaw_programs();
                channel.keep_alive();
                channel.resume_sending();
                stopped = false;
            }
            ChannelEvent::Word(FrameKind::Welcome, word) => {
                let since = Instant::now();
                let welcome: GuestSetup = serde_json::from_slice(&word)?;
                // A running guest only gets a new identity, and keeps its port.
                let thawed = std::mem::take(&mut stopped);
                if thawed {
                    channel.keep_alive();
                    channel.reset_epoch();
                }
                machine.generation.set(welcome.generation);
                let mut taken = identity::take(&welcome, since);
                // The receipt describes the files as they were before the identity files change.
                let mut receipt = receipt(guest, machine, &welcome, taken.reseeded, Vec::new(), looked);
                guest.set_identity(welcome.config.clone());
                taken.trouble.extend(identity::rename(machine, &welcome));
                if thawed {
                    machine.network.cut();
                }
                taken.trouble.extend(machine.network.follow(&channel, &welcome.config, &guest.resolver));
                receipt.transparent = machine.network.is_transparent(&welcome.config);
                freezer::thaw_programs();
                receipt.trouble = taken.trouble;
                stamp(&mut receipt, since);
                channel.send_word(FrameKind::Receipt, &serde_json::to_vec(&receipt)?).await;
                if thawed {
                    channel.resume_sending();
                }
            }
            ChannelEvent::Word(..) => {}
        }
    }
}

fn receipt(
    guest: &GuestServer,
    machine: &GuestMachine,
    welcome: &GuestSetup,
    reseeded: bool,
    trouble: Vec<String>,
    looked: Option<u64>,
) -> GuestReceipt {
    GuestReceipt {
        body: welcome.config.body.clone(),
        generation: welcome.generation,
        clock_ns: 0,
        spent_ns: 0,
        reseeded,
        processes: processes(guest),
        tree: tree::look(machine.uppers(), looked),
        kernel: machine.kernel.clone(),
        trouble,
        transparent: machine.network.is_transparent(&welcome.config),
    }
}

/// The receipt of a microVM that continued without a new identity. Its clock stood still, and is set to the given
/// time.
pub fn prove_tree(guest: &GuestServer, machine: &GuestMachine, now_ns: Option<u64>) -> GuestReceipt {
    let since = Instant::now();
    let trouble = now_ns
        .and_then(|now_ns| identity::set_clock(now_ns).err())
        .map(|error| format!("cannot set the clock: {error}"));
    let welcome = GuestSetup {
        config: (*guest.config()).clone(),
        generation: machine.generation.get(),
        ..machine.welcome.clone()
    };
    let mut receipt = receipt(guest, machine, &welcome, false, trouble.into_iter().collect(), None);
    stamp(&mut receipt, since);
    receipt
}

/// Adds the time; called right before the receipt is sent.
fn stamp(receipt: &mut GuestReceipt, since: Instant) {
    receipt.spent_ns = since.elapsed().as_nanos() as u64;
    receipt.clock_ns = identity::now_ns();
}

fn processes(guest: &GuestServer) -> u32 {
    u32::try_from(guest.processes.count()).unwrap_or(u32::MAX)
}
