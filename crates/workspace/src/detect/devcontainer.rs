//! Reads `devcontainer.json`: the settings that Palisade honours, and a note for each one that it ignores.
//!
//! Trust: the file comes from a repository. Palisade never runs `initializeCommand`, which other tools run on
//! the host, and passes on host variables only if the caller gave them for this Body.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::jsonc::plain_json;
use crate::error::WorkspaceError;

/// Most ports read from one file.
const PORTS_MAX: usize = 64;

/// The settings of devcontainer.json that apply to a Body.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devcontainer {
    /// The image or build of the Body's root; none if the file names neither.
    pub root: Option<DevcontainerRoot>,
    /// The user that runs commands.
    pub user: Option<String>,
    /// Variables of every command, in order; a value may refer to other variables.
    pub env: Vec<(String, String)>,
    /// Commands that run once, after the Body is created.
    pub create: Vec<String>,
    /// Commands that run at each start of the Body.
    pub start: Vec<String>,
    /// Ports that the user wants to reach.
    pub ports: Vec<u16>,
    /// Features that only need a program, which the template must have: the feature and its program.
    pub programs: Vec<(String, &'static str)>,
    /// Notes about settings that Palisade ignores.
    pub notes: Vec<String>,
}

/// Where the root of a Body comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevcontainerRoot {
    /// An image from a registry.
    Image(String),
    /// A Dockerfile to build.
    Build {
        /// Path of the Dockerfile in the repository.
        file: String,
        /// The build context, a directory of the repository; empty for its top.
        context: String,
        /// Build arguments (`ARG`).
        args: BTreeMap<String, String>,
        /// The target stage; none for the last.
        target: Option<String>,
    },
}

/// The fields of the file that Palisade reads.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DevcontainerFile {
    image: Option<String>,
    build: Option<DockerBuild>,
    docker_file: Option<String>,
    context: Option<String>,
    docker_compose_file: Option<Value>,
    features: BTreeMap<String, Value>,
    container_env: BTreeMap<String, String>,
    remote_env: BTreeMap<String, Option<String>>,
    container_user: Option<String>,
    remote_user: Option<String>,
    workspace_folder: Option<String>,
    on_create_command: Option<Value>,
    update_content_command: Option<Value>,
    post_create_command: Option<Value>,
    post_start_command: Option<Value>,
    forward_ports: Vec<Value>,
    app_port: Option<Value>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct DockerBuild {
    dockerfile: Option<String>,
    context: Option<String>,
    args: BTreeMap<String, String>,
    target: Option<String>,
}

/// Fields that Palisade ignores, and the reason that the note gives.
const NOT_HONOURED: &[(&str, &str)] = &[
    ("initializeCommand", "it would run on the host"),
    ("postAttachCommand", "Palisade has no attach step"),
    ("mounts", "mount a host directory with: pal up --mount"),
    ("workspaceMount", "the repository is at /workspace"),
    ("runArgs", "Palisade does not use Docker"),
    ("privileged", "no Body is privileged"),
    ("capAdd", "no Body gains capabilities"),
    ("securityOpt", "it would weaken the sandbox"),
];

/// Features that Palisade honours if the template has a program, and that program.
const FEATURES: &[(&str, &str)] = &[
    ("git", "git"),
    ("node", "node"),
    ("python", "python3"),
    ("go", "go"),
    ("rust", "cargo"),
    ("ruby", "ruby"),
    ("php", "php"),
    ("github-cli", "gh"),
    ("common-utils", "sh"),
    ("git-lfs", "git-lfs"),
];

/// Parses the file at the repository path `place`.
pub fn read(place: &str, text: &str) -> Result<Devcontainer, WorkspaceError> {
    let wrong = |why: String| WorkspaceError::Repository(format!("{place}: {}", proto::text::visible(&why)));
    let text: DevcontainerFile =
        serde_json::from_str(&plain_json(text)).map_err(|error| wrong(error.to_string()))?;
    let dir = place.rsplit_once('/').map_or("", |(dir, _)| dir);
    let mut container = Devcontainer {
        root: root(dir, &text).map_err(wrong)?,
        user: text.remote_user.clone().or(text.container_user.clone()),
        ..Devcontainer::default()
    };
    container.env.extend(text.container_env.clone());
    container
        .env
        .extend(text.remote_env.iter().filter_map(|(name, value)| Some((name.clone(), value.clone()?))));
    let once = [&text.on_create_command, &text.update_content_command, &text.post_create_command];
    container.create = once.into_iter().flatten().flat_map(lines).collect();
    container.start = text.post_start_command.iter().flat_map(lines).collect();
    container.ports(&text);
    container.features(text.features.keys());
    container.tell(&text);
    container.notes = container.notes.iter().map(|note| format!("{place}: {note}")).collect();
    Ok(container)
}

