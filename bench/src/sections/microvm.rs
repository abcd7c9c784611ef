//! MicroVMs: cold, warm and forked up to their first command, commands in a running one, and memory; compared
//! with a plain QEMU that boots the same kernel and initramfs up to its first process.

use std::{
    io,
    os::unix::fs::{DirBuilderExt, symlink},
    time::{Duration, Instant},
};

use fleet::{BodyView, Create, Fleet, Force, Setting};
use proto::Layer;
use tokio::runtime::Runtime;

use crate::{
    context::BenchContext,
    library::{self, failure_text},
    measure::{Contender, interleave, timed},
    memory, peers,
    plain_qemu::{KernelArguments, PlainQemu},
    report::{Bar, Bound, ReportSection, ReportTable, Row, Unit},
    stats::Samples,
};

const MIB: f64 = 1048576.0;
const PLAIN: &str = "plain QEMU to init";
const TUNED: &str = "plain QEMU to init, told what Palisade tells its kernel";
const COLD: &str = "cold boot to first exec";
const WARM: &str = "warm start to first exec, from the frozen template";
const SPARE: &str = "warm start to first exec, from a spare of a fleet that stays";
const FORK: &str = "fork to first exec";
const EXEC: &str = "exec of `true`, library";
const ROUNDS: usize = 20;
/// Forks at once.
const MANY: u32 = 20;
const CROWDS: usize = 3;
/// How long the pool may take to fill.
const SPARE_PATIENCE: Duration = Duration::from_secs(60);
/// A microVM that just answered may still be busy.
const LEFT_ALONE: Duration = Duration::from_secs(3);

/// Measures all contenders interleaved.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let runtime = library::runtime()?;
    let fleet = prepare(context)?;
    let plain = PlainQemu::prepare(context, fleet.microvms().boot_files().map_err(failure_text)?)?;
    let make = |request| runtime.block_on(fleet.create(request)).map_err(failure_text);
    let parent = make(machine())?;
    runtime.block_on(library::exec(&fleet, parent.id(), &["true"]))?;
    let starts = interleave_all(context, &runtime, &fleet, &plain, &parent)?;
    let starts = ReportTable::times("A machine to its first command", &[PLAIN, TUNED], starts);
    let execs =
        ReportTable::times("`true` in a machine that runs", &[], execs(context, &runtime, &fleet, &parent));
    let crowd = crowd(context, &runtime, &fleet, &parent)?;
    let crowd_table = ReportTable::times(format!("{MANY} forks of one machine at once"), &[], crowd.rows);
    let memory = memory(&runtime, &fleet, &parent, &crowd.memory)?;
    runtime.block_on(fleet.remove(parent.id(), Force::Yes)).map_err(failure_text)?;
    let ratio = |promise: &str, name: &str, most| Bar {
        promise: promise.into(),
        found: starts.ratio(name, PLAIN),
        bound: Bound::AtMost(most),
        unit: "×",
    };
    let bars = vec![
        ratio("boot of a microVM to its first exec against a plain boot to init", COLD, 1.3),
        ratio("start of a microVM from the pool to its first exec against a plain boot to init", SPARE, 0.15),
        ratio("start of a microVM from its boot snapshot to its first exec against a plain boot", WARM, 0.15),
        ratio("fork of a microVM to its first exec against a plain boot to init", FORK, 0.2),
        Bar {
            promise: "exec in a running microVM".into(),
            found: execs.median(EXEC).map(|ns| ns / 1e6),
            bound: Bound::AtMost(12.0),
            unit: " ms",
        },
        Bar {
            promise: format!("private memory that each of {MANY} forks adds"),
            found: memory.median(PRIVATE).map(|bytes| bytes / MIB),
            bound: Bound::AtMost(32.0),
            unit: " MiB",
        },
    ];
    Ok(ReportSection { tables: vec![starts, crowd_table, execs, memory], bars })
}

/// A fleet with a microVM setup: a new one, or that of `--vm`.
fn prepare(context: &BenchContext) -> io::Result<Fleet> {
    if let Some(elsewhere) = &context.args.vm {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&context.data)?;
        symlink(elsewhere.canonicalize()?.join("vm"), context.data.join("vm"))?;
    }
    let fleet = context.fleet()?;
    fleet.microvms().setup(None, &mut |said: &str| eprintln!("  {said}")).map_err(failure_text)?;
    if let Some(pool) = fleet.pool() {
        pool.force_refill();
    }
    // Only the contender that measures the pool has one.
    fleet.settings().set(Setting::PoolSize, "0").map_err(failure_text)?;
    Ok(fleet)
}

