//! Tests of the connections that a supervisor opens for its egress process.

use std::{
    io::{BufRead, BufReader},
    os::unix::net::UnixListener,
    path::PathBuf,
};

use proto::egress::{BodyIdentity, EgressRule, Flush};

use super::*;

/// A data directory with Bodies.
struct BodiesDir(PathBuf);

impl BodiesDir {
    fn new(name: &str) -> Self {
        let data = std::env::temp_dir().join(format!("palisade-peers-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&data);
        fs::create_dir_all(data.join("egress")).unwrap();
        Self(data)
    }

    /// Adds a Body, and returns the directory of its egress process.
    fn body(&self, id: &str, name: &str, allow: &[&str], accept: &[&str]) -> PathBuf {
        let (own, egress) = (self.0.join("bodies").join(id), self.0.join("egress").join(id));
        fs::create_dir_all(&own).unwrap();
        fs::create_dir_all(&egress).unwrap();
        fs::write(own.join("spec.json"), format!("{{\"id\":\"{id}\",\"name\":\"{name}\",\"v\":1}}")).unwrap();
        let rules = allow.iter().map(|to| EgressRule::allow(*to)).collect();
        let orders = EgressOrders {
            body: Some(BodyIdentity {
                id: id.parse().unwrap(),
                name: Some(name.parse().unwrap()),
                owner: None,
            }),
            accept: accept.iter().map(|one| (*one).to_owned()).collect(),
            ..EgressOrders::new(rules, 1, Flush::Kernel)
        };
        fs::write(egress.join(ORDERS), serde_json::to_vec(&orders).unwrap()).unwrap();
        egress
    }
}

impl Drop for BodiesDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn body(to: &str, port: u16) -> PeerRequest {
    PeerRequest::Body { to: to.parse().unwrap(), port }
}

#[test]
fn another_body_is_found_by_name_and_id_and_learns_the_caller() {
    let data = BodiesDir::new("find");
    let allow = ["db.body.internal:5432", "db1.body.internal:5432", "gone.body.internal:5432"];
    let app = data.body("app1", "app", &allow, &[]);
    let db = data.body("db1", "db", &[], &["app:5432"]);
    let connector = PeerConnector { dir: &app, token: None };
    let missing = |to: &str| Err(no_such_body(&to.parse().unwrap()));
    let ask = |to: &str, port| connector.connect(&body(to, port)).map(drop);
    assert_eq!(ask("db", 5432), missing("db"), "it does not run");
    let listener = UnixListener::bind(db.join(PEERS)).unwrap();
    for to in ["db", "db1"] {
        let _connected = connector.connect(&body(to, 5432)).unwrap();
        let mut line = String::new();
        BufReader::new(listener.accept().unwrap().0).read_line(&mut line).unwrap();
        let call: PeerCall = serde_json::from_str(&line).unwrap();
        assert_eq!((call.from.label(), call.to.as_str(), call.port), ("app", to, 5432));
    }
    assert_eq!(ask("gone", 5432), missing("gone"));
    // The orders on the disk decide, whatever the egress process says.
    assert_eq!(ask("db", 22), Err("no rule names db.body.internal:22".into()));
    assert_eq!(ask("app", 5432), Err("no rule names app.body.internal:5432".into()));
    // A socket that a killed supervisor left.
    drop(listener);
    assert_eq!(ask("db", 5432), missing("db"));
}

#[test]
fn the_own_body_is_reached_on_accepted_ports_only() {
    let data = BodiesDir::new("own");
    let db = data.body("db1", "db", &[], &["app:5432"]);
    let connector = PeerConnector { dir: &db, token: Some("secret") };
    let ask = |port| connector.connect(&PeerRequest::Own { port }).map(drop);
    assert_eq!(ask(22), Err("the Body accepts no connection on port 22".into()));
    assert_eq!(ask(5432), Err("the Body does not answer".into()));
}

#[test]
fn a_link_answers_in_order_and_ends_at_nonsense_without_an_end() {
    let data = BodiesDir::new("link");
    let app = data.body("app1", "app", &["db.body.internal:1"], &[]);
    let db = data.body("db1", "db", &[], &[]);
    let _listener = UnixListener::bind(db.join(PEERS)).unwrap();
    let connector = PeerConnector { dir: &app, token: None };
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut link = EgressLink::new(near).unwrap();
    link.answer(&connector).unwrap();
    far.write_all(b"{\"ready\":{\"landlock\":1}}\n").unwrap();
    for request in [body("db", 1), body("db", 2)] {
        let line = serde_json::to_string(&request).unwrap() + "\n";
        far.write_all(line.as_bytes()).unwrap();
    }
    link.answer(&connector).unwrap();
    sys::fd::receive(far.as_fd()).unwrap();
    let mut line = String::new();
    BufReader::new(&far).read_line(&mut line).unwrap();
    assert_eq!(line, "{\"why\":\"no rule names db.body.internal:2\"}\n");
    far.write_all(&[b'x'; 2 * PEER_LINE_LEN_MAX]).unwrap();
    link.answer(&connector).unwrap();
    assert!(link.answer(&connector).is_err());
}
