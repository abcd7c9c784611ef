//! The template build engine: runs each step in a Body on top of the layers so far, and keeps the step's changes as a
//! layer.
//!
//! A layer's id is the hash of the layers below it and of the step, so a step that was built before is reused.
//! Trust: the commands and files of a build are as hostile as those of any Body. Commands run in a Body and nowhere
//! else.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read},
    path::PathBuf,
    time::Duration,
};

use body::archive::{self, ArchiveLimits, Dialect, Sink};
use bytes::{Bytes, BytesMut};
use proto::{
    BodyId, Failure, Kind, LayerId,
    event::hex,
    event_data::TemplateFailed,
    pack::{LayerEntry, LayerEntryKind},
    spec::BodyRole,
    template::{BodyBase, BuildId, LAYERS_MAX, StartCommand, TemplateBuild, TemplateSettings, VERSION},
    tree::{self, TreeItem},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;

use super::{BASE, BuildJob, BuildJobs, INTERPRETER, ResolvedTemplate};
use crate::{
    Create, ExecRequest, Fleet, Force, Image, OutputChunk, Stdin, blocking::run_blocking,
    drivers::DEFAULT_LAYER, egress::EgressSession, failures,
};

/// Most steps in one build.
pub const STEPS_MAX: usize = 1000;
/// Limits of the files of one COPY, unpacked.
const COPY_MAX: ArchiveLimits = ArchiveLimits { bytes: 8 << 30, entries: 1_000_000 };
/// Longest run time of one step.
const STEP_WALL: Duration = Duration::from_secs(3600);
const STAGE: &str = "/tmp/.palisade-copy";
/// How many bytes at the end of a command's output are searched for the reason of its failure.
const TAIL_MAX: usize = 16 << 10;
const CHUNK: usize = 128 << 10;
/// How often the build reads the decisions of the egress proxy.
const DECISIONS_EVERY: Duration = Duration::from_millis(250);
/// Most denials of one command that the build reports.
const DENIALS_MAX: usize = 64;
/// Messages that programs print if there is no network.
const NO_NETWORK: &[&str] = &[
    "Could not resolve",
    "Temporary failure in name resolution",
    "Temporary failure resolving",
    "Network is unreachable",
    "EAI_AGAIN",
    "Failed to establish a new connection",
    "Name or service not known",
    "getaddrinfo",
];

/// A request to build a template.
#[derive(Debug, Clone)]
pub struct BuildRequest {
    /// The base of the template.
    pub from: BaseImage,
    /// The steps, in order.
    pub steps: Vec<BuildStep>,
    /// The command that runs from each start of the template's Bodies.
    pub start: Option<StartCommand>,
    /// Whether all steps run again, even those that were built before.
    pub force: bool,
    /// Egress rules for the commands of the build; without any, the commands have no network.
    pub allow: Vec<String>,
}

/// The base of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BaseImage {
    /// Another template, by name.
    Template(String),
    /// An image from a registry.
    Image(Image),
}

/// One step of a build.
#[derive(Debug, Clone)]
pub struct BuildStep {
    /// The instruction of this step.
    pub act: Instruction,
    /// Whether the step runs again even if it was built before.
    pub force: bool,
}

/// The instruction of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Instruction {
    /// Copies files into the template.
    Copy {
        /// The files of the archive to copy, as a path or a pattern.
        source: String,
        /// The target path.
        target: String,
        /// The owner of the copied files.
        owner: Option<String>,
        /// The permission bits of the copied files, in octal.
        mode: Option<String>,
        /// The hash of the archive, computed by its sender.
        hash: String,
        /// The path of the archive.
        #[serde(skip)]
        archive: PathBuf,
    },
    /// Runs a shell command.
    Run {
        /// The command.
        command: String,
        /// The user that runs it.
        user: Option<String>,
    },
    /// Sets environment variables.
    Env(Vec<(String, String)>),
    /// Sets the working directory of commands, and creates it.
    Workdir(String),
    /// Sets the user of commands.
    User(String),
}

