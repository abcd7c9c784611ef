//! What a template runs in its Bodies from their start, and the wait until it is ready.

use std::time::{Duration, Instant};

use body::{GuestClient, guest::GuestError};
use proto::{
    BodyId, Failure, Kind,
    event_data::{ExecStarted, StartedBy},
    template::StartCommand,
    wire::process::{ProcessConfig, StartRequest, process_event},
};

use crate::{Templates, failures};

/// How long a Body has to become ready.
pub(crate) const READY_PATIENCE: Duration = Duration::from_secs(120);
/// How long one look at its readiness may take.
const LOOK_PATIENCE: Duration = Duration::from_secs(30);
const LOOK_FIRST: Duration = Duration::from_millis(10);
const LOOK_MAX: Duration = Duration::from_millis(500);
/// How much of what it says is told when it does not become ready.
const SAID_MAX: usize = 2048;

impl Templates<'_> {
    /// Starts what the template says, and waits until it is ready. A Body that does not become ready stays as it is.
    pub(crate) async fn start_template(
        &self,
        id: &BodyId,
        start: &StartCommand,
        patience: ReadyWait,
    ) -> Result<(), Failure> {
        let guest = self.fleet.guest(id);
        if let Some(command) = &start.command {
            let data = ExecStarted {
                argv: shell(command),
                user: None,
                workdir: None,
                tty: false,
                env: Vec::new(),
                timeout_ms: None,
                tag: None,
                by: Some(StartedBy::Template),
                detached: true,
            };
            self.fleet.write(id, data)?;
            // It runs once its first word is there; when the stream is dropped then, it goes on.
            let begun = async {
                guest.connect_http().await?.start(&request(command), None, None).await?.next().await
            };
            body::guest::with_timeout(begun).await.and_then(|begun| begun).map_err(failures::guest)?;
        }
        match &start.ready {
            Some(ready) if patience == ReadyWait::NoNaps && is_nap(ready) => Ok(()),
            Some(ready) => wait_ready(&guest, ready).await,
            None => Ok(()),
        }
    }
}

/// How a Body's readiness is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadyWait {
    /// Whatever the template says.
    Whole,
    /// Not where it says only "wait so long": that was for the first time, when the template was built.
    NoNaps,
}

/// `sleep N` and nothing else: what E2B's `wait_for_timeout` says.
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

/// One look: its exit code and what it said.
async fn look(guest: &GuestClient, ready: &str) -> Result<(i32, Vec<u8>), GuestError> {
    let mut said = Vec::new();
    let mut stream = guest.connect_http().await?.start(&request(ready), None, Some(LOOK_PATIENCE)).await?;
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

/// A line of shell as E2B's clients run one: by a login shell, so that the profile's settings hold.
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
