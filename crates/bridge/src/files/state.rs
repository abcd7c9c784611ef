//! Files in the agent's own log: a fork and a rewind of the agent take them along.
//!
//! Invariant: the files are a fold over the events of the agent, and of those that it was forked from. A change takes
//! effect with its event, which is appended together with the end of its call: a call that a crash cut off has changed
//! nothing.

use std::sync::{Arc, Mutex, PoisonError};

use brain::agent::BoxFuture;
use fleet::{ArtifactRef, EventQuery, Fleet};
use proto::{
    AgentId, ChainId, Draft, Event, EventData, Failure, Kind,
    event_data::{AgentFileRemoved, AgentFileWritten, AgentPosition, AgentRewound, EventKind},
    file_call::{FileAnswer, FileCall, FileError, FileOperation},
    file_text,
};

use super::{
    BodyLife, FileBackend, FileReply,
    tree::{FileTree, TextFile, answer_read, paths_below, refuse},
};
use crate::{AgentRecord, Agents};

/// The longest file in bytes.
const FILE_LEN_MAX: usize = 1 << 20;
/// The most files.
const FILES_MAX: usize = 1000;
/// The most bytes of all files.
const TOTAL_LEN_MAX: usize = 16 << 20;
/// The longest content that an event holds itself.
const INLINE_LEN_MAX: usize = 128 << 10;

/// The files in the log of one agent.
#[derive(Clone)]
pub struct StateFiles(Arc<StateShared>);

struct StateShared {
    fleet: Arc<Fleet>,
    agent: AgentId,
    /// The agents that this one was forked from, and the last event of each that counts.
    origins: Vec<AgentPosition>,
    fold: Mutex<StateFold>,
}

/// The files after the events up to a position.
#[derive(Default)]
struct StateFold {
    /// The position of the newest event that was read; none before the first read.
    pos: Option<u64>,
    files: FileTree,
}

impl StateFiles {
    /// The files of an agent.
    pub fn open(agents: &Agents, record: &AgentRecord) -> Result<Self, Failure> {
        let origins = agents.origins(record)?;
        let fleet = Arc::clone(agents.fleet());
        let agent = record.spec.id.clone();
        Ok(Self(Arc::new(StateShared { fleet, agent, origins, fold: Mutex::default() })))
    }

    async fn away<T: Send + 'static>(
        &self,
        act: impl FnOnce(&StateShared) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let shared = Arc::clone(&self.0);
        let done = tokio::task::spawn_blocking(move || act(&shared)).await;
        done.unwrap_or_else(|error| {
            Err(Failure::new(Kind::Internal, "reading the agent's files was interrupted").because(error))
        })
    }
}

impl FileBackend for StateFiles {
    fn call(&self, call: FileCall) -> BoxFuture<'_, Result<FileReply, Failure>> {
        Box::pin(self.away(move |shared| shared.answer(&call.operation)))
    }

    /// An operation without an event did not take effect, so that it is carried out now.
    fn recover(&self, call: FileCall, _: BodyLife) -> BoxFuture<'_, Result<Option<FileReply>, Failure>> {
        Box::pin(async move { self.call(call).await.map(Some) })
    }

    fn commit(&self, events: Vec<EventData>) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(self.away(move |shared| {
            let drafts = events.into_iter().map(|data| Draft::of_agent(&shared.agent, data)).collect();
            shared.fleet.log().note_to_agent(&shared.agent, drafts).map(drop)
        }))
    }
}

impl StateShared {
    fn answer(&self, operation: &FileOperation) -> Result<FileReply, Failure> {
        let mut fold = self.fold.lock().unwrap_or_else(PoisonError::into_inner);
        self.read_on(&mut fold)?;
        match operation {
            FileOperation::Write { files } => {
                let changes = files.iter().map(|file| (file.path.clone(), file.content.clone())).collect();
                self.change(&fold.files, changes, FileAnswer::Written)
            }
            FileOperation::Edit { path, old, new, replace_all } => {
                let Some(file) = fold.files.get(path) else {
                    return Ok(refuse(path, FileError::NotFound).into());
                };
                match file_text::replace_text(&file.text, old, new, *replace_all) {
                    Ok((text, occurrences)) => {
                        let changes = vec![(path.clone(), Some(text))];
                        self.change(&fold.files, changes, FileAnswer::Edited { occurrences })
                    }
                    Err(reason) => Ok(refuse(path, reason).into()),
                }
            }
            FileOperation::Delete { path } => {
                if paths_below(&fold.files, path).next().is_none() {
                    return Ok(refuse(path, FileError::NotFound).into());
                }
                let removed = AgentFileRemoved { path: path.clone() };
                Ok(FileReply { answer: FileAnswer::Deleted, events: vec![removed.into()] })
            }
            _ => Ok(answer_read(&fold.files, operation).unwrap_or(FileAnswer::Unknown).into()),
        }
    }

