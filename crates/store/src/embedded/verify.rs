//! Verifies that the log is as it was written.
//!
//! It detects a changed, removed, moved, duplicated or added event, a chain that is missing or lost its end,
//! a damaged page, a changed schema and an index that hides events. It cannot detect that a log was rewritten
//! from some event on, with every later seal and head; compare [`LogVerdict::Whole`]'s `head` with a copy
//! that was stored elsewhere.
//!
//! Invariant: memory does not grow with the log: rows are read one by one, chain by chain, and each seal is
//! checked when the walk reaches it.

use std::path::Path;

use proto::{ChainHead, ChainId, Event, event::GENESIS, event_data::LogSealed};
use rusqlite::{Connection, ErrorCode, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use super::{
    error::read_error,
    log, open,
    row::{self, IndexColumns, RowError, columns},
    schema::SCHEMA,
};
use crate::event_log::{ChainBreach, LogVerdict, ReadError};

pub(crate) fn verify(path: &Path) -> Result<LogVerdict, ReadError> {
    let connection = open::read_only(path).map_err(|error| ReadError::Backend(error.into()))?;
    let mut walk = ChainWalk::default();
    match walk.all(&connection) {
        Ok(head) => Ok(LogVerdict::Whole { events: walk.events, chains: walk.chains, head }),
        Err(VerifyStop::Breach { chain, seq, why }) => Ok(LogVerdict::Broken { chain, seq, why }),
        Err(VerifyStop::Database(error)) => match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::TooBig) => {
                let why = ChainBreach::Database(error.to_string());
                Ok(LogVerdict::Broken { chain: None, seq: None, why })
            }
            _ => Err(read_error(error)),
        },
    }
}

enum VerifyStop {
    Breach { chain: Option<String>, seq: Option<u64>, why: ChainBreach },
    Database(rusqlite::Error),
}

impl VerifyStop {
    /// A breach at one event of a chain.
    fn at(chain: &str, seq: u64, why: ChainBreach) -> Self {
        VerifyStop::Breach { chain: Some(chain.to_owned()), seq: Some(seq), why }
    }

    /// A breach that belongs to no chain.
    fn anywhere(why: ChainBreach) -> Self {
        VerifyStop::Breach { chain: None, seq: None, why }
    }
}

impl From<rusqlite::Error> for VerifyStop {
    fn from(error: rusqlite::Error) -> Self {
        VerifyStop::Database(error)
    }
}

/// The progress of the verification.
#[derive(Default)]
struct ChainWalk {
    events: u64,
    chains: u64,
    /// The end of the chain of an earlier version, from which chains of older Bodies continue.
    one_chain: Option<ChainHead>,
    /// The chain that is being walked; none before the first.
    current: Option<WalkedChain>,
}

/// A chain, up to the event that was checked last.
struct WalkedChain {
    name: String,
    head: ChainHead,
    pos: u64,
}

impl ChainWalk {
    /// Verifies everything; returns the hash of the last event of the node's chain.
    fn all(&mut self, connection: &Connection) -> Result<String, VerifyStop> {
        // One transaction, so that all checks see the log at one moment.
        let moment = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
        check_schema(&moment)?;
        self.one_chain = log::stored_head(&moment, &ChainId::OneChain.to_string())?;
        self.rows(&moment)?;
        check_empty_chains(&moment)?;
        let node = self.check_state(&moment)?;
        check_pages(&moment)?;
        let head = log::stored_head(&moment, &node.to_string())?;
        Ok(head.map_or_else(|| GENESIS.to_owned(), |head| head.hash))
    }

    fn rows(&mut self, connection: &Connection) -> Result<(), VerifyStop> {
        let mut statement =
            connection.prepare(concat!("SELECT ", columns!(), " FROM events ORDER BY chain, seq"))?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            self.row(connection, row)?;
        }
        self.end_chain(connection)
    }

    fn row(&mut self, connection: &Connection, row: &Row<'_>) -> Result<(), VerifyStop> {
        // Reads the chain first: it locates a row that cannot be read.
        let name: String = row.get(1).or_else(|error: rusqlite::Error| match error.sqlite_error_code() {
            Some(_) => Err(error),
            None => Ok(String::new()),
        })?;
        if self.current.as_ref().is_none_or(|current| current.name != name) {
            self.end_chain(connection)?;
            self.begin_chain(name, row);
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        let event = current.step(row)?;
        self.events += 1;
        match event.data_as::<LogSealed>() {
            Some(seal) if matches!(event.chain, ChainId::Node(_)) => check_seal(connection, &event, &seal),
            _ => Ok(()),
        }
    }

    /// Begins a chain, which starts at 1, or where the chain of an earlier version ended.
    fn begin_chain(&mut self, name: String, row: &Row<'_>) {
        let first = row::place(row).map_or(0, |(_, seq)| seq);
        let goes_on = self.one_chain.as_ref().filter(|head| head.seq + 1 == first);
        let head = goes_on.cloned().unwrap_or_else(ChainHead::genesis);
        self.chains += 1;
        self.current = Some(WalkedChain { name, head, pos: 0 });
    }

    fn end_chain(&mut self, connection: &Connection) -> Result<(), VerifyStop> {
        let Some(WalkedChain { name, head, .. }) = self.current.take() else { return Ok(()) };
        match log::stored_head(connection, &name) {
            Ok(Some(stored)) if stored.seq > head.seq => {
                Err(VerifyStop::at(&name, head.seq + 1, ChainBreach::Missing))
            }
            Ok(Some(stored)) if stored == head => Ok(()),
            Err(error) if error.sqlite_error_code().is_some() => Err(error.into()),
            _ => Err(VerifyStop::at(&name, head.seq, ChainBreach::Head)),
        }
    }

    /// Compares the log with its stored state, and returns the node's chain. The number of events reveals a chain that is
    /// missing together with its head and was never sealed; the position of the last seal reveals that the node's own
    /// chain is missing.
    fn check_state(&self, connection: &Connection) -> Result<ChainId, VerifyStop> {
        let state = match log::state(connection) {
            Ok(state) => state,
            Err(error) if error.sqlite_error_code().is_some() => return Err(error.into()),
            Err(_) => return Err(VerifyStop::anywhere(ChainBreach::Schema)),
        };
        let node = ChainId::Node(state.node);
        let place = params![row::column(state.sealed_pos), node.to_string()];
        let sealed = state.sealed_pos == 0
            || connection.prepare("SELECT 1 FROM events WHERE pos = ?1 AND chain = ?2")?.exists(place)?;
        if !sealed {
            let (chain, why) = (Some(node.to_string()), ChainBreach::Seal);
            return Err(VerifyStop::Breach { chain, seq: None, why });
        }
        if state.pos != self.events {
            let why = ChainBreach::Count { found: self.events, stored: state.pos };
            return Err(VerifyStop::anywhere(why));
        }
        Ok(node)
    }
}

