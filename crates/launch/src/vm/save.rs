//! Freezing a machine: its memory into one file, its processors and devices into another, while it stands still.

use std::{fs::File, io, os::fd::AsFd, time::Duration};

use guest::channel::Port;
use proto::{
    mux::FrameKind,
    vm::{Answer, GO, Held, MEASURE},
};
use rustix::net::RecvFlags;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixListener, UnixStream},
};

use super::mind::Machine;

/// How long a guest may take to stand still.
const HOLD_PATIENCE: Duration = Duration::from_secs(20);
/// How long whoever asked may take to send the files.
const FILES_PATIENCE: Duration = Duration::from_secs(2);
/// How long a hypervisor may take to say what it did.
const MEASURE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the machine stands still for whoever asked.
const COPY_PATIENCE: Duration = Duration::from_secs(600);

/// How long what a machine is to be thawed from may take to be written down: longer than anybody waits for that.
const THERE_PATIENCE: Duration = Duration::from_secs(330);
const HELD_LEN_MAX: u64 = 64 << 10;

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

/// Answers one who asks for a machine to be frozen. An error means that the machine cannot go on.
pub async fn answer(machine: &mut Machine, mut socket: UnixStream) -> io::Result<()> {
    if is_measure(&socket).await {
        let measured = tokio::time::timeout(MEASURE_PATIENCE, machine.engine.metrics()).await;
        let answer = match measured.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(metrics) => Answer::Measured { metrics },
            Err(error) => Answer::Failed { why: error.to_string() },
        };
        let _ = tell(&mut socket, &answer).await;
        return Ok(());
    }
    let (ram, state) = match files(&socket).await {
        Ok(files) => files,
        // Whoever asked is gone, or asked for nothing.
        Err(_) => return Ok(()),
    };
    machine.engine.save_ahead(&machine.vm, &ram);
    let said = match hold(machine).await {
        Ok(held) => {
            machine.channel.expect_move();
            let saved = write_down(machine, ram, state).await;
            let answer = saved
                .map_or_else(|error| Answer::Failed { why: error.to_string() }, |()| Answer::Saved { held });
            let stands = matches!(answer, Answer::Saved { .. });
            let told = tell(&mut socket, &answer).await;
            if stands && told.is_ok() {
                // A byte or the end: either way it is over.
                let _ = tokio::time::timeout(COPY_PATIENCE, socket.read_u8()).await;
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

/// Whether that is what is asked for.
async fn is_measure(socket: &UnixStream) -> bool {
    let looked = async {
        loop {
            socket.readable().await?;
            let mut byte = [0];
            let look = || Ok(rustix::net::recv(socket, &mut byte, RecvFlags::PEEK)?);
            match socket.try_io(tokio::io::Interest::READABLE, look) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                looked => return looked.map(|_| byte[0] == MEASURE),
            }
        }
    };
    tokio::time::timeout(FILES_PATIENCE, looked)
        .await
        .is_ok_and(|looked: io::Result<bool>| looked.unwrap_or(false))
}

/// The two files that whoever asks sends at once.
async fn files(socket: &UnixStream) -> io::Result<(File, File)> {
    let taken = async { Ok((one(socket).await?, one(socket).await?)) };
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

async fn write_down(machine: &mut Machine, ram: File, state: File) -> io::Result<()> {
    machine.engine.pause().await?;
    machine.engine.save(&machine.vm, ram, state).await
}

/// It goes on, over another line where it has lost its own.
async fn go_on(machine: &mut Machine) -> io::Result<()> {
    match machine.engine.resume().await? {
        Some(line) => machine.channel.move_to(Port::new(line)?),
        None => machine.channel.stay(),
    }
    Ok(())
}
