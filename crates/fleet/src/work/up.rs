//! `pal up`: creates a Body with the files of a repository.

use std::path::{Path, PathBuf};

use proto::{
    Failure, Kind, SnapshotId,
    event_data::{WorkspaceImported, WorkspacePrepared},
    workspace::Workspace,
};
use workspace::{GitIdentity, ImportRequest, LayerStore, Repository, UncommittedFiles};

use super::{Progress, ProgressLine, unfinished::UnfinishedBody};
use crate::{
    BodyView, Create, Image, NetworkRequest, Workspaces, blocking::run_blocking, failures, names::Names,
};

/// The file that states how a repository is prepared.
const SETTINGS: &str = "palisade.toml";
const SETTINGS_LEN_MAX: u64 = 1 << 20;

/// Most Bodies in one request.
const COUNT_MAX: u32 = 1000;

/// A repository, as the caller names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RepoSource {
    /// The repository that contains this directory.
    Path(PathBuf),
    /// The repository at this URL.
    Url(String),
}

/// Resolves an image that a repository names: adds the credentials and the access policy.
pub type ImageResolver = fn(&str) -> Result<Image, Failure>;

/// Whether the dependencies of a repository are installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrepareChoice {
    /// They are installed, once for all Bodies. The failure of a required step is the failure of the request.
    Yes,
    /// They are installed. If a required step fails, the request fails, too, but its Body stays for examination.
    Keep,
    /// They are installed as far as possible; the Bodies name the steps that failed.
    Anyway,
    /// They are not installed. The Bodies still have the toolchains and variables of the repository.
    No,
}

/// Whether devcontainer.json decides about the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DevcontainerChoice {
    /// It does, if there is one.
    Use,
    /// It does not: the caller asked for a template.
    Ignore,
}

/// Whether the network that palisade.toml asks for is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepositoryNetwork {
    /// It is, unless the request names a preset.
    Use,
    /// It is not: the caller may not open a network.
    Ignore,
}

/// A repository that was imported.
#[derive(Debug)]
pub(crate) struct ImportedRepo {
    pub workspace: Workspace,
    /// The text of a palisade.toml in the working tree that differs from the committed one.
    pub settings: Option<String>,
}

/// A request to create Bodies from repositories.
#[derive(Debug, Clone)]
pub struct UpRequest {
    /// The repositories; commands run in the first.
    pub repositories: Vec<RepoSource>,
    /// The commit, branch or tag of the first repository; `None` means its current commit.
    pub reference: Option<String>,
    /// Whether uncommitted files are included.
    pub dirty: UncommittedFiles,
    /// Ignored files of the first repository to include, as absolute paths.
    pub include: Vec<PathBuf>,
    /// Whether dependencies are installed.
    pub prepare: PrepareChoice,
    /// Whether devcontainer.json decides about the template.
    pub devcontainer: DevcontainerChoice,
    /// The git identity of the caller.
    pub person: GitIdentity,
    /// Resolves the images that a devcontainer.json names.
    pub images: ImageResolver,
    /// The name of the home that the Body uses.
    pub home: Option<String>,
    /// The network of the Bodies.
    pub network: NetworkRequest,
    /// Whether palisade.toml adds to the network.
    pub repository_network: RepositoryNetwork,
    /// The properties of the Bodies apart from their repositories.
    pub create: Create,
    /// The number of Bodies.
    pub count: u32,
}

