//! Lists of sandboxes, with filters, order and pages.

use std::collections::BTreeMap;

use axum::{
    Json,
    extract::State,
    http::HeaderValue,
    response::{IntoResponse, Response},
};
use fleet::{BodyView, Fleet, Lease, Status};
use proto::spec::Life;
use serde_json::Value;

use super::{E2bRefusal, extract::QueryPairs, sandbox};
use crate::{App, Caller, authz};

/// `GET /sandboxes`, for older clients: all running sandboxes in one response.
pub async fn running(
    State(app): State<App>,
    caller: Caller,
    query: QueryPairs,
) -> Result<Json<Vec<Value>>, E2bRefusal> {
    let wanted = ListFilter { states: vec!["running".into()], ..ListFilter::read(&query)? };
    let found = select(&app, &caller, &wanted).await?;
    Ok(Json(found.iter().map(|(view, lease)| sandbox::listed(view, lease.as_ref())).collect()))
}

/// `GET /v2/sandboxes`.
pub async fn all(State(app): State<App>, caller: Caller, query: QueryPairs) -> Result<Response, E2bRefusal> {
    let wanted = ListFilter::read(&query)?;
    let found = select(&app, &caller, &wanted).await?;
    let running = found.iter().filter(|(view, _)| view.status == Status::Running).count();
    let keys: Vec<String> = found.iter().map(|(view, lease)| place(view, lease.as_ref())).collect();
    let (from, to, next) = page(&keys, query.text("nextToken"), query.limit()?, wanted.newest_first)?;
    let listed: Vec<Value> =
        found[from..to].iter().map(|(view, lease)| sandbox::listed(view, lease.as_ref())).collect();
    let mut response = Json(listed).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert("x-next-token", next);
    }
    response.headers_mut().insert("x-total-running", HeaderValue::from(running));
    Ok(response)
}

/// The filter and order of a list.
#[derive(Debug, Default)]
struct ListFilter {
    states: Vec<String>,
    metadata: BTreeMap<String, String>,
    template: Option<String>,
    started_after: Option<String>,
    newest_first: bool,
}

impl ListFilter {
    fn read(query: &QueryPairs) -> Result<Self, E2bRefusal> {
        let states: Vec<String> = query.texts("state").map(str::to_owned).collect();
        if let Some(odd) = states.iter().find(|state| !["running", "paused"].contains(&state.as_str())) {
            return Err(E2bRefusal::bad(format!("state {odd:?} is neither running nor paused")));
        }
        Ok(Self {
            states,
            metadata: metadata(query.text("metadata").unwrap_or_default()),
            template: query.text("template").map(str::to_owned),
            started_after: query.text("startedAfter").map(in_utc).transpose()?,
            newest_first: match query.text("order") {
                None | Some("desc") => true,
                Some("asc") => false,
                Some(_) => return Err(E2bRefusal::bad("order is neither asc nor desc")),
            },
        })
    }

    fn takes(&self, view: &BodyView, lease: Option<&Lease>) -> bool {
        let state = sandbox::state(view.status);
        let alias = lease.and_then(|lease| lease.alias.as_deref());
        let written = |name: &String| lease.and_then(|lease| lease.metadata.get(name));
        let templates = [Some(view.spec.template.as_str()), alias];
        (self.states.is_empty() || self.states.iter().any(|wanted| wanted == state))
            && self.metadata.iter().all(|(name, value)| written(name) == Some(value))
            && self.template.as_deref().is_none_or(|wanted| templates.contains(&Some(wanted)))
            && self.started_after.as_ref().is_none_or(|after| sandbox::started_at(view, lease) >= *after)
    }
}

/// Parses a metadata filter. Clients percent-encode names and values, then join them to a form, which encodes
/// them again; the encoding of the query itself is already removed.
fn metadata(form: &str) -> BTreeMap<String, String> {
    form_urlencoded::parse(form.as_bytes()).map(|(name, value)| (unquoted(&name), unquoted(&value))).collect()
}

