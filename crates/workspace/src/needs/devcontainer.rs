//! `devcontainer.json`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What is honoured of `devcontainer.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Devcontainer {
    pub image: Option<String>,
    pub build: Option<serde_json::Value>,
    pub docker_file: Option<serde_json::Value>,
    pub docker_compose_file: Option<serde_json::Value>,
    pub features: BTreeMap<String, serde_json::Value>,
    pub container_env: BTreeMap<String, String>,
    pub remote_env: BTreeMap<String, Option<String>>,
    pub on_create_command: Option<serde_json::Value>,
    pub update_content_command: Option<serde_json::Value>,
    pub post_create_command: Option<serde_json::Value>,
}

/// A command of devcontainer.json: a line, a list of words, or several of either by name.
pub fn lines(command: &serde_json::Value) -> Vec<String> {
    let quoted = |word: &str| format!("'{}'", word.replace('\'', r"'\''"));
    match command {
        serde_json::Value::String(line) => vec![line.clone()],
        serde_json::Value::Array(words) => vec![words.iter().filter_map(|word| word.as_str()).map(quoted).collect::<Vec<_>>().join(" ")],
        serde_json::Value::Object(several) => several.values().flat_map(lines).collect(),
        _ => Vec::new(),
    }
}
