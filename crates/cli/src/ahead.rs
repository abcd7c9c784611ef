//! What `pal` starts before it has read its own arguments.

use std::{
    ffi::CStr,
    process::ExitCode,
    sync::{Mutex, PoisonError},
};

use fleet::Launcher;
use launch::{Places, When};
use proto::spec::Ids;

sys::before_main!(start);

/// What a run needs of both, as it was seen.
const HEAP_LEN: usize = 160 << 10;
const STACK_LEN: usize = 48 << 10;

static STARTED: Mutex<Option<Launcher>> = Mutex::new(None);

/// For `pal run`, the launcher of its Body: it makes namespaces on another processor while this one gets to its `main`,
/// reads arguments, opens the data directory and writes the plan. One that gets no plan ends. What could not be started
/// here is started later, and fails there with a reason.
///
/// First of all: the launcher is a copy of this process, and should hold nothing of it.
fn start() {
    if sys::origin::has_standard_streams() {
        *STARTED.lock().unwrap_or_else(PoisonError::into_inner) = fork();
    }
}

/// What was started, for whoever asks first.
pub fn launcher() -> Option<Launcher> {
    STARTED.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn fork() -> Option<Launcher> {
    let at = verb_at(sys::origin::arguments().map(CStr::to_bytes));
    let wanted = at.and_then(|at| sys::origin::arguments().nth(at)) == Some(c"run");
    if !wanted {
        return None;
    }
    let places = Places::here();
    // Who is forked would else be run at once, in the place of who forks it.
    let patience = places.and_then(|_| sys::process::Patience::begin());
    let launcher = Launcher::fork(|wish| {
        patience.iter().for_each(sys::process::Patience::end);
        launch(places, wish)
    });
    let mut launcher =
        launcher.inspect_err(|_| patience.iter().for_each(sys::process::Patience::end)).ok()?;
    if let Some((places, pid)) = places.zip(launcher.pid()) {
        places.apart(pid);
        launcher.is_apart(places.makers());
    }
    patience.iter().for_each(sys::process::Patience::end);
    // After the fork: the launcher needs other pages, and would have to part with these.
    sys::memory::take_ahead(HEAP_LEN, STACK_LEN);
    Some(launcher)
}

/// Which is the first argument that is neither an option nor an option's value.
pub fn verb_at<'a>(mut arguments: impl Iterator<Item = &'a [u8]>) -> Option<usize> {
    let mut at = 0;
    loop {
        match arguments.next()? {
            b"--data" | b"--durability" => {
                arguments.next()?;
                at += 2;
            }
            [b'-', ..] => at += 1,
            _ => return Some(at),
        }
    }
}

fn launch(places: Option<Places>, wish: Option<&Ids>) -> ExitCode {
    // Where there is only cgroup v2, the Body's first process is forked straight into its group, which the plan names.
    launch::make_and_keep(if sys::cgroup::is_unified() { When::Late } else { When::Early }, places, wish)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verb_is_found_behind_options() {
        let found = |words: &[&'static str]| verb_at(words.iter().map(|word| word.as_bytes()));
        assert_eq!(found(&["run", "--", "true"]), Some(0));
        assert_eq!(found(&["--data", "run", "--json", "ls"]), Some(3));
        assert_eq!(found(&["--data=run", "--durability", "power", "run"]), Some(3));
        assert_eq!(found(&["--json"]), None);
        assert_eq!(found(&["--data"]), None);
        assert_eq!(found(&[]), None);
    }
}
