//! Peers that run a command in a new sandbox, and the command line of each.

use std::{fs, io};

use crate::{
    context::BenchContext,
    oci,
    run::{CommandLine, RunPlace, find},
};

/// The peer of the bars: the host's root read-only, and every namespace.
pub const BWRAP: &str = "bwrap";
/// The start without a sandbox.
pub const PLAIN: &str = "fork+exec";
/// Palisade.
pub const PAL: &str = "pal run";

const MARKER: &str = "marker-of-the-bench";

/// A peer that was seen to work.
pub struct Peer {
    /// Its name in tables.
    pub name: &'static str,
    /// How it runs `true`.
    pub line: CommandLine,
    /// Namespaces that it does not share with the host.
    pub own: String,
}

/// A peer that cannot be measured, and why.
pub type AbsentPeer = (String, String);

/// All peers that can run `true` in a new sandbox on this host.
pub fn fresh(context: &BenchContext) -> io::Result<(Vec<Peer>, Vec<AbsentPeer>)> {
    let ask = format!("echo {MARKER}; readlink /proc/self/ns/*");
    let run = lines(context, "true", &["true"])?;
    let check = lines(context, "check", &["sh", "-c", &ask])?;
    let (mut peers, mut absent) = (Vec::new(), Vec::new());
    for ((name, line), (_, check)) in run.into_iter().zip(check) {
        match judge(&check) {
            Ok(own) => peers.push(Peer { name, line, own }),
            Err(why) => absent.push((name.to_owned(), why)),
        }
    }
    Ok((peers, absent))
}

/// The namespaces of its own, if it really runs commands.
fn judge(check: &CommandLine) -> Result<String, String> {
    let program = check.argv.first().map(String::as_str).unwrap_or_default();
    if find(program).is_none() {
        return Err("not installed".into());
    }
    let printed = check.output().map_err(|error| error.to_string())?;
    if !printed.contains(MARKER) {
        return Err("it ended well without having run the command".into());
    }
    let kinds = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];
    let own = kinds.iter().filter(|kind| {
        let host = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
        let inside = printed.lines().find(|line| line.starts_with(&format!("{kind}:")));
        inside.is_some_and(|inside| inside != host.to_string_lossy())
    });
    let own: Vec<&str> = own.copied().collect();
    Ok(if own.is_empty() { "no namespaces".into() } else { own.join(" ") })
}

/// The command line of each peer; `kind` names the bundle made for it.
fn lines(
    context: &BenchContext,
    kind: &str,
    command: &[&str],
) -> io::Result<Vec<(&'static str, CommandLine)>> {
    let bundle = oci::bundle(context, kind, command)?.to_string_lossy().into_owned();
    let root = oci::rootfs(context)?.to_string_lossy().into_owned();
    let state = |name: &str| format!("--root={}/{name}", context.scratch.display());
    let words = |line: &str| CommandLine::new(line.split_ascii_whitespace());
    let namespaces = "--user --map-root-user --mount --pid --fork --ipc --net --uts --cgroup --mount-proc";
    let own_root =
        "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64";
    let bwrap = "bwrap --unshare-all --die-with-parent --proc /proc --dev /dev --tmpfs /tmp";
    Ok(vec![
        (PAL, pal(context, &["run", "--"]).and(command.iter().copied())),
        (PLAIN, CommandLine::new(command.iter().copied())),
        ("unshare", words(&format!("unshare {namespaces}")).and(command.iter().copied())),
        (
            BWRAP,
            words(
                "bwrap --unshare-all --die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp --",
            )
            .and(command.iter().copied()),
        ),
        ("bwrap, own root", words(&format!("{bwrap} {own_root} --")).and(command.iter().copied())),
        (
            "crun",
            CommandLine::new(["crun", &state("crun"), "run", "--bundle", &bundle, "{id}"])
                .at(RunPlace::WithoutUnified),
        ),
        ("runc", CommandLine::new(["runc", &state("runc"), "run", "--bundle", &bundle, "{id}"])),
        (
            "runsc",
            CommandLine::new([
                "runsc",
                &state("runsc"),
                "--network=none",
                "run",
                "--bundle",
                &bundle,
                "{id}",
            ]),
        ),
        (
            "podman",
            words("podman run --rm")
                .and(podman(&root))
                .and(command.iter().copied())
                .at(RunPlace::WithoutUnified),
        ),
        ("firejail", words("firejail --quiet --noprofile --net=none --").and(command.iter().copied())),
        ("systemd-nspawn", nspawn(&root).and(command.iter().copied())),
    ])
}

/// `pal` on the bench's data directory.
pub fn pal(context: &BenchContext, words: &[&str]) -> CommandLine {
    let mut line = CommandLine::new([context.pal.to_string_lossy()]).and(words.iter().copied());
    line.env.push(("PAL_DATA".into(), context.data.clone()));
    line
}

/// Options of podman before its verb. They set limits, because podman would raise its own, which needs a
/// capability.
pub fn podman(root: &str) -> Vec<String> {
    let words =
        "--network none --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 --volume /usr:/usr:ro --rootfs";
    words.split_ascii_whitespace().map(str::to_owned).chain([root.to_owned()]).collect()
}

fn nspawn(root: &str) -> CommandLine {
    let words =
        "systemd-nspawn --quiet --register=no --keep-unit --private-network --bind-ro=/usr --directory";
    CommandLine::new(words.split_ascii_whitespace()).and([root])
}
