//! `pal up`: creates a Body with the files of a repository.

use std::path::PathBuf;

use proto::{Failure, Kind, event_data::WorkspaceImported, workspace::Workspace};
use workspace::{GitIdentity, ImportRequest, LayerStore, Repository, UncommittedFiles};

use crate::{BodyView, Create, Force, Image, Workspaces, blocking::run_blocking, failures, work::Discard};

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
    /// They are installed, once for all Bodies.
    Yes,
    /// They are not installed.
    No,
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
    /// The git identity of the caller.
    pub person: GitIdentity,
    /// Resolves the images that a devcontainer.json names.
    pub images: ImageResolver,
    /// The name of the home that the Body uses.
    pub home: Option<String>,
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
    pub async fn up_with_progress(
        &self,
        up: UpRequest,
        say: super::Progress<'_>,
    ) -> Result<Vec<BodyView>, Failure> {
        if !(1..=COUNT_MAX).contains(&up.count) {
            return Err(Failure::new(Kind::Usage, format!("cannot create {} Bodies at once", up.count))
                .hint(format!("ask for 1 to {COUNT_MAX}")));
        }
        if up.home.is_some() && up.count > 1 {
            return Err(Failure::new(Kind::Usage, "several Bodies cannot have one home")
                .hint("create one, and fork it: pal fork -n COUNT BODY"));
        }
        // The lock keeps `gc` from removing the new layers until the Bodies use them.
        let _building = self.fleet.garbage().building()?;
        let workspaces = run_blocking(|| self.import(&up))?;
        workspaces.iter().for_each(|workspace| report_lfs_pointers(workspace, say));
        let mut create = up.create.clone();
        create.workdir = create.workdir.or_else(|| workspaces.first().map(Workspace::path));
        if up.prepare == PrepareChoice::Yes {
            let prepared = self.prepare(&up, &workspaces, say).await?;
            create.template = prepared.template;
            create.user = create.user.or(prepared.user);
            create.at_start = prepared.at_start;
            create.ports = prepared.ports;
            create.env = prepared.env.into_iter().chain(std::mem::take(&mut create.env)).collect();
            create.mounts.extend(prepared.mounts);
        }
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
        create.workspaces = workspaces;
        // The lock is held until the Body that uses the home exists.
        let (home, _taken) =
            up.home.as_deref().map(|name| self.fleet.homes().take(name)).transpose()?.unzip();
        create.home = home;
        let mut views = Vec::new();
        for _ in 0..up.count {
            match self.up_one(create.clone()).await {
                Ok(view) => views.push(view),
                Err(failure) => {
                    for view in &views {
                        let _ = self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes).await;
                    }
                    return Err(failure);
                }
            }
        }
        Ok(views)
    }

    fn import(&self, up: &UpRequest) -> Result<Vec<Workspace>, Failure> {
        let mut workspaces: Vec<Workspace> = Vec::new();
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
            if let Some(other) = workspaces.iter().find(|other| clash(other)) {
                return Err(Failure::new(Kind::Usage, format!("two repositories map to {}", other.path()))
                    .hint("import one of them into a Body of its own"));
            }
            workspaces.push(brought.workspace);
        }
        workspaces.iter().for_each(|workspace| self.fleet.garbage().touch_layers(&workspace.layers));
        Ok(workspaces)
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

    async fn up_one(&self, create: Create) -> Result<BodyView, Failure> {
        let view = self.fleet.create(create).await?;
        let told = view.spec.workspaces.iter().try_for_each(|workspace| {
            let data = WorkspaceImported {
                workspace: workspace.name.clone(),
                branch: workspace.branch.clone(),
                commit: workspace.commit.clone(),
                base: workspace.base.clone(),
                layers: workspace.layers.clone(),
            };
            self.fleet.write(view.id(), data)
        });
        match told {
            Ok(()) => Ok(view),
            Err(failure) => {
                let _ = self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes).await;
                Err(failure)
            }
        }
    }

    /// Counts the uncommitted files of a repository, which a Body without them would lack.
    pub fn uncommitted(&self, repo: &RepoSource, person: &GitIdentity) -> usize {
        let RepoSource::Path(path) = repo else { return 0 };
        Repository::find(path, None, person).and_then(|found| found.uncommitted(person)).unwrap_or(0)
    }
}

/// Reports files that are only Git LFS pointers, so the Body lacks their contents. A failure to find them is ignored.
fn report_lfs_pointers(workspace: &Workspace, say: super::Progress<'_>) {
    let found = workspace::lfs_pointers(&workspace.repository, &workspace.base).unwrap_or_default();
    let Some(first) = found.first().map(|path| proto::text::visible(path)) else { return };
    let what = if found.len() == 1 {
        format!("{first} is a pointer of Git LFS")
    } else {
        format!("{first} and {} more are pointers of Git LFS", found.len() - 1)
    };
    say(&format!("{what}, not the contents"));
    // The name becomes part of a shell command in the hint, so only plain characters are allowed.
    let plain = first.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte));
    let first = if plain { first } else { "FILE".to_owned() };
    say(&format!(
        "  hint: show the Body a file of yours in its place, read-only: pal up --mount \"$PWD/{first}:{}/{first}\"",
        workspace.path()
    ));
}

fn no_repository(error: workspace::WorkspaceError) -> Failure {
    failures::workspace("cannot find the repository", error).hint("go to one, or name it: pal up --repo PATH")
}
