//! What is asked of a machine that runs: to be frozen, its memory into one file, its processors and devices into another,
//! while it stands still; to be measured; to be somebody's.

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
    vm::{CONSOLE, ControlReply, FreezeReport, MEASURE, TAKE},
};
use rustix::net::RecvFlags;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

use super::vmm::{RunningVm, unproven_part};

/// How long a guest may take to stand still.
const HOLD_PATIENCE: Duration = Duration::from_secs(20);
/// How long whoever asked may take to send the files.
const FILES_PATIENCE: Duration = Duration::from_secs(2);
/// How long a hypervisor may take to say what it did.
const MEASURE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the machine stands still for whoever asked.
const COPY_PATIENCE: Duration = Duration::from_secs(600);

/// How long a machine that runs may take to be somebody's.
const TAKE_PATIENCE: Duration = Duration::from_secs(5);
const CONFIG_LEN_MAX: u64 = 1 << 20;

/// Answers one who asks something of a machine. An error means that the machine cannot go on.
pub async fn answer(machine: &mut RunningVm, mut socket: UnixStream) -> io::Result<()> {
    let answered = match first_byte(&socket).await {
        Some(MEASURE) => measure(machine).await,
        Some(CONSOLE) => machine.engine.console().await.map(|lines| ControlReply::Console { lines }),
        Some(TAKE) => take(machine, &mut socket).await,
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

/// A machine that waited is told whose it is, and proves that anew.
async fn take(machine: &mut RunningVm, socket: &mut UnixStream) -> io::Result<ControlReply> {
    let began = Instant::now();
    let mut words = Vec::new();
    let mut socket = BufReader::new(socket.take(CONFIG_LEN_MAX));
    tokio::time::timeout(FILES_PATIENCE, socket.read_until(b'\n', &mut words)).await??;
    let config: GuestConfig = serde_json::from_slice(words.get(1..).unwrap_or_default())?;
    if config.body != machine.vm.welcome.config.body {
        return Err(io::Error::other("it is another Body's"));
    }
    machine.vm.welcome.config = config;
    let revival = machine.set_up_guest("spare", TAKE_PATIENCE, began).await?;
    match unproven_part(&machine.vm, &revival) {
        Some(what) => Err(io::Error::other(what)),
        None => Ok(ControlReply::Taken { revival: Box::new(revival) }),
    }
}

async fn freeze(machine: &mut RunningVm, mut socket: UnixStream) -> io::Result<()> {
    // Whoever asked is gone, or asked for nothing.
    let Ok(files) = receive_files(&socket).await else { return Ok(()) };
    machine.engine.save_ahead(&machine.vm, &files.ram);
    let said = match freeze_guest(machine).await {
        Ok(held) => {
            machine.channel.expect_move();
            let answer = match write_down(machine, files).await {
                Ok(()) => ControlReply::Saved { held },
                Err(error) => ControlReply::Failed { why: error.to_string() },
            };
            let stands = matches!(answer, ControlReply::Saved { .. });
            let told = send_reply(&mut socket, &answer).await;
            if stands && told.is_ok() {
                // A byte or the end: either way it is over.
                let _ = tokio::time::timeout(COPY_PATIENCE, socket.read_u8()).await;
                // Before it goes on: whoever still copies must know that it does.
                let _ = socket.shutdown().await;
            }
            resume_guest(machine).await?;
            None
        }
        Err(error) => Some(ControlReply::Failed { why: format!("its guest does not stand still: {error}") }),
    };
    machine.channel.resume_sending();
    machine.channel.send_word(FrameKind::GoOn, &[]).await;
    if let Some(answer) = said {
        let _ = send_reply(&mut socket, &answer).await;
    }
    Ok(())
}

async fn send_reply(socket: &mut UnixStream, answer: &ControlReply) -> io::Result<()> {
    let line = serde_json::to_string(answer)? + "\n";
    socket.write_all(line.as_bytes()).await
}

/// What is asked for; it stays to be read.
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

/// What whoever asks sends at once.
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

/// Both directions of the line come to rest.
async fn freeze_guest(machine: &mut RunningVm) -> io::Result<FreezeReport> {
    machine.channel.send_word_and_stop(FrameKind::Hold, &[]).await;
    // One that was given up on answers first, and is not what stands still now.
    machine.late += 1;
    let mut word = Vec::new();
    while machine.late > 0 {
        word = machine.wait_word(FrameKind::Held, HOLD_PATIENCE).await?;
        machine.late -= 1;
    }
    let held: FreezeReport = serde_json::from_slice(&word)?;
    if held.tree.is_sound() { Ok(held) } else { Err(io::Error::other("it does not say what its files are")) }
}

async fn write_down(machine: &mut RunningVm, files: SaveFiles) -> io::Result<()> {
    let RunningVm { engine, vm, .. } = machine;
    engine.pause().await?;
    engine.save(vm, files.ram, files.state).await
}

/// It goes on, over another line where it has lost its own.
async fn resume_guest(machine: &mut RunningVm) -> io::Result<()> {
    match machine.engine.resume().await? {
        Some(line) => machine.channel.move_to(ChannelPort::new(line)?),
        None => machine.channel.keep_alive(),
    }
    Ok(())
}
