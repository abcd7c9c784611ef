//! Copies files between the host and a Body.
//!
//! Trust: the files that come out of a Body are hostile. `pal` writes them by descriptor below the target that the
//! user named, never through a symbolic link from the Body, and keeps only their permission bits.
//! Invariant: nothing that git on the host takes for a repository comes out of a Body, unless the user asks for it:
//! the settings of a repository can run programs.
//! Invariant: a copy that fails leaves no partial file, and nothing at all if its target is new.

mod receive;
mod send;

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
};

use body::guest::TreeQuery;
use proto::{
    BodyId, Failure, Kind, Size,
    event_data::{CopiedBy, FileRead, FileWritten},
    tree::{self, TreeForm},
    wire::filesystem::{FileType, StatRequest, StatResponse},
};
use tokio::sync::mpsc;

use crate::{CopyTotals, Fleet, blocking::run_blocking, failures, mounts::git_dir_above};
use receive::TreeReceiver;

/// Copies with less data are made without looking for free space.
const UNMEASURED_MAX: u64 = 1 << 20;

/// Copies files into Bodies and out of them.
#[derive(Debug, Clone, Copy)]
pub struct BodyFiles<'a> {
    pub(crate) fleet: &'a Fleet,
}

/// Whether git directories come out of a Body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GitDirs {
    /// They are left out, and named.
    LeaveOut,
    /// They are copied: git on the host will do what they say.
    Copy,
}