fn machine() -> Create {
    Create { layer: Some(Layer::Microvm), ..Create::kept() }
}

fn interleave_all(
    context: &BenchContext,
    runtime: &Runtime,
    fleet: &Fleet,
    plain: &PlainQemu,
    parent: &BodyView,
) -> io::Result<Vec<Row>> {
    let pal = peers::pal(context, &["run", "--layer", "microvm", "--", "true"]);
    let mut contenders = [
        Contender::new(PLAIN, || plain.boot(KernelArguments::Least)),
        Contender::new(TUNED, || plain.boot(KernelArguments::Same)),
        Contender::new(COLD, || first_exec(runtime, fleet, Create { cold: true, ..machine() })),
        Contender::new(WARM, || first_exec(runtime, fleet, machine())),
        Contender::new(SPARE, || from_spare(runtime, fleet)),
        Contender::new(FORK, || forks(runtime, fleet, parent, 1).map(|forked| forked.took)),
        Contender::new("pal run --layer microvm, to its end", move || pal.time()),
    ];
    // Slow contenders run as often as fast ones, because the ratios matter.
    let rounds = context.args.scaled(ROUNDS);
    let mut rows: Vec<Row> = contenders
        .iter()
        .map(|contender| Row {
            name: contender.name.clone(),
            samples: Samples::default(),
            note: String::new(),
        })
        .collect();
    for round in 0..rounds {
        for turn in 0..contenders.len() {
            let index = (turn + round) % contenders.len();
            if crate::measure::interrupted() {
                break;
            }
            match (contenders[index].once)() {
                Ok(took) => rows[index].samples.push_time(took),
                Err(error) => rows[index].note = format!("failed: {error}"),
            }
        }
    }
    Ok(rows)
}

