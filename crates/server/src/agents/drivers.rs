//! The tasks that drive agents: one for each agent at work.
//!
//! An input of a client is an event of the agent's chain. The handler marks the agent, appends the event and wakes the
//! driver. A driver that was about to end when the input came runs again, because a wake-up counts until the driver has
//! seen it.
//!
//! Invariant: at most one task drives an agent, and at most one process: the driver holds the agent's lock.
//! Invariant: one key cannot take all turns: the agents of a key have a bound below that of the server.
//! Invariant: an agent is marked before it gets an input. A server that ends leaves the marks of the agents that it drove
//! or was about to drive, and the next server drives those on. An agent that the command line drives has no mark.

use std::{
    collections::HashMap,
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bridge::{AgentStatus, Agents, LiveSocket};
use proto::{AgentId, Failure, Kind};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinHandle,
};

use super::{AgentService, RequestOrigin};
use crate::ServerBounds;

/// The file in the directory of an agent that this server drives.
const MARK: &str = "served";
/// Keys whose turns are remembered before those without a driver are forgotten.
const KEYS_MAX: usize = 1024;

/// The drivers of this process.
#[derive(Default)]
pub struct DriverTable {
    by_agent: HashMap<AgentId, RunningDriver>,
    /// How many inputs of an agent are being appended: while there is one, the mark stays.
    inputs: HashMap<AgentId, usize>,
    stopped: bool,
}

struct RunningDriver {
    task: JoinHandle<()>,
    /// Whether an input came since the driver looked last.
    woken: bool,
}

/// The turns of drivers: of the server, and of each key.
pub struct DriverTurns {
    all: Arc<Semaphore>,
    of_key_max: usize,
    by_key: Mutex<HashMap<Option<String>, Arc<Semaphore>>>,
}

impl DriverTurns {
    pub fn new(bounds: &ServerBounds) -> Self {
        Self {
            all: Arc::new(Semaphore::new(bounds.agents_driven_max)),
            of_key_max: bounds.agents_driven_of_key_max,
            by_key: Mutex::default(),
        }
    }

    /// Waits for a turn of a key, and then for one of the server; none if the server stops.
    async fn take(&self, key: Option<String>) -> Option<[OwnedSemaphorePermit; 2]> {
        let of_key = {
            let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
            if by_key.len() >= KEYS_MAX {
                by_key.retain(|_, turns| Arc::strong_count(turns) > 1);
            }
            let turns = by_key.entry(key).or_insert_with(|| Arc::new(Semaphore::new(self.of_key_max)));
            Arc::clone(turns)
        };
        let of_key = of_key.acquire_owned().await.ok()?;
        let of_server = Arc::clone(&self.all).acquire_owned().await.ok()?;
        Some([of_key, of_server])
    }
}

