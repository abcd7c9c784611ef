//! Programs that start programs: what of their words is another command.
//!
//! The tables say which options of a program take the next word, because only then the place is known at which the inner
//! command begins.

use super::{Word, WordExtent};

/// A command inside of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WrappedCommand {
    /// The words of a command.
    Words(Vec<Word>),
    /// A text for the shell.
    Script(Word),
    /// The program reads a text for the shell from its input.
    Input,
    /// There is one that cannot be known.
    Unknown(&'static str),
}

/// A program whose words, after its own options, are a command.
struct Wrapper {
    names: &'static [&'static str],
    /// Options that take the next word.
    valued: &'static [&'static str],
    /// How many words stand between the options and the command.
    skipped: usize,
}

const SHELLS: &[&str] = &["sh", "bash", "dash", "zsh", "ksh", "mksh", "ash", "fish", "rbash"];

const fn wrapper(names: &'static [&'static str], valued: &'static [&'static str], skipped: usize) -> Wrapper {
    Wrapper { names, valued, skipped }
}

const WRAPPERS: &[Wrapper] = &[
    wrapper(
        &["sudo"],
        &[
            "-u", "-g", "-p", "-C", "-h", "-r", "-t", "-T", "-U", "-D", "-R", "--user", "--group", "--chdir",
            "--prompt",
        ],
        0,
    ),
    wrapper(&["doas"], &["-u", "-C"], 0),
    wrapper(&["env"], &["-u", "--unset", "-C", "--chdir"], 0),
    wrapper(&["nice"], &["-n", "--adjustment"], 0),
    wrapper(&["ionice"], &["-c", "-n", "--class", "--classdata"], 0),
    wrapper(&["timeout"], &["-k", "-s", "--kill-after", "--signal"], 1),
    wrapper(
        &["nohup", "setsid", "command", "builtin", "fakeroot", "unbuffer", "dbus-run-session", "torsocks"],
        &[],
        0,
    ),
    wrapper(&["exec"], &["-a"], 0),
    wrapper(&["time"], &["-f", "-o", "--format", "--output"], 0),
    wrapper(&["stdbuf"], &["-i", "-o", "-e", "--input", "--output", "--error"], 0),
    wrapper(&["chroot"], &["--userspec", "--groups"], 1),
    wrapper(&["unshare", "nsenter"], &["-t", "-S", "-G", "-R", "-w"], 0),
    wrapper(&["strace", "ltrace"], &["-o", "-e", "-s", "-p", "-u", "-E", "-I", "-a"], 0),
    wrapper(&["flock"], &["-w", "-E", "--timeout"], 1),
    wrapper(&["taskset"], &[], 1),
    wrapper(&["chrt"], &["-T", "-P", "-D"], 1),
    wrapper(&["runuser"], &["-u", "-g", "-G", "--user"], 0),
    wrapper(&["xvfb-run"], &["-n", "-e", "-f", "-p", "-s", "-w"], 0),
    wrapper(
        &["systemd-run"],
        &["-u", "-p", "-E", "-t", "--unit", "--property", "--setenv", "--slice", "--uid"],
        0,
    ),
    wrapper(
        &["ssh-agent", "busybox", "toybox", "catchsegv", "rlwrap", "proot", "firejail", "caffeinate"],
        &[],
        0,
    ),
];

/// Programs with a subcommand that runs a command.
const RUNNERS: &[(&str, &[&str])] = &[
    ("uv", &["run"]),
    ("poetry", &["run"]),
    ("pipenv", &["run"]),
    ("pdm", &["run"]),
    ("hatch", &["run"]),
    ("rye", &["run"]),
    ("bundle", &["exec"]),
    ("mise", &["exec", "x"]),
    ("direnv", &["exec"]),
];

/// Programs with subcommands, and those of their options before the subcommand that take the next word.
const GLOBAL_OPTIONS: &[(&[&str], &[&str])] = &[
    (
        &["git"],
        &[
            "-C",
            "-c",
            "--git-dir",
            "--work-tree",
            "--namespace",
            "--exec-path",
            "--config-env",
            "--attr-source",
        ],
    ),
    (
        &["docker", "podman", "nerdctl", "buildah", "skopeo"],
        &[
            "-H",
            "--host",
            "-c",
            "--context",
            "--config",
            "-l",
            "--log-level",
            "--connection",
            "--url",
            "--root",
            "--policy",
        ],
    ),
    (
        &["kubectl", "oc", "helm"],
        &[
            "-n",
            "--namespace",
            "--context",
            "--kubeconfig",
            "--kube-context",
            "-s",
            "--server",
            "--user",
            "--cluster",
            "--token",
            "--as",
        ],
    ),
    (
        &["npm", "pnpm", "yarn", "bun"],
        &[
            "--prefix",
            "-C",
            "--dir",
            "--cwd",
            "-w",
            "--workspace",
            "--filter",
            "-F",
            "--registry",
            "--userconfig",
            "--loglevel",
        ],
    ),
    (&["cargo"], &["-C", "--config", "-Z", "--color"]),
    (&["gh", "glab"], &["-R", "--repo"]),
    (&["aws"], &["--profile", "--region", "--output", "--endpoint-url", "--query"]),
    (&["gcloud", "gsutil", "bq"], &["--project", "--account", "--configuration", "--format"]),
    (
        &["pip", "pip3", "uv", "poetry", "twine", "hatch"],
        &["--python", "--proxy", "--cache-dir", "--directory", "--project", "-C"],
    ),
    (
        &[
            "systemctl",
            "terraform",
            "tofu",
            "pulumi",
            "heroku",
            "flyctl",
            "fly",
            "vercel",
            "netlify",
            "wrangler",
        ],
        &["-H", "--cwd", "--app", "-a", "--token"],
    ),
];

