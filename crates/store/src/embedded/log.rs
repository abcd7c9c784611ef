//! The log on SQLite: heads, appends and seals.
//!
//! Invariant: an append is one transaction that compares the head of its chain, adds the events and moves the head,
//! under SQLite's write lock from its first statement; so no two writers ever chain to the same event, and the
//! positions rise in the order in which events become visible.
//! Invariant: a seal is in the transaction of the append that found the last one too old.
//! Direction of failure: an event that cannot be stored whole is not stored at all, and the caller gets an error.

use std::time::{Duration, Instant};

use proto::{
    BodyId, ChainHead, ChainId, Draft, Event, NodeId,
    event_data::{LogSealed, SealedHead},
};
use rusqlite::{Connection, Error, OptionalExtension, Transaction, TransactionBehavior, params};

use super::{
    Store,
    error::{append_error, read_error},
    read, row, schema, verify,
};
use crate::{
    clock,
    event_log::{self, Append, AppendError, EventLog, LogVerdict, ReadError, SEAL_EVERY},
    query::EventQuery,
};

/// How often a follower queries for new events: another process may append them, and SQLite has no blocking
/// wait.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Heads that one seal names: about 150 bytes each, far below the longest append.
const SEALED_MAX: usize = 2000;

impl EventLog for Store {
    fn node(&self) -> Result<NodeId, ReadError> {
        match self.node.get() {
            Some(node) => Ok(node.clone()),
            None => {
                let node = state(&self.lock()).map_err(read_error)?.node;
                Ok(self.node.get_or_init(|| node).clone())
            }
        }
    }

    fn head(&self, chain: &ChainId) -> Result<ChainHead, ReadError> {
        let connection = self.lock();
        // One transaction: another process may append the first event between the two queries for a new
        // chain.
        let moment = connection.unchecked_transaction().map_err(read_error)?;
        head(&moment, chain).map_err(read_error)
    }

    fn append(&self, append: &Append) -> Result<Vec<Event>, AppendError> {
        self.write(|transaction| {
            let head = head(transaction, append.chain()).map_err(append_error)?;
            if head == *append.expected() {
                return store_events(transaction, append.events().to_vec()).map_err(append_error);
            }
            find_stored(transaction, append)
                .map_err(append_error)?
                .ok_or_else(|| AppendError::Conflict { chain: append.chain().clone(), head })
        })
    }

    /// Reads the head in the transaction that appends, so no other writer can come in between.
    fn append_at_end(&self, chain: &ChainId, drafts: Vec<Draft>) -> Result<Vec<Event>, AppendError> {
        let drafts = event_log::check(chain, drafts)?;
        self.write(|transaction| {
            let head = head(transaction, chain).map_err(append_error)?;
            store_events(transaction, place(chain, head, drafts)).map_err(append_error)
        })
    }

    fn read(&self, query: &EventQuery) -> Result<Vec<Event>, ReadError> {
        read::events(&self.lock(), query)
    }

