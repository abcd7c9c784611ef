//! E2B's network object: the server validates it, stores it, and makes a network policy of it.
//!
//! With `--internet deny` a sandbox reaches only its own loopback, so every rule that forbids is enforced, and a rule
//! that allows has no effect: the response and the Body's log say so. With `--internet allow` and `ask` every sandbox has
//! a policy, so that a client can change it while the sandbox runs.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use axum::{
    extract::{Path, State},
    http::StatusCode,
};
use fleet::{Fleet, PolicyChange, PolicyChanger, PolicyPart, RuleReach, rule_reach};
use proto::{
    BodyId, Failure,
    egress::{EgressRule, Policy},
    event_data::NetworkDenied,
};
use serde_json::{Map, Value};

use super::{
    E2bRefusal,
    extract::{JsonRequest, find},
};
use crate::{App, Caller, InternetAccess, Scope, authz};

const RULES_MAX: usize = 1000;
/// The target of a rule about every public name and address.
const EVERYTHING: &str = "*:*";
/// Refused. Leases of earlier versions may still have one, with its password.
pub const EGRESS_PROXY: &str = "egressProxy";
/// The warning about a sandbox that does not get the internet access that its client could expect.
pub const NO_INTERNET: &str =
    "this server gives sandboxes no internet access: connections and name lookups fail at once";

/// The wish of a request for internet access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InternetRequest {
    /// It asks for it.
    Wanted,
    /// It says nothing; E2B would allow it.
    Unsaid,
    /// It wants none.
    Refused,
}

/// Determines from the stored network object what the request says about internet access.
pub fn internet(network: &Value) -> InternetRequest {
    let lists = |name: &str, wanted: fn(&Value) -> bool| {
        network.get(name).and_then(Value::as_array).is_some_and(|items| items.iter().any(wanted))
    };
    match network.get("allowInternetAccess").and_then(Value::as_bool) {
        _ if lists("allowOut", |_| true) => InternetRequest::Wanted,
        _ if lists("denyOut", |place| place == "0.0.0.0/0") => InternetRequest::Refused,
        Some(true) => InternetRequest::Wanted,
        Some(false) => InternetRequest::Refused,
        None => InternetRequest::Unsaid,
    }
}

/// The rules of a stored network object. Addresses of this host and of private networks are left out, unless the caller
/// is an admin; where the operator is asked, so are rules that allow.
pub fn rules(network: &Value, caller: &Caller, access: InternetAccess) -> Vec<EgressRule> {
    let list = |name: &str| -> Vec<String> {
        let items = network.get(name).and_then(Value::as_array).into_iter().flatten();
        items.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let (allow, deny) = (list("allowOut"), list("denyOut"));
    let mut rules: Vec<EgressRule> = match (allow.is_empty(), internet(network)) {
        (true, InternetRequest::Refused) => return Vec::new(),
        (true, _) => vec![EgressRule::allow(EVERYTHING)],
        (false, _) => allow.iter().flat_map(|place| targets(place)).map(EgressRule::allow).collect(),
    };
    rules.retain(|rule| caller.scope == Scope::Admin || rule_reach(rule) != Some(RuleReach::Private));
    // E2B's allow wins over its deny, and a rule of ours that denies wins: so what is allowed by name is not denied.
    let denied = deny.iter().filter(|place| !allow.contains(place)).flat_map(|place| targets(place));
    rules.extend(denied.filter(|target| target != EVERYTHING).map(EgressRule::deny));
    rules = header_rules(network, &rules).into_iter().chain(rules).collect();
    match access == InternetAccess::Asked && caller.scope < Scope::Admin {
        true => rules.into_iter().map(EgressRule::into_question).collect(),
        false => rules,
    }
}

/// Rules that set headers, for the hosts of `network.rules` that these rules allow: a transform grants no access. The
/// first rule that allows a connection decides, so exact names stand before wildcards, and longer wildcards before shorter.
fn header_rules(network: &Value, rules: &[EgressRule]) -> Vec<EgressRule> {
    let policy = Policy::new(rules).unwrap_or_default();
    let hosts = network.get("rules").and_then(Value::as_object).into_iter().flatten();
    let mut hosts: Vec<(&String, BTreeMap<String, String>)> = hosts
        .map(|(host, list)| (host, transforms(list)))
        .filter(|(_, headers)| !headers.is_empty())
        .collect();
    hosts.sort_by_key(|(host, _)| (host.starts_with("*."), Reverse(host.len())));
    let rule = |(host, headers): (&String, BTreeMap<String, String>)| {
        let example = host.replacen('*', "x", 1);
        policy.judge_name(&example.to_ascii_lowercase(), 443).ok()?;
        let to = targets(host).pop()?;
        Some(EgressRule { set_headers: headers, ..EgressRule::allow(to) })
    };
    hosts.into_iter().filter_map(rule).collect()
}

/// The headers that the transforms of a host set.
fn transforms(list: &Value) -> BTreeMap<String, String> {
    let headers = list
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|rule| rule.pointer("/transform/headers")?.as_object());
    let pairs = headers
        .flatten()
        .filter_map(|(name, value)| Some((name.to_ascii_lowercase(), value.as_str()?.to_owned())));
    pairs.collect()
}

