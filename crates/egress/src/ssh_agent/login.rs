//! Requests to log in by a key, and the session to which they belong.

use vault::ssh::{SshReader, verify};

/// The number of a request to log in (RFC 4252).
const USERAUTH_REQUEST: u8 = 50;
/// Longest id of a session: a hash.
const SESSION_LEN_MAX: usize = 64;

/// A request to log in, as a client signs it.
pub struct Login<'a> {
    pub session: &'a [u8],
    pub user: &'a [u8],
    pub algorithm: &'a [u8],
    pub key: &'a [u8],
    /// The key of the host, where the client names it.
    pub host_key: Option<&'a [u8]>,
}

impl<'a> Login<'a> {
    /// Reads the data of a sign request; none if it is anything else.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let mut reader = SshReader::new(data);
        let session = reader.string()?;
        if reader.byte()? != USERAUTH_REQUEST {
            return None;
        }
        let (user, service, method) = (reader.string()?, reader.string()?, reader.string()?);
        let has_signature = reader.byte()? == 1;
        let (algorithm, key) = (reader.string()?, reader.string()?);
        let host_key = match method {
            b"publickey" => None,
            b"publickey-hostbound-v00@openssh.com" => Some(reader.string()?),
            _ => return None,
        };
        let login = Self { session, user, algorithm, key, host_key };
        reader.finish(login).filter(|_| service == b"ssh-connection" && has_signature)
    }
}

/// The session for which a client of the agent asks.
#[derive(Debug, Default)]
pub enum BoundSession {
    /// The client has named none.
    #[default]
    None,
    /// The client named one that does not count. Nothing is signed for it any more.
    Refused(&'static str),
    /// The client named one that its host has signed.
    Bound(HostSession),
}

/// A session that a host has signed.
#[derive(Debug, PartialEq, Eq)]
pub struct HostSession {
    pub id: Vec<u8>,
    pub host_key: Vec<u8>,
    pub signature: Vec<u8>,
}

impl BoundSession {
    /// Takes the session that a client names, and returns whether it counts.
    pub fn bind(&mut self, host_key: &[u8], id: &[u8], signature: &[u8], forwards: bool) -> bool {
        let session = HostSession { id: id.into(), host_key: host_key.into(), signature: signature.into() };
        let refused = if forwards {
            Some("another host asks, to which the agent is forwarded")
        } else if id.is_empty() || id.len() > SESSION_LEN_MAX || !verify(host_key, signature, id) {
            Some("its host has not signed the session, or with a key of another type")
        } else {
            match self {
                Self::None => None,
                Self::Refused(why) => Some(*why),
                Self::Bound(bound) => (*bound != session).then_some("the client named two sessions"),
            }
        };
        *self = refused.map_or(Self::Bound(session), Self::Refused);
        refused.is_none()
    }

    /// The session, or the reason why there is none.
    pub fn bound(&self) -> Result<&HostSession, String> {
        match self {
            Self::None => {
                Err("the client does not name its session: OpenSSH 8.9 and later do, other programs do not"
                    .into())
            }
            Self::Refused(why) => Err((*why).into()),
            Self::Bound(session) => Ok(session),
        }
    }
}
