//! Control requests to a running microVM: save it (memory into one file, CPU and device state into another, while it
//! is paused), measure it, or assign it to a Body.

use std::{
    fs::File,
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use guest::channel::ChannelPort;
use proto::{
    guest::GuestConfig,
    mux::FrameKind,
    vm::{CONSOLE, ControlReply, FreezeReport, HOLD, MEASURE, TAKE},
};
use rustix::net::RecvFlags;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

use super::vmm::{RunningVm, unproven_part};

/// How long a guest may take to freeze its processes.
const HOLD_PATIENCE: Duration = Duration::from_secs(20);
/// How long the caller may take to send the files.
const FILES_PATIENCE: Duration = Duration::from_secs(2);
/// How long a hypervisor may take to report its counters.
const MEASURE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the microVM stays paused for the caller.
const COPY_PATIENCE: Duration = Duration::from_secs(600);

/// How long a running microVM may take to accept a new Body.
const TAKE_PATIENCE: Duration = Duration::from_secs(5);
const CONFIG_LEN_MAX: u64 = 1 << 20;

/// Answers one control request. An error means that the microVM cannot continue.
pub async fn answer(machine: &mut RunningVm, mut socket: UnixStream) -> io::Result<()> {
    let answered = match first_byte(&socket).await {
        Some(MEASURE) => measure(machine).await,
        Some(CONSOLE) => machine.engine.console().await.map(|lines| ControlReply::Console { lines }),
        Some(TAKE) => take(machine, &mut socket).await,
        Some(HOLD) => return hold(machine, socket).await,
        _ => return freeze(machine, socket).await,
    };
    let answer = answered.unwrap_or_else(|error| ControlReply::Failed { why: error.to_string() });
    let _ = send_reply(&mut socket, &answer).await;
    Ok(())
}

async fn measure(machine: &mut RunningVm) -> io::Result<ControlReply> {
    let measured = tokio::time::timeout(MEASURE_PATIENCE, machine.engine.metrics()).await;
    let metrics = measured.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    Ok(ControlReply::Measured { metrics })
}

/// Assigns a pooled microVM to a Body, and returns a new receipt.
async fn take(machine: &mut RunningVm, socket: &mut UnixStream) -> io::Result<ControlReply> {
    let began = Instant::now();
    let mut words = Vec::new();
    let mut socket = BufReader::new(socket.take(CONFIG_LEN_MAX));
    tokio::time::timeout(FILES_PATIENCE, socket.read_until(b'\n', &mut words)).await??;
    let config: GuestConfig = serde_json::from_slice(words.get(1..).unwrap_or_default())?;
    if config.body != machine.vm.welcome.config.body {
        return Err(io::Error::other("this microVM belongs to another Body"));
    }
    machine.vm.welcome.config = config;
    let start_report = machine.set_up_guest("spare", TAKE_PATIENCE, began).await?;
    match unproven_part(&machine.vm, &start_report) {
        Some(what) => Err(io::Error::other(what)),
        None => Ok(ControlReply::Taken { revival: Box::new(start_report) }),
    }
}

async fn freeze(machine: &mut RunningVm, mut socket: UnixStream) -> io::Result<()> {
    // The caller has left, or sent no files.
    let Ok(files) = receive_files(&socket).await else { return Ok(()) };
    machine.engine.save_ahead(&machine.vm, &files.ram);
    let reply = match freeze_guest(machine).await {
        Ok(held) => {
            machine.channel.expect_move();
            let answer = match save_to(machine, files).await {
                Ok(()) => ControlReply::Saved { held },
                Err(error) => ControlReply::Failed { why: error.to_string() },
            };
            let stands = matches!(answer, ControlReply::Saved { .. });
            let told = send_reply(&mut socket, &answer).await;
            if stands && told.is_ok() {
                // A byte or the end of the connection: either way the caller is done.
                let _ = tokio::time::timeout(COPY_PATIENCE, socket.read_u8()).await;
                // Before the guest resumes: a caller that still copies must know that it does.
                let _ = socket.shutdown().await;
            }
            resume_guest(machine).await?;
            None
        }
        Err(error) => {
            Some(ControlReply::Failed { why: format!("cannot freeze the guest's processes: {error}") })
        }
    };
    machine.channel.resume_sending();
    machine.channel.send_word(FrameKind::GoOn, &[]).await;
    if let Some(answer) = reply {
        let _ = send_reply(&mut socket, &answer).await;
    }
    Ok(())
}

/// Keeps the microVM paused until the caller has read its disk. A guest that does not answer is paused all the same: then its
/// disk is as a loss of power would leave it.
async fn hold(machine: &mut RunningVm, mut socket: UnixStream) -> io::Result<()> {
    let _ = socket.read_u8().await;
    let synced = freeze_guest(machine).await.is_ok();
    if synced {
        machine.channel.expect_move();
    }
    let answer = match machine.engine.pause().await {
        Ok(()) => ControlReply::Held { synced },
        Err(error) => ControlReply::Failed { why: error.to_string() },
    };
    let paused = matches!(answer, ControlReply::Held { .. });
    if send_reply(&mut socket, &answer).await.is_ok() && paused {
        let _ = tokio::time::timeout(COPY_PATIENCE, socket.read_u8()).await;
        // Before the guest resumes, so that a caller that still reads learns that it does.
        let _ = socket.shutdown().await;
    }
    if paused {
        resume_guest(machine).await?;
    }
    machine.channel.resume_sending();
    machine.channel.send_word(FrameKind::GoOn, &[]).await;
    Ok(())
}

async fn send_reply(socket: &mut UnixStream, answer: &ControlReply) -> io::Result<()> {
    let line = serde_json::to_string(answer)? + "\n";
    socket.write_all(line.as_bytes()).await
}

/// Peeks at the first byte, which says what is requested; it stays in the socket.
async fn first_byte(socket: &UnixStream) -> Option<u8> {
    let looked = async {
        loop {
            socket.readable().await?;
            let mut byte = [0];
            let look = || Ok(rustix::net::recv(socket, &mut byte, RecvFlags::PEEK)?);
            match socket.try_io(tokio::io::Interest::READABLE, look) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                looked => return looked.map(|_| byte[0]),
            }
        }
    };
    tokio::time::timeout(FILES_PATIENCE, looked).await.ok().and_then(|looked: io::Result<u8>| looked.ok())
}

