//! Tunnels through the Body's egress proxy: a `CONNECT` request on its socket, and then raw bytes.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

/// The longest head of an answer.
const HEAD_LEN_MAX: usize = 8 << 10;
/// How long the proxy may take to connect, or to refuse.
const PATIENCE: Duration = Duration::from_secs(120);
const HEAD_END: &[u8] = b"\r\n\r\n";

/// Opens a tunnel to `target`, a host and a port. Returns it with the bytes that it has sent already.
pub async fn open(socket: &str, target: &str) -> io::Result<(UnixStream, Vec<u8>)> {
    tokio::time::timeout(PATIENCE, connect(socket, target)).await?
}

async fn connect(socket: &str, target: &str) -> io::Result<(UnixStream, Vec<u8>)> {
    let mut outside = UnixStream::connect(socket).await?;
    outside.write_all(format!("CONNECT {target} HTTP/1.1\r\n\r\n").as_bytes()).await?;
    let mut head = Vec::new();
    loop {
        if let Some(end) = memchr::memmem::find(&head, HEAD_END) {
            let first = head.split_off(end + HEAD_END.len());
            return if is_success(&head) {
                Ok((outside, first))
            } else {
                Err(io::ErrorKind::ConnectionRefused.into())
            };
        }
        if head.len() >= HEAD_LEN_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if outside.read_buf(&mut head).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Whether the head of an answer says that the tunnel is open.
fn is_success(head: &[u8]) -> bool {
    let mut words = head.split(|byte| *byte == b' ' || *byte == b'\r');
    words.next().is_some_and(|version| version.starts_with(b"HTTP/1.")) && words.next() == Some(b"200")
}

/// A proxy of a test, on a socket in a directory of its own.
#[cfg(test)]
pub mod scripted {
    use std::{cell::RefCell, path::PathBuf, rc::Rc};

    use super::*;

    /// A proxy that answers every `CONNECT` with the same head.
    pub struct ScriptedProxy {
        dir: PathBuf,
        /// The targets of the requests so far.
        pub asked: Rc<RefCell<Vec<String>>>,
    }

    impl ScriptedProxy {
        /// Starts it; `act` continues each connection after the head.
        pub fn start<F: Future<Output = ()> + 'static>(
            name: &str,
            head: &'static str,
            act: impl Fn(UnixStream) -> F + 'static,
        ) -> Self {
            let dir = std::env::temp_dir().join(format!("palisade-tunnel-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::create_dir(&dir).unwrap();
            let listener = tokio::net::UnixListener::bind(dir.join("socket")).unwrap();
            let asked = Rc::new(RefCell::new(Vec::new()));
            let noted = asked.clone();
            let act = Rc::new(act);
            tokio::task::spawn_local(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let (noted, act) = (noted.clone(), act.clone());
                    tokio::task::spawn_local(async move {
                        let mut request = Vec::new();
                        while !request.ends_with(HEAD_END) {
                            request.push(stream.read_u8().await.unwrap());
                        }
                        let line = String::from_utf8(request).unwrap();
                        noted.borrow_mut().push(line.split(' ').nth(1).unwrap_or_default().to_owned());
                        stream.write_all(head.as_bytes()).await.unwrap();
                        act(stream).await;
                    });
                }
            });
            Self { dir, asked }
        }

        /// The path of its socket.
        pub fn socket(&self) -> String {
            self.dir.join("socket").to_str().unwrap().to_owned()
        }
    }

    impl Drop for ScriptedProxy {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    /// Runs a test on one thread, as the guest does.
    pub fn run(test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, test);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        scripted::{ScriptedProxy, run},
        *,
    };

    #[test]
    fn a_tunnel_begins_after_the_head() {
        run(async {
            let proxy = ScriptedProxy::start(
                "open",
                "HTTP/1.1 200 OK\r\nvia: x\r\n\r\nhel",
                |mut stream| async move {
                    stream.write_all(b"lo").await.unwrap();
                },
            );
            let (mut outside, mut first) = open(&proxy.socket(), "[2001:db8::1]:443").await.unwrap();
            outside.read_to_end(&mut first).await.unwrap();
            assert_eq!(first, b"hello");
            assert_eq!(*proxy.asked.borrow(), ["[2001:db8::1]:443"]);
        });
    }

    #[test]
    fn a_refusal_and_a_bad_answer_open_no_tunnel() {
        run(async {
            let endless: &'static str = String::leak("x".repeat(2 * HEAD_LEN_MAX));
            for (head, kind) in [
                ("HTTP/1.1 403 Forbidden\r\n\r\n", io::ErrorKind::ConnectionRefused),
                ("HTTP/1.1 2000 OK\r\n\r\n", io::ErrorKind::ConnectionRefused),
                ("200 200 200\r\n\r\n", io::ErrorKind::ConnectionRefused),
                ("HTTP/1.1 200 OK\r\n", io::ErrorKind::UnexpectedEof),
                (endless, io::ErrorKind::InvalidData),
            ] {
                let proxy = ScriptedProxy::start("refuse", head, |_| async {});
                assert_eq!(open(&proxy.socket(), "a.test:1").await.unwrap_err().kind(), kind, "{head:.40}");
            }
            assert!(open("/nowhere/at/all", "a.test:1").await.is_err());
        });
    }
}
