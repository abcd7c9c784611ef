//! What devcontainer.json asks for: a template, made once for what decides about it; an account, variables, ports.
//!
//! Trust: the file is a repository's. It chooses what its Bodies are made of; images are asked for as their caller says
//! ([`UpRequest::images`]), and steps of a build run in Bodies.

use std::{collections::BTreeMap, path::Path, time::Duration};

use proto::{Failure, Kind, template::TemplateSettings, workspace::Workspace};
use workspace::{DevcontainerRoot, Git, Needs, VariableContext};

use super::prepare::{PATH, Progress};
use crate::{
    BaseImage, BuildRequest, BuildStep, Instruction, UpRequest, Workspaces, failures,
    templates::{build::digest, dockerfile},
};

/// Longest Dockerfile.
const FILE_LEN_MAX: usize = 1 << 20;
/// Where programs are looked for.
const PROGRAMS: &[&str] = &["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];

/// What Bodies of a request stand on before anything is installed.
#[derive(Debug, Clone)]
pub(crate) struct BaseTemplate {
    /// The template, by name.
    pub template: String,
    /// What tells one state of it from another.
    pub state: String,
    /// What it says of its Bodies.
    pub settings: TemplateSettings,
    /// Its directories, nearest first; the host's own root where it is that.
    roots: Vec<std::path::PathBuf>,
}

impl BaseTemplate {
    /// Whether its Bodies have the host's own programs.
    pub fn is_host(&self) -> bool {
        self.template == "host"
    }

    /// Whether a file is there, by its path without a leading `/`.
    pub fn has(&self, path: &str) -> bool {
        self.roots.iter().any(|root| std::fs::symlink_metadata(root.join(path)).is_ok())
    }

    fn has_program(&self, name: &str) -> bool {
        PROGRAMS.iter().any(|dir| self.has(&format!("{dir}/{name}")))
    }

    /// Whether it has an account of that name, or the name is a number.
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

    /// Variables that its commands have by themselves.
    pub fn env(&self) -> BTreeMap<String, String> {
        let mut env = self.settings.env.clone();
        env.entry("PATH".into()).or_insert_with(|| PATH.to_owned());
        env
    }
}

impl Workspaces<'_> {
    /// What the Bodies of a request stand on: what was asked for, or else what the first repository says.
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
            Some((workspace, needs, root)) if asked == "host" => {
                self.container(up, workspace, needs, root, say).await?
            }
            Some(_) => {
                say(&format!(
                    "devcontainer.json names a root of its own; {} was asked for instead",
                    proto::text::visible(asked)
                ));
                asked.clone()
            }
            None => asked.clone(),
        };
        self.base_template_of(template)
    }

    fn base_template_of(&self, template: String) -> Result<BaseTemplate, Failure> {
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

    /// The template that a devcontainer.json means: found by what decides about it, or made.
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
                .hint("choose another root: pal up --template NAME")
                .hint("or go without: pal up --no-prepare")
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
            // What any build may reach: apt and its like, too.
            asked.extend(crate::registries().into_iter().filter(|rule| !needs.allow.contains(rule)));
        }
        let text = serde_json::to_string(&(&from, &steps, &asked)).unwrap_or_default();
        let name = format!("devcontainer-{}", &digest(&[&text])[..12]);
        if self.fleet.templates().find_build(&name).is_ok() {
            return Ok(name);
        }
        say(&format!("making the template {name} from {}", proto::text::visible(&from)));
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

    /// What a Dockerfile of the repository begins with, and its steps, with what they copy.
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
        read.notes.iter().for_each(|note| say(&format!("{}: {note}", proto::text::visible(build.file))));
        // Cleared away with what came from registries, once no build needs it.
        let files = self.fleet.image_puller().images_dir();
        let tree = Git::at(&workspace.repository)
            .line(["rev-parse", "--verify", "--quiet", &tree])
            .map_err(|error| cannot(error.into()))?;
        let packed =
            read.acts.into_iter().map(|act| pack(act, &workspace.repository, &tree, build.context, &files));
        Ok((read.from, packed.collect::<Result<_, _>>().map_err(cannot)?))
    }

    /// Builds a template; what the build says is heard.
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
            said.iter().for_each(|said| say(&format!("  {}", proto::text::visible(&said.message))));
            told += said.len();
            if let Ok(built) = ended {
                return built.map(drop);
            }
        }
    }
}

/// A build, as devcontainer.json names it.
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

/// Puts what devcontainer.json says into what a repository needs, now that its template is known.
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
        // What was not given is not there, rather than empty.
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
    needs.container.notes.iter().for_each(|note| say(note));
    wanted.dedup();
    for name in wanted {
        say(&format!(
            "devcontainer.json wants this machine's ${name}, which does not come in by itself; give it: pal up --env {name}=\"${name}\""
        ));
    }
    for (feature, program) in &needs.container.programs {
        match footing.has_program(program) {
            true => say(&format!(
                "the feature {feature} is the `{program}` that is there; its version is not looked at"
            )),
            false => say(&format!("the feature {feature} is not installed, and there is no `{program}`")),
        }
    }
    let user = needs.container.user.take()?;
    if footing.has_account(&user) {
        return Some(user);
    }
    let instead = footing.settings.user.as_deref().unwrap_or("user");
    say(&format!("there is no account {}; commands run as {instead}", proto::text::visible(&user)));
    None
}

/// Why a Body did not come up whose start runs something.
pub(crate) fn failed_at_start(line: &str, code: i32, tail: &str) -> Failure {
    let said: String = tail
        .lines()
        .rev()
        .take(10)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .map(|line| format!("\n    {}", proto::text::visible(line)))
        .collect();
    Failure::new(
        Kind::Conflict,
        format!(
            "what runs at each start failed: `{}` ended with code {code}{said}",
            proto::text::visible(line)
        ),
    )
    .hint("go without it: pal up --no-prepare")
}
