//! Archives files of a git tree, as the build context of COPY steps.
//!
//! Invariant: the archive holds what git has at that tree. No file of the host and no git setting changes it.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use crate::{
    bare_repo::{self, StageDir},
    error::{ErrorContext, WorkspaceError},
    git::Git,
    tree_layer::id_of,
};

/// Archives `source`, a path or a glob below `context`, into a file of the directory `to`; returns its
/// content id and path.
pub fn pack(
    objects: &Path,
    tree: &str,
    context: &str,
    source: &str,
    to: &Path,
) -> Result<(String, PathBuf), WorkspaceError> {
    let missing = || {
        WorkspaceError::NotFound(format!("the repository has no {} to copy", proto::text::visible(source)))
    };
    let git = Git::at(objects);
    let top = if context.is_empty() { format!("{tree}^{{tree}}") } else { format!("{tree}:{context}") };
    let top =
        git.line(["rev-parse", "--verify", "--quiet", "--end-of-options", &top]).map_err(|_| missing())?;
    let source = source.trim_start_matches("./").trim_end_matches('/');
    let source = if source == "." { "" } else { source };
    if source.split('/').any(|part| part == "..") {
        return Err(WorkspaceError::NotFound(format!(
            "{} is outside of the build context",
            proto::text::visible(source)
        )));
    }
    let is_pattern = source.contains(['*', '?', '[']);
    // The id of the path itself identifies its content; for a glob, the id of the whole context does.
    let what = if source.is_empty() || is_pattern {
        top.clone()
    } else {
        git.line(["rev-parse", "--verify", "--quiet", "--end-of-options", &format!("{top}:{source}")])
            .map_err(|_| missing())?
    };
    let hash = id_of("archive", &[&what, source]).to_string();
    let archive = to.join(format!("{hash}.tar"));
    if archive.exists() {
        return Ok((hash, archive));
    }
    fs::create_dir_all(to).during("create a directory for an archive")?;
    let stage = StageDir::make(to.join(format!("{hash}.part{}", std::process::id())))
        .during("create a directory for an archive")?;
    bare_repo::make(&stage.join("git"), &[&objects.join("objects")], None)
        .during("make a repository to pack from")?;
    fs::create_dir_all(stage.join("git/info")).during("make a repository to pack from")?;
    // `export-ignore` hides files from release archives; a build needs them.
    fs::write(stage.join("git/info/attributes"), "* -export-ignore -export-subst\n")
        .during("make a repository to pack from")?;
    let packed = stage.join("files.tar");
    let mut args = vec!["archive", "--format=tar", top.as_str()];
    let paths = format!(":(glob){source}");
    if !source.is_empty() {
        args.extend(["--", if is_pattern { paths.as_str() } else { source }]);
    }
    let git = Git::at(&stage.join("git"));
    let git = if is_pattern { git } else { git.env("GIT_LITERAL_PATHSPECS", "1") };
    git.fill(args, Vec::new(), File::create(&packed).during("make an archive")?)
        .map_err(|error| if is_pattern { missing() } else { error.into() })?;
    fs::rename(&packed, &archive).during("keep an archive")?;
    Ok((hash, archive))
}

/// The text of a file at a tree.
pub fn text(objects: &Path, tree: &str, path: &str, len_max: usize) -> Result<String, WorkspaceError> {
    let missing =
        |_| WorkspaceError::NotFound(format!("the repository has no {}", proto::text::visible(path)));
    let bytes = Git::at(objects).run(["cat-file", "blob", &format!("{tree}:{path}")]).map_err(missing)?;
    if bytes.len() > len_max {
        return Err(WorkspaceError::Repository(format!(
            "{} is longer than {} MiB",
            proto::text::visible(path),
            len_max >> 20
        )));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