/// The files that the caller sends with its request.
struct SaveFiles {
    ram: File,
    state: File,
}

async fn receive_files(socket: &UnixStream) -> io::Result<SaveFiles> {
    let taken = async { Ok(SaveFiles { ram: one(socket).await?, state: one(socket).await? }) };
    tokio::time::timeout(FILES_PATIENCE, taken).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

async fn one(socket: &UnixStream) -> io::Result<File> {
    loop {
        socket.readable().await?;
        match socket.try_io(tokio::io::Interest::READABLE, || sys::fd::receive(socket.as_fd())) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            taken => return taken.map(File::from),
        }
    }
}

/// Stops the guest's processes and both directions of the channel.
async fn freeze_guest(machine: &mut RunningVm) -> io::Result<FreezeReport> {
    machine.channel.send_word_and_stop(FrameKind::Hold, &[]).await;
    // Answers to earlier requests that timed out come first, and do not describe the current state.
    machine.late += 1;
    let mut word = Vec::new();
    while machine.late > 0 {
        word = machine.wait_word(FrameKind::Held, HOLD_PATIENCE).await?;
        machine.late -= 1;
    }
    let held: FreezeReport = serde_json::from_slice(&word)?;
    if held.tree.is_sound() {
        Ok(held)
    } else {
        Err(io::Error::other("the guest sent no digest of its files"))
    }
}

async fn save_to(machine: &mut RunningVm, files: SaveFiles) -> io::Result<()> {
    let RunningVm { engine, vm, .. } = machine;
    engine.pause().await?;
    engine.save(vm, files.ram, files.state).await
}

/// Resumes the microVM, over a new connection if it has lost its own.
async fn resume_guest(machine: &mut RunningVm) -> io::Result<()> {
    match machine.engine.resume().await? {
        Some(line) => machine.channel.move_to(ChannelPort::new(line)?),
        None => machine.channel.keep_alive(),
    }
    Ok(())
}