/// The commands that these words contain.
pub(super) fn find_inner(words: &[Word]) -> Vec<WrappedCommand> {
    let Some(program) = words.first().map(Word::to_program) else { return Vec::new() };
    let Some(name) = program.as_exact() else { return Vec::new() };
    let rest = &words[1..];
    if SHELLS.contains(&name) {
        return vec![shell_script(rest)].into_iter().flatten().collect();
    }
    match name {
        "eval" => eval_script(rest),
        "source" | "." if rest.first().is_some_and(|file| file.as_exact().is_none()) => {
            vec![WrappedCommand::Unknown("the script of source is computed")]
        }
        "trap" => rest
            .first()
            .filter(|word| !is_trap_word(word))
            .map(|word| WrappedCommand::Script(word.clone()))
            .into_iter()
            .collect(),
        "alias" => rest.iter().filter_map(alias_script).collect(),
        "find" | "fd" | "fdfind" => find_actions(rest),
        "xargs" | "parallel" => xargs_command(rest).into_iter().collect(),
        "watch" => watch_script(rest),
        "su" | "script" => option_script(rest),
        "env" if rest.iter().any(is_split_option) => {
            vec![WrappedCommand::Unknown("env splits a text into a command")]
        }
        _ => wrapped_command(name, rest).into_iter().collect(),
    }
}

/// The words without the options between the program and its subcommand; none if there are no such options.
pub(super) fn without_global_options(words: &[Word]) -> Option<Vec<Word>> {
    let program = words.first()?.to_program();
    let name = program.as_exact()?;
    let (_, valued) = GLOBAL_OPTIONS.iter().find(|(names, _)| names.contains(&name))?;
    let begin = skip_options(&words[1..], valued) + 1;
    (begin > 1 && begin < words.len()).then(|| [&words[..1], &words[begin..]].concat())
}

fn wrapped_command(name: &str, rest: &[Word]) -> Option<WrappedCommand> {
    if is_python(name) {
        return python_module(rest);
    }
    if let Some((_, verbs)) = RUNNERS.iter().find(|(program, _)| *program == name) {
        let verb = rest.iter().position(|word| word.as_exact().is_some_and(|text| verbs.contains(&text)))?;
        return inner_words(&rest[verb + 1..], &[], usize::from(name == "direnv"));
    }
    let wrapper = WRAPPERS.iter().find(|wrapper| wrapper.names.contains(&name))?;
    inner_words(rest, wrapper.valued, wrapper.skipped)
}

/// The command after options, assignments of variables and skipped words.
fn inner_words(rest: &[Word], valued: &[&str], skipped: usize) -> Option<WrappedCommand> {
    let mut begin = skip_options(rest, valued);
    begin += rest.get(begin..)?.iter().take_while(|word| is_assignment(word)).count();
    let inner = rest.get(begin + skipped..)?;
    (!inner.is_empty()).then(|| WrappedCommand::Words(inner.to_vec()))
}

/// How many of these words are options. A computed word is none: it may be the command.
fn skip_options(words: &[Word], valued: &[&str]) -> usize {
    let mut index = 0;
    while let Some(text) = words.get(index).and_then(Word::as_exact) {
        if text == "--" {
            return index + 1;
        }
        // `cargo +nightly` chooses a toolchain.
        if !(text.len() > 1 && text.starts_with('-') || text.len() > 1 && text.starts_with('+')) {
            break;
        }
        index += if valued.contains(&text) { 2 } else { 1 };
    }
    index.min(words.len())
}

fn is_assignment(word: &Word) -> bool {
    let name = word.head.split_once('=').map(|(name, _)| name);
    name.is_some_and(|name| {
        !name.is_empty() && name.chars().all(|letter| letter == '_' || letter.is_ascii_alphanumeric())
    })
}

/// The script of a shell: the word after `-c`, its input if it has no argument, nothing if it runs a file.
fn shell_script(rest: &[Word]) -> Option<WrappedCommand> {
    let mut index = 0;
    while let Some(word) = rest.get(index) {
        let Some(text) = word.as_exact() else {
            return Some(WrappedCommand::Unknown("the options of a shell are computed"));
        };
        let is_short = text.len() > 1 && text.starts_with(['-', '+']) && !text.starts_with("--");
        match text {
            _ if is_short && text.contains('c') => {
                let operand = rest[index + 1..].iter().find(|word| !word.head.starts_with('-'));
                return operand.cloned().map(WrappedCommand::Script);
            }
            _ if is_short && text.contains('s') => return Some(WrappedCommand::Input),
            "--rcfile" | "--init-file" => index += 2,
            _ if is_short && text.ends_with(['o', 'O']) => index += 2,
            _ if text.len() > 1 && text.starts_with(['-', '+']) => index += 1,
            // A file, or `-` for the input.
            "-" | "/dev/stdin" => return Some(WrappedCommand::Input),
            _ => return None,
        }
    }
    Some(WrappedCommand::Input)
}

