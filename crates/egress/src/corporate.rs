//! Connections through the proxy of the operator's network, by CONNECT.
//!
//! Names go to that proxy as names, and it resolves them: whether they lead to inner addresses is its decision. Its own
//! address may be an inner one, because the operator chose it.
//!
//! Trust: the answer of the proxy is hostile: its head has a maximum length and a deadline, and only 200 counts.

use std::{io, rc::Rc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use proto::egress::{CorporateLogin, CorporateProxyOrder, NOT_PROXIED, fit_to_show};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use vault::{SealKey, Zeroizing};

use crate::{
    dial::{connect, resolved},
    name_cache::NameCache,
    names::NameTable,
    refusal::Denial,
    secrets::open_value,
    target::{Host, Target},
};

/// How long the proxy may take for its answer: it connects to the host meanwhile.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest head of an answer.
const HEAD_LEN_MAX: usize = 8 << 10;

/// The proxy of the operator's network.
pub struct CorporateProxy {
    address: Target,
    direct: Vec<String>,
    login: Option<Zeroizing<Vec<u8>>>,
    patience: Duration,
}

impl CorporateProxy {
    /// The proxy of orders; the error is the reason why it cannot be used.
    pub fn open(
        order: Option<&CorporateProxyOrder>,
        key: Option<&SealKey>,
    ) -> Result<Option<Rc<Self>>, String> {
        let Some(CorporateProxyOrder { address, direct, login }) = order else { return Ok(None) };
        let address = match address.parse() {
            Ok(literal) => Target::of_literal(literal),
            Err(_) => Target::parse(address, &NameTable::default())?,
        };
        let open = |CorporateLogin { name, sealed }: &CorporateLogin| {
            open_value(name, sealed, key).ok_or_else(|| {
                format!("the secret {name} cannot be opened: set it again with `pal secret set {name}`")
            })
        };
        let login = login.as_ref().map(open).transpose()?;
        Ok(Some(Rc::new(Self { address, direct: direct.clone(), login, patience: PATIENCE })))
    }

    /// Whether a target is reached through it.
    pub fn serves(&self, target: &Target) -> bool {
        let Host::Name(name) = &target.host else { return true };
        let is_direct = |direct: &String| match direct.starts_with('.') {
            true => name.ends_with(direct.as_str()),
            false => name == direct,
        };
        !self.direct.iter().any(is_direct)
    }

    /// Opens a connection to a target.
    pub async fn connect(&self, names: &NameCache, target: &Target) -> Result<TcpStream, Denial> {
        let cannot = |why: &str| Denial::unreachable(format!("{NOT_PROXIED} {} {why}", self.address));
        let addresses = resolved(names, &self.address).await;
        let addresses = addresses.map_err(|denial| cannot(&format!("is not found: {}", denial.why)))?;
        let connected = connect(&addresses, self.address.port).await;
        let mut stream = connected.ok_or_else(|| cannot("accepts no connection"))?;
        match timeout(self.patience, self.ask(&mut stream, target)).await {
            Ok(Ok(None)) => Ok(stream),
            Ok(Ok(Some(status))) => Err(cannot(&format!("refuses: {status}"))),
            Ok(Err(error)) => Err(cannot(&format!("gives no usable answer: {error}"))),
            Err(_) => Err(cannot("gives no answer in time")),
        }
    }

    /// Asks for a connection; the answer is the status of a refusal.
    async fn ask(&self, stream: &mut TcpStream, target: &Target) -> io::Result<Option<String>> {
        let mut request = Zeroizing::new(format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n"));
        let login = self.login.as_ref().map(|login| Zeroizing::new(STANDARD.encode(login.as_slice())));
        if let Some(login) = &login {
            request.push_str("proxy-authorization: Basic ");
            request.push_str(login);
            request.push_str("\r\n");
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).await?;
        let head = read_head(stream).await?;
        let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let status = line.strip_prefix(b"HTTP/1.1 ").or_else(|| line.strip_prefix(b"HTTP/1.0 "));
        let status = status.ok_or_else(|| io::Error::other("it is not HTTP"))?;
        if status == b"200" || status.starts_with(b"200 ") {
            return Ok(None);
        }
        // Programs of the Body read the reason, and the proxy may repeat what it was sent.
        let repeats = |text: &[u8]| memchr::memmem::find(status, text).is_some();
        let is_shown = !login.is_some_and(|login| repeats(login.as_bytes()))
            && !self.login.as_ref().is_some_and(|login| {
                let password = login.splitn(2, |byte| *byte == b':').last().unwrap_or_default();
                repeats(password)
            });
        let shown = if is_shown { status } else { status.get(..3).unwrap_or_default() };
        Ok(Some(fit_to_show(&String::from_utf8_lossy(shown))))
    }
}

/// Reads the head byte by byte, because bytes of the host follow.
async fn read_head(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == HEAD_LEN_MAX {
            return Err(io::Error::other("its head is too long"));
        }
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}

#[cfg(test)]
#[path = "corporate_tests.rs"]
mod tests;
