//! QEMU's monitor (QMP): one command after another, each with its answer.
//!
//! Trust: a hypervisor that was taken over may answer anything. Lines have a maximum length, answers a deadline.

use std::{io, os::fd::OwnedFd, time::Duration};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};

const LINE_LEN_MAX: u64 = 1 << 20;
const ANSWER: Duration = Duration::from_secs(30);

/// How long loading a saved microVM may take.
const LOADED: Duration = Duration::from_secs(30);
/// How long saving may take: there may be much memory, and the disk may be slow.
const SAVED: Duration = Duration::from_secs(280);

/// A connected monitor.
pub struct QmpMonitor {
    stream: BufReader<UnixStream>,
    /// The last migration status that it reported.
    migration: Option<String>,
    /// Whether it reported that the guest stopped its microVM.
    stopped: bool,
    /// The beginning of a line that was not read to its end.
    partial: Vec<u8>,
}

impl QmpMonitor {
    /// Negotiates capabilities. A further command is sent along without waiting in between.
    pub async fn open(fd: OwnedFd, also: Option<(&str, Value)>) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(fd);
        stream.set_nonblocking(true)?;
        let mut monitor = Self {
            stream: BufReader::new(UnixStream::from_std(stream)?),
            migration: None,
            stopped: false,
            partial: Vec::new(),
        };
        // Memory mapped from a file is left out of the migration stream, and QEMU reports the end of a migration as
        // an event.
        let wanted = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }, { "capability": "events", "state": true }] });
        // The greeting comes by itself; the answer to the first command is the first message with an id.
        let commands =
            [("qmp_capabilities", Value::Null), ("migrate-set-capabilities", wanted)].into_iter().chain(also);
        monitor.ask_all(&commands.collect::<Vec<_>>()).await?;
        Ok(monitor)
    }

    /// Runs a command and returns its result.
    pub async fn ask(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        self.ask_all(&[(command, arguments)]).await
    }

    /// Runs commands one after another and returns the result of the last.
    async fn ask_all(&mut self, commands: &[(&str, Value)]) -> io::Result<Value> {
        let mut words = String::new();
        for (command, arguments) in commands {
            let mut asked = json!({ "execute": command, "id": command });
            if !arguments.is_null() {
                asked["arguments"] = arguments.clone();
            }
            words += &format!("{asked}\n");
        }
        let answered = async {
            self.stream.get_mut().write_all(words.as_bytes()).await?;
            let mut answer = Value::Null;
            for (command, _) in commands {
                answer = self.answer(command).await?;
            }
            Ok(answer)
        };
        in_time(ANSWER, answered).await
    }

    async fn answer(&mut self, command: &str) -> io::Result<Value> {
        loop {
            let mut heard = self.line().await?;
            if heard["id"] != command {
                continue;
            }
            return match heard["error"]["desc"].as_str() {
                Some(why) => Err(io::Error::other(format!("{command}: {}", proto::text::visible(why)))),
                None => Ok(heard["return"].take()),
            };
        }
    }

    async fn line(&mut self) -> io::Result<Value> {
        let room = LINE_LEN_MAX.saturating_sub(self.partial.len() as u64);
        let len = (&mut self.stream).take(room).read_until(b'\n', &mut self.partial).await?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let heard: Value = serde_json::from_slice(&std::mem::take(&mut self.partial))?;
        match heard["event"].as_str() {
            Some("MIGRATION") => self.migration = heard["data"]["status"].as_str().map(str::to_owned),
            Some("SHUTDOWN") => self.stopped = true,
            _ => {}
        }
        Ok(heard)
    }

    /// Waits until the saved state is loaded.
    pub async fn wait_loaded(&mut self) -> io::Result<()> {
        in_time(LOADED, self.wait_migrated())
            .await
            .map_err(|error| io::Error::new(error.kind(), format!("cannot load the saved state: {error}")))
    }

    /// Forgets the status of an earlier migration.
    pub fn begin_saving(&mut self) {
        self.migration = None;
    }

    /// Waits until the state is saved.
    pub async fn wait_saved(&mut self) -> io::Result<()> {
        in_time(SAVED, self.wait_migrated())
            .await
            .map_err(|error| io::Error::new(error.kind(), format!("cannot save the microVM: {error}")))
    }

    async fn wait_migrated(&mut self) -> io::Result<()> {
        loop {
            match self.migration.as_deref() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    let state = self.ask("query-migrate", Value::Null).await?;
                    let why = state["error-desc"].as_str().unwrap_or("it gave no reason");
                    return Err(io::Error::other(proto::text::visible(why)));
                }
                _ => drop(self.line().await?),
            }
        }
    }

    /// Waits until the guest stops its microVM. Cancelling the wait loses no message.
    pub async fn wait_stopped(&mut self) -> io::Result<()> {
        while !self.stopped {
            self.line().await?;
        }
        Ok(())
    }

    /// Makes the hypervisor end when the guest stops its microVM; fails if that has happened already.
    pub async fn end_with_guest(&mut self) -> io::Result<()> {
        self.ask("set-action", json!({ "shutdown": "poweroff" })).await?;
        if self.stopped { Err(io::Error::other("the guest stopped its microVM")) } else { Ok(()) }
    }

    /// The last lines that the guest wrote on its console.
    pub async fn console(&mut self) -> io::Result<Vec<String>> {
        let text = self.ask("ringbuf-read", json!({ "device": "console", "size": 65536 })).await?;
        Ok(super::hypervisor::console_tail(text.as_str().unwrap_or_default()))
    }
}

