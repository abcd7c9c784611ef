//! Builds the environment that devcontainer.json describes: a template, built once for each set of inputs, and the
//! user, variables and ports of its Bodies.
//!
//! Trust: the file comes from a repository. It chooses the contents of its Bodies only; images are resolved by the
//! caller ([`UpRequest::images`]), and the steps of a build run in Bodies.

use std::{collections::BTreeMap, path::Path, time::Duration};

use proto::{Failure, template::TemplateSettings, workspace::Workspace};
use workspace::{DevcontainerRoot, Git, Needs, VariableContext};

use super::{DevcontainerChoice, Progress, ProgressLine, prepare::PATH};
use crate::{
    BaseImage, BuildRequest, BuildStep, Instruction, UpRequest, Workspaces, failures,
    templates::{build::digest, dockerfile},
};

/// Longest Dockerfile, in bytes.
const FILE_LEN_MAX: usize = 1 << 20;
/// The directories that are searched for programs.
const PROGRAMS: &[&str] = &["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];

/// The template of a request's Bodies, before dependencies are installed.
#[derive(Debug, Clone)]
pub(crate) struct BaseTemplate {
    /// The template's name.
    pub template: String,
    /// The build id, which changes whenever the template's contents change.
    pub state: String,
    /// The settings of the template.
    pub settings: TemplateSettings,
    /// The directories of its layers, top first; `/` for the host's own root.
    roots: Vec<std::path::PathBuf>,
}

impl BaseTemplate {
    /// Whether its Bodies use the host's own programs.
    pub fn is_host(&self) -> bool {
        self.template == "host"
    }

    /// Whether a file exists, by its path without a leading `/`.
    pub fn has(&self, path: &str) -> bool {
        self.roots.iter().any(|root| std::fs::symlink_metadata(root.join(path)).is_ok())
    }

    fn has_program(&self, name: &str) -> bool {
        PROGRAMS.iter().any(|dir| self.has(&format!("{dir}/{name}")))
    }

    /// Whether it has an account of that name, or the name is a numeric id.
    fn has_account(&self, user: &str) -> bool {
        let name = user.split(':').next().unwrap_or(user);
        if self.is_host() {
            return ["root", "user", "nobody"].contains(&name);
        }
        let passwd = self
            .roots
            .iter()
            .find_map(|root| sys::fd::read_small(&root.join("etc/passwd"), 1 << 20).ok())
            .unwrap_or_default();
        name.parse::<u32>().is_ok() || passwd.lines().any(|line| line.split(':').next() == Some(name))
    }

    /// The environment variables that its commands have by default.
    pub fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.settings.env.clone();
        env.entry("PATH".into()).or_insert_with(|| PATH.to_owned());
        env
    }
}

