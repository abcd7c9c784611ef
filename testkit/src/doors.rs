//! Doors of the host, prepared so that each can be shown open before it is shown closed.
//!
//! Everything here belongs to the test: fake secrets, listeners, a process to attack. It touches nothing of
//! the host that was there before, and all of it goes with [`Doors`].

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    net::{TcpListener, UdpSocket},
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::PermissionsExt,
            net::{SocketAddr, UnixListener},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use crate::{
    TemporaryDir, is_root,
    probe::{self, ProbeAnswer},
};

/// The name of the process that the control attacks.
const CANARY: &str = "pal-canary";
/// A group that no account has.
pub const GROUP: u32 = 424_242;

/// The arguments of the probe on the host and in a Body.
pub struct Doors {
    dir: TemporaryDir,
    shared: BTreeMap<String, String>,
    canary: Child,
    objects: Vec<IpcObject>,
    answering: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
    _held: DoorProps,
}

struct DoorProps {
    _tcp: Vec<TcpListener>,
    _unix: Vec<UnixListener>,
    _lock: File,
}

/// A System V or POSIX object that only a command can remove.
enum IpcObject {
    SysV { flag: &'static str, id: String },
    Queue(Child),
    File(PathBuf),
}

impl Doors {
    /// Prepares the doors. `data` is the data directory of the Bodies.
    pub fn open(data: &Path) -> Self {
        let dir = TemporaryDir::new("doors");
        let mut doors = BTreeMap::new();
        let mut set = |key: &str, value: String| drop(doors.insert(key.to_owned(), value));
        let lock = files(&dir, &mut set);
        let (tcp, unix) = listeners(&dir, &mut set);
        let answering = answer(&mut set);
        let mut objects = vec![shared_file(&mut set)];
        objects.extend(sys_v(&mut set));
        objects.extend(queue(&dir, &mut set));
        identity(&mut set);
        set("mountinfo", data.display().to_string());
        let canary = start_canary(&dir);
        set("comm", CANARY.to_owned());
        set("self_exe", "1".to_owned());
        Self {
            shared: doors,
            canary,
            objects,
            answering: Some(answering),
            dir,
            _held: DoorProps { _tcp: tcp, _unix: unix, _lock: lock },
        }
    }

    /// The arguments of the probe in a Body: the doors, the host's process by its pid there, and the Body's
    /// first process.
    pub fn inside(&self) -> Vec<String> {
        let mut words: Vec<String> =
            self.shared.iter().map(|(key, value)| format!("{key}={value}")).collect();
        words.push(format!("pid={}", self.canary.id()));
        words.push("init=1".to_owned());
        words
    }

    /// All arguments of the probe in a Body with these limits: memory and disk in bytes, processes, open
    /// files.
    pub fn words(&self, probe: &str, memory: u64, disk: u64, pids: u32, files: u32) -> Vec<String> {
        let mut words = vec![probe.to_owned(), "all".to_owned()];
        words.extend(self.inside());
        words.extend([
            format!("pids={pids}"),
            format!("memory={memory}"),
            format!("mlock={}", 8 << 20),
            format!("disk={disk}"),
            format!("fsize={disk}"),
            format!("shm={}", memory / 4),
            format!("nofile={files}"),
            "ptys=256".to_owned(),
        ]);
        words
    }

    /// Runs every probe on the host with its door open. Probes of limits get a limit so low that they do no
    /// harm.
    pub fn control(&self) -> Vec<ProbeAnswer> {
        let mut words: Vec<String> =
            self.shared.iter().map(|(key, value)| format!("{key}={value}")).collect();
        words.extend(
            ["pids", "memory", "mlock", "disk", "fsize", "inodes", "shm", "nofile", "ptys"]
                .map(|key| format!("{key}=1")),
        );
        words.push(format!("dir={}", self.dir.display()));
        let mut reports = if is_root() { self.control_of_root(&words) } else { self.control_of_user(&words) };
        // Kernel threads are only in the host's own pid namespace.
        let output = Command::new(self.dir.join("probe"))
            .args(["run", "kernel-threads"])
            .output()
            .expect("the probe can be run");
        reports.retain(|report| report.name != "kernel-threads");
        reports.push(probe::report(&output.stdout));
        reports
    }

