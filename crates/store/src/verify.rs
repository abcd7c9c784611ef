//! Whether the log is what was written.
//!
//! What shows: a changed, removed, moved, doubled or added event, a cut at the end, a broken page, a changed schema, an
//! index that hides events. What cannot show from inside: a log that was written anew from some event on, head and
//! all; compare [`Verdict::Whole`]'s `head` with one that was kept elsewhere.
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
pub enum Verdict {
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
        why: Breach,
    },
}

/// How a log is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Breach {
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

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Breach::Missing => f.write_str("the event is missing"),
            Breach::Misplaced { found } => write!(f, "event {found} stands in its place"),
            Breach::Changed => f.write_str("the event was changed"),
            Breach::Unchained => f.write_str("the event does not follow the one before it"),
            Breach::Unreadable(why) => write!(f, "the event cannot be read: {why}"),
            Breach::Head => f.write_str("the head of the log does not name its last event"),
            Breach::Schema => f.write_str("the tables of the log were changed"),
            Breach::Database(why) => write!(f, "the database is damaged: {why}"),
        }
    }
}

pub(crate) fn verify(path: &Path) -> Result<Verdict, ReadError> {
    let mut walk = Walk { seq: 0, head: GENESIS.to_owned() };
    let connection = open::read_only(path)?;
    match walk.all(&connection) {
        Ok(()) => Ok(Verdict::Whole { events: walk.seq, head: walk.head }),
        Err(Stop::Breach(seq, why)) => Ok(Verdict::Broken { seq, why }),
        Err(Stop::Database(error)) => match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase | ErrorCode::TooBig) => {
                Ok(Verdict::Broken { seq: walk.seq + 1, why: Breach::Database(error.to_string()) })
            }
            _ => Err(error.into()),
        },
    }
}

enum Stop {
    Breach(u64, Breach),
    Database(rusqlite::Error),
}

impl From<rusqlite::Error> for Stop {
    fn from(error: rusqlite::Error) -> Self {
        Stop::Database(error)
    }
}

/// How far the log is known to be whole.
struct Walk {
    seq: u64,
    head: String,
}

impl Walk {
    fn all(&mut self, connection: &Connection) -> Result<(), Stop> {
        // One transaction: all of this is about one moment of the log.
        let moment = Transaction::new_unchecked(connection, TransactionBehavior::Deferred)?;
        schema(&moment)?;
        self.rows(&moment)?;
        self.end(&moment)?;
        pages(&moment, self.seq)
    }

    fn rows(&mut self, connection: &Connection) -> Result<(), Stop> {
        let mut statement =
            connection.prepare(concat!("SELECT ", columns!(), " FROM events ORDER BY seq"))?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            self.row(row)?;
        }
        Ok(())
    }

    fn row(&mut self, row: &Row<'_>) -> Result<(), Stop> {
        let wanted = self.seq + 1;
        let breach = |why| Err(Stop::Breach(wanted, why));
        let found = match row::seq(row)
            .and_then(|seq| if seq == wanted { row::read(row).map(Ok) } else { Ok(Err(seq)) })
        {
            Ok(Ok(found)) => found,
            Ok(Err(later)) if later > wanted => return breach(Breach::Missing),
            Ok(Err(found)) => return breach(Breach::Misplaced { found }),
            Err(RowError::Database(error)) if error.sqlite_error_code().is_some() => return Err(error.into()),
            Err(error) => return breach(Breach::Unreadable(error.to_string())),
        };
        let event = found.event;
        // The hash is over the value; the text may hold more than that, such as a key twice.
        let canonical = event.data.to_string();
        if event.digest() != event.hash || canonical != found.data {
            return breach(Breach::Changed);
        }
        if event.prev != self.head {
            return breach(Breach::Unchained);
        }
        (self.seq, self.head) = (wanted, event.hash);
        Ok(())
    }

    fn end(&self, connection: &Connection) -> Result<(), Stop> {
        match log::head(connection) {
            Ok(Some((seq, _))) if seq > self.seq => Err(Stop::Breach(self.seq + 1, Breach::Missing)),
            Ok(Some((seq, hash))) if seq == self.seq && hash == self.head => Ok(()),
            Err(error) if error.sqlite_error_code().is_some() => Err(error.into()),
            _ => Err(Stop::Breach(self.seq, Breach::Head)),
        }
    }
}

/// A table without its primary key or an index that leaves rows out would make the other checks mean less.
fn schema(connection: &Connection) -> Result<(), Stop> {
    let mut statement = connection.prepare("SELECT type, name, sql FROM sqlite_schema ORDER BY rowid")?;
    let mut rows = statement.query([])?;
    let mut wanted = SCHEMA.into_iter();
    loop {
        match (rows.next()?, wanted.next()) {
            (None, None) => return Ok(()),
            (Some(row), Some((kind, name, sql))) => {
                let same =
                    |at: usize, text: &str| row.get_ref(at).is_ok_and(|found| found.as_str() == Ok(text));
                if !(same(0, kind) && same(1, name) && same(2, sql)) {
                    return Err(Stop::Breach(1, Breach::Schema));
                }
            }
            _ => return Err(Stop::Breach(1, Breach::Schema)),
        }
    }
}

/// Pages that the walk did not meet: the index above all.
fn pages(connection: &Connection, last: u64) -> Result<(), Stop> {
    let report: String = connection.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if report == "ok" { Ok(()) } else { Err(Stop::Breach(last + 1, Breach::Database(report))) }
}