impl BodyFiles<'_> {
    /// Copies into a Body. As with `cp`, an existing directory receives the source under its own name.
    pub async fn copy_in(&self, id: &BodyId, host: &Path, inside: &str) -> Result<CopyTotals, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let cannot = |error: io::Error| {
            Failure::new(Kind::NotFound, format!("cannot copy {}", host.display()))
                .because(error)
                .hint("name a file or directory that exists")
        };
        run_blocking(|| fs::symlink_metadata(host).and_then(|_| fs::metadata(host))).map_err(cannot)?;
        let target = self.target_inside(id, host, inside).await?;
        let guest = self.fleet.guest(id);
        let form = TreeForm::of_guest(guest.info().await.map_err(failures::guest)?.generation);
        let size = run_blocking(|| send::measure(host, form));
        run_blocking(|| self.check_room(id, host, size))?;
        run_blocking(|| self.fleet.write(id, FileWritten { path: target.clone(), by: CopiedBy::Cp }))?;
        let (sender, receiver) = mpsc::channel(8);
        let source = host.to_owned();
        let walked = tokio::task::spawn_blocking(move || send::send_tree(&source, form, size, sender));
        let sent = guest.write_tree(&target, None, receiver).await;
        let copied = walked
            .await
            .map_err(|error| Failure::new(Kind::Internal, "the copy was interrupted").because(error))?;
        let cannot_read = |error: io::Error| {
            Failure::new(Kind::Host, format!("cannot copy {}", host.display())).because(error)
        };
        match (copied, sent) {
            // The guest stopped reading, and says why.
            (Err(error), Err(refused)) if error.kind() == io::ErrorKind::BrokenPipe => {
                Err(failures::guest(refused))
            }
            (Err(error), _) => Err(cannot_read(error)),
            (Ok(copied), sent) => sent.map(|()| copied).map_err(failures::guest),
        }
    }

    /// Refuses a copy that would exceed the Body's disk limit: the supervisor ends a Body that exceeds it. Other
    /// Bodies have a file system of that size, and their guest refuses.
    fn check_room(&self, id: &BodyId, host: &Path, size: Option<u64>) -> Result<(), Failure> {
        let Some(size) = size.filter(|size| *size > UNMEASURED_MAX) else { return Ok(()) };
        if !self.fleet.upper_path(id).is_dir() {
            return Ok(());
        }
        let spec = self.fleet.view(id)?.spec;
        let limit = spec.limits.disk.0;
        let left = limit.saturating_sub(self.fleet.access().disk_usage(id));
        if size <= left {
            return Ok(());
        }
        Err(Failure::new(Kind::Limit, format!("Body {id} has no room for {}", host.display()))
            .because(format!(
                "it has {} of data, and {} of the Body's disk limit of {} are left",
                Size(size),
                Size(left),
                Size(limit)
            ))
            .hint("create a Body with a higher limit: pal create --disk SIZE"))
    }

    async fn target_inside(&self, id: &BodyId, host: &Path, inside: &str) -> Result<String, Failure> {
        let asked: Result<StatResponse, _> = self
            .fleet
            .guest(id)
            .ask("/filesystem.Filesystem/Stat", &StatRequest { path: inside.to_owned() })
            .await;
        let is_dir = match asked {
            Ok(answer) => answer.entry.is_some_and(|entry| entry.r#type() == FileType::Directory),
            Err(body::guest::GuestError::Refused { code, .. }) if code == "not_found" => false,
            Err(error) => return Err(failures::guest(error)),
        };
        let name = host.canonicalize().ok().and_then(|path| path.file_name().map(OsStr::to_owned));
        match name.as_ref().and_then(|name| name.to_str()) {
            Some(name) if is_dir || inside.ends_with('/') => {
                Ok(format!("{}/{name}", inside.trim_end_matches('/')))
            }
            _ => Ok(inside.to_owned()),
        }
    }

    /// Copies out of a Body, without git directories.
    pub async fn copy_out(&self, id: &BodyId, inside: &str, host: &Path) -> Result<CopyTotals, Failure> {
        self.copy_out_with(id, inside, host, GitDirs::LeaveOut).await
    }

    /// Copies out of a Body.
    pub async fn copy_out_with(
        &self,
        id: &BodyId,
        inside: &str,
        host: &Path,
        git: GitDirs,
    ) -> Result<CopyTotals, Failure> {
        run_blocking(|| self.fleet.running(id))?;
        let target = match inside.trim_end_matches('/').rsplit('/').next() {
            Some(name) if host.is_dir() && !name.is_empty() && name != ".." && name != "." => host.join(name),
            _ => host.to_owned(),
        };
        if git == GitDirs::LeaveOut
            && let Some(dir) = run_blocking(|| git_dir_above(&resolved(&target)))
        {
            return Err(git_refusal(format!("{} is a git directory", dir.display())));
        }
        let query = TreeQuery { user: None, leave_out_git: git == GitDirs::LeaveOut };
        let mut stream = self.fleet.guest(id).read_tree(inside, query).await.map_err(failures::guest)?;
        run_blocking(|| self.fleet.write(id, FileRead { path: inside.to_owned(), by: CopiedBy::Cp }))?;
        let mut receiver = TreeReceiver::new(target, git);
        let mut reader = tree::TreeReader::default();
        let hostile = |error: tree::TreeError| {
            Failure::new(Kind::Host, "the Body sent something that cannot be copied").because(error)
        };
        while let Some(piece) = body::guest::next_chunk(&mut stream).await.map_err(failures::guest)? {
            reader.push(&piece);
            while let Some(item) = reader.next().map_err(hostile)? {
                let form = reader.form();
                run_blocking(|| receiver.take(item, form)).map_err(|error| cannot_write(&receiver, error))?;
            }
        }
        reader.finish().map_err(hostile)?;
        if receiver.is_omitted() {
            return Err(git_refusal(format!("{inside} in Body {id} is a git directory")));
        }
        Ok(receiver.finish())
    }
}

/// The path of a target whose last parts may not exist yet.
fn resolved(target: &Path) -> PathBuf {
    let there = target.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    match there {
        Some((above, real)) => {
            target.strip_prefix(above).map_or_else(|_| real.clone(), |rest| real.join(rest))
        }
        None => target.to_owned(),
    }
}

fn git_refusal(message: String) -> Failure {
    Failure::new(Kind::Denied, message)
        .because("git on this host would run the programs that its settings name")
        .hint("bring commits out with `pal land` or `pal save`, or copy single files")
        .hint("`pal cp --with-git` copies it all the same")
}

fn cannot_write(receiver: &TreeReceiver, error: io::Error) -> Failure {
    let full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded);
    let kind = if full { Kind::Limit } else { Kind::Host };
    let failure = Failure::new(kind, format!("cannot write {}", receiver.top().display())).because(error);
    if full { failure.hint("make room on that file system, or choose another target") } else { failure }
}
