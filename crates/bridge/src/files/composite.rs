//! All files of an agent as one tree: the path chooses the place.
//!
//! Paths of no route are files of the Body. A listing of `/` shows the routes beside the Body's own entries, and a search
//! of everything goes to every place.

use std::sync::Arc;

use brain::agent::{BoxFuture, CallPlan, middleware::AgentFiles};
use proto::{
    Failure, Kind,
    file_call::{CONTENT_LEN_MAX, FileAnswer, FileCall, FileEntry, FileError, FileOperation, WrittenFile},
};

use super::{
    BodyLife, FileBackend, FileReply, normalize,
    route::{RoutePrefixes, pattern_in_route},
};

/// The files of an agent.
pub struct CompositeFiles {
    default: Arc<dyn FileBackend>,
    /// The directory that a search without a path searches in the default place.
    directory: String,
    prefixes: RoutePrefixes,
    /// The places of the routes, in the order of their prefixes.
    routes: Vec<Arc<dyn FileBackend>>,
}

impl CompositeFiles {
    /// Files of one place; a search without a path searches this directory of it.
    pub fn new(default: Arc<dyn FileBackend>, directory: impl Into<String>) -> Self {
        Self { default, directory: directory.into(), prefixes: RoutePrefixes::default(), routes: Vec::new() }
    }

    /// Adds a place for the paths below a prefix such as `/memories/`.
    #[must_use]
    pub fn with_route(mut self, prefix: &str, place: Arc<dyn FileBackend>) -> Self {
        let at = self.prefixes.add(prefix);
        self.routes.insert(at, place);
        self
    }

    /// Carries out a call. Paths must be normalised.
    pub async fn call(&self, call: FileCall) -> Result<FileReply, Failure> {
        match &call.operation {
            FileOperation::List { path } if path == "/" => self.list_root(call).await,
            FileOperation::Glob { pattern, path } if path == "/" => {
                self.glob(pattern.clone(), Some("/")).await.map(FileReply::from)
            }
            FileOperation::Grep { pattern, path, glob, limit } if path == "/" => {
                self.grep(pattern, Some("/"), glob.as_deref(), *limit).await.map(FileReply::from)
            }
            _ => self.call_one(call).await,
        }
    }

    /// Whether a path is in another place than the default one.
    pub fn is_routed(&self, path: &str) -> bool {
        self.prefixes.find(path).is_some()
    }

    /// The plan of an operation: its risk by its place, and the paths that it changes.
    pub fn plan(&self, operation: &FileOperation, why: impl Into<String>) -> CallPlan {
        let mut operation = operation.clone();
        let changes = operation.changes_files();
        let writes: Vec<String> = paths_of(&mut operation).into_iter().map(|path| path.clone()).collect();
        let place = writes.first().and_then(|path| self.prefixes.find(path)).map(|(at, _)| at);
        let place = place.and_then(|at| self.routes.get(at)).unwrap_or(&self.default);
        let plan = CallPlan { venue: place.venue(), ..CallPlan::reading(why) };
        if changes { CallPlan { risk: place.change_risk(), writes, ..plan } } else { plan }
    }

    /// Refuses an operation on files of several places, with a text for the model.
    pub fn check_place(&self, operation: &FileOperation) -> Result<(), String> {
        let call = FileCall { key: None, operation: operation.clone() };
        self.route(call).map(drop).map_err(|failure| format!("Error: {}", failure.message))
    }

    /// Carries out a call in the one place of its path.
    async fn call_one(&self, call: FileCall) -> Result<FileReply, Failure> {
        let routed = self.route(call)?;
        let reply = routed.place.call(routed.call).await?;
        Ok(self.come_out(routed.at, reply))
    }

    /// The answer to a call that an earlier driver began; `None` if it cannot be known.
    pub async fn recover(&self, call: FileCall, life: BodyLife) -> Result<Option<FileReply>, Failure> {
        let routed = self.route(call)?;
        let reply = routed.place.recover(routed.call, life).await?;
        Ok(reply.map(|reply| self.come_out(routed.at, reply)))
    }