impl Workspaces<'_> {
    /// The template of a request's Bodies: the one that the caller asked for, else the one that the first repository
    /// describes.
    pub(crate) async fn base_template(
        &self,
        up: &UpRequest,
        first: Option<(&Workspace, &Needs)>,
        say: Progress<'_>,
    ) -> Result<BaseTemplate, Failure> {
        let asked = &up.create.template;
        let root =
            first.and_then(|(workspace, needs)| Some((workspace, needs, needs.container.root.as_ref()?)));
        let template = match root {
            Some((workspace, needs, root)) if up.devcontainer == DevcontainerChoice::Use => {
                self.container(up, workspace, needs, root, say).await?
            }
            Some(_) => {
                say(ProgressLine::Note(&format!(
                    "devcontainer.json describes a template of its own; the requested template {} is used instead",
                    proto::text::visible(asked)
                )));
                asked.clone()
            }
            None => asked.clone(),
        };
        self.base_template_of(template)
    }

    /// The template of this name.
    pub(super) fn base_template_of(&self, template: String) -> Result<BaseTemplate, Failure> {
        let host = |template| BaseTemplate {
            template,
            state: String::new(),
            settings: TemplateSettings::default(),
            roots: vec!["/".into()],
        };
        if template == "host" || self.fleet.templates().find(&template)?.is_none() {
            return Ok(host(template));
        }
        let build = self.fleet.templates().find_build(&template)?;
        if build.layers.is_empty() {
            return Ok(BaseTemplate {
                settings: build.settings,
                state: build.id.to_string(),
                ..host(template)
            });
        }
        let roots =
            self.fleet.templates().layers_below(&build.layers)?.into_iter().map(|layer| layer.root).collect();
        Ok(BaseTemplate { template, state: build.id.to_string(), settings: build.settings, roots })
    }

    /// The template that a devcontainer.json describes: finds the one with the same inputs, or builds it.
    async fn container(
        &self,
        up: &UpRequest,
        workspace: &Workspace,
        needs: &Needs,
        root: &DevcontainerRoot,
        say: Progress<'_>,
    ) -> Result<String, Failure> {
        let (template, known) = (BTreeMap::from([("PATH".to_owned(), PATH.to_owned())]), workspace.path());
        let known = VariableContext { folder: &known, given: &up.create.env, template: &template };
        let wrong = |failure: Failure| {
            failure
                .hint("use this host's own programs instead: pal up --template host")
                .hint("or another template: pal template ls, then pal up --template NAME")
        };
        let (from, steps) = match root {
            DevcontainerRoot::Image(reference) => (known.fill(reference, &mut Vec::new()), Vec::new()),
            DevcontainerRoot::Build { file, context, args, target } => {
                let args = args
                    .iter()
                    .map(|(name, value)| (name.clone(), known.fill(value, &mut Vec::new())))
                    .collect();
                let build = DevcontainerBuild { file, context, args, target: target.as_deref() };
                self.build_template_for(workspace, &build, say).map_err(wrong)?
            }
        };
        let mut asked: Vec<String> = needs.allow.iter().cloned().collect();
        if !steps.is_empty() {
            // The build may also reach the default registries and mirrors, such as apt's.
            asked.extend(crate::registries().into_iter().filter(|rule| !needs.allow.contains(rule)));
        }
        let text = serde_json::to_string(&(&from, &steps, &asked)).unwrap_or_default();
        let name = format!("devcontainer-{}", &digest(&[&text])[..12]);
        if self.fleet.templates().find_build(&name).is_ok() {
            return Ok(name);
        }
        let activity = format!("building the template {name} from {}", proto::text::visible(&from));
        say(ProgressLine::Activity(&activity));
        let from = if self.fleet.templates().find(&from)?.is_some() {
            BaseImage::Template(from)
        } else {
            BaseImage::Image((up.images)(&from).map_err(wrong)?)
        };
        let steps = steps.into_iter().map(|act| BuildStep { act, force: false }).collect();
        self.build_with_progress(
            &name,
            BuildRequest { from, steps, start: None, force: false, allow: asked },
            say,
        )
        .await
        .map_err(wrong)?;
        Ok(name)
    }

    /// Reads a Dockerfile of the repository: its base image, and its steps with the archives of their files.
    fn build_template_for(
        &self,
        workspace: &Workspace,
        build: &DevcontainerBuild<'_>,
        say: Progress<'_>,
    ) -> Result<(String, Vec<Instruction>), Failure> {
        let tree = format!("{}^{{tree}}", workspace.base);
        let cannot = |error| failures::workspace("cannot build what devcontainer.json asks for", error);
        let text = workspace::text(&workspace.repository, &workspace.base, build.file, FILE_LEN_MAX)
            .map_err(cannot)?;
        let read = dockerfile::read(&text, &build.args, build.target);
        let read = read.map_err(|failure| Failure {
            message: format!("{}: {}", proto::text::visible(build.file), failure.message),
            ..failure
        })?;
        let file = proto::text::visible(build.file);
        read.notes.iter().for_each(|note| say(ProgressLine::Note(&format!("{file}: {note}"))));
        // `gc` removes this directory of temporary archives when no build runs.
        let files = self.fleet.image_puller().images_dir();
        let tree = Git::at(&workspace.repository)
            .line(["rev-parse", "--verify", "--quiet", &tree])
            .map_err(|error| cannot(error.into()))?;
        let packed =
            read.acts.into_iter().map(|act| pack(act, &workspace.repository, &tree, build.context, &files));
        Ok((read.from, packed.collect::<Result<_, _>>().map_err(cannot)?))
    }

    /// Builds a template, and passes the lines of its log on.
    async fn build_with_progress(
        &self,
        name: &str,
        request: BuildRequest,
        say: Progress<'_>,
    ) -> Result<(), Failure> {
        let builds = self.fleet.builds();
        let asked = builds.request(name, &[], None, None)?;
        let job = builds.begin(&asked.template, &asked.id)?;
        let mut done = std::pin::pin!(builds.build(&job, request));
        let mut told = 0;
        loop {
            let ended = tokio::time::timeout(Duration::from_millis(100), done.as_mut()).await;
            let (_, said) = job.log_lines(told, usize::MAX);
            said.iter().for_each(|said| say(ProgressLine::Output(&proto::text::visible(&said.message))));
            told += said.len();
            if let Ok(built) = ended {
                return built.map(drop);
            }
        }
    }
}

