//! `pal agent` with scripted models: the overhead of tool calls, idle agents, many at once, a long log, prompt caching.
//!
//! No model is asked. Python's deepagents runs the same script in the same run.

mod calls;
mod crowd;
mod deepagents;
mod idle;
mod resume;

use std::io;

use crate::{
    context::BenchContext,
    report::{ReportSection, Row},
    stats::Samples,
};

const MIB: f64 = (1 << 20) as f64;

/// Measures everything about agents.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let mut part = ReportSection::default();
    calls::measure(context, &mut part)?;
    idle::measure(context, &mut part)?;
    crowd::measure(context, &mut part)?;
    resume::measure(context, &mut part)?;
    Ok(part)
}

fn row(name: impl Into<String>, samples: Samples, note: impl Into<String>) -> Row {
    Row { name: name.into(), samples, note: note.into() }
}

fn one(number: f64) -> Samples {
    let mut samples = Samples::default();
    samples.push(number);
    samples
}
