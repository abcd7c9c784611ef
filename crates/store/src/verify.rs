//! Whether the log is what was written.
//!
//! What shows: a changed, removed, moved, doubled or added event, a cut at the end, a broken page, a changed schema, an
//! index that hides events. What cannot show from inside: a log that was written anew from some event on, head and
//! all; compare [`ChainVerdict::Whole`]'s `head` with one that was kept elsewhere.
//!
//! Invariant: memory does not grow with the log: rows are read one by one in the order of their B-tree.

use std::{fmt, path::Path};

use proto::event::GENESIS;
use rusqlite::{Connection, ErrorCode, Row, Transaction, TransactionBehavior};

use crate::{
    log::{self, ReadError},
    open::{self, SCHEMA},
    row::{self, RowError, columns},
};

/// What a look at the whole log found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChainVerdict {
    /// All of it is as it was written.
    Whole {
        /// How many events there are.
        events: u64,
        /// Hash of the last one.
        head: String,
    },
    /// It is not.
    Broken {
        /// The first place that is wrong; all before it is whole.
        seq: u64,
        /// What is wrong there.
        why: ChainBreach,
    },
}

/// How a log is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChainBreach {
    /// The event is not there.
    Missing,
    /// Another event stands there.
    Misplaced {
        /// What its place says.
        found: u64,
    },
    /// The event is not the one that was hashed.
    Changed,
    /// The event does not follow the one before it.
    Unchained,
    /// What stands there is not an event.
    Unreadable(String),
    /// The head does not name the last event.
    Head,
    /// The tables are not the ones we made.
    Schema,
    /// The database itself is damaged.
    Database(String),
}

impl fmt::Display for ChainBreach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChainBreach::Missing => f.write_str("the event is missing"),
            ChainBreach::Misplaced { found } => write!(f, "event {found} stands in its place"),
            ChainBreach::Changed => f.write_str("the event was changed"),
            ChainBreach::Unchained => f.write_str("the event does not follow the one before it"),
            ChainBreach::Unreadable(why) => write!(f, "the event cannot be read: {why}"),
            ChainBreach::Head => f.write_str("the head of the log does not name its last event"),
            ChainBreach::Schema => f.write_str("the tables of the log were changed"),
            ChainBreach::Database(why) => write!(f, "the database is damaged: {why}"),
        }
    }
}

pub(crate) fn verify(path: &Path) -> Result<ChainVerdict, ReadError> {
    let mut walk = ChainWalk { seq: 0, head: GENESIS.to_owned() };
    let connection = open::read_only(path)?;
    match walk.all(&connection) {
        Ok(()) => Ok(ChainVerdict::Whole { events: walk.seq, head: walk.head }),
        Err(VerifyStop::Breach(seq, why)) => Ok(ChainVerdict::Broken { seq, why }),
        Err(VerifyStop::Database(error)) => match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::TooBig) => {
                Ok(ChainVerdict::Broken { seq: walk.seq + 1, why: ChainBreach::Database(error.to_string()) })
            }
            _ => Err(error.into()),
        },
    }
}

enum VerifyStop {
    Breach(u64, ChainBreach),
    Database(rusqlite::Error),
}

impl From<rusqlite::Error> for VerifyStop {
    fn from(error: rusqlite::Error) -> Self {
        VerifyStop::Database(error)
    }
}

/// How far the log is known to be whole.
struct ChainWalk {
    seq: u64,
    head: String,
}

impl ChainWalk {
    fn all(&mut self, connection: &Connection) -> Result<(), VerifyStop> {
        // One transaction: all of this is about one moment of the log.
        let moment = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
        schema(&moment)?;
        self.rows(&moment)?;
        self.end(&moment)?;
        pages(&moment, self.seq)
    }

    fn rows(&mut self, connection: &Connection) -> Result<(), VerifyStop> {
        let mut statement =
            connection.prepare(concat!("SELECT ", columns!(), " FROM events ORDER BY seq"))?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            self.row(row)?;
        }
        Ok(())
    }

    fn row(&mut self, row: &Row<'_>) -> Result<(), VerifyStop> {
        let wanted = self.seq + 1;
        let breach = |why| Err(VerifyStop::Breach(wanted, why));
        let found = match row::seq(row)
            .and_then(|seq| if seq == wanted { row::read(row).map(Ok) } else { Ok(Err(seq)) })
        {
            Ok(Ok(found)) => found,
            Ok(Err(later)) if later > wanted => return breach(ChainBreach::Missing),
            Ok(Err(found)) => return breach(ChainBreach::Misplaced { found }),
            Err(RowError::Database(error)) if error.sqlite_error_code().is_some() => return Err(error.into()),
            Err(error) => return breach(ChainBreach::Unreadable(error.to_string())),
        };
        let event = found.event;
        // The hash is over the value; the text may hold more than that, such as a key twice.
        let canonical = event.data.to_string();
        if event.digest() != event.hash || canonical != found.data {
            return breach(ChainBreach::Changed);
        }
        if event.prev != self.head {
            return breach(ChainBreach::Unchained);
        }
        (self.seq, self.head) = (wanted, event.hash);
        Ok(())
    }

    fn end(&self, connection: &Connection) -> Result<(), VerifyStop> {
        match log::head(connection) {
            Ok(Some((seq, _))) if seq > self.seq => {
                Err(VerifyStop::Breach(self.seq + 1, ChainBreach::Missing))
            }
            Ok(Some((seq, hash))) if seq == self.seq && hash == self.head => Ok(()),
            Err(error) if error.sqlite_error_code().is_some() => Err(error.into()),
            _ => Err(VerifyStop::Breach(self.seq, ChainBreach::Head)),
        }
    }
}

/// A table without its primary key or an index that leaves rows out would make the other checks mean less.
fn schema(connection: &Connection) -> Result<(), VerifyStop> {
    // The table of the records and its indexes are no part of the log.
    let mut statement = connection
        .prepare("SELECT type, name, sql FROM sqlite_schema WHERE tbl_name <> 'records' ORDER BY rowid")?;
    let mut rows = statement.query([])?;
    let mut wanted = SCHEMA.into_iter();
    loop {
        match (rows.next()?, wanted.next()) {
            (None, None) => return Ok(()),
            (Some(row), Some((kind, name, sql))) => {
                let same =
                    |at: usize, text: &str| row.get_ref(at).is_ok_and(|found| found.as_str() == Ok(text));
                if !(same(0, kind) && same(1, name) && same(2, sql)) {
                    return Err(VerifyStop::Breach(1, ChainBreach::Schema));
                }
            }
            _ => return Err(VerifyStop::Breach(1, ChainBreach::Schema)),
        }
    }
}

/// Pages that the walk did not meet: the index above all.
fn pages(connection: &Connection, last: u64) -> Result<(), VerifyStop> {
    let report: String = connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if report == "ok" { Ok(()) } else { Err(VerifyStop::Breach(last + 1, ChainBreach::Database(report))) }
}
