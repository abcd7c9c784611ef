//! The versions of tools that a repository states, and the step that brings one from a registry.

use std::fmt;

use semver::{Comparator, Op, Version, VersionReq};

use super::{needs::PrepareStep, tools::Tool};

/// A tool that the steps of a repository need, and its versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolRequirement {
    /// The tool.
    pub tool: Tool,
    /// The versions that satisfy the repository.
    pub versions: VersionRange,
    /// The repository path of the file that states it.
    pub source: String,
    /// The step that brings a fitting version into the Body from a registry; none if no registry carries one.
    pub install: Option<PrepareStep>,
    /// The host names that `install` may reach. They are not part of [`Needs::allow`](super::Needs): `install` runs no
    /// code of the repository, and needs none of its files.
    pub install_allow: Vec<String>,
    /// The command by which the user gets a fitting version, for a hint.
    pub hint: String,
}

impl ToolRequirement {
    /// The requirement of a tool in any version.
    pub fn any(tool: Tool, source: String) -> Self {
        let hint = tool.get.to_owned();
        Self { tool, versions: VersionRange::Any, source, install: None, install_allow: Vec::new(), hint }
    }

    /// Whether a tool that answers [`Tool::probe`] with this text satisfies the requirement. An empty answer
    /// means that the tool is missing.
    pub fn is_met_by(&self, answer: &str) -> bool {
        find_version(answer).is_some_and(|version| self.versions.contains(&version))
    }

    /// Says in one line how the tool in the Body differs from the requirement.
    pub fn describe_gap(&self, answer: &str) -> String {
        let wanted = match &self.versions {
            VersionRange::Any => self.tool.program.to_owned(),
            versions => format!("{} {versions}", self.tool.language),
        };
        let found = match find_version(answer) {
            Some(version) => format!("the Body has {version}"),
            None => "the Body has none".to_owned(),
        };
        format!("{} needs {wanted}, and {found}", proto::text::visible(&self.source))
    }
}

/// The versions of a tool that a repository accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VersionRange {
    /// Every version.
    Any,
    /// The versions that match one of the alternatives.
    AnyOf {
        /// The alternatives.
        ranges: Vec<VersionReq>,
        /// The range as the repository writes it.
        text: String,
    },
    /// A channel of rustup, such as `nightly-2026-01-01`.
    Channel(String),
}

impl VersionRange {
    /// The range of a minimum, as go.mod and Cargo.toml write it: `1.25` or `1.25.3`.
    pub fn at_least(minimum: &str) -> Option<Self> {
        let ranges =
            vec![VersionReq { comparators: vec![comparator(Op::GreaterEq, &find_version(minimum)?)] }];
        Some(Self::AnyOf { ranges, text: format!(">= {}", numbers(minimum)?) })
    }

    /// The versions that begin with this one, as `.nvmrc` and `.python-version` write it: `22`, `v20.11` or
    /// `3.13.1`. The last part of a full version is a minimum, because no registry keeps each patch release.
    pub fn like(text: &str) -> Option<Self> {
        let text = numbers(text)?;
        let op = if text.contains('.') { Op::Tilde } else { Op::Caret };
        let ranges = vec![VersionReq { comparators: vec![comparator(op, &find_version(text)?)] }];
        Some(Self::AnyOf { ranges, text: text.to_owned() })
    }

    /// The range of `engines` in package.json: alternatives with `||`, comparators with spaces.
    pub fn npm(text: &str) -> Option<Self> {
        let ranges: Option<Vec<VersionReq>> = text.split("||").map(npm_alternative).collect();
        Self::of(ranges?, text)
    }

    /// The range of `requires-python`: specifiers with commas. `!=` excludes single versions and is ignored.
    pub fn python(text: &str) -> Option<Self> {
        let specifiers = text.split(',').map(str::trim).filter(|part| !part.starts_with("!="));
        let comparators: Option<Vec<String>> = specifiers
            .filter(|part| !part.is_empty())
            .map(|part| match part.strip_prefix("~=") {
                // `~=3.8` accepts 3.9, and `~=3.8.1` does not.
                Some(rest) if rest.trim().split('.').count() > 2 => Some(format!("~{}", rest.trim())),
                Some(rest) => Some(format!("^{}", rest.trim())),
                None => Some(part.replace("===", "=").replace("==", "=")),
            })
            .collect();
        let range = VersionReq::parse(&comparators?.join(", ")).ok()?;
        Self::of(vec![range], text)
    }

