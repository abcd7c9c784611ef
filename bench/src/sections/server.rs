//! `pal serve` as its clients see it: over loopback, with the requests of E2B's SDKs.

use std::{
    fs,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    client::{Client, TerminalClient},
    context::BenchContext,
    memory,
    report::{Bar, Bound, ReportSection, ReportTable, Row, Unit},
    stats::Samples,
    tested_server::TestedServer,
};

const CLIENTS: usize = 4;
const BODIES: usize = 200;
const FILE_LEN: u64 = 1 << 30;
const MIB: f64 = (1 << 20) as f64;

/// A sandbox, as the SDK describes it.
struct SandboxInfo {
    id: String,
    token: String,
}

impl SandboxInfo {
    fn create(client: &mut Client) -> io::Result<Self> {
        let said = client.ask(
            "POST",
            "/v2/sandboxes",
            &[("Content-Type", "application/json")],
            br#"{"templateID":"host","timeout":600}"#,
        )?;
        let said: Value = serde_json::from_slice(&said)?;
        let text = |name: &str| said[name].as_str().unwrap_or_default().to_owned();
        Ok(Self { id: text("sandboxID"), token: text("envdAccessToken") })
    }

    fn headers<'a>(&'a self, kind: &'a str) -> [(&'a str, &'a str); 5] {
        let json = ("Connect-Protocol-Version", "1");
        [
            ("E2b-Sandbox-Id", &self.id),
            ("E2b-Sandbox-Port", "49983"),
            ("X-Access-Token", &self.token),
            ("Content-Type", kind),
            json,
        ]
    }

    /// `commands.run`, as the SDKs send it.
    fn run(&self, client: &mut Client, command: &str) -> io::Result<()> {
        let start =
            json!({ "process": { "cmd": "/bin/bash", "args": ["-l", "-c", command] }, "stdin": false })
                .to_string();
        let mut body = vec![0];
        body.extend_from_slice(&(start.len() as u32).to_be_bytes());
        body.extend_from_slice(start.as_bytes());
        let said =
            client.ask("POST", "/process.Process/Start", &self.headers("application/connect+json"), &body)?;
        let ended = said.windows(9).any(|part| part == b"\"exited\":");
        if ended {
            Ok(())
        } else {
            Err(io::Error::other(format!("the command did not end: {}", String::from_utf8_lossy(&said))))
        }
    }

    fn kill(&self, client: &mut Client) -> io::Result<()> {
        client.ask("DELETE", &format!("/sandboxes/{}", self.id), &[], b"").map(drop)
    }
}

/// Measures everything about the server.
pub fn measure(context: &BenchContext) -> io::Result<ReportSection> {
    let served = TestedServer::start(context)?;
    let mut part = ReportSection::default();
    lives(context, &served, &mut part)?;
    commands(context, &served, &mut part)?;
    files(context, &served, &mut part)?;
    crowd(context, &served, &mut part)?;
    Ok(part)
}

fn row(name: &str, samples: Samples, note: &str) -> Row {
    Row { name: name.into(), samples, note: note.into() }
}

fn milliseconds(samples: &Samples, part: f64) -> Option<f64> {
    samples.quantile(part).map(|nanoseconds| nanoseconds / 1e6)
}

fn bar(promise: &str, found: Option<f64>, bound: Bound, unit: &'static str) -> Bar {
    Bar { promise: promise.into(), found, bound, unit }
}

/// Create, first command, kill: in sequence, and by four clients at once.
fn lives(context: &BenchContext, served: &TestedServer, part: &mut ReportSection) -> io::Result<()> {
    let rounds = context.args.rounds;
    let mut client = served.client()?;
    let (mut first, mut whole) = (Samples::default(), Samples::default());
    for round in 0..rounds + 3 {
        let began = Instant::now();
        let sandbox = SandboxInfo::create(&mut client)?;
        sandbox.run(&mut client, "echo hi")?;
        let command = began.elapsed();
        sandbox.kill(&mut client)?;
        if round >= 3 {
            first.push_time(command);
            whole.push_time(began.elapsed());
        }
    }
    let began = Instant::now();
    let crowd: Vec<io::Result<Vec<Duration>>> = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(|| live_on(served, rounds / 2))).collect();
        clients
            .into_iter()
            .map(|client| client.join().unwrap_or_else(|_| Err(io::Error::other("a client was lost"))))
            .collect()
    });
    let took = began.elapsed();
    let mut together = Samples::default();
    for times in crowd {
        times?.into_iter().for_each(|time| together.push_time(time));
    }
    let rate = together.count() as f64 / took.as_secs_f64();
    let p99 = |samples: &Samples| format!("p99 {:.2} ms", milliseconds(samples, 0.99).unwrap_or_default());
    part.bars.push(bar(
        "create → first command, one client, p50",
        milliseconds(&first, 0.5),
        Bound::AtMost(15.0),
        " ms",
    ));
    part.bars.push(bar(
        "create → first command, one client, p99",
        milliseconds(&first, 0.99),
        Bound::AtMost(60.0),
        " ms",
    ));
    let (first_note, whole_note, together_note) =
        (p99(&first), p99(&whole), format!("{}; {rate:.0} a second", p99(&together)));
    let rows = vec![
        row("create → first command", first, &first_note),
        row("create → first command → kill", whole, &whole_note),
        row("the same by 4 clients at once", together, &together_note),
    ];
    part.tables.push(ReportTable::times("Sandboxes through `pal serve`, in the SDK's protocol", &[], rows));
    Ok(())
}