fn root(dir: &str, text: &DevcontainerFile) -> Result<Option<DevcontainerRoot>, String> {
    let build = text.build.as_ref();
    let file = build.and_then(|build| build.dockerfile.clone()).or_else(|| text.docker_file.clone());
    let Some(file) = file else { return Ok(text.image.clone().map(DevcontainerRoot::Image)) };
    let context = build
        .and_then(|build| build.context.clone())
        .or_else(|| text.context.clone())
        .unwrap_or_else(|| ".".to_owned());
    let outside = || "its build context or Dockerfile is outside of the repository".to_owned();
    Ok(Some(DevcontainerRoot::Build {
        file: below(dir, &file).ok_or_else(outside)?,
        context: below(dir, &context).ok_or_else(outside)?,
        args: build.map(|build| build.args.clone()).unwrap_or_default(),
        target: build.and_then(|build| build.target.clone()),
    }))
}

/// Resolves a path relative to a directory, without `.` and `..`; none if it leads out of the repository.
fn below(dir: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = dir.split('/').filter(|part| !part.is_empty()).collect();
    if path.starts_with('/') {
        return None;
    }
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

impl Devcontainer {
    fn ports(&mut self, text: &DevcontainerFile) {
        let more = match &text.app_port {
            Some(Value::Array(several)) => several.clone(),
            Some(one) => vec![one.clone()],
            None => Vec::new(),
        };
        for port in text.forward_ports.iter().chain(&more).take(PORTS_MAX) {
            let number = port
                .as_u64()
                .and_then(|port| u16::try_from(port).ok())
                .or_else(|| port.as_str()?.parse().ok())
                .filter(|port| *port != 0);
            match number {
                Some(port) if self.ports.contains(&port) => {}
                Some(port) => self.ports.push(port),
                None => self.notes.push(format!(
                    "forwardPorts: {} is not a port of the Body",
                    proto::text::visible(&port.to_string())
                )),
            }
        }
    }

    fn features<'a>(&mut self, features: impl Iterator<Item = &'a String>) {
        for feature in features {
            let name = feature.rsplit('/').next().unwrap_or(feature);
            let name = name.split([':', '@']).next().unwrap_or(name);
            match FEATURES.iter().find(|(known, _)| *known == name) {
                Some((_, program)) => self.programs.push((proto::text::visible(feature), program)),
                None => self.notes.push(format!(
                    "the feature {} is not installed: Palisade does not support it",
                    proto::text::visible(feature)
                )),
            }
        }
    }

    fn tell(&mut self, text: &DevcontainerFile) {
        for (name, why) in NOT_HONOURED.iter().filter(|(name, _)| text.rest.contains_key(*name)) {
            self.notes.push(format!("{name} is not honoured: {why}"));
        }
        if text.docker_compose_file.is_some() {
            self.notes.push("dockerComposeFile is not honoured: a Body is one sandbox".into());
        }
        if text
            .workspace_folder
            .as_deref()
            .is_some_and(|folder| !folder.starts_with("/workspace/") && !folder.contains("${"))
        {
            self.notes.push("workspaceFolder is not honoured: the repository is at /workspace".into());
        }
    }
}

/// The shell lines of a command: a string, a list of words, or an object with several of either.
fn lines(command: &Value) -> Vec<String> {
    let quoted = |word: &str| format!("'{}'", word.replace('\'', r"'\''"));
    match command {
        Value::String(line) => vec![line.clone()],
        Value::Array(words) => {
            vec![words.iter().filter_map(|word| word.as_str()).map(quoted).collect::<Vec<_>>().join(" ")]
        }
        Value::Object(several) => several.values().flat_map(lines).collect(),
        _ => Vec::new(),
    }
}

/// The values of `${…}` in the file.
#[derive(Debug, Clone, Copy)]
pub struct VariableContext<'a> {
    /// The path of the repository in the Body.
    pub folder: &'a str,
    /// Host variables that the caller gave for this Body.
    pub given: &'a BTreeMap<String, String>,
    /// Variables of the template.
    pub template: &'a BTreeMap<String, String>,
}

