//! Resolves names to addresses: `/etc/hosts`, then the name servers of `/etc/resolv.conf`.
//!
//! It does not use the C library, because this program is static, and glibc's resolver then loads parts of itself
//! from the host at run time, which a confined process cannot and should not. Both files are read again for each
//! lookup, because a host that moves between networks changes them; `name_cache` keeps the answers.
//!
//! Absent on purpose: NSS modules (mDNS, LDAP), EDNS, and the search list for names that have a dot.
//! Trust: a name server may answer anything. No length is trusted, and only addresses of the requested name count.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};

pub const HOSTS: &str = "/etc/hosts";
pub const SERVERS: &str = "/etc/resolv.conf";
const FILE_LEN_MAX: u64 = 1 << 20;
const SERVERS_MAX: usize = 3;
const SEARCH_MAX: usize = 6;
const PORT: u16 = 53;
/// How long a server may take for one answer, and how often each is asked.
const PATIENCE: Duration = Duration::from_secs(4);
const ATTEMPTS: usize = 2;
/// Longest answer by UDP: without EDNS no server sends more.
const UDP_LEN_MAX: usize = 512;
/// Most aliases that are followed.
const ALIASES_MAX: usize = 16;

/// The record types that are queried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RecordType {
    A = 1,
    Aaaa = 28,
}
const CNAME: u16 = 5;
const INTERNET: u16 = 1;

/// The answer about a name.
#[derive(Debug, PartialEq, Eq)]
pub struct ResolvedName {
    /// Its addresses, IPv4 first: a host without IPv6 is more common than one without IPv4.
    pub addresses: Vec<IpAddr>,
    /// How long they may be kept.
    pub ttl: Duration,
}

impl ResolvedName {
    fn local(addresses: Vec<IpAddr>) -> Self {
        Self { addresses, ttl: Duration::ZERO }
    }
}

/// Looks a name up.
pub async fn resolve(name: &str) -> io::Result<ResolvedName> {
    let read = |path: &str| sys::fd::read_small(Path::new(path), FILE_LEN_MAX).unwrap_or_default();
    let known = find_in_hosts(&read(HOSTS), name);
    if !known.is_empty() {
        return Ok(ResolvedName::local(known));
    }
    // RFC 6761: these names are never sent to a server.
    if name == "localhost" || name.ends_with(".localhost") {
        return Ok(ResolvedName::local(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]));
    }
    Servers::parse(&read(SERVERS)).resolve(name).await
}

fn find_in_hosts(text: &str, name: &str) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut words = line.split('#').next().unwrap_or_default().split_ascii_whitespace();
        let Some(address) = words.next().and_then(|word| word.parse::<IpAddr>().ok()) else { continue };
        if words.any(|word| word.eq_ignore_ascii_case(name)) && !found.contains(&address) {
            found.push(address);
        }
    }
    found.sort_by_key(IpAddr::is_ipv6);
    found
}

/// The name servers of this host.
#[derive(Debug, PartialEq, Eq)]
struct Servers {
    addresses: Vec<SocketAddr>,
    /// Domains in which a name with too few dots is searched.
    search: Vec<String>,
    /// The number of dots from which on a name is complete.
    dots: usize,
}

/// A server's answer about one record type.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Addresses(ResolvedName),
    /// The name does not exist, or has no such record.
    Nothing,
}

impl Servers {
    fn parse(text: &str) -> Self {
        let mut servers = Self { addresses: Vec::new(), search: Vec::new(), dots: 1 };
        for line in text.lines() {
            let mut words = line.split(['#', ';']).next().unwrap_or_default().split_ascii_whitespace();
            match words.next() {
                Some("nameserver") => servers.addresses.extend(
                    words.next().and_then(parse_address).filter(|_| servers.addresses.len() < SERVERS_MAX),
                ),
                Some("search" | "domain") => {
                    servers.search = words.take(SEARCH_MAX).map(str::to_owned).collect();
                }
                Some("options") => {
                    let dots = words.find_map(|word| word.strip_prefix("ndots:")?.parse().ok());
                    servers.dots = dots.unwrap_or(servers.dots);
                }
                _ => {}
            }
        }
        if servers.addresses.is_empty() {
            servers.addresses.push((Ipv4Addr::LOCALHOST, PORT).into());
        }
        servers
    }

