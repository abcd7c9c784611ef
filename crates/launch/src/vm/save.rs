//! What is asked of a machine that runs: to be frozen, its memory into one file, its processors and devices into another,
//! while it stands still; to be measured; to be somebody's.

use std::{
    fs::File,
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use guest::channel::Port;
use proto::{
    guest::GuestConfig,
    mux::FrameKind,
    vm::{Answer, GO, Held, MEASURE, TAKE, WHOLE},
};
use rustix::net::RecvFlags;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
};

use super::mind::{Machine, missing};

/// How long a guest may take to stand still.
const HOLD_PATIENCE: Duration = Duration::from_secs(20);
/// How long whoever asked may take to send the files.
const FILES_PATIENCE: Duration = Duration::from_secs(2);
/// How long a hypervisor may take to say what it did.
const MEASURE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the machine stands still for whoever asked.
const COPY_PATIENCE: Duration = Duration::from_secs(600);

/// How long what a machine is to be thawed from may take to be written down, and its disk to be copied: longer than
/// anybody waits for that.
const THERE_PATIENCE: Duration = Duration::from_secs(960);
const HELD_LEN_MAX: u64 = 64 << 10;
/// How long a machine that runs may take to be somebody's.
const TAKE_PATIENCE: Duration = Duration::from_secs(5);
const CONFIG_LEN_MAX: u64 = 1 << 20;

/// What is to be written down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Its memory, its processors and devices.
    Lasting,
    /// The process of its hypervisor besides.
    Whole,
}

/// Waits until what the machine is to be thawed from is there.
pub async fn wait(control: &UnixListener) -> io::Result<Held> {
    let told = async {
        loop {
            let (socket, _) = control.accept().await?;
            let mut words = Vec::new();
            let mut socket = BufReader::new(socket.take(HELD_LEN_MAX));
            let heard = tokio::time::timeout(FILES_PATIENCE, socket.read_until(b'\n', &mut words)).await;
            // Whoever wants something else of it comes too early.
            if let Ok(Ok(_)) = heard
                && let Some((&GO, held)) = words.split_first()
            {
                return Ok(serde_json::from_slice(held)?);
            }
        }
    };
    tokio::time::timeout(THERE_PATIENCE, told).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Answers one who asks something of a machine. An error means that the machine cannot go on.
pub async fn answer(machine: &mut Machine, mut socket: UnixStream) -> io::Result<()> {
    let answered = match first_byte(&socket).await {
        Some(MEASURE) => measure(machine).await,
        Some(TAKE) => take(machine, &mut socket).await,
        Some(WHOLE) => {
            let _ = socket.read_u8().await;
            return freeze(machine, socket, Extent::Whole).await;
        }
        _ => return freeze(machine, socket, Extent::Lasting).await,
    };
    let answer = answered.unwrap_or_else(|error| Answer::Failed { why: error.to_string() });
    let _ = tell(&mut socket, &answer).await;
    Ok(())
}

async fn measure(machine: &mut Machine) -> io::Result<Answer> {
    let measured = tokio::time::timeout(MEASURE_PATIENCE, machine.engine.metrics()).await;
    let metrics = measured.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    Ok(Answer::Measured { metrics })
}

/// A machine that waited is told whose it is, and proves that anew.
async fn take(machine: &mut Machine, socket: &mut UnixStream) -> io::Result<Answer> {
    let began = Instant::now();
    let mut words = Vec::new();
    let mut socket = BufReader::new(socket.take(CONFIG_LEN_MAX));
    tokio::time::timeout(FILES_PATIENCE, socket.read_until(b'\n', &mut words)).await??;
    let config: GuestConfig = serde_json::from_slice(words.get(1..).unwrap_or_default())?;
    if config.body != machine.vm.welcome.config.body {
        return Err(io::Error::other("it is another Body's"));
    }
    machine.vm.welcome.config = config;
    machine.vm.hurried = false;
    let revival = machine.welcome("spare", TAKE_PATIENCE, began).await?;
    match missing(&machine.vm, &revival) {
        Some(what) => Err(io::Error::other(what)),
        None => Ok(Answer::Taken { revival: Box::new(revival) }),
    }
}

async fn freeze(machine: &mut Machine, mut socket: UnixStream, extent: Extent) -> io::Result<()> {
    // Whoever asked is gone, or asked for nothing.
    let Ok(files) = files(&socket, extent).await else { return Ok(()) };
    machine.engine.save_ahead(&machine.vm, &files.ram);
    let said = match hold(machine).await {
        Ok(held) => {
            machine.channel.expect_move();
            let answer = match write_down(machine, files).await {
                Ok(extent) => Answer::Saved { held, whole: extent == Extent::Whole },
                Err(error) => Answer::Failed { why: error.to_string() },
            };
            let stands = matches!(answer, Answer::Saved { .. });
            let told = tell(&mut socket, &answer).await;
            if stands && told.is_ok() {
                // A byte or the end: either way it is over.
                let _ = tokio::time::timeout(COPY_PATIENCE, socket.read_u8()).await;
                // Before it goes on: whoever still copies must know that it does.
                let _ = socket.shutdown().await;
            }
            go_on(machine).await?;
            None
        }
        Err(error) => Some(Answer::Failed { why: format!("its guest does not stand still: {error}") }),
    };
    machine.channel.go_on();
    machine.channel.say(FrameKind::GoOn, &[]).await;
    if let Some(answer) = said {
        let _ = tell(&mut socket, &answer).await;
    }
    Ok(())
}

async fn tell(socket: &mut UnixStream, answer: &Answer) -> io::Result<()> {
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
struct Files {
    ram: File,
    state: File,
    imprint: Option<File>,
}

async fn files(socket: &UnixStream, extent: Extent) -> io::Result<Files> {
    let taken = async {
        let (ram, state) = (one(socket).await?, one(socket).await?);
        let imprint = if extent == Extent::Whole { Some(one(socket).await?) } else { None };
        Ok(Files { ram, state, imprint })
    };
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
async fn hold(machine: &mut Machine) -> io::Result<Held> {
    machine.channel.say_and_stop(FrameKind::Hold, &[]).await;
    // One that was given up on answers first, and is not what stands still now.
    machine.late += 1;
    let mut word = Vec::new();
    while machine.late > 0 {
        word = machine.word(FrameKind::Held, HOLD_PATIENCE).await?;
        machine.late -= 1;
    }
    let held: Held = serde_json::from_slice(&word)?;
    if held.tree.is_sound() { Ok(held) } else { Err(io::Error::other("it does not say what its files are")) }
}

async fn write_down(machine: &mut Machine, files: Files) -> io::Result<Extent> {
    let Machine { engine, vm, .. } = machine;
    engine.pause().await?;
    let whole = match files.imprint {
        // A machine can be thawed without it, only later.
        Some(imprint) => engine.imprint(vm, imprint).await.is_ok(),
        None => false,
    };
    engine.save(vm, files.ram, files.state).await?;
    Ok(if whole { Extent::Whole } else { Extent::Lasting })
}

/// It goes on, over another line where it has lost its own.
async fn go_on(machine: &mut Machine) -> io::Result<()> {
    match machine.engine.resume().await? {
        Some(line) => machine.channel.move_to(Port::new(line)?),
        None => machine.channel.stay(),
    }
    Ok(())
}
