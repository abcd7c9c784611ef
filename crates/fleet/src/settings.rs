//! The settings of a data directory, in one record.
//!
//! Invariant: a setting has one name: on the command line, in the record and in the event of its change.

use std::path::{Path, PathBuf};

use proto::{
    Failure, Kind, Size,
    egress::{read_no_proxy, read_proxy_url},
    event_data::ConfigChanged,
    vm::Engine,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use store::{RecordTable, Records};

use crate::{
    Fleet,
    pool::{POOL_MAX, POOL_SIZE_DEFAULT},
    records::{SETTINGS, key_of},
};

/// The default of [`Setting::Budget`].
const BUDGET_DEFAULT: Size = Size(20 << 30);
/// The key of the only record.
pub(crate) const CURRENT: &str = "current";

/// All settings; `None` means that the user has not set a value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Disk space that layers and dependency layers may use together.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "store.budget")]
    pub budget: Option<Size>,
    /// The hypervisor of microVMs whose request names none.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.engine")]
    pub engine: Option<Engine>,
    /// How many running microVMs of each template a server keeps in its pool.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        rename = "microvm.pool_size",
        alias = "microvm.spares"
    )]
    pub pool_size: Option<u32>,
    /// The path of Cloud Hypervisor's binary.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.cloud-hypervisor")]
    pub cloud_hypervisor: Option<PathBuf>,
    /// The path of Firecracker's binary.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.firecracker")]
    pub firecracker: Option<PathBuf>,
    /// The path of Firecracker's jailer, or [`NONE`].
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "microvm.jailer")]
    pub jailer: Option<PathBuf>,
    /// The proxy through which Bodies reach hosts: `http://HOST:PORT`.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "network.proxy")]
    pub proxy: Option<String>,
    /// The secret with which they log in at that proxy.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "network.proxy_secret")]
    pub proxy_secret: Option<String>,
    /// The names and suffixes that they reach without it, with commas between them.
    #[serde(default, skip_serializing_if = "Option::is_none", rename = "network.no_proxy")]
    pub no_proxy: Option<String>,
}

/// The earlier name of [`Setting::PoolSize`].
const EARLIER_POOL_SIZE: &str = "microvm.spares";

/// The value, instead of a path, that disables a program.
pub(crate) const NONE: &str = "none";

/// The name of one setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Disk space that layers and dependency layers may use together.
    Budget,
    /// The hypervisor of microVMs whose request names none.
    Engine,
    /// How many running microVMs of each template a server keeps in its pool.
    PoolSize,
    /// The path of Cloud Hypervisor's binary.
    CloudHypervisor,
    /// The path of Firecracker's binary.
    Firecracker,
    /// The path of Firecracker's jailer, or `none` to run without it.
    Jailer,
    /// The proxy through which Bodies reach hosts.
    Proxy,
    /// The secret with which they log in at that proxy.
    ProxySecret,
    /// The names and suffixes that they reach without it.
    NoProxy,
}

impl Setting {
    /// All settings.
    pub const ALL: [Setting; 9] = [
        Self::Budget,
        Self::Engine,
        Self::PoolSize,
        Self::CloudHypervisor,
        Self::Firecracker,
        Self::Jailer,
        Self::Proxy,
        Self::ProxySecret,
        Self::NoProxy,
    ];

    /// The name on the command line, in the record and in events.
    pub fn name(self) -> &'static str {
        match self {
            Self::Budget => "store.budget",
            Self::Engine => "microvm.engine",
            Self::PoolSize => "microvm.pool_size",
            Self::CloudHypervisor => "microvm.cloud-hypervisor",
            Self::Firecracker => "microvm.firecracker",
            Self::Jailer => "microvm.jailer",
            Self::Proxy => "network.proxy",
            Self::ProxySecret => "network.proxy_secret",
            Self::NoProxy => "network.no_proxy",
        }
    }

    /// Finds a setting by its name, or by the name that an earlier version used.
    pub fn find(name: &str) -> Result<Self, Failure> {
        let name = if name == EARLIER_POOL_SIZE { Self::PoolSize.name() } else { name };
        Self::ALL.into_iter().find(|setting| setting.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Failure::new(Kind::Usage, format!("there is no setting {}", proto::text::visible(name)))
                .hint(format!("there are: {names}"))
        })
    }

    /// The current value as text; `None` if the user has set none and there is no default to show.
    pub fn value(self, settings: &Settings) -> Option<String> {
        let place = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
        match self {
            Self::Budget => Some(settings.budget.unwrap_or(BUDGET_DEFAULT).to_string()),
            Self::Engine => Some(settings.engine.unwrap_or_default().to_string()),
            Self::PoolSize => Some(settings.pool_size().to_string()),
            Self::CloudHypervisor => place(&settings.cloud_hypervisor),
            Self::Firecracker => place(&settings.firecracker),
            Self::Jailer => place(&settings.jailer),
            Self::Proxy => settings.proxy.clone(),
            Self::ProxySecret => settings.proxy_secret.clone(),
            Self::NoProxy => settings.no_proxy.clone(),
        }
    }

    /// The current value as it appears in JSON.
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
            Self::Proxy => settings.proxy = proxy(value)?,
            Self::ProxySecret => {
                settings.proxy_secret = Some(value.to_owned()).filter(|name| !name.is_empty())
            }
            Self::NoProxy => {
                let names = read_no_proxy(value).map_err(|why| invalid_value(self, value, &why))?;
                settings.no_proxy = Some(names.join(",")).filter(|names| !names.is_empty());
            }
        }
        Ok(())
    }
}