    async fn resolve(&self, name: &str) -> io::Result<ResolvedName> {
        let dots = name.matches('.').count();
        let mut names = Vec::new();
        if dots == 0 && dots < self.dots {
            names.extend(self.search.iter().map(|domain| format!("{name}.{}", domain.trim_matches('.'))));
        }
        names.push(name.to_owned());
        for name in names {
            let (v4, v6) = tokio::join!(self.ask(&name, RecordType::A), self.ask(&name, RecordType::Aaaa));
            let mut found = ResolvedName { addresses: Vec::new(), ttl: Duration::MAX };
            match (v4, v6) {
                (Err(error), Err(_)) => return Err(error),
                (v4, v6) => {
                    for reply in [v4, v6] {
                        if let Ok(Reply::Addresses(resolved)) = reply {
                            found.addresses.extend(resolved.addresses);
                            found.ttl = found.ttl.min(resolved.ttl);
                        }
                    }
                }
            }
            if !found.addresses.is_empty() {
                return Ok(found);
            }
        }
        Err(io::Error::new(io::ErrorKind::NotFound, "the name does not exist"))
    }

    /// Queries one server after the other until one answers.
    async fn ask(&self, name: &str, wanted: RecordType) -> io::Result<Reply> {
        let mut last = io::Error::from(io::ErrorKind::TimedOut);
        for server in std::iter::repeat_n(&self.addresses, ATTEMPTS).flatten() {
            let asked = timeout(PATIENCE, ask_server(*server, name, wanted)).await;
            match asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(reply) => return Ok(reply),
                Err(error) => last = error,
            }
        }
        Err(io::Error::new(last.kind(), format!("no name server answers: {last}")))
    }
}

fn parse_address(word: &str) -> Option<SocketAddr> {
    // A scope after a link-local address names an interface, which a socket address takes only as a number.
    let plain = word.split('%').next().unwrap_or(word);
    plain.parse::<IpAddr>().ok().map(|address| (address, PORT).into())
}

async fn ask_server(server: SocketAddr, name: &str, wanted: RecordType) -> io::Result<Reply> {
    let id = u16::from_ne_bytes(sys::random::bytes()?);
    let query = Query { id, name, wanted };
    let message = query.encode()?;
    let here: SocketAddr = match server {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(here).await?;
    // From here on the kernel drops packets of other hosts.
    socket.connect(server).await?;
    socket.send(&message).await?;
    let mut buffer = [0; UDP_LEN_MAX];
    loop {
        let len = socket.recv(&mut buffer).await?;
        match query.decode(&buffer[..len]) {
            // An answer to another query is forged or late.
            Err(DecodeError::Foreign) => {}
            Err(DecodeError::Truncated) => return ask_by_tcp(server, &query, &message).await,
            Err(DecodeError::Failed) => {
                return Err(io::Error::other("the name server failed or refused the query"));
            }
            Ok(reply) => return Ok(reply),
        }
    }
}

async fn ask_by_tcp(server: SocketAddr, query: &Query<'_>, message: &[u8]) -> io::Result<Reply> {
    let mut stream = TcpStream::connect(server).await?;
    let mut framed = (message.len() as u16).to_be_bytes().to_vec();
    framed.extend_from_slice(message);
    stream.write_all(&framed).await?;
    let len = stream.read_u16().await?;
    let mut answer = vec![0; usize::from(len)];
    stream.read_exact(&mut answer).await?;
    query.decode(&answer).map_err(|_| io::Error::other("the name server's answer is malformed"))
}

/// A query for one record type of one name.
struct Query<'a> {
    id: u16,
    name: &'a str,
    wanted: RecordType,
}

/// The reason why a message is no answer to a query.
#[derive(Debug, PartialEq, Eq)]
enum DecodeError {
    /// It answers another query, or is no answer.
    Foreign,
    /// It was truncated.
    Truncated,
    /// The server failed, or the message is malformed.
    Failed,
}

