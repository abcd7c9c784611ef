//! The models that callers may name.
//!
//! Invariant: a caller without the scope `admin` reaches no address that the operator did not list: the request to a
//! model comes from the server's own network and carries the server's key.
//! Invariant: a script is a file below `scripts/` in the server's configuration directory.

use std::path::Path;

use bridge::{HostSettings, ModelAddress, catalog, find_script, key_variable};
use proto::{Failure, Kind};

use crate::{Caller, Scope};

/// The alias of the model of agents whose request names none.
const DEFAULT: &str = "default";
/// The longest name of a model, in characters.
pub const MODEL_LEN_MAX: usize = 512;

/// Checks that a caller may use a model, and returns the name that the agent keeps.
pub fn check_model(settings: &HostSettings, caller: &Caller, asked: Option<&str>) -> Result<String, Failure> {
    // The operator writes models.toml; a caller cannot mend it.
    let catalog = catalog(&settings.config).map_err(|failure| Failure { kind: Kind::Host, ..failure })?;
    let name = match asked {
        Some(name) => name,
        None if catalog.aliases.contains_key(DEFAULT) => DEFAULT,
        None => {
            return Err(Failure::new(Kind::Usage, "no model is named")
                .hint("name one: \"model\": \"anthropic:NAME\"")
                .hint("or let the operator set the alias `default` in models.toml"));
        }
    };
    if name.chars().count() > MODEL_LEN_MAX {
        return Err(Failure::new(Kind::Usage, "`model` is too long")
            .hint(format!("at most {MODEL_LEN_MAX} characters")));
    }
    let address = catalog.resolve(name).map_err(|error| Failure::new(Kind::Usage, error.to_string()))?;
    match &address {
        ModelAddress::Script { file } => find_script(&settings.config, file).map(drop)?,
        ModelAddress::Http { .. } if address.is_vendor() => check_key(settings, &address)?,
        ModelAddress::Http { .. } => {
            let written = address.to_string();
            let is_listed = catalog.aliases.contains_key(name)
                || catalog.aliases.values().any(|listed| listed == name)
                || [name, &written].iter().any(|name| catalog.models.contains_key(*name));
            if !is_listed && caller.scope < Scope::Admin {
                return Err(Failure::new(
                    Kind::Denied,
                    "only a key of scope admin may name the URL of a model that the operator did not list",
                )
                .hint("name a model of the server's models.toml, or `anthropic:NAME` or `openai:NAME`"));
            }
        }
    }
    Ok(name.to_owned())
}

/// Refuses a vendor's model for which the server has no key. The caller can name another model.
fn check_key(settings: &HostSettings, address: &ModelAddress) -> Result<(), Failure> {
    match key_variable(address) {
        Some(variable) if (settings.variables)(variable).is_none() => {
            Err(Failure::new(Kind::Conflict, format!("the server has no key for {address}"))
                .hint(format!("let the operator start it with {variable}, or name another model")))
        }
        _ => Ok(()),
    }
}

/// The model of an agent as clients see it: without the directory of a script that the command line named.
pub fn shown_model(model: &str) -> String {
    let file = model.strip_prefix("script:").map(Path::new).filter(|file| file.is_absolute());
    match file.and_then(Path::file_name) {
        Some(name) => format!("script:{}", name.to_string_lossy()),
        None => model.to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use fleet::GitIdentity;

    use super::*;
    use crate::KeyReach;

    fn caller(scope: Scope) -> Caller {
        Caller { key: "k".into(), scope, reach: KeyReach::Own, has_ceiling: false }
    }

    #[test]
    fn a_caller_names_only_models_that_it_may_reach() {
        let config = std::env::temp_dir().join(format!("pal-models-{}", std::process::id()));
        std::fs::create_dir_all(config.join("scripts")).unwrap();
        std::fs::write(config.join("scripts/ok.toml"), "").unwrap();
        std::fs::write(config.join("no.toml"), "").unwrap();
        let models = r#"
            [aliases]
            near = "m@http://127.0.0.1:1"
            [models."listed@http://127.0.0.1:2"]
            context_tokens = 1000
        "#;
        std::fs::write(config.join("models.toml"), models).unwrap();
        let settings = HostSettings {
            config: config.clone(),
            variables: Arc::new(|name| (name == "OPENAI_API_KEY").then(|| "secret".into())),
            person: GitIdentity { home: "/".into(), path: Default::default(), env: Default::default() },
        };
        let kind =
            |scope, name: &str| check_model(&settings, &caller(scope), Some(name)).err().map(|f| f.kind);
        let cases = [
            ("openai:m", None, None),
            ("anthropic:m", Some(Kind::Conflict), Some(Kind::Conflict)),
            ("near", None, None),
            ("m@http://127.0.0.1:1", None, None),
            ("listed@http://127.0.0.1:2", None, None),
            ("m@http://169.254.169.254", Some(Kind::Denied), None),
            ("listed@http://127.0.0.1:22", Some(Kind::Denied), None),
            ("listed@http://127.0.0.1:2#responses", Some(Kind::Denied), None),
            ("script:ok.toml", None, None),
            ("script:../no.toml", Some(Kind::NotFound), Some(Kind::NotFound)),
            ("script:/etc/passwd", Some(Kind::NotFound), Some(Kind::NotFound)),
            ("nonsense", Some(Kind::Usage), Some(Kind::Usage)),
            ("", Some(Kind::Usage), Some(Kind::Usage)),
        ];
        for (name, run, admin) in cases {
            assert_eq!((kind(Scope::Run, name), kind(Scope::Admin, name)), (run, admin), "{name}");
        }
        let unnamed = check_model(&settings, &caller(Scope::Run), None);
        assert_eq!(unnamed.unwrap_err().kind, Kind::Usage, "there is no alias `default`");
        std::fs::remove_dir_all(config).unwrap();
    }

    #[test]
    fn a_path_of_the_host_is_not_shown() {
        assert_eq!(shown_model("script:/home/ann/demo.toml"), "script:demo.toml");
        assert_eq!(shown_model("script:sub/demo.toml"), "script:sub/demo.toml");
        assert_eq!(shown_model("m@http://h"), "m@http://h");
    }
}
