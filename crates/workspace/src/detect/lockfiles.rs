//! Lockfiles, and the shell line that installs the packages of each.
//!
//! A step installs a missing package manager if npm or PyPI has it; the language itself must be in the
//! template.

use std::collections::{BTreeMap, BTreeSet};

use super::tools::{CARGO, ELIXIR, GO, NODE, PHP, PYTHON, RUBY, Tool};

/// The Python virtual environment: outside of the repository, so that git need not ignore it.
pub const VENV: &str = "/home/user/.venv";
/// Directory of package managers that a step installs.
pub const LOCAL_BIN: &str = "/home/user/.local/bin";

const CRATES: &[&str] = &["index.crates.io:443", "static.crates.io:443", "crates.io:443"];
const NPM: &[&str] = &["registry.npmjs.org:443"];
const YARN: &[&str] = &["registry.npmjs.org:443", "registry.yarnpkg.com:443"];
const PYPI: &[&str] = &["pypi.org:443", "files.pythonhosted.org:443"];
const GO_PROXY: &[&str] = &["proxy.golang.org:443", "sum.golang.org:443"];
const GEMS: &[&str] = &["rubygems.org:443", "index.rubygems.org:443"];
const PACKAGIST: &[&str] = &["repo.packagist.org:443", "api.github.com:443", "codeload.github.com:443"];
const HEX: &[&str] = &["repo.hex.pm:443", "hex.pm:443", "builds.hex.pm:443"];

const NODE_BESIDE: &[&str] = &["package.json", ".npmrc", "pnpm-workspace.yaml", ".yarnrc.yml", "bunfig.toml"];
const PYTHON_BESIDE: &[&str] = &["pyproject.toml", ".python-version"];

/// The files that decide about the shell line of a lockfile.
#[derive(Debug, Default)]
pub struct LockfileContext {
    /// The text of the lockfile.
    pub lock: String,
    /// The text of its manifest.
    pub manifest: String,
}

/// A kind of lockfile, and how to install its packages.
pub struct Lockfile {
    pub name: &'static str,
    pub line: fn(&LockfileContext) -> String,
    pub hosts: &'static [&'static str],
    /// Files beside it that decide, too. The first is its manifest; without that, the lockfile is ignored.
    pub beside: &'static [&'static str],
    pub tool: Tool,
    /// Variables of every command, in the step and later.
    pub env: &'static [(&'static str, &'static str)],
}

const UV_ENV: &[(&str, &str)] = &[("UV_PROJECT_ENVIRONMENT", VENV), ("UV_PYTHON_DOWNLOADS", "never")];

pub const LOCKFILES: &[Lockfile] = &[
    Lockfile {
        name: "Cargo.lock",
        line: cargo,
        hosts: CRATES,
        beside: &["Cargo.toml", "rust-toolchain", "rust-toolchain.toml"],
        tool: CARGO,
        env: &[],
    },
    Lockfile { name: "package-lock.json", line: npm, hosts: NPM, beside: NODE_BESIDE, tool: NODE, env: &[] },
    Lockfile {
        name: "npm-shrinkwrap.json",
        line: npm,
        hosts: NPM,
        beside: NODE_BESIDE,
        tool: NODE,
        env: &[],
    },
    Lockfile { name: "pnpm-lock.yaml", line: pnpm, hosts: NPM, beside: NODE_BESIDE, tool: NODE, env: &[] },
    Lockfile { name: "yarn.lock", line: yarn, hosts: YARN, beside: NODE_BESIDE, tool: NODE, env: &[] },
    Lockfile { name: "bun.lock", line: bun, hosts: NPM, beside: NODE_BESIDE, tool: NODE, env: &[] },
    Lockfile { name: "bun.lockb", line: bun, hosts: NPM, beside: NODE_BESIDE, tool: NODE, env: &[] },
    Lockfile { name: "uv.lock", line: uv, hosts: PYPI, beside: PYTHON_BESIDE, tool: PYTHON, env: UV_ENV },
    Lockfile {
        name: "poetry.lock",
        line: poetry,
        hosts: PYPI,
        beside: PYTHON_BESIDE,
        tool: PYTHON,
        env: &[],
    },
    Lockfile { name: "go.sum", line: go, hosts: GO_PROXY, beside: &["go.mod"], tool: GO, env: &[] },
    Lockfile {
        name: "Gemfile.lock",
        line: bundle,
        hosts: GEMS,
        beside: &["Gemfile", ".ruby-version"],
        tool: RUBY,
        env: &[("BUNDLE_PATH", "/home/user/.bundle")],
    },
    Lockfile {
        name: "composer.lock",
        line: composer,
        hosts: PACKAGIST,
        beside: &["composer.json"],
        tool: PHP,
        env: &[],
    },
    Lockfile { name: "mix.lock", line: mix, hosts: HEX, beside: &["mix.exs"], tool: ELIXIR, env: &[] },
];