impl WalkedChain {
    fn step(&mut self, row: &Row<'_>) -> Result<Event, VerifyStop> {
        let wanted = self.head.seq + 1;
        let breach = |why| Err(VerifyStop::at(&self.name, wanted, why));
        let found = match row::place(row)
            .and_then(|(_, seq)| if seq == wanted { row::read(row).map(Ok) } else { Ok(Err(seq)) })
        {
            Ok(Ok(found)) => found,
            Ok(Err(later)) if later > wanted => return breach(ChainBreach::Missing),
            Ok(Err(found)) => return breach(ChainBreach::Misplaced { found }),
            Err(RowError::Database(error)) if error.sqlite_error_code().is_some() => return Err(error.into()),
            Err(error) => return breach(ChainBreach::Unreadable(error.to_string())),
        };
        let event = found.event;
        // The hash covers the value; the text may hold more, such as a duplicate key.
        let canonical = event.data.to_string();
        if event.digest() != event.hash || canonical != found.data {
            return breach(ChainBreach::Changed);
        }
        if event.prev != self.head.hash {
            return breach(ChainBreach::Unchained);
        }
        if found.index != IndexColumns::of(&event) {
            return breach(ChainBreach::Index);
        }
        if event.pos <= self.pos {
            return breach(ChainBreach::Position);
        }
        (self.head, self.pos) = (event.head(), event.pos);
        Ok(event)
    }
}

/// Compares the chains with one seal.
fn check_seal(connection: &Connection, event: &Event, seal: &LogSealed) -> Result<(), VerifyStop> {
    let mut exact = connection.prepare_cached("SELECT hash FROM events WHERE chain = ?1 AND seq = ?2")?;
    let mut any = connection.prepare_cached("SELECT 1 FROM events WHERE chain = ?1 LIMIT 1")?;
    for sealed in &seal.heads {
        let name = sealed.chain.to_string();
        let found: Option<String> =
            exact.query_row(params![name, row::column(sealed.seq)], |row| row.get(0)).optional()?;
        let why = match found {
            Some(hash) if hash == sealed.hash => continue,
            Some(_) => ChainBreach::Resealed { seal: event.seq },
            None if any.exists([&name])? => ChainBreach::Cut { seal: event.seq, sealed: sealed.seq },
            None => ChainBreach::Vanished { seal: event.seq, sealed: sealed.seq },
        };
        return Err(VerifyStop::at(&name, sealed.seq, why));
    }
    Ok(())
}

/// Finds heads of chains whose events are all missing.
fn check_empty_chains(connection: &Connection) -> Result<(), VerifyStop> {
    let sql =
        "SELECT chain FROM chains WHERE NOT EXISTS (SELECT 1 FROM events WHERE events.chain = chains.chain)";
    let empty: Option<String> = connection.query_row(sql, [], |row| row.get(0)).optional()?;
    match empty {
        Some(name) => Err(VerifyStop::at(&name, 1, ChainBreach::Missing)),
        None => Ok(()),
    }
}

/// Compares the schema: a table without its primary key, or an index that omits rows, would weaken the other
/// checks.
fn check_schema(connection: &Connection) -> Result<(), VerifyStop> {
    // The table of the records and its indexes are not part of the log.
    let mut statement =
        connection.prepare("SELECT type, name, sql FROM sqlite_schema WHERE tbl_name <> 'records'")?;
    let mut rows = statement.query([])?;
    let mut found = 0;
    while let Some(row) = rows.next()? {
        let is = |at: usize, text: &str| row.get_ref(at).is_ok_and(|found| found.as_str() == Ok(text));
        if !SCHEMA.iter().any(|(kind, name, sql)| is(0, kind) && is(1, name) && is(2, sql)) {
            return Err(VerifyStop::anywhere(ChainBreach::Schema));
        }
        found += 1;
    }
    if found == SCHEMA.len() { Ok(()) } else { Err(VerifyStop::anywhere(ChainBreach::Schema)) }
}

/// Checks the pages that the walk did not read, above all those of the indexes.
fn check_pages(connection: &Connection) -> Result<(), VerifyStop> {
    let report: String = connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if report == "ok" { Ok(()) } else { Err(VerifyStop::anywhere(ChainBreach::Database(report))) }
}
