//! The command line of the bench.

use std::path::PathBuf;

/// The help text.
pub const HELP: &str = "\
Measure pal and the peers that are installed, interleaved, and judge the bars.

Usage: cargo run --release -p bench -- [OPTIONS]

  --quick          a tenth of the rounds, to see that everything works
  --rounds N       rounds of the cheap measurements (200)
  --bodies N       idle Bodies at once (500)
  --only NAME      one section: run, library, exec, throughput, idle, work, server, microvm, agent; may be repeated
  --json FILE      write every number
  --save FILE      write the tables as Markdown
  --data DIR       keep Bodies below DIR, which must not exist (a fresh one in /var/tmp)
  --vm DIR         take the parts of microVMs from the data directory DIR, instead of setting them up
  --as-user UID    run again as that user, through setpriv
  --strict         fail when a bar is missed
";

/// The mode of this process.
pub enum BenchCommand {
    /// Print the help.
    Help,
    /// Run the measured workload.
    Work(Vec<String>),
    /// Measure.
    Bench(BenchArgs),
}

/// The options of a measurement.
#[derive(Debug, Clone)]
pub struct BenchArgs {
    /// Rounds of a contender that takes milliseconds.
    pub rounds: usize,
    /// Number of idle Bodies.
    pub bodies: usize,
    /// Whether to measure a tenth of everything.
    pub quick: bool,
    /// Sections; empty for all.
    pub only: Vec<String>,
    /// The file for all numbers.
    pub json: Option<PathBuf>,
    /// The file for the tables.
    pub save: Option<PathBuf>,
    /// The data directory.
    pub data: Option<PathBuf>,
    /// A data directory with a finished microVM setup.
    pub vm: Option<PathBuf>,
    /// The user that measures.
    pub as_user: Option<u32>,
    /// Whether a missed bar is a failure.
    pub strict: bool,
}

impl BenchArgs {
    /// Whether a section is selected.
    pub fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// A count, reduced for a quick run.
    pub fn scaled(&self, count: usize) -> usize {
        if self.quick { (count / 10).max(3) } else { count }
    }
}

/// Parses the command line.
pub fn parse(words: impl Iterator<Item = String>) -> Result<BenchCommand, String> {
    let mut words = words.peekable();
    if words.next_if(|word| word == "--work").is_some() {
        return Ok(BenchCommand::Work(words.collect()));
    }
    let mut args = BenchArgs {
        rounds: 200,
        bodies: 500,
        quick: false,
        only: Vec::new(),
        json: None,
        save: None,
        data: None,
        vm: None,
        as_user: None,
        strict: false,
    };
    let (mut rounds, mut bodies) = (None, None);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--help" | "-h" => return Ok(BenchCommand::Help),
            "--quick" => args.quick = true,
            "--strict" => args.strict = true,
            "--rounds" => rounds = Some(number(&value()?)?),
            "--bodies" => bodies = Some(number(&value()?)?),
            "--only" => args.only.push(section(value()?)?),
            "--json" => args.json = Some(value()?.into()),
            "--save" => args.save = Some(value()?.into()),
            "--data" => args.data = Some(value()?.into()),
            "--vm" => args.vm = Some(value()?.into()),
            "--as-user" => args.as_user = Some(number(&value()?)? as u32),
            other => return Err(format!("there is no option {other}")),
        }
    }
    args.rounds = rounds.unwrap_or(args.scaled(args.rounds));
    args.bodies = bodies.unwrap_or(args.scaled(args.bodies));
    Ok(BenchCommand::Bench(args))
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number > 0).ok_or(format!("{text:?} is not a number above zero"))
}

fn section(name: String) -> Result<String, String> {
    match crate::sections::ALL.iter().any(|section| section.name == name) {
        true => Ok(name),
        false => Err(format!("there is no section {name}")),
    }
}