/// A build that devcontainer.json describes.
struct DevcontainerBuild<'a> {
    file: &'a str,
    context: &'a str,
    args: BTreeMap<String, String>,
    target: Option<&'a str>,
}

fn pack(
    act: Instruction,
    repository: &Path,
    tree: &str,
    context: &str,
    to: &Path,
) -> Result<Instruction, workspace::WorkspaceError> {
    let Instruction::Copy { source, target, owner, mode, .. } = act else { return Ok(act) };
    let (hash, archive) = workspace::pack(repository, tree, context, &source, to)?;
    Ok(Instruction::Copy { source, target, owner, mode, hash, archive })
}

/// Expands the variables of devcontainer.json into the repository's needs, now that the template is known. Returns the
/// user of commands, if the file names one that exists.
pub(crate) fn resolve_variables(
    footing: &BaseTemplate,
    workspace: &Workspace,
    needs: &mut Needs,
    given: &BTreeMap<String, String>,
    say: Progress<'_>,
) -> Option<String> {
    let (template, folder) = (footing.env(), workspace.path());
    let known = VariableContext { folder: &folder, given, template: &template };
    let mut wanted = Vec::new();
    for (name, value) in std::mem::take(&mut needs.container.env) {
        let filled = known.fill(&value, &mut wanted);
        // A variable whose value is unknown stays unset instead of empty.
        if filled.is_empty() && !value.is_empty() {
            continue;
        }
        let filled = if name == "PATH" {
            needs.path.iter().map(|dir| format!("{dir}:")).collect::<String>() + &filled
        } else {
            filled
        };
        needs.env.entry(name).or_insert(filled);
    }
    let mut fill = |line: &mut String| *line = known.fill(line, &mut wanted);
    needs.steps.iter_mut().map(|step| &mut step.line).chain(&mut needs.container.start).for_each(&mut fill);
    needs.container.notes.iter().for_each(|note| say(ProgressLine::Note(note)));
    wanted.dedup();
    for name in wanted {
        say(ProgressLine::Note(&format!(
            "devcontainer.json uses this host's ${name}, which a Body does not inherit; set it: pal up --env {name}=\"${name}\""
        )));
    }
    for (feature, program) in &needs.container.programs {
        say(ProgressLine::Note(&match footing.has_program(program) {
            true => format!(
                "the feature {feature} is provided by the template's `{program}`; its version is not checked"
            ),
            false => format!("the feature {feature} is not installed, and there is no `{program}`"),
        }));
    }
    let user = needs.container.user.take()?;
    if footing.has_account(&user) {
        return Some(user);
    }
    let instead = footing.settings.user.as_deref().unwrap_or("user");
    say(ProgressLine::Note(&format!(
        "there is no account {}; commands run as {instead}",
        proto::text::visible(&user)
    )));
    None
}
