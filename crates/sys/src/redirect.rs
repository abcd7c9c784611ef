//! The redirect of a network namespace: every address is delivered to its own loopback, and the kernel sends each TCP
//! connection to one port there.
//!
//! The functions change the caller's network namespace, and need `CAP_NET_ADMIN` in the user namespace that owns it.
//!
//! Invariant: a connection to an address of the loopback itself is left alone, so servers of the namespace stay reachable.

use std::{
    io,
    mem::MaybeUninit,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, netlink, sockopt};

use crate::netlink::{Attribute, Message, attribute, nested, number, send, text};

/// The index of the loopback interface in every network namespace.
const LOOPBACK: u32 = 1;
/// The dummy address of IPv4 (RFC 7600). With none but the loopback's, resolvers that look for a configured address
/// (`AI_ADDRCONFIG`) answer no name with an IPv4 address.
const OWN_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
/// The name of the table, and of its only chain.
const TABLE: &str = "palisade";
/// The priority at which the kernel itself translates destinations.
const PRIORITY: i32 = -100;
const DNS_PORT: u16 = 53;

// Attributes of nf_tables, from `linux/netfilter/nf_tables.h`. `libc` has its other constants, but not these.
const TABLE_NAME: u16 = 1;
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_TYPE: u16 = 7;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const LIST_ELEMENT: u16 = 1;
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const META_REGISTER: u16 = 1;
const META_KEY: u16 = 2;
const COMPARE_REGISTER: u16 = 1;
const COMPARE_OPERATION: u16 = 2;
const COMPARE_DATA: u16 = 3;
const DATA_VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const VERDICT_CODE: u16 = 1;
const IMMEDIATE_REGISTER: u16 = 1;
const IMMEDIATE_DATA: u16 = 2;
const PAYLOAD_REGISTER: u16 = 1;
const PAYLOAD_BASE: u16 = 2;
const PAYLOAD_OFFSET: u16 = 3;
const PAYLOAD_LEN: u16 = 4;
const REDIRECT_REGISTER: u16 = 1;

/// A version of the Internet protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IpVersion {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl IpVersion {
    fn family(self) -> u8 {
        match self {
            Self::V4 => libc::AF_INET as u8,
            Self::V6 => libc::AF_INET6 as u8,
        }
    }

    fn netfilter_family(self) -> u8 {
        match self {
            Self::V4 => libc::NFPROTO_IPV4 as u8,
            Self::V6 => libc::NFPROTO_IPV6 as u8,
        }
    }

    fn loopback(self) -> Vec<u8> {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.octets().to_vec(),
            Self::V6 => Ipv6Addr::LOCALHOST.octets().to_vec(),
        }
    }
}

/// Delivers every address to the loopback: `ip route add local default dev lo src LOOPBACK`.
///
/// A program that asks for its own address learns the loopback's. Multicast of IPv4 stays unreachable, because a local
/// route would swallow it; IPv6 does not take it from a local route.
pub fn add_local_routes(version: IpVersion) -> io::Result<()> {
    let loopback = [
        attribute(libc::RTA_OIF, &LOOPBACK.to_ne_bytes()),
        attribute(libc::RTA_PREFSRC, &version.loopback()),
    ];
    let everything = route(version, libc::RTN_LOCAL, 0, &loopback);
    let multicast = route(version, libc::RTN_UNREACHABLE, 4, &[attribute(libc::RTA_DST, &[224, 0, 0, 0])]);
    match version {
        IpVersion::V4 => send(None, &[own_address(), multicast, everything]),
        IpVersion::V6 => send(None, &[everything]),
    }
}

/// `ip addr add OWN_ADDRESS/32 dev lo`.
fn own_address() -> Message {
    let address = OWN_ADDRESS.octets();
    let [a, b, c, d] = LOOPBACK.to_ne_bytes();
    // A `struct ifaddrmsg`: family, length of the prefix, flags, scope, and the index of the interface.
    let header = [libc::AF_INET as u8, 32, 0, libc::RT_SCOPE_HOST, a, b, c, d];
    let attributes = [attribute(libc::IFA_LOCAL, &address), attribute(libc::IFA_ADDRESS, &address)];
    Message::new(libc::RTM_NEWADDR, &header, &attributes).creates()
}

/// A message that creates a route to the addresses that share this many bits with its destination.
fn route(version: IpVersion, kind: u8, bits: u8, attributes: &[Attribute]) -> Message {
    let (table, scope) = (libc::RT_TABLE_LOCAL, libc::RT_SCOPE_HOST);
    // A `struct rtmsg`: family, lengths of destination and source, TOS, table, protocol, scope, kind, and flags.
    let header = [version.family(), bits, 0, 0, table, libc::RTPROT_STATIC, scope, kind, 0, 0, 0, 0];
    Message::new(libc::RTM_NEWROUTE, &header, attributes).creates()
}

