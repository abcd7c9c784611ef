//! Files of a Body: upload and download, streamed.

use axum::{
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, Method, Response, StatusCode, Uri, header},
};
use http_body_util::{BodyExt, Limited};
use proto::{BodyId, Failure, Kind};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    bodies::owned,
    error::{ErrorBody, V1Refusal},
    extract::{BodyParam, QueryParams, ReadAccess, RunAccess},
};
use crate::{
    App, proxy,
    route::{ENVD_PORT, PortTarget},
};

const REFUSAL_LEN_MAX: usize = 64 << 10;

pub fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(download, upload))
}

/// Which file to read or write.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FileQuery {
    /// The file's path inside the Body; a path that does not begin with `/` is relative to the user's home
    /// directory.
    #[param(min_length = 1, max_length = 4095)]
    path: String,
    /// The user whose permissions apply; the Body's user if left out.
    #[param(max_length = 64)]
    user: Option<String>,
}

/// Read a file of a Body. The server honours the header `Range`.
#[utoipa::path(get, path = "/bodies/{id}/files", operation_id = "read_file", tag = "files", params(("id" = String, Path, description = "The id or the name of the Body"), FileQuery),
    responses((status = 200, description = "The contents of the file", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 206, description = "The requested range", body = Vec<u8>, content_type = "application/octet-stream"),
        (status = "default", description = "Refused", body = ErrorBody)))]
async fn download(
    state: State<App>,
    ReadAccess(caller): ReadAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<FileQuery>,
    request: Request,
) -> Result<Response<Body>, V1Refusal> {
    owned(&state.0, &caller, &id).await?;
    let _stream = state.0.services().limits().stream(&caller.key)?;
    let mut response = pass(state.0, &id, &query, Method::GET, request).await?;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    Ok(response)
}

/// Write a file of a Body; the guest creates missing parent directories.
#[utoipa::path(put, path = "/bodies/{id}/files", operation_id = "write_file", tag = "files", params(("id" = String, Path, description = "The id or the name of the Body"), FileQuery),
    request_body(content = Option<Vec<u8>>, content_type = "application/octet-stream"),
    responses((status = 204, description = "Written"), (status = "default", description = "Refused", body = ErrorBody)))]
async fn upload(
    state: State<App>,
    RunAccess(caller): RunAccess,
    BodyParam(id): BodyParam,
    QueryParams(query): QueryParams<FileQuery>,
    request: Request,
) -> Result<StatusCode, V1Refusal> {
    owned(&state.0, &caller, &id).await?;
    let _stream = state.0.services().limits().stream(&caller.key)?;
    pass(state.0, &id, &query, Method::POST, request).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Passes the request to the guest, and translates a refusal of the guest into this API's error format.
async fn pass(
    app: App,
    id: &BodyId,
    query: &FileQuery,
    method: Method,
    mut request: Request,
) -> Result<Response<Body>, V1Refusal> {
    if query.path.is_empty() || query.path.contains('\0') {
        return Err(Failure::new(Kind::Usage, "`path` must not be empty or contain a NUL byte").into());
    }
    let token = app.fleet().token(id);
    *request.uri_mut() = uri(query)?;
    *request.method_mut() = method;
    let kept = [header::CONTENT_LENGTH, header::RANGE, header::TRANSFER_ENCODING]
        .map(|name| (request.headers().get(&name).cloned(), name));
    let headers = request.headers_mut();
    headers.clear();
    for (value, name) in kept {
        value.map(|value| headers.insert(name, value));
    }
    headers.insert(header::HOST, HeaderValue::from_static("guest"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert("x-access-token", HeaderValue::from_str(&token).unwrap_or(HeaderValue::from_static("")));
    let response = proxy::forward(app, PortTarget { body: id.to_string(), port: ENVD_PORT }, request).await;
    if response.status().is_success() { Ok(response) } else { Err(refusal(id, response).await) }
}

fn uri(query: &FileQuery) -> Result<Uri, Failure> {
    let mut pairs = form_urlencoded::Serializer::new(String::new());
    pairs.append_pair("path", &query.path);
    if let Some(user) = &query.user {
        pairs.append_pair("username", user);
    }
    format!("/files?{}", pairs.finish())
        .parse()
        .map_err(|_| Failure::new(Kind::Usage, "`path` cannot be encoded in a URL"))
}

async fn refusal(id: &BodyId, response: Response<Body>) -> V1Refusal {
    let status = response.status();
    let said = Limited::new(response.into_body(), REFUSAL_LEN_MAX)
        .collect()
        .await
        .map(|said| said.to_bytes())
        .unwrap_or_default();
    let said: serde_json::Value = serde_json::from_slice(&said).unwrap_or_default();
    let message = proto::text::visible(said["message"].as_str().unwrap_or("the guest refused"));
    match status {
        StatusCode::BAD_GATEWAY => Failure::new(Kind::Conflict, format!("Body {id} does not run"))
            .hint("start it: POST /v1/bodies/{id}/start")
            .into(),
        StatusCode::NOT_FOUND => Failure::new(Kind::NotFound, message).into(),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Failure::new(Kind::Denied, message).into(),
        StatusCode::INSUFFICIENT_STORAGE => {
            V1Refusal::with(StatusCode::INSUFFICIENT_STORAGE, Failure::new(Kind::Limit, message))
        }
        StatusCode::RANGE_NOT_SATISFIABLE => V1Refusal::with(status, Failure::new(Kind::Usage, message)),
        status if status.is_server_error() => Failure::new(Kind::Conflict, message).into(),
        _ => Failure::new(Kind::Usage, message).into(),
    }
}
