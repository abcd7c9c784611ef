//! Transcripts of the command line that need no Body: arguments in, text and exit status out.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

/// The data directory of one test, removed at its end.
struct Data(PathBuf);

impl Data {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("pal-cli-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(name);
        fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    fn pal<S: AsRef<OsStr>>(&self, args: &[S]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_pal"))
            .args(args)
            .env("PAL_DATA", self.0.join("data"))
            .env_remove("PAL_DURABILITY")
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Exit status, standard output and standard error as one text.
    fn transcript(&self, line: &str) -> String {
        let args: Vec<&str> = line.split_whitespace().collect();
        let output = self.pal(&args);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        format!(
            "$ pal {line}\n{}{}[{}]",
            text(&output.stdout),
            text(&output.stderr),
            output.status.code().unwrap()
        )
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn check(expected: &str) {
    let data = Data::new();
    let line = expected.lines().next().unwrap().strip_prefix("$ pal ").unwrap();
    assert_eq!(data.transcript(line), expected);
    assert!(!data.0.join("data").exists(), "a typing error left a data directory behind");
}

#[test]
fn a_misspelt_flag_is_met_with_the_right_one() {
    check(
        "$ pal rm --forc x\nerror: unexpected argument '--forc' found\n  hint: a similar argument exists: `--force`\n  \
         hint: usage: pal rm --force <BODY>...\n  hint: see `pal rm --help`\n[2]",
    );
}

#[test]
fn an_unknown_verb_is_a_usage_failure() {
    check(
        "$ pal fly\nerror: unrecognized subcommand 'fly'\n  hint: usage: pal [OPTIONS] <COMMAND>\n  \
         hint: see `pal --help`\n[2]",
    );
}

#[test]
fn a_command_must_be_named() {
    check(
        "$ pal run\nerror: the following required arguments were not provided: <CMD>...\n  \
         hint: usage: pal run [OPTIONS] -- <CMD>...\n  hint: see `pal run --help`\n[2]",
    );
}

#[test]
fn a_network_that_means_nothing_is_refused() {
    check(
        "$ pal create --net registry\nerror: invalid value 'registry' for '--net <PRESET>': there is no network preset \
         \"registry\": the presets are closed, registries, models, git, research, open; to allow one host: --allow HOST:PORT\n  \
         hint: see `pal create --help`\n[2]",
    );
    let rule = "write a name and a port such as `pypi.org:443`, `*.example.org:443` or `db.example.org:5432`, followed by \
                `+private` for a host of your own network, or `+plain` for plain http";
    check(&format!(
        "$ pal net allow k3v9 https://pypi.org\nerror: invalid value 'https://pypi.org' for '<TARGET>...': \
         \"https://pypi.org\" is not a rule: {rule}\n  hint: see `pal net --help`\n[2]"
    ));
}

#[test]
fn limits_that_mean_nothing_are_refused() {
    let bad = |flag: &str, value: &str, name: &str, why: &str| {
        check(&format!(
            "$ pal create {flag} {value}\nerror: invalid value '{value}' for '{flag} <{name}>': {why}\n  \
             hint: see `pal create --help`\n[2]"
        ));
    };
    let size = "write a positive whole number with B, KiB, MiB, GiB or TiB, such as 512MiB";
    bad("--memory", "lots", "SIZE", &format!("\"lots\" is not a size: {size}"));
    bad("--memory", "-1", "SIZE", &format!("\"-1\" is not a size: {size}"));
    bad("--disk", "0", "SIZE", "a limit of 0 is too small; write a size such as 512MiB");
    let cpus = "write a positive number of CPUs with up to three decimals, such as 1.5";
    bad("--cpus", "0", "COUNT", cpus);
    bad("--cpus", "-2", "COUNT", cpus);
    bad("--pids", "0", "COUNT", "write a positive whole number");
    bad("--files", "x", "COUNT", "write a positive whole number");
    bad("--timeout", "10", "DURATION", "write a whole number and ms, s, m or h, such as 90s");
    bad("--timeout", "0s", "DURATION", "a duration of 0 is too short; write one such as 90s");
    bad("--timeout", "9999999h", "DURATION", "longer than 8760 hours");
    bad(
        "--layer",
        "paper",
        "LAYER",
        "there is no layer \"paper\"; the layers are process, container, wasm, microvm",
    );
    let mount = "SRC:DST[:ro|rw|rw,unprotected][,type=virtiofs]";
    bad(
        "--mount",
        "/a",
        mount,
        "write SRC:DST, SRC:DST:ro or SRC:DST:rw; a path with a colon cannot be mounted",
    );
    bad("--mount", "/a:b", mount, "the path in the Body must be absolute, and \"b\" is not");
    bad("--mount", "/a:/b:rx", mount, "a mount ends with :ro, :rw or :rw,unprotected");
    bad("--mount", "/a:/b,type=9p", mount, "a directory is shared by: virtiofs");
    bad("--env", "NAME", "NAME=VALUE", "write NAME=VALUE");
}

#[test]
fn a_name_that_cannot_be_one_is_refused_with_its_grammar() {
    for name in ["Web", "a_b", "a.b", "-", "a-"] {
        check(&format!(
            "$ pal create --name={name}\nerror: invalid value '{name}' for '--name <NAME>': \"{name}\" cannot name a Body: \
             a name is 1 to 63 of a-z, 0-9 and `-`, and neither begins nor ends with `-`\n  \
             hint: see `pal create --help`\n[2]"
        ));
    }
    check(
        "$ pal limit x\nerror: the following required arguments were not provided: \
         <--memory <SIZE>|--cpus <COUNT>|--pids <COUNT>|--disk <SIZE>|--inodes <COUNT>|--timeout <DURATION>>\n  \
         hint: usage: pal limit <--memory <SIZE>|--cpus <COUNT>|--pids <COUNT>|--disk <SIZE>|--inodes <COUNT>|--timeout <DURATION>> <BODY>\n  \
         hint: see `pal limit --help`\n[2]",
    );
}

#[test]
fn more_forks_than_anybody_means_are_refused() {
    check(
        "$ pal fork x -n 0\nerror: invalid value '0' for '--count <COUNT>': write a whole number from 1 to 1000\n  \
         hint: see `pal fork --help`\n[2]",
    );
}

#[test]
fn a_terminal_is_asked_for_where_there_is_none() {
    check(
        "$ pal run -it -- sh\nerror: -t needs a terminal, and standard input is not one\n  \
         hint: leave out -t: a pipe gets bytes; -i passes standard input in\n[2]",
    );
}

#[test]
fn every_mount_has_a_type_or_none_has() {
    check_data(
        "$ pal create --mount /a:/b --mount /c:/d,type=virtiofs\nerror: some mounts have a type and the mount of /a \
         has none\n  hint: name the type of every mount: --mount SRC:DST,type=virtiofs\n[2]",
    );
}

#[test]
fn a_copy_has_one_side_in_a_body() {
    check(
        "$ pal cp /a /b\nerror: neither side is in a Body\n  hint: write a path in a Body as BODY:PATH\n[2]",
    );
    check(
        "$ pal cp a:/b c:/d\nerror: both sides are in Bodies\n  hint: copy to the host first, then into the other Body\n[2]",
    );
    check("$ pal cp a: /b\nerror: no path in body a is named\n  hint: write one: a:/tmp\n[2]");
}

#[test]
fn arguments_are_text() {
    let data = Data::new();
    let output = data.pal(&[OsStr::new("run"), OsStr::new("--"), OsStr::from_bytes(b"\xff")]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "error: an argument is not valid UTF-8\n  hint: arguments must be text: pass bytes through standard \
         input, or in a file copied with `pal cp`\n"
    );
}

#[test]
fn programs_are_told_in_json() {
    check(
        "$ pal --json stop --grace soon x\n{\"error\":{\"causes\":[],\"hints\":[\"see `pal stop --help`\"],\
         \"kind\":\"usage\",\"message\":\"invalid value 'soon' for '--grace <DURATION>': write a whole number and ms, \
         s, m or h, such as 90s\"}}\n[2]",
    );
}

#[test]
fn the_version_is_data() {
    check(concat!("$ pal --version\npal ", env!("CARGO_PKG_VERSION"), "\n[0]"));
}

/// Checks a transcript of a command that opens the data directory.
fn check_data(expected: &str) {
    let line = expected.lines().next().unwrap().strip_prefix("$ pal ").unwrap();
    assert_eq!(Data::new().transcript(line), expected);
}

#[test]
fn nothing_is_said_of_nothing_but_how_to_begin() {
    check_data("$ pal ls\nno Bodies\n  hint: create one with `pal create`\n[0]");
    check_data("$ pal ls --json\n[0]");
    check_data("$ pal snapshot ls\nno snapshots\n  hint: take one with `pal snapshot BODY`\n[0]");
    check_data("$ pal snapshot ls --json\n[0]");
    check_data(
        "$ pal home ls\nno homes\n  hint: create one with `pal up --home NAME`; removing the Body keeps it\n[0]",
    );
    check_data("$ pal home ls --json\n[0]");
    check_data("$ pal events\n[0]");
    check_data("$ pal gc --dry-run\nwould remove 0 things, 0B\n[0]");
}

#[test]
fn an_unknown_body_is_not_found_by_any_verb() {
    let data = Data::new();
    for line in [
        "exec nobody -- true",
        "shell nobody",
        "inspect nobody",
        "ps nobody",
        "limit nobody --pids 10",
        "logs nobody",
        "cp nobody:/etc/passwd /tmp/nowhere",
        "start nobody",
        "stop nobody",
        "pause nobody",
        "pause --swap nobody",
        "suspend nobody",
        "save nobody",
        "prepare nobody",
        "wip nobody",
        "resume nobody",
        "rm nobody",
        "snapshot nobody",
        "fork nobody",
        "events --body nobody",
        "create --template nothing",
        "snapshot rm nothing",
        "snapshots --rm nothing",
        "home rm nothing",
        "homes --rm nothing",
    ] {
        let said = data.transcript(line);
        assert!(said.contains("\nerror: there is no ") && said.contains("\n  hint: "), "{said}");
        assert!(said.ends_with("[121]"), "{said}");
    }
}

#[test]
fn limits_beyond_the_host_are_refused() {
    let data = Data::new();
    for line in
        ["create --memory 100TiB", "create --cpus 100000", "create --memory 1B", "run --pids 1 -- true"]
    {
        let said = data.transcript(line);
        assert!(said.contains("\nerror: ") && said.contains("\n  hint: ") && said.ends_with("[2]"), "{said}");
    }
}

#[test]
fn one_unknown_body_does_not_hide_another() {
    let said = Data::new().transcript("rm nobody noone");
    assert!(said.contains("nobody") && said.matches("\nerror: ").count() == 2, "{said}");
}

#[test]
fn a_data_directory_that_cannot_be_used_is_told_with_a_hint() {
    let data = Data::new();
    fs::write(data.0.join("data"), "a file").unwrap();
    let said = data.transcript("ls");
    let dir = data.0.join("data");
    let expected = format!(
        "$ pal ls\nerror: {} is not a directory\n  hint: choose another: --data DIR\n[2]",
        dir.display()
    );
    assert_eq!(said, expected);
    let said = data.transcript("ls --durability luck");
    assert!(said.contains("write power (survives power loss) or process (survives kill -9)"), "{said}");
}

/// Every command, so that each one has help.
const VERBS: [&str; 41] = [
    "up",
    "prepare",
    "run",
    "create",
    "exec",
    "shell",
    "ls",
    "inspect",
    "ps",
    "limit",
    "net",
    "port",
    "secret",
    "logs",
    "diff",
    "log",
    "compare",
    "land",
    "sync",
    "save",
    "cp",
    "start",
    "stop",
    "pause",
    "suspend",
    "resume",
    "rm",
    "snapshot",
    "home",
    "fork",
    "template",
    "setup",
    "events",
    "doctor",
    "gc",
    "df",
    "config",
    "agent",
    "serve",
    "keys",
    "completions",
];

#[test]
fn every_verb_has_help_with_an_example() {
    let data = Data::new();
    for verb in VERBS {
        let output = data.pal(&[verb, "--help"]);
        let help = String::from_utf8(output.stdout).unwrap();
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0), "{verb}");
        assert!(help.contains(&format!("\nExample: pal {verb}")), "{verb}: {help}");
        assert!(help.contains(&format!("\nUsage: pal {verb}")), "{verb}: {help}");
    }
}

#[test]
fn the_help_lists_every_verb() {
    let output = Data::new().pal(&["--help"]);
    let help = String::from_utf8(output.stdout).unwrap();
    let verb =
        |line: &str| line.strip_prefix("  ").and_then(|line| line.split(' ').next()).map(str::to_owned);
    let listed: Vec<String> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(verb)
        .filter(|verb| !verb.is_empty())
        .collect();
    assert_eq!(listed, VERBS);
}

#[test]
fn every_shell_has_completions() {
    let data = Data::new();
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = data.pal(&["completions", shell]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0), "{shell}");
        assert!(text.contains("snapshot") && !text.contains("__restore-tty"), "{shell}");
    }
}

