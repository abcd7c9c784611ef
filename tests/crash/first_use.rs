//! The first `pal` creates the data directory; if it is killed, the next one does.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use testkit::leaks;

use crate::{chance::Chance, leftovers, pal::Pal, turn};

const KILLS: usize = 40;

#[test]
fn a_data_directory_that_was_half_made_is_made_by_the_next_pal() {
    let _turn = turn();
    let mut chance = Chance::new();
    let typical = {
        let (pal, began) = (Pal::new(), Instant::now());
        pal.ok(&["run", "--", "true"]);
        began.elapsed()
    };
    for kill in 0..KILLS {
        let pal = Pal::new();
        let mut seen = BTreeSet::new();
        let mut kills = Vec::new();
        for _ in 0..=chance.below(3) {
            let after = chance.before(typical * 6 / 5);
            kills.push(after);
            pal.cut(&["run", "--", "true"], after);
            seen.extend(leaks::entries(&pal.data().join("bodies")));
        }
        leaks::reap();
        let said = pal.run(&["run", "--", "echo", "here"]);
        assert_eq!(
            (said.code, said.out.as_str()),
            (Some(0), "here\n"),
            "directory {kill}, killed after {kills:?}: {}",
            said.err
        );
        // Supervisors of the killed `pal` may still be running.
        testkit::wait::blocking(Duration::from_secs(5), "Bodies of a pal that was killed are left", || {
            leaks::reap();
            leaks::descendants().is_empty().then_some(())
        });
        pal.ok(&["gc"]);
        assert_eq!(pal.bodies(), Vec::new(), "directory {kill}, killed after {kills:?}");
        pal.log();
        leftovers::none(&pal, &seen);
    }
}
