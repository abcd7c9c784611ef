//! Tests of the resolver: each refusal beside a name that it answers.

use std::fs::File;

use proto::egress::{DecisionKind, SpoolLine};
use tokio::net::UnixStream;

use super::*;
use crate::{
    dns_message::tests::{outcome, query},
    journal::{
        read_lines,
        tests::{lines, spool},
    },
    names::NameTable,
    proxy::tests::proxy,
};

fn resolve(proxy: &Proxy, name: &str, kind: u16) -> (u8, Option<[u8; 4]>) {
    let answer = proxy.resolve_message(&query(name, kind)).unwrap();
    let (code, records) = outcome(&answer);
    (code, (records == 1).then(|| *answer.last_chunk().unwrap()))
}

fn recorded(spool: &File) -> Vec<(DecisionKind, String)> {
    lines(spool).into_iter().map(|SpoolLine { kind, data, .. }| (kind, data.to)).collect()
}

#[test]
fn only_names_of_the_policy_have_an_address() {
    let file = spool();
    let proxy = proxy(file.try_clone().unwrap(), &["a.test:443", "*.b.test:22", "192.0.2.7"]);
    assert_eq!(resolve(&proxy, "A.test", A), (0, Some([198, 18, 0, 1])));
    assert_eq!(resolve(&proxy, "x.b.test", A), (0, Some([198, 18, 0, 2])));
    assert_eq!(resolve(&proxy, "a.test", A), (0, Some([198, 18, 0, 1])), "always the same");
    for name in ["evil.io", "a.test.evil.io", "b.test", "y.x.b.test", "192.0.2.7", "secret.evil.io", ""] {
        assert_eq!(resolve(&proxy, name, A), (3, None), "{name}");
        assert_eq!(resolve(&proxy, name, 16), (3, None), "{name}");
    }
    for kind in [AAAA, HTTPS, SVCB] {
        assert_eq!(resolve(&proxy, "a.test", kind), (0, None));
    }
    for kind in [2, 5, 6, 10, 15, 16, 33, 251, 252, 255] {
        assert_eq!(resolve(&proxy, "a.test", kind), (5, None), "type {kind}");
    }
    let kinds = recorded(&file);
    assert_eq!(
        kinds[..2],
        [(DecisionKind::Named, "a.test".into()), (DecisionKind::Named, "x.b.test".into())]
    );
    assert_eq!(kinds[2], (DecisionKind::Denied, "evil.io".into()));
    assert_eq!(kinds.iter().filter(|(_, name)| name == "evil.io").count(), 1, "repetitions are counted");
}

#[test]
fn this_host_and_addresses_of_names_have_names() {
    let proxy = proxy(spool(), &["a.test"]);
    resolve(&proxy, "a.test", A);
    assert_eq!(resolve(&proxy, "localhost", A), (0, Some([127, 0, 0, 1])));
    assert_eq!(resolve(&proxy, "x.localhost", A), (0, Some([127, 0, 0, 1])));
    assert_eq!(resolve(&proxy, "localhost", AAAA), (0, None));
    let pointer = |name: &str| proxy.resolve_message(&query(name, PTR)).unwrap();
    assert!(pointer("1.0.18.198.in-addr.arpa").ends_with(b"\x01a\x04test\0"));
    assert!(pointer("1.0.0.127.in-addr.arpa").ends_with(b"\x09localhost\0"));
    for name in ["2.0.18.198.in-addr.arpa", "1.1.1.1.in-addr.arpa", "1.in-addr.arpa", "1.ip6.arpa"] {
        assert_eq!(outcome(&pointer(name)), (3, 0), "{name}");
    }
    let mut chaos = query("a.test", A);
    *chaos.last_mut().unwrap() = 3;
    assert_eq!(outcome(&proxy.resolve_message(&chaos).unwrap()), (5, 0));
}

#[test]
fn an_address_that_cannot_be_recorded_is_not_told() {
    let full = File::options().append(true).open("/dev/full").unwrap();
    let proxy = proxy(full, &["a.test"]);
    assert_eq!(resolve(&proxy, "a.test", A), (2, None));
    assert_eq!(resolve(&proxy, "evil.io", A), (2, None));
    *proxy.journal.borrow_mut() = crate::journal::Journal::new(spool(), proto::egress::Flush::Kernel);
    assert!(resolve(&proxy, "a.test", A).1.is_some());
}

#[test]
fn a_flood_of_names_ends_with_one_decision() {
    let file = spool();
    let proxy = proxy(file.try_clone().unwrap(), &["**.a.test"]);
    for number in 0..4096 {
        assert!(resolve(&proxy, &format!("n{number}.a.test"), A).1.is_some());
    }
    for number in 4096..4106 {
        assert_eq!(resolve(&proxy, &format!("n{number}.a.test"), A), (2, None));
    }
    assert!(resolve(&proxy, "n7.a.test", A).1.is_some());
    let denied = recorded(&file).into_iter().filter(|(kind, _)| *kind == DecisionKind::Denied).count();
    assert_eq!(denied, 1);
    let mut again = NameTable::default();
    let whole = File::open(sys::fd::path_of(std::os::fd::AsFd::as_fd(&file))).unwrap();
    read_lines(whole, |line| again.note(&line)).unwrap();
    assert_eq!(again.name_of([198, 18, 0, 8].into()), Some("n7.a.test"));
}

#[tokio::test]
async fn messages_come_as_datagrams_and_on_streams() {
    let proxy = Rc::new(proxy(spool(), &["a.test"]));
    let message = query("a.test", A);
    let expected = proxy.resolve_message(&message).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let place = socket.local_addr().unwrap();
    let program = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let asking = async {
        // Too long, malformed, an answer: the next question is answered all the same.
        for bad in [&[0; MESSAGE_LEN_MAX + 9][..], &[0; 3], &expected] {
            program.send_to(bad, place).await.unwrap();
        }
        program.send_to(&message, place).await.unwrap();
        let mut buffer = [0; 512];
        loop {
            let (len, _) = program.recv_from(&mut buffer).await.unwrap();
            if buffer[..len] == expected {
                return;
            }
        }
    };
    tokio::select! {
        () = proxy.clone().resolve_datagrams(socket) => {}
        () = asking => {}
    }
    let (mut program, inside) = UnixStream::pair().unwrap();
    let (message, expected) = (&message, &expected);
    let asking = async move {
        let framed = [&(message.len() as u16).to_be_bytes()[..], message].concat();
        for byte in framed.iter().chain(&framed) {
            program.write_all(&[*byte]).await.unwrap();
        }
        for _ in 0..2 {
            let mut answer = vec![0; usize::from(program.read_u16().await.unwrap())];
            program.read_exact(&mut answer).await.unwrap();
            assert_eq!(answer, *expected);
        }
        // A message that is too long is malformed, and one that deserves silence gets it; neither ends the stream.
        program.write_all(&[&[255, 255], &[0; 65_535][..]].concat()).await.unwrap();
        let mut answer = vec![0; usize::from(program.read_u16().await.unwrap())];
        program.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer[3] & 15, 1);
        program.write_all(&[&[0, 1, 9][..], &framed].concat()).await.unwrap();
        let mut answer = vec![0; usize::from(program.read_u16().await.unwrap())];
        program.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer, *expected);
        drop(program);
    };
    let mut client = ProxyClient::new(inside);
    let serving = async move { proxy.resolve_stream(&mut client).await };
    assert!(tokio::join!(serving, asking).0.is_err());
}