fn live_on(served: &TestedServer, rounds: usize) -> io::Result<Vec<Duration>> {
    let mut client = served.client()?;
    let live = |_| {
        let began = Instant::now();
        let sandbox = SandboxInfo::create(&mut client)?;
        sandbox.run(&mut client, "echo hi")?;
        sandbox.kill(&mut client)?;
        Ok(began.elapsed())
    };
    (0..rounds).map(live).collect()
}

/// Round trips of a command and of a key press.
fn commands(context: &BenchContext, served: &TestedServer, part: &mut ReportSection) -> io::Result<()> {
    let mut client = served.client()?;
    let sandbox = SandboxInfo::create(&mut client)?;
    let (mut exec, mut shell, mut echo) = (Samples::default(), Samples::default(), Samples::default());
    let json = [("Content-Type", "application/json")];
    let path = format!("/v1/bodies/{}/exec", sandbox.id);
    for round in 0..context.args.rounds + 3 {
        let began = Instant::now();
        client.ask("POST", &path, &json, br#"{"argv":["true"]}"#)?;
        let native = began.elapsed();
        let began = Instant::now();
        sandbox.run(&mut client, "true")?;
        if round >= 3 {
            exec.push_time(native);
            shell.push_time(began.elapsed());
        }
    }
    let mut terminal = TerminalClient::open(
        served.address,
        &served.key,
        &sandbox.id,
        "command=stty%20raw%20-echo;%20echo%20ready;%20exec%20cat",
    )?;
    terminal.until("ready")?;
    for _ in 0..context.args.rounds * 5 {
        let began = Instant::now();
        terminal.type_in("x")?;
        terminal.until("x")?;
        echo.push_time(began.elapsed());
    }
    drop(terminal);
    sandbox.kill(&mut client)?;
    part.bars.push(bar(
        "exec round trip through the server, p50",
        milliseconds(&exec, 0.5),
        Bound::AtMost(4.0),
        " ms",
    ));
    part.bars.push(bar(
        "PTY echo through the server, p99",
        milliseconds(&echo, 0.99),
        Bound::AtMost(10.0),
        " ms",
    ));
    let note = format!("p99 {:.2} ms", milliseconds(&echo, 0.99).unwrap_or_default());
    let rows = vec![
        row("`true`, native API", exec, ""),
        row("`bash -l -c true`, as the SDKs send it", shell, ""),
        row("one key through a PTY and back", echo, &note),
    ];
    part.tables.push(ReportTable::times("Round trips through `pal serve`", &[], rows));
    Ok(())
}

/// A large file up and down, compared with a plain copy over loopback.
fn files(context: &BenchContext, served: &TestedServer, part: &mut ReportSection) -> io::Result<()> {
    let bytes = if context.args.quick { FILE_LEN / 8 } else { FILE_LEN };
    let mut client = served.client()?;
    let sandbox = SandboxInfo::create(&mut client)?;
    let headers = sandbox.headers("application/octet-stream");
    let rate = |took: Duration| bytes as f64 / MIB / took.as_secs_f64();
    let mut rates: [Samples; 4] = Default::default();
    let dir = context.dir("copy")?;
    for _ in 0..3 {
        let path = "/files?path=/home/user/large&username=user";
        let began = Instant::now();
        client.send(path, &headers, bytes)?;
        rates[0].push(rate(began.elapsed()));
        rates[1].push(rate(loopback(bytes, Some(&dir.join("large")), None)?));
        let began = Instant::now();
        client.receive(path, &headers)?;
        rates[2].push(rate(began.elapsed()));
        rates[3].push(rate(loopback(bytes, None, Some(&dir.join("large")))?));
    }
    sandbox.kill(&mut client)?;
    let [up, plain_up, down, plain_down] = rates;
    let share = |one: &Samples, other: &Samples| Some(one.median()? / other.median()? * 100.0);
    part.bars.push(bar(
        "upload of a large file against a plain loopback copy",
        share(&up, &plain_up),
        Bound::AtLeast(50.0),
        " %",
    ));
    part.bars.push(bar(
        "download of a large file against a plain loopback copy",
        share(&down, &plain_down),
        Bound::AtLeast(50.0),
        " %",
    ));
    let rows = vec![
        row("upload", up, ""),
        row("plain loopback into a file", plain_up, ""),
        row("download", down, ""),
        row("plain loopback out of a file", plain_down, ""),
    ];
    part.tables.push(ReportTable {
        title: format!("{} MiB through `pal serve`, in MiB a second", bytes >> 20),
        unit: Unit::Rate,
        against: Vec::new(),
        rows,
        absent: Vec::new(),
    });
    Ok(())
}

/// Sends over loopback, from memory or a file, to a file or nowhere.
fn loopback(bytes: u64, to: Option<&Path>, from: Option<&Path>) -> io::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut source: Box<dyn Read + Send> = match from {
        Some(path) => Box::new(fs::File::open(path)?),
        None => Box::new(io::repeat(0).take(bytes)),
    };
    let began = Instant::now();
    thread::scope(|scope| {
        let sender = scope.spawn(move || -> io::Result<()> {
            let mut stream = TcpStream::connect(address)?;
            let mut piece = vec![0; 1 << 16];
            loop {
                match source.read(&mut piece)? {
                    0 => return Ok(()),
                    read => stream.write_all(&piece[..read])?,
                }
            }
        });
        let (mut stream, _) = listener.accept()?;
        let mut target: Box<dyn Write> = match to {
            Some(path) => Box::new(fs::File::create(path)?),
            None => Box::new(io::sink()),
        };
        let mut piece = vec![0; 1 << 16];
        loop {
            match stream.read(&mut piece)? {
                0 => break,
                read => target.write_all(&piece[..read])?,
            }
        }
        sender.join().unwrap_or_else(|_| Err(io::Error::other("the sender was lost")))
    })?;
    Ok(began.elapsed())
}

