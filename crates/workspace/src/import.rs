//! Imports a repository into a Body: selects the files and the history, and makes their layers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use proto::workspace::Workspace;

use crate::{
    GitIdentity, LayerStore, Repository,
    bare_repo::StageDir,
    error::{ErrorContext, WorkspaceError},
    git::Git,
    git_dir_layer::{self, GitDirRequest},
    tree_layer,
};

/// Whether uncommitted work of the host is imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UncommittedFiles {
    /// Include modified tracked files, and untracked files that are not ignored.
    With,
    /// Only committed files.
    Without,
}

/// A request to import a repository.
#[derive(Debug)]
pub struct ImportRequest<'a> {
    /// The repository.
    pub repository: &'a Repository,
    /// Whether to include uncommitted work.
    pub dirty: UncommittedFiles,
    /// Absolute paths of ignored files and directories to include.
    pub include: &'a [PathBuf],
    /// The user who owns the repository.
    pub person: &'a GitIdentity,
}

/// The result of an import.
#[derive(Debug, Clone)]
pub struct ImportedWorkspace {
    /// The workspace for the Body's spec.
    pub workspace: Workspace,
    /// Whether a new layer was made.
    pub made: bool,
}

/// Makes the layers of a workspace that are missing.
pub fn import(
    layer_store: LayerStore<'_>,
    wanted: &ImportRequest<'_>,
) -> Result<ImportedWorkspace, WorkspaceError> {
    let repository = wanted.repository;
    crate::partial_clone::fetch_commit(&repository.common, &repository.commit, wanted.person)?;
    let files = choose_files(layer_store, wanted)?;
    let objects = repository.common.join("objects");
    let made = tree_layer::find_layer(layer_store, &tree_layer::id_of("tree", &[&files.tree])).is_none();
    let stack = tree_layer::make(layer_store, &objects, &files.tree)?;
    let mut layers = git_dir_layer::make(
        layer_store,
        &GitDirRequest { repository, files: &stack, files_tree: &files.tree },
    )?;
    let submodules = crate::submodules::import(layer_store, repository)?;
    layers.extend(submodules.iter().map(|module| module.files.clone()));
    let workspace = Workspace {
        name: repository.name.clone(),
        repository: repository.common.clone(),
        branch: repository.branch.clone(),
        commit: repository.commit.clone(),
        base: files.base,
        included: !wanted.include.is_empty(),
        layers,
        submodules,
    };
    Ok(ImportedWorkspace { workspace, made })
}

/// The files that a Body begins with.
struct InitialFiles {
    /// The tree of all files.
    tree: String,
    /// The commit that the Body's work is compared with.
    base: String,
}

fn choose_files(
    layer_store: LayerStore<'_>,
    wanted: &ImportRequest<'_>,
) -> Result<InitialFiles, WorkspaceError> {
    let repository = wanted.repository;
    let committed = InitialFiles { tree: repository.tree.clone(), base: repository.commit.clone() };
    if wanted.dirty == UncommittedFiles::Without && wanted.include.is_empty() {
        return Ok(committed);
    }
    let Some(place) = &repository.files else {
        return Err(WorkspaceError::Repository(
            "a bare repository has no uncommitted or ignored files".into(),
        ));
    };
    let drawn = proto::event::hex(&sys::random::bytes::<8>().during("read random bytes from the kernel")?);
    let stage = StageDir::make(layer_store.layers.join(format!("{drawn}.stage{}", std::process::id())))
        .during("create a directory for an index")?;
    let index = stage.join("index");
    let git = Git::at(&repository.dir).files(place).index(&index).identity(wanted.person).user_ignore_rules();
    match wanted.dirty {
        // A copy of the user's index has stat data, so git does not read unchanged files again.
        UncommittedFiles::With if repository.dir.join("index").exists() => {
            fs::copy(repository.dir.join("index"), &index).map(|_| ()).during("copy the index")?
        }
        UncommittedFiles::With => {}
        UncommittedFiles::Without => drop(git.run(["read-tree", &repository.tree])?),
    }
    let mut base = committed.base;
    let mut tree = committed.tree;
    if wanted.dirty == UncommittedFiles::With {
        git.run(["add", "--all", "--", ":/"])?;
        tree = git.line(["write-tree"])?;
        if tree != repository.tree {
            base = commit_dirty(&git, &tree, &repository.commit)?;
        }
    }
    if !wanted.include.is_empty() {
        let inside =
            wanted.include.iter().map(|path| relative(path, place)).collect::<Result<Vec<_>, _>>()?;
        let args = ["add", "--force", "--"]
            .map(std::ffi::OsStr::new)
            .into_iter()
            .chain(inside.iter().map(|path| path.as_os_str()));
        git.clone().env("GIT_LITERAL_PATHSPECS", "1").run(args)?;
        tree = git.line(["write-tree"])?;
    }
    Ok(InitialFiles { tree, base })
}

fn relative<'a>(path: &'a Path, place: &Path) -> Result<&'a Path, WorkspaceError> {
    path.strip_prefix(place)
        .map_err(|_| WorkspaceError::Repository(format!("{} is not in the repository", path.display())))
}

fn commit_dirty(git: &Git, tree: &str, parent: &str) -> Result<String, WorkspaceError> {
    let git = crate::refs::as_palisade(git.clone());
    Ok(git.line([
        "commit-tree",
        tree,
        "-p",
        parent,
        "-m",
        "uncommitted work of the host, when the Body was made",
    ])?)
}
