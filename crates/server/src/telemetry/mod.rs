//! Traces and metrics in OpenTelemetry's protocol. Off unless the operator names a collector.
//!
//! Invariant: a collector that is slow, unreachable or hostile costs only its own data: the server drops what
//! does not fit its queues, and no request waits for the collector.
//! Invariant: the server exports no query, no header and no path of a program in a Body; it exports ids of
//! Bodies and its own paths.

mod send;

use std::time::Duration;

use axum::http::{HeaderMap, Method, StatusCode};
use fleet::{Fleet, Status};
use opentelemetry::{
    KeyValue,
    metrics::{Gauge, Histogram, MeterProvider},
    propagation::TextMapPropagator,
    trace::TracerProvider,
};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::{MetricExporter, Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::{
    Resource,
    metrics::{PeriodicReader, SdkMeterProvider},
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};
use proto::{Failure, Kind};
use tracing::Span;
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt};
use tracing_subscriber::registry::LookupSpan;

use crate::App;

/// How often metrics are exported.
const EVERY: Duration = Duration::from_secs(15);
const EXPORT_WAIT: Duration = Duration::from_secs(10);
/// How long the last export may take.
const LAST_WAIT: Duration = Duration::from_secs(5);
const NAME: &str = "palisade";

/// The exporters to a collector.
#[derive(Debug, Clone)]
pub struct Telemetry {
    tracer: SdkTracer,
    traces: SdkTracerProvider,
    meters: SdkMeterProvider,
    answers: Histogram<f64>,
    bodies: Gauge<u64>,
    held: Gauge<u64>,
}

impl Telemetry {
    /// Starts the export to the collector at this address, such as `http://127.0.0.1:4318`.
    pub fn start(url: &str, runtime: &tokio::runtime::Handle) -> Result<Self, Failure> {
        let base = url.trim_end_matches('/');
        let wrong = |why: String| {
            Failure::new(
                Kind::Usage,
                format!("cannot export to a collector at {:?}", proto::text::visible(url)),
            )
            .because(why)
            .hint("give its address: --otlp http://127.0.0.1:4318")
        };
        let sender = send::OtlpSender::new(base, runtime.clone()).map_err(wrong)?;
        let failed = |error: opentelemetry_otlp::ExporterBuildError| wrong(error.to_string());
        let spans = SpanExporter::builder()
            .with_http()
            .with_http_client(sender.clone())
            .with_protocol(Protocol::HttpBinary);
        let spans = spans
            .with_endpoint(format!("{base}/v1/traces"))
            .with_timeout(EXPORT_WAIT)
            .build()
            .map_err(failed)?;
        let metrics = MetricExporter::builder()
            .with_http()
            .with_http_client(sender)
            .with_protocol(Protocol::HttpBinary);
        let metrics = metrics
            .with_endpoint(format!("{base}/v1/metrics"))
            .with_timeout(EXPORT_WAIT)
            .build()
            .map_err(failed)?;
        let about = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder_empty().with_service_name(NAME).with_attribute(about).build();
        let traces =
            // The server exports a request's trace even if the caller marks it as not sampled.
            SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOn).with_batch_exporter(spans).with_resource(resource.clone()).build();
        let reader = PeriodicReader::builder(metrics).with_interval(EVERY).build();
        let meters = SdkMeterProvider::builder().with_reader(reader).with_resource(resource).build();
        let meter = meters.meter(NAME);
        Ok(Self {
            tracer: traces.tracer(NAME),
            answers: meter
                .f64_histogram("http.server.request.duration")
                .with_unit("s")
                .with_description("Time until an answer began.")
                .build(),
            bodies: meter.u64_gauge("pal.bodies").with_description("Bodies by status.").build(),
            held: meter
                .u64_gauge("pal.held")
                .with_description("Terminals, streams and events that this server holds.")
                .build(),
            traces,
            meters,
        })
    }

    /// The layer that exports spans of `tracing`.
    pub fn layer<S>(&self) -> OpenTelemetryLayer<S, SdkTracer>
    where
        S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.tracer.clone())
            .with_location(false)
            .with_threads(false)
            .with_target(false)
    }

    /// Counts a response.
    pub(crate) fn answered(
        &self,
        surface: &'static str,
        method: &'static str,
        status: StatusCode,
        took: Duration,
    ) {
        let about = [
            KeyValue::new("pal.surface", surface),
            KeyValue::new("http.request.method", method),
            KeyValue::new("http.response.status_code", i64::from(status.as_u16())),
        ];
        self.answers.record(took.as_secs_f64(), &about);
    }

    async fn look(&self, app: &App) -> Result<(), Failure> {
        let found = app.blocking(async |fleet: &Fleet| {
            let statuses: Vec<Status> = fleet.ids()?.iter().filter_map(|id| fleet.status(id).ok()).collect();
            Ok((statuses, fleet.log().last_pos()?))
        });
        let (statuses, events) = found.await?;
        for status in [Status::Running, Status::Paused, Status::Stopped, Status::Dead, Status::Interrupted] {
            let count = statuses.iter().filter(|found| **found == status).count() as u64;
            self.bodies.record(count, &[KeyValue::new("status", status.name())]);
        }
        let services = app.services();
        let held = [
            ("terminals", services.terminals().count() as u64),
            ("streams", services.limits().streams() as u64),
            ("events", events),
        ];
        held.into_iter().for_each(|(what, count)| self.held.record(count, &[KeyValue::new("what", what)]));
        Ok(())
    }

    /// Exports the remaining data. It blocks, so it must not be called on a runtime's thread.
    pub fn finish(&self) {
        // Data that the collector does not take at the end is lost, as at any other time.
        let _ = self.traces.shutdown_with_timeout(LAST_WAIT);
        let _ = self.meters.shutdown_with_timeout(LAST_WAIT);
    }
}

/// Measures the gauges periodically.
pub(crate) async fn run(app: App) {
    let Some(telemetry) = app.config().telemetry.clone() else { return };
    let mut ticks = tokio::time::interval(EVERY / 2);
    loop {
        ticks.tick().await;
        // If a measurement fails, the next one replaces it.
        let _ = telemetry.look(&app).await;
    }
}

/// Shortens a caller's text for a span: many spans wait in memory while the collector is unreachable.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(256)]
}

/// The span of a request: part of the caller's trace, if the request names one.
pub(crate) fn span(
    surface: &'static str,
    method: &Method,
    path: &str,
    body: Option<&str>,
    headers: &HeaderMap,
) -> Span {
    let span = tracing::info_span!(
        "request",
        otel.name = format_args!("{} {surface}", crate::metrics::known(method)),
        otel.kind = "server",
        pal.surface = surface,
        pal.body = body.map(cut),
        http.request.method = crate::metrics::known(method),
        url.path = cut(path),
        http.response.status_code = tracing::field::Empty,
    );
    if !span.is_disabled() && headers.contains_key("traceparent") {
        let _ = span.set_parent(TraceContextPropagator::new().extract(&HeaderExtractor(headers)));
    }
    span
}
