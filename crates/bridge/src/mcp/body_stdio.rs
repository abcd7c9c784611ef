//! Standard input and output of a command in a Body, as a reader and a writer of this process.
//!
//! Invariant: the command ends with its reader and writer: it is hung up when this process leaves.

use std::sync::Arc;

use bytes::Bytes;
use fleet::{Disconnect, ExecRequest, Fleet, OutputChunk, StartError, Stdin};
use proto::{BodyId, Failure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::oneshot,
};

/// How much may wait in each direction.
const PIPE_LEN: usize = 64 << 10;

/// Starts a command, and returns its output and its input.
pub async fn open(
    fleet: Arc<Fleet>,
    body: BodyId,
    mut request: ExecRequest,
) -> Result<(DuplexStream, DuplexStream), Failure> {
    request.stdin = Stdin::Open;
    request.on_disconnect = Disconnect::HangUp;
    let (output, output_end) = duplex(PIPE_LEN);
    let (input, input_end) = duplex(PIPE_LEN);
    let (started, starts) = oneshot::channel();
    tokio::spawn(carry(fleet, body, request, output_end, input_end, started));
    match starts.await {
        Ok(Ok(())) => Ok((output, input)),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(Failure::new(proto::Kind::Internal, "the task that starts the command ended early")),
    }
}

/// Carries bytes in both directions until one side ends.
async fn carry(
    fleet: Arc<Fleet>,
    body: BodyId,
    request: ExecRequest,
    mut output: DuplexStream,
    mut input: DuplexStream,
    started: oneshot::Sender<Result<(), StartError>>,
) {
    let mut exec = match fleet.execs().start(&body, request).await {
        Ok(exec) => exec,
        Err(error) => return drop(started.send(Err(error))),
    };
    if started.send(Ok(())).is_err() {
        return;
    }
    let control = exec.control();
    let feed = async {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(len @ 1..) = input.read(&mut buffer).await {
            if control.send(Bytes::copy_from_slice(&buffer[..len])).await.is_err() {
                break;
            }
        }
    };
    let follow = async {
        while let Ok(Some(chunk)) = exec.next().await {
            // A server writes its own log to standard error; the event log keeps it.
            if let OutputChunk::Stdout(bytes) = chunk
                && output.write_all(&bytes).await.is_err()
            {
                break;
            }
        }
    };
    tokio::select! {
        () = feed => { let _ = control.signal(libc_sigterm()).await; }
        () = follow => {}
    }
    drop(output);
    // The end of the command belongs into the log, but a command that ignores the signal must not hold this task.
    let rest = async {
        while let Ok(Some(_)) = exec.next().await {}
        let _ = exec.finish().await;
    };
    let _ = tokio::time::timeout(std::time::Duration::from_secs(5), rest).await;
}

fn libc_sigterm() -> i32 {
    rustix::process::Signal::TERM.as_raw()
}
