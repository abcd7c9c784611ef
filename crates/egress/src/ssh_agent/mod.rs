//! An ssh agent for programs of the Body: it signs with keys that the Body never sees, for logins at the hosts of their
//! secrets.
//!
//! It shares the proxy's socket. A message of an agent's client begins with its length, whose first byte is 0, and no
//! request of HTTP begins so.
//!
//! Invariant: it signs nothing but requests to log in (RFC 4252), for a user that the secret names, in a session that one
//! of the Body's own open connections to a host of the secret carries, and whose host has shown a key that the secret
//! knows. The signature is in the spool before it goes out.
//! Trust: every message is hostile. The session that a client names counts only with the host's signature of it, and that
//! signature must have come through such a connection: a session that another machine began gets no signature.

mod login;
mod opening;

use std::{
    cell::RefCell,
    io,
    rc::{Rc, Weak},
    time::Duration,
};

use proto::egress::{Decision, SshKeyOrder, SshLogin, is_secret_host};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};
use vault::{
    SealKey,
    ssh::{KnownHost, SshPrivateKey, SshReader, put_string},
};

pub use login::BoundSession;
pub use opening::{HostOpening, TappedWriter};

use crate::{
    client::{ClientStream, PATIENCE, ProxyClient},
    proxy::Proxy,
    target::{Host, Target},
};

/// How long a client may take for its next message: a person may type something between.
const PAUSE_MAX: Duration = Duration::from_secs(600);
/// Longest message.
const MESSAGE_LEN_MAX: usize = 32 << 10;

/// The messages of the protocol (draft-ietf-sshm-ssh-agent).
const FAILURE: u8 = 5;
const SUCCESS: u8 = 6;
const REQUEST_IDENTITIES: u8 = 11;
const IDENTITIES: u8 = 12;
const SIGN_REQUEST: u8 = 13;
const SIGNATURE: u8 = 14;
const EXTENSION: u8 = 27;
/// The extension by which a client names the session for which it asks.
const SESSION_BIND: &[u8] = b"session-bind@openssh.com";

/// The keys of the Body, and its connections to their hosts.
#[derive(Default)]
pub struct SshAgent {
    keys: RefCell<Vec<Rc<SshKey>>>,
    /// The first bytes of the hosts of open connections.
    openings: RefCell<Vec<Weak<HostOpening>>>,
}

/// A key, and the terms on which it logs in.
pub struct SshKey {
    name: String,
    hosts: Vec<String>,
    login: SshLogin,
    key: SshPrivateKey,
}

/// A signature that may go out.
#[derive(Debug, PartialEq, Eq)]
pub struct LoginSignature {
    /// The host at which it logs in, and the reason for the record.
    pub to: String,
    pub why: String,
    signature: Vec<u8>,
}

/// A refused signature.
#[derive(Debug, PartialEq, Eq)]
pub struct SignatureRefusal {
    pub to: String,
    pub why: String,
}

impl SshKey {
    /// Opens a key; none if it cannot be opened or read.
    fn open(order: &SshKeyOrder, key: &SealKey) -> Option<Rc<Self>> {
        let text = key.open(&format!("ssh key {}", order.name), &order.sealed).ok()?;
        let key = SshPrivateKey::parse(std::str::from_utf8(&text).ok()?).ok()?;
        let SshKeyOrder { name, hosts, login, .. } = order.clone();
        Some(Rc::new(Self { name, hosts, login, key }))
    }

    fn is_for(&self, target: &Target) -> bool {
        let Host::Name(name) = &target.host else { return false };
        self.hosts.iter().any(|host| is_secret_host(host, name, target.port))
    }

    /// Whether a host of the key is known to have this key.
    fn knows(&self, target: &Target, host_key: &[u8]) -> bool {
        let Host::Name(name) = &target.host else { return false };
        let label = vault::ssh::host_label(name, target.port);
        let known = self.login.host_keys.iter().filter_map(|line| KnownHost::parse(line));
        known.into_iter().any(|known| known.label == label && known.key == host_key)
    }
}

