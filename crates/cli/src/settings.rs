//! The data directory and its durability: from options, then the environment, then defaults for the user.

use std::{
    collections::BTreeMap,
    env,
    path::{Path, PathBuf},
};

use fleet::{Durability, FleetConfig};
use proto::{Failure, Kind};

use crate::args::GlobalArgs;

/// The data directory of root.
const DATA_OF_ROOT: &str = "/var/lib/palisade";

/// The configuration of the fleet.
pub fn config(common: &GlobalArgs) -> Result<FleetConfig, Failure> {
    Ok(FleetConfig { data: data(common)?, durability: durability(common)? })
}

fn data(common: &GlobalArgs) -> Result<PathBuf, Failure> {
    let asked = match &common.data {
        Some(dir) => Some(dir.clone()),
        None => variable("PAL_DATA")?,
    };
    match asked {
        Some(dir) if dir.is_empty() => {
            Err(Failure::new(Kind::Usage, "the path of the data directory is empty")
                .hint("give one: `--data DIR`"))
        }
        Some(dir) => absolute(Path::new(&dir)),
        None if rustix::process::geteuid().is_root() => Ok(DATA_OF_ROOT.into()),
        None => data_of_user(),
    }
}

fn data_of_user() -> Result<PathBuf, Failure> {
    let dir = |name| -> Result<Option<PathBuf>, Failure> {
        Ok(variable(name)?.map(PathBuf::from).filter(|dir| dir.is_absolute()))
    };
    if let Some(dir) = dir("XDG_DATA_HOME")? {
        return Ok(dir.join("palisade"));
    }
    match dir("HOME")? {
        Some(home) => Ok(home.join(".local/share/palisade")),
        None => Err(Failure::new(Kind::Usage, "there is no home directory for the data directory")
            .hint("name a directory: `--data DIR`, or set HOME")),
    }
}

fn durability(common: &GlobalArgs) -> Result<Durability, Failure> {
    if let Some(durability) = common.durability {
        return Ok(durability);
    }
    match variable("PAL_DURABILITY")? {
        None => Ok(Durability::Process),
        Some(word) => crate::args::values::durability(&word)
            .map_err(|why| Failure::new(Kind::Usage, format!("PAL_DURABILITY: {why}"))),
    }
}

/// Environment variables of every new Body: where the user's locale is one of UTF-8, Bodies have one, too. Other parts
/// of the locale stay outside, because a Body may lack the user's language.
pub fn body_env() -> BTreeMap<String, String> {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(|name| variable(name).ok().flatten());
    let lang = locale.filter(|locale| is_utf8(locale)).map(|_| ("LANG".to_owned(), "C.UTF-8".to_owned()));
    lang.into_iter().collect()
}

fn is_utf8(locale: &str) -> bool {
    let charset =
        locale.split('@').next().and_then(|locale| locale.split_once('.')).map(|(_, charset)| charset);
    charset.is_some_and(|charset| ["utf-8", "utf8"].contains(&charset.to_ascii_lowercase().as_str()))
}

/// Makes a path absolute.
pub fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|error| {
        Failure::new(Kind::Host, format!("cannot make {} an absolute path", path.display())).because(error).hint(
            "the current directory may have been removed: `cd` to one that exists, or give an absolute path",
        )
    })
}

/// An environment variable; none if it is empty.
pub fn variable(name: &str) -> Result<Option<String>, Failure> {
    match env::var(name) {
        Ok(value) if value.is_empty() => Ok(None),
        Ok(value) => Ok(Some(value)),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => {
            Err(Failure::new(Kind::Usage, format!("{name} is not valid UTF-8"))
                .hint(format!("set {name} to a path of plain text")))
        }
    }
}

/// The host names that commands of a build may reach.
pub fn allowed_hosts(offline: bool, more: &[String]) -> Result<Vec<String>, Failure> {
    let known = if offline { Vec::new() } else { fleet::registries() };
    let allow: Vec<String> = known.into_iter().chain(more.iter().cloned()).collect();
    fleet::check_rules(&allow)?;
    Ok(allow)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locale_says_whether_it_is_utf_8() {
        for locale in ["C.UTF-8", "en_GB.utf8", "de_DE.UTF-8@euro", "C.utf-8"] {
            assert!(is_utf8(locale), "{locale}");
        }
        for locale in ["C", "POSIX", "de_DE", "de_DE.ISO-8859-1", "de_DE@euro", "utf8", "ja_JP.eucJP"] {
            assert!(!is_utf8(locale), "{locale}");
        }
    }
}
