//! What a repository needs before its tests run: found in its lockfiles, its devcontainer.json and its palisade.toml.
//!
//! Trust: all of it is text of a repository. It decides what runs in a Body and which names that Body may reach while it
//! is being prepared; it never decides what runs on the host.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use serde::Deserialize;

use crate::{
    error::WorkspaceError,
    git::Git,
};

/// Most steps of one repository.
const STEPS_MAX: usize = 64;
/// Longest file that is read for what it says.
const TEXT_LEN_MAX: usize = 1 << 20;
/// Where Python's packages go: outside of the repository, so that git need not ignore them.
pub const VENV: &str = "/home/user/.venv";

/// One step of preparing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where, below the workspace; empty for its top.
    pub dir: String,
    /// A line of shell.
    pub line: String,
}

/// What a repository needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Needs {
    /// What is done, in order.
    pub steps: Vec<Step>,
    /// Names that may be reached meanwhile.
    pub allow: BTreeSet<String>,
    /// Variables of every command, then and later.
    pub env: BTreeMap<String, String>,
    /// Directories of programs, before the usual ones.
    pub path: BTreeSet<&'static str>,
    /// Files that decide about it, and their contents' names.
    pub inputs: BTreeMap<String, String>,
    /// Toolchains it wants.
    pub tools: BTreeSet<&'static str>,
    /// The line of shell that tests it.
    pub test: Option<String>,
    /// What was found and cannot be honoured.
    pub notes: Vec<String>,
}

/// A lockfile and what is to be done about it.
struct Lockfile {
    name: &'static str,
    line: &'static str,
    hosts: &'static [&'static str],
    /// Files beside it that decide, too.
    beside: &'static [&'static str],
    tool: &'static str,
}

const CRATES: &[&str] = &["index.crates.io:443", "static.crates.io:443", "crates.io:443"];
const NPM: &[&str] = &["registry.npmjs.org:443"];
const YARN: &[&str] = &["registry.npmjs.org:443", "registry.yarnpkg.com:443", "repo.yarnpkg.com:443"];
const PYPI: &[&str] = &["pypi.org:443", "files.pythonhosted.org:443"];
const NODE_BESIDE: &[&str] = &["package.json", ".npmrc", "pnpm-workspace.yaml", ".yarnrc.yml"];
const PYTHON_BESIDE: &[&str] = &["pyproject.toml", ".python-version"];

/// Makes the environment for Python where there is none, or an older one.
macro_rules! venv {
    ($($then:literal),+) => { concat!("python3 -m venv --clear /home/user/.venv && ", $($then),+) };
}

const LOCKFILES: &[Lockfile] = &[
    Lockfile { name: "Cargo.lock", line: "cargo fetch --locked", hosts: CRATES, beside: &["Cargo.toml", "rust-toolchain", "rust-toolchain.toml"], tool: "cargo" },
    Lockfile { name: "package-lock.json", line: "npm ci --no-audit --no-fund", hosts: NPM, beside: NODE_BESIDE, tool: "node" },
    Lockfile { name: "npm-shrinkwrap.json", line: "npm ci --no-audit --no-fund", hosts: NPM, beside: NODE_BESIDE, tool: "node" },
    Lockfile { name: "pnpm-lock.yaml", line: "{ command -v pnpm >/dev/null || npm install --prefix ~/.local -g pnpm; } && PATH=~/.local/bin:$PATH pnpm install --frozen-lockfile", hosts: NPM, beside: NODE_BESIDE, tool: "node" },
    Lockfile { name: "yarn.lock", line: "{ command -v yarn >/dev/null || npm install --prefix ~/.local -g yarn; } && PATH=~/.local/bin:$PATH yarn install --frozen-lockfile", hosts: YARN, beside: NODE_BESIDE, tool: "node" },
    Lockfile { name: "bun.lock", line: "{ command -v bun >/dev/null || npm install --prefix ~/.local -g bun; } && PATH=~/.local/bin:$PATH bun install --frozen-lockfile", hosts: NPM, beside: NODE_BESIDE, tool: "node" },
    Lockfile { name: "uv.lock", line: venv!("{ command -v uv >/dev/null || /home/user/.venv/bin/pip install -q uv; } && PATH=/home/user/.venv/bin:$PATH UV_PROJECT_ENVIRONMENT=/home/user/.venv uv sync --frozen --inexact"), hosts: PYPI, beside: PYTHON_BESIDE, tool: "python" },
    Lockfile { name: "poetry.lock", line: venv!("{ command -v poetry >/dev/null || /home/user/.venv/bin/pip install -q poetry; } && PATH=/home/user/.venv/bin:$PATH VIRTUAL_ENV=/home/user/.venv poetry install --no-interaction"), hosts: PYPI, beside: PYTHON_BESIDE, tool: "python" },
    Lockfile { name: "go.sum", line: "go mod download", hosts: &["proxy.golang.org:443", "sum.golang.org:443"], beside: &["go.mod"], tool: "go" },
    Lockfile { name: "Gemfile.lock", line: "bundle config set --global path /home/user/.bundle && bundle install", hosts: &["rubygems.org:443", "index.rubygems.org:443"], beside: &["Gemfile", ".ruby-version"], tool: "ruby" },
    Lockfile { name: "composer.lock", line: "composer install --no-interaction", hosts: &["repo.packagist.org:443", "api.github.com:443", "codeload.github.com:443"], beside: &["composer.json"], tool: "php" },
    Lockfile { name: "mix.lock", line: "mix local.hex --force && mix deps.get", hosts: &["repo.hex.pm:443", "hex.pm:443", "builds.hex.pm:443"], beside: &["mix.exs"], tool: "elixir" },
];

