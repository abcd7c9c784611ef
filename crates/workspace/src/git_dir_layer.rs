//! Layers with the `.git` of a workspace: a standalone repository whose history does not depend on any
//! directory of the host.
//!
//! Each commit that a Body starts from is packed once. The pack of a later commit holds only the objects that
//! an earlier pack lacks, and its layer depends on the earlier one.

use std::{
    fs::{self, File},
    io,
    path::Path,
};

use body::{
    archive::{ArchiveError, Sink},
    layers::LayerDraft,
};
use proto::{
    LayerId,
    pack::{LayerEntry, LayerEntryKind},
    workspace::{CHANGES, CHANGES_SETTINGS, PLACE, unchanged_token},
};

use crate::{
    LayerStore, Repository,
    bare_repo::{self, StageDir},
    error::{ErrorContext, WorkspaceError},
    fsmonitor_index,
    git::Git,
    tree_layer::{self, find_layer, id_of, put},
};

/// Longest chain of packs that depend on each other.
const CHAIN_MAX: usize = 8;

/// Includes the settings by which git asks the Body's guest for changed files. They apply only to this `.git`
/// at this path, not to a copy or to another work tree. The include comes first, so that any setting made in
/// the Body overrides it.
fn fsmonitor_include(name: &str) -> String {
    format!("[includeIf \"gitdir:/{PLACE}/{name}/.git\"]\n\tpath = /{CHANGES_SETTINGS}\n")
}

/// The index compares only modification times in whole seconds, because an overlay has inode numbers and
/// change times of its own.
const CONFIG: &str = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n\tlogallrefupdates = true\n\tcheckStat = minimal\n\ttrustctime = false\n\
    [user]\n\tname = agent\n\temail = agent@palisade.invalid\n[gc]\n\tauto = 0\n[maintenance]\n\tauto = false\n";

/// The request for a `.git` layer.
pub struct GitDirRequest<'a> {
    /// The repository of the host.
    pub repository: &'a Repository,
    /// The layers of the files of the workspace, topmost first.
    pub files: &'a [LayerId],
    /// The git tree of those files.
    pub files_tree: &'a str,
}

/// Returns all layers of a workspace, topmost first, and makes those that are missing.
pub fn make(layer_store: LayerStore<'_>, wanted: &GitDirRequest<'_>) -> Result<Vec<LayerId>, WorkspaceError> {
    let repository = wanted.repository;
    let top = wanted.files.first().map_or("", LayerId::as_str);
    let place = repository.common.to_string_lossy();
    let fsmonitor_layer = fsmonitor_layer(layer_store)?;
    let branch = repository.branch.as_deref().unwrap_or("");
    let id =
        id_of("head", &[&place, &repository.commit, branch, top, &repository.name, fsmonitor_layer.as_str()]);
    if let Some(stack) = find_layer(layer_store, &id) {
        return Ok(stack);
    }
    let objects = objects(layer_store, repository)?;
    let stage = StageDir::make(layer_store.layers.join(format!("{id}.stage{}", std::process::id())))
        .during("create a directory for an index")?;
    let index = stage.join("index");
    if let Some(files) = wanted.files.first() {
        fs::copy(tree_layer::index_of(layer_store, files), &index).during("copy an index")?;
    }
    if wanted.files_tree != repository.tree {
        bare_repo::make(&stage.join("git"), &[&repository.common.join("objects")], None)
            .during("make a repository")?;
        Git::at(&stage.join("git")).index(&index).run(["read-tree", "-m", "-i", &repository.tree])?;
    }
    if index.exists() {
        let known = fs::read(&index).during("read an index")?;
        if let Some(known) = fsmonitor_index::with_unchanged(&known, unchanged_token(&id)) {
            fs::write(&index, known).during("write an index")?;
        }
    }
    let name = format!("{id}.part{}", std::process::id());
    let draft = LayerDraft::begin(layer_store.programs, layer_store.layers, &name, body::ids::of_trees())?;
    let mut writer = GitDirWriter { owner: tree_layer::owner(draft.ids()), mtime: now() };
    draft.fill(|sink| writer.head(sink, repository, &index))?;
    let over: Vec<LayerId> = wanted.files.iter().chain(&objects).chain([&fsmonitor_layer]).cloned().collect();
    draft.finish_over(
        id.clone(),
        &format!("head {}", repository.commit),
        layer_store.now.to_owned(),
        over.clone(),
    )?;
    Ok([id].into_iter().chain(over).collect())
}

