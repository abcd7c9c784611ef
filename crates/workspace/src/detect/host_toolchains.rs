//! Finds toolchains that the user installed below their home, such as those of rustup, pyenv, uv and nvm.
//!
//! Trust: a repository chooses between toolchains that the user installed, by their versions. The programs that run
//! here are those of the user's `PATH`, and they run at `/`, where no file of a repository decides about them.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    needs::Needs,
    requirement::{ToolRequirement, VersionRange},
    tools::{CARGO, GO, NODE, PYTHON, Tool},
};
use crate::GitIdentity;

/// `PATH` of a Body of the host's template.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Variables of the user that rustup reads.
const RUSTUP_VARIABLES: &[&str] = &["RUSTUP_HOME", "CARGO_HOME", "RUSTUP_TOOLCHAIN"];

/// A toolchain of the host, and its mount point in a Body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostToolchain {
    /// The directory on the host; its programs are in `bin`.
    pub source: PathBuf,
    /// The mount point.
    pub target: &'static str,
}

/// The toolchains of the host that Bodies of a repository use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostToolchains {
    /// The toolchains to mount.
    pub mounts: Vec<HostToolchain>,
    /// Variables of every command that these toolchains need.
    pub env: BTreeMap<String, String>,
    /// One line for each toolchain that takes the place of the usual one.
    pub notes: Vec<String>,
}

/// A directory in which a version manager keeps toolchains, one in each subdirectory.
struct VersionManager {
    tool: Tool,
    target: &'static str,
    /// The directory, below the user's home.
    dir: &'static str,
    /// The beginning of the names of its subdirectories.
    prefix: &'static str,
    /// The directory of the toolchain inside its subdirectory.
    inside: &'static str,
    /// A program of the toolchain.
    program: &'static str,
}

const VERSION_MANAGERS: &[VersionManager] = &[
    VersionManager::of(PYTHON, "/opt/python", ".pyenv/versions", "3.", "", "bin/python3"),
    VersionManager::of(PYTHON, "/opt/python", ".local/share/uv/python", "cpython-3.", "", "bin/python3"),
    VersionManager::of(NODE, "/opt/node", ".nvm/versions/node", "v", "", "bin/npm"),
    VersionManager::of(NODE, "/opt/node", ".local/share/fnm/node-versions", "v", "installation", "bin/npm"),
    VersionManager::of(GO, "/opt/go", "sdk", "go1.", "", "bin/go"),
];

impl VersionManager {
    const fn of(
        tool: Tool,
        target: &'static str,
        dir: &'static str,
        prefix: &'static str,
        inside: &'static str,
        program: &'static str,
    ) -> Self {
        Self { tool, target, dir, prefix, inside, program }
    }

    /// The toolchains of this manager, with the texts that name their versions.
    fn toolchains(&self, home: &Path) -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(home.join(self.dir)).into_iter().flatten().flatten();
        let named = entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())));
        let named = named.filter(|(name, _)| name.starts_with(self.prefix));
        let named = named
            .map(|(name, path)| (name, if self.inside.is_empty() { path } else { path.join(self.inside) }));
        named.filter(|(_, path)| path.join(self.program).exists()).collect()
    }
}

/// Finds the toolchains of the host that the tools of a repository need besides the programs in `/usr`.
pub fn find_toolchains(person: &GitIdentity, needs: &Needs) -> HostToolchains {
    let mut found = HostToolchains::default();
    for tool in &needs.tools {
        let wanted: Vec<&ToolRequirement> =
            needs.requirements.iter().filter(|wanted| wanted.tool == *tool).collect();
        if *tool == CARGO {
            found.add_rust(person, wanted.first().copied());
        } else {
            found.add_managed(person, *tool, &wanted);
        }
    }
    found
}