impl AgentService {
    fn drivers(&self) -> MutexGuard<'_, DriverTable> {
        self.0.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, id: &AgentId) -> PathBuf {
        self.agents().directory(id).join(MARK)
    }

    /// Gives an agent an input, and wakes its driver.
    pub fn give(
        &self,
        id: &AgentId,
        input: impl FnOnce(&Agents) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let _pending = PendingInput::begin(self, id);
        self.write_mark(id)?;
        input(self.agents())?;
        self.wake(id)
    }

    /// Marks an agent, which need not exist yet: if it works when the next server starts, that one drives it.
    pub fn write_mark(&self, id: &AgentId) -> Result<(), Failure> {
        let written =
            fs::create_dir_all(self.agents().directory(id)).and_then(|()| fs::write(self.mark(id), ""));
        written.map_err(|error| Failure::new(Kind::Host, "cannot mark the agent").because(error))
    }

    /// Lets a driver look at an agent: the one that runs, or a new one.
    pub fn wake(&self, id: &AgentId) -> Result<(), Failure> {
        let mut drivers = self.drivers();
        if let Some(driver) = drivers.by_agent.get_mut(id) {
            driver.woken = true;
            return Ok(());
        }
        if drivers.stopped {
            return Err(Failure::new(Kind::Host, "the server is stopping").hint("try again in a moment"));
        }
        let cannot = |error: io::Error| Failure::new(Kind::Host, "cannot drive the agent").because(error);
        let updates = self.0.live.channel(id);
        let live = LiveSocket::listen_through(&self.agents().directory(id), updates).map_err(cannot)?;
        self.write_mark(id)?;
        // The task waits for the lock of the drivers, so it finds its entry.
        let task = tokio::spawn(drive(self.clone(), id.clone(), live));
        drivers.by_agent.insert(id.clone(), RunningDriver { task, woken: false });
        Ok(())
    }

    /// Whether a task of this server drives an agent.
    pub fn is_driven_here(&self, id: &AgentId) -> bool {
        self.drivers().by_agent.contains_key(id)
    }

    /// Whether a task or another process drives an agent.
    pub fn is_driven(&self, id: &AgentId) -> bool {
        self.is_driven_here(id) || self.agents().is_driven(id)
    }

    /// The number of agents that this server drives.
    pub fn driven(&self) -> usize {
        self.drivers().by_agent.len()
    }

    /// Ends the driver of an agent in the middle of its turn, and waits for its end.
    pub async fn end_driver(&self, id: &AgentId) {
        let driver = self.drivers().by_agent.remove(id);
        if let Some(driver) = driver {
            driver.task.abort();
            let _ = driver.task.await;
        }
    }

    /// Ends all drivers and starts no more. The marks stay: the next server drives the agents on.
    pub async fn stop(&self) {
        let drivers = {
            let mut drivers = self.drivers();
            drivers.stopped = true;
            std::mem::take(&mut drivers.by_agent)
        };
        for driver in drivers.values() {
            driver.task.abort();
        }
        for driver in drivers.into_values() {
            let _ = driver.task.await;
        }
    }

    /// Drives the agents on that a server before this one drove when it ended.
    pub async fn resume_interrupted(&self) {
        for id in self.marked() {
            let status = self.agents().load(&id).await.map(|loaded| loaded.view.status());
            let woken = match status {
                Ok(AgentStatus::Working) => self.wake(&id),
                Ok(_) => self.unmark(&id),
                Err(failure) if failure.kind == Kind::NotFound => self.unmark(&id),
                Err(failure) => Err(failure),
            };
            if let Err(failure) = woken {
                tracing::warn!(causes = ?failure.causes(), "cannot resume agent {id}: {failure}");
            }
        }
    }

    fn marked(&self) -> Vec<AgentId> {
        let entries = fs::read_dir(self.agents().fleet().data().join("agents")).into_iter().flatten();
        let named = entries.flatten().filter(|entry| entry.path().join(MARK).exists());
        let mut ids: Vec<AgentId> =
            named.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        ids.sort();
        ids
    }

    fn unmark(&self, id: &AgentId) -> Result<(), Failure> {
        match fs::remove_file(self.mark(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::new(Kind::Host, "cannot remove the mark of an agent").because(error))
            }
            _ => Ok(()),
        }
    }

    /// Whether an input came since the driver looked last. If none did, the driver ends: it has no entry from here on.
    fn goes_on(&self, id: &AgentId, end: &DriverEnd) -> bool {
        let mut drivers = self.drivers();
        let woken = drivers.by_agent.get_mut(id).is_some_and(|driver| std::mem::take(&mut driver.woken));
        if woken {
            return true;
        }
        // The next input may come as soon as the entry is gone, and writes the mark again.
        if *end == DriverEnd::AtRest
            && !drivers.inputs.contains_key(id)
            && let Err(failure) = self.unmark(id)
        {
            tracing::warn!(causes = ?failure.causes(), "{failure}");
        }
        drivers.by_agent.remove(id);
        false
    }
}

/// An input that is being appended to the chain of an agent.
struct PendingInput<'a> {
    service: &'a AgentService,
    id: &'a AgentId,
}

impl<'a> PendingInput<'a> {
    fn begin(service: &'a AgentService, id: &'a AgentId) -> Self {
        *service.drivers().inputs.entry(id.clone()).or_default() += 1;
        Self { service, id }
    }
}

impl Drop for PendingInput<'_> {
    fn drop(&mut self) {
        let mut drivers = self.service.drivers();
        if let Some(count) = drivers.inputs.get_mut(self.id) {
            *count -= 1;
            if *count == 0 {
                drivers.inputs.remove(self.id);
            }
        }
    }
}

/// How a driver ended.
#[derive(Debug, PartialEq, Eq)]
enum DriverEnd {
    /// The agent waits or has finished, or another process drives it.
    AtRest,
    /// The log could not be read or written. The mark stays, for the next server.
    Broken,
}

/// Removes the entry of a driver that panicked, so that the next input starts another.
struct EntryGuard<'a> {
    service: &'a AgentService,
    id: &'a AgentId,
}

impl Drop for EntryGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.service.drivers().by_agent.remove(self.id);
        }
    }
}

/// Drives an agent until it waits or has finished, and no input came meanwhile.
async fn drive(service: AgentService, id: AgentId, live: Arc<LiveSocket>) {
    let _entry = EntryGuard { service: &service, id: &id };
    let owner = service.agents().get(&id).ok().and_then(|record| RequestOrigin::of(&record));
    let Some(_turns) = service.0.turns.take(owner.map(|origin| origin.owner)).await else { return };
    loop {
        let end = match service.host().drive(&id, Arc::clone(&live) as _).await {
            Ok(_) => DriverEnd::AtRest,
            Err(failure) => {
                tracing::warn!(causes = ?failure.causes(), "the driver of agent {id} failed: {failure}");
                DriverEnd::Broken
            }
        };
        if !service.goes_on(&id, &end) {
            return;
        }
    }
}
