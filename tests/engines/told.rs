//! Sends each request to the real program: from the first one to a snapshot and its restore. That needs no
//! guest, only a KVM that creates microVMs.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use proto::vm::{Engine, FreezeReport, KVM, UpperDigest, VmPlan, VmStart};
use testkit::{Bodies, body_test, skip::skip};

use crate::{contract::plan, real::program};

const PATIENCE: Duration = Duration::from_secs(30);
/// Directories in a hypervisor's root, and their names in the test's directory.
const PLACES: [(&str, &str); 2] = [("/dev/shm/", "shm/"), ("/save/", "save/")];

/// A hypervisor of a test, which ends with it.
struct TestHypervisor(Child);

impl Drop for TestHypervisor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(which: Engine, program: &Path, dir: &Path) -> TestHypervisor {
    let api = dir.join("shm/api.sock");
    for stale in ["shm/api.sock", "shm/line.sock"] {
        let _ = fs::remove_file(dir.join(stale));
    }
    let flag = if which == Engine::Firecracker { "--api-sock" } else { "--api-socket" };
    let child = Command::new(program)
        .arg(flag)
        .arg(&api)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let running = TestHypervisor(child);
    let deadline = Instant::now() + PATIENCE;
    while UnixStream::connect(&api).is_err() {
        assert!(Instant::now() < deadline, "it does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    running
}

/// Sends a request with the paths of a test; returns the status and the answer.
fn send(dir: &Path, request: &launch::ApiRequest) -> (u16, String) {
    let mut body = request.body.as_ref().map(ToString::to_string).unwrap_or_default();
    for (there, here) in PLACES {
        body = body.replace(there, &format!("{}/{here}", dir.display()));
    }
    ask(&dir.join("shm/api.sock"), request, &body)
}

/// Sends a request with this body.
pub fn ask(socket: &Path, request: &launch::ApiRequest, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "{} {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        request.method,
        request.path,
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let mut answer = BufReader::new(stream);
    let mut line = String::new();
    answer.read_line(&mut line).unwrap();
    let status =
        line.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{line:?}"));
    let mut len = 0;
    loop {
        line.clear();
        answer.read_line(&mut line).unwrap();
        match line.trim_end().to_lowercase().strip_prefix("content-length:") {
            Some(value) => len = value.trim().parse().unwrap(),
            None if line.trim_end().is_empty() => break,
            None => {}
        }
    }
    let mut said = vec![0; len];
    answer.read_exact(&mut said).unwrap();
    (status, String::from_utf8_lossy(&said).into_owned())
}

/// Whether all requests succeeded. The KVM of some hosts creates microVMs but does not report the state of
/// their CPUs.
fn send_all(which: Engine, dir: &Path, vm: &VmPlan) -> bool {
    for request in launch::requests(vm).unwrap() {
        let (status, said) = send(dir, &request);
        if measures(&request) {
            let told = match which {
                Engine::Firecracker => fs::read_to_string(dir.join("shm/metrics")).unwrap(),
                _ => said.clone(),
            };
            let disks: Vec<String> = launch::traffic(which, &told).into_keys().collect();
            assert_eq!(disks, ["image0", "image1", "upper"], "{which} tells of each disk: {told}");
        }
        eprintln!("{which}: {} {}: {status}", request.method, request.path);
        if status == 500 && said.contains("Could not get vCPU state") {
            skip("with a KVM that tells a machine's state");
            return false;
        }
        assert!(
            (200..300).contains(&status),
            "{which}: {} {}: {status}: {said}",
            request.method,
            request.path
        );
    }
    true
}

/// Whether it is a request for disk metrics.
fn measures(request: &launch::ApiRequest) -> bool {
    let action = request.body.as_ref().map(|body| body["action_type"].clone());
    action.is_some_and(|action| action == "FlushMetrics") || request.path.ends_with("/vm.counters")
}

fn check(t: &Bodies, which: Engine) {
    let Some(program) = program(which) else { return skip(&format!("under a real {which}")) };
    if File::options().read(true).write(true).open(KVM).is_err() {
        return skip("with a KVM that makes machines");
    }
    let dir = t.dir();
    for place in ["shm/saved", "save", "disks"] {
        fs::create_dir_all(dir.join(place)).unwrap();
    }
    let disk = |name: &str| {
        let path = dir.join("disks").join(name);
        File::create(&path).and_then(|file| file.set_len(16 << 20)).unwrap();
        path
    };
    let ground = fs::canonicalize(t.data().join("vm")).unwrap();
    let setup: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(ground.join("setup.json")).unwrap()).unwrap();
    let kernel = ground.join(setup["kernel"].as_str().unwrap()).join("vmlinux");
    let initrd = fs::read_dir(ground.join("initrd")).unwrap().flatten().next().unwrap().path();
    let (upper, images) = (disk("upper.img"), vec![disk("image0"), disk("image1")]);
    let vm = |begin| VmPlan {
        upper: upper.clone(),
        images: images.clone(),
        memory_bytes: 128 << 20,
        cpus: 1,
        ..plan(which, begin)
    };
    let running = start(which, &program, dir);
    let whole =
        send_all(which, dir, &vm(VmStart::Boot { kernel, initrd, cmdline: "console=ttyS0 panic=-1".into() }));
    drop(running);
    if !whole {
        return;
    }
    let (ram, state) = match which {
        Engine::CloudHypervisor => {
            fs::rename(dir.join("shm/saved"), dir.join("shm/thawed")).unwrap();
            fs::create_dir(dir.join("shm/saved")).unwrap();
            (dir.join("shm/thawed/memory-ranges"), dir.join("shm/thawed/state.json"))
        }
        _ => {
            let (ram, state) = (dir.join("ram"), dir.join("state"));
            fs::rename(dir.join("save/ram"), &ram).unwrap();
            fs::rename(dir.join("shm/state"), &state).unwrap();
            (ram, state)
        }
    };
    assert_eq!(fs::metadata(&ram).unwrap().len(), 128 << 20, "all of its memory was written down");
    let _running = start(which, &program, dir);
    let _ = send_all(
        which,
        dir,
        &vm(VmStart::Thaw {
            ram,
            state,
            held: FreezeReport { tree: UpperDigest::default(), processes: 0, still: true },
        }),
    );
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_real_firecracker_takes_every_request(t: Bodies) {
    check(&t, Engine::Firecracker);
}

#[body_test(except(process = "it tests microVMs"))]
async fn a_real_cloud_hypervisor_takes_every_request(t: Bodies) {
    check(&t, Engine::CloudHypervisor);
}
