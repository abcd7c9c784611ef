//! Tests of control messages.

use std::{os::fd::AsFd, path::PathBuf};

use proto::egress::{EgressRule, Flush};

use super::*;
use crate::{
    journal::tests::spool,
    proxy::tests::{proxy, start_listener},
};

fn orders(rules: &[&str], generation: u64) -> EgressControl {
    let rules = rules.iter().map(|rule| EgressRule::allow(*rule)).collect();
    EgressControl::Replace(Box::new(EgressOrders::new(rules, generation, Flush::Kernel)))
}

fn state(generation: u64, open: usize, closed: usize) -> EgressReply {
    EgressReply::State { generation, open, closed }
}

/// Sends bytes to a control socket, and returns the reply.
async fn send(proxy: &Rc<Proxy>, bytes: &[u8]) -> EgressReply {
    let dir = sys::fd::open_path(&std::env::temp_dir()).unwrap();
    let name = format!("palisade-control-{}", proto::event::hex(&sys::random::bytes::<8>().unwrap()));
    let place: PathBuf = sys::fd::path_of(dir.as_fd()).join(name);
    let listener = UnixListener::bind(&place).unwrap();
    let mut stream = UnixStream::connect(&place).await.unwrap();
    std::fs::remove_file(place).unwrap();
    let asking = async {
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        serde_json::from_str(reply.strip_suffix('\n').unwrap()).unwrap()
    };
    tokio::select! {
        () = proxy.clone().serve_control(listener) => unreachable!("it serves for ever"),
        reply = asking => reply,
    }
}

fn line(message: &EgressControl) -> Vec<u8> {
    serde_json::to_vec(message).unwrap().into_iter().chain(*b"\n").collect()
}

#[tokio::test]
async fn orders_that_cannot_be_used_change_nothing() {
    tokio::task::LocalSet::new()
        .run_until(async {
            let proxy = Rc::new(proxy(spool(), &["a.test:443"]));
            assert_eq!(send(&proxy, &line(&EgressControl::Status)).await, state(1, 0, 0));
            let long = orders(&[&"a".repeat(2 << 20)], 2);
            for bad in [
                line(&orders(&["not a rule"], 2)),
                line(&orders(&["b.test"], 0)),
                line(&long),
                line(&orders(&["b.test"], 2)).split_last().unwrap().1.to_vec(),
                b"{}\n".to_vec(),
                b"\n".to_vec(),
                Vec::new(),
            ] {
                // The proxy stops reading where a message is too long.
                if bad.len() as u64 <= MESSAGE_LEN_MAX {
                    assert!(matches!(send(&proxy, &bad).await, EgressReply::Refused { .. }));
                }
                assert_eq!(proxy.generation.get(), 1);
                assert!(proxy.policy.borrow().resolves("a.test"));
            }
            assert_eq!(send(&proxy, &line(&orders(&["b.test"], 2))).await, state(2, 0, 0));
            assert!(proxy.policy.borrow().resolves("b.test") && !proxy.policy.borrow().resolves("a.test"));
        })
        .await;
}

#[tokio::test]
async fn a_change_closes_the_connections_that_it_does_not_permit() {
    tokio::task::LocalSet::new()
        .run_until(async {
            let port = start_listener().await;
            let rule = format!("localhost:{port}+tcp+private");
            let proxy = Rc::new(proxy(spool(), &[rule.as_str()]));
            let address = proxy.names.borrow_mut().address_of("localhost", |_| Ok(())).unwrap().unwrap();
            let (mut program, inside) = UnixStream::pair().unwrap();
            let served = proxy.clone();
            tokio::task::spawn_local(
                async move { served.redirected(inside, Ok((address, port).into())).await },
            );
            let wide = orders(&[rule.as_str(), "b.test"], 2);
            while proxy.flows.len() == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(send(&proxy, &line(&wide)).await, state(2, 1, 0));
            program.write_all(b"hi\n").await.unwrap();
            let mut answer = [0; 7];
            program.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"REACHED", "a connection that is still permitted stays");
        })
        .await;
}

#[tokio::test]
async fn a_closed_connection_ends_at_once() {
    tokio::task::LocalSet::new()
        .run_until(async {
            let port = start_listener().await;
            let rule = format!("localhost:{port}+tcp+private");
            let proxy = Rc::new(proxy(spool(), &[rule.as_str()]));
            let address = proxy.names.borrow_mut().address_of("localhost", |_| Ok(())).unwrap().unwrap();
            let (mut program, inside) = UnixStream::pair().unwrap();
            let served = proxy.clone();
            tokio::task::spawn_local(
                async move { served.redirected(inside, Ok((address, port).into())).await },
            );
            while proxy.flows.len() == 0 {
                tokio::task::yield_now().await;
            }
            assert_eq!(send(&proxy, &line(&orders(&["b.test"], 2))).await, state(2, 0, 1));
            let ended = timeout(Duration::from_secs(5), program.read(&mut [0; 9])).await.unwrap();
            assert_eq!(ended.unwrap_or(0), 0);
        })
        .await;
}
