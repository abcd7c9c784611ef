//! Node: chooses the package manager of a project, and the shell line that installs its packages.

use serde_json::Value;

use super::{
    ecosystems::Plan,
    managers::{ManagerLock, choose_by_history, describe},
    members::read_json,
    versions,
};
use crate::error::WorkspaceError;

/// The lockfiles of all managers.
pub const LOCKS: &[&str] =
    &["pnpm-lock.yaml", "bun.lock", "bun.lockb", "yarn.lock", "package-lock.json", "npm-shrinkwrap.json"];
const MANAGERS: &[ManagerLock] = &[
    ("pnpm", "pnpm-lock.yaml"),
    ("bun", "bun.lock"),
    ("bun", "bun.lockb"),
    ("yarn", "yarn.lock"),
    ("npm", "package-lock.json"),
    ("npm", "npm-shrinkwrap.json"),
];
/// Fields of package.json of which one makes an installation necessary.
const INSTALLABLE: &[&str] =
    &["dependencies", "devDependencies", "optionalDependencies", "peerDependencies", "workspaces"];

/// Plans the step of a project with a package.json.
pub fn plan(plan: &mut Plan<'_>) -> Result<(), WorkspaceError> {
    plan.requirements = versions::node(plan)?;
    let manifest = read_json(plan.tree, &plan.path("package.json"))?;
    let has_packages =
        INSTALLABLE.iter().any(|field| !manifest[field].is_null()) || plan.has("pnpm-workspace.yaml");
    if !has_packages && !plan.has_lock() {
        return Ok(());
    }
    let (manager, lock) = choose(plan, &manifest);
    let lock_text = lock.map(|lock| plan.text(lock)).transpose()?;
    let line = match manager {
        "pnpm" => pnpm(&manifest, lock_text.as_deref()),
        "yarn" => yarn(&manifest, lock_text.as_deref(), plan.has(".yarnrc.yml")),
        "bun" => bun(&manifest, lock_text.as_deref()),
        _ => npm(lock_text.as_deref()),
    };
    match (manager, lock) {
        ("npm", Some(_)) => plan.install_locked("npm ci", line),
        (manager, Some(_)) => plan.install_locked(format!("{manager} install"), line),
        (manager, None) => plan.install_unlocked(format!("{manager} install"), line),
    }
    Ok(())
}

/// The manager and its lockfile: package.json decides, then the lockfiles and their history, then settings files.
fn choose(plan: &mut Plan<'_>, manifest: &Value) -> (&'static str, Option<&'static str>) {
    let stated = manifest["packageManager"].as_str().and_then(|text| text.split('@').next());
    let stated = stated.or_else(|| manifest["devEngines"]["packageManager"]["name"].as_str());
    let stated = MANAGERS.iter().find(|(manager, _)| Some(*manager) == stated).map(|(manager, _)| *manager);
    let Some(manager) = stated else {
        if let Some((manager, lock)) = choose_by_history(plan, MANAGERS) {
            return (manager, Some(lock));
        }
        let settings = [("pnpm", "pnpm-workspace.yaml"), ("yarn", ".yarnrc.yml"), ("bun", "bunfig.toml")];
        let found = settings.iter().find(|(_, file)| plan.has(file));
        return (found.map_or("npm", |(manager, _)| manager), None);
    };
    let own = MANAGERS.iter().find(|(of, lock)| *of == manager && plan.has(lock)).map(|(_, lock)| *lock);
    let others: Vec<&str> = MANAGERS
        .iter()
        .filter(|(of, lock)| *of != manager && plan.has(lock))
        .map(|(_, lock)| *lock)
        .collect();
    if !others.is_empty() {
        plan.notes.push(format!(
            "{manager} is chosen because packageManager names it; {} belongs to another manager and is not used",
            describe(plan, &others)
        ));
    }
    (manager, own)
}

/// The options of a manager for its lockfile; without one, the options that write none.
fn options<'a>(lock: Option<&str>, frozen: &'a str, without: &'a str) -> &'a str {
    if lock.is_some() { frozen } else { without }
}

