//! Palisade's own templates, built from Debian's packages: `base` and `code-interpreter-v1`.
//!
//! A process that is killed during the build leaves a layer without a record and a directory below `/var/tmp`, which
//! the next build or `gc` removes.

use std::{
    fs,
    io::Read,
    os::{
        fd::AsFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use body::{
    archive::Dialect,
    ids,
    layers::{self, UNPACKED_MAX},
};
use proto::{
    Failure, Kind, LayerId,
    template::{BuildId, DEFAULT_TAG, TemplateBuild, TemplateSettings, VERSION},
};

use super::interpreter;
use crate::child_output::for_each_line;
use crate::{Builds, GarbageItem, GcMode, TemplateView, failures};

/// The template that E2B's clients use by default.
pub const BASE: &str = "base";
/// The template of E2B's code interpreter.
pub const INTERPRETER: &str = "code-interpreter-v1";
/// The Debian release of `base`.
const RELEASE: &str = "trixie";
/// The packages of `base`.
const PACKAGES: &[&str] = &[
    "adduser",
    "bash",
    "bash-completion",
    "bzip2",
    "ca-certificates",
    "curl",
    "file",
    "git",
    "gnupg",
    "iproute2",
    "iputils-ping",
    "jq",
    "less",
    "nano",
    "netbase",
    "nodejs",
    "npm",
    "openssh-client",
    "passwd",
    "procps",
    "psmisc",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "ripgrep",
    "rsync",
    "sudo",
    "tzdata",
    "unzip",
    "vim-tiny",
    "wget",
    "xz-utils",
    "zip",
];
/// dpkg options that skip documentation, which is useless in a sandbox, and fsync, which only protects from a loss of
/// power.
const DPKG_OPTIONS: &[&str] = &[
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
];
/// Commands that finish the new root: they create the account, allow it sudo, and set PATH.
const FINISH: &[&str] = &[
    r#"chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 --user-group user"#,
    // sudo keeps these variables, by which programs find the egress proxy of a build.
    r#"printf '%s\n' 'user ALL=(ALL:ALL) NOPASSWD: ALL' 'Defaults env_keep += "http_proxy https_proxy HTTP_PROXY HTTPS_PROXY no_proxy NO_PROXY SSL_CERT_FILE CURL_CA_BUNDLE GIT_SSL_CAINFO NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE PIP_CERT"' > "$1/etc/sudoers.d/user" && chmod 0440 "$1/etc/sudoers.d/user""#,
    r#"echo 'Set disable_coredump false' > "$1/etc/sudo.conf""#,
    r#"echo 'LANG=C.UTF-8' > "$1/etc/default/locale""#,
    // Login shells keep the PATH that they are given, so that a template's own PATH stays in effect.
    r#"printf '%s\n' 'export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"' 'if [ "${PS1-}" ]; then if [ "${BASH-}" ] && [ "$BASH" != /bin/sh ] && [ -f /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi; fi' 'for part in /etc/profile.d/*.sh; do if [ -r "$part" ]; then . "$part"; fi; done; unset part' > "$1/etc/profile""#,
    // A sandbox is an environment of its own: `pip install` works as in Python's own images.
    r#"rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED"#,
    r#"rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/etc/machine-id"#,
];
const SAID_LINES_MAX: usize = 5;
/// The directories in which packages install programs.
const PLACES: [&str; 5] = ["/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin"];
/// The parent of the temporary directory in which a root is built.
const SCRATCH: &str = "/var/tmp";

/// A callback that receives lines about the progress.
pub type ProgressFn<'a> = &'a mut (dyn FnMut(&str) + Send);

impl Builds<'_> {
    /// Builds one of Palisade's own templates, unless it exists.
    pub fn setup(&self, name: &str, say: ProgressFn<'_>) -> Result<TemplateView, Failure> {
        self.setup_with(name, &PLACES.map(PathBuf::from), say)
    }

    /// Builds one of Palisade's own templates, unless it exists; searches programs in the given directories.
    pub fn setup_with(
        &self,
        name: &str,
        places: &[PathBuf],
        say: ProgressFn<'_>,
    ) -> Result<TemplateView, Failure> {
        if name != BASE && name != INTERPRETER {
            return Err(Failure::new(
                Kind::Usage,
                format!("{:?} is not a template that pal can build itself", proto::text::visible(name)),
            )
            .hint("it can build `base` and `code-interpreter-v1`"));
        }
        // Of two processes, the second waits for the first and finds the template.
        let _turn = self.turn(name)?;
        if let Some(view) =
            self.fleet.templates().view(name).ok().filter(|view| view.default_build().is_some())
        {
            return Ok(view);
        }
        if name == BASE {
            self.setup_base(places, say)?
        } else {
            self.setup_interpreter(places, say)?
        };
        self.fleet.templates().view(name)
    }

    fn turn(&self, name: &str) -> Result<fs::File, Failure> {
        let dir = self.fleet.data.join("templates");
        let locked = fs::create_dir_all(&dir)
            .and_then(|()| fs::File::create(dir.join(format!("{name}.lock"))))
            .and_then(|file| {
                rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
                Ok(file)
            });
        locked.map_err(|error| {
            Failure::new(Kind::Host, format!("cannot lock the template {name}")).because(error)
        })
    }

    fn setup_base(&self, places: &[PathBuf], say: ProgressFn<'_>) -> Result<TemplateBuild, Failure> {
        let _building = self.fleet.garbage().building()?;
        let settings = own_settings();
        if let Some(program) = find_program("mmdebstrap", places) {
            say(&format!("making `base` from Debian {RELEASE} with mmdebstrap: some minutes, about 600 MiB"));
            let source = format!("Debian {RELEASE}, by mmdebstrap");
            let scratch = self.scratch(BASE)?;
            let layer = self.layer_from(mmdebstrap(&program, &[], &scratch.path), &source, say)?;
            return self.finish_build(
                self.fleet.templates().find_or_create(BASE)?.id,
                vec![layer],
                settings,
                &source,
            );
        }
        if let Some(program) = find_program("debootstrap", places).filter(|_| sys::caps::is_host_root()) {
            say(&format!(
                "making `base` from Debian {RELEASE} with debootstrap: some minutes, about 600 MiB"
            ));
            let scratch = self.scratch(BASE)?;
            let source = format!("Debian {RELEASE}, by debootstrap");
            let layer = self.layer_from(debootstrap(&program, &scratch.path), &source, say)?;
            return self.finish_build(
                self.fleet.templates().find_or_create(BASE)?.id,
                vec![layer],
                settings,
                &source,
            );
        }
        say("neither mmdebstrap nor debootstrap is installed: `base` becomes this host's own root");
        say("for the real one: apt-get install mmdebstrap && pal template rm base && pal setup base");
        let template = self.fleet.templates().find_or_create(BASE)?;
        let settings = TemplateSettings { sudo: false, ..settings };
        let source = "this host's own root, read-only, for want of mmdebstrap or debootstrap";
        self.finish_build(template.id, Vec::new(), settings, source)
    }

    fn setup_interpreter(&self, places: &[PathBuf], say: ProgressFn<'_>) -> Result<TemplateBuild, Failure> {
        let _building = self.fleet.garbage().building()?;
        let program = find_program("mmdebstrap", places).ok_or_else(|| {
            Failure::new(
                Kind::Host,
                format!("cannot build the template {INTERPRETER}: mmdebstrap is not installed"),
            )
            .hint("apt-get install mmdebstrap")
        })?;
        say(&format!("making `{INTERPRETER}` from Debian {RELEASE} and PyPI: some minutes, about 1.2 GiB"));
        let source = format!("Debian {RELEASE}, by mmdebstrap, and packages of PyPI");
        let scratch = self.scratch(INTERPRETER)?;
        let root =
            self.layer_from(mmdebstrap(&program, &interpreter::hooks(), &scratch.path), &source, say)?;
        drop(scratch);
        let own = self.import_layer("the code interpreter", &interpreter::archive()?[..])?;
        self.finish_build(
            self.fleet.templates().find_or_create(INTERPRETER)?.id,
            vec![own, root],
            interpreter::settings(),
            &source,
        )
    }

    /// Creates the temporary directory for the build of a template, after removing the remains of a killed build. The
    /// caller holds the template's lock.
    fn scratch(&self, name: &str) -> Result<ScratchDir, Failure> {
        let scratch = ScratchDir {
            path: self.scratch_path(name),
            programs: self.fleet.launch_context.programs.clone(),
        };
        let made = scratch.clear().and_then(|()| fs::DirBuilder::new().mode(0o755).create(&scratch.path));
        made.map_err(|error| {
            Failure::new(Kind::Host, format!("cannot create a temporary directory in {SCRATCH}"))
                .because(error)
        })?;
        Ok(scratch)
    }

    /// The path of the temporary directory: one for each user, data directory and template, and always the same, so
    /// that remains are found.
    fn scratch_path(&self, name: &str) -> PathBuf {
        let about = format!("{}:{}", rustix::process::geteuid().as_raw(), self.fleet.data.display());
        Path::new(SCRATCH).join(format!("palisade-{}-{name}", &super::build::digest(&[&about])[..16]))
    }

    /// Removes the temporary directories of builds that were killed.
    pub(crate) fn sweep_scratch(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) {
        for name in [BASE, INTERPRETER] {
            let scratch = std::mem::ManuallyDrop::new(ScratchDir {
                path: self.scratch_path(name),
                programs: self.fleet.launch_context.programs.clone(),
            });
            let lock = fs::File::open(self.fleet.data.join("templates").join(format!("{name}.lock")));
            let idle = lock.is_ok_and(|lock| {
                rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
            });
            if !idle || !scratch.path.exists() {
                continue;
            }
            let bytes = fs::File::open(&scratch.path)
                .ok()
                .and_then(|dir| sys::tree::usage(dir.as_fd()).ok())
                .map_or(0, |usage| usage.bytes);
            found.push(GarbageItem {
                kind: "scratch",
                name: name.to_owned(),
                bytes,
                why: "the template is incomplete".to_owned(),
            });
            if sweep == GcMode::Remove {
                let _ = scratch.clear();
            }
        }
    }

    /// Creates a template from an archive of its whole root.
    pub fn import_template(
        &self,
        name: &str,
        source: &str,
        settings: TemplateSettings,
        archive: impl Read,
    ) -> Result<TemplateBuild, Failure> {
        let template = self.fleet.templates().find_or_create(name)?;
        let _building = self.fleet.garbage().building()?;
        let layer = self.import_layer(source, archive)?;
        self.finish_build(template.id, vec![layer], settings, source)
    }

    fn import_layer(&self, source: &str, archive: impl Read) -> Result<LayerId, Failure> {
        let id = LayerId::from_random(sys::random::bytes().map_err(|error| {
            Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
        })?);
        let draft = self.draft_layer(&id)?;
        draft.unpack(archive, Dialect::Plain, UNPACKED_MAX).map_err(failures::layer)?;
        Ok(draft.finish(id, source, store::clock::now()).map_err(failures::layer)?.id)
    }

    /// Creates the draft of a layer.
    pub(crate) fn draft_layer(&self, id: &LayerId) -> Result<layers::LayerDraft<'_>, Failure> {
        let ids = ids::of_layers().map_err(failures::ids)?;
        layers::LayerDraft::begin(
            &self.fleet.launch_context.programs,
            &self.fleet.templates().layers_dir(),
            &format!("{id}.part"),
            ids,
        )
        .map_err(failures::layer)
    }

    /// Records a build, and points the default tag at it.
    pub(super) fn finish_build(
        &self,
        template: proto::TemplateId,
        layers: Vec<LayerId>,
        settings: TemplateSettings,
        source: &str,
    ) -> Result<TemplateBuild, Failure> {
        let drawn = sys::random::bytes().map_err(|error| {
            Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
        })?;
        let build = TemplateBuild {
            v: VERSION,
            id: BuildId::from_random(drawn),
            template,
            created_at: store::clock::now(),
            source: source.to_owned(),
            bytes: self.layer_bytes(&layers),
            layers,
            settings,
        };
        self.fleet.templates().keep_build(&build, &[DEFAULT_TAG.to_owned()])?;
        Ok(build)
    }

    pub(crate) fn layer_bytes(&self, ids: &[LayerId]) -> u64 {
        ids.iter()
            .filter_map(|id| layers::read(&self.fleet.templates().layers_dir().join(id.as_str())).ok())
            .map(|layer| layer.bytes)
            .sum()
    }

    /// Creates a layer from the archive that a program writes to its standard output. Reports the program's standard
    /// error.
    fn layer_from(
        &self,
        mut command: Command,
        source: &str,
        say: ProgressFn<'_>,
    ) -> Result<LayerId, Failure> {
        let cannot =
            |error: std::io::Error| Failure::new(Kind::Host, "cannot build the template").because(error);
        let id = LayerId::from_random(sys::random::bytes().map_err(cannot)?);
        let draft = self.draft_layer(&id)?;
        sys::process::own_process_group(&mut command);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let mut last = Vec::new();
        let unpacked = std::thread::scope(|scope| {
            let unpacking = scope.spawn(|| {
                let archive = stdout.ok_or_else(|| cannot(std::io::ErrorKind::BrokenPipe.into()))?;
                draft.unpack(archive, Dialect::Plain, UNPACKED_MAX).map_err(failures::layer)
            });
            let mut hear = |line: String| {
                // The host's temporary path is of no interest to the user.
                let line = line.replace(SCRATCH, "");
                say(&line);
                last.push(line);
                if last.len() > SAID_LINES_MAX {
                    last.remove(0);
                }
            };
            stderr.into_iter().for_each(|stderr| for_each_line(stderr, &mut hear));
            unpacking
                .join()
                .unwrap_or_else(|_| Err(Failure::new(Kind::Internal, "unpacking was interrupted")))
        });
        // An archive that was truncated between two files looks complete, so the program's exit code decides.
        if !child.wait().map_err(cannot)?.success() {
            // If one of the two fails, the other fails as a consequence; the failure has both reasons.
            let reader = unpacked.err().map(|failure| {
                std::iter::once(failure.to_string()).chain(failure.causes()).collect::<Vec<_>>().join(": ")
            });
            last.extend(reader);
            return Err(cannot(std::io::Error::other(last.join("\n")))
                .hint("it needs Debian's mirrors (http://deb.debian.org) and, for the code interpreter, PyPI; try again when they can be reached"));
        }
        unpacked?;
        Ok(draft.finish(id, source, store::clock::now()).map_err(failures::layer)?.id)
    }
}

