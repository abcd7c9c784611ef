//! The tables of the database, and the migrations from earlier versions.
//!
//! To add a table or an index: append it to [`SCHEMA`], add a step to [`MIGRATIONS`] that creates it in a database of
//! the version before (a step that only creates is [`create`] with the names), and nothing else: [`SCHEMA_VERSION`]
//! counts the steps, and `verify` compares the database with [`SCHEMA`].
//!
//! Invariant: a migrated database has the tables and indexes of a new one, character for character.
//! Invariant: all steps of a migration are one transaction; a process that is killed in between leaves the
//! version that it found.

use rusqlite::{Connection, Error, params};

use super::row::{self, IndexColumns, columns};

/// The version of the schema that this program writes.
pub const SCHEMA_VERSION: i32 = 1 + MIGRATIONS.len() as i32;

/// One step from a version of the schema to the next.
type Migration = fn(&Connection) -> Result<(), Error>;

/// The first step goes from version 1 to version 2.
const MIGRATIONS: [Migration; 1] = [split_into_chains];

/// The tables and indexes: `(type, name, sql)`.
///
/// `STRICT` prevents other writers from storing a number where a text is hashed. `exec` and `tag` repeat
/// parts of `data`, so that indexes can cover them: the command that an event is about, and the tag of a
/// command that starts. The partial indexes hold only the events that a query by their columns can find.
pub(crate) const SCHEMA: [(&str, &str, &str); 7] = [
    (
        "table",
        "events",
        "CREATE TABLE events (pos INTEGER PRIMARY KEY, chain TEXT NOT NULL, seq INTEGER NOT NULL, at TEXT NOT NULL, \
         type TEXT NOT NULL, body TEXT, brain TEXT, exec INTEGER, tag TEXT, data TEXT NOT NULL, prev TEXT NOT NULL, \
         hash TEXT NOT NULL) STRICT",
    ),
    (
        "table",
        "chains",
        "CREATE TABLE chains (chain TEXT PRIMARY KEY, seq INTEGER NOT NULL, hash TEXT NOT NULL) STRICT, WITHOUT ROWID",
    ),
    (
        "table",
        "log",
        "CREATE TABLE log (one INTEGER PRIMARY KEY CHECK (one = 1), node TEXT NOT NULL, pos INTEGER NOT NULL, \
         sealed_pos INTEGER NOT NULL, sealed_at_ms INTEGER NOT NULL) STRICT",
    ),
    ("index", "events_by_chain", "CREATE UNIQUE INDEX events_by_chain ON events (chain, seq)"),
    ("index", "events_by_body", "CREATE INDEX events_by_body ON events (body) WHERE body IS NOT NULL"),
    ("index", "events_by_exec", "CREATE INDEX events_by_exec ON events (body, exec) WHERE exec IS NOT NULL"),
    ("index", "events_by_tag", "CREATE INDEX events_by_tag ON events (body, tag) WHERE tag IS NOT NULL"),
];

/// Creates all tables and indexes in a new database.
pub(crate) fn create_all(connection: &Connection) -> Result<(), Error> {
    SCHEMA.iter().try_for_each(|(_, _, sql)| connection.execute_batch(sql))?;
    begin_log(connection, 0, clock_ms())
}

/// Migrates a database of version `from` to [`SCHEMA_VERSION`].
pub(crate) fn migrate(connection: &Connection, from: i32) -> Result<(), Error> {
    let done = usize::try_from(from - 1).unwrap_or(0);
    MIGRATIONS.iter().skip(done).try_for_each(|step| step(connection))
}

/// Creates the tables and indexes of these names.
fn create(connection: &Connection, names: &[&str]) -> Result<(), Error> {
    SCHEMA
        .iter()
        .filter(|(_, name, _)| names.contains(name))
        .try_for_each(|(_, _, sql)| connection.execute_batch(sql))
}

/// Migrates version 1, which had one chain for all events and a table `head` with its end. Its events stay
/// unchanged in a chain of their own; later events go to the chains of their Body or node.
fn split_into_chains(connection: &Connection) -> Result<(), Error> {
    connection.execute_batch("ALTER TABLE events RENAME TO events_v1; DROP INDEX events_by_body")?;
    create(connection, &["events", "chains", "log"])?;
    connection.execute_batch(
        "INSERT INTO events \
           SELECT seq, 'log', seq, at, type, body, brain, NULL, NULL, data, prev, hash FROM events_v1; \
         INSERT INTO chains SELECT 'log', seq, hash FROM head WHERE seq > 0; \
         DROP TABLE events_v1",
    )?;
    fill_index_columns(connection)?;
    // A log without a head was damaged before; it opens, and `verify` reports the damage.
    let pos = connection.query_row(
        "SELECT coalesce((SELECT seq FROM head), (SELECT max(pos) FROM events), 0)",
        [],
        |row| row.get(0),
    )?;
    connection.execute_batch("DROP TABLE head")?;
    create(connection, &["events_by_chain", "events_by_body", "events_by_exec", "events_by_tag"])?;
    // The time 0 makes the next append seal the end of the old chain.
    begin_log(connection, pos, 0)
}

/// Fills `exec` and `tag` of all events about commands. A row that is not a valid event gets none; `verify`
/// reports it.
fn fill_index_columns(connection: &Connection) -> Result<(), Error> {
    let mut found = Vec::new();
    let mut select =
        connection.prepare(concat!("SELECT ", columns!(), " FROM events WHERE type LIKE 'exec.%'"))?;
    let mut rows = select.query([])?;
    while let Some(row) = rows.next()? {
        if let Ok(stored) = row::read(row) {
            found.push((row::column(stored.event.pos), IndexColumns::of(&stored.event)));
        }
    }
    let mut update = connection.prepare("UPDATE events SET exec = ?2, tag = ?3 WHERE pos = ?1")?;
    for (pos, IndexColumns { exec, tag }) in found {
        update.execute(params![pos, exec, tag])?;
    }
    Ok(())
}

/// Inserts the one row of table `log`. The node's id is random: 16 hexadecimal digits.
fn begin_log(connection: &Connection, pos: i64, sealed_at_ms: i64) -> Result<(), Error> {
    connection
        .execute("INSERT INTO log VALUES (1, lower(hex(randomblob(8))), ?1, 0, ?2)", [pos, sealed_at_ms])?;
    Ok(())
}

/// Milliseconds since 1970.
pub(crate) fn clock_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
