//! Refusals: the reason, and the form in which the program inside learns of it.

use std::{io, time::Duration};

use proto::egress::{NO_ANSWER, Permit, Protocol, fit_to_show};
use tokio::{io::AsyncWriteExt, time::timeout};

use crate::client::{ClientStream, ProxyClient};

/// How long a program may take to read the end of an answer.
const LINGER: Duration = Duration::from_secs(5);
/// A fatal alert: access_denied.
const ACCESS_DENIED: [u8; 7] = [21, 3, 1, 0, 2, 2, 49];
/// The status of a refusal whose name is allowed, but whose servers cannot be reached.
pub const UNREACHABLE: u16 = 502;

/// The refusal of a connection or a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// The status of the HTTP answer.
    pub status: u16,
    pub why: String,
}

impl Denial {
    /// The request is malformed.
    pub fn bad(why: &str) -> Self {
        Self { status: 400, why: why.to_owned() }
    }

    /// The policy does not allow it.
    pub fn forbidden(why: impl Into<String>) -> Self {
        Self { status: 403, why: why.into() }
    }

    /// The rule allows it, and not so often.
    pub fn too_many(why: String) -> Self {
        Self { status: 429, why }
    }

    /// The policy changed while the request waited for its host.
    pub fn policy_changed() -> Self {
        Self { status: 503, why: "the policy changed meanwhile: try again".into() }
    }

    /// No server of the name answers.
    pub fn unreachable(why: impl Into<String>) -> Self {
        Self { status: UNREACHABLE, why: why.into() }
    }

    /// The decision about it is not in the spool.
    pub fn unrecorded(error: &io::Error) -> Self {
        Self { status: 503, why: format!("the decision about it cannot be recorded: {error}") }
    }
}

/// The form of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalForm {
    /// An HTTP answer with the reason.
    Http,
    /// A TLS alert.
    TlsAlert,
    /// A reset, for protocols in which nothing could be said.
    Reset,
}

impl RefusalForm {
    /// The form that a protocol understands.
    pub fn of_protocol(permit: &Permit) -> Self {
        match permit.protocol {
            Protocol::Tls => Self::TlsAlert,
            Protocol::Http | Protocol::PlainHttp => Self::Http,
            Protocol::Tcp => Self::Reset,
        }
    }

    /// The form that most programs understand that connect to a port.
    pub fn of_port(port: u16) -> Self {
        match port {
            80 => Self::Http,
            443 => Self::TlsAlert,
            _ => Self::Reset,
        }
    }
}

/// Answers a program, and closes the connection.
pub async fn refuse<S: ClientStream>(
    client: &mut ProxyClient<S>,
    form: RefusalForm,
    to: &str,
    denial: &Denial,
) -> io::Result<()> {
    let answer = match form {
        RefusalForm::Http => http_answer(to, denial),
        RefusalForm::TlsAlert if denial.status != UNREACHABLE => ACCESS_DENIED.to_vec(),
        RefusalForm::TlsAlert | RefusalForm::Reset => {
            client.stream.reset();
            return Ok(());
        }
    };
    client.stream.write_all(&answer).await?;
    client.stream.shutdown().await?;
    // Closing a socket with unread bytes would reset it, and the program would lose the answer.
    let _ = timeout(LINGER, client.drain()).await;
    Ok(())
}

/// The reason of a refusal, and the command that allows what no rule names.
pub fn explanation(to: &str, denial: &Denial) -> String {
    let Denial { status, why } = denial;
    let to = fit_to_show(to);
    let verb = if *status == UNREACHABLE { "cannot" } else { "may not" };
    let mut text = format!("palisade: {to} {verb} be reached: {why}\n");
    // A rule would not help against a rule that denies, or where a request is malformed.
    if *status == 403 && (why.starts_with("no rule names") || why.starts_with(NO_ANSWER)) {
        let quote = if to.contains(' ') { "'" } else { "" };
        text.push_str(&format!("allow it: pal net allow <body> {quote}{to}{quote}\n"));
    }
    text
}

fn http_answer(to: &str, denial: &Denial) -> Vec<u8> {
    let (status, text) = (denial.status, explanation(to, denial));
    // Many programs print no more than the status line.
    let reason = if status == UNREACHABLE { "Unreachable" } else { "Denied by Palisade" };
    let len = text.len();
    format!(
        "HTTP/1.1 {status} {reason}\r\ncontent-type: text/plain\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{text}"
    )
    .into_bytes()
}
