//! Authorization for templates and snapshots.
//!
//! Invariant: a template or snapshot of one key does not exist for another key, unless that key is `admin` or
//! the template is public.
//! Invariant: every API resolves a name exactly as `fleet` does when it creates the Body.

use fleet::{Fleet, SnapshotView};
use proto::{Failure, Kind, template::Template};

use crate::{Caller, Scope};

/// A caller may see its own templates, public ones, and those of the server's operator.
pub fn may_see_template(caller: &Caller, template: &Template) -> bool {
    template.public || template.owner.is_none() || may_change_template(caller, template)
}

/// A caller may change its own templates.
pub fn may_change_template(caller: &Caller, template: &Template) -> bool {
    caller.scope == Scope::Admin || template.owner.as_deref() == Some(&caller.key)
}

/// A caller may see its own snapshots. A snapshot that `pal` itself took holds files of the server's
/// operator, so only `admin` may see it.
pub fn may_see_snapshot(fleet: &Fleet, caller: &Caller, snapshot: &SnapshotView) -> bool {
    let is_own = |owner: &str| owner == caller.key;
    match &snapshot.owner {
        _ if caller.scope == Scope::Admin => true,
        Some(owner) => is_own(owner),
        // Snapshots of older versions have no owner.
        None => fleet
            .leases()
            .get(&snapshot.body)
            .is_ok_and(|lease| lease.is_some_and(|lease| lease.owner.as_deref().is_some_and(is_own))),
    }
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
