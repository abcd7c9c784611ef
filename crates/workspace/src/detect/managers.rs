//! Chooses between package managers of one language, when a directory has the lockfiles of several.

use super::ecosystems::Plan;

/// A package manager and the name of its lockfile.
pub type ManagerLock = (&'static str, &'static str);

/// Chooses the manager whose lockfile was the last to change alone, and says why: one manager may keep the lockfile of
/// another up to date. None if no lockfile is there.
pub fn choose_by_history(plan: &mut Plan<'_>, known: &[ManagerLock]) -> Option<ManagerLock> {
    let present: Vec<ManagerLock> = known.iter().copied().filter(|(_, lock)| plan.has(lock)).collect();
    let first = *present.first()?;
    if present.iter().all(|(manager, _)| *manager == first.0) {
        return Some(first);
    }
    let paths: Vec<String> = present.iter().map(|(_, lock)| plan.path(lock)).collect();
    let last = plan.tree.last_changed(&paths);
    let chosen =
        last.as_ref().and_then(|(path, _)| present.iter().find(|(_, lock)| plan.path(lock) == *path));
    let (manager, lock) = *chosen.unwrap_or(&first);
    let why = match (chosen, &last) {
        (Some(_), Some((_, day))) => format!("{lock} was the last to change alone, on {day}"),
        _ => "the recent history does not tell which one is in use".to_owned(),
    };
    let all: Vec<&str> = present.iter().map(|(_, lock)| *lock).collect();
    plan.notes.push(format!("{manager} is chosen for {}: {why}", describe(plan, &all)));
    Some((manager, lock))
}

/// Names files of the project, such as `web/yarn.lock and package-lock.json`.
pub fn describe(plan: &Plan<'_>, names: &[&str]) -> String {
    proto::text::visible(&plan.path(&names.join(" and ")))
}