    fn of(ranges: Vec<VersionReq>, text: &str) -> Option<Self> {
        let any = ranges.iter().any(|range| range.comparators.is_empty());
        let text = proto::text::visible(text.trim());
        Some(if any { Self::Any } else { Self::AnyOf { ranges, text } })
    }

    /// Whether a version is in the range.
    pub fn contains(&self, version: &Version) -> bool {
        match self {
            Self::Any => true,
            Self::AnyOf { ranges, .. } => {
                // A pre-release, such as a nightly rustc, counts as the release that it precedes.
                let version = Version::new(version.major, version.minor, version.patch);
                ranges.iter().any(|range| range.matches(&version))
            }
            Self::Channel(channel) => is_of_channel(version, channel),
        }
    }
}

impl fmt::Display for VersionRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("of any version"),
            Self::AnyOf { text, .. } => f.write_str(text),
            Self::Channel(channel) => f.write_str(channel),
        }
    }
}

impl VersionRange {
    /// The lowest version in the range; none if it has no lower bound.
    pub fn lowest(&self) -> Option<Version> {
        let bound = |comparator: &Comparator| {
            let lower = !matches!(comparator.op, Op::Less | Op::LessEq);
            let (minor, patch) = (comparator.minor.unwrap_or(0), comparator.patch.unwrap_or(0));
            let step = u64::from(comparator.op == Op::Greater);
            lower.then(|| Version::new(comparator.major, minor, patch + step))
        };
        match self {
            Self::AnyOf { ranges, .. } => {
                ranges.iter().filter_map(|range| range.comparators.iter().filter_map(bound).max()).min()
            }
            Self::Any | Self::Channel(_) => None,
        }
    }
}

/// Finds the first version in a text, such as the answer of `--version`: a number, or numbers with dots between them.
pub fn find_version(text: &str) -> Option<Version> {
    let numbers = numbers(text)?;
    let mut parts = numbers.split('.').map(|part| part.parse::<u64>().ok());
    let mut part = || parts.next().map_or(Some(0), |part| part);
    let mut version = Version::new(part()?, part()?, part()?);
    // rustc names its channel: `1.97.0-nightly`.
    if let Some((_, rest)) = text.split_once(numbers)
        && let Some(word) = rest.strip_prefix('-')
    {
        let word = word.split([' ', '\n', '.']).next().unwrap_or_default();
        version.pre = semver::Prerelease::new(word).unwrap_or_default();
    }
    Some(version)
}

/// The first numbers in a text, with dots between them.
fn numbers(text: &str) -> Option<&str> {
    let start = text.find(|c: char| c.is_ascii_digit())?;
    let rest = &text[start..];
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    Some(rest[..end].trim_end_matches('.'))
}

fn comparator(op: Op, version: &Version) -> Comparator {
    let (minor, patch) = (Some(version.minor), Some(version.patch));
    Comparator { op, major: version.major, minor, patch, pre: semver::Prerelease::EMPTY }
}

/// Whether rustc of this version belongs to a channel of rustup.
fn is_of_channel(version: &Version, channel: &str) -> bool {
    match channel.split('-').next().unwrap_or(channel) {
        "stable" => version.pre.is_empty(),
        name @ ("beta" | "nightly") => version.pre.as_str().starts_with(name),
        number if number.starts_with(|first: char| first.is_ascii_digit()) => {
            let written = number.split('.').count();
            find_version(number).is_some_and(|wanted| {
                (version.major, version.minor) == (wanted.major, wanted.minor)
                    && (written < 3 || version.patch == wanted.patch)
            })
        }
        // A toolchain that the user made, and whose version its name does not tell.
        _ => true,
    }
}