/// Host names of all registries that lockfiles may need.
pub fn registries() -> BTreeSet<&'static str> {
    LOCKFILES.iter().flat_map(|lock| lock.hosts.iter().copied()).collect()
}

/// Host names of PyPI, for `requirements.txt`.
pub fn pypi() -> impl Iterator<Item = String> {
    PYPI.iter().map(|host| (*host).to_owned())
}

/// Recreates the virtual environment, so that packages of an older lockfile are gone.
pub fn fresh_venv() -> String {
    format!("python3 -m venv --clear {VENV}")
}

fn cargo(_: &LockfileContext) -> String {
    "cargo fetch --locked".into()
}

fn npm(_: &LockfileContext) -> String {
    "npm ci --no-audit --no-fund".into()
}

fn pnpm(beside: &LockfileContext) -> String {
    let format =
        beside.lock.lines().find_map(|line| line.strip_prefix("lockfileVersion:")).map_or("", str::trim);
    let usual = match format.trim_matches(['\'', '"']).split('.').next() {
        Some("5") => "7",
        Some("6") => "8",
        _ => "10",
    };
    // By default pnpm would put its store into the workspace, because that is a separate file system.
    let store = "pnpm config set --location=global store-dir ~/.local/share/pnpm/store";
    format!("{} && {store} && pnpm install --frozen-lockfile", by_npm("pnpm", "pnpm", beside, usual, "*"))
}

fn yarn(beside: &LockfileContext) -> String {
    // Two programs share the names `yarn` and `yarn.lock`; only the newer one writes `__metadata`.
    if beside.lock.contains("\n__metadata:") {
        return format!(
            "{} && yarn install --immutable",
            by_npm("yarn", "@yarnpkg/cli-dist", beside, "4", "[2-9].*")
        );
    }
    format!(
        "{} && yarn install --frozen-lockfile --non-interactive",
        by_npm("yarn", "yarn", beside, "1", "1.*")
    )
}

fn bun(beside: &LockfileContext) -> String {
    format!("{} && bun install --frozen-lockfile", by_npm("bun", "bun", beside, "1", "*"))
}

/// Ensures a package manager from npm: the version in package.json, else the installed one if it fits, else
/// the usual version for such a lockfile.
fn by_npm(program: &str, package: &str, beside: &LockfileContext, usual: &str, fits: &str) -> String {
    let named = named_version(&beside.manifest, program);
    let (version, fits) = named.as_deref().map_or((usual, fits), |version| (version, version));
    // Runs `--version` at the root: inside a repository that pins a version, some managers download that
    // version first.
    let there = format!("$(cd / && command -v {program} >/dev/null && {program} --version)");
    let install = format!(
        "npm install --no-audit --no-fund --loglevel=error --force --prefix ~/.local -g '{package}@{version}'"
    );
    format!("case \"{there}\" in '') {install} ;; {fits}) ;; *) {install} ;; esac")
}