    /// Finds files by a pattern; without a path in every place.
    pub async fn glob(&self, pattern: String, path: Option<&str>) -> Result<FileAnswer, Failure> {
        let call = |pattern: String, path: &str| FileCall {
            key: None,
            operation: FileOperation::Glob { pattern, path: path.to_owned() },
        };
        if let Some(path) = path.filter(|path| *path != "/") {
            return Ok(self.call_one(call(pattern, path)).await?.answer);
        }
        let first = self.default.call(call(pattern.clone(), path.unwrap_or(&self.directory))).await?.answer;
        let FileAnswer::Paths { mut paths, mut truncated, mut unreadable } = first else { return Ok(first) };
        for (at, place) in self.routes.iter().enumerate() {
            let Some(pattern) = pattern_in_route(&pattern, self.prefixes.get(at)) else { continue };
            let reply = self.come_out(Some(at), place.call(call(pattern, "/")).await?);
            let FileAnswer::Paths { paths: more, truncated: cut, unreadable: closed } = reply.answer else {
                return Ok(reply.answer);
            };
            paths.extend(more);
            truncated |= cut;
            unreadable |= closed;
        }
        paths.sort();
        paths.dedup();
        Ok(FileAnswer::Paths { paths, truncated, unreadable })
    }

    /// Finds lines that contain a text; without a path in every place. The limit is for all places together.
    pub async fn grep(
        &self,
        pattern: &str,
        path: Option<&str>,
        glob: Option<&str>,
        limit: u64,
    ) -> Result<FileAnswer, Failure> {
        let call = |path: &str, limit: u64| FileCall {
            key: None,
            operation: FileOperation::Grep {
                pattern: pattern.to_owned(),
                path: path.to_owned(),
                glob: glob.map(str::to_owned),
                limit,
            },
        };
        if let Some(path) = path.filter(|path| *path != "/") {
            return Ok(self.call_one(call(path, limit)).await?.answer);
        }
        let first = self.default.call(call(path.unwrap_or(&self.directory), limit)).await?.answer;
        let FileAnswer::Matches { mut matches, mut truncated } = first else { return Ok(first) };
        for (at, place) in self.routes.iter().enumerate() {
            let left = limit.saturating_sub(matches.len() as u64);
            if left == 0 {
                return Ok(FileAnswer::Matches { matches, truncated: true });
            }
            let reply = self.come_out(Some(at), place.call(call("/", left)).await?);
            let FileAnswer::Matches { matches: more, truncated: cut } = reply.answer else {
                return Ok(reply.answer);
            };
            matches.extend(more);
            truncated |= cut;
        }
        Ok(FileAnswer::Matches { matches, truncated })
    }

    async fn list_root(&self, call: FileCall) -> Result<FileReply, Failure> {
        let reply = self.default.call(call).await?;
        let FileAnswer::Entries { mut entries, truncated } = reply.answer else { return Ok(reply) };
        for at in 0..self.routes.len() {
            let path = format!("{}/", self.prefixes.get(at));
            // A directory of the Body with the name of a route is not to be seen.
            entries.retain(|entry| entry.path.trim_end_matches('/') != self.prefixes.get(at));
            entries.push(FileEntry { path, is_dir: true, len: 0, modified_s: 0 });
        }
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(FileAnswer::Entries { entries, truncated }.into())
    }

    /// The place of a call and the call as that place sees it.
    fn route(&self, mut call: FileCall) -> Result<RoutedCall<'_>, Failure> {
        let paths = paths_of(&mut call.operation);
        let mut at: Option<Option<usize>> = None;
        for path in paths {
            let found = self.prefixes.find(path);
            let place = found.as_ref().map(|(place, _)| *place);
            if *at.get_or_insert(place) != place {
                return Err(Failure::new(
                    Kind::Usage,
                    "one call cannot change files of several places; make one call for each of them",
                ));
            }
            if let Some((_, inside)) = found {
                *path = inside;
            }
        }
        let at = at.flatten();
        let place = at.and_then(|at| self.routes.get(at)).unwrap_or(&self.default);
        Ok(RoutedCall { at, place, call })
    }

    /// Gives the paths of an answer the prefix of their route.
    fn come_out(&self, at: Option<usize>, mut reply: FileReply) -> FileReply {
        let Some(at) = at else { return reply };
        let outside = |path: &mut String| *path = self.prefixes.join(at, path);
        match &mut reply.answer {
            FileAnswer::Entries { entries, .. } => {
                entries.iter_mut().for_each(|entry| outside(&mut entry.path));
            }
            FileAnswer::Paths { paths, .. } => paths.iter_mut().for_each(outside),
            FileAnswer::Matches { matches, .. } => matches.iter_mut().for_each(|one| outside(&mut one.path)),
            FileAnswer::Error { path, .. } => outside(path),
            _ => {}
        }
        reply
    }
}

