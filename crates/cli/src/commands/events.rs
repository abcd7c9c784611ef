//! `pal events`, and the events that `run` and `exec` print with `--json`.

use std::time::Duration;

use fleet::{Fleet, LogVerdict};
use proto::{BodyId, Event, Failure, Kind, text::visible};

use crate::{
    args::{EventsArgs, EventsCommand},
    output::{self, Format},
    progress,
};

/// How many events are read at once.
const PAGE: usize = 1000;
/// How often `--follow` checks for new events.
const LOOK: Duration = Duration::from_millis(100);
/// How many characters of an event's data a line of text shows.
const DATA_LEN: usize = 160;

/// Prints events, or verifies the log.
pub async fn events(fleet: &Fleet, args: EventsArgs, format: Format) -> Result<(), Failure> {
    if let Some(EventsCommand::Verify) = args.command {
        return verify(fleet, format).await;
    }
    let body = args.body.as_deref().map(|key| body(fleet, key)).transpose()?;
    let mut after = args.after;
    loop {
        after = print(fleet, after, body.as_ref(), format)?;
        if !args.follow {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Resolves a Body's id. A removed Body has no record any more, only events, so its key must be the whole id.
fn body(fleet: &Fleet, key: &str) -> Result<BodyId, Failure> {
    match fleet.find(key) {
        Ok(view) => Ok(view.spec.id),
        Err(failure) if failure.kind == Kind::NotFound => {
            let Ok(id) = key.parse::<BodyId>() else { return Err(failure) };
            if fleet.events(0, Some(&id), 1)?.is_empty() { Err(failure) } else { Ok(id) }
        }
        Err(failure) => Err(failure),
    }
}

/// Prints all events after `after`; returns the number of the last.
fn print(fleet: &Fleet, mut after: u64, body: Option<&BodyId>, format: Format) -> Result<u64, Failure> {
    loop {
        let page = fleet.events(after, body, PAGE)?;
        for event in &page {
            match format {
                Format::Json => output::json(event)?,
                Format::Text => output::line(text(event))?,
            }
        }
        after = page.last().map_or(after, |event| event.seq);
        if page.len() < PAGE {
            return Ok(after);
        }
    }
}

fn text(event: &Event) -> String {
    let body = event.body.as_ref().map_or("-", BodyId::as_str);
    let data = visible(&event.data.to_string());
    let cut = data.char_indices().nth(DATA_LEN).map(|(at, _)| format!("{}…", &data[..at]));
    format!(
        "{:>6}  {}  {:<18}  {body:<12}  {}",
        event.seq,
        visible(&event.at),
        visible(&event.kind),
        cut.unwrap_or(data)
    )
}

async fn verify(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let verdict = progress::watch("verifying", async { fleet.verify_events() }).await?;
    if format == Format::Json {
        output::json(&verdict)?;
    }
    match verdict {
        LogVerdict::Whole { events, head } if format == Format::Text => {
            output::line(format_args!("whole: {events} events, head {head}"))
        }
        LogVerdict::Whole { .. } => Ok(()),
        LogVerdict::Broken { seq, why } => {
            Err(Failure::new(Kind::Conflict, format!("the log is broken at event {seq}: {why}"))
                .hint("the database was changed from outside: compare it with a backup, and keep both"))
        }
    }
}

/// The events of one Body from now on, for a command with `--json`.
pub struct EventTail {
    /// The last number printed; none if nothing is to be printed.
    after: Option<u64>,
}

impl EventTail {
    /// Starts at the current end of the log.
    pub fn new(fleet: &Fleet, format: Format) -> Result<Self, Failure> {
        let after = match format {
            Format::Text => None,
            Format::Json => Some(fleet.last_event()?),
        };
        Ok(Self { after })
    }

    /// Prints the new events.
    pub fn print(&mut self, fleet: &Fleet, body: &BodyId) -> Result<(), Failure> {
        if let Some(after) = self.after {
            self.after = Some(print(fleet, after, Some(body), Format::Json)?);
        }
        Ok(())
    }
}