/// The version of a program in `packageManager` of package.json, such as `pnpm@9.1.0`, with or without a
/// hash.
fn named_version(manifest: &str, program: &str) -> Option<String> {
    let manifest: serde_json::Value = serde_json::from_str(manifest).ok()?;
    let version = manifest["packageManager"].as_str()?.strip_prefix(program)?.strip_prefix('@')?;
    let version = version.split('+').next()?;
    let plain = !version.is_empty()
        && version.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
    plain.then(|| version.to_owned())
}

fn uv(_: &LockfileContext) -> String {
    let get = format!("{VENV}/bin/pip install -q --target ~/.local/share/uv uv");
    format!("{} && uv sync --frozen --inexact", by_pip("uv", &get))
}

fn poetry(_: &LockfileContext) -> String {
    // Poetry gets a virtual environment of its own, so that its dependencies do not mix with the project's.
    let get =
        "python3 -m venv --clear ~/.local/share/poetry && ~/.local/share/poetry/bin/pip install -q poetry";
    format!("{} && poetry install --no-interaction", by_pip("poetry", get))
}

/// Ensures a package manager from PyPI, unless it is installed.
fn by_pip(program: &str, get: &str) -> String {
    let place = format!("~/.local/share/{program}/bin/{program}");
    format!(
        "{{ command -v {program} >/dev/null || {{ {get} && mkdir -p ~/.local/bin && ln -sf {place} ~/.local/bin/; }}; }}"
    )
}

fn go(_: &LockfileContext) -> String {
    "go mod download".into()
}

fn bundle(_: &LockfileContext) -> String {
    "bundle install".into()
}

fn composer(_: &LockfileContext) -> String {
    "composer install --no-interaction --no-progress".into()
}

fn mix(beside: &LockfileContext) -> String {
    let hex = "mix local.hex --force --if-missing && mix local.rebar --force --if-missing && ";
    format!("{}mix deps.get", if beside.lock.contains("{:hex,") { hex } else { "" })
}

/// The shell line for a requirements file.
pub fn requirements(name: &str) -> String {
    format!("{VENV}/bin/pip install --no-input -r '{}'", name.replace('\'', ""))
}

/// The usual test command for a repository with these files.
pub fn usual_test(files: &BTreeMap<String, String>) -> Option<String> {
    let known = [
        ("Cargo.toml", "cargo test"),
        ("package.json", "npm test"),
        ("go.mod", "go test ./..."),
        ("pyproject.toml", "python3 -m pytest"),
        ("requirements.txt", "python3 -m pytest"),
        ("mix.exs", "mix test"),
    ];
    known.iter().find(|(file, _)| files.contains_key(*file)).map(|(_, line)| (*line).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_manager_is_the_one_that_the_lockfile_was_made_by() {
        let line = |of: fn(&LockfileContext) -> String, lock: &str, manifest: &str| {
            of(&LockfileContext { lock: lock.into(), manifest: manifest.into() })
        };
        assert!(line(pnpm, "lockfileVersion: '6.0'\n", "{}").contains("'pnpm@8'"));
        assert!(line(pnpm, "lockfileVersion: '9.0'\n", "{}").contains("'pnpm@10'"));
        assert!(line(pnpm, "", r#"{"packageManager":"pnpm@9.1.0+sha512.ab"}"#).contains("'pnpm@9.1.0'"));
        assert!(line(yarn, "# yarn lockfile v1\n", "{}").contains("'yarn@1'"));
        let newer = line(yarn, "# x\n\n__metadata:\n  version: 8\n", r#"{"packageManager":"yarn@4.1.0"}"#);
        assert!(newer.contains("'@yarnpkg/cli-dist@4.1.0'") && newer.ends_with("--immutable"), "{newer}");
        assert_eq!(line(mix, "%{}", ""), "mix deps.get");
        for bad in ["pnpm@1;rm -rf x", "pnpm@", "pnpm@$(x)", "npm@1", "pnpm@1'"] {
            assert_eq!(named_version(&format!("{{\"packageManager\":\"{bad}\"}}"), "pnpm"), None, "{bad}");
        }
    }
}