    fn follow(&self, query: &EventQuery, wait: Duration) -> Result<Vec<Event>, ReadError> {
        let begun = Instant::now();
        loop {
            let events = self.read(query)?;
            let left = wait.saturating_sub(begun.elapsed());
            if !events.is_empty() || left.is_zero() {
                return Ok(events);
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
    }

    fn chains_not_ending_in(&self, kinds: &[&str]) -> Result<Vec<ChainId>, ReadError> {
        read::chains_not_ending_in(&self.lock(), kinds)
    }

    fn last_pos(&self) -> Result<u64, ReadError> {
        Ok(state(&self.lock()).map_err(read_error)?.pos)
    }

    fn seal(&self, age_min: Duration) -> Result<bool, AppendError> {
        let unsealed = |state: LogState| state.pos > state.sealed_pos && state.is_seal_due(age_min);
        // Most often there is nothing to seal, and then no other process has to wait for the lock.
        if !unsealed(state(&self.lock()).map_err(append_error)?) {
            return Ok(false);
        }
        self.write(|transaction| {
            let state = state(transaction).map_err(append_error)?;
            if !unsealed(state.clone()) {
                return Ok(false);
            }
            seal(transaction, state).map_err(append_error)
        })
    }

    fn verify(&self) -> Result<LogVerdict, ReadError> {
        verify::verify(&self.path)
    }
}

impl Store {
    /// Runs one write transaction. A failure rolls it back.
    fn write<T>(
        &self,
        act: impl FnOnce(&Transaction<'_>) -> Result<T, AppendError>,
    ) -> Result<T, AppendError> {
        if self.is_read_only() {
            return Err(AppendError::ReadOnly);
        }
        let connection = self.lock();
        let transaction =
            Transaction::new_unchecked(&connection, TransactionBehavior::Immediate).map_err(append_error)?;
        let done = act(&transaction)?;
        transaction.commit().map_err(append_error)?;
        Ok(done)
    }
}

/// The one row of table `log`.
#[derive(Debug, Clone)]
pub(super) struct LogState {
    pub node: NodeId,
    /// Position of the last event.
    pub pos: u64,
    /// The position up to which all events are sealed. The event there is in the node's chain; 0 before the first
    /// seal.
    pub sealed_pos: u64,
    /// When the last seal was written, or the log created.
    sealed_at_ms: i64,
}

impl LogState {
    /// Whether the last seal is at least that old, or lies in the future because the clock was set back.
    fn is_seal_due(&self, age_min: Duration) -> bool {
        u128::from(schema::clock_ms().abs_diff(self.sealed_at_ms)) >= age_min.as_millis()
    }
}

pub(super) fn state(connection: &Connection) -> Result<LogState, Error> {
    let mut statement =
        connection.prepare_cached("SELECT node, pos, sealed_pos, sealed_at_ms FROM log WHERE one = 1")?;
    statement.query_row([], |row| {
        let node: String = row.get(0)?;
        let node = NodeId::try_from(node)
            .map_err(|error| Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, error.into()))?;
        Ok(LogState { node, pos: count(row, 1)?, sealed_pos: count(row, 2)?, sealed_at_ms: row.get(3)? })
    })
}

fn count(row: &rusqlite::Row<'_>, column: usize) -> Result<u64, Error> {
    let found: i64 = row.get(column)?;
    u64::try_from(found).map_err(|_| Error::IntegralValueOutOfRange(column, found))
}

/// The head that is stored for a chain; none for a chain without events.
pub(super) fn stored_head(connection: &Connection, chain: &str) -> Result<Option<ChainHead>, Error> {
    connection
        .prepare_cached("SELECT seq, hash FROM chains WHERE chain = ?1")?
        .query_row([chain], |row| Ok(ChainHead { seq: count(row, 0)?, hash: row.get(1)? }))
        .optional()
}

/// The head that the next event of a chain continues. If a Body or node has events in the chain of an earlier
/// version, it continues from that chain's end, so that a `seq` means one event of that Body.
fn head(connection: &Connection, chain: &ChainId) -> Result<ChainHead, Error> {
    if let Some(head) = stored_head(connection, &chain.to_string())? {
        return Ok(head);
    }
    let Some(before) = stored_head(connection, &ChainId::OneChain.to_string())? else {
        return Ok(ChainHead::genesis());
    };
    let goes_on = match chain {
        ChainId::Body(body) => has_earlier_events(connection, body)?,
        ChainId::Node(node) => state(connection)?.node == *node,
        ChainId::Agent(_) | ChainId::OneChain => false,
    };
    Ok(if goes_on { before } else { ChainHead::genesis() })
}

fn has_earlier_events(connection: &Connection, body: &BodyId) -> Result<bool, Error> {
    connection
        .prepare_cached("SELECT 1 FROM events WHERE body = ?1 AND chain = ?2 LIMIT 1")?
        .exists(params![body.as_str(), ChainId::OneChain.to_string()])
}

/// Converts drafts to the next events of a chain.
fn place(chain: &ChainId, mut head: ChainHead, drafts: Vec<Draft>) -> Vec<Event> {
    let place = |draft| {
        let event = Event::place(draft, chain.clone(), &head, clock::now());
        head = event.head();
        event
    };
    drafts.into_iter().map(place).collect()
}

/// Stores the events of one chain after its head, and a seal if the last one is too old; returns the events
/// with their positions.
fn store_events(transaction: &Transaction<'_>, events: Vec<Event>) -> Result<Vec<Event>, Error> {
    if events.is_empty() {
        return Ok(events);
    }
    let state = state(transaction)?;
    let (events, state) = insert_events(transaction, state, events)?;
    if state.is_seal_due(SEAL_EVERY) {
        seal(transaction, state)?;
    } else {
        transaction.prepare_cached("UPDATE log SET pos = ?1")?.execute([row::column(state.pos)])?;
    }
    Ok(events)
}

/// Adds events of one chain and moves its head. The caller stores the new state.
fn insert_events(
    transaction: &Transaction<'_>,
    mut state: LogState,
    mut events: Vec<Event>,
) -> Result<(Vec<Event>, LogState), Error> {
    for event in &mut events {
        state.pos += 1;
        event.pos = state.pos;
        row::insert(transaction, event)?;
    }
    if let Some(last) = events.last() {
        let mut statement = transaction.prepare_cached(
            "INSERT INTO chains VALUES (?1, ?2, ?3) ON CONFLICT DO UPDATE SET seq = ?2, hash = ?3",
        )?;
        statement.execute(params![last.chain.to_string(), row::column(last.seq), last.hash])?;
    }
    Ok((events, state))
}

/// The events of an append that is in the log already.
fn find_stored(transaction: &Transaction<'_>, append: &Append) -> Result<Option<Vec<Event>>, Error> {
    let mut statement =
        transaction.prepare_cached("SELECT pos FROM events WHERE chain = ?1 AND seq = ?2 AND hash = ?3")?;
    let mut found = Vec::with_capacity(append.events().len());
    for event in append.events() {
        let place = params![event.chain.to_string(), row::column(event.seq), event.hash];
        let Some(pos) = statement.query_row(place, |row| count(row, 0)).optional()? else { return Ok(None) };
        found.push(Event { pos, ..event.clone() });
    }
    Ok(Some(found))
}

/// Seals the chains with events after the last seal. The node's own chain needs no seal: the seal itself is
/// in it. Returns whether there was such a chain.
fn seal(transaction: &Transaction<'_>, mut state: LogState) -> Result<bool, Error> {
    let chain = ChainId::Node(state.node.clone());
    let heads = unsealed_heads(transaction, &state, &chain)?;
    let head = head(transaction, &chain)?;
    let drafts = heads.chunks(SEALED_MAX).map(|heads| Draft::new(LogSealed { heads: heads.to_vec() }));
    (_, state) = insert_events(transaction, state, place(&chain, head, drafts.collect()))?;
    transaction
        .prepare_cached("UPDATE log SET pos = ?1, sealed_pos = ?1, sealed_at_ms = ?2")?
        .execute(params![row::column(state.pos), schema::clock_ms()])?;
    Ok(!heads.is_empty())
}

fn unsealed_heads(
    transaction: &Transaction<'_>,
    state: &LogState,
    node: &ChainId,
) -> Result<Vec<SealedHead>, Error> {
    let mut statement = transaction.prepare_cached(
        "SELECT chain, seq, hash FROM chains WHERE chain <> ?2 \
         AND chain IN (SELECT chain FROM events WHERE pos > ?1) ORDER BY chain",
    )?;
    let rows = statement.query_map(params![row::column(state.sealed_pos), node.to_string()], |row| {
        Ok((row.get::<_, String>(0)?, count(row, 1)?, row.get(2)?))
    })?;
    let mut heads = Vec::new();
    for found in rows {
        let (chain, seq, hash) = found?;
        // A name that is not a chain was written by another program; `verify` reports it.
        if let Ok(chain) = chain.parse() {
            heads.push(SealedHead { chain, seq, hash });
        }
    }
    Ok(heads)
}