/// `palisade.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    prepare: Prepare,
    env: BTreeMap<String, String>,
    test: Test,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Prepare {
    /// Whether lockfiles are looked for.
    auto: bool,
    /// Lines of shell after what lockfiles ask for.
    commands: Vec<String>,
    /// Files that decide whether that is done again.
    inputs: Vec<String>,
    /// Names that may be reached meanwhile.
    allow: Vec<String>,
}

impl Default for Prepare {
    fn default() -> Self {
        Self { auto: true, commands: Vec::new(), inputs: Vec::new(), allow: Vec::new() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Test {
    command: Option<String>,
}

/// What is honoured of `devcontainer.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Devcontainer {
    image: Option<String>,
    build: Option<serde_json::Value>,
    docker_file: Option<serde_json::Value>,
    docker_compose_file: Option<serde_json::Value>,
    features: BTreeMap<String, serde_json::Value>,
    container_env: BTreeMap<String, String>,
    remote_env: BTreeMap<String, Option<String>>,
    on_create_command: Option<serde_json::Value>,
    update_content_command: Option<serde_json::Value>,
    post_create_command: Option<serde_json::Value>,
}

/// Finds what the repository at a tree needs.
pub fn needs(objects: &Path, tree: &str) -> Result<Needs, WorkspaceError> {
    let git = Git::at(objects);
    let said = git.run(["ls-tree", "-r", "-z", "--full-tree", tree])?;
    let files = listing(&said);
    let text = |path: &str| -> Result<Option<String>, WorkspaceError> {
        let Some(id) = files.get(path) else { return Ok(None) };
        let bytes = git.run(["cat-file", "blob", id])?;
        if bytes.len() > TEXT_LEN_MAX {
            return Err(WorkspaceError::Repository(format!("{path} is longer than 1 MiB")));
        }
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    };
    let mut needs = Needs::default();
    let settings: Settings = match text("palisade.toml")? {
        Some(text) => toml::from_str(&text).map_err(|error| WorkspaceError::Repository(format!("palisade.toml: {}", proto::text::visible(error.message()))))?,
        None => Settings::default(),
    };
    if settings.prepare.auto {
        needs.lockfiles(&files);
    }
    for place in [".devcontainer/devcontainer.json", ".devcontainer.json"] {
        if let Some(text) = text(place)? {
            needs.devcontainer(place, &text, &files)?;
            break;
        }
    }
    needs.settings(settings, &files);
    if needs.steps.len() > STEPS_MAX {
        return Err(WorkspaceError::Repository(format!("preparing it would take more than {STEPS_MAX} steps: say what is to be done in palisade.toml, with auto = false")));
    }
    Ok(needs)
}

/// Paths and the names of their contents.
fn listing(said: &[u8]) -> BTreeMap<String, String> {
    let record = |record: &[u8]| {
        let text = std::str::from_utf8(record).ok()?;
        let (about, path) = text.split_once('\t')?;
        Some((path.to_owned(), about.split(' ').nth(2)?.to_owned()))
    };
    said.split(|byte| *byte == 0).filter_map(record).collect()
}

/// Whether a lockfile there belongs to somebody else's code, or to an example.
fn is_foreign(dir: &str) -> bool {
    dir.split('/').any(|part| matches!(part, "node_modules" | "vendor" | "third_party" | "testdata" | "fixtures" | "examples" | "example"))
}

impl Needs {
    fn input(&mut self, files: &BTreeMap<String, String>, path: &str) {
        if let Some(id) = files.get(path) {
            self.inputs.insert(path.to_owned(), id.clone());
        }
    }

    fn lockfiles(&mut self, files: &BTreeMap<String, String>) {
        for path in files.keys() {
            let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
            if is_foreign(dir) {
                continue;
            }
            let at = |name: &str| if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") };
            if name.starts_with("requirements") && name.ends_with(".txt") {
                self.requirements(dir, name);
                self.input(files, path);
                continue;
            }
            let Some(lock) = LOCKFILES.iter().find(|lock| lock.name == name) else { continue };
            // What is vendored needs nobody, and a manifest is what makes a lockfile one.
            let manifest = lock.beside[0];
            if (name == "go.sum" && files.contains_key(&at("vendor/modules.txt"))) || !files.contains_key(&at(manifest)) {
                continue;
            }
            self.steps.push(Step { dir: dir.to_owned(), line: lock.line.to_owned() });
            self.allow.extend(lock.hosts.iter().map(|host| (*host).to_owned()));
            self.tools.insert(lock.tool);
            self.input(files, path);
            lock.beside.iter().for_each(|name| self.input(files, &at(name)));
        }
        if self.tools.contains("python") {
            self.path.insert("/home/user/.venv/bin");
            self.env.insert("VIRTUAL_ENV".into(), VENV.into());
        }
        if self.tools.contains("node") {
            self.path.insert("/home/user/.local/bin");
        }
    }

    fn requirements(&mut self, dir: &str, name: &str) {
        self.tools.insert("python");
        self.allow.extend(PYPI.iter().map(|host| (*host).to_owned()));
        let line = format!("[ -x {VENV}/bin/pip ] || python3 -m venv --clear {VENV}; {VENV}/bin/pip install -r '{}'", name.replace('\'', ""));
        self.steps.push(Step { dir: dir.to_owned(), line });
    }

    fn devcontainer(&mut self, place: &str, text: &str, files: &BTreeMap<String, String>) -> Result<(), WorkspaceError> {
        let read: Devcontainer = serde_json::from_str(&plain_json(text)).map_err(|error| WorkspaceError::Repository(format!("{place}: {error}")))?;
        self.input(files, place);
        let mut note = |what: &str| self.notes.push(format!("{place}: {what}"));
        if let Some(image) = &read.image {
            note(&format!("the image {} is not used; import it and say --template: pal templates import", proto::text::visible(image)));
        }
        if read.build.is_some() || read.docker_file.is_some() || read.docker_compose_file.is_some() {
            note("its build is not done; build a template and say --template");
        }
        for feature in read.features.keys() {
            note(&format!("the feature {} is not installed", proto::text::visible(feature)));
        }
        let plain = |(name, value): (String, String)| (!value.contains("${")).then_some((name, value));
        self.env.extend(read.container_env.into_iter().filter_map(plain));
        self.env.extend(read.remote_env.into_iter().filter_map(|(name, value)| Some((name, value?))).filter_map(plain));
        let commands = [read.on_create_command, read.update_content_command, read.post_create_command];
        self.steps.extend(commands.into_iter().flatten().flat_map(|command| lines(&command)).map(|line| Step { dir: String::new(), line }));
        Ok(())
    }

    fn settings(&mut self, settings: Settings, files: &BTreeMap<String, String>) {
        self.input(files, "palisade.toml");
        settings.prepare.inputs.iter().for_each(|path| self.input(files, path));
        self.steps.extend(settings.prepare.commands.into_iter().map(|line| Step { dir: String::new(), line }));
        self.allow.extend(settings.prepare.allow);
        self.env.extend(settings.env);
        self.test = settings.test.command.or_else(|| self.usual_test(files));
    }

    fn usual_test(&self, files: &BTreeMap<String, String>) -> Option<String> {
        let known = [("Cargo.toml", "cargo test"), ("package.json", "npm test"), ("go.mod", "go test ./..."), ("pyproject.toml", "python3 -m pytest"), ("requirements.txt", "python3 -m pytest")];
        known.iter().find(|(file, _)| files.contains_key(*file)).map(|(_, line)| (*line).to_owned())
    }
}

/// A command of devcontainer.json: a line, a list of words, or several of either by name.
fn lines(command: &serde_json::Value) -> Vec<String> {
    let quoted = |word: &str| format!("'{}'", word.replace('\'', r"'\''"));
    match command {
        serde_json::Value::String(line) => vec![line.clone()],
        serde_json::Value::Array(words) => vec![words.iter().filter_map(|word| word.as_str()).map(quoted).collect::<Vec<_>>().join(" ")],
        serde_json::Value::Object(several) => several.values().flat_map(lines).collect(),
        _ => Vec::new(),
    }
}

/// JSON without the comments and the last commas that devcontainer.json may have.
fn plain_json(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text.chars().peekable();
    let mut quoted = false;
    while let Some(c) = rest.next() {
        match (c, quoted) {
            ('\\', true) => {
                out.push(c);
                out.extend(rest.next());
            }
            ('"', _) => {
                quoted = !quoted;
                out.push(c);
            }
            ('/', false) if rest.peek() == Some(&'/') => while rest.next_if(|c| *c != '\n').is_some() {},
            ('/', false) if rest.peek() == Some(&'*') => {
                let mut last = ' ';
                rest.next();
                for c in rest.by_ref() {
                    if (last, c) == ('*', '/') {
                        break;
                    }
                    last = c;
                }
            }
            ('}' | ']', false) => {
                let kept = out.trim_end().trim_end_matches(',').len();
                out.truncate(kept);
                out.push(c);
            }
            (c, _) => out.push(c),
        }
    }
    out
}

/// Where the person's own Rust is, when it is not where everybody's programs are.
pub fn rust_of(person: &crate::Person, dir: &Path) -> Option<std::path::PathBuf> {
    if ["/usr/bin/cargo", "/usr/local/bin/cargo"].iter().any(|path| Path::new(path).exists()) {
        return None;
    }
    let mut command = std::process::Command::new("rustc");
    command.env_clear().env("HOME", &person.home).env("PATH", &person.path).env("RUSTUP_AUTO_INSTALL", "0").current_dir(dir);
    command.envs(person.env.iter().filter(|(name, _)| name == "RUSTUP_HOME" || name == "CARGO_HOME" || name == "RUSTUP_TOOLCHAIN").map(|(name, value)| (name, value)));
    let output = command.args(["--print", "sysroot"]).stdin(std::process::Stdio::null()).output().ok()?;
    let root = std::path::PathBuf::from(String::from_utf8(output.stdout).ok()?.trim_end());
    (output.status.success() && root.join("bin/cargo").exists()).then_some(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(paths: &[&str]) -> Needs {
        let files = paths.iter().map(|path| ((*path).to_owned(), format!("id of {path}"))).collect();
        let mut needs = Needs::default();
        needs.lockfiles(&files);
        needs
    }

    #[test]
    fn lockfiles_of_a_monorepo_are_found_and_those_of_others_are_not() {
        let needs = found(&[
            "Cargo.lock", "Cargo.toml", "web/package-lock.json", "web/package.json", "api/requirements.txt", "api/requirements-dev.txt", "go/go.sum", "go/go.mod", "go/vendor/modules.txt",
            "web/node_modules/x/package-lock.json", "web/node_modules/x/package.json", "lonely/Cargo.lock",
        ]);
        let steps: Vec<(&str, &str)> = needs.steps.iter().map(|step| (step.dir.as_str(), step.line.split(' ').next().unwrap())).collect();
        assert_eq!(steps, [("", "cargo"), ("api", "["), ("api", "["), ("web", "npm")]);
        assert_eq!(needs.tools, BTreeSet::from(["cargo", "node", "python"]));
        assert!(needs.allow.contains("pypi.org:443") && !needs.allow.contains("proxy.golang.org:443"));
        assert!(needs.inputs.contains_key("web/package.json") && !needs.inputs.contains_key("lonely/Cargo.lock"));
    }

    #[test]
    fn comments_and_last_commas_of_devcontainers_are_left_out() {
        let text = "{ // a\n \"containerEnv\": { \"A\": \"b//c\", }, /* x */ \"postCreateCommand\": [\"echo\", \"it's\"], \"features\": {\"f\": {}}, \"image\": \"x\" }";
        let mut needs = Needs::default();
        needs.devcontainer("d.json", text, &BTreeMap::new()).unwrap();
        assert_eq!(needs.env.get("A").map(String::as_str), Some("b//c"));
        assert_eq!(needs.steps, [Step { dir: String::new(), line: r"'echo' 'it'\''s'".into() }]);
        assert_eq!(needs.notes.len(), 2);
        assert!(needs.devcontainer("d.json", "{", &BTreeMap::new()).is_err());
    }

    #[test]
    fn settings_that_are_not_known_are_refused() {
        assert!(toml::from_str::<Settings>("[prepare]\ncommands = ['make']\nallow = ['x.org:443']\n[test]\ncommand = 'make test'\n[env]\nA = 'b'\n").is_ok());
        assert!(toml::from_str::<Settings>("[prepare]\ncomands = ['make']\n").is_err());
    }
}