/// Redirects every TCP connection that a program makes to another host to this port of the loopback; of IPv4 those and
/// the datagrams to port 53 to the loopback's port 53.
pub fn redirect(version: IpVersion, port: u16) -> io::Result<()> {
    let header = libc::NFT_PAYLOAD_NETWORK_HEADER;
    let mut rules = match version {
        IpVersion::V4 => vec![
            leave([load(header, 16, 1), compare(&[127])]),
            leave([load(header, 16, 4), compare(&OWN_ADDRESS.octets())]),
        ],
        IpVersion::V6 => vec![leave([load(header, 24, 16), compare(&version.loopback())])],
    };
    if version == IpVersion::V4 {
        rules.extend([libc::IPPROTO_UDP, libc::IPPROTO_TCP].map(redirect_names));
    }
    rules.push(redirect_all(port));
    let mut messages = vec![batch(libc::NFNL_MSG_BATCH_BEGIN), table(version), chain(version)];
    messages.extend(rules.iter().map(|expressions| rule(version, expressions)));
    messages.push(batch(libc::NFNL_MSG_BATCH_END));
    send(Some(netlink::NETFILTER), &messages)
}

/// The begin or the end of a batch, of which the kernel accepts all messages or none.
fn batch(kind: i32) -> Message {
    let subsystem = (libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes();
    // A `struct nfgenmsg`: family, version, and the subsystem.
    let header = [libc::AF_UNSPEC as u8, libc::NFNETLINK_V0 as u8, subsystem[0], subsystem[1]];
    Message::new(kind as u16, &header, &[])
}

/// A message that creates something of nf_tables.
fn create(version: IpVersion, kind: i32, attributes: &[Attribute]) -> Message {
    let header = [version.netfilter_family(), libc::NFNETLINK_V0 as u8, 0, 0];
    let kind = libc::NFNL_SUBSYS_NFTABLES << 8 | kind;
    Message::new(kind as u16, &header, attributes).creates()
}

fn table(version: IpVersion) -> Message {
    create(version, libc::NFT_MSG_NEWTABLE, &[text(TABLE_NAME, TABLE)])
}

/// The chain through which the first packet of each outgoing connection goes.
fn chain(version: IpVersion) -> Message {
    let hook = [number(HOOK_NUMBER, libc::NF_INET_LOCAL_OUT), number(HOOK_PRIORITY, PRIORITY)];
    let attributes = [
        text(CHAIN_TABLE, TABLE),
        text(CHAIN_NAME, TABLE),
        nested(CHAIN_HOOK, &hook),
        text(CHAIN_TYPE, "nat"),
    ];
    create(version, libc::NFT_MSG_NEWCHAIN, &attributes)
}

fn rule(version: IpVersion, expressions: &[Attribute]) -> Message {
    let attributes =
        [text(RULE_TABLE, TABLE), text(RULE_CHAIN, TABLE), nested(RULE_EXPRESSIONS, expressions)];
    create(version, libc::NFT_MSG_NEWRULE, &attributes)
}

/// `ip daddr … return`: connections to these destinations stay as they are.
fn leave(destinations: [Attribute; 2]) -> Vec<Attribute> {
    let code = nested(DATA_VERDICT, &[number(VERDICT_CODE, libc::NFT_RETURN)]);
    [&destinations[..], &[immediate(libc::NFT_REG_VERDICT, code)]].concat()
}

/// `udp dport 53 redirect to :53`, or `tcp dport 53 redirect to :53`.
fn redirect_names(protocol: i32) -> Vec<Attribute> {
    // Both protocols have the destination's port at this place.
    let port = [load(libc::NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2), compare(&DNS_PORT.to_be_bytes())];
    [&is_protocol(protocol)[..], &port, &redirect_to(DNS_PORT)].concat()
}

/// `meta l4proto tcp redirect to :PORT`.
fn redirect_all(port: u16) -> Vec<Attribute> {
    [is_protocol(libc::IPPROTO_TCP), redirect_to(port)].concat()
}

fn is_protocol(protocol: i32) -> [Attribute; 2] {
    let key = [number(META_REGISTER, libc::NFT_REG_1), number(META_KEY, libc::NFT_META_L4PROTO)];
    [expression("meta", &key), compare(&[protocol as u8])]
}

fn redirect_to(port: u16) -> [Attribute; 2] {
    let value = attribute(DATA_VALUE, &port.to_be_bytes());
    let register = [number(REDIRECT_REGISTER, libc::NFT_REG_1)];
    [immediate(libc::NFT_REG_1, value), expression("redir", &register)]
}

/// Loads bytes of the packet into the register.
fn load(base: i32, offset: i32, len: i32) -> Attribute {
    let what = [
        number(PAYLOAD_REGISTER, libc::NFT_REG_1),
        number(PAYLOAD_BASE, base),
        number(PAYLOAD_OFFSET, offset),
        number(PAYLOAD_LEN, len),
    ];
    expression("payload", &what)
}

/// Ends the rule unless the register has this value.
fn compare(value: &[u8]) -> Attribute {
    let how = [
        number(COMPARE_REGISTER, libc::NFT_REG_1),
        number(COMPARE_OPERATION, libc::NFT_CMP_EQ),
        nested(COMPARE_DATA, &[attribute(DATA_VALUE, value)]),
    ];
    expression("cmp", &how)
}

fn immediate(register: i32, data: Attribute) -> Attribute {
    let what = [number(IMMEDIATE_REGISTER, register), nested(IMMEDIATE_DATA, &[data])];
    expression("immediate", &what)
}

fn expression(name: &str, data: &[Attribute]) -> Attribute {
    nested(LIST_ELEMENT, &[text(EXPRESSION_NAME, name), nested(EXPRESSION_DATA, data)])
}

/// Listens for TCP connections on an address.
pub fn listen(address: SocketAddr, backlog: i32) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

/// The address to which a program connected before the kernel redirected the connection; of a connection that was made
/// to the listener itself, the listener's address.
pub fn original_destination(connection: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    match SocketAddr::try_from(rustix::net::getsockname(connection)?)? {
        SocketAddr::V4(_) => {
            // SAFETY: SO_ORIGINAL_DST of IPv4 writes a `sockaddr_in`.
            let found: libc::sockaddr_in =
                unsafe { read_option(connection, libc::SOL_IP, libc::SO_ORIGINAL_DST) }?;
            let address = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
            Ok((address, u16::from_be(found.sin_port)).into())
        }
        SocketAddr::V6(_) => {
            // SAFETY: SO_ORIGINAL_DST of IPv6 writes a `sockaddr_in6`.
            let found: libc::sockaddr_in6 =
                unsafe { read_option(connection, libc::SOL_IPV6, libc::IP6T_SO_ORIGINAL_DST) }?;
            Ok((Ipv6Addr::from(found.sin6_addr.s6_addr), u16::from_be(found.sin6_port)).into())
        }
    }
}

/// Reads an option of a socket.
///
/// # Safety
///
/// The kernel must write a value of type `T` for the option, for which every pattern of bytes is valid.
unsafe fn read_option<T>(socket: BorrowedFd<'_>, level: i32, option: i32) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is the size of the value.
    let read = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, value.as_mut_ptr().cast(), &raw mut len)
    };
    if read < 0 {
        return Err(io::Error::last_os_error());
    }
    if len as usize != size_of::<T>() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // SAFETY: all bytes were written, by the kernel or as zeroes, and by contract each pattern is valid.
    Ok(unsafe { value.assume_init() })
}