async fn in_time<T>(patience: Duration, act: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(patience, act).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hypervisor that sends these lines, whatever it is asked.
    fn hypervisor_with(lines: &str) -> OwnedFd {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        io::Write::write_all(&mut &there, lines.as_bytes()).unwrap();
        // The other end stays open as long as the test runs.
        std::mem::forget(there);
        here.into()
    }

    fn run<T>(act: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(act)
    }

    const GREETED: &str = "{\"QMP\":{}}\n{\"return\":{},\"id\":\"qmp_capabilities\"}\n{\"return\":{},\"id\":\"migrate-set-capabilities\"}\n";

    #[test]
    fn an_end_that_came_before_the_answer_is_not_missed() {
        let lines = format!(
            "{GREETED}{{\"event\":\"MIGRATION\",\"data\":{{\"status\":\"completed\"}}}}\n{{\"return\":{{}},\"id\":\"migrate-incoming\"}}\n"
        );
        run(async {
            let mut monitor =
                QmpMonitor::open(hypervisor_with(&lines), Some(("migrate-incoming", Value::Null)))
                    .await
                    .unwrap();
            monitor.wait_loaded().await.unwrap();
        });
    }

    #[test]
    fn a_hypervisor_that_never_ends_is_not_waited_for() {
        let lines = format!("{GREETED}{{\"event\":\"MIGRATION\",\"data\":{{\"status\":\"active\"}}}}\n");
        run(async {
            let mut monitor = QmpMonitor::open(hypervisor_with(&lines), None).await.unwrap();
            let waited = in_time(Duration::from_millis(50), monitor.wait_migrated()).await;
            assert_eq!(waited.unwrap_err().kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn a_guest_that_stops_is_noticed_also_by_who_waits_in_turns() {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        let say = |text: &str| io::Write::write_all(&mut &there, text.as_bytes()).unwrap();
        say(GREETED);
        run(async {
            let mut monitor = QmpMonitor::open(here.into(), None).await.unwrap();
            say("{\"event\":\"SHUT");
            let waited = in_time(Duration::from_millis(20), monitor.wait_stopped()).await;
            assert_eq!(waited.unwrap_err().kind(), io::ErrorKind::TimedOut);
            say("DOWN\",\"data\":{\"guest\":true}}\n{\"return\":{},\"id\":\"set-action\"}\n");
            monitor.wait_stopped().await.unwrap();
            assert!(monitor.end_with_guest().await.is_err(), "it will never end by itself");
        });
    }

    #[test]
    fn a_failure_is_told_with_its_reason() {
        let lines = format!(
            "{GREETED}{{\"event\":\"MIGRATION\",\"data\":{{\"status\":\"failed\"}}}}\n{{\"return\":{{\"error-desc\":\"no room\\u001b\"}},\"id\":\"query-migrate\"}}\n"
        );
        run(async {
            let mut monitor = QmpMonitor::open(hypervisor_with(&lines), None).await.unwrap();
            let error = monitor.wait_saved().await.unwrap_err().to_string();
            assert!(error.contains("no room") && !error.contains('\u{1b}'), "{error}");
        });
    }
}