impl Instruction {
    fn describe(&self) -> String {
        match self {
            Instruction::Copy { source, target, .. } => format!("COPY {source} {target}"),
            Instruction::Run { command, .. } => format!("RUN {command}"),
            Instruction::Env(pairs) => format!(
                "ENV {}",
                pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
            ),
            Instruction::Workdir(path) => format!("WORKDIR {path}"),
            Instruction::User(name) => format!("USER {name}"),
        }
    }
}

/// The state of a build between two steps.
pub(super) struct BuildStage {
    pub layers: Vec<LayerId>,
    pub settings: TemplateSettings,
    /// The hash of all steps so far.
    pub chain: String,
}

impl BuildStage {
    fn user(&self) -> String {
        self.settings.user.clone().unwrap_or_else(|| "user".into())
    }

    fn workdir(&self) -> String {
        self.settings.workdir.clone().unwrap_or_else(|| "/home/user".into())
    }

    fn resolve(&self, path: &str) -> String {
        if path.starts_with('/') {
            path.to_owned()
        } else {
            format!("{}/{path}", self.workdir().trim_end_matches('/'))
        }
    }
}

/// A failure and its step, in E2B's terms: `base`, a number from 1 on, or `finalize`.
type StepFailure = (String, Failure);

/// Builds templates: from instructions, from images, and from Debian's packages.
#[derive(Debug, Clone, Copy)]
pub struct Builds<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) jobs: &'a BuildJobs,
}