/// Checks `network.rules`: an object of lists of transforms, by host.
fn check_transforms(network: &Map<String, Value>) -> Result<(), E2bRefusal> {
    let Some(hosts) = network.get("rules").and_then(Value::as_object) else { return Ok(()) };
    if hosts.len() > RULES_MAX {
        return Err(E2bRefusal::bad(format!("network.rules has more than {RULES_MAX} hosts")));
    }
    for (host, list) in hosts {
        if host == "*" || !is_name(host) {
            return Err(E2bRefusal::bad(format!("network.rules holds {host:?}, which is not a valid name")));
        }
        let is_text =
            |value: &Value| value.as_object().is_some_and(|headers| headers.values().all(Value::is_string));
        let is_right = |rule: &Value| rule.pointer("/transform/headers").is_none_or(is_text);
        if !list.as_array().is_some_and(|list| list.iter().all(is_right)) {
            return Err(E2bRefusal::bad(format!(
                "network.rules of {host:?} is not a list of transforms of headers"
            )));
        }
        let headers = transforms(list);
        if headers.values().any(|value| value.contains("${e2b.")) {
            return Err(E2bRefusal::absent("secrets and identity tokens in network.rules"));
        }
        if !headers.is_empty() {
            let rule = EgressRule { set_headers: headers, ..EgressRule::allow("example.com:443") };
            Policy::new(&[rule]).map_err(|_| {
                E2bRefusal::bad(format!("network.rules of {host:?} sets a header that cannot be set"))
            })?;
        }
    }
    Ok(())
}

/// The targets of rules for a name, an address or a range of addresses.
fn targets(place: &str) -> Vec<String> {
    if place == "*" {
        return vec![EVERYTHING.to_owned()];
    }
    if let Some(range) = range(place) {
        return vec![range];
    }
    // E2B matches a name on 80 by the Host of HTTP and on 443 by the server name of TLS; a wildcard at any depth.
    let name = place.strip_prefix("*.").map_or_else(|| place.to_owned(), |below| format!("**.{below}"));
    vec![format!("{name}:80"), format!("{name}:443")]
}

/// A range of addresses as the target of a rule, which begins at its first address.
fn range(place: &str) -> Option<String> {
    let (address, bits) =
        place.split_once('/').map_or((place, None), |(address, bits)| (address, Some(bits)));
    let address: IpAddr = address.parse().ok()?;
    let width = if address.is_ipv4() { 32u32 } else { 128 };
    let bits = bits.map_or(Ok(width), str::parse).ok()?;
    let free = width.checked_sub(bits)?;
    if bits == 0 {
        return Some(EVERYTHING.to_owned());
    }
    Some(match address {
        IpAddr::V4(v4) => format!("{}/{bits}:*", Ipv4Addr::from_bits(v4.to_bits() >> free << free)),
        IpAddr::V6(v6) => format!("[{}]/{bits}:*", Ipv6Addr::from_bits(v6.to_bits() >> free << free)),
    })
}

/// Records in the Body's log that it does not get the internet access that a request asks for.
pub fn note_refused(fleet: &Fleet, id: &BodyId, network: &Value) -> Result<(), Failure> {
    if internet(network) != InternetRequest::Wanted {
        return Ok(());
    }
    let data = NetworkDenied {
        to: "internet".into(),
        allowed: false,
        why: NO_INTERNET.into(),
        decided_at: None,
        spool: None,
        from: None,
    };
    fleet.log().note_about(id, data)
}

