//! Scripts of models by their names below the configuration directory.
//!
//! Invariant: a name leads to a file below `scripts/` and nowhere else: not by `..`, not by a symbolic link. So a caller
//! that may not read files of the host may still name a script.
//! Invariant: events and errors hold the name, never the path on the host.

use std::{
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use brain::model::{
    HttpOptions, Model,
    scripted::{Script, ScriptedModel},
};
use proto::{Failure, Kind};

/// The directory of scripts in the configuration directory.
const SCRIPTS: &str = "scripts";

/// The file of a script that is named relative to `scripts/` in the configuration directory.
pub fn find_script(config: &Path, name: &Path) -> Result<PathBuf, Failure> {
    let missing = || {
        let name = name.display().to_string();
        Failure::new(Kind::NotFound, format!("there is no script {:?}", proto::text::visible(&name)))
            .hint("put it into `scripts/` of the configuration directory of the server")
    };
    if !name.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(missing());
    }
    let directory = config.join(SCRIPTS).canonicalize().map_err(|_| missing())?;
    let file = directory.join(name).canonicalize().map_err(|_| missing())?;
    if file.starts_with(&directory) && file.is_file() { Ok(file) } else { Err(missing()) }
}

/// Opens a script that is named relative to `scripts/` in the configuration directory.
pub(crate) fn open_script(config: &Path, name: &Path) -> Result<Arc<dyn Model>, Failure> {
    let file = find_script(config, name).map_err(|failure| Failure { kind: Kind::Usage, ..failure })?;
    let script = Script::open(&file).map_err(|error| {
        let fault = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
        Failure::new(Kind::Usage, format!("the script {} cannot be used{fault}", name.display()))
            .because(error)
            .hint("see docs/reference/model-script.md")
    })?;
    Ok(Arc::new(ScriptedModel::new(script, name.to_owned(), HttpOptions::default().retry)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_name_leads_nowhere_but_into_the_directory_of_scripts() {
        let config = std::env::temp_dir().join(format!("pal-scripts-{}", std::process::id()));
        fs::create_dir_all(config.join("scripts/sub")).unwrap();
        fs::write(config.join("secret.toml"), "").unwrap();
        fs::write(config.join("scripts/a.toml"), "").unwrap();
        fs::write(config.join("scripts/sub/b.toml"), "").unwrap();
        std::os::unix::fs::symlink("../secret.toml", config.join("scripts/out.toml")).unwrap();
        let absolute = config.join("scripts/a.toml");
        for good in ["a.toml", "sub/b.toml"] {
            assert!(find_script(&config, Path::new(good)).is_ok(), "{good}");
        }
        let bad = ["../secret.toml", "sub/../../secret.toml", "out.toml", "none", "sub", "", "/etc/passwd"];
        for bad in bad.iter().map(Path::new).chain([absolute.as_path()]) {
            assert_eq!(find_script(&config, bad).unwrap_err().kind, Kind::NotFound, "{}", bad.display());
        }
        fs::remove_dir_all(config).unwrap();
    }
}
