//! A microVM with an egress policy: its programs open connections as if it had a network.

use std::{fs, time::Duration};

use fleet::{BodyView, Create, Force};
use proto::{BodyId, Mechanism, MechanismStatus, spec::Egress};
use testkit::{
    Bodies, CommandOutput, body_test,
    registry::{CannedResponse, ScriptedServer},
    skip::skip,
};

/// The time that a program waits for a connection which no process answers.
const PATIENCE: &str = "timeout 20";

/// A name of this host that leads to its loopback, and that is not `localhost`: a Body has a `localhost` of its own.
fn own_name() -> Option<String> {
    let hosts = fs::read_to_string("/etc/hosts").unwrap_or_default();
    let mut lines = hosts.lines().map(str::split_whitespace);
    lines
        .find_map(|mut words| {
            (words.next() == Some("127.0.0.1")).then(|| words.find(|name| !name.starts_with("localhost")))?
        })
        .map(str::to_owned)
}

/// A server of this host, and the name and the port at which a Body reaches it; none if this host has no name.
fn server() -> Option<(ScriptedServer, String, String)> {
    let Some(name) = own_name() else {
        skip("with a name of this host");
        return None;
    };
    let server = ScriptedServer::start(|asked| CannedResponse::ok(format!("GOT {}", asked.path)));
    let port = server.host().rsplit(':').next().unwrap_or_default().to_owned();
    Some((server, name, port))
}

fn with_policy(t: &Bodies, name: &str, port: &str) -> Create {
    let allow = vec![format!("{name}:{port}+private")];
    Create { egress: Some(Egress { allow, ..Egress::default() }), ..t.kept() }
}

/// Connects as every program does, and requests a path.
async fn fetch(t: &Bodies, body: &BodyId, name: &str, port: &str, path: &str) -> CommandOutput {
    let request = format!(
        r"exec 3<>/dev/tcp/{name}/{port} && printf 'GET {path} HTTP/1.1\r\nhost: {name}:{port}\r\n\r\n' >&3 && cat <&3"
    );
    t.run(body, [&PATIENCE.split(' ').collect::<Vec<_>>()[..], &["bash", "-c", &request]].concat()).await
}

async fn reaches(t: &Bodies, body: &BodyId, name: &str, port: &str, path: &str) {
    let got = fetch(t, body, name, port, path).await;
    assert!(got.text().ends_with(&format!("GOT {path}")), "{path}: {got:?}");
}

fn network(view: &BodyView) -> &Mechanism {
    view.enforcement.mechanisms.iter().find(|told| told.name == "transparent network").unwrap()
}

#[body_test(except(process = "it tests microVMs"))]
async fn programs_of_a_microvm_connect_as_usual_and_only_where_its_policy_leads(t: Bodies) {
    let Some((_server, name, port)) = server() else { return };
    let view = t.make(with_policy(&t, &name, &port)).await;
    let body = view.id();
    assert_eq!(network(&view).state, MechanismStatus::Enforced, "{:?}", network(&view));
    assert!(view.receipt.as_ref().unwrap().receipt.transparent);
    reaches(&t, body, &name, &port, "/one").await;

    // The same name at another port, an address, and the port of the redirect itself.
    for (host, port) in [(name.as_str(), "9"), ("203.0.113.9", port.as_str()), ("127.0.0.1", "15001")] {
        let denied = fetch(&t, body, host, port, "/denied").await;
        assert!(denied.complaint().contains("reset by peer"), "{host}: {denied:?}");
    }
    let unknown = fetch(&t, body, "other.test", &port, "/unknown").await;
    assert!(unknown.complaint().contains("not known"), "{unknown:?}");
    let nothing = fetch(&t, body, "127.0.0.1", "15002", "/nothing").await;
    assert!(nothing.complaint().contains("refused"), "the loopback is the microVM's own: {nothing:?}");

    t.fleet().stop(body, Duration::from_secs(10)).await.unwrap();
    t.fleet().start(body).await.unwrap();
    reaches(&t, body, &name, &port, "/started").await;
    t.fleet().pause(body).await.unwrap();
    t.fleet().resume(body).await.unwrap();
    reaches(&t, body, &name, &port, "/resumed").await;
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_restore_cuts_the_connections_of_its_parent_and_new_ones_work(t: Bodies) {
    let Some((_server, name, port)) = server() else { return };
    let request = || with_policy(&t, &name, &port);
    let body = t.make(request()).await.spec.id;
    let held =
        format!("exec 3<>/dev/tcp/{name}/{port}; echo open >/tmp/held; cat <&3; echo ended >>/tmp/held");
    t.sh(
        &body,
        &format!(
            "nohup bash -c '{held}' >/dev/null 2>/tmp/why & until test -s /tmp/held; do sleep 0.1; done"
        ),
    )
    .await
    .ok();
    t.fleet().snapshots().create(&body, Some("saved".into())).await.unwrap();
    let still = t.sh(&body, "cat /tmp/held").await.ok();
    assert_eq!(still, "open", "a snapshot leaves the connections of its Body alone");

    let other = t.make(Create { template: "saved".into(), ..request() }).await;
    assert_eq!(network(&other).state, MechanismStatus::Enforced, "{:?}", network(&other));
    let cut = "until grep -q ended /tmp/held; do sleep 0.1; done; cat /tmp/why";
    let why = t.sh(other.id(), &format!("{PATIENCE} sh -c '{cut}'")).await.ok();
    assert!(why.contains("reset by peer"), "{why}");
    reaches(&t, other.id(), &name, &port, "/restored").await;
    t.fleet().remove(other.id(), Force::Yes).await.unwrap();

    t.fleet().pause_to_disk(&body).await.unwrap();
    t.fleet().resume(&body).await.unwrap();
    reaches(&t, &body, &name, &port, "/suspended").await;
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_kernel_without_the_modules_says_so_and_the_port_of_the_proxy_works(t: Bodies) {
    let Some((_server, name, port)) = server() else { return };
    let own = crate::kernels::own_setup(&t);
    for entry in fs::read_dir(&own).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("redirect-") {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    let view = t.make(with_policy(&t, &name, &port)).await;
    let told = network(&view);
    assert_eq!(told.state, MechanismStatus::Degraded);
    assert!(told.reason.contains("127.0.0.1:3128: cannot redirect connections"), "{told:?}");
    let direct = fetch(&t, view.id(), &name, &port, "/direct").await;
    assert!(direct.code != 0 && direct.text().is_empty(), "{direct:?}");
    let request = format!(
        r"exec 3<>/dev/tcp/127.0.0.1/3128 && printf 'CONNECT {name}:{port} HTTP/1.1\r\n\r\nGET /proxy HTTP/1.1\r\nhost: {name}:{port}\r\n\r\n' >&3 && cat <&3"
    );
    let got = t.run(view.id(), ["bash", "-c", &request]).await;
    assert!(got.text().ends_with("GOT /proxy"), "{got:?}");
}
