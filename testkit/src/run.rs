//! Runs one test on one layer, and checks what it left.

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    time::Duration,
};

use proto::Layer;

use crate::{Bodies, leaks, skip::skip, wait};

/// The users that cannot run a test, and why.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallerSkips {
    /// The reason for root.
    pub no_root: Option<&'static str>,
    /// The reason for an ordinary user.
    pub no_user: Option<&'static str>,
}

/// Runs a test on a layer.
pub fn run<T: Future<Output = ()>>(layer: &str, callers: CallerSkips, test: impl FnOnce(Bodies) -> T) {
    let _turn = leaks::turn();
    match (sys::caps::is_host_root(), callers) {
        (true, CallerSkips { no_root: Some(_), .. }) if !crate::user::is_chosen() => return skip("for root"),
        // A test may run again as a chosen user, such as an account with subordinate ids, who is not skipped.
        (false, CallerSkips { no_user: Some(why), .. }) if !crate::user::is_chosen() => {
            eprintln!("not for an ordinary user: {why}");
            return skip("as root");
        }
        _ => {}
    }
    let layer: Layer = layer.parse().unwrap_or_else(|_| panic!("{layer} is no layer"));
    leaks::watch();
    // The first runtime opens descriptors that every later one shares and none closes.
    drop(runtime());
    let before = leaks::descriptors();
    let outcome = run_once(layer, test);
    if let Err(panic) = outcome {
        leaks::end(&leaks::descendants());
        leaks::reap();
        resume_unwind(panic);
    }
    nothing_left(&before);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

fn run_once<T: Future<Output = ()>>(
    layer: Layer,
    test: impl FnOnce(Bodies) -> T,
) -> Result<(), Box<dyn Any + Send>> {
    let runtime = runtime();
    let bodies = Bodies::new(layer);
    let outcome = catch_unwind(AssertUnwindSafe(|| runtime.block_on(test(bodies.clone()))));
    let cleared = catch_unwind(AssertUnwindSafe(|| runtime.block_on(bodies.clear())));
    drop(runtime);
    outcome.and(cleared).inspect_err(|_| bodies.give_up())?;
    catch_unwind(AssertUnwindSafe(|| drop(bodies)))
}

/// Checks that nothing of the test is left.
fn nothing_left(before: &[String]) {
    // A process may still be ending.
    wait::blocking(
        Duration::from_secs(5),
        &format!("these processes are left: {:?}", leaks::descendants()),
        || {
            leaks::reap();
            leaks::descendants().is_empty().then_some(())
        },
    );
    let mut more = leaks::descriptors();
    for open in before {
        more.iter().position(|found| found == open).map(|at| more.remove(at));
    }
    assert_eq!(more, Vec::<String>::new(), "descriptors were left open");
}
