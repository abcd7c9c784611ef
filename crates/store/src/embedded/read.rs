//! Reads events by a query, through the indexes.
//!
//! Invariant: a query with a Body reads only rows that an index finds for that Body; with a command or a tag
//! too, only rows of commands.

use proto::{ChainId, Event};
use rusqlite::{Connection, types::Value};

use super::{
    error::read_error,
    row::{self, RowError, columns},
};
use crate::{
    event_log::ReadError,
    query::{EventOrder, EventQuery, ExecFilter},
};

/// The events of a query.
pub(crate) fn events(connection: &Connection, query: &EventQuery) -> Result<Vec<Event>, ReadError> {
    let (sql, values) = select(query);
    let mut statement = connection.prepare_cached(&sql).map_err(read_error)?;
    let mut rows = statement.query(rusqlite::params_from_iter(values)).map_err(read_error)?;
    let mut events = Vec::new();
    while let Some(row) = rows.next().map_err(read_error)? {
        events.push(row::read(row).map_err(|error| unreadable(row, error))?.event);
    }
    Ok(events)
}

/// The chains whose last event is of none of these types.
pub(crate) fn chains_not_ending_in(
    connection: &Connection,
    kinds: &[&str],
) -> Result<Vec<ChainId>, ReadError> {
    let marks = vec!["?"; kinds.len()].join(", ");
    let sql = format!(
        "SELECT chains.chain FROM chains JOIN events ON events.chain = chains.chain AND events.seq = chains.seq \
         WHERE events.type NOT IN ({marks})"
    );
    let mut statement = connection.prepare_cached(&sql).map_err(read_error)?;
    let mut rows = statement.query(rusqlite::params_from_iter(kinds)).map_err(read_error)?;
    let mut chains = Vec::new();
    while let Some(row) = rows.next().map_err(read_error)? {
        let name: String = row.get(0).map_err(read_error)?;
        chains.push(name.parse().map_err(|_| ReadError::Damaged(format!("{name:?} is not a chain")))?);
    }
    Ok(chains)
}

/// The statement of a query, and its parameters. Only the form of the query changes the text, so the
/// statement cache works.
fn select(query: &EventQuery) -> (String, Vec<Value>) {
    let mut sql = String::from(concat!("SELECT ", columns!(), " FROM events WHERE pos > ?"));
    let mut values = vec![row::column(query.after)];
    if let Some(chain) = &query.chain {
        sql.push_str(" AND chain = ?");
        values.push(chain.to_string().into());
    }
    if let Some(body) = &query.body {
        sql.push_str(" AND body = ?");
        values.push(body.as_str().to_owned().into());
    }
    match &query.exec {
        None => {}
        Some(ExecFilter::Any) => sql.push_str(" AND exec IS NOT NULL"),
        Some(ExecFilter::Number(exec)) => {
            sql.push_str(" AND exec = ?");
            values.push(row::column(*exec));
        }
        Some(ExecFilter::Tag(tag)) => {
            sql.push_str(" AND tag = ?");
            values.push(tag.clone().into());
        }
    }
    if !query.kinds.is_empty() {
        let marks = vec!["?"; query.kinds.len()].join(", ");
        sql.push_str(&format!(" AND type IN ({marks})"));
        values.extend(query.kinds.iter().map(|kind| Value::from((*kind).to_owned())));
    }
    sql.push_str(match query.order {
        EventOrder::OldestFirst => " ORDER BY pos LIMIT ?",
        EventOrder::NewestFirst => " ORDER BY pos DESC LIMIT ?",
    });
    values.push(i64::try_from(query.limit).unwrap_or(i64::MAX).into());
    (sql, values)
}

fn unreadable(row: &rusqlite::Row<'_>, error: RowError) -> ReadError {
    match error {
        RowError::Database(error) if error.sqlite_error_code().is_some() => read_error(error),
        error => ReadError::Event { pos: row::pos(row).unwrap_or(0), why: error.to_string() },
    }
}