impl SshAgent {
    /// Takes the keys of new orders. One that cannot be opened is left out.
    pub fn set(&self, orders: &[SshKeyOrder], key: Option<&SealKey>) {
        let open = |order| key.and_then(|key| SshKey::open(order, key));
        *self.keys.borrow_mut() = orders.iter().filter_map(open).collect();
    }

    /// Keeps what the host of a connection says first, if it is a host of a key.
    pub fn watch(&self, target: &Target) -> Option<Rc<HostOpening>> {
        if !self.keys.borrow().iter().any(|key| key.is_for(target)) {
            return None;
        }
        let opening = Rc::new(HostOpening::of(target.clone()));
        let mut openings = self.openings.borrow_mut();
        openings.retain(|opening| opening.strong_count() > 0);
        openings.push(Rc::downgrade(&opening));
        Some(opening)
    }

    /// The answer to a message. The signature is not recorded yet.
    fn answer(&self, message: &[u8], session: &mut BoundSession) -> Result<AgentReply, SignatureRefusal> {
        let mut reader = SshReader::new(message);
        let reply = match reader.byte() {
            Some(REQUEST_IDENTITIES) => reader.finish(AgentReply::Message(self.identities())),
            Some(EXTENSION) => bind(reader, session).map(|()| AgentReply::Message(vec![SUCCESS])),
            Some(SIGN_REQUEST) => {
                let Some((key, data, flags)) = read_sign_request(reader) else {
                    return Ok(AgentReply::failure());
                };
                return self.sign(key, data, flags, session).map(AgentReply::Signed);
            }
            _ => None,
        };
        Ok(reply.unwrap_or_else(AgentReply::failure))
    }

    fn identities(&self) -> Vec<u8> {
        let keys = self.keys.borrow();
        let mut reply = vec![IDENTITIES];
        reply.extend(u32::try_from(keys.len()).unwrap_or_default().to_be_bytes());
        for key in keys.iter() {
            put_string(&mut reply, key.key.public());
            put_string(&mut reply, key.name.as_bytes());
        }
        reply
    }

    /// Signs a request to log in, or says why not.
    fn sign(
        &self,
        key: &[u8],
        data: &[u8],
        flags: u32,
        session: &BoundSession,
    ) -> Result<LoginSignature, SignatureRefusal> {
        let keys: Vec<Rc<SshKey>> =
            self.keys.borrow().iter().filter(|one| one.key.public() == key).cloned().collect();
        let mut refusal =
            SignatureRefusal { to: "?".into(), why: "it is the key of no ssh secret of the Body".into() };
        // Several secrets may have one key, for several hosts.
        for key in keys {
            match self.sign_with(&key, data, flags, session) {
                Ok(signed) => return Ok(signed),
                Err(why) => {
                    let why = format!("the secret {} does not sign: {why}", key.name);
                    refusal = SignatureRefusal { to: key.hosts.first().cloned().unwrap_or_default(), why };
                }
            }
        }
        Err(refusal)
    }

    fn sign_with(
        &self,
        key: &SshKey,
        data: &[u8],
        flags: u32,
        session: &BoundSession,
    ) -> Result<LoginSignature, String> {
        let algorithm = key.key.algorithm(flags).ok_or("the client asks for a signature with SHA-1")?;
        let login = login::Login::parse(data).ok_or("it is no request to log in by a key")?;
        if login.key != key.key.public() || login.algorithm != algorithm.as_bytes() {
            return Err("the request to log in names another key or algorithm".into());
        }
        let session = session.bound()?;
        if login.session != session.id || login.host_key.is_some_and(|named| named != session.host_key) {
            return Err("the request to log in belongs to another session".into());
        }
        let user = String::from_utf8_lossy(login.user);
        if !key.login.users.iter().any(|own| own.as_bytes() == login.user) {
            return Err(format!("it logs in as {}, and not as {user}", key.login.users.join(" or ")));
        }
        let openings = self.openings.borrow();
        let mut open =
            openings.iter().filter_map(Weak::upgrade).filter(|opening| key.is_for(&opening.target));
        let opening = open.find(|opening| opening.has(&session.signature));
        let Some(opening) = opening else {
            return Err("no open connection of the Body to a host of the secret carries the session".into());
        };
        if !key.knows(&opening.target, &session.host_key) {
            return Err(format!("the secret does not know the key that {} shows", opening.target));
        }
        let signature = key.key.sign(data, flags).ok_or("the key cannot sign")?;
        let why = format!("the secret {} logs in as {user}", key.name);
        Ok(LoginSignature { to: opening.target.to_string(), why, signature })
    }
}

