//! The machine's end of the line to its host.

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
/// Drivers without which no port ever appears, and where the kernel shows that it has them.
const PORT_DRIVERS: [(&str, &str); 2] = [
    ("virtio_mmio", "/sys/bus/platform/drivers/virtio-mmio"),
    ("virtio_console", "/sys/bus/virtio/drivers/virtio_console"),
];

/// The line, as it was found.
#[derive(Debug)]
pub struct HostPort {
    /// The line itself.
    pub port: OwnedFd,
    /// Where the host calls for another one.
    pub listener: Option<OwnedFd>,
}

/// Finds the line: a port of this machine, or where the kernel's words say so, a call of its host.
pub fn find(patience: Duration) -> io::Result<HostPort> {
    let words = fs::read_to_string("/proc/cmdline")?;
    if !words.split_ascii_whitespace().any(|word| word == LINE_WORD) {
        return Ok(HostPort { port: find_port()?, listener: None });
    }
    let listener = sys::vsock::listen(LINE_PORT)?;
    let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
    loop {
        if rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&timeout))? == 0 {
            return Err(io::Error::other("the host does not call"));
        }
        // Nobody else has a say here, and one that is gone already is none.
        if let Ok((port, sys::vsock::HOST)) = sys::vsock::accept(listener.as_fd()) {
            return Ok(HostPort { port, listener: Some(listener) });
        }
    }
}

/// Takes each later call: the line moves to it, if it is at rest.
async fn take_calls(channel: Rc<Channel>, machine: Rc<GuestMachine>) {
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
            // Until it is told more it may happen again: whoever called may be frozen before it is heard.
            channel.expect_move();
        }
    }
}

/// Finds the port by the name its host gave it.
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

/// The host's first word, before anything else can be done.
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
        _ => Err(io::Error::other("the host's first word is no welcome")),
    }
}

/// Serves the line for as long as the machine lives.
pub async fn serve(guest: &Rc<GuestServer>, machine: &Rc<GuestMachine>) -> io::Result<()> {
    *guest.machine.borrow_mut() = Some(machine.clone());
    let Some(port) = machine.port.borrow_mut().take() else { return Err(io::ErrorKind::NotFound.into()) };
    let channel = Channel::new(MuxSide::Guest, ChannelPort::new(port)?);
    let writing = channel.clone();
    tokio::task::spawn_local(async move { drop(writing.write().await) });
    tokio::task::spawn_local(take_calls(channel.clone(), machine.clone()));
    let taken = identity::take(&machine.welcome, machine.welcomed);
    let trouble = machine.trouble.iter().cloned().chain(taken.trouble).collect();
    let mut first = receipt(guest, machine, &machine.welcome, taken.reseeded, trouble, None);
    stamp(&mut first, machine.welcomed);
    channel.send_word(FrameKind::Receipt, &serde_json::to_vec(&first)?).await;
    let mut looked = None;
    let mut stopped = false;
    loop {
        let told = channel.read().await.map_err(io::Error::other)?;
        match told {
            ChannelEvent::Opened(stream) => {
                let caller = channel.attach_here(stream);
                server::accept_stream(guest, caller);
            }
            ChannelEvent::Word(FrameKind::Hold, _) => {
                // From here until it goes on or has proved itself, nothing in the machine changes its files.
                let still = freezer::freeze_programs();
                rustix::fs::sync();
                let tree = tree::look(machine.upper.as_fd(), None);
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
                // One that runs is told whose it is now; its line is the one it has.
                let thawed = std::mem::take(&mut stopped);
                if thawed {
                    channel.keep_alive();
                    channel.reset_epoch();
                }
                machine.generation.set(welcome.generation);
                let mut taken = identity::take(&welcome, since);
                // Before the files that name the machine change.
                let mut receipt = receipt(guest, machine, &welcome, taken.reseeded, Vec::new(), looked);
                guest.set_identity(welcome.config.clone());
                taken.trouble.extend(identity::rename(machine, &welcome));
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
        tree: tree::look(machine.upper.as_fd(), looked),
        kernel: machine.kernel.clone(),
        trouble,
    }
}

/// What a machine proves that went on without being told who it is. Its clock stood still, and is set to what it is told.
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

/// The last thing before it is sent.
fn stamp(receipt: &mut GuestReceipt, since: Instant) {
    receipt.spent_ns = since.elapsed().as_nanos() as u64;
    receipt.clock_ns = identity::now_ns();
}

fn processes(guest: &GuestServer) -> u32 {
    u32::try_from(guest.processes.count()).unwrap_or(u32::MAX)
}