fn npm(lock: Option<&str>) -> String {
    format!("npm {} --no-audit --no-fund", options(lock, "ci", "install --no-package-lock"))
}

fn pnpm(manifest: &Value, lock: Option<&str>) -> String {
    let format = lock.and_then(|lock| lock.lines().find_map(|line| line.strip_prefix("lockfileVersion:")));
    let usual = match format.unwrap_or_default().trim().trim_matches(['\'', '"']).split('.').next() {
        Some("5") => "7",
        Some("6") => "8",
        _ => "10",
    };
    // By default pnpm would put its store into the workspace, because that is a separate file system.
    let store = "pnpm config set --location=global store-dir ~/.local/share/pnpm/store";
    let options = options(lock, "--frozen-lockfile", "--no-lockfile");
    format!("{} && {store} && pnpm install {options}", by_npm("pnpm", "pnpm", manifest, usual, "*"))
}

fn yarn(manifest: &Value, lock: Option<&str>, has_settings: bool) -> String {
    // Two programs share the names `yarn` and `yarn.lock`; only the newer one writes `__metadata`.
    let version = named_version(manifest, "yarn");
    let is_newer = match (lock, version) {
        (Some(lock), _) => lock.contains("\n__metadata:"),
        (None, Some(version)) => !version.starts_with("1."),
        (None, None) => has_settings,
    };
    if is_newer {
        let options = options(lock, "--immutable", "--no-immutable");
        return format!(
            "{} && yarn install {options}",
            by_npm("yarn", "@yarnpkg/cli-dist", manifest, "4", "[2-9].*")
        );
    }
    let options = options(lock, "--frozen-lockfile", "--no-lockfile");
    format!("{} && yarn install {options} --non-interactive", by_npm("yarn", "yarn", manifest, "1", "1.*"))
}

fn bun(manifest: &Value, lock: Option<&str>) -> String {
    let options = options(lock, "--frozen-lockfile", "--no-save");
    format!("{} && bun install {options}", by_npm("bun", "bun", manifest, "1", "*"))
}

/// Ensures a package manager from npm: the version in package.json, else the installed one if it fits, else
/// the usual version for such a lockfile.
fn by_npm(program: &str, package: &str, manifest: &Value, usual: &str, fits: &str) -> String {
    let named = named_version(manifest, program);
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
fn named_version(manifest: &Value, program: &str) -> Option<String> {
    let version = manifest["packageManager"].as_str()?.strip_prefix(program)?.strip_prefix('@')?;
    let version = version.split('+').next()?;
    let plain = !version.is_empty()
        && version.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte));
    plain.then(|| version.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_package_manager_is_the_one_that_the_lockfile_was_made_by() {
        let none = json!({});
        assert!(pnpm(&none, Some("lockfileVersion: '6.0'\n")).contains("'pnpm@8'"));
        assert!(pnpm(&none, Some("lockfileVersion: '9.0'\n")).contains("'pnpm@10'"));
        let named = json!({"packageManager": "pnpm@9.1.0+sha512.ab"});
        assert!(pnpm(&named, Some("")).contains("'pnpm@9.1.0'"));
        assert!(yarn(&none, Some("# yarn lockfile v1\n"), false).contains("'yarn@1'"));
        let named = json!({"packageManager": "yarn@4.1.0"});
        let newer = yarn(&named, Some("# x\n\n__metadata:\n  version: 8\n"), true);
        assert!(newer.contains("'@yarnpkg/cli-dist@4.1.0'") && newer.ends_with("--immutable"), "{newer}");
        for bad in ["pnpm@1;rm -rf x", "pnpm@", "pnpm@$(x)", "npm@1", "pnpm@1'"] {
            assert_eq!(named_version(&json!({"packageManager": bad}), "pnpm"), None, "{bad}");
        }
    }

    #[test]
    fn without_a_lockfile_no_manager_writes_one() {
        let none = json!({});
        for (line, option) in [
            (npm(None), "--no-package-lock"),
            (pnpm(&none, None), "--no-lockfile"),
            (yarn(&none, None, false), "--no-lockfile"),
            (bun(&none, None), "--no-save"),
        ] {
            assert!(line.contains(option), "{line}");
        }
    }
}