    fn control_of_root(&self, words: &[String]) -> Vec<ProbeAnswer> {
        let group = Path::new("/sys/fs/cgroup/pids").join(format!("palisade-control-{}", std::process::id()));
        let grouped = fs::create_dir(&group).is_ok();
        let mut command = Command::new("setpriv");
        command.arg(format!("--groups={GROUP}"));
        command.args([
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            ROOT_SCRIPT,
            "sh",
        ]);
        command.arg(&*self.dir).arg(if grouped { group.as_os_str() } else { "".as_ref() }).args(words);
        let reports = reports(command);
        if grouped {
            crate::wait::blocking(Duration::from_secs(5), "the control leaves its cgroup", || {
                fs::remove_dir(&group).ok()
            });
        }
        reports
    }

    fn control_of_user(&self, words: &[String]) -> Vec<ProbeAnswer> {
        let mut command = Command::new("sh");
        command.args(["-c", USER_SCRIPT, "sh"]).arg(&*self.dir).args(words);
        command.arg(format!("pid={}", self.canary.id())).arg(format!("init={}", self.canary.id()));
        reports(command)
    }
}

/// In a mount and a pid namespace of its own: shared mounts, mounts named after the host, a cgroup, no umask,
/// an inherited descriptor, a process to attack, and a working directory that was deleted.
const ROOT_SCRIPT: &str = r#"
    dir=$1; group=$2; shift 2
    umask 0; ulimit -l unlimited
    [ -z "$group" ] || echo $$ > "$group/cgroup.procs"
    mkdir "$dir/one" "$dir/two" "$dir/gone"
    data=$(for word; do case $word in mountinfo=*) echo "${word#mountinfo=}";; esac; done)
    mount --bind "$data" "$data"
    mount -t tmpfs none "$dir/one" && mount --make-shared "$dir/one"
    mount --bind "$dir/one" "$dir/two" && mount --make-slave "$dir/two"
    mount -t tmpfs none "$dir/gone"
    exec 9< "$dir/home/secret"
    cd /
    "$dir/pal-canary" 600 & init=$!
    cd "$dir/gone"; umount -l "$dir/gone"
    exec "$dir/probe" all "$@" init=$init pid=$init
"#;

/// The doors that an ordinary user can open.
const USER_SCRIPT: &str = r#"
    dir=$1; shift
    umask 0
    exec 9< "$dir/home/secret"
    exec "$dir/probe" all "$@"
"#;

fn reports(mut command: Command) -> Vec<ProbeAnswer> {
    let output = command.stdin(Stdio::null()).output().expect("setpriv, unshare and sh can be run");
    assert!(
        !output.stdout.is_empty(),
        "the control said nothing: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    probe::reports(&output.stdout)
}

/// Files that every user may read, so that only the Body's own view can hide them.
fn files(dir: &Path, set: &mut impl FnMut(&str, String)) -> File {
    let home = dir.join("home");
    fs::create_dir_all(home.join(".ssh")).expect("a home");
    let put = |path: &Path| {
        fs::write(path, "a secret of the host\n").expect("a file of ours");
        fs::set_permissions(path, fs::Permissions::from_mode(0o666)).expect("a file of ours");
        path.display().to_string()
    };
    set("secret", put(&home.join("secret")));
    set("ssh_key", put(&home.join(".ssh/id_ed25519")));
    set("hostdir", home.display().to_string());
    set("tmp_canary", put(&dir.join("tmp-canary")));
    let canary = home.join("canary");
    set("canary", put(&canary));
    for (name, source) in [("probe", probe::path()), (CANARY, "/bin/sleep".into())] {
        fs::copy(source, dir.join(name)).expect("a program can be copied");
    }
    let lock = File::options().append(true).open(canary).expect("a file of ours");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("nobody else locks it");
    lock
}

fn listeners(dir: &Path, set: &mut impl FnMut(&str, String)) -> (Vec<TcpListener>, Vec<UnixListener>) {
    let mut tcp = vec![TcpListener::bind("127.0.0.1:0").expect("a port")];
    set("port", tcp[0].local_addr().expect("it is bound").port().to_string());
    if let Ok(six) = TcpListener::bind("[::1]:0") {
        set("port6", six.local_addr().expect("it is bound").port().to_string());
        tcp.push(six);
    }
    // Connecting a datagram socket sends nothing, and shows the address of the host that it would use.
    let own = UdpSocket::bind("0.0.0.0:0")
        .and_then(|socket| socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr()));
    if let Some(listener) = own.ok().and_then(|own| TcpListener::bind((own.ip(), 0)).ok()) {
        set("addr", listener.local_addr().expect("it is bound").to_string());
        tcp.push(listener);
    }
    let path = dir.join("socket");
    let by_path = UnixListener::bind(&path).expect("a socket");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("a socket of ours");
    set("unix_path", path.display().to_string());
    let name = format!("palisade-doors-{}", std::process::id());
    let by_name = SocketAddr::from_abstract_name(&name)
        .and_then(|name| UnixListener::bind_addr(&name))
        .expect("a name");
    set("abstract", name);
    (tcp, vec![by_path, by_name])
}