struct RoutedCall<'a> {
    /// The route; none for the default place.
    at: Option<usize>,
    place: &'a Arc<dyn FileBackend>,
    call: FileCall,
}

fn paths_of(operation: &mut FileOperation) -> Vec<&mut String> {
    match operation {
        FileOperation::List { path }
        | FileOperation::Read { path, .. }
        | FileOperation::Edit { path, .. }
        | FileOperation::Delete { path }
        | FileOperation::Glob { path, .. }
        | FileOperation::Grep { path, .. } => vec![path],
        FileOperation::Write { files } => files.iter_mut().map(|file| &mut file.path).collect(),
        FileOperation::Recall { .. } => Vec::new(),
    }
}

impl AgentFiles for CompositeFiles {
    fn write<'a>(&'a self, path: &'a str, text: &'a str) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let file = WrittenFile { path: normalize(path)?, content: Some(fit(text)) };
            let call = FileCall { key: None, operation: FileOperation::Write { files: vec![file] } };
            let routed = self.route(call).map_err(|failure| failure.to_string())?;
            let reply = routed.place.call(routed.call).await.map_err(|failure| failure.to_string())?;
            match reply.answer {
                FileAnswer::Error { reason, .. } => Err(format!("{path}: {}", reason_word(&reason))),
                _ => routed.place.commit(reply.events).await.map_err(|failure| failure.to_string()),
            }
        })
    }

    fn read<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<Option<String>, String>> {
        Box::pin(async move {
            let operation = FileOperation::Read { path: normalize(path)?, offset: 0, limit: u64::MAX };
            let reply = self.call(FileCall { key: None, operation }).await;
            match reply.map_err(|failure| failure.to_string())?.answer {
                FileAnswer::Text { content, .. } => Ok(Some(content)),
                FileAnswer::Error { reason: FileError::NotFound | FileError::NotDirectory, .. } => Ok(None),
                FileAnswer::Error { reason, .. } => Err(format!("{path}: {}", reason_word(&reason))),
                _ => Err(format!("{path} is no text")),
            }
        })
    }

    fn list<'a>(&'a self, directory: &'a str) -> BoxFuture<'a, Result<Vec<String>, String>> {
        Box::pin(async move {
            let operation = FileOperation::List { path: normalize(directory)? };
            let reply = self.call(FileCall { key: None, operation }).await;
            match reply.map_err(|failure| failure.to_string())?.answer {
                FileAnswer::Entries { entries, .. } => Ok(entries.iter().map(name_of).collect()),
                FileAnswer::Error { reason: FileError::NotFound | FileError::NotDirectory, .. } => {
                    Ok(Vec::new())
                }
                FileAnswer::Error { reason, .. } => Err(format!("{directory}: {}", reason_word(&reason))),
                _ => Err(format!("{directory} is no directory")),
            }
        })
    }
}

/// The name of an entry; that of a directory ends with a slash.
fn name_of(entry: &FileEntry) -> String {
    let path = entry.path.trim_end_matches('/');
    let name = path.rsplit('/').next().unwrap_or(path);
    if entry.is_dir { format!("{name}/") } else { name.to_owned() }
}

/// A text that a place accepts. The middle of a longer one is left out, and the text says so.
fn fit(text: &str) -> String {
    if text.len() <= CONTENT_LEN_MAX {
        return text.to_owned();
    }
    let half = CONTENT_LEN_MAX / 2 - 100;
    let (head, tail) = (text.floor_char_boundary(half), text.ceil_char_boundary(text.len() - half));
    format!("{}\n... [{} bytes truncated] ...\n{}", &text[..head], tail - head, &text[tail..])
}

/// Deep Agents' word for an error.
pub fn reason_word(reason: &FileError) -> String {
    match reason {
        FileError::NotFound => "file_not_found".into(),
        FileError::IsDirectory => "is_directory".into(),
        FileError::NotDirectory => "not_a_directory".into(),
        FileError::PermissionDenied => "permission_denied".into(),
        FileError::InvalidPath => "invalid_path".into(),
        FileError::InvalidPattern { why } | FileError::Other { why } => why.clone(),
        FileError::NotText => "not_a_text_file".into(),
        FileError::TooLarge { len } => format!("the file has {len} bytes, which is too much for one call"),
        FileError::NoOccurrence => "string_not_found".into(),
        FileError::Ambiguous { .. } => "multiple_occurrences".into(),
        FileError::EmptyPattern => "the text to find is empty".into(),
    }
}