#[cfg(test)]
mod tests {
    use std::{
        io::Read,
        net::{TcpListener, TcpStream, UdpSocket},
        os::fd::AsFd,
        process::Command,
    };

    use super::*;

    const PORT: u16 = 15001;
    /// Says to this test program that it runs in its own network namespace.
    const INSIDE: &str = "PALISADE_TEST_REDIRECT";

    /// Runs a test of this program again, in new user and network namespaces; the reason if none can be made.
    fn run_inside(name: &str, wrapper: &[&str]) -> Result<(), String> {
        let namespaces = ["unshare", "--user", "--map-root-user", "--net"];
        let unshare = |command: &[&str]| {
            let words = [wrapper, &namespaces, command].concat();
            Command::new(words[0]).args(&words[1..]).env(INSIDE, "1").output().unwrap()
        };
        let possible = unshare(&["true"]);
        if !possible.status.success() {
            return Err(String::from_utf8_lossy(&possible.stderr).into_owned());
        }
        let program = std::env::current_exe().unwrap();
        let ended = unshare(&[program.to_str().unwrap(), "--exact", name, "--nocapture"]);
        let said = [ended.stdout, ended.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(ended.status.success() && said.contains("1 passed"), "{said}");
        Ok(())
    }

    fn is_inside() -> bool {
        std::env::var_os(INSIDE).is_some()
    }

    fn redirect_everything() {
        crate::namespace::loopback_up().unwrap();
        for version in [IpVersion::V4, IpVersion::V6] {
            redirect(version, PORT).unwrap();
            add_local_routes(version).unwrap();
        }
    }

    /// Connects to an address, and returns the destination of the connection that the listener then has.
    fn arrives(listener: &TcpListener, to: &str) -> SocketAddr {
        let near = TcpStream::connect(to).unwrap();
        let (far, from) = listener.accept().unwrap();
        assert_eq!(near.local_addr().unwrap(), from);
        assert!(from.ip().is_loopback(), "{from}");
        original_destination(far.as_fd()).unwrap()
    }

    fn check_connections() {
        let [v4, v6] =
            ["127.0.0.1", "[::1]"].map(|host| format!("{host}:{PORT}").parse::<SocketAddr>().unwrap());
        let [own4, own6] = [v4, v6].map(|address| TcpListener::from(listen(address, 8).unwrap()));
        for (listener, to) in [
            (&own4, "203.0.113.1:80"),
            (&own4, "198.18.0.7:22"),
            (&own6, "[2001:db8::1]:80"),
            (&own6, "[2001:db8::1]:53"),
        ] {
            assert_eq!(arrives(listener, to), to.parse().unwrap());
        }
        // A connection to the listener itself shows the listener.
        assert_eq!((arrives(&own4, &v4.to_string()), arrives(&own6, &v6.to_string())), (v4, v6));
    }

    fn check_names() {
        let (udp, tcp) =
            (UdpSocket::bind("127.0.0.1:53").unwrap(), TcpListener::bind("127.0.0.1:53").unwrap());
        let client = UdpSocket::bind("0.0.0.0:0").unwrap();
        client.connect("8.8.8.8:53").unwrap();
        client.send(b"?").unwrap();
        let (_, from) = udp.recv_from(&mut [0; 1]).unwrap();
        udp.send_to(b"!", from).unwrap();
        // The socket is connected, so the answer comes from the address that was asked.
        assert_eq!(client.recv(&mut [0; 1]).unwrap(), 1);
        assert_eq!(arrives(&tcp, "8.8.8.8:53"), "8.8.8.8:53".parse().unwrap());
    }

    fn check_refusals() {
        for (own, to) in [
            ("0.0.0.0:0", "203.0.113.1:443"),
            ("[::]:0", "[2001:db8::1]:443"),
            ("[::]:0", "[2001:db8::1]:53"),
        ] {
            let client = UdpSocket::bind(own).unwrap();
            client.connect(to).unwrap();
            client.send(b"?").unwrap();
            let error = client.recv(&mut [0; 1]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}");
        }
        let multicast = UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"?", "224.0.0.251:5353").unwrap_err();
        assert_eq!(multicast.kind(), io::ErrorKind::HostUnreachable);
    }