/// With a pooled microVM; the time to fill the pool is not measured.
fn from_spare(runtime: &Runtime, fleet: &Fleet) -> io::Result<Duration> {
    fleet.settings().set(Setting::PoolSize, "1").map_err(failure_text)?;
    let measured = first_exec(runtime, fleet, machine()).and_then(|_| {
        let deadline = Instant::now() + SPARE_PATIENCE;
        while fleet.pool().is_some_and(|pool| pool.ready() == 0) {
            if Instant::now() > deadline {
                return Err(io::Error::other("no spare was made"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        runtime.block_on(async {
            let began = Instant::now();
            let view = fleet.create(machine()).await.map_err(failure_text)?;
            let ran = library::exec(fleet, view.id(), &["true"]).await;
            let took = began.elapsed();
            fleet.settings().set(Setting::PoolSize, "0").map_err(failure_text)?;
            let how = view.receipt.as_ref().map(|receipt| receipt.how.as_str());
            fleet.remove(view.id(), Force::Yes).await.map_err(failure_text)?;
            match (ran, how) {
                (Ok(_), Some("spare")) => Ok(took),
                (Ok(_), how) => Err(io::Error::other(format!("it came to be by {how:?}"))),
                (Err(error), _) => Err(error),
            }
        })
    });
    fleet.settings().set(Setting::PoolSize, "0").map_err(failure_text)?;
    measured
}

fn first_exec(runtime: &Runtime, fleet: &Fleet, request: Create) -> io::Result<Duration> {
    let life = runtime.block_on(library::live_once(fleet, request))?;
    Ok(life.create + life.exec)
}

struct ForkTimes {
    took: Duration,
    made: Duration,
    memory: MemoryTaken,
}

/// The memory of each of some microVMs.
#[derive(Default)]
struct MemoryTaken {
    private: Vec<u64>,
    pss: Vec<u64>,
}

impl MemoryTaken {
    /// Memory of idle microVMs.
    fn by(views: &[BodyView]) -> io::Result<Self> {
        std::thread::sleep(LEFT_ALONE);
        let mut taken = Self::default();
        for pid in views.iter().filter_map(|view| view.pid) {
            taken.private.push(memory::private_of_family(pid)?);
            taken.pss.push(memory::pss_of_family(pid)?);
        }
        Ok(taken)
    }
}

/// Forks a microVM, runs a command in each fork, reads their memory when they are idle, and removes them.
fn forks(runtime: &Runtime, fleet: &Fleet, parent: &BodyView, count: u32) -> io::Result<ForkTimes> {
    let began = Instant::now();
    let views = runtime.block_on(fleet.snapshots().fork(parent.id(), count)).map_err(failure_text)?;
    let made = began.elapsed();
    let ran = views
        .iter()
        .try_for_each(|view| runtime.block_on(library::exec(fleet, view.id(), &["true"])).map(drop));
    let took = began.elapsed();
    let memory = if count > 1 { MemoryTaken::by(&views)? } else { MemoryTaken::default() };
    remove_all(runtime, fleet, &views)?;
    ran.map(|()| ForkTimes { took, made, memory })
}

fn remove_all(runtime: &Runtime, fleet: &Fleet, views: &[BodyView]) -> io::Result<()> {
    views.iter().try_for_each(|view| {
        runtime.block_on(fleet.remove(view.id(), Force::Yes)).map(drop).map_err(failure_text)
    })
}

/// The memory of forks that have done nothing yet.
fn at_rest(runtime: &Runtime, fleet: &Fleet, parent: &BodyView) -> io::Result<MemoryTaken> {
    let views = runtime.block_on(fleet.snapshots().fork(parent.id(), MANY)).map_err(failure_text)?;
    let taken = MemoryTaken::by(&views)?;
    remove_all(runtime, fleet, &views)?;
    Ok(taken)
}

struct Crowd {
    rows: Vec<Row>,
    /// After the fork, and after a command in each.
    memory: [MemoryTaken; 2],
}

fn crowd(context: &BenchContext, runtime: &Runtime, fleet: &Fleet, parent: &BodyView) -> io::Result<Crowd> {
    let (mut made, mut took, mut each) = (Samples::default(), Samples::default(), Samples::default());
    let mut worked = MemoryTaken::default();
    for _ in 0..if context.args.quick { 1 } else { CROWDS } {
        let forked = forks(runtime, fleet, parent, MANY)?;
        made.push_time(forked.made);
        took.push_time(forked.took);
        each.push_time(forked.took / MANY);
        worked = forked.memory;
    }
    let row = |name: &str, samples| Row { name: name.into(), samples, note: String::new() };
    let rows = vec![
        row("until all of them run", made),
        row("until each has run a command", took),
        row("for each of them", each),
    ];
    Ok(Crowd { rows, memory: [at_rest(runtime, fleet, parent)?, worked] })
}

fn execs(context: &BenchContext, runtime: &Runtime, fleet: &Fleet, parent: &BodyView) -> Vec<Row> {
    let line = peers::pal(context, &["exec", parent.id().as_str(), "--", "true"]);
    let contenders = vec![
        Contender::new(EXEC, || {
            timed(|| runtime.block_on(library::exec(fleet, parent.id(), &["true"])).map(drop))
        }),
        Contender::new("exec of `true`, pal exec", move || line.time()),
    ];
    interleave(contenders, context.args.rounds)
}

const PRIVATE: &str = "each of the forks, private";

/// Memory of the hypervisor and of the VMM process.
fn memory(
    runtime: &Runtime,
    fleet: &Fleet,
    parent: &BodyView,
    forks: &[MemoryTaken; 2],
) -> io::Result<ReportTable> {
    let noted = |name: &str, bytes: &[u64], note: &str| {
        let mut samples = Samples::default();
        bytes.iter().for_each(|bytes| samples.push(*bytes as f64));
        Row { name: name.into(), samples, note: note.into() }
    };
    let row = |name: &str, bytes: &[u64]| noted(name, bytes, "after a command, idle");
    let [made, worked] = forks;
    let mut rows = vec![
        noted(PRIVATE, &made.private, "as it was made, idle"),
        noted("each of the forks, PSS", &made.pss, "as it was made, idle"),
        row("each of the forks after a command, private", &worked.private),
        row("each of the forks after a command, PSS", &worked.pss),
    ];
    for (name, cold) in [("cold-booted", true), ("warm-started", false)] {
        let view = runtime.block_on(fleet.create(Create { cold, ..machine() })).map_err(failure_text)?;
        runtime.block_on(library::exec(fleet, view.id(), &["true"]))?;
        std::thread::sleep(LEFT_ALONE);
        let pid = view.pid.unwrap_or_default();
        rows.push(row(&format!("one {name}, private"), &[memory::private_of_family(pid)?]));
        rows.push(row(&format!("one {name}, PSS"), &[memory::pss_of_family(pid)?]));
        runtime.block_on(fleet.remove(view.id(), Force::Yes)).map_err(failure_text)?;
    }
    let pid = parent.pid.unwrap_or_default();
    rows.push(row("the parent of the forks, private", &[memory::private_of_family(pid)?]));
    Ok(ReportTable {
        title: "Memory of machines".into(),
        unit: Unit::Bytes,
        against: Vec::new(),
        rows,
        absent: Vec::new(),
    })
}