impl Workspaces<'_> {
    /// Creates Bodies with repositories in them.
    pub async fn up(&self, up: UpRequest) -> Result<Vec<BodyView>, Failure> {
        self.up_with_progress(up, &mut |_| ()).await
    }

    /// Creates Bodies with repositories in them, and reports the progress.
    pub async fn up_with_progress(&self, up: UpRequest, say: Progress<'_>) -> Result<Vec<BodyView>, Failure> {
        if !(1..=COUNT_MAX).contains(&up.count) {
            return Err(Failure::new(Kind::Usage, format!("cannot create {} Bodies at once", up.count))
                .hint(format!("ask for 1 to {COUNT_MAX}")));
        }
        if up.home.is_some() && up.count > 1 {
            return Err(Failure::new(Kind::Usage, "several Bodies cannot have one home")
                .hint("create one, and fork it: pal fork -n COUNT BODY"));
        }
        let names = run_blocking(|| Names::of(self.fleet).number(up.create.name.as_ref(), up.count))?;
        // The lock keeps `gc` from removing the new layers until the Bodies use them.
        let _building = self.fleet.garbage().building()?;
        let repos = run_blocking(|| self.import(&up))?;
        for repo in &repos {
            report_lfs_pointers(&repo.workspace, say);
            if repo.settings.is_some() {
                say(ProgressLine::Note(
                    "palisade.toml of the working tree decides, although it is not committed",
                ));
            }
        }
        let mut create = up.create.clone();
        create.workdir = create.workdir.or_else(|| repos.first().map(|repo| repo.workspace.path()));
        let prepared = self.prepare(&up, &repos, say).await?;
        create.template = prepared.template;
        create.user = create.user.or(prepared.user);
        create.at_start = prepared.at_start;
        create.ports = prepared.ports;
        create.egress = create.egress.or(prepared.egress);
        create.env = prepared.env.into_iter().chain(std::mem::take(&mut create.env)).collect();
        create.mounts.extend(prepared.mounts);
        // git refuses to work in a repository that belongs to another user, unless it is a `safe.directory`.
        if create.user.as_deref().is_some_and(|user| user != "user") {
            let trusted = [
                ("GIT_CONFIG_COUNT", "1"),
                ("GIT_CONFIG_KEY_0", "safe.directory"),
                ("GIT_CONFIG_VALUE_0", "*"),
            ];
            let trusted = trusted.map(|(name, value)| (name.to_owned(), value.to_owned()));
            create.env = trusted.into_iter().chain(std::mem::take(&mut create.env)).collect();
        }
        create.workspaces = repos.into_iter().map(|repo| repo.workspace).collect();
        // The lock is held until the Body that uses the home exists.
        let (home, _taken) =
            up.home.as_deref().map(|name| self.fleet.homes().take(name)).transpose()?.unzip();
        create.home = home;
        let count = if prepared.failure.is_some() { 1 } else { names.len() };
        let mut bodies = Vec::new();
        for name in names.into_iter().take(count) {
            bodies.push(self.up_one(Create { name, ..create.clone() }).await?);
        }
        let views = bodies.into_iter().map(UnfinishedBody::finish).collect::<Result<Vec<_>, _>>()?;
        match prepared.failure {
            None => Ok(views),
            Some(failure) => Err(views.iter().fold(failure, |failure, view| {
                failure
                    .hint(format!("look into the Body: pal shell {}", view.id()))
                    .hint(format!("run the missing steps in it again: pal prepare {}", view.id()))
            })),
        }
    }

    fn import(&self, up: &UpRequest) -> Result<Vec<ImportedRepo>, Failure> {
        let mut repos: Vec<ImportedRepo> = Vec::new();
        for (index, repo) in up.repositories.iter().enumerate() {
            let first = index == 0;
            let reference = up.reference.as_deref().filter(|_| first);
            let repository = self.repository(repo, reference, &up.person).map_err(no_repository)?;
            let now = store::clock::now();
            let layers = self.fleet.templates().layers_dir();
            let layer_store =
                LayerStore { programs: &self.fleet.launch_context.programs, layers: &layers, now: &now };
            let include = if first { up.include.as_slice() } else { &[] };
            let bring =
                ImportRequest { repository: &repository, dirty: up.dirty, include, person: &up.person };
            let brought = workspace::import(layer_store, &bring)
                .map_err(|error| failures::workspace("cannot import the repository", error))?;
            let clash = |other: &Workspace| {
                other.name == brought.workspace.name || other.repository == brought.workspace.repository
            };
            if let Some(other) = repos.iter().map(|repo| &repo.workspace).find(|other| clash(other)) {
                return Err(Failure::new(Kind::Usage, format!("two repositories map to {}", other.path()))
                    .hint("import one of them into a Body of its own"));
            }
            let files = repository.files.as_deref().filter(|_| reference.is_none());
            let settings = files.and_then(|files| uncommitted_settings(files, &brought.workspace));
            repos.push(ImportedRepo { workspace: brought.workspace, settings });
        }
        repos.iter().for_each(|repo| self.fleet.garbage().touch_layers(&repo.workspace.layers));
        Ok(repos)
    }

    fn repository(
        &self,
        repo: &RepoSource,
        reference: Option<&str>,
        person: &GitIdentity,
    ) -> Result<Repository, workspace::WorkspaceError> {
        match repo {
            RepoSource::Path(path) => Repository::find(path, reference, person),
            RepoSource::Url(url) => {
                let repos = self.fleet.data.join("repos");
                std::fs::create_dir_all(&repos).map_err(|error| {
                    workspace::WorkspaceError::Io("create the directory of a clone", error)
                })?;
                let name = workspace::layer_id("repository", &[url]);
                Repository::clone_of(url, &repos.join(format!("{name}.git")), reference, person)
            }
        }
    }

    /// Creates one Body, and appends the events of its repositories.
    async fn up_one(&self, create: Create) -> Result<UnfinishedBody<'_>, Failure> {
        let body = UnfinishedBody::create(self.fleet, create).await?;
        let BodyView { spec, missing_steps, .. } = body.view()?;
        for workspace in &spec.workspaces {
            let data = WorkspaceImported {
                workspace: workspace.name.clone(),
                branch: workspace.branch.clone(),
                commit: workspace.commit.clone(),
                base: workspace.base.clone(),
                layers: workspace.layers.clone(),
            };
            self.fleet.write(&spec.id, data)?;
        }
        let snapshots = self.fleet.snapshots();
        let is_dependency = |id: &&SnapshotId| {
            body::snapshot::read(&snapshots.path(id)).is_ok_and(|manifest| manifest.dependency.is_some())
        };
        if let Some(layer) = spec.snapshots.first().filter(is_dependency) {
            let data = WorkspacePrepared { layer: Some(layer.clone()), missing: missing_steps.clone() };
            self.fleet.write(&spec.id, data)?;
        }
        Ok(body)
    }

    /// Counts the uncommitted files of a repository, which a Body without them would lack.
    pub fn uncommitted(&self, repo: &RepoSource, person: &GitIdentity) -> usize {
        let RepoSource::Path(path) = repo else { return 0 };
        Repository::find(path, None, person).and_then(|found| found.uncommitted(person)).unwrap_or(0)
    }
}