    /// The events of changes, if all of them are possible.
    fn change(
        &self,
        files: &FileTree,
        changes: Vec<(String, Option<String>)>,
        answer: FileAnswer,
    ) -> Result<FileReply, Failure> {
        if let Some(refused) = find_objection(files, &changes) {
            return Ok(refused.into());
        }
        let mut events = Vec::with_capacity(changes.len());
        for (path, content) in changes {
            events.push(match content {
                Some(text) => self.written(path, text)?.into(),
                None => AgentFileRemoved { path }.into(),
            });
        }
        Ok(FileReply { answer, events })
    }

    fn written(&self, path: String, text: String) -> Result<AgentFileWritten, Failure> {
        if text.len() <= INLINE_LEN_MAX {
            return Ok(AgentFileWritten { path, content: Some(text), artifact: None, artifact_bytes: 0 });
        }
        let kept = self.fleet.log().put_artifact(text.as_bytes())?;
        Ok(AgentFileWritten { path, content: None, artifact: Some(kept.sha256), artifact_bytes: kept.bytes })
    }

    /// Folds the events since the last read.
    fn read_on(&self, fold: &mut StateFold) -> Result<(), Failure> {
        let own = match fold.pos {
            Some(pos) => self.read_chain(&self.agent, pos)?,
            None => self.read_all(fold)?,
        };
        if let Some(newest) = own.last() {
            fold.pos = Some(newest.pos);
        }
        let rewound = own.iter().any(Event::is::<AgentRewound>);
        let events = if rewound { self.read_all(fold)? } else { own };
        for event in live_events(&events) {
            self.apply(&mut fold.files, event)?;
        }
        fold.pos.get_or_insert(0);
        Ok(())
    }

    /// All events, after which the files begin empty.
    fn read_all(&self, fold: &mut StateFold) -> Result<Vec<Event>, Failure> {
        fold.files.clear();
        let mut events = Vec::new();
        for AgentPosition { agent, through } in &self.origins {
            events.extend(self.read_chain(agent, 0)?.into_iter().filter(|event| event.seq <= *through));
        }
        events.extend(self.read_chain(&self.agent, 0)?);
        Ok(events)
    }

    fn read_chain(&self, agent: &AgentId, after: u64) -> Result<Vec<Event>, Failure> {
        let kinds = [AgentFileWritten::NAMES, AgentFileRemoved::NAMES, AgentRewound::NAMES].concat();
        let chain = ChainId::Agent(agent.clone());
        self.fleet.log().read(&EventQuery { after, kinds, ..EventQuery::of_chain(&chain) })
    }

    fn apply(&self, files: &mut FileTree, event: &Event) -> Result<(), Failure> {
        if let Some(removed) = event.data_as::<AgentFileRemoved>() {
            let gone: Vec<String> = paths_below(files, &removed.path).map(|(path, _)| path.clone()).collect();
            gone.iter().for_each(|path| drop(files.remove(path)));
        }
        let Some(written) = event.data_as::<AgentFileWritten>() else { return Ok(()) };
        let text = match (written.content, written.artifact) {
            (Some(text), _) => text,
            // A log may come from another host: what is longer than this version writes is not read.
            (None, Some(sha256)) if written.artifact_bytes <= FILE_LEN_MAX as u64 => {
                let wanted = ArtifactRef { sha256, bytes: written.artifact_bytes };
                String::from_utf8_lossy(&self.fleet.log().get_artifact(&wanted)?).into_owned()
            }
            _ => return Ok(()),
        };
        files.insert(written.path, TextFile { text, modified_s: 0 });
        Ok(())
    }
}

/// The events that count after the rewinds among them.
fn live_events(events: &[Event]) -> Vec<&Event> {
    let mut live: Vec<&Event> = Vec::with_capacity(events.len());
    for event in events {
        match event.data_as::<AgentRewound>() {
            Some(rewound) => live.retain(|other| other.chain != event.chain || other.seq <= rewound.through),
            None => live.push(event),
        }
    }
    live
}

/// Why changes are not possible.
fn find_objection(files: &FileTree, changes: &[(String, Option<String>)]) -> Option<FileAnswer> {
    let mut count = files.len();
    let mut total: usize = files.values().map(|file| file.text.len()).sum();
    for (path, content) in changes {
        let Some(text) = content else {
            if !files.contains_key(path) {
                return Some(refuse(path, FileError::NotFound));
            }
            continue;
        };
        let below =
            |other: &String| other.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('/'));
        if path == "/" || files.keys().any(below) {
            return Some(refuse(path, FileError::IsDirectory));
        }
        if text.len() > FILE_LEN_MAX {
            return Some(refuse(path, FileError::TooLarge { len: text.len() as u64 }));
        }
        count += usize::from(!files.contains_key(path));
        total += text.len();
        if count > FILES_MAX || total > TOTAL_LEN_MAX {
            let why = format!(
                "an agent may keep at most {FILES_MAX} files with {} MiB in its own log; delete some of them",
                TOTAL_LEN_MAX >> 20
            );
            return Some(refuse(path, FileError::Other { why }));
        }
    }
    None
}