fn invalid_value(setting: Setting, value: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(Kind::Usage, format!("{} cannot be {:?}", setting.name(), proto::text::visible(value)))
        .because(error.to_string())
        .hint("see what it is now: pal config get NAME")
}

/// Parses the number of pooled microVMs.
fn pool_size(value: &str) -> Result<u32, Failure> {
    let bounds = format!("it is a number from 0, for none, to {POOL_MAX}");
    match value.parse() {
        Ok(count @ 0..=POOL_MAX) => Ok(count),
        _ => Err(invalid_value(Setting::PoolSize, value, &bounds)),
    }
}

/// Parses the URL of the corporate proxy; an empty value means none. A failure does not repeat a password.
fn proxy(value: &str) -> Result<Option<String>, Failure> {
    if value.is_empty() {
        return Ok(None);
    }
    if value.contains('@') {
        return Err(Failure::new(Kind::Usage, "network.proxy has no user and no password")
            .because("every user of this machine can read arguments, and settings are shown")
            .hint("store them: printf USER:PASSWORD | pal secret set NAME --to HOST:PORT")
            .hint("and name the secret: pal config set network.proxy_secret NAME"));
    }
    let address = read_proxy_url(value).map_err(|why| invalid_value(Setting::Proxy, value, &why))?;
    Ok(Some(format!("http://{address}")))
}

/// Parses the absolute path of a program; an empty value means a search in the usual directories.
fn program(value: &str) -> Result<Option<PathBuf>, Failure> {
    let path = Path::new(value);
    match (value.is_empty(), path.is_absolute() && path.is_file()) {
        (true, _) => Ok(None),
        (false, true) => Ok(Some(path.to_owned())),
        (false, false) => {
            Err(Failure::new(Kind::NotFound, format!("there is no program {}", proto::text::visible(value)))
                .hint("give an absolute path; an empty value searches the usual directories"))
        }
    }
}

impl Settings {
    /// How many running microVMs of each template a server keeps in its pool.
    pub fn pool_size(&self) -> u32 {
        self.pool_size.unwrap_or(POOL_SIZE_DEFAULT)
    }

    /// The path of a hypervisor's binary, if the user has set one.
    pub fn program(&self, which: Engine) -> Option<&Path> {
        match which {
            Engine::Qemu => None,
            Engine::CloudHypervisor => self.cloud_hypervisor.as_deref(),
            Engine::Firecracker => self.firecracker.as_deref(),
        }
    }
}

/// Reads the settings of a data directory.
pub(crate) fn read(records: &dyn Records) -> Result<Settings, Failure> {
    let found = table(records).get(&key_of([CURRENT])?)?;
    Ok(found.map(|record| record.value).unwrap_or_default())
}

fn table(records: &dyn Records) -> RecordTable<'_, Settings> {
    RecordTable::new(records, SETTINGS)
}

/// Reads and changes the settings of a data directory.
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
    /// Reads all settings.
    pub fn read(&self) -> Result<Settings, Failure> {
        read(&**self.fleet.records())
    }

    /// The disk space that layers and dependency layers may use together.
    pub fn budget(&self) -> Result<Size, Failure> {
        Ok(self.read()?.budget.unwrap_or(BUDGET_DEFAULT))
    }

    /// Changes one setting.
    pub fn set(&self, setting: Setting, value: &str) -> Result<Settings, Failure> {
        if setting == Setting::ProxySecret && !value.is_empty() {
            self.fleet.secrets().find(value)?;
        }
        let settings = self.change(setting, |settings| setting.put(settings, value))?;
        if let Some(pool) = self.fleet.pool() {
            pool.check();
        }
        Ok(settings)
    }

    /// Sets the disk space that layers and dependency layers may use together.
    pub fn set_budget(&self, budget: Size) -> Result<(), Failure> {
        self.change(Setting::Budget, |settings| {
            settings.budget = Some(budget);
            Ok(())
        })
        .map(drop)
    }

    /// Changes the record; the event of the change comes first.
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

    #[test]
    fn a_password_of_the_corporate_proxy_is_neither_kept_nor_repeated() {
        let mut settings = Settings::default();
        Setting::Proxy.put(&mut settings, "http://Proxy.corp.example:3128/").unwrap();
        assert_eq!(settings.proxy.as_deref(), Some("http://proxy.corp.example:3128"));
        for bad in ["http://me:hunter2@proxy:3128", "me:hunter2@proxy"] {
            let failure = Setting::Proxy.put(&mut settings, bad).unwrap_err();
            assert!(!format!("{failure:?}").contains("hunter2"), "{failure:?}");
        }
        assert!(Setting::Proxy.put(&mut settings, "socks5://proxy:1080").is_err());
        assert!(Setting::NoProxy.put(&mut settings, "10.0.0.0/8").is_err());
        Setting::NoProxy.put(&mut settings, "git.corp.example, .intern.example").unwrap();
        assert_eq!(settings.no_proxy.as_deref(), Some("git.corp.example,.intern.example"));
        Setting::Proxy.put(&mut settings, "").unwrap();
        assert_eq!(settings.proxy, None);
    }
}
