//! Authorization for Bodies, templates and snapshots.
//!
//! Invariant: a Body that a key does not reach does not exist for that key, in every API.
//! Invariant: a template or snapshot of one key does not exist for another key, unless that key is `admin` or
//! the template is public.
//! Invariant: every API resolves a name exactly as `fleet` does when it creates the Body.

use fleet::{Fleet, Lease, NetworkRequest, Preset, RuleReach, SnapshotView, rule_reach};
use proto::{Failure, Kind, egress::EgressRule, template::Template};

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

/// Checks that a caller may ask for this network. Keys of scope `run` may as far as the operator lets them, and never
/// reach this host or private networks.
pub fn check_network(
    internet: InternetAccess,
    caller: &Caller,
    request: &NetworkRequest,
) -> Result<(), Failure> {
    let is_closed = *request
        == NetworkRequest { presets: request.presets.clone(), ..NetworkRequest::default() }
        && request.presets.iter().all(|preset| *preset == Preset::Closed);
    if caller.scope == Scope::Admin || is_closed {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_needs_the_operator_and_private_ones_an_admin() {
        let caller = |scope| Caller { key: "k".into(), scope, reach: KeyReach::Own };
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
        let closed = NetworkRequest { presets: vec![Preset::Closed], ..NetworkRequest::default() };
        assert!(check(denied, Scope::Run, &closed));
    }
}
