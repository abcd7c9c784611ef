//! What a person decided about a data directory: `config.json`.
//!
//! Invariant: a setting has one name, on the command line, in the file and in the event that tells of its change.

use std::{
    io,
    path::{Path, PathBuf},
};

use proto::{Failure, Kind, Size, event_data::ConfigChanged, vm::Engine};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    Fleet,
    pool::{POOL_MAX, POOL_SIZE_DEFAULT},
};

/// What layers and dependencies may take together where nobody said otherwise.
const BUDGET_DEFAULT: Size = Size(20 << 30);
const SETTINGS_LEN_MAX: u64 = 64 << 10;

/// `config.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// What layers and dependencies may take together.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "store.budget")]
    pub budget: Option<Size>,
    /// What drives machines that ask for no hypervisor.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.engine")]
    pub engine: Option<Engine>,
    /// How many running microVMs of a template a server keeps ready.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        rename = "microvm.pool_size",
        alias = "microvm.spares"
    )]
    pub pool_size: Option<u32>,
    /// Where Cloud Hypervisor's program is.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.cloud-hypervisor")]
    pub cloud_hypervisor: Option<PathBuf>,
    /// Where Firecracker's program is.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.firecracker")]
    pub firecracker: Option<PathBuf>,
    /// Where its jailer is, or [`NONE`].
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.jailer")]
    pub jailer: Option<PathBuf>,
}

/// What [`Setting::PoolSize`] was called before.
const EARLIER_POOL_SIZE: &str = "microvm.spares";

/// In place of a program: it is not to be used.
pub(crate) const NONE: &str = "none";

/// One setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// What layers and dependencies may take together.
    Budget,
    /// What drives machines that ask for no hypervisor.
    Engine,
    /// How many running microVMs of a template a server keeps ready.
    PoolSize,
    /// Where Cloud Hypervisor's program is.
    CloudHypervisor,
    /// Where Firecracker's program is.
    Firecracker,
    /// Where Firecracker's jailer is, or that it is not to be used.
    Jailer,
}

impl Setting {
    /// All of them.
    pub const ALL: [Setting; 6] =
        [Self::Budget, Self::Engine, Self::PoolSize, Self::CloudHypervisor, Self::Firecracker, Self::Jailer];

    /// The word on every surface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "store.budget",
            Self::Engine => "microvm.engine",
            Self::PoolSize => "microvm.pool_size",
            Self::CloudHypervisor => "microvm.cloud-hypervisor",
            Self::Firecracker => "microvm.firecracker",
            Self::Jailer => "microvm.jailer",
        }
    }

    /// The setting with that name, or with the name that an earlier version had for it.
    pub fn find(name: &str) -> Result<Self, Failure> {
        let name = if name == EARLIER_POOL_SIZE { Self::PoolSize.name() } else { name };
        Self::ALL.into_iter().find(|setting| setting.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Failure::new(Kind::Usage, format!("there is no setting {}", proto::text::visible(name)))
                .hint(format!("there are: {names}"))
        })
    }

    /// What it is now, as text; none where nobody decided and there is nothing to say instead.
    pub fn value(self, settings: &Settings) -> Option<String> {
        let place = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        match self {
            Self::Budget => Some(settings.budget.unwrap_or(BUDGET_DEFAULT).to_string()),
            Self::Engine => Some(settings.engine.unwrap_or_default().to_string()),
            Self::PoolSize => Some(settings.pool_size().to_string()),
            Self::CloudHypervisor => place(&settings.cloud_hypervisor),
            Self::Firecracker => place(&settings.firecracker),
            Self::Jailer => place(&settings.jailer),
        }
    }

    /// The same as it stands in JSON.
    pub fn json(self, settings: &Settings) -> Value {
        match self {
            Self::Budget => json!(settings.budget.unwrap_or(BUDGET_DEFAULT)),
            Self::PoolSize => json!(settings.pool_size()),
            _ => json!(self.value(settings)),
        }
    }

    fn put(self, settings: &mut Settings, value: &str) -> Result<(), Failure> {
        match self {
            Self::Budget => {
                settings.budget = Some(value.parse().map_err(|error| invalid_value(self, value, &error))?)
            }
            Self::Engine => {
                settings.engine = Some(value.parse().map_err(|error| invalid_value(self, value, &error))?)
            }
            Self::PoolSize => settings.pool_size = Some(pool_size(value)?),
            Self::CloudHypervisor => settings.cloud_hypervisor = program(value)?,
            Self::Firecracker => settings.firecracker = program(value)?,
            Self::Jailer if value == NONE => settings.jailer = Some(NONE.into()),
            Self::Jailer => settings.jailer = program(value)?,
        }
        Ok(())
    }
}

