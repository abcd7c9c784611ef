//! Python: the steps that install the packages of a lockfile, of requirements files or of the project itself.

use toml::Value;

use super::{
    ecosystems::Plan,
    managers::{ManagerLock, choose_by_history},
    members::read_toml,
    needs::{PrepareStep, StepWeight},
    projects::path_in,
    tools::PYTHON,
    versions,
};
use crate::error::WorkspaceError;

/// The virtual environment: outside of the repository, so that git need not ignore it.
pub const VENV: &str = "/home/user/.venv";
/// The directory of its programs.
pub const VENV_BIN: &str = "/home/user/.venv/bin";
pub const ENV: &[(&str, &str)] = &[
    ("VIRTUAL_ENV", VENV),
    ("UV_PROJECT_ENVIRONMENT", VENV),
    ("UV_PYTHON_DOWNLOADS", "never"),
    ("UV_PYTHON", "python3"),
];

const MANAGERS: &[ManagerLock] =
    &[("uv", "uv.lock"), ("poetry", "poetry.lock"), ("pdm", "pdm.lock"), ("pipenv", "Pipfile.lock")];
/// Names of extras, dependency groups and requirements files that the tests of a project need.
const DEVELOPMENT: &[&str] = &["dev", "develop", "development", "test", "tests", "testing"];
/// Names of requirements files that hold what all others build on.
const BASE: &[&str] = &["base", "requirements", "py3"];

/// The step that makes the virtual environment anew, so that packages of an older lockfile are gone.
pub fn venv_step(weight: StepWeight) -> PrepareStep {
    PrepareStep {
        name: "python3 -m venv".to_owned(),
        dir: String::new(),
        // The Python of an environment that the last layer left does not make the new one.
        line: format!("PATH=${{PATH#{VENV_BIN}:}} && python3 -m venv --clear {VENV}"),
        source: String::new(),
        tool: Some(PYTHON),
        weight,
    }
}

/// Plans the steps of a Python project.
pub fn plan(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.requirements = versions::python(plan)?;
    let manifest = read_toml(plan.tree, &plan.path("pyproject.toml"))?;
    match choose_by_history(plan, MANAGERS) {
        Some(("uv", _)) => {
            let get = format!("{VENV_BIN}/pip install -q --target ~/.local/share/uv-tool uv");
            let (extras, groups) = development(&manifest);
            // uv installs the group `dev` by default, or those of `default-groups`.
            let more: String = extras.iter().map(|name| format!(" --extra {name}")).collect();
            let more: String =
                groups.iter().map(|name| format!(" --group {name}")).fold(more, |all, one| all + &one);
            let line = format!("{} && uv sync --frozen --inexact{more}", by_pip("uv", "uv-tool", &get));
            plan.install_locked("uv sync", line);
        }
        Some(("poetry", _)) => plan.install_locked("poetry install", poetry()),
        Some(("pdm", _)) => {
            let line = format!("{} && pdm install --frozen-lockfile --no-self", by_own_venv("pdm"));
            plan.install_locked("pdm install", line);
        }
        Some(_) => plan
            .install_locked("pipenv sync --dev", format!("{} && pipenv sync --dev", by_own_venv("pipenv"))),
        None => plan_unlocked(plan, &manifest)?,
    }
    Ok(())
}

fn plan_unlocked(plan: &mut Plan<'_>, manifest: &Value) -> Result<(), WorkspaceError> {
    let editable = plan_requirements(plan)?;
    let poetry_only = manifest.get("tool").is_some_and(|tool| tool.get("poetry").is_some())
        && manifest.get("project").is_none();
    if poetry_only {
        plan.install_unlocked("poetry install", poetry());
    } else if plan.has("Pipfile") {
        let line = format!("{} && pipenv install --dev --skip-lock", by_own_venv("pipenv"));
        plan.install_unlocked("pipenv install --dev", line);
    } else if !editable {
        plan_package(plan, manifest)?;
    }
    Ok(())
}

/// The extras and the dependency groups of pyproject.toml that are for development. They are known words, so a shell
/// line may contain them.
fn development(manifest: &Value) -> (Vec<String>, Vec<String>) {
    let keys = |table: Option<&Value>| -> Vec<String> {
        let keys = table.and_then(Value::as_table).into_iter().flat_map(|table| table.keys());
        keys.filter(|name| is_development(name)).cloned().collect()
    };
    let extras = manifest.get("project").and_then(|project| project.get("optional-dependencies"));
    (keys(extras), keys(manifest.get("dependency-groups")))
}

/// Plans `pip install -e .` with the extras and groups for development, if the project is a package.
fn plan_package(plan: &mut Plan<'_>, manifest: &Value) -> Result<(), WorkspaceError> {
    let setup = plan.text("setup.cfg")?;
    let is_package = ["project", "build-system"].iter().any(|table| manifest.get(table).is_some())
        || plan.has("setup.py")
        || setup.lines().any(|line| line.trim() == "[metadata]");
    let (mut extras, groups) = development(manifest);
    extras.extend(setup_extras(&setup).into_iter().filter(|name| is_development(name)));
    let mut what = String::new();
    if is_package {
        what.push_str(&if extras.is_empty() {
            " -e .".to_owned()
        } else {
            format!(" -e '.[{}]'", extras.join(","))
        });
    }
    groups.iter().for_each(|group| what.push_str(&format!(" --group {group}")));
    if what.is_empty() {
        return Ok(());
    }
    // pip knows groups since 25.1.
    let newer = if groups.is_empty() {
        String::new()
    } else {
        format!("{VENV_BIN}/pip install -q --no-input 'pip>=25.1' && ")
    };
    plan.install_unlocked(
        format!("pip install{}", what.replace('\'', "")),
        format!("{newer}{VENV_BIN}/pip install --no-input{what}"),
    );
    Ok(())
}

