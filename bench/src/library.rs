//! Bodies through the library, as a server would use them.

use std::{
    io,
    time::{Duration, Instant},
};

use fleet::{Create, ExecRequest, Fleet, Force, OutputChunk};
use proto::{BodyId, Failure};
use tokio::runtime::{Builder, Runtime};

/// A runtime with one thread, as the command line has it.
pub fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// The times of one short life.
#[derive(Debug, Clone, Copy)]
pub struct LifecycleTimes {
    /// Creating the Body.
    pub create: Duration,
    /// Running `true` in it.
    pub exec: Duration,
    /// Removing it.
    pub remove: Duration,
}

/// Creates a Body, runs `true` in it, and removes it.
pub async fn live_once(fleet: &Fleet, request: Create) -> io::Result<LifecycleTimes> {
    let began = Instant::now();
    let view = fleet.create(request).await.map_err(failure_text)?;
    let created = Instant::now();
    let ran = exec(fleet, view.id(), &["true"]).await;
    let executed = Instant::now();
    fleet.remove(view.id(), Force::Yes).await.map_err(failure_text)?;
    let removed = Instant::now();
    ran?;
    Ok(LifecycleTimes { create: created - began, exec: executed - created, remove: removed - executed })
}

/// Runs a command to its end and returns its output.
pub async fn exec(fleet: &Fleet, body: &BodyId, argv: &[&str]) -> io::Result<String> {
    let mut exec = fleet.exec(body, ExecRequest::new(argv.iter().copied())).await.map_err(failure_text)?;
    let (mut out, mut errors) = (Vec::new(), Vec::new());
    while let Some(output) = exec.next().await.map_err(failure_text)? {
        match output {
            OutputChunk::Stdout(bytes) | OutputChunk::Tty(bytes) => out.extend_from_slice(&bytes),
            OutputChunk::Stderr(bytes) => errors.extend_from_slice(&bytes),
        }
    }
    let ended = exec.finish().await.map_err(failure_text)?;
    match ended.code {
        0 => Ok(String::from_utf8_lossy(&out).into_owned()),
        code => Err(io::Error::other(format!(
            "{argv:?} ended with {code}: {}",
            String::from_utf8_lossy(&errors).trim()
        ))),
    }
}

/// An error with the causes of a failure.
pub fn failure_text(failure: Failure) -> io::Error {
    let causes: String = failure.causes().iter().map(|cause| format!(": {cause}")).collect();
    io::Error::other(format!("{failure}{causes}"))
}