fn invalid_value(setting: Setting, value: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Kind::Usage, format!("{} cannot be {:?}", setting.name(), proto::text::visible(value)))
        .because(error.to_string())
        .hint("see what it is now: pal config get NAME")
}

/// A number of running microVMs that a host can keep ready.
fn pool_size(value: &str) -> Result<u32, Failure> {
    let bounds = format!("it is a number from 0, for none, to {POOL_MAX}");
    match value.parse() {
        Ok(count @ 0..=POOL_MAX) => Ok(count),
        _ => Err(invalid_value(Setting::PoolSize, value, &bounds)),
    }
}

/// A program by its whole path; nothing means where programs are.
fn program(value: &str) -> Result<Option<PathBuf>, Failure> {
    let path = Path::new(value);
    match (value.is_empty(), path.is_absolute() && path.is_file()) {
        (true, _) => Ok(None),
        (false, true) => Ok(Some(path.to_owned())),
        (false, false) => {
            Err(Failure::new(Kind::NotFound, format!("there is no program {}", proto::text::visible(value)))
                .hint("name it from `/`; an empty word means: where programs are"))
        }
    }
}

impl Settings {
    /// How many running microVMs of a template a server keeps ready.
    pub fn pool_size(&self) -> u32 {
        self.pool_size.unwrap_or(POOL_SIZE_DEFAULT)
    }

    /// Where the program of a hypervisor is, if that was decided.
    pub fn program(&self, which: Engine) -> Option<&Path> {
        match which {
            Engine::Qemu => None,
            Engine::CloudHypervisor => self.cloud_hypervisor.as_deref(),
            Engine::Firecracker => self.firecracker.as_deref(),
        }
    }
}

/// What a person decided about a data directory.
pub(crate) fn read(data: &Path) -> Result<Settings, Failure> {
    match sys::fd::read_small(&data.join("config.json"), SETTINGS_LEN_MAX) {
        Ok(text) => serde_json::from_str(&text).map_err(|error| {
            Failure::new(Kind::Host, "the settings of the data directory are damaged")
                .because(error)
                .hint("remove config.json from the data directory, and decide again: pal config set")
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Settings::default()),
        Err(error) => Err(Failure::new(Kind::Host, "cannot read the settings").because(error)),
    }
}

impl Fleet {
    /// What layers and dependencies may take together.
    pub fn budget(&self) -> Result<Size, Failure> {
        Ok(self.settings()?.budget.unwrap_or(BUDGET_DEFAULT))
    }

    /// What a person decided.
    pub fn settings(&self) -> Result<Settings, Failure> {
        read(&self.data)
    }

    /// Decides one, and leaves the others as they are.
    pub fn set_setting(&self, setting: Setting, value: &str) -> Result<Settings, Failure> {
        let mut settings = self.settings()?;
        setting.put(&mut settings, value)?;
        self.write_setting(setting, &settings)?;
        self.check_pool();
        Ok(settings)
    }

    /// Decides what layers and dependencies may take together.
    pub fn set_budget(&self, budget: Size) -> Result<(), Failure> {
        let settings = Settings { budget: Some(budget), ..self.settings().unwrap_or_default() };
        self.write_setting(Setting::Budget, &settings)
    }

    fn write_setting(&self, changed: Setting, settings: &Settings) -> Result<(), Failure> {
        let value = changed.json(settings);
        self.log.note(ConfigChanged { settings: [(changed.name().to_owned(), value)].into() })?;
        let text = serde_json::to_vec(settings)
            .map_err(|error| Failure::new(Kind::Internal, "cannot write the settings").because(error))?;
        sys::fd::write_whole(&self.data.join("config.json"), &text).map_err(|error| {
            Failure::new(Kind::Host, "cannot write the settings").because(error).hint("make room: pal gc")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earlier_name_of_the_pool_size_is_read() {
        let earlier: Settings = serde_json::from_str(r#"{"microvm.spares":3}"#).unwrap();
        assert_eq!(earlier.pool_size(), 3);
        assert_eq!(serde_json::to_string(&earlier).unwrap(), r#"{"microvm.pool_size":3}"#);
        assert_eq!(Setting::find("microvm.spares").unwrap(), Setting::PoolSize);
        assert_eq!(Setting::find("microvm.pool_size").unwrap(), Setting::PoolSize);
    }
}
