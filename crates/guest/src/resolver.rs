//! Answers name lookups of a Body.
//!
//! A Body without an egress policy has no network but its loopback, and its programs ask a name server there: the answer
//! is "no such name", at once. Without an answer glibc reports a failure that may pass, so that package managers try for
//! minutes; musl waits for ten seconds. The names of `/etc/hosts` need no server. In a microVM with an egress policy, the
//! resolver of the host's egress proxy answers.
//!
//! Trust: queries come from programs of the Body. A reply of this module is never longer than the query.

use std::{
    cell::RefCell,
    net::{Ipv4Addr, UdpSocket as StdUdpSocket},
    rc::Rc,
    sync::Arc,
};

use tokio::{net::UdpSocket, sync::Semaphore};

use crate::name_tunnel::NameTunnel;

/// The address of the name server that programs ask if `/etc/resolv.conf` names none.
pub const ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 53);
/// Longest query without EDNS.
const QUERY_LEN_MAX: usize = 512;
const HEADER_LEN: usize = 12;
/// Queries that wait for the egress proxy at once; further ones wait in the socket.
const QUERIES_MAX: usize = 64;
/// The code of a reply whose server could not answer.
const SERVER_FAILURE: u8 = 2;
/// The code of the reply "no such name".
const NO_SUCH_NAME: u8 = 3;
/// The bit of a reply that was cut: the program asks again over TCP.
const TRUNCATED: u8 = 0x02;

/// The resolver of a guest.
#[derive(Debug, Default)]
pub struct Resolver {
    /// The way to the egress proxy's resolver, if it answers.
    names: RefCell<Option<Rc<NameTunnel>>>,
}

impl Resolver {
    /// Answers every lookup with "no such name" from now on.
    pub fn deny(&self) {
        self.names.replace(None);
    }

    /// Lets the egress proxy's resolver answer from now on.
    pub fn ask(&self, names: Rc<NameTunnel>) {
        self.names.replace(Some(names));
    }

    /// Answers queries for as long as the guest runs.
    pub async fn serve(self: Rc<Self>, socket: StdUdpSocket) {
        let Ok(socket) = socket.set_nonblocking(true).and_then(|()| UdpSocket::from_std(socket)) else {
            return;
        };
        let (socket, free) = (Rc::new(socket), Arc::new(Semaphore::new(QUERIES_MAX)));
        let mut buffer = [0; QUERY_LEN_MAX];
        loop {
            let Ok(turn) = free.clone().acquire_owned().await else { return };
            let Ok((len, from)) = socket.recv_from(&mut buffer).await else { return };
            let query = &buffer[..len];
            let Some(denial) = refuse(query, NO_SUCH_NAME) else { continue };
            let names = self.names.borrow().clone();
            let Some(names) = names else {
                // A program that has gone needs no answer.
                let _ = socket.send_to(&denial, from).await;
                continue;
            };
            let (socket, query) = (socket.clone(), query.to_vec());
            tokio::task::spawn_local(async move {
                if let Some(reply) = reply(&names, &query).await {
                    let _ = socket.send_to(&reply, from).await;
                }
                drop(turn);
            });
        }
    }
}

/// The reply of the egress proxy's resolver, as far as it fits.
async fn reply(names: &NameTunnel, query: &[u8]) -> Option<Vec<u8>> {
    match names.ask(query).await {
        None => refuse(query, SERVER_FAILURE),
        Some(reply) if reply.len() <= QUERY_LEN_MAX => Some(reply),
        Some(_) => {
            let mut cut = refuse(query, 0)?;
            cut[2] |= TRUNCATED;
            Some(cut)
        }
    }
}

/// A reply without records to a query; none if the message is not a query with one question.
fn refuse(query: &[u8], code: u8) -> Option<Vec<u8>> {
    let header = query.get(..HEADER_LEN)?;
    let (is_reply, questions) = (header[2] & 0x80 != 0, u16::from_be_bytes([header[4], header[5]]));
    if is_reply || questions != 1 {
        return None;
    }
    let mut end = HEADER_LEN;
    loop {
        match usize::from(*query.get(end)?) {
            0 => break,
            len @ 1..=63 => end += len + 1,
            _ => return None,
        }
    }
    // After the name come its type and its class.
    let mut reply = query.get(..end + 5)?.to_vec();
    // A reply, with the query's operation and its "recursion desired"; recursion available.
    reply[2] = 0x80 | (header[2] & 0x79);
    reply[3] = 0x80 | code;
    // No answers, authorities or additional records follow.
    reply[6..HEADER_LEN].fill(0);
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: &[u8] =
        b"\x12\x34\x01\x20\0\x01\0\0\0\0\0\x01\x01a\x04test\0\0\x1c\0\x01\0\0\x29\x04\xd0\0\0\0\0\0\0";

    #[test]
    fn a_query_is_denied_without_its_additional_records() {
        let expected = b"\x12\x34\x81\x83\0\x01\0\0\0\0\0\0\x01a\x04test\0\0\x1c\0\x01";
        assert_eq!(refuse(QUERY, NO_SUCH_NAME).unwrap(), expected);
    }

    #[test]
    fn other_messages_get_no_reply() {
        let deny = |query: &[u8]| refuse(query, NO_SUCH_NAME);
        assert_eq!(deny(&deny(QUERY).unwrap()), None, "two servers would answer each other for ever");
        for len in 0..deny(QUERY).unwrap().len() {
            assert_eq!(deny(&QUERY[..len]), None, "cut at {len}");
        }
        let mut pointer = QUERY.to_vec();
        pointer[12] = 0xc0;
        assert_eq!(deny(&pointer), None);
        let mut two = QUERY.to_vec();
        two[5] = 2;
        assert_eq!(deny(&two), None);
    }
}
