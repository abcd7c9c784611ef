//! Kills `pal`, guests and supervisors at random moments of up, land, stop, save, rm and gc, with a full disk
//! now and then: synced files are in the repository or still in the Body.
//!
//! The disks are small tmpfs mounts in a mount namespace, in which the test runs again.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use testkit::{TemporaryDir, leaks};

/// Number of kills.
const KILLS: usize = 200;
/// Set inside the namespace.
const INSIDE: &str = "PALISADE_WORK_KILLS";
/// Space for the programs, some layers and a few Bodies.
const DATA_DISK: &str = "size=96m";
const REPO_DISK: &str = "size=24m";

/// A seeded random generator, so that a failure can be repeated.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

/// The process that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Pal,
    Guest,
    Keeper,
}

/// The disk that is full meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FullDisk {
    None,
    Data,
    Repository,
}

/// The state of the test.
struct World {
    home: TemporaryDir,
    pal: PathBuf,
    /// The current Body, and the synced files of each Body.
    body: Option<String>,
    synced: BTreeMap<String, Vec<String>>,
    /// How long commands took without a kill.
    typical: BTreeMap<&'static str, Duration>,
    /// The last action, for the message of a failure.
    last: String,
}

#[test]
fn whatever_is_killed_no_synced_file_is_lost() {
    if std::env::var_os(INSIDE).is_some() {
        return kill_and_look();
    }
    if !testkit::is_root() {
        return testkit::skip::skip("as root");
    }
    let mut again = Command::new("unshare");
    again.args(["--mount", "--propagation", "private", "--"]).arg(std::env::current_exe().unwrap());
    again
        .args([
            "kills::whatever_is_killed_no_synced_file_is_lost",
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(INSIDE, "1");
    let output = again.output().expect("unshare (util-linux) can be run");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    eprintln!("{said}");
}

fn kill_and_look() {
    leaks::watch();
    let seed = std::env::var("PALISADE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7);
    eprintln!("PALISADE_SEED={seed}");
    let mut chance = Chance(seed);
    let mut world = World::make();
    let mut cut = 0;
    for round in 0..KILLS {
        cut += usize::from(world.round(round, &mut chance));
        world.look();
    }
    eprintln!("{cut} of {KILLS} were cut short");
    // With fewer kills the test would prove little.
    assert!(cut > KILLS / 4, "most of it was over before the kill: {cut}");
    world.end();
}

impl World {
    fn make() -> Self {
        let home = TemporaryDir::new("work-kills");
        let test = std::env::current_exe().unwrap();
        let pal = testkit::user::pal(&test.ancestors().nth(2).unwrap().join("pal").to_string_lossy());
        let world = Self {
            home,
            pal,
            body: None,
            synced: BTreeMap::new(),
            typical: BTreeMap::new(),
            last: String::new(),
        };
        for (dir, size) in [(world.data(), DATA_DISK), (world.repo(), REPO_DISK)] {
            fs::create_dir(&dir).unwrap();
            assert!(
                Command::new("mount")
                    .args(["-t", "tmpfs", "-o", size, "palisade-test"])
                    .arg(&dir)
                    .status()
                    .unwrap()
                    .success()
            );
        }
        world.git("init -q -b main . && seq 1000 > numbers && mkdir src && echo x > src/x && echo '*.log' > .gitignore && git add -A && git commit -qm first");
        world
    }

    fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    fn repo(&self) -> PathBuf {
        self.home.join("repo")
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let who = [
            ("GIT_AUTHOR_NAME", "Ann"),
            ("GIT_AUTHOR_EMAIL", "a@b"),
            ("GIT_COMMITTER_NAME", "Ann"),
            ("GIT_COMMITTER_EMAIL", "a@b"),
        ];
        command
            .current_dir(self.repo())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", self.home.join(""))
            .env("PAL_DATA", self.data())
            .envs(who);
        command.stdin(Stdio::null());
        command
    }

    fn git(&self, line: &str) -> Output {
        let line = if line.starts_with("init") { format!("git {line}") } else { line.to_owned() };
        self.command(Path::new("sh")).args(["-c", &line]).output().unwrap()
    }

    fn pal(&self, args: &[&str]) -> Output {
        self.command(&self.pal).args(args).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let output = self.pal(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "pal {args:?}: {said}after {}", self.last);
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Whether the Body still exists.
    fn is_there(&self, body: &str) -> bool {
        self.data().join("bodies").join(body).join("spec.json").exists()
    }

    /// A running Body.
    fn running(&mut self) -> String {
        let body = match self.body.take().filter(|body| self.is_there(body)) {
            Some(body) => {
                self.ok(&["start", &body]);
                body
            }
            None => self.ok(&["up", "--committed", "--no-prepare"]),
        };
        self.body = Some(body.clone());
        body
    }

    /// Runs one command and kills a process meanwhile; returns whether the command was interrupted.
    fn round(&mut self, round: usize, chance: &mut Chance) -> bool {
        let body = self.running();
        let name = format!("file{round}");
        let commit = if chance.below(2) == 0 {
            "git add . && git commit -qm work && sync .git .git/objects"
        } else {
            "true"
        };
        self.ok(&[
            "exec",
            &body,
            "--",
            "sh",
            "-c",
            &format!("echo {round} > {name} && sync {name} && {commit}"),
        ]);
        self.synced.entry(body.clone()).or_default().push(name);
        let verb = ["rm", "stop", "land", "save", "gc", "up"][chance.below(6) as usize];
        let victim = [Victim::Pal, Victim::Pal, Victim::Guest, Victim::Keeper][chance.below(4) as usize];
        let full = [FullDisk::None, FullDisk::None, FullDisk::None, FullDisk::Data, FullDisk::Repository]
            [chance.below(5) as usize];
        self.last = format!("round {round}: {verb}, killed {victim:?}, full {full:?}");
        let filled = self.fill(full);
        let cut = self.cut(verb, &body, victim, chance);
        if let Some(file) = filled {
            fs::remove_file(file).unwrap();
        }
        // An interrupted landing may have left some of the user's files, and git's own locks.
        self.git("rm -f .git/*.lock .git/refs/heads/*.lock; git reset -q --hard");
        cut
    }

    fn cut(&mut self, verb: &'static str, body: &str, victim: Victim, chance: &mut Chance) -> bool {
        let args: &[&str] = match verb {
            "rm" => &["rm", "--force", body],
            "stop" => &["stop", "--grace", "0s", body],
            "land" => &["land", "--onto", "main", body],
            "save" => &["save", body],
            "up" => &["up", "--committed", "--no-prepare"],
            _ => &["gc"],
        };
        let run =
            fs::read_to_string(self.data().join("bodies").join(body).join("run.json")).unwrap_or_default();
        let run: serde_json::Value = serde_json::from_str(&run).unwrap_or_default();
        let typical = self.typical.get(verb).copied().unwrap_or(Duration::from_millis(300));
        let begin = Instant::now();
        let mut child =
            self.command(&self.pal).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(chance.below(typical.as_micros() as u64)));
        let over = child.try_wait().unwrap().is_some();
        match pid_of(&run, victim) {
            // The command may have ended it already, and its pid may belong to another process.
            Some(pid) => leaks::end(
                &leaks::descendants().into_iter().filter(|process| process.pid == pid).collect::<Vec<_>>(),
            ),
            None => child.kill().unwrap(),
        }
        let ended = child.wait().unwrap();
        if over {
            // It was faster than before, so the next kill comes earlier.
            self.typical.insert(verb, typical * 3 / 4);
        } else if victim != Victim::Pal && ended.success() {
            self.typical.insert(verb, (typical * 3 + begin.elapsed()) / 4);
        }
        !over
    }

    /// Fills a disk completely.
    fn fill(&self, full: FullDisk) -> Option<PathBuf> {
        let path = match full {
            FullDisk::None => return None,
            FullDisk::Data => self.data().join("filler"),
            FullDisk::Repository => self.repo().join(".git/filler"),
        };
        let mut file = File::create(&path).unwrap();
        for len in [1 << 20, 4096, 1] {
            while file.write_all(&vec![7; len]).is_ok() {}
        }
        Some(path)
    }

    /// Checks that every synced file is in the repository or in a Body.
    fn look(&self) {
        for (body, names) in &self.synced {
            let upper = self.data().join("bodies").join(body).join("disk/upper");
            let there = if self.is_there(body) { find(&upper, "file") } else { Default::default() };
            let missing: Vec<&String> = names.iter().filter(|name| !there.contains(name)).collect();
            if missing.is_empty() {
                continue;
            }
            let saved = String::from_utf8_lossy(
                &self.git(&format!("git ls-tree -r --name-only refs/palisade/{body}/wip")).stdout,
            )
            .into_owned();
            let saved: Vec<&str> = saved.lines().collect();
            let lost: Vec<&&String> = missing.iter().filter(|name| !saved.contains(&name.as_str())).collect();
            assert!(lost.is_empty(), "of Body {body} these are nowhere: {lost:?} after {}", self.last);
        }
    }

    /// The next `pal` can save and remove the Bodies, and the repository is valid.
    fn end(mut self) {
        for line in self.ok(&["ls", "--json"]).lines() {
            let body: serde_json::Value = serde_json::from_str(line).unwrap();
            self.ok(&["rm", "--force", body["id"].as_str().unwrap()]);
        }
        self.ok(&["gc"]);
        self.look();
        for (body, names) in std::mem::take(&mut self.synced) {
            for name in names {
                let shown = self.git(&format!("git show refs/palisade/{body}/wip:{name}"));
                assert_eq!(
                    format!("file{}", String::from_utf8_lossy(&shown.stdout).trim()),
                    name,
                    "of Body {body}: {}",
                    String::from_utf8_lossy(&shown.stderr)
                );
            }
        }
        let fsck = self.git("git fsck --strict --no-dangling --no-progress");
        assert!(fsck.status.success() && fsck.stdout.is_empty(), "{fsck:?}");
        assert_eq!(leaks::entries(&self.data().join("bodies")), Vec::<String>::new());
        leaks::reap();
        for dir in [self.data(), self.repo()] {
            assert!(
                Command::new("umount").arg(dir).status().unwrap().success(),
                "somebody still uses a disk"
            );
        }
    }
}

/// After a failure, ends all processes of the test.
impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            leaks::end(&leaks::descendants());
        }
    }
}

fn pid_of(run: &serde_json::Value, victim: Victim) -> Option<i32> {
    let pid = match victim {
        Victim::Pal => None,
        Victim::Guest => run["pid"].as_i64(),
        Victim::Keeper => run["keeper"].as_i64(),
    };
    pid.and_then(|pid| i32::try_from(pid).ok())
}

/// Names of files below a directory that begin with a text.
fn find(dir: &Path, begin: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(find(&entry.path(), begin)),
            Ok(kind) if kind.is_file() => {
                found.extend(entry.file_name().into_string().ok().filter(|name| name.starts_with(begin)))
            }
            _ => {}
        }
    }
    found
}
