//! `up`: from a repository to a Body with its files.

use std::path::PathBuf;

use proto::{Failure, Kind, workspace::Workspace};
use serde_json::json;
use workspace::{Bring, Dirty, Ground, Person, Repository};

use crate::{Create, Fleet, Force, Image, View, failures, work::Discard};

/// Most Bodies of one request.
const COUNT_MAX: u32 = 1000;

/// A repository, as somebody names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Repo {
    /// The one that this directory is in.
    Path(PathBuf),
    /// The one at this address.
    Url(String),
}

/// How an image of a registry is asked for that a repository names: with whose credentials, and from where.
pub type Images = fn(&str) -> Result<Image, Failure>;

/// Whether what a repository needs is installed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prepare {
    /// It is, once.
    Yes,
    /// It is not.
    No,
}

/// Bodies to be made from repositories.
#[derive(Debug, Clone)]
pub struct Up {
    /// From where; the first is where commands run.
    pub repositories: Vec<Repo>,
    /// At which commit, branch or tag of the first; where they stand if none.
    pub reference: Option<String>,
    /// With uncommitted work or not.
    pub dirty: Dirty,
    /// Ignored files of the first that come along, absolute.
    pub include: Vec<PathBuf>,
    /// With what they need or without.
    pub prepare: Prepare,
    /// Who asks.
    pub person: Person,
    /// How images are asked for that a devcontainer.json names.
    pub images: Images,
    /// The home that the Body has, by name.
    pub home: Option<String>,
    /// What the Bodies are, apart from their repositories.
    pub create: Create,
    /// How many.
    pub count: u32,
}

impl Fleet {
    /// Makes Bodies with repositories in them.
    pub async fn up(&self, up: Up) -> Result<Vec<View>, Failure> {
        self.up_heard(up, &mut |_| ()).await
    }

    /// The same for a caller who wants to hear how it goes.
    pub async fn up_heard(&self, up: Up, say: super::Hear<'_>) -> Result<Vec<View>, Failure> {
        if !(1..=COUNT_MAX).contains(&up.count) {
            return Err(Failure::new(Kind::Usage, format!("{} Bodies cannot be made at once", up.count))
                .hint(format!("ask for 1 to {COUNT_MAX}")));
        }
        if up.home.is_some() && up.count > 1 {
            return Err(Failure::new(Kind::Usage, "several Bodies cannot have one home")
                .hint("make one, and fork it: pal fork -n COUNT BODY"));
        }
        // Until the Bodies stand on what is made here.
        let _building = self.building()?;
        let workspaces = self.bring(&up)?;
        workspaces.iter().for_each(|workspace| tell_pointers(workspace, say));
        let mut create = up.create.clone();
        create.workdir = create.workdir.or_else(|| workspaces.first().map(Workspace::path));
        if up.prepare == Prepare::Yes {
            let prepared = self.prepare(&up, &workspaces, say).await?;
            create.template = prepared.template;
            create.user = create.user.or(prepared.user);
            create.at_start = prepared.at_start;
            create.ports = prepared.ports;
            create.env = prepared.env.into_iter().chain(std::mem::take(&mut create.env)).collect();
            create.mounts.extend(prepared.mounts);
        }
        // Whoever is not the owner of its files would be refused by git.
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
        // Held until the Body that has it is there.
        let (home, _taken) = up.home.as_deref().map(|name| self.take_home(name)).transpose()?.unzip();
        create.home = home;
        let mut views = Vec::new();
        for _ in 0..up.count {
            match self.up_one(create.clone()).await {
                Ok(view) => views.push(view),
                Err(failure) => {
                    for view in &views {
                        let _ = self.remove_with(view.id(), Force::Yes, Discard::Yes).await;
                    }
                    return Err(failure);
                }
            }
        }
        Ok(views)
    }

    fn bring(&self, up: &Up) -> Result<Vec<Workspace>, Failure> {
        let mut workspaces: Vec<Workspace> = Vec::new();
        for (index, repo) in up.repositories.iter().enumerate() {
            let first = index == 0;
            let reference = up.reference.as_deref().filter(|_| first);
            let repository = self.repository(repo, reference, &up.person).map_err(no_repository)?;
            let now = store::clock::now();
            let layers = self.layers_dir();
            let ground = Ground { programs: &self.maker.programs, layers: &layers, now: &now };
            let include = if first { up.include.as_slice() } else { &[] };
            let bring = Bring { repository: &repository, dirty: up.dirty, include, person: &up.person };
            let brought = workspace::bring(ground, &bring)
                .map_err(|error| failures::workspace("cannot bring the repository in", error))?;
            let clash = |other: &Workspace| {
                other.name == brought.workspace.name || other.repository == brought.workspace.repository
            };
            if let Some(other) = workspaces.iter().find(|other| clash(other)) {
                return Err(Failure::new(Kind::Usage, format!("two repositories would be {}", other.path()))
                    .hint("bring one of them in with a Body of its own"));
            }
            workspaces.push(brought.workspace);
        }
        workspaces.iter().for_each(|workspace| self.touch_layers(&workspace.layers));
        Ok(workspaces)
    }

    fn repository(
        &self,
        repo: &Repo,
        reference: Option<&str>,
        person: &Person,
    ) -> Result<Repository, workspace::WorkspaceError> {
        match repo {
            Repo::Path(path) => Repository::find(path, reference, person),
            Repo::Url(url) => {
                let repos = self.data.join("repos");
                std::fs::create_dir_all(&repos)
                    .map_err(|error| workspace::WorkspaceError::Io("make room for a clone", error))?;
                let name = workspace::layer_id("repository", &[url]);
                Repository::clone_of(url, &repos.join(format!("{name}.git")), reference, person)
            }
        }
    }

    async fn up_one(&self, create: Create) -> Result<View, Failure> {
        let view = self.create(create).await?;
        let told = view.spec.workspaces.iter().try_for_each(|workspace| {
            let data = json!({ "workspace": workspace.name, "branch": workspace.branch, "commit": workspace.commit, "base": workspace.base, "layers": workspace.layers });
            self.write("workspace.brought", view.id(), data)
        });
        match told {
            Ok(()) => Ok(view),
            Err(failure) => {
                let _ = self.remove_with(view.id(), Force::Yes, Discard::Yes).await;
                Err(failure)
            }
        }
    }

    /// How many files of a repository are not committed, and so not in a Body that is made without them.
    pub fn uncommitted(&self, repo: &Repo, person: &Person) -> usize {
        let Repo::Path(path) = repo else { return 0 };
        Repository::find(path, None, person).and_then(|found| found.uncommitted(person)).unwrap_or(0)
    }
}

/// Says which files are kept elsewhere, and so not in the Body. That they cannot be found is no reason to go without one.
fn tell_pointers(workspace: &Workspace, say: super::Hear<'_>) {
    let found = workspace::lfs_pointers(&workspace.repository, &workspace.base).unwrap_or_default();
    let Some(first) = found.first().map(|path| proto::text::visible(path)) else { return };
    let what = if found.len() == 1 {
        format!("{first} is a pointer of Git LFS")
    } else {
        format!("{first} and {} more are pointers of Git LFS", found.len() - 1)
    };
    say(&format!("{what}, not the contents"));
    // To be pasted into a shell, it must be a name and nothing else.
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
