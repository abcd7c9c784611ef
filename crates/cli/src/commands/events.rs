//! `pal events`, and the events that `run` and `exec` print as JSON.

use std::time::Duration;

use fleet::{Fleet, LogVerdict};
use proto::{BodyId, Event, Failure, Kind, text::visible};

use crate::{
    args::{EventsArgs, EventsCommand},
    output::{self, Format},
    progress,
};

/// How many are read at once.
const PAGE: usize = 1000;
/// How often one who follows looks again.
const LOOK: Duration = Duration::from_millis(100);
/// How much of an event's data a line for people shows.
const DATA_LEN: usize = 160;

/// Prints events, or proves the log.
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

/// A Body that is gone has no record any more, but has events: then the key must be its whole id.
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

/// Prints all there are after `after`; gives the number of the last.
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
                .hint("somebody or something changed it: compare with a copy, and keep both"))
        }
    }
}

/// The events of one Body from some moment on, for a command that answers in JSON.
pub struct EventTail {
    /// The last number printed; none when nothing is to be printed.
    after: Option<u64>,
}

impl EventTail {
    /// Begins now.
    pub fn new(fleet: &Fleet, format: Format) -> Result<Self, Failure> {
        let after = match format {
            Format::Text => None,
            Format::Json => Some(fleet.last_event()?),
        };
        Ok(Self { after })
    }

    /// Prints what is new.
    pub fn print(&mut self, fleet: &Fleet, body: &BodyId) -> Result<(), Failure> {
        if let Some(after) = self.after {
            self.after = Some(print(fleet, after, Some(body), Format::Json)?);
        }
        Ok(())
    }
}