#[test]
fn a_reader_that_goes_away_ends_us_without_a_word() {
    let (reader, writer) = std::io::pipe().unwrap();
    // Close it before the start: the output fits into the pipe, so `pal` could end before a later close.
    drop(reader);
    let output = Command::new(env!("CARGO_BIN_EXE_pal"))
        .args(["completions", "bash"])
        .stdout(writer)
        .output()
        .unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(141), vec![]));
}

#[test]
fn a_full_disk_under_standard_output_is_told() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_pal")).args(["completions", "bash"]).stdout(full).output().unwrap();
    assert_eq!(
        (output.status.code(), String::from_utf8(output.stderr).unwrap().as_str()),
        (
            Some(125),
            "error: cannot write to standard output\n  caused by: No space left on device (os error 28)\n"
        )
    );
}

#[test]
fn the_reference_of_the_api_names_options_that_are_there() {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/api.md")).unwrap();
    let help: String =
        ["serve --help", "keys create --help"].map(|line| Data::new().transcript(line)).concat();
    let options = |text: &str| -> BTreeSet<String> {
        let name =
            |rest: &str| rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap().to_owned();
        text.split("--")
            .skip(1)
            .map(name)
            .filter(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
            .collect()
    };
    let unknown: Vec<String> = options(&page).difference(&options(&help)).cloned().collect();
    assert_eq!(unknown, Vec::<String>::new(), "the page names options that `pal` does not have");
    // An option that changes where telemetry goes is a statement of that page; it once said there was none.
    assert!(options(&page).contains("otlp") && !page.contains("no OpenTelemetry"), "{:?}", options(&page));
}
