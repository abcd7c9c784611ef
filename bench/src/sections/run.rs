//! `true` in a new sandbox, by command line.

use std::io;

use crate::{
    context::BenchContext,
    measure::{Contender, interleave},
    peers::{self, BWRAP, PAL, PLAIN},
    report::{Bar, Bound, ReportSection, ReportTable},
};

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
    let bar = Bar {
        promise: "`pal run -- true` against bwrap".into(),
        found: table.ratio(PAL, BWRAP),
        bound: Bound::AtMost(1.0),
        unit: "×",
    };
    Ok(ReportSection { tables: vec![table], bars: vec![bar] })
}
