//! Sandboxes per second, by one thread and by sixteen.

use std::{
    io,
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use fleet::{Create, Fleet};

use crate::{
    context::BenchContext,
    library,
    measure::interrupted,
    namespace,
    peers::{self, BWRAP, PLAIN, Peer},
    report::{ReportSection, ReportTable, Row, Unit},
    run::RunPlace,
    stats::Samples,
};

const PASSES: usize = 3;
const WAYS: [usize; 2] = [1, 16];
/// Peers that can start many sandboxes at once from one root directory.
const PARALLEL: [&str; 8] =
    [peers::PAL, PLAIN, "unshare", BWRAP, "bwrap, own root", "crun", "runc", "firejail"];

enum Contender<'a> {
    Line(&'a Peer),
    /// One fleet for all threads.
    Shared(&'a Fleet),
    /// One fleet for each thread, on one data directory.
    Own(&'a BenchContext),
}

/// A table for one thread and one for sixteen.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let (peers, absent) = peers::fresh(context)?;
    let fleet = context.fleet()?;
    let mut contenders = vec![
        ("library, one fleet", Contender::Shared(&fleet)),
        ("library, a fleet each", Contender::Own(context)),
    ];
    contenders.extend(
        peers
            .iter()
            .filter(|peer| PARALLEL.contains(&peer.name))
            .map(|peer| (peer.name, Contender::Line(peer))),
    );
    let lasts = Duration::from_millis(if context.args.quick { 500 } else { 1500 });
    let passes = if context.args.quick { 1 } else { PASSES };
    let mut tables = WAYS.map(|ways| ReportTable {
        title: format!("Create + exec `true` + destroy, {ways}-way"),
        unit: Unit::Rate,
        against: vec![BWRAP, PLAIN],
        rows: contenders
            .iter()
            .map(|(name, _)| Row { name: (*name).into(), samples: Samples::default(), note: String::new() })
            .collect(),
        absent: Vec::new(),
    });
    for _ in 0..passes {
        for (table, ways) in tables.iter_mut().zip(WAYS) {
            for (row, (_, contender)) in table.rows.iter_mut().zip(&contenders) {
                if interrupted() {
                    break;
                }
                match rate(contender, ways, lasts) {
                    Ok(rate) => row.samples.push(rate),
                    Err(error) => row.note = format!("failed: {error}"),
                }
            }
        }
    }
    if let Some(first) = tables.first_mut() {
        first.absent = absent;
    }
    Ok(ReportSection { tables: tables.into(), bars: Vec::new() })
}

/// How many per second, until the time is over and every thread is done.
fn rate(contender: &Contender<'_>, ways: usize, lasts: Duration) -> io::Result<f64> {
    let (start, done) = (Barrier::new(ways + 1), AtomicU64::new(0));
    thread::scope(|scope| {
        let worker = || {
            let ready = Worker::new(contender);
            start.wait();
            let mut worker = ready?;
            let began = Instant::now();
            while began.elapsed() < lasts {
                worker.once()?;
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let workers: Vec<thread::ScopedJoinHandle<'_, io::Result<()>>> =
            (0..ways).map(|_| scope.spawn(worker)).collect();
        start.wait();
        let began = Instant::now();
        let ends: io::Result<Vec<()>> = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| Err(io::Error::other("a thread broke"))))
            .collect();
        let took = began.elapsed().as_secs_f64();
        ends.map(|_| done.load(Ordering::Relaxed) as f64 / took)
    })
}

/// The action that one thread repeats.
enum Worker<'a> {
    Line(&'a Peer),
    Shared(tokio::runtime::Runtime, &'a Fleet),
    Own(tokio::runtime::Runtime, Box<Fleet>),
}

impl<'a> Worker<'a> {
    fn new(contender: &'a Contender<'a>) -> io::Result<Self> {
        Ok(match contender {
            Contender::Line(peer) => {
                if peer.line.place == RunPlace::WithoutUnified {
                    namespace::hide_unified()?;
                }
                Worker::Line(peer)
            }
            Contender::Shared(fleet) => Worker::Shared(library::runtime()?, fleet),
            Contender::Own(context) => Worker::Own(library::runtime()?, Box::new(context.fleet()?)),
        })
    }

    fn once(&mut self) -> io::Result<()> {
        match self {
            Worker::Line(peer) => peer.line.time_here().map(drop),
            Worker::Shared(runtime, fleet) => {
                runtime.block_on(library::live_once(fleet, Create::run())).map(drop)
            }
            Worker::Own(runtime, fleet) => {
                runtime.block_on(library::live_once(fleet, Create::run())).map(drop)
            }
        }
    }
}
