//! The Body's resolver: it answers a name that a rule covers with an address that stands for the name, and asks no other
//! server. The name is resolved on the host when a program connects.
//!
//! Invariant: nothing of a question leaves this process, so a name carries no message to the owner of its zone.
//! Invariant: an address is in the spool before the program learns of it.
//! Absent on purpose: records other than addresses. An HTTPS record would bring the keys for TLS hellos that hide their
//! server name.

use std::{io, net::Ipv4Addr, rc::Rc, sync::Arc, time::Duration};

use proto::egress::{Decision, canonical_name};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    time::timeout,
};

use crate::{
    client::{ClientStream, ProxyClient},
    dns_message::{
        A, AAAA, DnsRecord, HTTPS, INTERNET, MESSAGE_LEN_MAX, PTR, Query, ResponseCode, SVCB, parse,
    },
    proxy::{Proxy, accept_all},
};

/// Connections with DNS messages at once.
const STREAMS_MAX: usize = 32;
/// How long such a connection may be quiet.
const QUIET_MAX: Duration = Duration::from_secs(20);
/// The pause after a failed receive.
const RECEIVE_PAUSE: Duration = Duration::from_millis(50);

type DnsAnswer = (ResponseCode, Option<DnsRecord>);

impl Proxy {
    /// Answers DNS messages over UDP forever.
    pub async fn resolve_datagrams(self: Rc<Self>, socket: UdpSocket) {
        // One byte more tells a message that is too long.
        let mut buffer = [0; MESSAGE_LEN_MAX + 1];
        loop {
            match socket.recv_from(&mut buffer).await {
                Ok((len, from)) => {
                    if let Some(answer) = self.resolve_message(&buffer[..len]) {
                        let _ = socket.send_to(&answer, from).await;
                    }
                }
                Err(_) => tokio::time::sleep(RECEIVE_PAUSE).await,
            }
        }
    }

    /// Answers DNS messages over TCP forever.
    pub async fn resolve_streams(self: Rc<Self>, listener: TcpListener) {
        let free = Arc::new(Semaphore::new(STREAMS_MAX));
        accept_all(
            &free,
            || listener.accept(),
            |(stream, _): (TcpStream, _)| {
                let proxy = Rc::clone(&self);
                async move { proxy.resolve_stream(&mut ProxyClient::new(stream)).await }
            },
        )
        .await;
    }

    /// Answers messages on a stream, each behind its length, until the program closes it.
    pub async fn resolve_stream<S: ClientStream>(&self, client: &mut ProxyClient<S>) -> io::Result<()> {
        loop {
            let message = timeout(QUIET_MAX, read_message(client));
            let message = message.await.map_err(|_| io::ErrorKind::TimedOut)??;
            // The guest of a microVM sends the messages of all programs on one stream, so a bad one does not end it.
            let Some(answer) = self.resolve_message(&message) else { continue };
            let framed = [&(answer.len() as u16).to_be_bytes()[..], &answer].concat();
            client.stream.write_all(&framed).await?;
        }
    }

    /// The answer to a message, if it deserves one.
    pub fn resolve_message(&self, message: &[u8]) -> Option<Vec<u8>> {
        match parse(message) {
            Err(answer) => answer,
            Ok(query) => {
                let (code, record) = self.resolve_query(&query);
                Some(query.answer(code, record.as_ref()))
            }
        }
    }

    fn resolve_query(&self, query: &Query<'_>) -> DnsAnswer {
        let name = query.name.as_str();
        if query.class != INTERNET {
            return (ResponseCode::Refused, None);
        }
        if name == "localhost" || name.ends_with(".localhost") {
            let here = (query.kind == A).then_some(DnsRecord::Address(Ipv4Addr::LOCALHOST));
            return (ResponseCode::NoError, here);
        }
        if name.ends_with(".in-addr.arpa") || name.ends_with(".ip6.arpa") {
            return self.resolve_address(query);
        }
        let resolves = canonical_name(name).is_some_and(|name| self.policy.borrow().resolves(&name));
        match query.kind {
            _ if !resolves => self.deny_name(name, "no rule names it", ResponseCode::NameError),
            A => self.name_address(name),
            AAAA | HTTPS | SVCB => (ResponseCode::NoError, None),
            _ => (ResponseCode::Refused, None),
        }
    }

    /// The name that an address stands for.
    fn resolve_address(&self, query: &Query<'_>) -> DnsAnswer {
        let address = query.name.strip_suffix(".in-addr.arpa").and_then(parse_reversed);
        let name = address.and_then(|address| match address {
            Ipv4Addr::LOCALHOST => Some("localhost".to_owned()),
            address => self.names.borrow().name_of(address).map(str::to_owned),
        });
        match name {
            Some(name) => (ResponseCode::NoError, (query.kind == PTR).then_some(DnsRecord::Name(name))),
            None => (ResponseCode::NameError, None),
        }
    }

    /// The address that stands for a name.
    fn name_address(&self, name: &str) -> DnsAnswer {
        let record = |address: Ipv4Addr| self.journal.borrow_mut().record_name(name, address.into());
        match self.names.borrow_mut().address_of(name, record) {
            Ok(Some(address)) => (ResponseCode::NoError, Some(DnsRecord::Address(address))),
            Ok(None) => {
                self.deny_name("?", "the Body has asked for too many names", ResponseCode::ServerFailure)
            }
            Err(_) => (ResponseCode::ServerFailure, None),
        }
    }

    /// Records that a program asked for a name that it may not reach.
    fn deny_name(&self, name: &str, why: &str, code: ResponseCode) -> DnsAnswer {
        match self.record(Decision::denied(name, why)) {
            Ok(()) => (code, None),
            Err(_) => (ResponseCode::ServerFailure, None),
        }
    }
}

/// Reads a message behind its length.
async fn read_message<S: ClientStream>(client: &mut ProxyClient<S>) -> io::Result<Vec<u8>> {
    let mut len = [0; 2];
    fill(client, &mut len).await?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(len))];
    fill(client, &mut message).await?;
    Ok(message)
}

/// Fills a buffer, first with the bytes that were read ahead.
async fn fill<S: ClientStream>(client: &mut ProxyClient<S>, buffer: &mut [u8]) -> io::Result<()> {
    let len = client.ahead.len().min(buffer.len());
    let (ahead, rest) = buffer.split_at_mut(len);
    ahead.copy_from_slice(&client.ahead[..len]);
    client.ahead.drain(..len);
    client.stream.read_exact(rest).await?;
    Ok(())
}

/// Reads an address whose four numbers stand in reverse order.
fn parse_reversed(text: &str) -> Option<Ipv4Addr> {
    let mut parts: Vec<&str> = text.split('.').collect();
    parts.reverse();
    parts.join(".").parse().ok()
}

#[cfg(test)]
#[path = "dns_tests.rs"]
mod tests;
