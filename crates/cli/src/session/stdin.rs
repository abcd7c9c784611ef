//! Reads standard input in chunks.
//!
//! A thread reads it, because the file description is shared with the parent process and must not become
//! non-blocking, and a regular file cannot be polled. The thread starts when a command needs input, and
//! nothing joins it at the end.

use bytes::Bytes;
use proto::{Failure, Kind};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    stdio,
};
use tokio::sync::mpsc;

const PIECE_LEN: usize = 64 * 1024;
const PIECES_HELD: usize = 2;
const STACK_LEN: usize = 64 * 1024;

/// Starts to read.
pub fn read() -> Result<mpsc::Receiver<Bytes>, Failure> {
    let (sender, receiver) = mpsc::channel(PIECES_HELD);
    std::thread::Builder::new()
        .name("pal-stdin".into())
        .stack_size(STACK_LEN)
        .spawn(move || pump(&sender))
        .map_err(|error| {
        Failure::new(Kind::Host, "cannot start a thread that reads standard input").because(error)
    })?;
    Ok(receiver)
}

fn pump(sender: &mpsc::Sender<Bytes>) {
    let mut piece = vec![0; PIECE_LEN];
    loop {
        match rustix::io::read(stdio::stdin(), &mut piece) {
            Ok(0) => return,
            Ok(len) => {
                if sender.blocking_send(Bytes::copy_from_slice(&piece[..len])).is_err() {
                    return;
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let _ = poll(&mut [PollFd::new(&stdio::stdin(), PollFlags::IN)], None);
            }
            // A closed terminal, a directory or a closed descriptor has no more input.
            Err(_) => return,
        }
    }
}
