//! Metrics and logs of sandboxes.

use std::time::{Duration, UNIX_EPOCH};

use axum::{
    Json,
    extract::{Path, State},
};
use fleet::{BodyView, Fleet, Status, clock};
use proto::{BodyId, Event, EventData, event_data::DecodedEvent};
use serde_json::{Map, Value, json};

use super::{
    E2bRefusal,
    extract::{QueryPairs, find},
    sandbox,
};
use crate::{App, Caller, usage_history::UsageSample};

const LOGS_MAX: u64 = 1000;

/// `GET /sandboxes/{id}/metrics`.
pub async fn metrics(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: QueryPairs,
) -> Result<Json<Vec<Value>>, E2bRefusal> {
    let (start, end) = (query.number("start")?, query.number("end")?);
    if start.zip(end).is_some_and(|(start, end)| start > end) {
        return Err(E2bRefusal::bad("start lies after end"));
    }
    let (view, _) = find(&app, &caller, &id).await?;
    let samples = known(&app, &view).await?;
    let within = |sample: &&UsageSample| {
        let second = sample.at_ms / 1000;
        start.is_none_or(|start| second >= start) && end.is_none_or(|end| second <= end)
    };
    Ok(Json(samples.iter().filter(within).map(|sample| metric(&view, sample)).collect()))
}

/// `GET /sandboxes/metrics?sandbox_ids=a,b`: the newest sample of each sandbox.
pub async fn metrics_of_many(
    State(app): State<App>,
    caller: Caller,
    query: QueryPairs,
) -> Result<Json<Value>, E2bRefusal> {
    let mut newest = Map::new();
    for id in query.texts("sandbox_ids").take(100) {
        let Ok((view, _)) = find(&app, &caller, id).await else { continue };
        if let Some(sample) = known(&app, &view).await?.last() {
            newest.insert(id.to_owned(), metric(&view, sample));
        }
    }
    Ok(Json(json!({ "sandboxes": newest })))
}

/// The usage history of a Body; takes a sample now if there is none yet.
async fn known(app: &App, view: &BodyView) -> Result<Vec<UsageSample>, E2bRefusal> {
    if app.samples().of(view.id()).is_empty() && view.status == Status::Running {
        let (samples, id) = (app.samples().clone(), view.id().clone());
        let look = async move |fleet: &Fleet| {
            samples.take(fleet, &id);
            Ok(())
        };
        app.blocking(look).await?;
    }
    Ok(app.samples().of(view.id()))
}

fn metric(view: &BodyView, sample: &UsageSample) -> Value {
    let limits = &view.spec.limits;
    let percent = sample.cpus_used / f64::from(limits.cpu_milli.max(1)) * 100_000.0;
    json!({
        "timestamp": clock::rfc3339(UNIX_EPOCH + Duration::from_millis(sample.at_ms)),
        "timestampUnix": sample.at_ms / 1000,
        "cpuCount": sandbox::cpu_count(view),
        "cpuUsedPct": (percent.clamp(0.0, 100.0) * 100.0).round() / 100.0,
        "memUsed": sample.memory,
        "memTotal": limits.memory.0,
        "memCache": sample.cache,
        "diskUsed": sample.disk,
        "diskTotal": limits.disk.0,
    })
}

/// `GET /sandboxes/{id}/logs`.
pub async fn logs(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: QueryPairs,
) -> Result<Json<Value>, E2bRefusal> {
    let entries = entries(&app, &caller, &id, &query, "start").await?;
    let lines: Vec<Value> = entries
        .iter()
        .map(|entry| json!({ "timestamp": entry["timestamp"], "line": entry.to_string() }))
        .collect();
    Ok(Json(json!({ "logs": lines, "logEntries": entries })))
}

/// `GET /v2/sandboxes/{id}/logs`.
pub async fn logs_v2(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    query: QueryPairs,
) -> Result<Json<Value>, E2bRefusal> {
    Ok(Json(json!({ "logs": entries(&app, &caller, &id, &query, "cursor").await? })))
}

