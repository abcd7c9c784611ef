//! The settings of a data directory: one record.
//!
//! Invariant: a setting has one name, on the command line, in the record and in the event of its change.

use std::path::{Path, PathBuf};

use proto::{Failure, Kind, Size, event_data::ConfigChanged, vm::Engine};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use store::{RecordTable, Records};

use crate::{
    Fleet,
    pool::{POOL_MAX, POOL_SIZE_DEFAULT},
    records::{SETTINGS, key_of},
};

/// What layers and dependencies may take together where nobody said otherwise.
const BUDGET_DEFAULT: Size = Size(20 << 30);
/// The key of the one record.
pub(crate) const CURRENT: &str = "current";

/// All settings; none where nobody decided.
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

/// The settings of a data directory.
pub(crate) fn read(records: &dyn Records) -> Result<Settings, Failure> {
    let found = table(records).get(&key_of([CURRENT])?)?;
    Ok(found.map(|record| record.value).unwrap_or_default())
}

fn table(records: &dyn Records) -> RecordTable<'_, Settings> {
    RecordTable::new(records, SETTINGS)
}

/// The settings of a data directory, to be read and changed.
#[derive(Debug, Clone, Copy)]
pub struct SettingsRecord<'a> {
    fleet: &'a Fleet,
}

impl Fleet {
    /// The settings of the data directory.
    pub fn settings(&self) -> SettingsRecord<'_> {
        SettingsRecord { fleet: self }
    }
}

impl SettingsRecord<'_> {
    /// All of them.
    pub fn read(&self) -> Result<Settings, Failure> {
        read(&**self.fleet.records())
    }

    /// The most that layers and dependencies may take together.
    pub fn budget(&self) -> Result<Size, Failure> {
        Ok(self.read()?.budget.unwrap_or(BUDGET_DEFAULT))
    }

    /// Sets one, and leaves the others as they are.
    pub fn set(&self, setting: Setting, value: &str) -> Result<Settings, Failure> {
        let settings = self.change(setting, |settings| setting.put(settings, value))?;
        if let Some(pool) = self.fleet.pool() {
            pool.check();
        }
        Ok(settings)
    }

    /// Sets the most that layers and dependencies may take together.
    pub fn set_budget(&self, budget: Size) -> Result<(), Failure> {
        self.change(Setting::Budget, |settings| {
            settings.budget = Some(budget);
            Ok(())
        })
        .map(drop)
    }

    /// Changes the record; the change is an event first.
    fn change(
        &self,
        changed: Setting,
        change: impl Fn(&mut Settings) -> Result<(), Failure>,
    ) -> Result<Settings, Failure> {
        let written = table(&**self.fleet.records()).change(&key_of([CURRENT])?, |found| {
            let mut settings = found.cloned().unwrap_or_default();
            change(&mut settings)?;
            let value = changed.json(&settings);
            self.fleet.log().note(ConfigChanged { settings: [(changed.name().to_owned(), value)].into() })?;
            Ok::<_, Failure>(Some(settings))
        })?;
        Ok(written.unwrap_or_default())
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
