//! `true` in a new sandbox, by command line.

use std::io;

use crate::{
    context::BenchContext,
    measure::{Contender, interleave},
    peers::{self, BWRAP, PAL, PLAIN},
    report::{Bar, Bound, ReportSection, ReportTable},
};

/// Container runtimes that `pal run` must be faster than.
const RUNTIMES: [&str; 4] = ["crun", "runc", "runsc", "podman"];

/// Measures all peers interleaved.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let (peers, absent) = peers::fresh(context)?;
    let contenders = peers.iter().map(|peer| {
        let mut contender = Contender::new(peer.name, || peer.line.time());
        contender.note = format!("own: {}", peer.own);
        contender
    });
    let rows = interleave(contenders.collect(), context.args.rounds);
    let mut table = ReportTable::times("Run `true` in a fresh sandbox", &[BWRAP, PLAIN], rows);
    table.absent = absent;
    let bar = |peer: &str, most| Bar {
        promise: format!("`pal run -- true` against {peer}"),
        found: table.ratio(PAL, peer),
        bound: Bound::AtMost(most),
        unit: "×",
    };
    let bars = std::iter::once(bar(BWRAP, 1.5)).chain(RUNTIMES.map(|runtime| bar(runtime, 1.0))).collect();
    Ok(ReportSection { tables: vec![table], bars })
}
