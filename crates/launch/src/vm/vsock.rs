//! Connects to a guest whose hypervisor implements vsock in user space: the client names a port of the microVM on a
//! Unix socket, which then is a connection to that port.

use std::{io, os::fd::OwnedFd, path::Path, time::Duration};

use proto::vm::LINE_PORT;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::Instant,
};

/// How long one attempt may take: the hypervisor gives up after about as long.
const ATTEMPT: Duration = Duration::from_secs(2);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);
/// `OK`, a number and a newline.
const ANSWER_LEN_MAX: usize = 32;

/// The guest's vsock address. Each microVM has a socket of its own, so all may share one address.
pub const GUEST: u32 = 3;
/// The socket on which the hypervisor accepts connections to its microVM.
pub const SOCKET: &str = "/dev/shm/line.sock";

/// Removes sockets that an earlier hypervisor of this Body left, because binding an existing path fails.
pub fn clear(api: &str) {
    for socket in [api, SOCKET] {
        let _ = std::fs::remove_file(socket);
    }
}

/// Connects until the guest accepts.
pub async fn call(socket: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + patience;
    loop {
        let tried = tokio::time::timeout(ATTEMPT.min(patience), attempt(socket)).await;
        if let Ok(Ok(line)) = tried {
            let line = line.into_std()?;
            return Ok(line.into());
        }
        if Instant::now() + PAUSE > deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn attempt(socket: &Path) -> io::Result<UnixStream> {
    let mut line = UnixStream::connect(socket).await?;
    line.write_all(format!("CONNECT {LINE_PORT}\n").as_bytes()).await?;
    let mut answer = Vec::new();
    // Byte by byte, because the bytes after the answer belong to the guest.
    while !answer.ends_with(b"\n") {
        if answer.len() == ANSWER_LEN_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        answer.push(line.read_u8().await?);
    }
    if is_ok(&answer) { Ok(line) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn is_ok(answer: &[u8]) -> bool {
    let number = answer.strip_prefix(b"OK ").and_then(|rest| rest.strip_suffix(b"\n"));
    number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use tokio::{io::AsyncBufReadExt, net::UnixListener};

    use super::*;

    /// A hypervisor that sends these answers one after another, and then bytes of a guest.
    async fn check(answers: &'static [&'static str], patience_ms: u64) -> io::Result<Vec<u8>> {
        let dir = std::env::temp_dir().join(format!("pal-vsock-{}-{}", std::process::id(), answers.len()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("line.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let serving = tokio::spawn(async move {
            for answer in answers {
                let (socket, _) = listener.accept().await.unwrap();
                let mut socket = tokio::io::BufReader::new(socket);
                let mut request = String::new();
                socket.read_line(&mut request).await.unwrap();
                assert_eq!(request, "CONNECT 1024\n");
                socket.write_all(answer.as_bytes()).await.unwrap();
                if *answer == "…" {
                    std::future::pending::<()>().await;
                }
            }
        });
        let called = call(&path, Duration::from_millis(patience_ms)).await;
        let read = match called {
            Ok(line) => {
                let mut line = UnixStream::from_std(line.into()).unwrap();
                let mut guest = Vec::new();
                line.read_to_end(&mut guest).await.map(|_| guest)
            }
            Err(error) => Err(error),
        };
        serving.abort();
        std::fs::remove_dir_all(dir).unwrap();
        read
    }

    #[tokio::test]
    async fn calls_until_a_guest_answers_and_takes_none_of_its_words() {
        assert_eq!(check(&["", "OK 1073741824\nhere"], 2000).await.unwrap(), b"here");
    }

    #[tokio::test]
    async fn an_answer_that_is_none_is_no_line() {
        assert_eq!(
            check(&["OK \n", "OK 1x\n", "NO 3\n"], 300).await.unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert_eq!(
            check(&["OK 00000000000000000000000000000000000000000000000001\n"], 300)
                .await
                .unwrap_err()
                .kind(),
            io::ErrorKind::TimedOut
        );
        assert_eq!(
            check(&["…"], 300).await.unwrap_err().kind(),
            io::ErrorKind::TimedOut,
            "one that never says anything"
        );
    }
}
