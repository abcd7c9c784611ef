//! The members that a project declares in the words of its own tool.
//!
//! A step of the project installs its members, too, and the tool ignores their lockfiles. So a member makes no step.

use globset::{GlobBuilder, GlobMatcher};
use serde_json::Value as Json;
use toml::Value as Toml;

use super::{projects::path_in, tree::RepoTree};
use crate::error::WorkspaceError;

/// Most patterns of one project.
const PATTERNS_MAX: usize = 1024;

/// The patterns of a project's members, relative to its directory.
#[derive(Debug, Default)]
pub struct MemberPatterns {
    include: Vec<GlobMatcher>,
    exclude: Vec<GlobMatcher>,
}

impl MemberPatterns {
    fn of(include: impl IntoIterator<Item = String>, exclude: impl IntoIterator<Item = String>) -> Self {
        let mut patterns = Self::default();
        for pattern in include.into_iter().take(PATTERNS_MAX) {
            match pattern.strip_prefix('!') {
                Some(excluded) => patterns.exclude.extend(compile(excluded)),
                None => patterns.include.extend(compile(&pattern)),
            }
        }
        patterns
            .exclude
            .extend(exclude.into_iter().take(PATTERNS_MAX).filter_map(|pattern| compile(&pattern)));
        patterns
    }

    /// Whether `dir` is a member of the project in `parent`.
    pub fn contain(&self, parent: &str, dir: &str) -> bool {
        let inside = match parent {
            "" => Some(dir),
            parent => dir.strip_prefix(parent).and_then(|rest| rest.strip_prefix('/')),
        };
        let Some(inside) = inside.filter(|inside| !inside.is_empty()) else { return false };
        let matches = |pattern: &GlobMatcher| pattern.is_match(inside);
        self.include.iter().any(matches) && !self.exclude.iter().any(matches)
    }
}

fn compile(pattern: &str) -> Option<GlobMatcher> {
    let pattern = pattern.trim_start_matches("./").trim_end_matches('/');
    GlobBuilder::new(pattern).literal_separator(true).build().ok().map(|glob| glob.compile_matcher())
}

/// For a tool that declares no members.
pub fn none(_: &RepoTree, _: &str) -> Result<MemberPatterns, WorkspaceError> {
    Ok(MemberPatterns::default())
}

/// `workspace.members` of Cargo.toml, and the path dependencies, which cargo adds to a workspace by itself.
pub fn cargo(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let manifest = read_toml(tree, &path_in(dir, "Cargo.toml"))?;
    let Some(workspace) = manifest.get("workspace") else { return none(tree, dir) };
    let tables = ["dependencies", "dev-dependencies", "build-dependencies"];
    let tables = tables.iter().flat_map(|name| [manifest.get(name), workspace.get(name)]);
    let dependencies = tables.flatten().filter_map(Toml::as_table).flat_map(|table| table.values());
    let paths = dependencies.filter_map(|value| Some(value.get("path")?.as_str()?.to_owned()));
    Ok(MemberPatterns::of(
        toml_list(workspace.get("members")).chain(paths),
        toml_list(workspace.get("exclude")),
    ))
}

/// `workspaces` of package.json, and `packages` of pnpm-workspace.yaml.
pub fn node(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let manifest = read_json(tree, &path_in(dir, "package.json"))?;
    let workspaces = &manifest["workspaces"];
    let listed =
        workspaces.as_array().or_else(|| workspaces["packages"].as_array()).cloned().unwrap_or_default();
    let listed = listed.into_iter().filter_map(|value| value.as_str().map(str::to_owned));
    let packages = pnpm_packages(&tree.text(&path_in(dir, "pnpm-workspace.yaml"))?.unwrap_or_default());
    Ok(MemberPatterns::of(listed.chain(packages), []))
}

/// The list `packages` of pnpm-workspace.yaml, one item in each line. A YAML parser would expand anchors, which a
/// hostile repository could nest until the memory is full.
fn pnpm_packages(text: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| line.trim_end() != "packages:").skip(1);
    let lines = lines.filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
    lines
        .map_while(|line| line.trim_start().strip_prefix("- "))
        .map(|item| item.split(" #").next().unwrap_or(item).trim().trim_matches(['"', '\'']).to_owned())
        .collect()
}

