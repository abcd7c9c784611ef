//! Tables and bars, and their output.

use std::{fmt::Write, io};

use serde_json::{Value, json};

use crate::stats::Samples;

/// The results of one run.
pub struct BenchReport {
    /// The host, as pairs of name and value.
    pub machine: Vec<(&'static str, String)>,
    /// One part for each section.
    pub parts: Vec<ReportSection>,
}

/// The results of one section.
#[derive(Default)]
pub struct ReportSection {
    /// Tables.
    pub tables: Vec<ReportTable>,
    /// Bars.
    pub bars: Vec<Bar>,
}

/// One table.
pub struct ReportTable {
    /// Its title.
    pub title: String,
    /// The unit of its numbers.
    pub unit: Unit,
    /// The rows that ratios refer to, by name.
    pub against: Vec<&'static str>,
    /// Rows.
    pub rows: Vec<Row>,
    /// Missing peers, and why.
    pub absent: Vec<(String, String)>,
}

/// The unit of a table's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds, printed as milliseconds.
    Time,
    /// Actions per second.
    Rate,
    /// Bytes, printed as MiB.
    Bytes,
    /// Hundredth parts.
    Percent,
}

/// One row.
#[derive(Debug, Clone)]
pub struct Row {
    /// The name.
    pub name: String,
    /// The measurements.
    pub samples: Samples,
    /// A note.
    pub note: String,
}

/// One bar.
pub struct Bar {
    /// The promise.
    pub promise: String,
    /// The measured value; none if it could not be measured.
    pub found: Option<f64>,
    /// The allowed range.
    pub bound: Bound,
    /// The unit, appended to numbers.
    pub unit: &'static str,
}

/// The allowed range of a bar.
#[derive(Debug, Clone, Copy)]
pub enum Bound {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
}

impl Bar {
    fn verdict(&self) -> &'static str {
        match (self.found, self.bound) {
            (None, _) => "NOT MEASURED",
            (Some(found), Bound::AtMost(most)) if found <= most => "PASS",
            (Some(found), Bound::AtLeast(least)) if found >= least => "PASS",
            _ => "MISS",
        }
    }

    fn line(&self) -> String {
        let Bar { promise, unit, .. } = self;
        let (sign, limit) = match self.bound {
            Bound::AtMost(most) => ("≤", most),
            Bound::AtLeast(least) => ("≥", least),
        };
        let found = self.found.map_or("–".into(), |found| format!("{found:.2}{unit}"));
        format!("| {} | {promise} | {found} | {sign} {limit}{unit} |\n", self.verdict())
    }
}

impl ReportTable {
    /// A table of times.
    pub fn times(title: impl Into<String>, against: &[&'static str], rows: Vec<Row>) -> Self {
        Self { title: title.into(), unit: Unit::Time, against: against.to_vec(), rows, absent: Vec::new() }
    }

    /// The median of a row.
    pub fn median(&self, name: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.name == name)?.samples.median()
    }

    /// The ratio of the medians of two rows.
    pub fn ratio(&self, name: &str, to: &str) -> Option<f64> {
        Some(self.median(name)? / self.median(to)?)
    }

    fn markdown(&self) -> String {
        let heads = match self.unit {
            Unit::Time => "median ms | p95 ms | least ms",
            Unit::Rate => "per second | best | worst",
            Unit::Bytes => "MiB | most | least",
            Unit::Percent => "% | most | least",
        };
        let ratios: String = self.against.iter().map(|to| format!(" × {to} |")).collect();
        let rules: String = self.against.iter().map(|_| " ---: |").collect();
        let mut text = format!("\n### {}\n\n| | {heads} |{ratios} n | |\n", self.title);
        let _ = writeln!(text, "| --- | ---: | ---: | ---: |{rules} ---: | --- |");
        for row in &self.rows {
            text += &self.row_markdown(row);
        }
        for (name, why) in &self.absent {
            let _ = write!(text, "\nNot measured: {name}: {why}\n");
        }
        text
    }

