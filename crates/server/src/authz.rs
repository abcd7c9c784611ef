//! Authorization for Bodies, templates and snapshots.
//!
//! Invariant: a Body that a key does not reach does not exist for that key, in every API.
//! Invariant: a template or snapshot of one key does not exist for another key, unless that key is `admin` or
//! the template is public.
//! Invariant: every API resolves a name exactly as `fleet` does when it creates the Body.

use fleet::{Fleet, Lease, NetworkRequest, Preset, RuleReach, SnapshotView, rule_reach};
use proto::{
    BodyId, Failure, Kind,
    egress::{AcceptList, EgressRule, body_label},
    template::Template,
};

use crate::{Caller, InternetAccess, KeyReach, Scope};

/// A caller reaches the Bodies that its key created, and those that the reach of its key names.
pub fn may_reach(caller: &Caller, lease: Option<&Lease>) -> bool {
    let is_own = |lease: &Lease| lease.owner.as_deref() == Some(caller.key.as_str());
    let is_reached = match &caller.reach {
        KeyReach::Own => false,
        KeyReach::Label { name, value } => lease.is_some_and(|lease| lease.metadata.get(name) == Some(value)),
        KeyReach::All => true,
    };
    caller.scope == Scope::Admin || is_reached || lease.is_some_and(is_own)
}

/// A caller may see its own templates, public ones, and those of the server's operator.
pub fn may_see_template(caller: &Caller, template: &Template) -> bool {
    template.public || template.owner.is_none() || may_change_template(caller, template)
}

/// A caller may change its own templates.
pub fn may_change_template(caller: &Caller, template: &Template) -> bool {
    caller.scope == Scope::Admin || template.owner.as_deref() == Some(&caller.key)
}

/// A caller may see its own snapshots, and those of Bodies that it reaches. A snapshot of a Body that `pal` itself
/// created holds files of the server's operator, and has neither an owner nor a label.
pub fn may_see_snapshot(fleet: &Fleet, caller: &Caller, snapshot: &SnapshotView) -> bool {
    snapshot.owner.as_deref() == Some(caller.key.as_str())
        || fleet.leases().get(&snapshot.body).is_ok_and(|lease| may_reach(caller, lease.as_ref()))
}

/// The snapshots that a caller may see.
pub fn snapshots(fleet: &Fleet, caller: &Caller) -> Result<Vec<SnapshotView>, Failure> {
    Ok(fleet.snapshots().list()?.into_iter().filter(|view| may_see_snapshot(fleet, caller, view)).collect())
}

/// Checks that a caller may create Bodies from a template or snapshot; to others it does not exist.
pub fn usable(fleet: &Fleet, caller: &Caller, asked: &str) -> Result<(), Failure> {
    if asked == "host" {
        return Ok(());
    }
    let seen = match fleet.templates().find(asked)? {
        Some(template) => may_see_template(caller, &template),
        // The function that creates the Body reports a name that is no snapshot either.
        None => fleet.snapshots().find_view(asked).is_none_or(|view| may_see_snapshot(fleet, caller, &view)),
    };
    if seen {
        Ok(())
    } else {
        Err(Failure::new(Kind::NotFound, format!("there is no template {:?}", proto::text::visible(asked)))
            .hint("list them: GET /v1/templates"))
    }
}

/// The network access that the operator lets a caller give: a key with a ceiling may give one below it, whatever holds for
/// other keys.
pub fn internet_of(internet: InternetAccess, caller: &Caller) -> InternetAccess {
    if caller.has_ceiling { InternetAccess::Allowed } else { internet }
}

/// Checks that a caller may ask for this network. Keys of scope `run` may as far as the operator lets them, and never
/// reach this host or private networks. A key with a ceiling may ask for anything, because the ceiling decides. Rules
/// about other Bodies need no right, because those must accept the Body.
pub fn check_network(
    internet: InternetAccess,
    caller: &Caller,
    request: &NetworkRequest,
) -> Result<(), Failure> {
    let request = without_bodies(request);
    let is_closed = request
        == NetworkRequest { presets: request.presets.clone(), ..NetworkRequest::default() }
        && request.presets.iter().all(|preset| *preset == Preset::Closed);
    if caller.scope == Scope::Admin || caller.has_ceiling || is_closed {
        return Ok(());
    }
    if internet == InternetAccess::Denied {
        return Err(Failure::new(
            Kind::Denied,
            "on this server only keys of scope admin may give a Body a network",
        )
        .hint("leave `network` out, or ask the operator: pal serve --internet allow"));
    }
    let allowed = request.allow.iter().map(EgressRule::allow).chain(request.rules.iter().cloned());
    match allowed.into_iter().find(|rule| rule_reach(rule) == Some(RuleReach::Private)) {
        None => Ok(()),
        Some(rule) => Err(Failure::new(
            Kind::Denied,
            format!(
                "only a key of scope admin may let a Body reach this host or private networks, as the rule `{}` does",
                proto::egress::fit_to_show(&rule.to)
            ),
        )
        .hint("name a public host, without `+private`")),
    }
}