/// Answers datagrams until it is stopped.
fn answer(set: &mut impl FnMut(&str, String)) -> (Arc<AtomicBool>, JoinHandle<()>) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket of ours");
    set("udp_port", socket.local_addr().expect("it is bound").port().to_string());
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while !stopped.load(Ordering::Relaxed) {
            if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                let _ = socket.send_to(&buffer[..len], from);
            }
        }
    });
    (stop, thread)
}

fn shared_file(set: &mut impl FnMut(&str, String)) -> IpcObject {
    let name = format!("palisade-doors-{}", std::process::id());
    let path = Path::new("/dev/shm").join(&name);
    fs::write(&path, "shared").expect("shared memory");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("a file of ours");
    set("shm_name", name);
    IpcObject::File(path)
}

/// One object of each kind, by its key.
fn sys_v(set: &mut impl FnMut(&str, String)) -> Vec<IpcObject> {
    let kinds = [
        ("shm_key", "-M", Some("4096"), "shm", "-m"),
        ("sem_key", "-S", Some("1"), "sem", "-s"),
        ("msg_key", "-Q", None, "msg", "-q"),
    ];
    let mut objects = Vec::new();
    for (key, make, size, table, flag) in kinds {
        let mut command = Command::new("ipcmk");
        command.arg(make).args(size).args(["-p", "0666"]);
        let output = command.output().expect("ipcmk (util-linux) can be run");
        let text = String::from_utf8_lossy(&output.stdout);
        let Some(id) = text.rsplit(": ").next().map(|id| id.trim().to_owned()).filter(|id| !id.is_empty())
        else {
            continue;
        };
        let table = fs::read_to_string(format!("/proc/sysvipc/{table}")).unwrap_or_default();
        let line = table.lines().find(|line| line.split_whitespace().nth(1) == Some(&id));
        if let Some(found) = line.and_then(|line| line.split_whitespace().next()) {
            set(key, found.to_owned());
        }
        objects.push(IpcObject::SysV { flag, id });
    }
    objects
}

/// A message queue, made as a file where only root can mount them; it lasts as long as its helper process.
fn queue(dir: &Path, set: &mut impl FnMut(&str, String)) -> Option<IpcObject> {
    if !is_root() {
        return None;
    }
    let name = format!("palisade-doors-{}", std::process::id());
    let place = dir.join("queues");
    fs::create_dir(&place).expect("a directory");
    let script = "mount -t mqueue none \"$1\" && touch \"$1/$2\" && chmod 666 \"$1/$2\" && echo made && read _; rm -f \"$1/$2\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(&place).arg(&name);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("unshare can be run");
    let mut word = String::new();
    let mut said = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    std::io::BufRead::read_line(&mut said, &mut word).expect("a word");
    if word.trim() == "made" {
        set("mq", name);
    }
    Some(IpcObject::Queue(child))
}

fn identity(set: &mut impl FnMut(&str, String)) {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    set("hostname", read("/proc/sys/kernel/hostname"));
    set("boot_id", read("/proc/sys/kernel/random/boot_id"));
    if Path::new("/etc/machine-id").exists() {
        set("machine_id", read("/etc/machine-id"));
    }
    set("gid", GROUP.to_string());
    // A variable of this process that no Body should have.
    let name =
        ["TESTKIT_PROBE", "CARGO_MANIFEST_DIR"].into_iter().find(|name| std::env::var_os(name).is_some());
    set("env", name.expect("cargo and testkit set variables").to_owned());
}

/// A process of the host that may be attacked: it holds the secret open.
fn start_canary(dir: &Path) -> Child {
    let secret = File::open(dir.join("home/secret")).expect("the secret");
    Command::new(dir.join(CANARY))
        .arg0(CANARY)
        .arg("600")
        .stdin(secret)
        .current_dir("/")
        .spawn()
        .expect("a copy of sleep can be run")
}

impl Drop for Doors {
    fn drop(&mut self) {
        let _ = self.canary.kill();
        let _ = self.canary.wait();
        if let Some((stop, thread)) = self.answering.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
        for object in &mut self.objects {
            match object {
                IpcObject::SysV { flag, id } => {
                    drop(Command::new("ipcrm").args([*flag, id.as_str()]).output())
                }
                IpcObject::File(path) => drop(fs::remove_file(path)),
                IpcObject::Queue(child) => {
                    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(b"\n"));
                    let _ = child.wait();
                }
            }
        }
    }
}