/// The layer with the fsmonitor program that git starts: the launcher under another name.
fn fsmonitor_layer(layer_store: LayerStore<'_>) -> Result<LayerId, WorkspaceError> {
    let launch = &layer_store.programs.launch;
    let named = launch.file_name().unwrap_or_default().to_string_lossy();
    let id = id_of("program", &[&named, CHANGES]);
    if find_layer(layer_store, &id).is_some() {
        return Ok(id);
    }
    let name = format!("{id}.part{}", std::process::id());
    let draft = LayerDraft::begin(layer_store.programs, layer_store.layers, &name, body::ids::of_trees())?;
    let writer = GitDirWriter { owner: tree_layer::owner(draft.ids()), mtime: now() };
    draft.fill(|sink| {
        writer.dirs(sink, &["", ".git", ".git/palisade"])?;
        writer.file(sink, CHANGES, launch, 0o555)
    })?;
    draft.finish_over(id.clone(), "program changes", layer_store.now.to_owned(), Vec::new())?;
    Ok(id)
}

fn now() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs() as i64)
}

/// The layers with the packs of a commit and its history, topmost first.
fn objects(layer_store: LayerStore<'_>, repository: &Repository) -> Result<Vec<LayerId>, WorkspaceError> {
    let place = id_of("repository", &[&repository.common.to_string_lossy()]);
    let about = format!("objects {place} ");
    let git = repository.git();
    let mut base: Option<(String, Vec<LayerId>)> = None;
    for record in tree_layer::records(layer_store, &about) {
        let commit = record.about.trim_start_matches(&about).to_owned();
        let Some(stack) = find_layer(layer_store, &record.id) else { continue };
        if commit == repository.commit {
            return Ok(stack);
        }
        if base.is_none()
            && stack.len() < CHAIN_MAX
            && git.run(["merge-base", "--is-ancestor", &commit, &repository.commit]).is_ok()
        {
            base = Some((commit, stack));
        }
    }
    let (have, over) = base.unwrap_or_default();
    let id =
        id_of("objects", &[place.as_str(), &repository.commit, over.first().map_or("", LayerId::as_str)]);
    let stage = StageDir::make(layer_store.layers.join(format!("{id}.stage{}", std::process::id())))
        .during("create a directory for a pack")?;
    let pack = stage.join("history.pack");
    let mut revisions = format!("{}\n", repository.commit);
    if !have.is_empty() {
        revisions.push_str(&format!("^{have}\n"));
    }
    let mut args = vec!["pack-objects", "--revs", "--stdout", "--delta-base-offset", "--quiet"];
    let partial = crate::partial_clone::remote(&repository.common).is_some();
    if partial {
        args.push("--missing=allow-any");
    }
    git.fill(args, revisions.into_bytes(), File::create(&pack).during("make a pack")?)?;
    let index = stage.join("history.idx");
    git.run(["index-pack".as_ref(), "-o".as_ref(), index.as_os_str(), pack.as_os_str()])?;
    let name = format!("{id}.part{}", std::process::id());
    let draft = LayerDraft::begin(layer_store.programs, layer_store.layers, &name, body::ids::of_trees())?;
    let writer = GitDirWriter { owner: tree_layer::owner(draft.ids()), mtime: now() };
    draft.fill(|sink| writer.pack(sink, &id, &pack, &index, partial))?;
    draft.finish_over(
        id.clone(),
        &format!("{about}{}", repository.commit),
        layer_store.now.to_owned(),
        over.clone(),
    )?;
    Ok([id].into_iter().chain(over).collect())
}

