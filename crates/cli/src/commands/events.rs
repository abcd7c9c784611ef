//! `pal events`, and the events that `run` and `exec` print with `--json`.

use std::time::Duration;

use fleet::{Fleet, LogVerdict};
use proto::{BodyId, Event, Failure, Kind, event::GENESIS, text::visible};

use crate::{
    args::{EventsArgs, EventsCommand},
    output::{self, Format},
    progress,
};

/// How many events are read at once.
const PAGE: usize = 1000;
/// How long a follower waits for an event before it takes decisions of egress proxies into the log again.
const WAIT: Duration = Duration::from_millis(500);
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
        fleet.log().follow(after, body.as_ref(), 1, WAIT)?;
    }
}

/// Resolves a Body's id. A removed Body has no record any more, only events, so its key must be the whole id.
fn body(fleet: &Fleet, key: &str) -> Result<BodyId, Failure> {
    match fleet.find(key) {
        Ok(view) => Ok(view.spec.id),
        Err(failure) if failure.kind == Kind::NotFound => {
            let Ok(id) = key.parse::<BodyId>() else { return Err(failure) };
            if fleet.log().events(0, Some(&id), 1)?.is_empty() { Err(failure) } else { Ok(id) }
        }
        Err(failure) => Err(failure),
    }
}

/// Prints all events behind position `after`; gives the position of the last.
fn print(fleet: &Fleet, mut after: u64, body: Option<&BodyId>, format: Format) -> Result<u64, Failure> {
    loop {
        let page = fleet.log().events(after, body, PAGE)?;
        for event in &page {
            match format {
                Format::Json => output::json(event)?,
                Format::Text => output::line(text(event))?,
            }
        }
        after = page.last().map_or(after, |event| event.pos);
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
        event.pos,
        visible(&event.at),
        visible(&event.kind),
        cut.unwrap_or(data)
    )
}

async fn verify(fleet: &Fleet, format: Format) -> Result<(), Failure> {
    let verdict = progress::watch("verifying", async { fleet.log().verify() }).await?;
    if format == Format::Json {
        output::json(&verdict)?;
    }
    match verdict {
        LogVerdict::Whole { events, chains, head } if format == Format::Text => {
            let s = if chains == 1 { "" } else { "s" };
            let head = if head == GENESIS { "not sealed yet".to_owned() } else { format!("head {head}") };
            output::line(format_args!("whole: {events} events in {chains} chain{s}, {head}"))
        }
        LogVerdict::Whole { .. } => Ok(()),
        LogVerdict::Broken { chain, seq, why } => {
            let place = match (chain, seq) {
                (Some(chain), Some(seq)) => format!(" at event {seq} of chain {}", visible(&chain)),
                (Some(chain), None) => format!(" in chain {}", visible(&chain)),
                (None, _) => String::new(),
            };
            let why = visible(&why.to_string());
            Err(Failure::new(Kind::Conflict, format!("the log is broken{place}: {why}"))
                .hint("the database was changed from outside: compare it with a backup, and keep both"))
        }
    }
}

/// The events of one Body from now on, for a command with `--json`.
pub struct EventTail {
    /// The position of the last event printed; none when nothing is to be printed.
    after: Option<u64>,
}

impl EventTail {
    /// Starts at the current end of the log.
    pub fn new(fleet: &Fleet, format: Format) -> Result<Self, Failure> {
        let after = match format {
            Format::Text => None,
            Format::Json => Some(fleet.log().last_pos()?),
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