fn eval_script(rest: &[Word]) -> Vec<WrappedCommand> {
    let texts: Option<Vec<&str>> = rest.iter().map(Word::as_exact).collect();
    match texts {
        Some(texts) => vec![WrappedCommand::Script(Word::exact(texts.join(" ")))],
        None => vec![WrappedCommand::Unknown("the text of eval is computed")],
    }
}

fn is_trap_word(word: &Word) -> bool {
    matches!(word.as_exact(), Some("" | "-" | "-l" | "-p" | "--"))
}

fn alias_script(word: &Word) -> Option<WrappedCommand> {
    let (_, text) = word.head.split_once('=')?;
    Some(WrappedCommand::Script(Word { head: text.to_owned(), ..word.clone() }))
}

/// The commands of `find -exec … ;`.
fn find_actions(rest: &[Word]) -> Vec<WrappedCommand> {
    let is_action = |word: &Word| {
        matches!(
            word.as_exact(),
            Some("-exec" | "-execdir" | "-ok" | "-okdir" | "-x" | "-X" | "--exec" | "--exec-batch")
        )
    };
    let ends = |word: &Word| matches!(word.as_exact(), Some(";" | "+"));
    let mut found = Vec::new();
    for (index, _) in rest.iter().enumerate().filter(|(_, word)| is_action(word)) {
        let command = rest[index + 1..].iter().take_while(|word| !ends(word));
        let words: Vec<Word> = command.map(|word| word.with_placeholder("{}")).collect();
        if !words.is_empty() {
            found.push(WrappedCommand::Words(words));
        }
    }
    found
}

/// The command of `xargs`, with words from its input at its end or in the place of a placeholder.
fn xargs_command(rest: &[Word]) -> Option<WrappedCommand> {
    let valued = [
        "-I",
        "-n",
        "-P",
        "-L",
        "-d",
        "-E",
        "-s",
        "-a",
        "-j",
        "--max-args",
        "--max-procs",
        "--delimiter",
        "--replace",
    ];
    let begin = skip_options(rest, &valued);
    let placeholder = rest[..begin].iter().zip(rest.iter().skip(1)).find_map(|(option, value)| match option
        .as_exact()?
    {
        "-I" | "--replace" => value.as_exact(),
        "-i" => Some("{}"),
        text => text.strip_prefix("-I").or_else(|| text.strip_prefix("--replace=")),
    });
    // `parallel` takes words of its own command line as input, behind `:::`.
    let is_input = |word: &Word| word.head.starts_with(":::");
    let mut words: Vec<Word> = rest[begin..].iter().take_while(|word| !is_input(word)).cloned().collect();
    if words.is_empty() {
        return None;
    }
    match placeholder {
        Some(placeholder) => {
            words.iter_mut().for_each(|word| *word = word.with_placeholder(placeholder));
        }
        None => words.push(Word::unknown()),
    }
    Some(WrappedCommand::Words(words))
}

/// `watch` gives its words to a shell.
fn watch_script(rest: &[Word]) -> Vec<WrappedCommand> {
    let begin = skip_options(rest, &["-n", "--interval", "-q", "--equexit"]);
    if begin >= rest.len() { Vec::new() } else { eval_script(&rest[begin..]) }
}

/// `su -c script`, `script -c script`.
fn option_script(rest: &[Word]) -> Vec<WrappedCommand> {
    let position = rest.iter().position(|word| {
        word.as_exact()
            .is_some_and(|text| text == "--command" || (text.starts_with('-') && text.ends_with('c')))
    });
    let script = position.and_then(|index| rest.get(index + 1));
    script.map(|word| WrappedCommand::Script(word.clone())).into_iter().collect()
}

fn is_split_option(word: &Word) -> bool {
    word.head.starts_with("-S") || word.head.starts_with("--split-string")
}

fn is_python(name: &str) -> bool {
    let version = name.strip_prefix("python").or_else(|| name.strip_prefix("pypy"));
    version.is_some_and(|version| version.chars().all(|letter| letter.is_ascii_digit() || letter == '.'))
}

/// `python -m pip install` is `pip install`.
fn python_module(rest: &[Word]) -> Option<WrappedCommand> {
    let is_option =
        |word: &&Word| word.extent == WordExtent::Exact && word.head.starts_with('-') && word.head != "-m";
    let options = rest.iter().take_while(is_option).count();
    let module = rest.get(options).filter(|word| word.as_exact() == Some("-m"));
    let words = module.and_then(|_| rest.get(options + 1..))?;
    (!words.is_empty()).then(|| WrappedCommand::Words(words.to_vec()))
}
