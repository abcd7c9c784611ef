//! A `pal serve` on the data directory of the bench.

use std::{
    fs,
    io::{self, BufRead, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{client::Client, context::BenchContext};

/// A server that ends with its section.
pub struct TestedServer {
    child: Child,
    /// Its address.
    pub address: SocketAddr,
    /// The key of its clients.
    pub key: String,
    bodies: PathBuf,
}

impl TestedServer {
    /// Starts a server with the configuration directory of the user.
    pub fn start(context: &BenchContext) -> io::Result<Self> {
        Self::spawn(context, Command::new(&context.pal))
    }

    /// Starts a server with another configuration directory.
    pub fn start_with_config(context: &BenchContext, config: &Path) -> io::Result<Self> {
        let mut command = Command::new(&context.pal);
        command.env("PAL_CONFIG", config);
        Self::spawn(context, command)
    }

    fn spawn(context: &BenchContext, mut command: Command) -> io::Result<Self> {
        command.arg("--data").arg(&context.data).args(["serve", "--json", "--listen", "127.0.0.1:0"]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let mut line = String::new();
        child.stdout.as_mut().map(|out| BufReader::new(out).read_line(&mut line)).transpose()?;
        let said: Value = serde_json::from_str(&line)?;
        let address = said["url"].as_str().and_then(|url| url.strip_prefix("http://")?.parse().ok());
        let address = address.ok_or_else(|| io::Error::other(format!("pal serve said {line:?}")))?;
        let key = fs::read_to_string(context.data.join("serve.key"))?.trim().to_owned();
        Ok(Self { child, address, key, bodies: context.data.join("bodies") })
    }

    /// A new connection.
    pub fn client(&self) -> io::Result<Client> {
        Client::connect(self.address, &self.key)
    }

    /// The process of the server.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }
}

impl Drop for TestedServer {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.pid()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
        // The supervisor of the pooled Body removes it, in its own time.
        let deadline = Instant::now() + Duration::from_secs(5);
        while fs::read_dir(&self.bodies).is_ok_and(|mut left| left.next().is_some())
            && Instant::now() < deadline
        {
            thread::sleep(Duration::from_millis(10));
        }
    }
}
