//! E2B's network object: the server validates it, stores it, and enforces it as far as a Body has a network.
//!
//! A Body of this version reaches only its own loopback, so every rule that forbids is enforced, and a rule
//! that allows has no effect yet.

use axum::{
    extract::{Path, State},
    http::StatusCode,
};
use fleet::Fleet;
use serde_json::{Map, Value};

use super::{
    E2bRefusal,
    extract::{JsonRequest, find},
};
use crate::{App, Caller};

const RULES_MAX: usize = 1000;

/// `PUT /sandboxes/{id}/network`: replaces the egress rules; the ingress rules stay.
pub async fn replace(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<Map<String, Value>>,
) -> Result<StatusCode, E2bRefusal> {
    let (view, _) = find(&app, &caller, &id).await?;
    let mut asked = asked.value;
    let internet = asked.remove("allow_internet_access").and_then(|value| value.as_bool());
    let network = checked(Some(asked.into()), internet)?;
    let body = view.id().clone();
    app.blocking(async move |fleet: &Fleet| {
        fleet.leases().change(&body, |lease| {
            let kept = ["allowPublicTraffic", "maskRequestHost"]
                .map(|name| (name, lease.network.get(name).cloned()));
            lease.network = network.clone();
            for (name, value) in kept {
                if let (Some(fields), Some(value)) = (lease.network.as_object_mut(), value) {
                    fields.insert(name.to_owned(), value);
                }
            }
        })
    })
    .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Validates the object, and returns it in the form that is stored.
pub fn checked(network: Option<Value>, internet: Option<bool>) -> Result<Value, E2bRefusal> {
    let mut network = match network {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(network)) => network,
        Some(_) => return Err(E2bRefusal::bad("network is not an object")),
    };
    network.retain(|_, value| !value.is_null());
    check_places(&network, "allowOut", is_place)?;
    check_places(&network, "denyOut", is_address)?;
    check_places(&network, "dnsServers", |text| text.parse::<std::net::Ipv4Addr>().is_ok())?;
    let typed = [
        ("allowPublicTraffic", network.get("allowPublicTraffic").is_none_or(Value::is_boolean)),
        ("maskRequestHost", network.get("maskRequestHost").is_none_or(Value::is_string)),
        ("rules", network.get("rules").is_none_or(Value::is_object)),
        (
            "egressProxy",
            network.get("egressProxy").is_none_or(|proxy| proxy.get("address").is_some_and(Value::is_string)),
        ),
        ("httpsPorts", network.get("httpsPorts").is_none_or(Value::is_array)),
    ];
    if let Some((name, _)) = typed.iter().find(|(_, right)| !right) {
        return Err(E2bRefusal::bad(format!("network.{name} has the wrong type")));
    }
    if let Some(internet) = internet {
        network.insert("allowInternetAccess".into(), internet.into());
    }
    Ok(if network.is_empty() { Value::Null } else { network.into() })
}

fn check_places(
    network: &Map<String, Value>,
    name: &str,
    is_good: fn(&str) -> bool,
) -> Result<(), E2bRefusal> {
    let Some(places) = network.get(name) else { return Ok(()) };
    let places = places.as_array().filter(|places| places.len() <= RULES_MAX);
    let places = places
        .ok_or_else(|| E2bRefusal::bad(format!("network.{name} is not a list of at most {RULES_MAX}")))?;
    match places.iter().find(|place| !place.as_str().is_some_and(is_good)) {
        Some(odd) => {
            Err(E2bRefusal::bad(format!("network.{name} holds {odd}, which is not a valid address or name")))
        }
        None => Ok(()),
    }
}

fn is_place(text: &str) -> bool {
    is_address(text) || is_name(text)
}

fn is_address(text: &str) -> bool {
    let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
    let Ok(address) = address.parse::<std::net::IpAddr>() else { return false };
    let most = if address.is_ipv4() { 32 } else { 128 };
    bits.is_none_or(|bits| bits.parse::<u8>().is_ok_and(|bits| bits <= most))
}

fn is_name(text: &str) -> bool {
    let name = text.strip_prefix("*.").unwrap_or(text);
    let plain = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_*".contains(&byte))
    };
    text == "*" || name.len() <= 253 && name.split('.').all(plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_goes_out_is_checked() {
        let good = json!({ "allowOut": ["1.1.1.1", "10.0.0.0/8", "*.example.com", "::1"], "denyOut": ["0.0.0.0/0"], "dnsServers": ["8.8.8.8"] });
        assert_eq!(checked(Some(good.clone()), None).unwrap(), good);
        for bad in [
            json!([]),
            json!({ "allowOut": "1.1.1.1" }),
            json!({ "allowOut": ["a b"] }),
            json!({ "denyOut": ["example.com"] }),
            json!({ "denyOut": ["10.0.0.0/99"] }),
            json!({ "dnsServers": ["::1"] }),
            json!({ "allowPublicTraffic": "no" }),
            json!({ "egressProxy": {} }),
        ] {
            assert!(checked(Some(bad.clone()), None).is_err(), "{bad}");
        }
        assert_eq!(checked(None, None).unwrap(), Value::Null);
        assert_eq!(checked(None, Some(false)).unwrap(), json!({ "allowInternetAccess": false }));
    }
}
