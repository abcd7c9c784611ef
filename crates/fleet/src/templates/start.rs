//! Runs the start command of a template in its Bodies, and waits until it is ready.

use std::time::{Duration, Instant};

use body::{GuestClient, guest::GuestError};
use proto::{
    BodyId, Failure, Kind,
    event_data::StartedBy,
    template::StartCommand,
    wire::process::{ProcessConfig, StartRequest, process_event},
};

use crate::{ExecRequest, Templates, failures};

/// How long a Body may take to become ready.
pub(crate) const READY_PATIENCE: Duration = Duration::from_secs(120);
/// How long one run of the ready command may take.
const LOOK_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_FIRST: Duration = Duration::from_millis(10);
const LOOK_MAX: Duration = Duration::from_millis(500);
/// How many bytes of the ready command's output the failure quotes.
const SAID_MAX: usize = 2048;

impl Templates<'_> {
    /// Starts the template's start command and waits until it is ready. A Body that does not become ready stays as it
    /// is.
    pub(crate) async fn start_template(
        &self,
        id: &BodyId,
        start: &StartCommand,
        patience: ReadyWait,
    ) -> Result<(), Failure> {
        let guest = self.fleet.guest(id);
        if let Some(command) = &start.command {
            let by = Some(StartedBy::Template);
            let request = ExecRequest { by, ..ExecRequest::new(shell(command)) };
            self.fleet.execs().start_detached(id, request).await?;
        }
        match &start.ready {
            Some(ready) if patience == ReadyWait::NoNaps && is_nap(ready) => Ok(()),
            Some(ready) => wait_ready(&guest, ready).await,
            None => Ok(()),
        }
    }
}

/// How to wait for a Body's readiness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadyWait {
    /// Runs the ready command, whatever it is.
    Whole,
    /// Skips a ready command that only sleeps: that wait was for the first start, when the template was built.
    NoNaps,
}

/// Whether the ready command is only `sleep N`, which E2B's `wait_for_timeout` produces.
fn is_nap(ready: &str) -> bool {
    let words: Vec<&str> = ready.split_whitespace().collect();
    matches!(words[..], ["sleep", time] if time.parse::<f64>().is_ok())
}

async fn wait_ready(guest: &GuestClient, ready: &str) -> Result<(), Failure> {
    let deadline = Instant::now() + READY_PATIENCE;
    let mut pause = LOOK_FIRST;
    loop {
        let said = match look(guest, ready).await.map_err(failures::guest)? {
            (0, _) => return Ok(()),
            (code, said) => format!(
                "`{}` ends with code {code}: {}",
                proto::text::visible(ready),
                proto::text::visible_bytes(&said)
            ),
        };
        if Instant::now() + pause >= deadline {
            return Err(Failure::new(
                Kind::Limit,
                format!("the Body did not become ready in {} s", READY_PATIENCE.as_secs()),
            )
            .because(said)
            .hint("look at what its start command does: pal exec BODY -- ps aux"));
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
}

/// Runs the ready command once; returns its exit code and output.
async fn look(guest: &GuestClient, ready: &str) -> Result<(i32, Vec<u8>), GuestError> {
    let mut said = Vec::new();
    let options = body::guest::StartOptions { timeout: Some(LOOK_PATIENCE), ..Default::default() };
    let mut stream = guest.connect_http().await?.start(&request(ready), options).await?;
    loop {
        match stream.next().await {
            Ok(Some(event)) => match event.event {
                Some(process_event::Event::Data(data)) => {
                    use process_event::data_event::Output::{Pty, Stderr, Stdout};
                    let Some(Stdout(bytes) | Stderr(bytes) | Pty(bytes)) = data.output else { continue };
                    said.extend_from_slice(&bytes[..bytes.len().min(SAID_MAX - said.len())]);
                }
                Some(process_event::Event::End(end)) => {
                    return Ok((if end.exited { end.exit_code } else { -1 }, said));
                }
                _ => {}
            },
            Ok(None) => return Ok((-1, said)),
            Err(GuestError::Refused { code, .. }) if code == "deadline_exceeded" => return Ok((-1, said)),
            Err(error) => return Err(error),
        }
    }
}

/// The argv of a shell command, run by a login shell as E2B's clients do, so that the profile's settings apply.
pub(crate) fn shell(line: &str) -> Vec<String> {
    ["/bin/bash", "-l", "-c", line].map(str::to_owned).to_vec()
}

fn request(line: &str) -> StartRequest {
    let mut argv = shell(line);
    let arguments = argv.split_off(1);
    let process =
        ProcessConfig { cmd: argv.swap_remove(0), args: arguments, envs: Default::default(), cwd: None };
    StartRequest { process: Some(process), pty: None, tag: None, stdin: Some(false) }
}