impl Builds<'_> {
    /// Builds a template. Reports the progress to the job; when the build is complete, the job's tags refer to it.
    pub async fn build(&self, job: &BuildJob, request: BuildRequest) -> Result<TemplateBuild, Failure> {
        let built = self.build_steps(job, request).await;
        match &built {
            Ok(build) => job.ended(&format!("the template is ready: {}", proto::Size(build.bytes))),
            Err((step, failure)) => {
                let _ = self.fleet.log().note(TemplateFailed {
                    template: job.template.clone(),
                    build: job.id.clone(),
                    step: step.clone(),
                    why: failure.to_string(),
                });
                job.failed(step, failure);
                let _ = self.note_failed(job, step, failure);
            }
        }
        built.map_err(|(_, failure)| failure)
    }

    async fn build_steps(&self, job: &BuildJob, request: BuildRequest) -> Result<TemplateBuild, StepFailure> {
        let at = |step: &str| {
            let step = step.to_owned();
            move |failure| (step.clone(), failure)
        };
        let _building = self.fleet.garbage().building().map_err(at("base"))?;
        let count = request.steps.len();
        if count > STEPS_MAX {
            return Err((
                "base".into(),
                Failure::new(Kind::Limit, format!("a build has at most {STEPS_MAX} steps")),
            ));
        }
        job.say(&format!(
            "[base] FROM {}",
            match &request.from {
                BaseImage::Template(name) => name,
                BaseImage::Image(image) => &image.reference,
            }
        ));
        crate::check_rules(&request.allow).map_err(at("base"))?;
        let mut stand = self.begin_build(job, &request.from).await.map_err(at("base"))?;
        for (index, step) in request.steps.iter().enumerate() {
            let number = (index + 1).to_string();
            job.check().map_err(at(&number))?;
            job.say(&format!("[builder {number}/{count}] {}", step.act.describe()));
            self.step(job, &mut stand, step, request.force || step.force, &request.allow)
                .await
                .map_err(at(&number))?;
        }
        stand.settings.start = request.start;
        stand.settings.cpu_milli = job.cpu_milli.or(stand.settings.cpu_milli);
        stand.settings.memory = job.memory.or(stand.settings.memory);
        self.finalize(job, stand).await.map_err(at("finalize"))
    }

    async fn begin_build(&self, job: &BuildJob, from: &BaseImage) -> Result<BuildStage, Failure> {
        let name = match from {
            BaseImage::Template(name) => name.clone(),
            BaseImage::Image(image) => match own_image(&image.reference) {
                Some(name) => name.to_owned(),
                None => return self.begin_image(job, image).await,
            },
        };
        if (name == BASE || name == INTERPRETER) && self.fleet.templates().find_build(&name).is_err() {
            run_blocking(|| self.setup(&name, &mut |said| job.say(said)))?;
        }
        let build = self.fleet.templates().find_build(&name)?;
        if build.layers.is_empty() {
            return Err(Failure::new(
                Kind::Host,
                format!("template {name} is this host's own root, which cannot be the base of a build"),
            )
            .hint(
                "create the real one: apt-get install mmdebstrap && pal template rm base && pal setup base",
            ));
        }
        let chain = digest(&[&serde_json::to_string(&build.layers).unwrap_or_default()]);
        Ok(BuildStage {
            layers: build.layers,
            settings: TemplateSettings { start: None, ..build.settings },
            chain,
        })
    }

    async fn step(
        &self,
        job: &BuildJob,
        stand: &mut BuildStage,
        step: &BuildStep,
        force: bool,
        allow: &[String],
    ) -> Result<(), Failure> {
        let context = serde_json::to_string(&(&step.act, &stand.settings.env, stand.user(), stand.workdir()))
            .unwrap_or_default();
        let salt = if force {
            hex(&sys::random::bytes::<16>().map_err(|error| {
                Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
            })?)
        } else {
            String::new()
        };
        stand.chain = digest(&[&stand.chain, &context, &salt]);
        match &step.act {
            Instruction::Env(pairs) => {
                for (name, value) in pairs {
                    let value = expand(value, &stand.settings.env);
                    stand.settings.env.insert(name.clone(), value);
                }
                crate::create::check_env(&stand.settings.env)
            }
            Instruction::User(name) => {
                stand.settings.user = Some(name.clone());
                Ok(())
            }
            Instruction::Workdir(path) => {
                let path = stand.resolve(path);
                crate::create::check_inside(std::path::Path::new(&path))?;
                let make = r#"[ -d "$1" ] || { mkdir -p -- "$1" && chown "$2" -- "$1"; }"#;
                let (owner, place) = (stand.user(), path.clone());
                self.layer(job, stand, &[], async |body, _| {
                    self.run_script(job, body, make, &[&place, &owner], "/").await
                })
                .await?;
                stand.settings.workdir = Some(path);
                Ok(())
            }
            Instruction::Run { command, user } => {
                let (user, workdir) = (user.clone().unwrap_or_else(|| stand.user()), stand.workdir());
                self.layer(job, stand, allow, async |body, egress| {
                    self.run_command(job, body, egress, command, &user, &workdir).await
                })
                .await
            }
            Instruction::Copy { source, target, owner, mode, archive, .. } => {
                let owner = owner.clone().unwrap_or_else(|| stand.user());
                let (target, mode) = (stand.resolve(target), mode.clone().unwrap_or_default());
                self.layer(job, stand, &[], async |body, _| {
                    self.send_archive(body, archive).await?;
                    self.run_script(job, body, PLACE, &[STAGE, source, &target, &owner, &mode], "/").await
                })
                .await
            }
        }
    }

    /// Runs `act` in a Body on top of the layers so far and keeps its changes as a layer, or reuses the layer if it
    /// exists. `allow` has the egress rules of that Body.
    pub(super) async fn layer(
        &self,
        job: &BuildJob,
        stand: &mut BuildStage,
        allow: &[String],
        act: impl AsyncFnOnce(&BodyId, Option<&mut EgressSession>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if stand.layers.len() >= LAYERS_MAX {
            return Err(Failure::new(Kind::Limit, format!("a template has at most {LAYERS_MAX} layers"))
                .hint("join steps: each RUN, COPY and WORKDIR makes one"));
        }
        let id: LayerId = stand.chain[..32]
            .parse()
            .map_err(|_| Failure::new(Kind::Internal, "a hash cannot be used as an id"))?;
        if body::layers::read(&self.fleet.templates().layers_dir().join(id.as_str())).is_ok() {
            job.say("CACHED");
            stand.layers.insert(0, id);
            return Ok(());
        }
        let mut egress =
            if allow.is_empty() { None } else { Some(self.fleet.egress().open_session(allow.to_vec())?) };
        let body = run_blocking(|| self.build_body(job, stand, egress.as_ref()))?;
        let done = act(&body, egress.as_mut()).await;
        let kept = match done {
            Ok(()) => self.keep_layer(&body, id.clone(), &stand.chain).await,
            Err(failure) => Err(failure),
        };
        let removed = self.fleet.remove(&body, Force::Yes).await;
        kept?;
        removed?;
        stand.layers.insert(0, id);
        Ok(())
    }

    fn build_body(
        &self,
        job: &BuildJob,
        stand: &BuildStage,
        egress: Option<&EgressSession>,
    ) -> Result<BodyId, Failure> {
        let base = BodyBase {
            template: job.template.clone(),
            build: job.id.clone(),
            layers: stand.layers.clone(),
            sudo: stand.settings.sudo,
            start: None,
        };
        let rootfs = body::root::RootfsStack {
            layers: Some(self.fleet.templates().layers_below(&stand.layers)?),
            ..Default::default()
        };
        let settings = TemplateSettings { env: stand.settings.env.clone(), ..TemplateSettings::default() };
        let mut request = Create { template: format!("build {}", job.id), ..Create::kept() };
        request.limits.wall = Some(STEP_WALL);
        request.limits.memory = job.memory;
        request.role = BodyRole::Step;
        if let Some(egress) = egress {
            // The variables are for this Body only; they do not become part of the template's settings.
            request.env = egress.env();
            request.egress = Some(egress.spec.clone());
        }
        let view = self.fleet.creator().create_on(
            DEFAULT_LAYER,
            request,
            ResolvedTemplate { rootfs, base: Some(base), settings, ..ResolvedTemplate::default() },
            None,
        )?;
        Ok(view.spec.id)
    }

    async fn keep_layer(&self, body: &BodyId, id: LayerId, about: &str) -> Result<(), Failure> {
        let view = self.fleet.stop(body, Duration::ZERO).await?;
        run_blocking(|| self.keep_layer_of(body, &view, id, about))
    }

    /// Turns the files of a stopped Body into a layer.
    fn keep_layer_of(
        &self,
        body: &BodyId,
        view: &crate::BodyView,
        id: LayerId,
        about: &str,
    ) -> Result<(), Failure> {
        if view.spec.egress.is_some() {
            // The mount point of the egress proxy's socket is an empty directory, which must not become part of the
            // template.
            let place = self
                .fleet
                .body_path(body)
                .join("disk/upper/root")
                .join(proto::guest::EGRESS_DIR.trim_start_matches('/'));
            let _ = body::snapshot::remove(&self.fleet.launch_context.programs, &view.spec.ids, &place);
        }
        let name = format!("{id}.part{}", std::process::id());
        let draft = body::layers::LayerDraft::begin(
            &self.fleet.launch_context.programs,
            &self.fleet.templates().layers_dir(),
            &name,
            view.spec.ids.clone(),
        )
        .map_err(failures::layer)?;
        draft.take(&self.fleet.body_path(body), &view.spec).map_err(failures::layer)?;
        draft.finish(id, about, store::clock::now()).map_err(failures::layer).map(drop)
    }

    async fn run_command(
        &self,
        job: &BuildJob,
        body: &BodyId,
        mut egress: Option<&mut EgressSession>,
        command: &str,
        user: &str,
        workdir: &str,
    ) -> Result<(), Failure> {
        // E2B runs commands in a login shell: bash, or sh in images without bash.
        let choose = r#"if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; fi; exec /bin/sh -l -c "$1""#;
        let argv = ["/bin/sh", "-c", choose, "sh", command];
        let request = ExecRequest {
            user: Some(user.to_owned()),
            workdir: Some(workdir.to_owned()),
            ..ExecRequest::new(argv)
        };
        let shown = proto::text::visible(command);
        let unauthenticated = |failure: Failure| {
            let code = if failure.kind == Kind::Denied { "unauthenticated: " } else { "" };
            Failure {
                message: format!(
                    "failed to run command '{shown}': command failed: {code}{}",
                    failure.message
                ),
                ..failure
            }
        };
        let (code, tail) =
            self.watch(job, body, request, egress.as_deref_mut()).await.map_err(unauthenticated)?;
        if code == 0 {
            return Ok(());
        }
        let failure =
            Failure::new(Kind::Usage, format!("failed to run command '{shown}': exit status {code}"));
        let closed = egress.is_none();
        Err(match egress.as_ref().and_then(|egress| egress.denied.first()) {
            Some(first) => with_reason(failure, &format!("the egress proxy denied {first}")).hint(format!("allow it: pal serve --build-allow {0}, or pal template build --allow {0}; for a devcontainer.json in palisade.toml: [prepare] allow = [\"{0}\"]", first.to)),
            None if closed && NO_NETWORK.iter().any(|said| tail.contains(said)) => {
                let hint = "commands of this build have no network: copy what they need with COPY";
                with_reason(failure, hint).hint(hint)
            }
            None => failure,
        })
    }

    /// Runs a script of Palisade's own as root in the Body.
    pub(super) async fn run_script(
        &self,
        job: &BuildJob,
        body: &BodyId,
        script: &str,
        arguments: &[&str],
        workdir: &str,
    ) -> Result<(), Failure> {
        let argv = ["/bin/sh", "-c", script, "sh"].into_iter().chain(arguments.iter().copied());
        let request = ExecRequest {
            user: Some("root".into()),
            workdir: Some(workdir.to_owned()),
            ..ExecRequest::new(argv)
        };
        match self.watch(job, body, request, None).await? {
            (0, _) => Ok(()),
            (code, said) => Err(Failure::new(
                Kind::Usage,
                format!("it ended with code {code}: {}", proto::text::visible(said.trim())),
            )),
        }
    }

    /// Runs a command and reports its output and its denied connections, until it ends or the build is cancelled.
    async fn watch(
        &self,
        job: &BuildJob,
        body: &BodyId,
        request: ExecRequest,
        mut egress: Option<&mut EgressSession>,
    ) -> Result<(i32, String), Failure> {
        let mut exec = self
            .fleet
            .execs()
            .start(body, ExecRequest { stdin: Stdin::Null, timeout: Some(STEP_WALL), ..request })
            .await?;
        let mut lines = job.lines();
        loop {
            tokio::select! {
                output = exec.next() => match output? {
                    Some(OutputChunk::Stdout(bytes) | OutputChunk::Stderr(bytes) | OutputChunk::Tty(bytes)) => lines.push(&bytes),
                    None => break,
                },
                () = tokio::time::sleep(DECISIONS_EVERY), if egress.is_some() => self.tell_denials(job, body, egress.as_deref_mut())?,
                () = job.wait_cancelled() => return Err(super::jobs::cancelled_failure()),
            }
        }
        let tail = lines.finish(TAIL_MAX);
        let code = exec.finish().await?.code;
        self.tell_denials(job, body, egress)?;
        Ok((code, tail))
    }

    /// Reports the connections of a command that the egress proxy denied, each target once.
    fn tell_denials(
        &self,
        job: &BuildJob,
        body: &BodyId,
        egress: Option<&mut EgressSession>,
    ) -> Result<(), Failure> {
        let Some(egress) = egress else { return Ok(()) };
        let told = egress.denied.len();
        for denied in
            self.fleet.egress().note_denials(body, egress)?.iter().take(DENIALS_MAX.saturating_sub(told))
        {
            job.warn(&format!("network: the egress proxy denied {denied}"));
        }
        Ok(())
    }

    /// Sends the files of an archive to the staging directory in a Body.
    async fn send_archive(&self, body: &BodyId, archive: &std::path::Path) -> Result<(), Failure> {
        let file = File::open(archive).map_err(|error| {
            Failure::new(Kind::NotFound, "the files of this step were never uploaded")
                .because(error)
                .hint("upload them again: build with `force_upload`")
        })?;
        let (sender, receiver) = mpsc::channel(8);
        let walked = tokio::task::spawn_blocking(move || {
            let mut forwarder = ArchiveForwarder {
                pieces: sender,
                held: BytesMut::from(&tree::MAGIC[..]),
                made: BTreeSet::new(),
            };
            let failed = |error: &dyn std::error::Error| {
                io::Error::other(match error.source() {
                    Some(cause) => format!("{error}: {cause}"),
                    None => error.to_string(),
                })
            };
            forwarder.item(&TreeItem::Dir { path: Vec::new(), mode: 0o755 })?;
            archive::read(file, Dialect::Plain, COPY_MAX, &mut forwarder).map_err(|error| failed(&error))?;
            forwarder.item(&TreeItem::End)?;
            forwarder.flush()
        });
        let sent = self.fleet.guest(body).write_tree(STAGE, Some("root"), receiver).await;
        let walked = walked
            .await
            .map_err(|error| Failure::new(Kind::Internal, "the copy was interrupted").because(error))?;
        // If the archive is bad, that is the cause, whatever the guest answers. A broken pipe means that the guest
        // refused.
        match walked {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(Failure::new(Kind::Usage, format!("cannot copy the uploaded files: {error}")))
            }
            _ => sent.map_err(failures::guest),
        }
    }

    /// Starts a Body from the result, as a test, before the template can be used.
    async fn finalize(&self, job: &BuildJob, stand: BuildStage) -> Result<TemplateBuild, Failure> {
        job.check()?;
        job.say("[finalize] starting a Body from the template");
        let build = TemplateBuild {
            v: VERSION,
            id: job.id.clone(),
            template: job.template.clone(),
            created_at: store::clock::now(),
            source: job.source(),
            bytes: self.layer_bytes(&stand.layers),
            layers: stand.layers,
            settings: stand.settings,
        };
        let origin = self.fleet.templates().origin_of(build.clone())?;
        let request =
            Create { template: format!("build {}", job.id), role: BodyRole::Step, ..Create::kept() };
        let view = run_blocking(|| self.fleet.creator().create_on(DEFAULT_LAYER, request, origin, None))?;
        let tried = self.try_out(job, view.id(), &build).await;
        self.fleet.remove(view.id(), Force::Yes).await?;
        tried?;
        run_blocking(|| {
            self.fleet.templates().keep_build(&build, &job.tags)?;
            let _ = self.forget_job(job);
            Ok(build)
        })
    }

    async fn try_out(&self, job: &BuildJob, body: &BodyId, build: &TemplateBuild) -> Result<(), Failure> {
        let (code, said) = self.watch(job, body, ExecRequest::new(["/bin/sh", "-c", "true"]), None).await?;
        if code != 0 {
            return Err(Failure::new(
                Kind::Usage,
                format!(
                    "a shell in the template ends with code {code}: {}",
                    proto::text::visible(said.trim())
                ),
            ));
        }
        let Some(start) = &build.settings.start else { return Ok(()) };
        let templates = self.fleet.templates();
        tokio::select! {
            started = templates.start_template(body, start, super::start::ReadyWait::Whole) => started,
            () = job.wait_cancelled() => Err(super::jobs::cancelled_failure()),
        }
    }
}

