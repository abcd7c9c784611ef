//! The network: connections, listeners, and requests to the kernel.
//!
//! Invariant: nothing leaves the host. Routes are judged by connecting a datagram socket, which sends
//! nothing.

use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::time::Duration;

use super::{behind, settle};
use crate::catalog::{Probe, ProbeCall};
use crate::sys::{self, Errno, call};
use crate::verdict::{ProbeOutcome, absent, broken, denied, judge, judge_more, reached};

const WAIT: Duration = Duration::from_secs(2);

pub const PROBES: &[Probe] = &behind(
    "network",
    [
        Probe::door("tcp-loopback", "a listener of the host on 127.0.0.1", |c| {
            loopback(c, "port", "127.0.0.1")
        })
        .needs(&["port"]),
        Probe::door("tcp6-loopback", "a listener of the host on ::1", |c| loopback(c, "port6", "::1"))
            .needs(&["port6"]),
        Probe::door(
            "tcp-host-address",
            "a listener on another address of the host itself (addr=IP:PORT)",
            |c| match c.arg("addr").parse() {
                Ok(address) => tcp(address),
                Err(_) => broken("addr= is not IP:PORT"),
            },
        )
        .needs(&["addr"]),
        Probe::door("udp-loopback", "a datagram to the host on 127.0.0.1 (the test answers it)", udp)
            .needs(&["udp_port"]),
        Probe::door("listener-table", "see the host's listener in /proc/net/tcp", listener_table)
            .needs(&["port"]),
        Probe::door("unix-path", "a Unix socket of the host by its path", |c| {
            connect_unix(c.arg("unix_path"))
        })
        .needs(&["unix_path"]),
        Probe::door("unix-abstract", "a Unix socket of the host by its abstract name", unix_abstract)
            .needs(&["abstract"]),
        Probe::door("unix-table", "see that socket in /proc/net/unix", unix_table).needs(&["abstract"]),
        Probe::user("route-outside", "a route to a documentation address (nothing is sent)", |_| {
            route("192.0.2.1")
        }),
        Probe::user("route-outside6", "the same for IPv6", |_| route("2001:db8::1")),
        Probe::user("route-metadata", "a route to the cloud's metadata service (nothing is sent)", |_| {
            route("169.254.169.254")
        }),
        Probe::user("interfaces", "an interface other than lo that is up", interfaces),
        Probe::host("socket-raw", "raw IPv4", |_| socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP)),
        Probe::host("socket-raw6", "raw IPv6", |_| {
            socket(libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6)
        }),
        Probe::host("socket-packet", "packets of every interface", |_| {
            socket(libc::AF_PACKET, libc::SOCK_RAW, 0)
        }),
        Probe::user("socket-vsock", "the hypervisor", |_| socket(libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
        Probe::user("socket-alg", "the kernel's cryptography", |_| {
            socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0)
        }),
        Probe::user("socket-bluetooth", "Bluetooth", |_| socket(libc::AF_BLUETOOTH, libc::SOCK_RAW, 1)),
        Probe::host("socket-can", "CAN", |_| socket(libc::AF_CAN, libc::SOCK_RAW, 1)),
        Probe::user("socket-tipc", "TIPC", |_| socket(libc::AF_TIPC, libc::SOCK_STREAM, 0)),
        Probe::host("socket-key", "IPsec keys", |_| socket(libc::AF_KEY, libc::SOCK_RAW, 2)),
        Probe::host("socket-xdp", "XDP", |_| socket(libc::AF_XDP, libc::SOCK_RAW, 0)),
        Probe::user("socket-rds", "RDS", |_| socket(libc::AF_RDS, libc::SOCK_SEQPACKET, 0)),
        Probe::user("socket-sctp", "SCTP", |_| socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_SCTP)),
        Probe::user("socket-dccp", "DCCP", |_| socket(libc::AF_INET, 6, libc::IPPROTO_DCCP)),
        Probe::user("socket-any-family", "any family but UNIX, INET, INET6 and NETLINK", any_family),
        Probe::user("netlink-audit", "the audit system", |_| netlink(libc::NETLINK_AUDIT)),
        Probe::user("netlink-xfrm", "IPsec policies", |_| netlink(libc::NETLINK_XFRM)),
        Probe::user("netlink-netfilter", "the firewall", |_| netlink(libc::NETLINK_NETFILTER)),
        Probe::user("netlink-uevent", "device events", |_| netlink(libc::NETLINK_KOBJECT_UEVENT)),
        Probe::user("netlink-connector", "process events", |_| netlink(libc::NETLINK_CONNECTOR)),
        Probe::user("netlink-generic", "generic netlink", |_| netlink(libc::NETLINK_GENERIC)),
        Probe::user("netlink-sock-diag", "sockets of others", |_| netlink(libc::NETLINK_SOCK_DIAG)),
        Probe::user("netlink-crypto", "the kernel's algorithms", |_| netlink(libc::NETLINK_CRYPTO)),
    ],
);

/// The errors of a closed network.
const CLOSED: &[i32] = &[
    libc::ECONNREFUSED,
    libc::ENETUNREACH,
    libc::EHOSTUNREACH,
    libc::EADDRNOTAVAIL,
    libc::ENETDOWN,
    libc::ETIMEDOUT,
    libc::EINPROGRESS,
    libc::EAGAIN,
];

fn connected<T>(what: &str, outcome: std::io::Result<T>) -> ProbeOutcome {
    let timed_out = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::TimedOut => Errno(libc::ETIMEDOUT),
        _ => Errno::from(e),
    };
    judge_more(what, outcome.map(|_| 0).map_err(timed_out), &[], CLOSED)
}