impl VariableContext<'_> {
    /// Replaces the variables in a text; adds names of host variables that were not given to `wanted`.
    pub fn fill(&self, text: &str, wanted: &mut Vec<String>) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            out.push_str(&rest[..at]);
            let Some((inner, after)) = rest[at + 2..].split_once('}') else { break };
            match self.meaning(inner, wanted) {
                Some(value) => out.push_str(&value),
                // Another `${…}` belongs to the shell.
                None => out.push_str(&rest[at..at + inner.len() + 3]),
            }
            rest = after;
        }
        out + rest
    }

    fn meaning(&self, inner: &str, wanted: &mut Vec<String>) -> Option<String> {
        let base = self.folder.rsplit('/').next().unwrap_or_default();
        let mut parts = inner.splitn(3, ':');
        match (parts.next()?, parts.next(), parts.next()) {
            ("containerWorkspaceFolder" | "localWorkspaceFolder", None, _) => Some(self.folder.to_owned()),
            ("containerWorkspaceFolderBasename" | "localWorkspaceFolderBasename", None, _) => {
                Some(base.to_owned())
            }
            ("devcontainerId", None, _) => {
                Some(crate::tree_layer::id_of("devcontainer", &[self.folder]).to_string())
            }
            ("localEnv" | "env", Some(name), default) => Some(match (self.given.get(name), default) {
                (Some(value), _) => value.clone(),
                (None, Some(default)) => default.to_owned(),
                (None, None) => {
                    wanted.push(proto::text::visible(name));
                    String::new()
                }
            }),
            ("containerEnv", Some(name), default) => {
                let value = self.template.get(name).cloned().or_else(|| default.map(str::to_owned));
                Some(value.unwrap_or_default())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{ // a
        "build": { "dockerfile": "Dockerfile", "context": "..", "args": { "V": "1" }, "target": "dev", },
        /* x */ "containerEnv": { "A": "b//c", },
        "remoteEnv": { "TOKEN": "${localEnv:TOKEN}", "PATH": "${containerEnv:PATH}:/x", "GONE": null },
        "remoteUser": "node", "forwardPorts": [3000, "8080", "db:5432", 3000], "initializeCommand": "evil",
        "features": { "ghcr.io/devcontainers/features/node:1": {}, "ghcr.io/x/y/z@sha256:1": {} },
        "onCreateCommand": "one", "postCreateCommand": { "a": ["echo", "it's"], "b": "three" }, "postStartCommand": "go",
    }"#;

    #[test]
    fn what_holds_is_taken_and_the_rest_is_told() {
        let read = read(".devcontainer/devcontainer.json", FILE).unwrap();
        let args = BTreeMap::from([("V".to_owned(), "1".to_owned())]);
        assert_eq!(
            read.root,
            Some(DevcontainerRoot::Build {
                file: ".devcontainer/Dockerfile".into(),
                context: String::new(),
                args,
                target: Some("dev".into())
            })
        );
        assert_eq!(
            (read.user.as_deref(), &read.ports[..], &read.start[..]),
            (Some("node"), &[3000, 8080][..], &["go".to_owned()][..])
        );
        assert_eq!(read.create, ["one", r"'echo' 'it'\''s'", "three"]);
        assert_eq!(read.programs, [("ghcr.io/devcontainers/features/node:1".to_owned(), "node")]);
        let notes = read.notes.join("\n");
        assert!(
            ["initializeCommand", "db:5432", "ghcr.io/x/y/z"].iter().all(|told| notes.contains(told))
                && read.notes.len() == 3,
            "{notes}"
        );
    }

    #[test]
    fn nothing_leads_out_of_the_repository_and_nonsense_is_refused() {
        for bad in [
            r#"{"build":{"dockerfile":"../../x"}}"#,
            r#"{"build":{"dockerfile":"/etc/passwd"}}"#,
            r#"{"dockerFile":"x","context":"../.."}"#,
            "{",
            r#"{"image":1}"#,
        ] {
            assert!(read(".devcontainer/devcontainer.json", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn variables_of_the_host_come_only_when_they_are_given() {
        let given = BTreeMap::from([("TOKEN".to_owned(), "t".to_owned())]);
        let template = BTreeMap::from([("PATH".to_owned(), "/bin".to_owned())]);
        let known = VariableContext { folder: "/workspace/app", given: &given, template: &template };
        let mut wanted = Vec::new();
        for (text, expected) in [
            ("${localEnv:TOKEN}", "t"),
            ("${localEnv:HOME}x", "x"),
            ("${localEnv:NO:d:e}", "d:e"),
            ("${containerEnv:PATH}:/x", "/bin:/x"),
            ("${containerWorkspaceFolder}/y", "/workspace/app/y"),
            ("${localWorkspaceFolderBasename}", "app"),
            ("${HOME}/z ${X:-1}", "${HOME}/z ${X:-1}"),
            ("${open", "${open"),
        ] {
            assert_eq!(known.fill(text, &mut wanted), expected, "{text}");
        }
        assert_eq!(wanted, ["HOME"]);
    }
}
