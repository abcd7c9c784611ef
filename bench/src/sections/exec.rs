//! `true` in a running sandbox.

use std::io;

use fleet::{Create, Force};

use crate::{
    context::BenchContext,
    library::{self, failure_text},
    measure::{Contender, interleave, timed},
    peers::{self, PLAIN},
    report::{Bar, Bound, ReportSection, ReportTable},
    residents,
    run::{CommandLine, find},
};

const KEPT: &str = "library";

/// A kept Body and one of `pal run`, by library, command line and `nsenter`, with peers.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let runtime = library::runtime()?;
    let fleet = context.fleet()?;
    let make = |request| runtime.block_on(fleet.create(request)).map_err(failure_text);
    let (kept, short) = (make(Create::kept())?, make(Create::run())?);
    let (residents, mut absent) = residents::start_all(context)?;
    let run = |id| timed(|| runtime.block_on(library::exec(&fleet, id, &["true"])).map(drop));
    let mut contenders = vec![
        Contender::new(PLAIN, || CommandLine::new(["true"]).time()),
        Contender::new(KEPT, || run(kept.id())),
        Contender::new("library, Body of a run", || run(short.id())),
    ];
    let line = peers::pal(context, &["exec", kept.id().as_str(), "--", "true"]);
    contenders.push(Contender::new("pal exec", move || line.time()));
    match nsenter(kept.pid) {
        Ok(line) => contenders.push(Contender::new("nsenter into the Body", move || line.time())),
        Err(error) => absent.push(("nsenter".into(), error.to_string())),
    }
    for resident in &residents {
        match &resident.exec {
            Some(line) => contenders.push(Contender::new(format!("{} exec", resident.name), || line.time())),
            None => absent.push((format!("{} exec", resident.name), "it has no way in".into())),
        }
    }
    let rows = interleave(contenders, context.args.rounds);
    for body in [kept, short] {
        runtime.block_on(fleet.remove(body.id(), Force::Yes)).map_err(failure_text)?;
    }
    let mut table = ReportTable::times("Run `true` in something that runs", &[PLAIN], rows);
    table.absent = absent;
    let bar = Bar {
        promise: "exec in a running Body against plain fork+exec".into(),
        found: table.ratio(KEPT, PLAIN),
        bound: Bound::AtMost(2.5),
        unit: "×",
    };
    Ok(ReportSection { tables: vec![table], bars: vec![bar] })
}

/// The command line that enters every namespace of a Body, if it works on this host.
fn nsenter(pid: Option<i32>) -> io::Result<CommandLine> {
    find("nsenter").ok_or_else(|| io::Error::other("not installed"))?;
    let pid = pid.ok_or_else(|| io::Error::other("the Body has no pid"))?;
    // A Body's root is inside a mount, so its mount namespace alone is not enough.
    let line = CommandLine::new(["nsenter", "--target", &pid.to_string(), "--all", "--root", "--wd", "true"]);
    line.output().map(|_| line)
}