/// Adds the reason to a failure's message, because E2B's clients show only the message.
fn with_reason(failure: Failure, reason: &str) -> Failure {
    Failure { message: format!("{} ({reason})", failure.message), ..failure }
}

/// Copies the staged files to their target, as Docker's COPY does. Arguments: staging directory, source, target,
/// owner, mode.
const PLACE: &str = r#"
set -e
stage=$1; source=$2; target=$3; owner=$4; mode=$5
case $owner in *:*) ;; *) owner="$owner:$(id -g "$owner")";; esac
cd "$stage"
find . -mindepth 1 -exec chown -h "$owner" {} +
[ -z "$mode" ] || find . -mindepth 1 ! -type l -exec chmod "$mode" {} +
into() {
  if [ -d "$1" ] && [ ! -L "$1" ]; then cp -a "$1/." "$target/"; else cp -a "$1" "$target/"; fi
}
make_target() {
  [ -d "$target" ] || { mkdir -p -- "$target"; chown "$owner" -- "$target"; }
}
case $source in
  *[*?[]*)
    make_target
    IFS=
    for entry in ./$source; do into "$entry"; done
    ;;
  *)
    entry="./$source"
    if [ -d "$entry" ] && [ ! -L "$entry" ]; then make_target; into "$entry"
    elif [ -d "$target" ]; then into "$entry"
    else case $target in
      */) make_target; into "$entry";;
      *) mkdir -p -- "$(dirname "$target")"; cp -a "$entry" "$target";;
    esac; fi
    ;;