/// Plans the requirements files; returns whether one of them installs the project itself.
fn plan_requirements(plan: &mut Plan<'_>) -> Result<bool, WorkspaceError> {
    let inside = path_in(&plan.project.dir, "");
    let names = plan.tree.ids.keys().filter_map(|path| path.strip_prefix(&inside).map(str::to_owned));
    let names: Vec<String> = names.collect();
    let (mut editable, mut others) = (false, Vec::new());
    for name in names {
        let Some(kind) = requirements_kind(&name).filter(|_| plan.has(&name)) else { continue };
        if kind == RequirementsKind::Other {
            others.push(proto::text::visible(&plan.path(&name)));
            continue;
        }
        let path = plan.path(&name);
        editable |= plan.text(&name)?.lines().any(|line| line.trim_start().starts_with("-e ."));
        plan.inputs.push(path);
        let weight = match kind {
            RequirementsKind::Main => plan.project.weight,
            _ => StepWeight::Optional,
        };
        plan.install_requirements(&name, format!("{VENV_BIN}/pip install --no-input -r {name}"), weight);
    }
    if let Some(first) = others.first() {
        plan.notes.push(format!(
            "not installed: {}; palisade.toml: [prepare] commands = [\"pip install -r {first}\"]",
            others.join(", ")
        ));
    }
    Ok(editable)
}

/// The part a requirements file plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequirementsKind {
    /// The requirements of the project or of its development.
    Main,
    /// The requirements of its tests, in a directory of their own.
    Tests,
    /// Requirements of documents, releases and the like.
    Other,
}

/// The part of a file by its path relative to the project; none if it is no requirements file. A path that counts
/// consists of known words, so a shell line may contain it.
fn requirements_kind(path: &str) -> Option<RequirementsKind> {
    let stem = path.strip_suffix(".txt")?;
    let (dir, stem) = stem.rsplit_once('/').unwrap_or(("", stem));
    let other_word = |stem: &str| {
        let rest = stem.strip_prefix("requirements").or_else(|| stem.strip_suffix("requirements"))?;
        Some(rest.trim_matches(['-', '_', '.']).to_owned())
    };
    match (dir, other_word(stem)) {
        ("", Some(word)) if word.is_empty() || is_plain_development(&word) => Some(RequirementsKind::Main),
        ("", Some(_)) => Some(RequirementsKind::Other),
        ("tests" | "test", Some(word)) if word.is_empty() => Some(RequirementsKind::Tests),
        ("requirements", _) if is_plain_development(stem) || BASE.contains(&stem) => {
            Some(RequirementsKind::Main)
        }
        ("tests/requirements" | "test/requirements", _)
            if is_plain_development(stem) || BASE.contains(&stem) =>
        {
            Some(RequirementsKind::Tests)
        }
        _ => None,
    }
}

fn is_plain_development(word: &str) -> bool {
    DEVELOPMENT.contains(&word) || word == "ci"
}

fn is_development(name: &str) -> bool {
    DEVELOPMENT.contains(&name)
}

/// The names of `[options.extras_require]` in setup.cfg.
fn setup_extras(text: &str) -> Vec<String> {
    let section = text.lines().skip_while(|line| line.trim() != "[options.extras_require]").skip(1);
    let section = section.take_while(|line| !line.starts_with('['));
    section
        .filter(|line| !line.starts_with([' ', '\t']))
        .filter_map(|line| Some(line.split_once('=')?.0.trim().to_owned()))
        .collect()
}

fn poetry() -> String {
    format!("{} && poetry install --no-interaction", by_own_venv("poetry"))
}

/// Ensures a package manager from PyPI with a virtual environment of its own, so that its dependencies do not mix with
/// the project's.
fn by_own_venv(program: &str) -> String {
    let dir = format!("~/.local/share/{program}");
    by_pip(program, program, &format!("python3 -m venv --clear {dir} && {dir}/bin/pip install -q {program}"))
}

/// Ensures a package manager from PyPI, unless it is installed.
fn by_pip(program: &str, dir: &str, get: &str) -> String {
    let place = format!("~/.local/share/{dir}/bin/{program}");
    format!(
        "{{ command -v {program} >/dev/null || {{ {get} && mkdir -p ~/.local/bin && ln -sf {place} ~/.local/bin/; }}; }}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_files_are_told_apart_by_their_names() {
        use RequirementsKind::{Main, Other, Tests};
        for (path, kind) in [
            ("requirements.txt", Some(Main)),
            ("requirements-dev.txt", Some(Main)),
            ("requirements_test.txt", Some(Main)),
            ("dev-requirements.txt", Some(Main)),
            ("requirements/dev.txt", Some(Main)),
            ("tests/requirements/py3.txt", Some(Tests)),
            ("tests/requirements.txt", Some(Tests)),
            ("requirements-docs.txt", Some(Other)),
            ("requirements-$(x).txt", Some(Other)),
            ("tests/requirements/oracle.txt", None),
            ("docs/requirements.txt", None),
            ("notes.txt", None),
        ] {
            assert_eq!(requirements_kind(path), kind, "{path}");
        }
    }
}