/// A temporary directory outside of the data directory, because programs with other ids must reach it. Removed when
/// dropped.
struct ScratchDir {
    path: PathBuf,
    programs: body::programs::Programs,
}

impl ScratchDir {
    fn clear(&self) -> std::io::Result<()> {
        let Ok(found) = fs::symlink_metadata(&self.path) else { return Ok(()) };
        // Every user may create files next to it.
        if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
            return Err(std::io::Error::other(format!("{} belongs to another user", self.path.display())));
        }
        if sys::caps::is_host_root() {
            return fs::remove_dir_all(&self.path);
        }
        // Its files belong to the user's subordinate ids.
        let ids = ids::of_layers().map_err(std::io::Error::other)?;
        let removed = body::snapshot::remove(&self.programs, &ids, &self.path);
        // The directory itself belongs to the user, and its parent is sticky, so the user removes it directly.
        match fs::remove_dir(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                removed.map_err(std::io::Error::other).and(Err(error))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = self.clear();
    }
}

/// The settings of Palisade's own templates.
pub(super) fn own_settings() -> TemplateSettings {
    let env = [("LANG".to_owned(), "C.UTF-8".to_owned())].into();
    TemplateSettings {
        env,
        user: Some("user".into()),
        workdir: Some("/home/user".into()),
        sudo: true,
        ..TemplateSettings::default()
    }
}