enum AgentReply {
    Message(Vec<u8>),
    Signed(LoginSignature),
}

impl AgentReply {
    fn failure() -> Self {
        Self::Message(vec![FAILURE])
    }
}

fn read_sign_request(mut reader: SshReader<'_>) -> Option<(&[u8], &[u8], u32)> {
    let request = (reader.string()?, reader.string()?, reader.number()?);
    reader.finish(request)
}

fn bind(mut reader: SshReader<'_>, session: &mut BoundSession) -> Option<()> {
    if reader.string()? != SESSION_BIND {
        return None;
    }
    let (host_key, id, signature, forwards) =
        (reader.string()?, reader.string()?, reader.string()?, reader.byte()?);
    reader.finish(())?;
    session.bind(host_key, id, signature, forwards != 0).then_some(())
}

impl Proxy {
    /// Whether a connection to the proxy's socket is one of a client of an ssh agent.
    pub async fn is_agent_client<S: ClientStream>(&self, client: &mut ProxyClient<S>) -> io::Result<bool> {
        timeout(PATIENCE, client.read_more()).await.map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(client.ahead.first() == Some(&0))
    }

    /// Serves a client of an ssh agent to its end.
    pub async fn serve_agent<S: ClientStream>(&self, mut client: ProxyClient<S>) -> io::Result<()> {
        let mut session = BoundSession::default();
        loop {
            let message = timeout(PAUSE_MAX, read_message(&mut client))
                .await
                .map_err(|_| io::ErrorKind::TimedOut)??;
            let reply = self.reply_to_agent(&message, &mut session);
            let mut framed = Vec::new();
            put_string(&mut framed, &reply);
            client.write_all(&framed).await?;
        }
    }

    /// The reply to a message. A signature is recorded first.
    fn reply_to_agent(&self, message: &[u8], session: &mut BoundSession) -> Vec<u8> {
        match self.ssh.answer(message, session) {
            Ok(AgentReply::Message(reply)) => reply,
            Ok(AgentReply::Signed(LoginSignature { to, why, signature })) => {
                if self.journal.borrow_mut().record_each(&Decision::allowed(&to, &why)).is_err() {
                    return vec![FAILURE];
                }
                let mut reply = vec![SIGNATURE];
                put_string(&mut reply, &signature);
                reply
            }
            Err(SignatureRefusal { to, why }) => {
                // It is refused, whether that can be recorded or not.
                let _ = self.record(Decision::denied(&to, &why));
                vec![FAILURE]
            }
        }
    }
}

/// Answers messages of a client where there are no keys: nothing is signed.
#[cfg(feature = "fuzzing")]
pub fn answer_without_keys<'a>(messages: impl Iterator<Item = &'a [u8]>) {
    let (agent, mut session) = (SshAgent::default(), BoundSession::default());
    for message in messages {
        assert!(!matches!(agent.answer(message, &mut session), Ok(AgentReply::Signed(_))));
        let _ = login::Login::parse(message);
    }
}

async fn read_message<S: ClientStream>(client: &mut ProxyClient<S>) -> io::Result<Vec<u8>> {
    let len = client.read_u32().await?;
    let len =
        usize::try_from(len).ok().filter(|len| *len <= MESSAGE_LEN_MAX).ok_or(io::ErrorKind::InvalidData)?;
    let mut message = vec![0; len];
    client.read_exact(&mut message).await?;
    Ok(message)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
