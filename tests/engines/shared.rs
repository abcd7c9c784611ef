//! A directory that a real Cloud Hypervisor shares with its microVM: it connects to virtiofsd, inside the
//! Body's boundary. That needs no guest, only a KVM that creates microVMs.

use std::{
    fs::{self, File},
    path::PathBuf,
    time::{Duration, Instant},
};

use fleet::{Create, Force, Setting};
use proto::{
    spec::{Access, Mount},
    vm::{Engine, KVM, Sharing},
};
use serde_json::Value;
use testkit::{
    Bodies, body_test,
    leaks::{self, HostProcess},
    skip::skip,
};

use crate::{
    real::{nothing_is_left, own_record, program},
    told::ask,
};

const PATIENCE: Duration = Duration::from_secs(60);

fn below(name: &str) -> Option<HostProcess> {
    leaks::descendants().into_iter().find(|process| process.name == name)
}

/// The description of its microVM, over the socket in the Body's root.
fn machine(pid: i32) -> Option<Value> {
    let socket = PathBuf::from(format!("/proc/{pid}/root/dev/shm/api.sock"));
    if !socket.exists() {
        return None;
    }
    let request = launch::ApiRequest { method: "GET", path: "/api/v1/vm.info".into(), body: None };
    let (status, said) = ask(&socket, &request, "");
    (status == 200).then(|| serde_json::from_str(&said).unwrap())
}

/// Whether a client is connected to the socket of the first share, and the hypervisor holds the other end.
fn is_called(pid: i32) -> bool {
    let sockets = fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap();
    let connected = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).find(|line| {
        // The columns are Num RefCount Protocol Flags Type St Inode Path; state 03 is connected.
        line.get(5) == Some(&"03") && line.last().is_some_and(|path| path.ends_with("/share0.sock"))
    });
    let Some(inode) = connected.map(|line| format!("socket:[{}]", line[6])) else { return false };
    let held = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    held.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|link| link.as_os_str() == inode.as_str())
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_real_cloud_hypervisor_takes_a_shared_directory_from_virtiofsd(t: Bodies) {
    let Some(program) = program(Engine::CloudHypervisor) else {
        return skip("under a real cloud-hypervisor");
    };
    if File::options().read(true).write(true).open(KVM).is_err() {
        return skip("with a KVM that makes machines");
    }
    own_record(&t);
    t.fleet().settings().set(Setting::CloudHypervisor, program.to_str().unwrap()).unwrap();
    let shared = t.dir().join("shared");
    fs::create_dir(&shared).unwrap();
    let request = Create {
        engine: Some(Engine::CloudHypervisor),
        mounts: vec![Mount { source: shared, target: "/mnt/shared".into(), access: Access::ReadOnly }],
        share: Some(Sharing::Virtiofs),
        ..t.kept()
    };
    let fleet = t.second();
    let creating = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(fleet.create(request)).map(|view| view.id().clone())
    });
    let deadline = Instant::now() + PATIENCE;
    let (hypervisor, told) = loop {
        let found = below("cloud-hyperviso").or_else(|| below("cloud-hypervisor"));
        let told = found.as_ref().and_then(|found| machine(found.pid));
        match (found, told) {
            (Some(found), Some(told)) if told["state"] == "Running" => break (found, told),
            _ => assert!(Instant::now() < deadline && !creating.is_finished(), "{:?}", leaks::descendants()),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(told["config"]["fs"][0]["tag"], "share0", "{told}");
    let sharer = below("virtiofsd").expect("it is there as long as the hypervisor");
    assert!(is_called(sharer.pid), "the device is the hypervisor's connection to it");
    leaks::kill(hypervisor.parent);
    if let Ok(id) = creating.join().unwrap() {
        t.fleet().remove(&id, Force::Yes).await.unwrap();
    }
    assert_eq!((below("virtiofsd"), below("cloud-hyperviso")), (None, None), "both ended with the Body");
    nothing_is_left(t.fleet());
}