/// Finds a program of the host.
fn find_program(name: &str, places: &[PathBuf]) -> Option<PathBuf> {
    places.iter().filter(|dir| dir.is_absolute()).map(|dir| dir.join(name)).find(|path| path.is_file())
}

fn clean_environment(program: &Path, scratch: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C.UTF-8");
    command.env("TMPDIR", scratch);
    command
}

fn mmdebstrap(program: &Path, hooks: &[String], scratch: &Path) -> Command {
    let mut command = clean_environment(program, scratch);
    command.arg(if sys::caps::is_host_root() { "--mode=root" } else { "--mode=unshare" });
    command.args(["--variant=minbase", "--format=tar"]).arg(format!("--include={}", PACKAGES.join(",")));
    command.args(DPKG_OPTIONS.iter().map(|option| format!("--dpkgopt={option}")));
    command.arg("--aptopt=Acquire::Retries \"3\"");
    let lines = FINISH.iter().copied().chain(hooks.iter().map(String::as_str));
    command.args(lines.map(|line| format!("--customize-hook={line}")));
    command.args([RELEASE, "-"]);
    command
}

/// A script that runs debootstrap and finishes the root. It installs the packages with apt, because debootstrap does
/// not resolve all dependencies. The paths in the script are constants.
fn debootstrap(program: &Path, scratch: &Path) -> Command {
    // The mount namespace, and the mounts in it, end with its last process.
    let mut command = clean_environment(Path::new("unshare"), scratch);
    command.args(["--mount", "--propagation", "private", "/bin/sh"]);
    let options: String = DPKG_OPTIONS.iter().map(|option| format!(" '{option}'")).collect();
    let finish: String = FINISH.iter().map(|line| format!("{line} >&2\n")).collect();
    let script = format!(
        "set -e\nset -- \"$2\" \"$1\"\nunset TMPDIR\nexport DEBIAN_FRONTEND=noninteractive\n\
         \"$2\" --variant=minbase {RELEASE} \"$1\" >&2\n\
         printf '%s\\n'{options} > \"$1/etc/dpkg/dpkg.cfg.d/palisade\"\n\
         mount -t proc proc \"$1/proc\"\n\
         chroot \"$1\" apt-get -q -o Acquire::Retries=3 update >&2\n\
         chroot \"$1\" apt-get -q -y -o Acquire::Retries=3 --no-install-recommends install {} >&2\n\
         umount \"$1/proc\"\n{finish}rm -rf \"$1\"/var/cache/apt/archives/*.deb\n\
         exec tar --create --directory \"$1\" --numeric-owner --exclude=./dev/* --exclude=./proc/* --exclude=./sys/* .\n",
        PACKAGES.join(" ")
    );
    command.args(["-c", &script, "sh"]).arg(program).arg(scratch.join("root"));
    command
}