fn tcp(address: SocketAddr) -> ProbeOutcome {
    connected("connect", TcpStream::connect_timeout(&address, WAIT))
}

fn loopback(call: &ProbeCall<'_>, key: &str, address: &str) -> ProbeOutcome {
    settle((|| {
        let port = call.number(key)?;
        let address: IpAddr = address.parse().map_err(|_| broken("bad address"))?;
        Ok(tcp(SocketAddr::new(address, port)))
    })())
}

fn udp(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let port: u16 = call.number("udp_port")?;
        let asked = || {
            let socket = UdpSocket::bind(("127.0.0.1", 0))?;
            socket.connect(("127.0.0.1", port))?;
            socket.set_read_timeout(Some(WAIT))?;
            socket.send(b"probe")?;
            socket.recv(&mut [0; 16])
        };
        Ok(connected("ask and be answered", asked()))
    })())
}

/// A listener is a line in state 0A with the local port.
fn listener_table(call: &ProbeCall<'_>) -> ProbeOutcome {
    settle((|| {
        let port: u16 = call.number("port")?;
        let wanted = format!(":{port:04X}");
        let table =
            std::fs::read_to_string("/proc/self/net/tcp").map_err(|e| judge("read", Err(e.into()), &[]))?;
        let matches = |line: &str| {
            let mut fields = line.split_whitespace().skip(1);
            fields.next().is_some_and(|local| local.ends_with(&wanted)) && fields.nth(1) == Some("0A")
        };
        let seen = table.lines().any(matches);
        Ok(if seen { reached("the listener is listed") } else { denied("the listener is not listed") })
    })())
}

/// Connects to the Unix socket at the probe's path.
pub fn connect_target(call: &ProbeCall<'_>) -> ProbeOutcome {
    connect_unix(call.target)
}

fn connect_unix(path: &str) -> ProbeOutcome {
    match UnixStream::connect(path) {
        // A datagram socket exists and can be reached, only not as a stream.
        Err(e) if e.raw_os_error() == Some(libc::EPROTOTYPE) => {
            reached("connect: EPROTOTYPE, so it is there")
        }
        outcome => connected("connect", outcome),
    }
}

fn unix_abstract(call: &ProbeCall<'_>) -> ProbeOutcome {
    let address = UnixAddr::from_abstract_name(call.arg("abstract"));
    connected("connect", address.and_then(|a| UnixStream::connect_addr(&a)))
}

fn unix_table(call: &ProbeCall<'_>) -> ProbeOutcome {
    let wanted = format!("@{}", call.arg("abstract"));
    match std::fs::read_to_string("/proc/self/net/unix") {
        Ok(table) if table.lines().any(|l| l.split_whitespace().last() == Some(&wanted)) => {
            reached("it is listed")
        }
        Ok(_) => denied("it is not listed"),
        Err(error) => judge("read", Err(error.into()), &[]),
    }
}

fn route(address: &str) -> ProbeOutcome {
    let Ok(address) = address.parse::<IpAddr>() else { return broken("bad address") };
    let any = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    connected("connect a datagram socket", UdpSocket::bind(any).and_then(|s| s.connect((address, 53))))
}

fn interfaces(_: &ProbeCall<'_>) -> ProbeOutcome {
    let socket = match call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) {
        Ok(fd) => sys::own(fd),
        Err(error) => return judge("socket", Err(error), &[]),
    };
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    let up: Vec<String> = (1..256).filter_map(|index| interface_up(fd, index)).collect();
    if up.is_empty() { denied("none but lo is up") } else { reached(up.join(" ")) }
}

/// The name of the interface with this number, if it is up and not loopback.
fn interface_up(fd: i32, index: i32) -> Option<String> {
    // struct ifreq: a name of 16 bytes, then a union that begins with the requested value.
    let mut request = [0u8; 40];
    request.get_mut(16..20)?.copy_from_slice(&index.to_ne_bytes());
    call!(libc::SYS_ioctl, fd, libc::SIOCGIFNAME, request.as_mut_ptr()).ok()?;
    call!(libc::SYS_ioctl, fd, libc::SIOCGIFFLAGS, request.as_mut_ptr()).ok()?;
    let flags = i32::from(i16::from_ne_bytes([request[16], request[17]]));
    let name: Vec<u8> = request.iter().take(16).copied().take_while(|b| *b != 0).collect();
    let counts = flags & libc::IFF_UP != 0 && flags & libc::IFF_LOOPBACK == 0;
    counts.then(|| String::from_utf8_lossy(&name).into_owned())
}

fn socket(family: i32, kind: i32, protocol: i32) -> ProbeOutcome {
    let made = call!(libc::SYS_socket, family, kind | libc::SOCK_CLOEXEC, protocol);
    // The arguments are valid, so EINVAL comes from a filter (Moby's, for NETLINK_AUDIT).
    judge_more("socket", made, &[], &[libc::EINVAL])
}

fn netlink(protocol: i32) -> ProbeOutcome {
    socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol)
}

fn any_family(_: &ProbeCall<'_>) -> ProbeOutcome {
    const USUAL: &[i32] = &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    const KINDS: &[i32] = &[libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_RAW, libc::SOCK_SEQPACKET];
    let opens = |family: i32| {
        KINDS
            .iter()
            .any(|kind| call!(libc::SYS_socket, family, *kind | libc::SOCK_CLOEXEC, 0).map(sys::own).is_ok())
    };
    let open: Vec<_> = (1..48).filter(|f| !USUAL.contains(f) && opens(*f)).map(|f| f.to_string()).collect();
    if open.is_empty() { absent("no other family") } else { reached(format!("families {}", open.join(" "))) }
}
