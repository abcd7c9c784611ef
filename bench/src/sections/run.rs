//! `true` in a fresh sandbox, by command line.

use std::io;

use crate::{
    ground::Ground,
    measure::{Contender, interleave},
    peers::{self, BWRAP, PAL, PLAIN},
    report::{Bar, Bound, Part, Table},
};

/// Everybody, one after the other, round after round.
pub fn measure(ground: &Ground) -> io::Result<Part> {
    let (peers, absent) = peers::fresh(ground)?;
    let contenders = peers.iter().map(|peer| {
        let mut contender = Contender::new(peer.name, || peer.line.time());
        contender.note = format!("own: {}", peer.own);
        contender
    });
    let rows = interleave(contenders.collect(), ground.args.rounds);
    let mut table = Table::times("Run `true` in a fresh sandbox", &[BWRAP, PLAIN], rows);
    table.absent = absent;
    let bar = Bar {
        promise: "`pal run -- true` against bwrap".into(),
        found: table.ratio(PAL, BWRAP),
        bound: Bound::AtMost(1.0),
        unit: "×",
    };
    Ok(Part { tables: vec![table], bars: vec![bar] })
}
