//! Parsers of option values. The error of each parser says which values it accepts.

use std::{path::PathBuf, time::Duration};

use fleet::Durability;
use proto::{
    Size,
    spec::{Access, Mount},
    vm::Sharing,
};

/// Longest duration that an option accepts.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Most forks at once.
const FORKS_MAX: u32 = 1000;

/// A size such as `512MiB`, which must not be 0.
pub fn size(text: &str) -> Result<Size, String> {
    match text.parse::<Size>() {
        Ok(Size(0)) => Err("a limit of 0 is too small; write a size such as 512MiB".into()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.to_string()),
    }
}

/// A number of CPUs such as `1.5`, in thousandths.
pub fn cpus(text: &str) -> Result<u32, String> {
    let wanted = || "write a positive number of CPUs with up to three decimals, such as 1.5".to_owned();
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 3 {
        return Err(wanted());
    }
    let whole: u32 = whole.parse().map_err(|_| wanted())?;
    let part: u32 = format!("{part:0<3}").parse().map_err(|_| wanted())?;
    let milli = whole.checked_mul(1000).and_then(|milli| milli.checked_add(part));
    milli.filter(|milli| *milli > 0).ok_or_else(wanted)
}

/// A positive whole number.
pub fn count(text: &str) -> Result<u32, String> {
    let number = text.parse::<u32>().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "write a positive whole number".to_owned())
}

/// A number of forks.
pub fn forks(text: &str) -> Result<u32, String> {
    let number = text.parse::<u32>().ok().filter(|number| (1..=FORKS_MAX).contains(number));
    number.ok_or_else(|| format!("write a whole number from 1 to {FORKS_MAX}"))
}

/// A duration such as `500ms`, `10s`, `2m`, `1h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wanted = || "write a whole number and ms, s, m or h, such as 90s".to_owned();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wanted()),
    };
    let number: u64 = number.parse().map_err(|_| wanted())?;
    let duration = number.checked_mul(unit_ms).map(Duration::from_millis);
    let too_long = || format!("longer than {} hours", DURATION_MAX.as_secs() / 3600);
    duration.filter(|duration| *duration <= DURATION_MAX).ok_or_else(too_long)
}

/// A duration that is not 0.
pub fn timeout(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("a duration of 0 is too short; write one such as 90s".into()),
        duration => Ok(duration),
    }
}

/// A variable `NAME=VALUE`.
pub fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write NAME=VALUE".into()),
    }
}

/// A mount, and how a microVM shares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountArg {
    pub mount: Mount,
    /// The type, if one is given.
    pub sharing: Option<Sharing>,
}

/// A mount `SRC:DST[:ro|rw|rw,unprotected][,type=virtiofs]`.
pub fn mount(text: &str) -> Result<MountArg, String> {
    let (text, sharing) = match text.rsplit_once(",type=") {
        Some((rest, name)) => (rest, Some(name.parse::<Sharing>()?)),
        None => (text, None),
    };
    Ok(MountArg { mount: bare_mount(text)?, sharing })
}

/// A mount `SRC:DST[:ro|rw|rw,unprotected]`.
fn bare_mount(text: &str) -> Result<Mount, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (source, target, access) = match parts[..] {
        [source, target] => (source, target, Access::ReadOnly),
        [source, target, "ro"] => (source, target, Access::ReadOnly),
        [source, target, "rw"] => (source, target, Access::ReadWrite),
        [source, target, "rw,unprotected"] => (source, target, Access::Unprotected),
        [_, _, _] => return Err("a mount ends with :ro, :rw or :rw,unprotected".into()),
        _ => {
            return Err(
                "write SRC:DST, SRC:DST:ro or SRC:DST:rw; a path with a colon cannot be mounted".into()
            );
        }
    };
    if source.is_empty() {
        return Err("the path on the host is empty".into());
    }
    if !target.starts_with('/') {
        return Err(format!("the path in the Body must be absolute, and {target:?} is not"));
    }
    Ok(Mount { source: PathBuf::from(source), target: PathBuf::from(target), access })
}

/// A durability, `power` or `process`.
pub fn durability(text: &str) -> Result<Durability, String> {
    match text {
        "power" => Ok(Durability::Power),
        "process" => Ok(Durability::Process),
        _ => Err("write power (survives power loss) or process (survives kill -9)".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_read_in_thousandths() {
        for (text, milli) in [("1", 1000), ("1.5", 1500), ("0.001", 1), ("16.25", 16_250)] {
            assert_eq!(cpus(text), Ok(milli), "{text}");
        }
        for bad in ["", "0", "0.0", "-1", "1.", ".5", "1.2345", "1e3", "inf", "99999999", "+1"] {
            assert!(cpus(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn durations_have_a_unit() {
        for (text, ms) in [("0s", 0), ("500ms", 500), ("10s", 10_000), ("2m", 120_000), ("1h", 3_600_000)] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for bad in ["", "10", "s", "-1s", "1.5s", "1d", "1 s", "9000h", "99999999999999999999s", "1é"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert!(timeout("0ms").is_err());
    }

    #[test]
    fn mounts_are_read_only_unless_said() {
        let made = |access| MountArg {
            mount: Mount { source: "a".into(), target: "/b".into(), access },
            sharing: None,
        };
        assert_eq!(mount("a:/b"), Ok(made(Access::ReadOnly)));
        assert_eq!(mount("a:/b:ro"), Ok(made(Access::ReadOnly)));
        assert_eq!(mount("a:/b:rw"), Ok(made(Access::ReadWrite)));
        assert_eq!(mount("a:/b:rw,unprotected"), Ok(made(Access::Unprotected)));
        for bad in [
            "",
            "a",
            ":/b",
            "a:b",
            "a:",
            "a:/b:rwx",
            "a:/b:rw:x",
            "a:/b:",
            "a:/b:ro,unprotected",
            "a:/b:unprotected",
        ] {
            assert!(mount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_mount_may_name_its_type() {
        for (text, target, access) in [
            ("a:/b,type=virtiofs", "/b", Access::ReadOnly),
            ("a:/b:rw,type=virtiofs", "/b", Access::ReadWrite),
            ("a:/b,c,type=virtiofs", "/b,c", Access::ReadOnly),
        ] {
            let mount_of = |target: &str| Mount { source: "a".into(), target: target.into(), access };
            let made = MountArg { mount: mount_of(target), sharing: Some(Sharing::Virtiofs) };
            assert_eq!(mount(text), Ok(made), "{text}");
        }
        assert_eq!(mount("a:/b,c").unwrap().sharing, None);
        for bad in ["a:/b,type=9p", "a:/b,type=", "a,type=virtiofs"] {
            assert!(mount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn variables_have_a_name() {
        assert_eq!(variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(variable("A="), Ok(("A".into(), String::new())));
        assert!(variable("A").is_err());
        assert!(variable("=b").is_err());
    }
}