/// Parses one alternative of an npm range, such as `>=18 <21`, `^20.1`, `16.x` or `14 - 18`.
fn npm_alternative(text: &str) -> Option<VersionReq> {
    let text = text.trim();
    if matches!(text, "" | "*" | "x" | "latest") {
        return Some(VersionReq::STAR);
    }
    if let Some((low, high)) = text.split_once(" - ") {
        return VersionReq::parse(&format!(">={}, <={}", low.trim(), high.trim())).ok();
    }
    // A space after an operator belongs to the comparator; other spaces and commas separate comparators.
    let mut joined = text.replace(',', " ");
    for operator in [">=", "<=", ">", "<", "=", "^", "~"] {
        while joined.contains(&format!("{operator} ")) {
            joined = joined.replace(&format!("{operator} "), operator);
        }
    }
    let comparators: Vec<String> = joined
        .split_whitespace()
        .map(|part| {
            let plain = part.replace(['v', 'V'], "").replace("~>", "~");
            // A bare version is exact in npm, and each part that is missing or `x` is free.
            if plain.starts_with(|first: char| first.is_ascii_digit()) { format!("={plain}") } else { plain }
        })
        .collect();
    VersionReq::parse(&comparators.join(", ")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        find_version(text).unwrap()
    }

    #[test]
    fn ranges_mean_what_their_tools_mean() {
        let npm = VersionRange::npm as fn(&str) -> Option<VersionRange>;
        let python = VersionRange::python as fn(&str) -> Option<VersionRange>;
        let least = VersionRange::at_least as fn(&str) -> Option<VersionRange>;
        let like = VersionRange::like as fn(&str) -> Option<VersionRange>;
        for (of, range, inside, outside, lowest) in [
            (npm, ">=18", "v20.20.2", "v16.1.0", Some("18.0.0")),
            (npm, "^20.19.0 || >=22.12.0", "20.19.1", "22.11.0", Some("20.19.0")),
            (npm, ">= 18.0.0 < 21", "20.9.0", "21.0.0", Some("18.0.0")),
            (npm, "14 - 18", "18.2.0", "19.0.0", Some("14.0.0")),
            (npm, "16.x", "16.20.0", "18.0.0", Some("16.0.0")),
            (npm, "^3.9", "3.12.1", "4.0.0", Some("3.9.0")),
            (python, ">=3.12", "Python 3.13.0", "Python 3.11.7", Some("3.12.0")),
            (python, ">=3.8,<4,!=3.9.7", "3.11.2", "3.7.1", Some("3.8.0")),
            (python, "~=3.8", "3.11.2", "4.0.0", Some("3.8.0")),
            (python, "==3.11.*", "3.11.2", "3.12.0", Some("3.11.0")),
            (
                least,
                "1.25",
                "go version go1.25.1 linux/amd64",
                "go version go1.19.8 linux/amd64",
                Some("1.25.0"),
            ),
            (least, "1.85", "rustc 1.97.0-nightly (ab 2026-01-01)", "rustc 1.84.1", Some("1.85.0")),
            (like, "v22", "v22.3.0", "v20.20.2", Some("22.0.0")),
            (like, "3.12", "3.12.9", "3.13.0", Some("3.12.0")),
        ] {
            let parsed = of(range).unwrap();
            assert!(parsed.contains(&version(inside)), "{range}: {inside}");
            assert!(!parsed.contains(&version(outside)), "{range}: {outside}");
            assert_eq!(parsed.lowest().map(|lowest| lowest.to_string()).as_deref(), lowest, "{range}");
        }
        assert_eq!(npm("*"), Some(VersionRange::Any));
        assert_eq!((npm("lts/*"), python("three"), least("latest")), (None, None, None));
    }

    #[test]
    fn a_channel_is_told_by_the_version_of_rustc() {
        for (channel, inside, outside) in [
            ("1.75.0", "rustc 1.75.0 (x)", "rustc 1.95.0 (x)"),
            ("1.75", "rustc 1.75.1 (x)", "rustc 1.7.5 (x)"),
            ("nightly-2026-01-01", "rustc 1.97.0-nightly (x)", "rustc 1.95.0 (x)"),
            ("stable", "rustc 1.95.0 (x)", "rustc 1.96.0-beta.1 (x)"),
        ] {
            let range = VersionRange::Channel(channel.to_owned());
            assert!(range.contains(&version(inside)) && !range.contains(&version(outside)), "{channel}");
        }
    }
}