/// Directories of requirements files, which belong to the project above them.
const REQUIREMENTS_DIRS: &[&str] =
    &["requirements", "tests", "tests/requirements", "test", "test/requirements"];

/// `tool.uv.workspace` of pyproject.toml, and directories of requirements files.
pub fn python(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let manifest = read_toml(tree, &path_in(dir, "pyproject.toml"))?;
    let workspace = manifest.get("tool").and_then(|tool| tool.get("uv")?.get("workspace"));
    let list = |name| toml_list(workspace.and_then(|workspace| workspace.get(name)));
    let requirements = REQUIREMENTS_DIRS.iter().map(|dir| (*dir).to_owned());
    Ok(MemberPatterns::of(list("members").chain(requirements), list("exclude")))
}

/// `use` of go.work.
pub fn go(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let text = tree.text(&path_in(dir, "go.work"))?.unwrap_or_default();
    let mut is_block = false;
    let mut used = Vec::new();
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default().trim();
        match line.strip_prefix("use") {
            Some(rest) if rest.trim() == "(" => is_block = true,
            Some(rest) if rest.starts_with([' ', '\t']) => used.push(rest.trim().to_owned()),
            _ if line == ")" => is_block = false,
            _ if is_block && !line.is_empty() => used.push(line.to_owned()),
            _ => {}
        }
    }
    Ok(MemberPatterns::of(used.into_iter().map(|path| globset::escape(path.trim_matches('"'))), []))
}

/// `repositories` of composer.json that are paths.
pub fn php(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let manifest = read_json(tree, &path_in(dir, "composer.json"))?;
    let repositories: Vec<Json> = match &manifest["repositories"] {
        Json::Array(list) => list.clone(),
        Json::Object(map) => map.values().cloned().collect(),
        _ => Vec::new(),
    };
    let paths = repositories.into_iter().filter(|repository| repository["type"] == "path");
    Ok(MemberPatterns::of(paths.filter_map(|repository| repository["url"].as_str().map(str::to_owned)), []))
}

/// `<module>` of pom.xml.
pub fn maven(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let text = tree.text(&path_in(dir, "pom.xml"))?.unwrap_or_default();
    let modules = text.split("<module>").skip(1).filter_map(|rest| rest.split_once("</module>"));
    Ok(MemberPatterns::of(modules.map(|(module, _)| globset::escape(module.trim())), []))
}

/// `include` of settings.gradle and settings.gradle.kts, whose project paths are directories unless they say otherwise.
pub fn gradle(tree: &RepoTree, dir: &str) -> Result<MemberPatterns, WorkspaceError> {
    let mut included = Vec::new();
    for name in ["settings.gradle", "settings.gradle.kts"] {
        let text = tree.text(&path_in(dir, name))?.unwrap_or_default();
        let lines = text.lines().filter(|line| line.trim_start().starts_with("include"));
        let quoted = lines.flat_map(|line| line.split(['"', '\'']).skip(1).step_by(2).map(str::to_owned));
        included.extend(quoted.map(|path| globset::escape(&path.trim_start_matches(':').replace(':', "/"))));
    }
    Ok(MemberPatterns::of(included, []))
}

/// Reads a TOML file; an empty table if it is missing or not TOML, which its own tool reports better.
pub fn read_toml(tree: &RepoTree, path: &str) -> Result<Toml, WorkspaceError> {
    let empty = || Toml::Table(toml::Table::new());
    Ok(tree.text(path)?.and_then(|text| toml::from_str(&text).ok()).unwrap_or_else(empty))
}

/// Reads a JSON file; null if it is missing or not JSON, which its own tool reports better.
pub fn read_json(tree: &RepoTree, path: &str) -> Result<Json, WorkspaceError> {
    Ok(tree.text(path)?.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default())
}

fn toml_list(value: Option<&Toml>) -> impl Iterator<Item = String> {
    let list = value.and_then(Toml::as_array).cloned().unwrap_or_default();
    list.into_iter().filter_map(|value| value.as_str().map(str::to_owned))
}