/// The events of a Body as log entries.
async fn entries(
    app: &App,
    caller: &Caller,
    id: &str,
    query: &QueryPairs,
    from: &str,
) -> Result<Vec<Value>, E2bRefusal> {
    let (view, _) = find(app, caller, id).await?;
    let after_ms = query.number(from)?;
    let limit = query.number("limit")?.unwrap_or(LOGS_MAX).min(LOGS_MAX) as usize;
    let backwards = match query.text("direction") {
        None | Some("forward") => false,
        Some("backward") => true,
        Some(_) => return Err(E2bRefusal::bad("direction is neither forward nor backward")),
    };
    let (search, floor) = (
        query.text("search").unwrap_or_default().to_owned(),
        level_number(query.text("level").unwrap_or("debug"))?,
    );
    let body: BodyId = view.id().clone();
    let events =
        app.blocking(async move |fleet: &Fleet| fleet.log().events(0, Some(&body), usize::MAX)).await?;
    let in_range = |event: &Event| match (after_ms, unix_ms(&event.at)) {
        (Some(bound), Some(at)) if backwards => at <= bound,
        (Some(bound), Some(at)) => at >= bound,
        _ => true,
    };
    let mut found: Vec<&Event> = events.iter().filter(|event| in_range(event)).collect();
    if backwards {
        found.reverse();
    }
    let entries = found
        .into_iter()
        .map(entry)
        .filter(|entry| entry["message"].as_str().is_some_and(|message| message.contains(&search)));
    Ok(entries
        .filter(|entry| {
            level_number(entry["level"].as_str().unwrap_or("info")).is_ok_and(|level| level >= floor)
        })
        .take(limit)
        .collect())
}

fn entry(event: &Event) -> Value {
    let (level, message) = match event.decode() {
        DecodedEvent::Known(EventData::BodyFailed(_)) => ("error", event.kind.clone()),
        DecodedEvent::Known(EventData::NetworkDenied(denied)) => {
            ("warn", format!("{}: {}: {}", event.kind, denied.to, denied.why))
        }
        DecodedEvent::Known(EventData::ExecStarted(started)) => {
            ("info", format!("{}: {}", event.kind, started.argv.join(" ")))
        }
        DecodedEvent::Known(_) | DecodedEvent::Unknown { .. } => ("info", event.kind.clone()),
    };
    json!({ "timestamp": event.at, "level": level, "message": message, "fields": { "seq": event.seq.to_string(), "type": event.kind } })
}

fn level_number(level: &str) -> Result<usize, E2bRefusal> {
    let known = ["debug", "info", "warn", "error"].iter().position(|known| *known == level);
    known.ok_or_else(|| E2bRefusal::bad("level is not one of debug, info, warn, error"))
}

/// Parses a time such as `2026-01-31T12:00:00.5+01:00` to milliseconds since 1970.
pub fn unix_ms(text: &str) -> Option<u64> {
    let (date, rest) = text.split_at_checked(10)?;
    let rest = rest.strip_prefix(['T', 't', ' '])?;
    let zone = rest.find(['Z', 'z', '+', '-'])?;
    let (time, zone) = rest.split_at(zone);
    let numbers = |text: &str, by: char| {
        text.split(by).map(|part| part.parse::<i64>().ok()).collect::<Option<Vec<i64>>>()
    };
    let [year, month, day] = numbers(date, '-')?[..] else { return None };
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(time, ':')?[..] else { return None };
    let millis: i64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    let offset_minutes = match zone.split_at_checked(1)? {
        ("Z" | "z", "") => 0,
        (sign, zone) => {
            let [hours, minutes] = numbers(zone, ':')?[..] else { return None };
            (hours * 60 + minutes) * if sign == "-" { -1 } else { 1 }
        }
    };
    let in_range = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 25
        && minute < 60
        && second < 61;
    let minutes = (days(year, month, day) * 24 + hour) * 60 + minute - offset_minutes;
    u64::try_from((minutes * 60 + second) * 1000 + millis).ok().filter(|_| in_range)
}

/// Days since 1970: Howard Hinnant's `days_from_civil`.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        let at = UNIX_EPOCH + Duration::from_millis(1_782_907_384_567);
        assert_eq!(unix_ms(&clock::rfc3339(at)), Some(1_782_907_384_567));
        assert_eq!(unix_ms("1970-01-01T01:00:00+01:00"), Some(0));
        assert_eq!(unix_ms("2000-02-29T00:00:00Z"), Some(951_782_400_000));
        for bad in [
            "",
            "2026",
            "2026-01-01",
            "2026-01-01T00:00:00",
            "2026-13-01T00:00:00Z",
            "x026-01-01T00:00:00Z",
            "ž026-01-01T00:00:00Z",
        ] {
            assert_eq!(unix_ms(bad), None, "{bad}");
        }
    }
}
