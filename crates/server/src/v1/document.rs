//! The OpenAPI document of the native API, and the page at `/` that leads to it.
//!
//! Invariant: neither names anything of this host, so both may be read without a key.

use axum::{
    Json,
    http::{HeaderMap, header},
    response::{Html, IntoResponse, Response},
};
use serde_json::{Value, json};
use utoipa::{
    Modify, OpenApi,
    openapi::{
        SecurityRequirement,
        security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
    },
};

use super::error::{ErrorBody, NAMED_ERRORS, NamedError};

const ABOUT: &str = "Every AI agent a computer of its own, on yours.";
const VERSION: &str = env!("CARGO_PKG_VERSION");

#[derive(OpenApi)]
#[openapi(
    info(title = "Palisade", description = ABOUT),
    components(schemas(ErrorBody)),
    tags(
        (name = "bodies", description = "Bodies: sandboxes with a file system, processes, a network and limits of their own."),
        (name = "exec", description = "Commands in a Body, and their recorded output."),
        (name = "terminals", description = "Terminals in a Body, over WebSocket."),
        (name = "files", description = "Files of a Body."),
        (name = "work", description = "Repositories in Bodies: create a Body with one, show its work, save it, and land it on a branch."),
        (name = "snapshots", description = "Immutable states of a Body's files."),
        (name = "templates", description = "The file systems that Bodies start from."),
        (name = "homes", description = "Home directories that outlive their Bodies."),
        (name = "agents", description = "Agents: a Brain that works in a Body, drives itself on, and asks where it must."),
        (name = "events", description = "The log of everything that happened."),
        (name = "secrets", description = "Keys of services that Bodies use and never see."),
        (name = "keys", description = "API keys."),
        (name = "host", description = "The server, its host and its settings."),
    ),
    servers((url = "/", description = "The server that sent this document")),
    modifiers(&KeyAuth)
)]
struct ApiDocument;

/// Declares in the OpenAPI document that every route requires a key.
struct KeyAuth;

impl Modify for KeyAuth {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        document.components.get_or_insert_default().add_security_scheme("key", scheme);
        document.security = Some(vec![SecurityRequirement::new("key", Vec::<String>::new())]);
    }
}

/// The document of these routes.
pub fn describe(paths: utoipa::openapi::OpenApi) -> Value {
    let mut document = ApiDocument::openapi();
    document.info.version = VERSION.into();
    let mut document = json!(document.nest("/v1", paths));
    name_errors(&mut document);
    document
}

/// Gives every operation its named errors: one response for each status, all with the same schema, and an example.
fn name_errors(document: &mut Value) {
    for NamedError { status, name, kind, description } in NAMED_ERRORS {
        let example = json!({ "kind": kind, "message": description, "hints": [], "status": status });
        let schema = json!({ "$ref": "#/components/schemas/Error" });
        document["components"]["responses"][*name] = json!({
            "description": description,
            "content": { "application/json": { "schema": schema, "example": example } },
        });
    }
    let paths = document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    let operations = paths.filter_map(Value::as_object_mut).flat_map(|path| path.values_mut());
    for responses in operations.filter_map(|operation| operation["responses"].as_object_mut()) {
        for NamedError { status, name, .. } in NAMED_ERRORS {
            let reference = json!({ "$ref": format!("#/components/responses/{name}") });
            responses.entry(status.to_string()).or_insert(reference);
        }
    }
}

/// `GET /`: says what this is and where to go; as a page for a browser, as JSON for others.
pub async fn index(headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if accept.contains("text/html") {
        return Html(INDEX).into_response();
    }
    Json(json!({
        "name": "Palisade",
        "about": ABOUT,
        "api": "/v1",
        "openapi": "/openapi.json",
        "health": "/health",
        "authentication": "Authorization: Bearer KEY",
        "hint": "create a key: pal keys create NAME",
    }))
    .into_response()
}

const INDEX: &str = r#"<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Palisade</title>
<style>body { font: 1rem/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 40rem; padding: 0 1rem }</style>
<h1>Palisade</h1>
<p>Every AI agent a computer of its own, on yours.</p>
<p>This is the API of <code>pal serve</code>. It has no pages but this one.</p>
<ul>
<li><a href="/openapi.json">/openapi.json</a> describes the native API below <code>/v1</code>.</li>
<li><a href="/health">/health</a> answers 204 while the server runs.</li>
<li>Programs written for E2B run unchanged: <code>pal serve</code> printed the variables that they need.</li>
</ul>
<p>Requests need a key, as <code>Authorization: Bearer KEY</code> or <code>X-API-Key: KEY</code>.
The first one is in <code>serve.key</code> in the data directory; <code>pal keys create NAME</code> creates others.</p>
<pre>curl -H "Authorization: Bearer KEY" -X POST http://127.0.0.1:3900/v1/bodies</pre>
</html>
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_described_in_full() {
        let document = super::super::described().1;
        let tags: Vec<&Value> = document["tags"].as_array().unwrap().iter().map(|tag| &tag["name"]).collect();
        let mut operations = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                operations += 1;
                let at = format!("{method} {path}");
                assert!(path.starts_with("/v1/"), "{at}");
                assert!(
                    operation["summary"].as_str().is_some_and(|text| !text.is_empty()),
                    "{at} has no summary"
                );
                assert!(operation["operationId"].is_string(), "{at} has no name");
                assert!(tags.contains(&&operation["tags"][0]), "{at} has a tag without a description");
                for named in NAMED_ERRORS {
                    assert!(
                        operation["responses"][named.status.to_string()].is_object(),
                        "{at}: {}",
                        named.name
                    );
                }
                assert_eq!(
                    operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"],
                    "#/components/schemas/Error",
                    "{at}"
                );
                if let Some(schema) =
                    operation["requestBody"]["content"]["application/json"]["schema"].as_object()
                {
                    assert!(has_example(&document, schema), "{at}: its request has no example");
                }
            }
        }
        assert!(operations > 40, "{operations} operations");
        assert_eq!(document["servers"][0]["url"], "/");
    }

    /// Whether a schema, or one that it stands for, has an example.
    fn has_example(document: &Value, schema: &serde_json::Map<String, Value>) -> bool {
        let referred = schema
            .get("$ref")
            .and_then(Value::as_str)
            .and_then(|name| document.pointer(name.trim_start_matches('#')).and_then(Value::as_object));
        let parts =
            ["oneOf", "anyOf", "allOf"].iter().filter_map(|kind| schema.get(*kind)?.as_array()).flatten();
        schema.contains_key("example")
            || referred.is_some_and(|schema| has_example(document, schema))
            || parts.filter_map(Value::as_object).any(|schema| has_example(document, schema))
    }
}
