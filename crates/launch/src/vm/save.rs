//! Freezing a machine: its memory into one file, its processors and devices into another, while it stands still.

use std::{
    fs::File,
    io,
    os::{
        fd::AsFd,
        unix::net::UnixListener,
    },
    time::Duration,
};

use proto::{
    mux::FrameKind,
    vm::{Answer, Begin, Held},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

use super::{memory, mind::Machine, split::{REST_LEN_MAX, split}};

/// How long a guest may take to stand still.
const HOLD_PATIENCE: Duration = Duration::from_secs(20);
/// How long whoever asked may take to send the files.
const FILES_PATIENCE: Duration = Duration::from_secs(2);
/// How long the machine stands still for whoever asked.
const COPY_PATIENCE: Duration = Duration::from_secs(600);
/// Where the hypervisor writes to: in the Body's own root, which is memory.
const WAY: &str = "/dev/shm/save.sock";
/// As fast as it goes.
const BANDWIDTH: u64 = 1 << 36;

/// Answers one who asks for a machine to be frozen. An error means that the machine cannot go on.
pub async fn answer(machine: &mut Machine, mut socket: UnixStream) -> io::Result<()> {
    let (ram, state) = match files(&socket).await {
        Ok(files) => files,
        // Whoever asked is gone, or asked for nothing.
        Err(_) => return Ok(()),
    };
    let copying = copy_below(machine, &ram);
    let said = match hold(machine).await {
        Ok(held) => {
            let saved = write_down(machine, ram, state, copying).await;
            let answer = saved.map_or_else(|error| Answer::Failed { why: error.to_string() }, |()| Answer::Saved { held });
            let stands = matches!(answer, Answer::Saved { .. });
            let told = tell(&mut socket, &answer).await;
            if stands && told.is_ok() {
                // A byte or the end: either way it is over.
                let _ = tokio::time::timeout(COPY_PATIENCE, socket.read_u8()).await;
            }
            machine.monitor.ask("cont", Value::Null).await?;
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

/// The two files that whoever asks sends at once.
async fn files(socket: &UnixStream) -> io::Result<(File, File)> {
    let taken = async {
        Ok((one(socket).await?, one(socket).await?))
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

/// What a machine was thawed from is copied while it comes to rest; that never changes.
fn copy_below(machine: &Machine, ram: &File) -> Option<Copying> {
    let Begin::Thaw { ram: below, .. } = &machine.vm.begin else { return None };
    if !machine.private.get() {
        return None;
    }
    let (below, ram) = (below.clone(), ram.try_clone().ok()?);
    Some(tokio::task::spawn_blocking(move || sys::fd::copy_data(&File::open(below)?, &ram)))
}

type Copying = tokio::task::JoinHandle<io::Result<()>>;

async fn write_down(machine: &mut Machine, ram: File, state: File, copying: Option<Copying>) -> io::Result<()> {
    machine.monitor.ask("stop", Value::Null).await?;
    machine.monitor.begin_saving();
    let _ = std::fs::remove_file(WAY);
    let listener = UnixListener::bind(WAY)?;
    let memory = machine.vm.memory_bytes;
    let left_out = copying.is_some();
    let to = ram.try_clone()?;
    let splitting = tokio::task::spawn_blocking(move || -> io::Result<()> {
        let (from, _) = listener.accept()?;
        if left_out { memory::pass(from, &state, REST_LEN_MAX) } else { split(from, &to, memory, &state) }
    });
    machine.monitor.ask("migrate-set-parameters", json!({ "max-bandwidth": BANDWIDTH })).await?;
    let saved = match machine.monitor.ask("migrate", json!({ "uri": format!("unix:{WAY}") })).await {
        Ok(_) => machine.monitor.wait_saved().await,
        Err(error) => Err(error),
    };
    if saved.is_err() {
        // It lets go of what it writes to, and whoever waits for it is let go.
        let _ = machine.monitor.ask("migrate_cancel", Value::Null).await;
        drop(std::os::unix::net::UnixStream::connect(WAY));
    }
    let split = splitting.await.map_err(io::Error::other)?;
    let _ = std::fs::remove_file(WAY);
    saved.and(split)?;
    match copying {
        Some(copying) => {
            copying.await.map_err(io::Error::other)??;
            own_pages(machine, ram).await
        }
        None => Ok(()),
    }
}

async fn own_pages(machine: &Machine, ram: File) -> io::Result<()> {
    let Begin::Thaw { ram: below, .. } = machine.vm.begin.clone() else { return Ok(()) };
    let (process, len) = (machine.process.pid(), machine.vm.memory_bytes);
    tokio::task::spawn_blocking(move || memory::add_own_pages(process, &below, len, &ram)).await.map_err(io::Error::other)?
}