/// Decodes percent-encoding; a `+` stays a `+`.
fn unquoted(text: &str) -> String {
    let whole = text.replace('+', "%2B").replace('&', "%26").replace('=', "%3D");
    form_urlencoded::parse(whole.as_bytes()).next().map(|(name, _)| name.into_owned()).unwrap_or_default()
}

/// A time in the format of our records, which can be compared as text.
fn in_utc(text: &str) -> Result<String, E2bRefusal> {
    let bad = || E2bRefusal::bad("startedAfter is not a time such as 2026-01-31T12:00:00Z");
    let at = super::metrics_logs::unix_ms(text).ok_or_else(bad)?;
    Ok(fleet::clock::rfc3339(std::time::UNIX_EPOCH + std::time::Duration::from_millis(at)))
}

async fn select(
    app: &App,
    caller: &Caller,
    wanted: &ListFilter,
) -> Result<Vec<(BodyView, Option<Lease>)>, E2bRefusal> {
    let all = app
        .blocking(async |fleet: &Fleet| {
            let views = fleet.list()?.into_iter().filter(|view| view.spec.life == Life::Kept);
            Ok(views.map(|view| (fleet.leases().get(view.id()).ok().flatten(), view)).collect::<Vec<_>>())
        })
        .await?;
    let mine = all.into_iter().filter(|(lease, view)| {
        authz::may_reach(caller, lease.as_ref()) && wanted.takes(view, lease.as_ref())
    });
    let mut found: Vec<(BodyView, Option<Lease>)> = mine.map(|(lease, view)| (view, lease)).collect();
    found.sort_by_cached_key(|(view, lease)| place(view, lease.as_ref()));
    if wanted.newest_first {
        found.reverse();
    }
    Ok(found)
}

/// The sort key of a sandbox in a list.
fn place(view: &BodyView, lease: Option<&Lease>) -> String {
    format!("{}_{}", sandbox::started_at(view, lease), view.id())
}

/// The range of a page, and the token of the next page. The keys are sorted.
pub fn page(
    keys: &[String],
    token: Option<&str>,
    limit: usize,
    falling: bool,
) -> Result<(usize, usize, Option<String>), E2bRefusal> {
    if token.is_some_and(|token| !token.contains('_')) {
        return Err(E2bRefusal::bad("nextToken was not given by this server"));
    }
    let seen = |key: &String| {
        token.is_some_and(|token| if falling { key.as_str() >= token } else { key.as_str() <= token })
    };
    let from = keys.iter().take_while(|key| seen(key)).count();
    let to = keys.len().min(from + limit);
    let next = (to < keys.len()).then(|| keys[to - 1].clone());
    Ok((from, to, next))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_twice() {
        // The SDKs send urlencode({quote(name): quote(value)}).
        let wanted = metadata("odd%2520key=a%2526b%253Dc%252F%25C3%25A9&smoke=x");
        assert_eq!(
            wanted,
            BTreeMap::from([("odd key".into(), "a&b=c/é".into()), ("smoke".into(), "x".into())])
        );
        // A person may send it encoded once.
        assert_eq!(
            metadata("a%20b=1%2B1&c=d%3De"),
            BTreeMap::from([("a b".into(), "1+1".into()), ("c".into(), "d=e".into())])
        );
        assert_eq!(metadata(""), BTreeMap::new());
    }

    #[test]
    fn pages_hold_everything_once() {
        for falling in [false, true] {
            let mut keys: Vec<String> = (0..7).map(|number| format!("2026_{number}")).collect();
            if falling {
                keys.reverse();
            }
            let (mut seen, mut token) = (Vec::new(), None::<String>);
            loop {
                let (from, to, next) = page(&keys, token.as_deref(), 3, falling).unwrap();
                seen.extend_from_slice(&keys[from..to]);
                token = next;
                if token.is_none() {
                    break;
                }
            }
            assert_eq!(seen, keys);
        }
        assert!(page(&[], Some("junk"), 3, false).is_err());
    }
}
