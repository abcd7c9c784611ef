//! The hypervisor's monitor: one command after another, each with its answer.
//!
//! Trust: a hypervisor that was taken over may answer anything. Lines have a length, answers a deadline.

use std::{io, os::fd::OwnedFd, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

const LINE_LEN_MAX: u64 = 1 << 20;
const ANSWER: Duration = Duration::from_secs(30);

/// A monitor that takes commands.
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Greets and is greeted.
    pub async fn open(fd: OwnedFd) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(fd);
        stream.set_nonblocking(true)?;
        let mut monitor = Self { stream: BufReader::new(UnixStream::from_std(stream)?) };
        // The greeting comes by itself; the answer to the first command is the first that has an id.
        monitor.ask("qmp_capabilities", Value::Null).await?;
        // Memory that is mapped from a file is left out of what is written and read.
        let ignore = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
        monitor.ask("migrate-set-capabilities", ignore).await?;
        Ok(monitor)
    }

    /// Has a command done and gives what it returns.
    pub async fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        let mut asked = json!({ "execute": command, "id": command });
        if !arguments.is_null() {
            asked["arguments"] = arguments;
        }
        let answered = async {
            self.stream.get_mut().write_all(format!("{asked}\n").as_bytes()).await?;
            loop {
                let mut heard = self.line().await?;
                if heard["id"] != command {
                    continue;
                }
                match heard["error"]["desc"].as_str() {
                    Some(why) => return Err(io::Error::other(format!("{command}: {}", proto::text::visible(why)))),
                    None => return Ok(heard["return"].take()),
                }
            }
        };
        tokio::time::timeout(ANSWER, answered).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }

    async fn line(&mut self) -> io::Result<Value> {
        let mut line = Vec::new();
        let len = (&mut self.stream).take(LINE_LEN_MAX).read_until(b'\n', &mut line).await?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// Waits until what was read in is whole.
    pub async fn wait_loaded(&mut self) -> io::Result<()> {
        loop {
            let status = self.ask("query-status", Value::Null).await?;
            match status["status"].as_str() {
                Some("inmigrate") => tokio::time::sleep(Duration::from_millis(1)).await,
                Some("internal-error" | "io-error" | "guest-panicked") | None => return Err(io::Error::other("its state could not be read")),
                Some(_) => return Ok(()),
            }
        }
    }

    /// Waits until what is written out is whole.
    pub async fn wait_saved(&mut self) -> io::Result<()> {
        loop {
            let state = self.ask("query-migrate", Value::Null).await?;
            match state["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") | None => {
                    let why = state["error-desc"].as_str().unwrap_or("it said no reason");
                    return Err(io::Error::other(format!("the machine could not be written down: {}", proto::text::visible(why))));
                }
                Some(_) => tokio::time::sleep(Duration::from_millis(2)).await,
            }
        }
    }

    /// The end of what the machine wrote on its console.
    pub async fn console(&mut self) -> String {
        let read = self.ask("ringbuf-read", json!({ "device": "console", "size": 65536 })).await;
        let text = read.ok().and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().rev().take(6).collect();
        lines.into_iter().rev().map(|line| proto::text::visible(line.trim())).collect::<Vec<_>>().join(" | ")
    }
}