impl Query<'_> {
    fn encode(&self) -> io::Result<Vec<u8>> {
        // One question, with recursion desired.
        let mut message = self.id.to_be_bytes().to_vec();
        message.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
        for label in self.name.split('.') {
            let len = u8::try_from(label.len()).ok().filter(|len| (1..64).contains(len));
            message.push(len.ok_or(io::ErrorKind::InvalidInput)?);
            message.extend_from_slice(label.as_bytes());
        }
        message.push(0);
        message.extend_from_slice(&(self.wanted as u16).to_be_bytes());
        message.extend_from_slice(&INTERNET.to_be_bytes());
        Ok(message)
    }

    fn decode(&self, message: &[u8]) -> Result<Reply, DecodeError> {
        let mut reader = Reader { message, at: 0 };
        let header: Option<[u16; 6]> = (|| {
            let mut header = [0; 6];
            for word in &mut header {
                *word = reader.number()?;
            }
            Some(header)
        })();
        let Some([id, flags, questions, answers, ..]) = header else { return Err(DecodeError::Foreign) };
        let (is_answer, truncated, code) = (flags & 0x8000 != 0, flags & 0x0200 != 0, flags & 15);
        if id != self.id || !is_answer {
            return Err(DecodeError::Foreign);
        }
        let asked = (questions == 1)
            .then(|| Some((reader.name()?, reader.number()?, reader.number()?)))
            .flatten()
            .ok_or(DecodeError::Failed)?;
        if asked != (self.name.to_ascii_lowercase(), self.wanted as u16, INTERNET) {
            return Err(DecodeError::Foreign);
        }
        match code {
            _ if truncated => Err(DecodeError::Truncated),
            0 => self.addresses(reader, answers).ok_or(DecodeError::Failed),
            // NXDOMAIN.
            3 => Ok(Reply::Nothing),
            _ => Err(DecodeError::Failed),
        }
    }

    /// The addresses of the name itself, or of the name that it is an alias of.
    fn addresses(&self, mut reader: Reader<'_>, answers: u16) -> Option<Reply> {
        let (mut aliases, mut found) = (Vec::new(), Vec::new());
        let mut ttl = Duration::MAX;
        for _ in 0..answers {
            let owner = reader.name()?;
            let (kind, class) = (reader.number()?, reader.number()?);
            let seconds = <[u8; 4]>::try_from(reader.take(4)?).ok()?;
            ttl = ttl.min(Duration::from_secs(u32::from_be_bytes(seconds).into()));
            let len = usize::from(reader.number()?);
            let mut inner = Reader { at: reader.at, ..reader };
            let data = reader.take(len)?;
            match (kind, class) {
                (CNAME, INTERNET) => aliases.push((owner, inner.name()?)),
                (kind, INTERNET) if kind == self.wanted as u16 => found.push((owner, parse_record(data)?)),
                _ => {}
            }
        }
        let mut name = self.name.to_ascii_lowercase();
        for _ in 0..ALIASES_MAX {
            let addresses: Vec<IpAddr> =
                found.iter().filter(|(owner, _)| *owner == name).map(|(_, address)| *address).collect();
            if !addresses.is_empty() {
                return Some(Reply::Addresses(ResolvedName { addresses, ttl }));
            }
            match aliases.iter().find(|(owner, _)| *owner == name) {
                Some((_, target)) => name = target.clone(),
                None => break,
            }
        }
        Some(Reply::Nothing)
    }
}

fn parse_record(data: &[u8]) -> Option<IpAddr> {
    match data.len() {
        4 => <[u8; 4]>::try_from(data).ok().map(|octets| Ipv4Addr::from(octets).into()),
        16 => <[u8; 16]>::try_from(data).ok().map(|octets| Ipv6Addr::from(octets).into()),
        _ => None,
    }
}