/// Many Bodies at once, each with a terminal and a viewer.
fn crowd(context: &BenchContext, served: &TestedServer, part: &mut ReportSection) -> io::Result<()> {
    let count = if context.args.quick { BODIES / 10 } else { BODIES };
    let mut client = served.client()?;
    let (mut sandboxes, mut terminals) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for _ in 0..count {
        let sandbox = SandboxInfo::create(&mut client)?;
        let mut terminal =
            TerminalClient::open(served.address, &served.key, &sandbox.id, "command=exec%20sh")?;
        terminal.type_in("echo re''ady\n")?;
        terminal.until("ready")?;
        terminals.push(terminal);
        sandboxes.push(sandbox);
    }
    let took = began.elapsed();
    thread::sleep(Duration::from_secs(2));
    let server = memory::pss(served.pid())?;
    let fleet = fleet::Fleet::open(fleet::FleetConfig {
        data: context.data.clone(),
        durability: fleet::Durability::Process,
    })
    .map_err(io::Error::other)?;
    let guests: Vec<i32> =
        fleet.list().map_err(io::Error::other)?.into_iter().filter_map(|view| view.pid).collect();
    let held = |pid: &i32| {
        memory::pss(*pid).unwrap_or(0)
            + memory::parent(*pid).and_then(|supervisor| memory::pss(supervisor).ok()).unwrap_or(0)
    };
    let of_guests: u64 = guests.iter().map(held).sum();
    let mut echo = Samples::default();
    for terminal in &mut terminals {
        let began = Instant::now();
        terminal.type_in("x")?;
        terminal.until("x")?;
        echo.push_time(began.elapsed());
    }
    drop(terminals);
    for sandbox in &sandboxes {
        sandbox.kill(&mut client)?;
    }
    let total = (server + of_guests) as f64 / MIB;
    part.bars.push(bar(
        "200 Bodies with a PTY each: server, guests and keepers together",
        (count == BODIES).then_some(total),
        Bound::AtMost(600.0),
        " MiB",
    ));
    let one = |bytes: u64| {
        let mut samples = Samples::default();
        samples.push(bytes as f64);
        samples
    };
    let rows = vec![
        row("server", one(server), &format!("{count} made in {:.1} s", took.as_secs_f64())),
        row("guests and keepers", one(of_guests), &format!("{} Bodies", guests.len())),
    ];
    part.tables.push(ReportTable {
        title: format!("{count} Bodies at once, each with a PTY"),
        unit: Unit::Bytes,
        against: Vec::new(),
        rows,
        absent: Vec::new(),
    });
    part.tables.push(ReportTable::times(
        "… and one key through each PTY and back",
        &[],
        vec![row("echo", echo, "")],
    ));
    Ok(())
}