esac
cd /; rm -rf "$stage"
"#;

/// Converts the entries of an archive to a tree for the guest.
struct ArchiveForwarder {
    pieces: mpsc::Sender<Result<Bytes, io::Error>>,
    held: BytesMut,
    made: BTreeSet<Vec<u8>>,
}

impl ArchiveForwarder {
    fn item(&mut self, item: &TreeItem) -> io::Result<()> {
        tree::write(item, &mut self.held);
        if self.held.len() >= CHUNK { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = self.held.split().freeze();
        self.pieces.blocking_send(Ok(piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Sends the parent directories of a path that the archive does not contain.
    fn above(&mut self, path: &[u8]) -> io::Result<()> {
        for (at, _) in path.iter().enumerate().filter(|(_, byte)| **byte == b'/') {
            if self.made.insert(path[..at].to_vec()) {
                self.item(&TreeItem::Dir { path: path[..at].to_vec(), mode: 0o755 })?;
            }
        }
        Ok(())
    }
}

impl Sink for ArchiveForwarder {
    fn take(&mut self, entry: LayerEntry, contents: &mut dyn Read) -> io::Result<()> {
        if entry.path.is_empty() {
            return Ok(());
        }
        self.above(&entry.path)?;
        let (path, mode) = (entry.path, entry.mode);
        match entry.what {
            LayerEntryKind::Dir => {
                if self.made.insert(path.clone()) {
                    self.item(&TreeItem::Dir { path, mode })
                } else {
                    Ok(())
                }
            }
            LayerEntryKind::Link(target) => self.item(&TreeItem::Link { path, target }),
            LayerEntryKind::File(_) => {
                self.item(&TreeItem::File { path, mode })?;
                let mut buffer = vec![0; CHUNK];
                loop {
                    match contents.read(&mut buffer)? {
                        0 => return self.item(&TreeItem::FileEnd),
                        len => self.item(&TreeItem::Data(Bytes::copy_from_slice(&buffer[..len])))?,
                    }
                }
            }
            LayerEntryKind::Same(_) => {
                Err(io::Error::other("the archive contains a hard link: send the file twice instead"))
            }
            LayerEntryKind::Gone | LayerEntryKind::Opaque | LayerEntryKind::End => Ok(()),
        }
    }
}

pub(crate) fn digest(parts: &[&str]) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hex(&hasher.finalize())
}

/// Maps E2B's own images to Palisade's templates.
fn own_image(image: &str) -> Option<&'static str> {
    let image = image.trim_start_matches("docker.io/");
    let name = image.split([':', '@']).next().unwrap_or(image);
    match name {
        "e2bdev/base" => Some(BASE),
        name if name.starts_with("e2bdev/code-interpreter") => Some(INTERPRETER),
        _ => None,
    }
}

/// Replaces `$NAME` and `${NAME}` with values of `env`, as a shell would.
fn expand(value: &str, env: &BTreeMap<String, String>) -> String {
    let mut out = String::new();
    let mut rest = value;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let braced = rest.strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let plain = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = braced.unwrap_or((&rest[..plain], &rest[plain..]));
        if name.is_empty() {
            out.push('$');
            continue;
        }
        out.push_str(env.get(name).map_or_else(|| if name == "PATH" { PATH } else { "" }, String::as_str));
        rest = after;
    }
    out + rest
}

/// The default `PATH`.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Generates the id of a build.
pub(crate) fn job_id() -> Result<BuildId, Failure> {
    Ok(BuildId::from_random(sys::random::bytes().map_err(|error| {
        Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
    })?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_hold_what_was_set_before() {
        let env = BTreeMap::from([("A".to_owned(), "x".to_owned())]);
        for (value, expected) in [
            ("$A-${A}$", "x-x$"),
            ("$PATH:/b", &format!("{PATH}:/b")),
            ("$no", ""),
            ("a$$A", "a$x"),
            ("${A", "${A"),
        ] {
            assert_eq!(expand(value, &env), expected, "{value}");
        }
    }

    #[test]
    fn images_of_e2b_are_templates_of_ours() {
        for (image, expected) in [
            ("e2bdev/base", Some(BASE)),
            ("e2bdev/base:latest", Some(BASE)),
            ("docker.io/e2bdev/code-interpreter:v1", Some(INTERPRETER)),
            ("debian:12", None),
            ("evil/e2bdev/base", None),
        ] {
            assert_eq!(own_image(image), expected, "{image}");
        }
    }
}
