//! Telemetry: the server exports spans and metrics to a collector, and a missing collector costs nothing.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use opentelemetry_proto::tonic::{
    collector::{metrics::v1::ExportMetricsServiceRequest, trace::v1::ExportTraceServiceRequest},
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use prost::Message;
use serde_json::json;
use testkit::registry::{CannedResponse, ScriptedServer};

use crate::{client, server::TestServer, server_test};

fn attributes(all: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |value: &Value| match value {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    all.iter().filter_map(|one| Some((one.key.clone(), text(one.value.as_ref()?.value.as_ref()?)))).collect()
}

fn spans(collector: &ScriptedServer) -> Vec<Span> {
    let told = collector.asked().into_iter().filter(|asked| asked.path == "/v1/traces");
    let requests = told.map(|asked| ExportTraceServiceRequest::decode(&asked.body[..]).unwrap());
    requests
        .flat_map(|request| request.resource_spans)
        .flat_map(|of| of.scope_spans)
        .flat_map(|of| of.spans)
        .collect()
}

fn metrics(collector: &ScriptedServer) -> Vec<String> {
    let told = collector.asked().into_iter().filter(|asked| asked.path == "/v1/metrics");
    let requests = told.map(|asked| ExportMetricsServiceRequest::decode(&asked.body[..]).unwrap());
    requests
        .flat_map(|request| request.resource_metrics)
        .flat_map(|of| of.scope_metrics)
        .flat_map(|of| of.metrics)
        .map(|metric| metric.name)
        .collect()
}

server_test! {
    /// Each answer is a span, in the caller's trace if it names one; spans hold no secret.
    fn a_collector_is_told_traces_and_metrics(pal) {
        let collector = ScriptedServer::start(|_| CannedResponse::ok(Vec::new()));
        let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--otlp", &format!("http://{}", collector.host())]);
        let sandbox = server.create(json!({}));
        let key = server.key.clone();
        let trace = "0af7651916cd43dd8448eb211c80319c";
        let parent = format!("00-{trace}-b7ad6b7169203331-01");
        client::ask(server.address, "GET", "/templates?secret=hidden", &[("X-API-KEY", &key), ("traceparent", &parent)], b"").unwrap().expect(200);
        server.port(&sandbox, 49983, "GET", "/health", &[], b"").unwrap().expect(204);
        server.port(&sandbox, 8000, "GET", "/their/own", &[], b"").unwrap().expect(502);
        server.ask("DELETE", &format!("/sandboxes/{}", sandbox.id), json!(null)).expect(204);
        assert_eq!(server.stop(), Some(0));

        let spans = spans(&collector);
        let with = |path: &str| {
            let found = spans.iter().find(|span| attributes(&span.attributes).get("url.path").map(String::as_str) == Some(path));
            found.unwrap_or_else(|| panic!("no span of {path}: {spans:?}"))
        };
        let listed = with("/templates");
        assert_eq!(listed.trace_id, (0..16).map(|at| u8::from_str_radix(&trace[2 * at..2 * at + 2], 16).unwrap()).collect::<Vec<_>>());
        let told = attributes(&listed.attributes);
        assert_eq!((told["http.request.method"].as_str(), told["http.response.status_code"].as_str()), ("GET", "200"));
        assert_eq!(attributes(&with("/health").attributes)["pal.body"], sandbox.id);
        // Spans hold neither secrets nor paths of a program in a Body.
        let all = format!("{spans:?}");
        assert!(!all.contains(&key) && !all.contains("hidden") && !all.contains("/their/own") && !all.contains(&sandbox.token));
        let names = metrics(&collector);
        for name in ["http.server.request.duration", "pal.bodies", "pal.held"] {
            assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
        }
        let resource = collector.asked().into_iter().find(|asked| asked.path == "/v1/traces").unwrap();
        let resource = ExportTraceServiceRequest::decode(&resource.body[..]).unwrap().resource_spans.remove(0).resource.unwrap();
        assert_eq!(attributes(&resource.attributes)["service.name"], "palisade");
    }
}

server_test! {
    /// No request waits for a collector.
    fn a_collector_that_is_gone_or_says_nothing_costs_nothing(pal) {
        // A collector that accepts connections and never answers.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for place in [silent.local_addr().unwrap(), gone] {
            let server = TestServer::start_with(pal, &["--listen", "127.0.0.1:0", "--otlp", &format!("http://{place}"), "--log", "off"]);
            for _ in 0..100 {
                server.get("/v1/bodies").expect(200);
            }
            let asked = Instant::now();
            assert_eq!(server.stop(), Some(0));
            assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
        }
        let refused = pal.line("serve --listen 127.0.0.1:0 --otlp nowhere");
        assert_eq!(refused.code, 2, "{refused:?}");
    }
}
