//! Memory of idle Bodies, single and by the hundred.

use std::{
    fs, io,
    time::{Duration, Instant},
};

use fleet::{BodyView, Create, Fleet, Force};
use tokio::runtime::Runtime;

use crate::{
    context::BenchContext,
    library::{self, failure_text},
    measure::interrupted,
    memory,
    report::{Bar, Bound, ReportSection, ReportTable, Row, Unit},
    residents,
    stats::Samples,
};

const MIB: f64 = 1048576.0;
const BODY: &str = "one Body";
/// A new Body gives memory back after it has been idle for this time.
const LEFT_ALONE: Duration = Duration::from_secs(3);

/// PSS of guest and supervisor, of peers' processes, and of many Bodies together.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let runtime = library::runtime()?;
    // Without a pool, whose processes would share pages.
    let fleet = context.plain_fleet()?;
    let mut rows = Vec::new();
    let alone = many(&runtime, &fleet, 1)?;
    rows.push(row(BODY, alone.pss.iter().copied(), "guest and keeper"));
    let crowd = many(&runtime, &fleet, context.args.bodies)?;
    rows.push(row(&format!("each of {}", crowd.made), crowd.pss.iter().copied(), "guest and keeper"));
    rows.push(row(
        &format!("the kernel's own for each of {}", crowd.made),
        [crowd.kernel],
        "slab, stacks, page tables; neighbours disturb it",
    ));
    let (residents, absent) = residents::start_all(context)?;
    for resident in &residents {
        rows.push(row(&format!("{} with `sleep`", resident.name), [resident.pss()?], "its helpers included"));
    }
    let table = ReportTable {
        title: "Idle memory (PSS)".into(),
        unit: Unit::Bytes,
        against: Vec::new(),
        rows,
        absent,
    };
    let bars = vec![
        Bar {
            promise: "an idle Body, alone".into(),
            found: table.median(BODY).map(|bytes| bytes / MIB),
            bound: Bound::AtMost(2.0),
            unit: " MiB",
        },
        Bar {
            promise: format!("idle Bodies that run at once, and answer, of {}", context.args.bodies),
            found: Some(crowd.answered as f64),
            bound: Bound::AtLeast(context.args.bodies as f64),
            unit: "",
        },
    ];
    Ok(ReportSection { tables: vec![table, times(&crowd)], bars })
}

fn row(name: &str, bytes: impl IntoIterator<Item = u64>, note: &str) -> Row {
    let mut samples = Samples::default();
    bytes.into_iter().for_each(|bytes| samples.push(bytes as f64));
    Row { name: name.into(), samples, note: note.into() }
}

fn times(crowd: &Crowd) -> ReportTable {
    let row = |name: &str, samples: &Samples| Row {
        name: name.into(),
        samples: samples.clone(),
        note: String::new(),
    };
    let rows =
        vec![row("create", &crowd.create), row("exec `true`", &crowd.exec), row("remove", &crowd.remove)];
    ReportTable::times(
        format!("Each of {} kept Bodies, one after the other, all at once there", crowd.made),
        &[],
        rows,
    )
}

/// The results of many Bodies at once.
#[derive(Default)]
struct Crowd {
    made: usize,
    answered: usize,
    pss: Vec<u64>,
    kernel: u64,
    create: Samples,
    exec: Samples,
    remove: Samples,
}

fn many(runtime: &Runtime, fleet: &Fleet, count: usize) -> io::Result<Crowd> {
    let mut crowd = Crowd::default();
    let mut views = Vec::new();
    let before = memory::of_the_kernel();
    let found = fill(runtime, fleet, count, &mut views, &mut crowd);
    crowd.kernel = memory::of_the_kernel().saturating_sub(before) / views.len().max(1) as u64;
    let found = found.and_then(|()| ask(runtime, fleet, &views, &mut crowd));
    for view in &views {
        let began = Instant::now();
        runtime.block_on(fleet.remove(view.id(), Force::Yes)).map_err(failure_text)?;
        crowd.remove.push_time(began.elapsed());
    }
    found.map(|()| crowd)
}

fn fill(
    runtime: &Runtime,
    fleet: &Fleet,
    count: usize,
    views: &mut Vec<BodyView>,
    crowd: &mut Crowd,
) -> io::Result<()> {
    while views.len() < count && !interrupted() {
        let began = Instant::now();
        views.push(runtime.block_on(fleet.create(Create::kept())).map_err(failure_text)?);
        crowd.create.push_time(began.elapsed());
        crowd.made += 1;
    }
    Ok(())
}

/// Memory is read before any command ran: an idle Body is one that was created and then left alone.
fn ask(runtime: &Runtime, fleet: &Fleet, views: &[BodyView], crowd: &mut Crowd) -> io::Result<()> {
    std::thread::sleep(LEFT_ALONE);
    for view in views {
        let guest = view.pid.ok_or_else(|| io::Error::other("a Body has no guest"))?;
        crowd.pss.push(memory::pss(guest)? + supervisor(guest).map_or(Ok(0), memory::pss)?);
    }
    for view in views {
        let began = Instant::now();
        runtime.block_on(library::exec(fleet, view.id(), &["true"]))?;
        crowd.exec.push_time(began.elapsed());
        crowd.answered += 1;
    }
    Ok(())
}

/// The guest's parent, if that is a supervisor.
fn supervisor(guest: i32) -> Option<i32> {
    let parent = memory::parent(guest)?;
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    name.starts_with("pal-").then_some(parent)
}
