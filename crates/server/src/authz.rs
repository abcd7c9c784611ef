//! Who may see and use what sandboxes are made from: templates and snapshots.
//!
//! Invariant: what one key made is not there for another, unless it is `admin` or the template is public.
//! Invariant: a name is judged as `fleet` will read it when the Body is made, on every surface.

use fleet::{Fleet, SnapshotView};
use proto::{Failure, Kind, template::Template};

use crate::{Caller, Scope};

/// A template of one's own, of everybody's, or of whoever runs this server.
pub fn may_see_template(caller: &Caller, template: &Template) -> bool {
    template.public || template.owner.is_none() || may_change_template(caller, template)
}

/// A template of one's own.
pub fn may_change_template(caller: &Caller, template: &Template) -> bool {
    caller.scope == Scope::Admin || template.owner.as_deref() == Some(&caller.key)
}

/// A snapshot of one's own. What `pal` itself took holds files of whoever runs this server, and is for `admin` alone.
pub fn may_see_snapshot(fleet: &Fleet, caller: &Caller, snapshot: &SnapshotView) -> bool {
    let is_own = |owner: &str| owner == caller.key;
    match &snapshot.owner {
        _ if caller.scope == Scope::Admin => true,
        Some(owner) => is_own(owner),
        // Taken before snapshots said whose they are.
        None => fleet
            .leases()
            .get(&snapshot.body)
            .is_ok_and(|lease| lease.is_some_and(|lease| lease.owner.as_deref().is_some_and(is_own))),
    }
}

/// Snapshots that a caller may know of.
pub fn snapshots(fleet: &Fleet, caller: &Caller) -> Result<Vec<SnapshotView>, Failure> {
    Ok(fleet.snapshots().list()?.into_iter().filter(|view| may_see_snapshot(fleet, caller, view)).collect())
}

/// Lets a caller make Bodies of what it may see; everything else is not there.
pub fn usable(fleet: &Fleet, caller: &Caller, asked: &str) -> Result<(), Failure> {
    if asked == "host" {
        return Ok(());
    }
    let seen = match fleet.templates().find(asked)? {
        Some(template) => may_see_template(caller, &template),
        // What is no snapshot either is told by whoever makes the Body.
        None => fleet.snapshots().find_view(asked).is_none_or(|view| may_see_snapshot(fleet, caller, &view)),
    };
    if seen {
        Ok(())
    } else {
        Err(Failure::new(Kind::NotFound, format!("there is no template {:?}", proto::text::visible(asked)))
            .hint("list them: GET /v1/templates"))
    }
}
