//! Create, exec, remove through the library.

use std::{cell::RefCell, io};

use fleet::{Create, Durability, Fleet};
use tokio::runtime::Runtime;

use crate::{
    context::BenchContext,
    library::{self, LifecycleTimes},
    measure::{Contender, interleave},
    peers::{self, BWRAP, PLAIN},
    report::{Bar, Bound, ReportSection, ReportTable, Row},
    stats::Samples,
};

const LIBRARY: &str = "library";

/// Compared with bwrap and plain fork+exec.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let runtime = library::runtime()?;
    // One fleet for each, because a fleet pools Bodies like its last one.
    let (fleet, keeping, safest) =
        (context.fleet()?, context.fleet()?, context.fleet_with(Durability::Power)?);
    let lives = RefCell::new(Vec::new());
    let (peers, _) = peers::fresh(context)?;
    let mut contenders = vec![
        Contender::new(LIBRARY, || live(&runtime, &fleet, Create::run()).map(|life| note(&lives, life))),
        Contender::new("library, kept Body", || live(&runtime, &keeping, Create::kept()).map(total)),
        Contender::new("library, safe from power loss", || live(&runtime, &safest, Create::run()).map(total)),
    ];
    for peer in peers.iter().filter(|peer| [BWRAP, "bwrap, own root", PLAIN].contains(&peer.name)) {
        contenders.push(Contender::new(peer.name, || peer.line.time()));
    }
    let rows = interleave(contenders, context.args.rounds);
    let table =
        ReportTable::times("Create + exec `true` + remove through the library", &[BWRAP, PLAIN], rows);
    let bar = Bar {
        promise: "create + exec + remove through the library against bwrap".into(),
        found: table.ratio(LIBRARY, BWRAP),
        bound: Bound::AtMost(0.9),
        unit: "×",
    };
    let parts = ReportTable::times("… in its parts", &[], parts(&lives.into_inner()));
    Ok(ReportSection { tables: vec![table, parts], bars: vec![bar] })
}

fn live(runtime: &Runtime, fleet: &Fleet, request: Create) -> io::Result<LifecycleTimes> {
    runtime.block_on(library::live_once(fleet, request))
}

fn total(life: LifecycleTimes) -> std::time::Duration {
    life.create + life.exec + life.remove
}

fn note(lives: &RefCell<Vec<LifecycleTimes>>, life: LifecycleTimes) -> std::time::Duration {
    lives.borrow_mut().push(life);
    total(life)
}

fn parts(lives: &[LifecycleTimes]) -> Vec<Row> {
    let row = |name: &str, part: fn(&LifecycleTimes) -> std::time::Duration| {
        let mut samples = Samples::default();
        lives.iter().for_each(|life| samples.push_time(part(life)));
        Row { name: name.into(), samples, note: String::new() }
    };
    vec![row("create", |life| life.create), row("exec", |life| life.exec), row("remove", |life| life.remove)]
}
