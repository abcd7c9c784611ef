//! The same workload inside and outside: a busy CPU, and 20,000 small files.

use std::{fs, io, path::Path};

use fleet::{Create, Fleet, Force};
use proto::{
    BodyId,
    spec::{Access, Mount},
};
use tokio::runtime::Runtime;

use crate::{
    context::BenchContext,
    library::{self, failure_text},
    measure::interrupted,
    report::{Bar, Bound, ReportSection, ReportTable, Row},
    run::CommandLine,
    stats::Samples,
    workload::WorkloadOutput,
};

const FILES: u64 = 20_000;
const ME: &str = "/mnt/bench";
const TREE: &str = "/mnt/tree";
const OWN: &str = "/home/user/tree";

/// One workload at two places.
struct Pair {
    name: &'static str,
    outside: CommandLine,
    body: BodyId,
    inside: Vec<String>,
    least_percent: f64,
}

/// Inside and outside alternate; the bar is the median of each round's own ratio.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let runtime = library::runtime()?;
    let fleet = context.fleet()?;
    let tree = context.dir("tree")?;
    let me = context.me.to_string_lossy().into_owned();
    outside(&me, &["make", &FILES.to_string(), &tree.to_string_lossy()]).output()?;
    let memory_tree = Path::new("/dev/shm").join(format!("palisade-bench-{}", std::process::id()));
    let made = prepare(context, &runtime, &fleet, &tree, &memory_tree);
    let measured = made.and_then(|(pairs, bodies)| {
        let part = compare(context, &runtime, &fleet, &pairs);
        bodies
            .iter()
            .try_for_each(|id| runtime.block_on(fleet.remove(id, Force::Yes)).map_err(failure_text))?;
        part
    });
    let _ = fs::remove_dir_all(memory_tree);
    measured
}

fn outside(me: &str, words: &[&str]) -> CommandLine {
    CommandLine::new([me, "--work"]).and(words.iter().copied())
}

fn prepare(
    context: &BenchContext,
    runtime: &Runtime,
    fleet: &Fleet,
    tree: &Path,
    memory_tree: &Path,
) -> io::Result<(Vec<Pair>, Vec<BodyId>)> {
    let see = |source: &Path, target: &str| Mount {
        source: source.into(),
        target: target.into(),
        access: Access::ReadOnly,
    };
    let mounts = vec![see(&context.me, ME), see(tree, TREE)];
    let make = |request: Create| {
        runtime.block_on(fleet.create(Create { mounts: mounts.clone(), ..request })).map_err(failure_text)
    };
    let (kept, short) = (make(Create::kept())?.id().clone(), make(Create::run())?.id().clone());
    let me = context.me.to_string_lossy().into_owned();
    let count = FILES.to_string();
    for body in [&kept, &short] {
        runtime.block_on(library::exec(fleet, body, &[ME, "--work", "make", &count, OWN]))?;
    }
    outside(&me, &["make", &count, &memory_tree.to_string_lossy()]).output()?;
    let files = |name, body: &BodyId, there: &str, here: &[&str]| Pair {
        name,
        outside: outside(&me, &["files", &count]).and(here.iter().copied()),
        body: body.clone(),
        inside: ["files", &count]
            .iter()
            .chain(if there.is_empty() { here } else { std::slice::from_ref(&there) })
            .map(|word| (*word).to_owned())
            .collect(),
        least_percent: 85.0,
    };
    let (tree, memory_tree) = (tree.to_string_lossy(), memory_tree.to_string_lossy());
    let pairs = vec![
        Pair {
            name: "CPU",
            outside: outside(&me, &["cpu"]),
            body: kept.clone(),
            inside: vec!["cpu".into()],
            least_percent: 98.0,
        },
        files("20,000 files of the host, mounted", &kept, TREE, &[&tree]),
        files("20,000 own files, kept Body (disk)", &kept, OWN, &[&tree]),
        files("20,000 own files, Body of a run (memory)", &short, OWN, &[&memory_tree]),
        files("20,000 files of /usr, below the Body's own layer", &kept, "", &["/usr/share", "/usr/lib"]),
    ];
    Ok((pairs, vec![kept, short]))
}

fn compare(
    context: &BenchContext,
    runtime: &Runtime,
    fleet: &Fleet,
    pairs: &[Pair],
) -> io::Result<ReportSection> {
    let rounds = context.args.scaled(30);
    let mut found: Vec<[Samples; 3]> = pairs.iter().map(|_| Default::default()).collect();
    for round in 0..=rounds {
        for (pair, found) in pairs.iter().zip(&mut found) {
            if interrupted() {
                break;
            }
            let (inside, outside) = once(runtime, fleet, pair, round)?;
            // The first round only warms the caches.
            if round > 0 {
                let [insides, outsides, ratios] = found;
                insides.push(inside);
                outsides.push(outside);
                ratios.push(outside / inside);
            }
        }
    }
    Ok(report(pairs, found))
}

/// The order of the two alternates from round to round.
fn once(runtime: &Runtime, fleet: &Fleet, pair: &Pair, round: usize) -> io::Result<(f64, f64)> {
    let argv: Vec<&str> = [ME, "--work"].into_iter().chain(pair.inside.iter().map(String::as_str)).collect();
    let inside = || WorkloadOutput::parse(&runtime.block_on(library::exec(fleet, &pair.body, &argv))?);
    let outside = || WorkloadOutput::parse(&pair.outside.output()?);
    let (inside, outside) = if round.is_multiple_of(2) {
        (inside()?, outside()?)
    } else {
        let outside = outside()?;
        (inside()?, outside)
    };
    if (inside.count, inside.sum) != (outside.count, outside.sum) {
        return Err(io::Error::other(format!(
            "{}: inside {inside:?} is not the work outside {outside:?}",
            pair.name
        )));
    }
    Ok((inside.nanoseconds as f64, outside.nanoseconds as f64))
}

fn report(pairs: &[Pair], found: Vec<[Samples; 3]>) -> ReportSection {
    let mut part = ReportSection::default();
    let mut rows = Vec::new();
    for (pair, [inside, outside, ratios]) in pairs.iter().zip(found) {
        let percent = ratios.median().map(|ratio| ratio * 100.0);
        let note = percent.map_or(String::new(), |percent| format!("inside is {percent:.1} % of outside"));
        rows.push(Row { name: format!("{}, outside", pair.name), samples: outside, note: String::new() });
        rows.push(Row { name: format!("{}, inside", pair.name), samples: inside, note });
        let promise = format!("{}: speed inside of outside", pair.name);
        part.bars.push(Bar {
            promise,
            found: percent,
            bound: Bound::AtLeast(pair.least_percent),
            unit: " %",
        });
    }
    part.tables.push(ReportTable::times("Work inside and outside", &[], rows));
    part
}