    fn check_own_servers() {
        let server = TcpListener::bind("0.0.0.0:443").unwrap();
        let mut near = TcpStream::connect("127.0.0.2:443").unwrap();
        drop(server.accept().unwrap());
        assert_eq!(near.read(&mut [0; 1]).unwrap(), 0);
        TcpStream::connect((OWN_ADDRESS, 443)).unwrap();
        drop(server.accept().unwrap());
        let nothing = TcpStream::connect("127.0.0.1:1").unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn every_connection_arrives_and_tells_its_destination() {
        let name = "redirect::tests::every_connection_arrives_and_tells_its_destination";
        if is_inside() {
            redirect_everything();
            check_connections();
            check_names();
            check_refusals();
            check_own_servers();
            return;
        }
        let ordinary = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"];
        let wrappers: &[&[&str]] = if crate::caps::is_host_root() { &[&[], &ordinary] } else { &[&[]] };
        for wrapper in wrappers {
            if let Err(reason) = run_inside(name, wrapper) {
                eprintln!("skipped: no namespaces here: {reason}");
            }
        }
    }

    #[test]
    fn a_connection_without_a_redirect_has_no_other_destination() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        // Only a namespace with a redirect follows its connections.
        let found = original_destination(far.as_fd());
        assert!(found.is_err() || found.is_ok_and(|found| found == listener.local_addr().unwrap()));
    }

    #[test]
    fn without_rights_nothing_is_redirected() {
        let name = "redirect::tests::without_rights_nothing_is_redirected";
        if is_inside() {
            crate::caps::limit_to(rustix::thread::CapabilitySet::empty()).unwrap();
            let denied = |done: io::Result<()>| done.unwrap_err().kind() == io::ErrorKind::PermissionDenied;
            assert!(denied(redirect(IpVersion::V4, PORT)) && denied(add_local_routes(IpVersion::V6)));
        } else if let Err(reason) = run_inside(name, &[]) {
            eprintln!("skipped: no namespaces here: {reason}");
        }
    }
}