impl HostToolchains {
    /// Adds a toolchain of a version manager, if the host's own program is missing or does not fit.
    fn add_managed(&mut self, person: &GitIdentity, tool: Tool, wanted: &[&ToolRequirement]) {
        let managers = VERSION_MANAGERS.iter().filter(|manager| manager.tool == tool);
        let fits = |answer: &str| wanted.iter().all(|wanted| wanted.is_met_by(answer));
        let known = managers.flat_map(|manager| {
            manager.toolchains(&person.home).into_iter().map(|(name, path)| (name, path, manager.target))
        });
        let mut known: Vec<_> = known.filter(|(name, ..)| fits(&format!("{name} "))).collect();
        known.sort_by_key(|(name, ..)| super::requirement::find_version(name));
        let Some((name, source, target)) = known.pop() else { return };
        let mut probe = Command::new("/bin/sh");
        probe.args(["-c", tool.probe]).env_clear().env("PATH", PATH).env("HOME", &person.home);
        let answer = answer_of(&mut probe).unwrap_or_default();
        if fits(&answer) {
            return;
        }
        let why = wanted.first().map(|wanted| wanted.describe_gap(&answer)).unwrap_or_default();
        self.notes.push(format!("{why}; your own {name} is used instead"));
        // pyenv links Python with its library at the path where it was built, which a Body does not have.
        if tool == PYTHON {
            self.env.insert("LD_LIBRARY_PATH".into(), format!("{target}/lib"));
        }
        self.mounts.push(HostToolchain { source, target });
    }

    /// Adds the toolchain of rustup that the repository names, else one that fits, else the user's default.
    fn add_rust(&mut self, person: &GitIdentity, wanted: Option<&ToolRequirement>) {
        let channel = match wanted.map(|wanted| &wanted.versions) {
            Some(VersionRange::Channel(channel)) => Some(channel.as_str()),
            _ => None,
        };
        let named = channel.and_then(|channel| rust_sysroot(person, Some(channel)));
        let usual = || rust_sysroot(person, None);
        let Some(mut source) = named.or_else(usual) else { return };
        let fits = |sysroot: &Path| {
            let answer = answer_of(Command::new(sysroot.join("bin/rustc")).arg("--version").env_clear());
            wanted.is_none_or(|wanted| wanted.is_met_by(&answer.unwrap_or_default()))
        };
        let is_any = wanted.is_none_or(|wanted| wanted.versions == VersionRange::Any);
        if !is_any
            && !fits(&source)
            && let Some((name, other)) =
                rustup_toolchains(&source).into_iter().find(|(_, sysroot)| fits(sysroot))
        {
            self.notes.push(format!("the toolchain {name} of rustup fits the repository and is used"));
            source = other;
        }
        // Bodies see the programs in /usr as they are.
        if !source.starts_with("/usr") {
            self.mounts.push(HostToolchain { source, target: "/opt/rust" });
        }
    }
}

/// The sysroot of a Rust toolchain of the user; none if there is no such toolchain.
fn rust_sysroot(person: &GitIdentity, channel: Option<&str>) -> Option<PathBuf> {
    let mut command = Command::new("rustc");
    command
        .args(["--print", "sysroot"])
        .env_clear()
        .env("HOME", &person.home)
        .env("PATH", &person.path)
        .env("RUSTUP_AUTO_INSTALL", "0");
    let is_read = |(name, _): &&(OsString, OsString)| RUSTUP_VARIABLES.iter().any(|known| name == known);
    command.envs(person.env.iter().filter(is_read).map(|(name, value)| (name, value)));
    command.envs(channel.map(|channel| ("RUSTUP_TOOLCHAIN", channel)));
    let root = PathBuf::from(answer_of(&mut command)?.trim_end());
    root.join("bin/cargo").exists().then_some(root)
}