/// The request without what it says about other Bodies.
fn without_bodies(request: &NetworkRequest) -> NetworkRequest {
    let is_about_hosts = |to: &&String| !EgressRule::allow(to.as_str()).is_about_bodies();
    let hosts = |list: &[String]| list.iter().filter(is_about_hosts).cloned().collect();
    NetworkRequest {
        allow: hosts(&request.allow),
        deny: hosts(&request.deny),
        ask: hosts(&request.ask),
        rules: request.rules.iter().filter(|rule| !rule.is_about_bodies()).cloned().collect(),
        accept: Vec::new(),
        ..request.clone()
    }
}

/// Checks that a caller reaches the Bodies that a request names by their ids; to others they do not exist.
pub fn check_named_bodies(fleet: &Fleet, caller: &Caller, request: &NetworkRequest) -> Result<(), Failure> {
    let accept = AcceptList::new(&request.accept).unwrap_or_default();
    let rules = request.rules.iter().map(|rule| rule.host_and_ports().to_owned());
    let targets = request.allow.iter().chain(&request.ask).cloned().chain(rules);
    let labels = targets.filter_map(|to| {
        let place = EgressRule::allow(to).host_and_ports().to_ascii_lowercase();
        body_label(place.split_once(':').map_or(&*place, |(host, _)| host))
    });
    for label in labels.chain(accept.bodies().cloned()) {
        let Ok(id) = label.as_str().parse::<BodyId>() else { continue };
        if fleet.view(&id).is_ok() && !may_reach(caller, fleet.leases().get(&id)?.as_ref()) {
            return Err(Failure::new(Kind::NotFound, format!("there is no Body {label}"))
                .hint("list them: GET /v1/bodies"));
        }
    }
    Ok(())
}

/// Checks that a caller may change the network of a Body. With a ceiling it may do so for its own Bodies only: those of
/// other keys have the ceilings of those keys.
pub fn check_network_change(caller: &Caller, lease: Option<&Lease>) -> Result<(), Failure> {
    let is_own = lease.is_some_and(|lease| lease.owner.as_deref() == Some(caller.key.as_str()));
    match caller.has_ceiling && !is_own {
        true => Err(Failure::new(
            Kind::Denied,
            "a key with a ceiling changes the networks of its own Bodies only",
        )
        .hint("use the key that owns the Body, or one of scope admin")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_needs_the_operator_and_private_ones_an_admin() {
        let caller = |scope| Caller { key: "k".into(), scope, reach: KeyReach::Own, has_ceiling: false };
        let asks = |allow: &[&str]| NetworkRequest {
            allow: allow.iter().map(|one| (*one).to_owned()).collect(),
            ..NetworkRequest::default()
        };
        let check = |internet, scope, request: &NetworkRequest| {
            check_network(internet, &caller(scope), request).is_ok()
        };
        let (denied, allowed) = (InternetAccess::Denied, InternetAccess::Allowed);
        let (public, private) = (asks(&["pypi.org:443", "*:*"]), asks(&["db.corp:5432+private"]));
        assert!(check(denied, Scope::Admin, &private) && !check(denied, Scope::Run, &public));
        assert!(check(allowed, Scope::Run, &public) && !check(allowed, Scope::Run, &private));
        assert!(!check(allowed, Scope::Run, &asks(&["127.0.0.1:80"])));
        assert!(check(denied, Scope::Run, &asks(&[])));
        // Other Bodies must agree themselves.
        let accept = NetworkRequest { accept: vec!["app:80".into()], ..asks(&["db.body.internal:5432"]) };
        assert!(check(denied, Scope::Run, &accept));
        assert!(!check(denied, Scope::Run, &NetworkRequest { allow: asks(&["a.test"]).allow, ..accept }));
        let below = Caller { has_ceiling: true, ..caller(Scope::Run) };
        assert!(check_network(denied, &below, &private).is_ok(), "its ceiling decides");
        let closed = NetworkRequest { presets: vec![Preset::Closed], ..NetworkRequest::default() };
        assert!(check(denied, Scope::Run, &closed));
    }
}
