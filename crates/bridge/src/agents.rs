//! All agents of a data directory: create, find, read, and the inputs that people give them.
//!
//! Invariant: an agent's chain is the truth about that agent; its record only says that the agent exists.
//! Invariant: an input of a person is an event of the agent's chain; the driver, now or later, reads it there.

use std::{
    fs::{self, File},
    os::fd::AsFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use brain::agent::{AgentView, ResolvedEvent, resolve};
use fleet::{
    EventQuery, Fleet, clock,
    records::{RecordTable, key_of},
};
use proto::{
    AgentId, BodyId, ChainId, Draft, Event, EventData, Failure, Kind,
    event_data::{
        AgentCreated, AgentEmbodied, AgentPosition, AgentRemoved, AgentSpec, MessageReceived, MessageSource,
    },
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use store::Bucket;

use crate::journal::{FleetJournal, read_chain};

/// Agents, by id.
const AGENTS: Bucket = Bucket::new("agents");
/// The most agents in a line of forks.
const FORKS_DEEP_MAX: usize = 64;
/// The longest message of a person, in bytes.
const MESSAGE_LEN_MAX: usize = 512 << 10;
/// How long a driver waits for the one before it to end.
const LOCK_WAIT: Duration = Duration::from_secs(2);
const LOCK_EVERY: Duration = Duration::from_millis(20);

/// An agent in the list of agents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AgentRecord {
    /// The settings of the agent.
    pub spec: AgentSpec,
    /// When it was created, RFC 3339.
    pub created_at: String,
    /// The place in another agent's chain whose conversation it goes on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<AgentPosition>,
}

/// An agent and everything that its events say.
pub struct LoadedAgent {
    /// The record.
    pub record: AgentRecord,
    /// The events that count: those of the agents that it was forked from, then its own.
    pub events: Vec<Event>,
    /// The view.
    pub view: AgentView,
}

/// The lock of the process that drives an agent. The kernel releases it when the process ends.
pub struct DriverLock {
    _file: File,
}

/// The agents of a data directory.
#[derive(Clone)]
pub struct Agents {
    fleet: Arc<Fleet>,
}

impl Agents {
    /// The agents beside the Bodies of this fleet.
    pub fn new(fleet: Arc<Fleet>) -> Self {
        Self { fleet }
    }

    /// The fleet.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    fn table(&self) -> RecordTable<'_, AgentRecord> {
        RecordTable::new(&**self.fleet.records(), AGENTS)
    }

    /// A new id.
    pub fn new_id() -> Result<AgentId, Failure> {
        let bytes = sys::random::bytes().map_err(|error| {
            Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
        })?;
        Ok(AgentId::from_random(bytes))
    }

    /// Creates an agent in a Body, with its first message.
    pub fn create(
        &self,
        spec: AgentSpec,
        forked_from: Option<AgentPosition>,
        body: &BodyId,
        message: Option<String>,
    ) -> Result<AgentRecord, Failure> {
        let record = AgentRecord { spec, created_at: clock::now(), forked_from };
        let id = record.spec.id.clone();
        let created = AgentCreated { spec: record.spec.clone(), forked_from: record.forked_from.clone() };
        let mut events = vec![
            EventData::from(created),
            EventData::from(AgentEmbodied { body: body.clone(), snapshot: None }),
        ];
        if let Some(text) = message {
            events.push(user_message(text)?);
        }
        self.note(&id, events)?;
        self.table().create(&key_of([id.as_str()])?, &record)?;
        Ok(record)
    }

    /// Creates an agent that gets its Body and its first message later.
    pub(crate) fn create_bodiless(&self, spec: AgentSpec) -> Result<AgentRecord, Failure> {
        let record = AgentRecord { spec, created_at: clock::now(), forked_from: None };
        let id = record.spec.id.clone();
        let created = AgentCreated { spec: record.spec.clone(), forked_from: None };
        self.note(&id, [EventData::from(created)])?;
        self.table().create(&key_of([id.as_str()])?, &record)?;
        Ok(record)
    }

    /// All agents, oldest first.
    pub fn list(&self) -> Result<Vec<AgentRecord>, Failure> {
        let mut records = self.table().values(None)?;
        records.sort_by(|a, b| a.created_at.cmp(&b.created_at));
        Ok(records)
    }

    /// The agent whose id begins with a text.
    pub fn find(&self, text: &str) -> Result<AgentRecord, Failure> {
        let mut found: Vec<AgentRecord> = self.list()?;
        found.retain(|record| record.spec.id.as_str().starts_with(text));
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => Err(Failure::new(Kind::NotFound, format!("no agent has an id that begins with {text:?}"))
                .hint("list the agents: pal agent ls")),
            many => {
                Err(Failure::new(Kind::Usage, format!("{many} agents have an id that begins with {text:?}"))
                    .hint("write more of the id; list the agents: pal agent ls"))
            }
        }
    }

    /// The agent of an id.
    pub fn get(&self, id: &AgentId) -> Result<AgentRecord, Failure> {
        let found = self.table().get(&key_of([id.as_str()])?)?;
        found.map(|record| record.value).ok_or_else(|| {
            Failure::new(Kind::NotFound, format!("there is no agent {id}"))
                .hint("list the agents: pal agent ls")
        })
    }

    /// The agent, its events and its view.
    pub async fn load(&self, id: &AgentId) -> Result<LoadedAgent, Failure> {
        let record = self.get(id)?;
        let events = self.effective_events(&record)?;
        let journal = FleetJournal::after(Arc::clone(&self.fleet), id, &events);
        let mut resolved: Vec<ResolvedEvent> = Vec::with_capacity(events.len());
        for event in events.iter().cloned() {
            let event = resolve(&journal, event).await;
            resolved.push(event.map_err(|error| {
                Failure::new(Kind::Host, format!("cannot read the log of agent {id}")).because(error)
            })?);
        }
        let view = AgentView::of(&resolved);
        Ok(LoadedAgent { record, events, view })
    }

    /// The events of an agent and, before them, those of the agents that it was forked from.
    pub fn effective_events(&self, record: &AgentRecord) -> Result<Vec<Event>, Failure> {
        let mut events = self.inherited_events(record)?;
        events.extend(read_chain(&self.fleet, &record.spec.id, 0)?);
        Ok(events)
    }

    /// The events of the agents that an agent was forked from, up to the fork.
    pub(crate) fn inherited_events(&self, record: &AgentRecord) -> Result<Vec<Event>, Failure> {
        let mut inherited = Vec::new();
        for AgentPosition { agent, through } in self.origins(record)? {
            let events = read_chain(&self.fleet, &agent, 0)?;
            inherited.extend(events.into_iter().filter(|event| event.seq <= through));
        }
        Ok(inherited)
    }

    /// The agents that an agent was forked from, and the last event of each that counts for it; the oldest first.
    pub fn origins(&self, record: &AgentRecord) -> Result<Vec<AgentPosition>, Failure> {
        let mut origins: Vec<AgentPosition> = Vec::new();
        let mut origin = record.forked_from.clone();
        while let Some(position) = origin {
            if origins.len() >= FORKS_DEEP_MAX {
                return Err(Failure::new(
                    Kind::Limit,
                    format!("more than {FORKS_DEEP_MAX} agents were forked from each other"),
                ));
            }
            let chain = ChainId::Agent(position.agent.clone());
            let first = self.fleet.log().read(&EventQuery { limit: 1, ..EventQuery::of_chain(&chain) })?;
            origin = first.first().and_then(Event::data_as::<AgentCreated>).and_then(|data| data.forked_from);
            origins.push(position);
        }
        origins.reverse();
        Ok(origins)
    }

    /// Appends events of a person, or of a process that does not drive the agent.
    pub fn note(&self, id: &AgentId, data: impl IntoIterator<Item = EventData>) -> Result<(), Failure> {
        let drafts = data.into_iter().map(|data| Draft::of_agent(id, data)).collect();
        self.fleet.log().note_to_agent(id, drafts).map(drop)
    }

    /// Gives the agent a message of a person.
    pub fn send(&self, id: &AgentId, text: String) -> Result<(), Failure> {
        self.note(id, [user_message(text)?])
    }

    /// Removes an agent from the list. Its events stay in the log.
    pub fn remove(&self, id: &AgentId, body_removed: bool) -> Result<(), Failure> {
        self.note(id, [EventData::from(AgentRemoved { body_removed })])?;
        self.table().remove(&key_of([id.as_str()])?)?;
        let _ = fs::remove_dir_all(self.directory(id));
        Ok(())
    }

    /// The directory with the driver's lock and live updates. The agent itself is in the log.
    pub fn directory(&self, id: &AgentId) -> PathBuf {
        self.fleet.data().join("agents").join(id.as_str())
    }

    /// Takes the right to drive an agent; `None` if another process drives it.
    pub fn lock(&self, id: &AgentId) -> Result<Option<DriverLock>, Failure> {
        let cannot = |error: std::io::Error| Failure::new(Kind::Host, "cannot lock the agent").because(error);
        let directory = self.directory(id);
        fs::create_dir_all(&directory).map_err(cannot)?;
        let file =
            File::options().create(true).truncate(false).write(true).open(directory.join("driver.lock"));
        let file = file.map_err(cannot)?;
        let began = Instant::now();
        while flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive).is_err() {
            // The driver before may be about to end; one that works on reads the newest events by itself.
            if began.elapsed() > LOCK_WAIT {
                return Ok(None);
            }
            std::thread::sleep(LOCK_EVERY);
        }
        Ok(Some(DriverLock { _file: file }))
    }

    /// Whether a process drives the agent.
    pub fn is_driven(&self, id: &AgentId) -> bool {
        let Ok(file) = File::open(self.directory(id).join("driver.lock")) else { return false };
        flock(file.as_fd(), FlockOperation::NonBlockingLockShared).is_err()
    }
}

fn user_message(text: String) -> Result<EventData, Failure> {
    check_message(&text)?;
    Ok(MessageReceived { from: MessageSource::User, text }.into())
}

/// Checks a message of a person, before anything is made for it.
pub fn check_message(text: &str) -> Result<(), Failure> {
    if text.trim().is_empty() {
        return Err(Failure::new(Kind::Usage, "the message is empty").hint("write it after the agent's id"));
    }
    if text.len() > MESSAGE_LEN_MAX {
        return Err(Failure::new(
            Kind::Limit,
            format!("the message is longer than {} KiB", MESSAGE_LEN_MAX >> 10),
        )
        .hint("put long text into a file of the Body: pal cp FILE BODY:/tmp/"));
    }
    Ok(())
}