/// Reports files that are only Git LFS pointers, so the Body lacks their contents. A failure to find them is ignored.
fn report_lfs_pointers(workspace: &Workspace, say: Progress<'_>) {
    let found = workspace::lfs_pointers(&workspace.repository, &workspace.base).unwrap_or_default();
    let Some(first) = found.first().map(|path| proto::text::visible(path)) else { return };
    let what = if found.len() == 1 {
        format!("{first} is a pointer of Git LFS")
    } else {
        format!("{first} and {} more are pointers of Git LFS", found.len() - 1)
    };
    say(ProgressLine::Note(&format!("{what}, not the contents")));
    // The name becomes part of a shell command in the hint, so only plain characters are allowed.
    let plain = first.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte));
    let first = if plain { first } else { "FILE".to_owned() };
    say(ProgressLine::Note(&format!(
        "  hint: show the Body a file of yours in its place, read-only: pal up --mount \"$PWD/{first}:{}/{first}\"",
        workspace.path()
    )));
}

/// The text of a palisade.toml in a working tree, if it differs from the one of the workspace's files. A link is not
/// followed: it may come from the repository.
pub(super) fn uncommitted_settings(files: &Path, workspace: &Workspace) -> Option<String> {
    let path = files.join(SETTINGS);
    let text = std::fs::symlink_metadata(&path)
        .ok()
        .filter(std::fs::Metadata::is_file)
        .and_then(|_| sys::fd::read_small(&path, SETTINGS_LEN_MAX).ok())?;
    let committed =
        workspace::text(&workspace.repository, &workspace.base, SETTINGS, SETTINGS_LEN_MAX as usize);
    (committed.ok().as_ref() != Some(&text)).then_some(text)
}

/// git's advice about a repository of another user, in its message.
const TRUST: &str = "git config --global --add safe.directory ";

fn no_repository(error: workspace::WorkspaceError) -> Failure {
    let said = error.to_string();
    // The path ends git's message.
    match said.split_once(TRUST).map(|(_, path)| path.trim()) {
        Some(path) => Failure::new(Kind::Denied, format!("the repository {path} belongs to another user"))
            .because(
                "git runs programs that a repository's settings name, so it reads only repositories of yours",
            )
            .hint(format!("if you trust its owner: {TRUST}{path}")),
        None => failures::workspace("cannot find the repository", error)
            .hint("go to one, or name it: pal up --repo PATH"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_of_another_user_has_a_way_on() {
        let said = "fatal: detected dubious ownership in repository at '/srv/app'\nTo add an exception for this directory, call:\n\n\tgit config --global --add safe.directory /srv/app\n";
        let failure = no_repository(workspace::WorkspaceError::Repository(said.into()));
        assert_eq!(failure.kind, Kind::Denied);
        assert_eq!(
            failure.hints,
            ["if you trust its owner: git config --global --add safe.directory /srv/app"]
        );
        let other = no_repository(workspace::WorkspaceError::Repository("x".into()));
        assert_eq!(other.hints, ["go to one, or name it: pal up --repo PATH"]);
    }
}
