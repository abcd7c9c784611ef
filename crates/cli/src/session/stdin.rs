//! Our standard input, as pieces.
//!
//! Why a thread: the description is shared with whoever started us, so it must not be made non-blocking, and a file
//! cannot be polled. It is started when a command wants input, and nobody waits for it at the end.

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
        .map_err(|error| Failure::new(Kind::Host, "cannot start to read standard input").because(error))?;
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
            // A terminal that hung up, a directory, a closed descriptor: there is no more.
            Err(_) => return,
        }
    }
}