    fn row_markdown(&self, row: &Row) -> String {
        let samples = &row.samples;
        let numbers = match self.unit {
            Unit::Time => [samples.median(), samples.p95(), samples.least()],
            Unit::Rate | Unit::Bytes | Unit::Percent => {
                [samples.median(), samples.quantile(1.0), samples.least()]
            }
        };
        let cells: String = numbers
            .iter()
            .map(|number| format!(" {} |", number.map_or("–".into(), |n| self.show(n))))
            .collect();
        let ratio =
            |to: &&str| self.ratio(&row.name, to).map_or(" – |".into(), |ratio| format!(" {ratio:.2} |"));
        let ratios: String = self.against.iter().map(ratio).collect();
        format!("| {} |{cells}{ratios} {} | {} |\n", row.name, samples.count(), row.note)
    }

    fn show(&self, number: f64) -> String {
        match self.unit {
            Unit::Time => format!("{:.2}", number / 1e6),
            Unit::Rate => format!("{number:.0}"),
            Unit::Bytes => format!("{:.2}", number / f64::from(1 << 20)),
            Unit::Percent => format!("{number:.2}"),
        }
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|row| self.row_json(row)).collect();
        let absent: Vec<Value> =
            self.absent.iter().map(|(name, why)| json!({ "name": name, "why": why })).collect();
        let unit = match self.unit {
            Unit::Time => "ns",
            Unit::Rate => "per_second",
            Unit::Bytes => "bytes",
            Unit::Percent => "percent",
        };
        json!({ "title": self.title, "unit": unit, "rows": rows, "not_measured": absent })
    }

    fn row_json(&self, row: &Row) -> Value {
        let ratios: serde_json::Map<String, Value> =
            self.against.iter().map(|to| ((*to).to_owned(), json!(self.ratio(&row.name, to)))).collect();
        let samples = &row.samples;
        json!({
            "name": row.name, "n": samples.count(), "median": samples.median(), "p95": samples.p95(),
            "least": samples.least(), "ratio_to": ratios, "note": row.note,
        })
    }
}

impl ReportSection {
    /// Its tables as Markdown.
    pub fn markdown(&self) -> String {
        self.tables.iter().map(ReportTable::markdown).collect()
    }
}

impl BenchReport {
    /// An empty report about a host.
    pub fn new(machine: Vec<(&'static str, String)>) -> Self {
        Self { machine, parts: Vec::new() }
    }

    /// The description of the host.
    pub fn head(&self) -> String {
        let lines: String = self.machine.iter().map(|(what, how)| format!("- {what}: {how}\n")).collect();
        format!("# pal and its peers\n\n{lines}")
    }

    /// All bars as Markdown.
    pub fn bars_markdown(&self) -> String {
        let lines: String = self.bars().map(Bar::line).collect();
        format!("\n### The bars\n\n| | promise | found | bar |\n| --- | --- | ---: | ---: |\n{lines}")
    }

    /// The whole report as Markdown.
    pub fn markdown(&self) -> String {
        let parts: String = self.parts.iter().map(ReportSection::markdown).collect();
        format!("{}{}{parts}", self.head(), self.bars_markdown())
    }

    /// Every number as JSON.
    pub fn json(&self) -> io::Result<String> {
        let machine: serde_json::Map<String, Value> =
            self.machine.iter().map(|(what, how)| ((*what).to_owned(), json!(how))).collect();
        let tables: Vec<Value> =
            self.parts.iter().flat_map(|part| &part.tables).map(ReportTable::json).collect();
        let bar = |bar: &Bar| json!({ "promise": bar.promise, "found": bar.found, "verdict": bar.verdict() });
        let bars: Vec<Value> = self.bars().map(bar).collect();
        Ok(serde_json::to_string_pretty(&json!({ "machine": machine, "tables": tables, "bars": bars }))?
            + "\n")
    }

    /// Whether no bar is missed.
    pub fn all_passed(&self) -> bool {
        self.bars().all(|bar| bar.verdict() == "PASS")
    }

    fn bars(&self) -> impl Iterator<Item = &Bar> {
        self.parts.iter().flat_map(|part| &part.bars)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_judged_in_their_direction() {
        let verdict = |found, bound| Bar { promise: String::new(), found, bound, unit: "" }.verdict();
        assert_eq!(verdict(Some(1.0), Bound::AtMost(1.0)), "PASS");
        assert_eq!(verdict(Some(1.1), Bound::AtMost(1.0)), "MISS");
        assert_eq!(verdict(Some(98.0), Bound::AtLeast(98.0)), "PASS");
        assert_eq!(verdict(Some(97.9), Bound::AtLeast(98.0)), "MISS");
        assert_eq!(verdict(None, Bound::AtLeast(1.0)), "NOT MEASURED");
    }
}