/// The toolchains beside one of rustup, by name.
fn rustup_toolchains(sysroot: &Path) -> Vec<(String, PathBuf)> {
    let Some(dir) = sysroot.parent().filter(|dir| dir.ends_with("toolchains")) else { return Vec::new() };
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let named = entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())));
    let mut found: Vec<_> = named.filter(|(_, path)| path.join("bin/cargo").exists()).collect();
    found.sort();
    found
}

/// The stdout of a command; none if it fails.
fn answer_of(command: &mut Command) -> Option<String> {
    let output = command.current_dir("/").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then_some(())?;
    String::from_utf8(output.stdout).ok()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    /// A home directory with toolchains that are only scripts.
    struct ToolchainHome(PathBuf);

    impl Drop for ToolchainHome {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    impl ToolchainHome {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("pal-toolchains-{name}-{}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn add(&self, program: &str, script: &str) {
            let path = self.0.join(program);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }

        fn find(&self, tool: Tool, versions: VersionRange) -> HostToolchains {
            let wanted = ToolRequirement { versions, ..ToolRequirement::any(tool, "file".into()) };
            let needs = Needs { tools: [tool].into(), requirements: vec![wanted], ..Needs::default() };
            let path = format!("{}:/usr/bin:/bin", self.0.join("bin").display()).into();
            find_toolchains(&GitIdentity { home: self.0.clone(), path, env: Vec::new() }, &needs)
        }
    }

    #[test]
    fn a_toolchain_of_a_version_manager_takes_the_place_of_one_that_does_not_fit() {
        let home = ToolchainHome::new("managed");
        for version in ["3.90.1", "3.91.0", "3.9.0", "2.7.18"] {
            home.add(&format!(".pyenv/versions/{version}/bin/python3"), "exit 1");
        }
        fs::create_dir_all(home.0.join(".pyenv/versions/3.99.0")).unwrap();
        let found = home.find(PYTHON, VersionRange::at_least("3.90").unwrap());
        let source = home.0.join(".pyenv/versions/3.91.0");
        assert_eq!(found.mounts, [HostToolchain { source, target: "/opt/python" }]);
        assert_eq!(found.env["LD_LIBRARY_PATH"], "/opt/python/lib");
        assert!(
            found.notes[0].starts_with("file needs python >= 3.90, and the Body has "),
            "{:?}",
            found.notes
        );
        assert_eq!(home.find(PYTHON, VersionRange::at_least("3.95").unwrap()), HostToolchains::default());
    }

    #[test]
    fn the_toolchain_of_rustup_is_the_named_one_else_one_that_fits_else_the_default() {
        let home = ToolchainHome::new("rust");
        for version in ["1.75.0", "1.90.0", "stable"] {
            let number = if version == "stable" { "1.80.0" } else { version };
            let dir = format!(".rustup/toolchains/{version}-x");
            home.add(&format!("{dir}/bin/rustc"), &format!("echo 'rustc {number} (x)'"));
            home.add(&format!("{dir}/bin/cargo"), "exit 1");
        }
        // As rustup does, this runs the toolchain that the variable names, and fails if it is not installed.
        home.add(
            "bin/rustc",
            r#"dir=$HOME/.rustup/toolchains/${RUSTUP_TOOLCHAIN:-stable}-x; [ -d "$dir" ] && echo "$dir""#,
        );
        let channel = |name: &str| VersionRange::Channel(name.to_owned());
        for (versions, toolchain) in [
            (channel("1.75.0"), "1.75.0-x"),
            (channel("1.60.0"), "stable-x"),
            (VersionRange::Any, "stable-x"),
            (VersionRange::at_least("1.80").unwrap(), "stable-x"),
            (VersionRange::at_least("1.85").unwrap(), "1.90.0-x"),
            (VersionRange::at_least("1.99").unwrap(), "stable-x"),
        ] {
            let found = home.find(CARGO, versions.clone());
            let source = home.0.join(".rustup/toolchains").join(toolchain);
            assert_eq!(found.mounts, [HostToolchain { source, target: "/opt/rust" }], "{versions}");
        }
    }
}
