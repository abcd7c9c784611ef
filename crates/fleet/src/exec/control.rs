//! Controls a running command: input, signals and the size of its terminal.

use std::sync::Arc;

use body::{GuestClient, guest::GuestConnection};
use bytes::Bytes;
use proto::{
    Failure,
    wire::process::{
        CloseStdinRequest, CloseStdinResponse, ProcessInput, ProcessSelector, SendInputRequest,
        SendInputResponse, SendSignalRequest, SendSignalResponse, UpdateRequest, UpdateResponse,
        process_input, process_selector::Selector,
    },
};
use tokio::sync::Mutex;

use super::pty;
use crate::{TtySize, failures};

/// The connection that carries input. The first chunk opens it; the lock admits one chunk at a time.
pub(super) type InputConnection = Arc<Mutex<Option<GuestConnection>>>;

/// Controls a running command: input, signals and terminal size.
#[derive(Clone)]
pub struct ExecControl {
    pub(super) guest: GuestClient,
    pub(super) process: Selector,
    pub(super) input: InputConnection,
    pub(super) tty: bool,
}

impl ExecControl {
    /// Sends input. Returns when the command has read it.
    pub async fn send(&self, bytes: Bytes) -> Result<(), Failure> {
        let input =
            if self.tty { process_input::Input::Pty(bytes) } else { process_input::Input::Stdin(bytes) };
        let request =
            SendInputRequest { process: self.selector(), input: Some(ProcessInput { input: Some(input) }) };
        let mut connection = self.input.lock().await;
        if connection.is_none() {
            *connection = Some(self.guest.connect_http().await.map_err(failures::guest)?);
        }
        let Some(open) = connection.as_mut() else { return Ok(()) };
        let answer: Result<SendInputResponse, _> = open.ask("/process.Process/SendInput", &request).await;
        if answer.is_err() {
            *connection = None;
        }
        answer.map(drop).map_err(failures::guest)
    }

    /// Closes the command's standard input.
    pub async fn close_stdin(&self) -> Result<(), Failure> {
        // Waits for input that is being sent.
        let _sending = self.input.lock().await;
        let request = CloseStdinRequest { process: self.selector() };
        let answer: Result<CloseStdinResponse, _> =
            self.guest.ask("/process.Process/CloseStdin", &request).await;
        answer.map(drop).map_err(failures::guest)
    }

    /// Sends a signal by its number.
    pub async fn signal(&self, signal: i32) -> Result<(), Failure> {
        let request = SendSignalRequest { process: self.selector(), signal };
        let answer: Result<SendSignalResponse, _> =
            self.guest.ask("/process.Process/SendSignal", &request).await;
        answer.map(drop).map_err(failures::guest)
    }

    /// Changes the size of the terminal.
    pub async fn resize(&self, to: TtySize) -> Result<(), Failure> {
        let request = UpdateRequest { process: self.selector(), pty: Some(pty(to)) };
        let answer: Result<UpdateResponse, _> = self.guest.ask("/process.Process/Update", &request).await;
        answer.map(drop).map_err(failures::guest)
    }

    fn selector(&self) -> Option<ProcessSelector> {
        Some(ProcessSelector { selector: Some(self.process.clone()) })
    }
}
