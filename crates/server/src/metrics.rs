//! Metrics in Prometheus' text format.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use axum::http::{Method, StatusCode};
use fleet::{Fleet, Status};
use proto::Failure;

use crate::App;

/// Upper bounds of the histogram of response times, in milliseconds.
const BUCKETS_MS: [u64; 10] = [1, 2, 5, 10, 25, 50, 100, 500, 2500, 10_000];

/// Counters of requests.
#[derive(Debug, Default)]
pub struct RequestMetrics(Mutex<BTreeMap<SeriesKey, SeriesCount>>);

type SeriesKey = (&'static str, &'static str, u16);

#[derive(Debug, Default, Clone)]
struct SeriesCount {
    buckets: [u64; BUCKETS_MS.len()],
    count: u64,
    total_us: u64,
}

impl RequestMetrics {
    /// Counts a response and the time until it began.
    pub fn answered(&self, surface: &'static str, method: &Method, status: StatusCode, took: Duration) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = all.entry((surface, known(method), status.as_u16())).or_default();
        count.count += 1;
        count.total_us = count.total_us.saturating_add(took.as_micros() as u64);
        let late = BUCKETS_MS
            .iter()
            .zip(&mut count.buckets)
            .filter(|(bound, _)| took <= Duration::from_millis(**bound));
        late.for_each(|(_, bucket)| *bucket += 1);
    }

    fn write(&self, text: &mut String) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        head(text, "pal_request_seconds", "histogram", "Time until an answer began.");
        for ((surface, method, status), count) in all {
            let labels = format!("surface=\"{surface}\",method=\"{method}\",status=\"{status}\"");
            for (bound, within) in BUCKETS_MS.iter().zip(count.buckets) {
                let _ = writeln!(
                    text,
                    "pal_request_seconds_bucket{{{labels},le=\"{}\"}} {within}",
                    *bound as f64 / 1000.0
                );
            }
            let _ = writeln!(text, "pal_request_seconds_bucket{{{labels},le=\"+Inf\"}} {}", count.count);
            let _ = writeln!(text, "pal_request_seconds_sum{{{labels}}} {}", count.total_us as f64 / 1e6);
            let _ = writeln!(text, "pal_request_seconds_count{{{labels}}} {}", count.count);
        }
    }
}

/// The name of a method for labels; unknown methods share one series.
pub fn known(method: &Method) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    KNOWN.into_iter().find(|name| *name == method.as_str()).unwrap_or("other")
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn gauge(text: &mut String, name: &str, help: &str, value: u64) {
    head(text, name, "gauge", help);
    let _ = writeln!(text, "{name} {value}");
}

/// All metrics in Prometheus' text format.
pub async fn text(app: &App) -> Result<String, Failure> {
    let counted = app.blocking(async |fleet: &Fleet| {
        let statuses: Vec<Status> = fleet.ids()?.iter().filter_map(|id| fleet.status(id).ok()).collect();
        Ok((statuses, fleet.log().last_pos()?))
    });
    let (statuses, newest) = counted.await?;
    let services = app.services();
    let mut text = String::new();
    head(&mut text, "pal_bodies", "gauge", "Bodies by status.");
    for status in [Status::Running, Status::Paused, Status::Stopped, Status::Dead, Status::Interrupted] {
        let count = statuses.iter().filter(|found| **found == status).count();
        let _ = writeln!(text, "pal_bodies{{status=\"{}\"}} {count}", status.name());
    }
    gauge(
        &mut text,
        "pal_bodies_max",
        "Largest number of Bodies on this server.",
        app.config().bounds.bodies_max as u64,
    );
    gauge(
        &mut text,
        "pal_terminals",
        "Terminals that this server holds.",
        services.terminals().count() as u64,
    );
    gauge(
        &mut text,
        "pal_streams",
        "Streams of the native API that are open.",
        services.limits().streams() as u64,
    );
    gauge(
        &mut text,
        "pal_agents_driven",
        "Agents that this server drives, or that wait for their turn.",
        app.agents().driven() as u64,
    );
    gauge(&mut text, "pal_events", "Events in the log.", newest);
    gauge(
        &mut text,
        "pal_uptime_seconds",
        "Seconds since the server started.",
        app.started().elapsed().as_secs(),
    );
    gauge(&mut text, "process_resident_memory_bytes", "Memory of the server itself.", resident());
    head(&mut text, "pal_refused_total", "counter", "Requests refused at a limit.");
    for (why, count) in services.limits().refusals() {
        let _ = writeln!(text, "pal_refused_total{{limit=\"{why}\"}} {count}");
    }
    services.metrics().write(&mut text);
    Ok(text)
}

fn resident() -> u64 {
    /// `statm` counts in pages, which have this size on every supported platform.
    const PAGE: u64 = 4096;
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_what_they_were() {
        let metrics = RequestMetrics::default();
        metrics.answered("control", &Method::GET, StatusCode::OK, Duration::from_millis(3));
        metrics.answered("control", &Method::GET, StatusCode::OK, Duration::from_secs(60));
        metrics.answered(
            "body",
            &Method::from_bytes(b"X-ODD").unwrap(),
            StatusCode::NOT_FOUND,
            Duration::ZERO,
        );
        let mut text = String::new();
        metrics.write(&mut text);
        for line in [
            "pal_request_seconds_bucket{surface=\"control\",method=\"GET\",status=\"200\",le=\"0.002\"} 0",
            "pal_request_seconds_bucket{surface=\"control\",method=\"GET\",status=\"200\",le=\"0.005\"} 1",
            "pal_request_seconds_bucket{surface=\"control\",method=\"GET\",status=\"200\",le=\"+Inf\"} 2",
            "pal_request_seconds_count{surface=\"body\",method=\"other\",status=\"404\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