struct GitDirWriter {
    owner: (u32, u32),
    mtime: i64,
}

impl GitDirWriter {
    fn dir(&self, sink: &mut dyn Sink, path: &str) -> Result<(), ArchiveError> {
        let entry = LayerEntry {
            path: path.as_bytes().to_vec(),
            what: LayerEntryKind::Dir,
            mode: 0o755,
            owner: self.owner,
            mtime: self.mtime,
        };
        put(sink, &[], &entry, &mut io::empty())
    }

    fn text(&self, sink: &mut dyn Sink, path: &str, text: &str) -> Result<(), ArchiveError> {
        let what = LayerEntryKind::File(text.len() as u64);
        let entry = LayerEntry {
            path: path.as_bytes().to_vec(),
            what,
            mode: 0o644,
            owner: self.owner,
            mtime: self.mtime,
        };
        put(sink, &[], &entry, &mut text.as_bytes())
    }

    fn file(&self, sink: &mut dyn Sink, path: &str, from: &Path, mode: u32) -> Result<(), ArchiveError> {
        let mut file = File::open(from).map_err(ArchiveError::Sink)?;
        let len = file.metadata().map_err(ArchiveError::Sink)?.len();
        let entry = LayerEntry {
            path: path.as_bytes().to_vec(),
            what: LayerEntryKind::File(len),
            mode,
            owner: self.owner,
            mtime: self.mtime,
        };
        put(sink, &[], &entry, &mut file)
    }

    fn dirs(&self, sink: &mut dyn Sink, paths: &[&str]) -> Result<(), ArchiveError> {
        paths.iter().try_for_each(|path| self.dir(sink, path))
    }

    fn head(
        &mut self,
        sink: &mut dyn Sink,
        repository: &Repository,
        index: &Path,
    ) -> Result<(), ArchiveError> {
        self.dirs(
            sink,
            &[
                "",
                ".git",
                ".git/refs",
                ".git/refs/heads",
                ".git/refs/tags",
                ".git/objects",
                ".git/objects/info",
                ".git/objects/pack",
                ".git/info",
            ],
        )?;
        self.text(sink, ".git/config", &(fsmonitor_include(&repository.name) + CONFIG))?;
        match &repository.branch {
            Some(branch) => {
                self.text(sink, ".git/HEAD", &format!("ref: refs/heads/{branch}\n"))?;
                // `packed-refs` needs no directories for names with slashes.
                self.text(
                    sink,
                    ".git/packed-refs",
                    &format!(
                        "# pack-refs with: peeled fully-peeled sorted \n{} refs/heads/{branch}\n",
                        repository.commit
                    ),
                )?;
            }
            None => self.text(sink, ".git/HEAD", &format!("{}\n", repository.commit))?,
        }
        let shallow = repository.common.join("shallow");
        if repository.shallow && shallow.exists() {
            self.file(sink, ".git/shallow", &shallow, 0o644)?;
        }
        if index.exists() { self.file(sink, ".git/index", index, 0o644) } else { Ok(()) }
    }

    fn pack(
        &self,
        sink: &mut dyn Sink,
        id: &LayerId,
        pack: &Path,
        index: &Path,
        partial: bool,
    ) -> Result<(), ArchiveError> {
        self.dirs(sink, &["", ".git", ".git/objects", ".git/objects/pack"])?;
        // git requires forty hexadecimal digits in a pack's name.
        let name = format!(".git/objects/pack/pack-{:0<40}", id.as_str());
        self.file(sink, &format!("{name}.pack"), pack, 0o444)?;
        self.file(sink, &format!("{name}.idx"), index, 0o444)?;
        if partial { self.text(sink, &format!("{name}.promisor"), "") } else { Ok(()) }
    }
}