/// Reads a message from front to back; names may point back.
#[derive(Clone, Copy)]
struct Reader<'a> {
    message: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(len)?;
        let taken = self.message.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn number(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Reads a name in lower case. Each compression pointer must point further to the front, so the loop ends.
    fn name(&mut self) -> Option<String> {
        let (mut name, mut jumped) = (String::new(), None);
        let mut limit = self.at;
        loop {
            let len = *self.take(1)?.first()?;
            match len {
                0 => break,
                1..=63 => {
                    let label = std::str::from_utf8(self.take(usize::from(len))?).ok()?;
                    if !name.is_empty() {
                        name.push('.');
                    }
                    name.push_str(label);
                    if name.len() > 253 {
                        return None;
                    }
                }
                192..=255 => {
                    let low = *self.take(1)?.first()?;
                    jumped.get_or_insert(self.at);
                    let target = usize::from(len & 63) << 8 | usize::from(low);
                    (target < limit).then_some(())?;
                    (limit, self.at) = (target, target);
                }
                _ => return None,
            }
        }
        self.at = jumped.unwrap_or(self.at);
        name.make_ascii_lowercase();
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUERY: Query<'static> = Query { id: 7, name: "a.test", wanted: RecordType::A };

    fn encoded(name: &str) -> Vec<u8> {
        name.split('.')
            .flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat())
            .chain([0])
            .collect()
    }

    /// An answer with these flags and records: owner, type, data.
    fn answer(query: &Query<'_>, flags: u16, records: &[(&str, u16, Vec<u8>)]) -> Vec<u8> {
        let mut message = query.encode().unwrap();
        message[2..4].copy_from_slice(&(0x8180 | flags).to_be_bytes());
        message[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
        for (owner, kind, data) in records {
            message.extend(encoded(owner));
            message.extend(
                [*kind, INTERNET, 0, 60, data.len() as u16].iter().flat_map(|word| word.to_be_bytes()),
            );
            message.extend(data);
        }
        message
    }

    #[test]
    fn only_addresses_of_the_name_and_of_its_aliases_count() {
        let address = |last: u8| vec![192, 0, 2, last];
        let found = |records: &[(&str, u16, Vec<u8>)]| QUERY.decode(&answer(&QUERY, 0, records));
        let these = |last: &[u8]| {
            let addresses = last.iter().map(|last| Ipv4Addr::new(192, 0, 2, *last).into()).collect();
            Ok(Reply::Addresses(ResolvedName { addresses, ttl: Duration::from_secs(60) }))
        };
        assert_eq!(found(&[("A.test", 1, address(1)), ("a.test", 1, address(2))]), these(&[1, 2]));
        assert_eq!(found(&[("evil.io", 1, address(9))]), Ok(Reply::Nothing));
        let aliases =
            [("b.test", 1, address(3)), ("a.test", CNAME, encoded("b.test")), ("c.test", 1, address(9))];
        assert_eq!(found(&aliases), these(&[3]));
        let circle = [("a.test", CNAME, encoded("b.test")), ("b.test", CNAME, encoded("a.test"))];
        assert_eq!(found(&circle), Ok(Reply::Nothing));
        assert_eq!(QUERY.decode(&answer(&QUERY, 3, &[])), Ok(Reply::Nothing), "no such name");
        assert_eq!(QUERY.decode(&answer(&QUERY, 2, &[])), Err(DecodeError::Failed), "the server failed");
        assert_eq!(QUERY.decode(&answer(&QUERY, 0x200, &[])), Err(DecodeError::Truncated));
    }

    #[test]
    fn messages_of_others_and_broken_ones_are_no_answers() {
        let good = answer(&QUERY, 0, &[("a.test", 1, vec![192, 0, 2, 1])]);
        assert!(matches!(QUERY.decode(&good), Ok(Reply::Addresses(_))));
        for len in 0..good.len() {
            assert!(QUERY.decode(&good[..len]).is_err(), "cut at {len}");
        }
        let other = |id, name| Query { id, name, wanted: RecordType::A };
        for query in
            [other(8, "a.test"), other(7, "b.test"), Query { wanted: RecordType::Aaaa, ..other(7, "a.test") }]
        {
            assert_eq!(query.decode(&good), Err(DecodeError::Foreign));
        }
        assert_eq!(
            QUERY.decode(&QUERY.encode().unwrap()),
            Err(DecodeError::Foreign),
            "a question is no answer"
        );
        // A name that points at itself, forwards, or in a circle of two.
        for pointer in [[0xc0, 24], [0xc0, 200], [0xff, 0xff]] {
            let mut bad = answer(&QUERY, 0, &[]);
            bad[7] = 1;
            bad.extend(pointer);
            bad.extend([0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1]);
            assert_eq!(QUERY.decode(&bad), Err(DecodeError::Failed), "{pointer:?}");
        }
        let mut pointed = answer(&QUERY, 0, &[]);
        pointed[7] = 1;
        pointed.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 1]);
        assert!(matches!(QUERY.decode(&pointed), Ok(Reply::Addresses(_))), "a pointer to the question");
    }

    #[test]
    fn the_files_of_the_host_are_read_as_others_read_them() {
        let hosts = "127.0.0.1 localhost\n::1 localhost ip6-localhost # x\n# 192.0.2.9 a.test\n192.0.2.1\tb.test A.test\n";
        assert_eq!(find_in_hosts(hosts, "a.test"), ["192.0.2.1".parse::<IpAddr>().unwrap()]);
        assert_eq!(find_in_hosts(hosts, "localhost").len(), 2);
        assert!(find_in_hosts(hosts, "test").is_empty());
        let text = "# nameserver 9.9.9.9\nnameserver 192.0.2.1\nnameserver ::1\nnameserver x\nsearch corp.test b.test\noptions edns0 ndots:2\n";
        let servers = Servers {
            addresses: vec!["192.0.2.1:53".parse().unwrap(), "[::1]:53".parse().unwrap()],
            search: vec!["corp.test".into(), "b.test".into()],
            dots: 2,
        };
        assert_eq!(Servers::parse(text), servers);
        assert_eq!(Servers::parse("").addresses, ["127.0.0.1:53".parse().unwrap()]);
    }

    /// A server that answers each query by UDP and by TCP with the result of `reply` for its name and type.
    async fn server(reply: fn(&str, u16, bool) -> (u16, Vec<u8>)) -> SocketAddr {
        let respond = move |message: &[u8], by_tcp: bool| {
            let mut reader = Reader { message, at: 12 };
            let (name, kind) = (reader.name().unwrap(), reader.number().unwrap());
            let wanted = if kind == 1 { RecordType::A } else { RecordType::Aaaa };
            let (flags, data) = reply(&name, kind, by_tcp);
            let query = Query { id: u16::from_be_bytes([message[0], message[1]]), name: &name, wanted };
            let records = [(name.as_str(), kind, data)];
            answer(&query, flags, if records[0].2.is_empty() { &[] } else { &records })
        };
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let place = udp.local_addr().unwrap();
        let tcp = tokio::net::TcpListener::bind(place).await.unwrap();
        tokio::spawn(async move {
            let mut buffer = [0; 512];
            while let Ok((len, from)) = udp.recv_from(&mut buffer).await {
                // A forged answer comes first.
                let mut forged = respond(&buffer[..len], false);
                forged[0] ^= 1;
                udp.send_to(&forged, from).await.unwrap();
                udp.send_to(&respond(&buffer[..len], false), from).await.unwrap();
            }
        });
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = tcp.accept().await {
                let mut message = vec![0; usize::from(stream.read_u16().await.unwrap())];
                stream.read_exact(&mut message).await.unwrap();
                let answer = respond(&message, true);
                stream.write_u16(answer.len() as u16).await.unwrap();
                stream.write_all(&answer).await.unwrap();
            }
        });
        place
    }

    #[tokio::test]
    async fn servers_are_asked_in_turn_by_udp_and_where_need_be_by_tcp() {
        let place = server(|name, kind, by_tcp| match (name, kind) {
            ("long.test", 1) if !by_tcp => (0x200, vec![]),
            ("long.test" | "host.corp.test", 1) => (0, vec![192, 0, 2, 1]),
            ("six.test", 28) => (0, Ipv6Addr::LOCALHOST.octets().to_vec()),
            ("broken.test", _) => (2, vec![]),
            _ => (3, vec![]),
        })
        .await;
        let servers = Servers { addresses: vec![place], search: vec!["corp.test".into()], dots: 1 };
        let minute = Duration::from_secs(60);
        let four = ResolvedName { addresses: vec![[192, 0, 2, 1].into()], ttl: minute };
        assert_eq!(servers.resolve("long.test").await.unwrap(), four);
        assert_eq!(
            servers.resolve("host").await.unwrap(),
            four,
            "a bare name is looked for in the search list"
        );
        assert_eq!(servers.resolve("six.test").await.unwrap().addresses, [IpAddr::from(Ipv6Addr::LOCALHOST)]);
        assert_eq!(servers.resolve("none.test").await.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(
            servers.resolve("broken.test").await.unwrap_err().to_string().contains("no name server answers")
        );
        let first_is_dead = Servers { addresses: vec!["127.0.0.1:1".parse().unwrap(), place], ..servers };
        assert_eq!(first_is_dead.resolve("long.test").await.unwrap(), four);
    }
}