/// `PUT /sandboxes/{id}/network`: replaces the egress rules; the ingress rules stay.
pub async fn replace(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    asked: JsonRequest<Map<String, Value>>,
) -> Result<StatusCode, E2bRefusal> {
    let (view, lease) = find(&app, &caller, &id).await?;
    authz::check_network_change(&caller, lease.as_ref())?;
    let mut asked = asked.value;
    let internet = asked.remove("allow_internet_access").and_then(|value| value.as_bool());
    let network = checked(Some(asked.into()), internet)?;
    let body = view.id().clone();
    let access = authz::internet_of(app.config().internet, &caller);
    let accept = view.spec.egress.as_ref().map(|egress| egress.accept.clone()).unwrap_or_default();
    app.blocking(async move |fleet: &Fleet| {
        match access {
            InternetAccess::Denied => note_refused(fleet, &body, &network)?,
            InternetAccess::Asked | InternetAccess::Allowed => {
                let rules = rules(&network, &caller, access);
                let part = PolicyPart { rules, accept };
                PolicyChanger::of(fleet).change(&body, PolicyChange::Replace(part))?;
            }
        }
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
    if network.contains_key(EGRESS_PROXY) {
        return Err(E2bRefusal::absent("egress proxies (network.egressProxy)"));
    }
    check_places(&network, "allowOut", is_place)?;
    check_places(&network, "denyOut", is_address)?;
    check_places(&network, "dnsServers", |text| text.parse::<std::net::Ipv4Addr>().is_ok())?;
    let typed = [
        ("allowPublicTraffic", network.get("allowPublicTraffic").is_none_or(Value::is_boolean)),
        ("maskRequestHost", network.get("maskRequestHost").is_none_or(Value::is_string)),
        ("rules", network.get("rules").is_none_or(Value::is_object)),
        ("httpsPorts", network.get("httpsPorts").is_none_or(Value::is_array)),
    ];
    if let Some((name, _)) = typed.iter().find(|(_, right)| !right) {
        return Err(E2bRefusal::bad(format!("network.{name} has the wrong type")));
    }
    check_transforms(&network)?;
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
    use crate::KeyReach;

    fn caller(scope: Scope) -> Caller {
        Caller { key: "k".into(), scope, reach: KeyReach::Own, has_ceiling: false }
    }

    #[test]
    fn the_object_becomes_rules() {
        let shown = |network: Value, scope| {
            let rules = rules(&network, &caller(scope), InternetAccess::Allowed);
            rules.iter().map(EgressRule::shown).collect::<Vec<_>>()
        };
        let run = |network: Value| shown(network, Scope::Run);
        assert_eq!(run(Value::Null), ["allow *:*"]);
        assert_eq!(run(json!({ "denyOut": ["8.8.8.8"] })), ["allow *:*", "deny 8.8.8.8/32:*"]);
        for closed in [json!({ "allowInternetAccess": false }), json!({ "denyOut": ["0.0.0.0/0"] })] {
            assert!(run(closed).is_empty());
        }
        let named = json!({ "allowOut": ["a.test", "*.b.test", "1.1.1.1/8", "2001:4860::/32"], "denyOut": ["0.0.0.0/0"] });
        assert_eq!(
            run(named),
            [
                "allow a.test:80",
                "allow a.test:443",
                "allow **.b.test:80",
                "allow **.b.test:443",
                "allow 1.0.0.0/8:*",
                "allow [2001:4860::]/32:*",
            ]
        );
        let both = json!({ "allowOut": ["1.1.1.1"], "denyOut": ["1.1.1.1", "1.1.1.2"] });
        assert_eq!(run(both), ["allow 1.1.1.1/32:*", "deny 1.1.1.2/32:*"]);
        let inner = json!({ "allowOut": ["10.0.0.0/8", "169.254.169.254", "a.test"] });
        assert_eq!(run(inner.clone()), ["allow a.test:80", "allow a.test:443"]);
        assert_eq!(shown(inner, Scope::Admin).len(), 4);
        let asked = rules(&json!({ "denyOut": ["8.8.8.8"] }), &caller(Scope::Run), InternetAccess::Asked);
        assert_eq!(asked.iter().map(EgressRule::shown).collect::<Vec<_>>(), ["ask *:*", "deny 8.8.8.8/32:*"]);
        let headers = |value: &str| json!([{ "transform": { "headers": { "X-Team": value } } }]);
        let set = json!({ "allowOut": ["a.test", "*.b.test"], "rules": { "*.b.test": headers("b"), "a.test": headers("a"), "c.test": headers("c") } });
        let set = rules(&set, &caller(Scope::Run), InternetAccess::Allowed);
        let shown: Vec<_> = set
            .iter()
            .map(|rule| (rule.to.as_str(), rule.set_headers.get("x-team").map(String::as_str)))
            .collect();
        assert_eq!(
            shown[..3],
            [("a.test:443", Some("a")), ("**.b.test:443", Some("b")), ("a.test:80", None)]
        );
        assert_eq!(shown.len(), 6, "a transform grants no access: {shown:?}");
        let all = rules(&json!({ "allowOut": ["::1", "*"] }), &caller(Scope::Admin), InternetAccess::Allowed);
        proto::egress::Policy::new(&all).unwrap();
    }

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
            json!({ "rules": { "*": [] } }),
            json!({ "rules": { "a.test": {} } }),
            json!({ "rules": { "a.test": [{ "transform": { "headers": { "x": 1 } } }] } }),
            json!({ "rules": { "a.test": [{ "transform": { "headers": { "x": "${e2b.secrets.KEY}" } } }] } }),
            json!({ "rules": { "a.test": [{ "transform": { "headers": { "a b": "c" } } }] } }),
        ] {
            assert!(checked(Some(bad.clone()), None).is_err(), "{bad}");
        }
        assert_eq!(checked(None, None).unwrap(), Value::Null);
        assert_eq!(checked(None, Some(false)).unwrap(), json!({ "allowInternetAccess": false }));
    }
}
