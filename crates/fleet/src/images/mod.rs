//! Images of registries: found by reference, proved by digest, unpacked into layers of templates.
//!
//! Invariant: nothing is used that does not have the digest by which it was asked for; a tag is the one thing taken on
//! the registry's word, and what it meant is written down.
//! Invariant: credentials go to the registry they were given for and to the token service it names; they are never
//! printed, stored or passed on to where a redirect leads.
//! Trust: a registry is hostile. Every answer has a size and a deadline, redirects are few, and none leads from outside
//! into the network of this machine.

mod address;
mod blob;
mod pull;
mod registry;
mod web;

pub use pull::{ImagePuller, PulledImage};

use std::{fmt, str::FromStr};

use oci_spec::distribution::Reference;
use proto::{Failure, Kind};

/// An image to begin a template with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Which, as `docker pull` spells it.
    pub reference: String,
    /// What the registry wants to know; none where it lets everybody in.
    pub credentials: Option<RegistryCredentials>,
    /// Which of its variants; this machine's where nobody says.
    pub platform: Option<Platform>,
    /// Where registries may be.
    pub reach: RegistryAccess,
    /// What is made of it.
    pub dress: ImageProfile,
}

impl Image {
    /// An image for everybody, as it is, from wherever the reference leads.
    pub fn new(reference: impl Into<String>) -> Self {
        Self {
            reference: reference.into(),
            credentials: None,
            platform: None,
            reach: RegistryAccess::default(),
            dress: ImageProfile::AsItIs,
        }
    }

    /// Its registry, as clients of registries know it: credentials are kept under this name.
    pub fn registry(&self) -> Result<String, Failure> {
        Ok(self.parse()?.registry().to_owned())
    }

    fn parse(&self) -> Result<Reference, Failure> {
        let plain = |part: &str| {
            part.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
                && part.starts_with(|c: char| c.is_ascii_alphanumeric())
        };
        // It becomes a part of an address, so nothing is left to how others read it.
        let parsed = self
            .reference
            .parse::<Reference>()
            .ok()
            .filter(|reference| reference.repository().split('/').all(plain));
        parsed.ok_or_else(|| {
            Failure::new(Kind::Usage, format!("{:?} names no image", self.shown())).hint(
                "name it as `docker pull` does: debian:12, ghcr.io/owner/name:tag, host:5000/name@sha256:…",
            )
        })
    }

    /// The reference, fit to be printed.
    fn shown(&self) -> String {
        proto::text::visible(&self.reference.chars().take(300).collect::<String>())
    }
}

/// What is made of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageProfile {
    /// Its own user and directory, as its configuration says.
    AsItIs,
    /// An account `user` with a home, as E2B's clients expect in whatever they begin with.
    ForE2b,
}

/// Who pulls. Its parts never show.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryCredentials {
    /// The name.
    pub username: String,
    /// What proves it.
    pub password: String,
}

impl fmt::Debug for RegistryCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

/// Where registries may be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RegistryAccess {
    /// Who decided it.
    pub inside: PrivateAddresses,
    /// `HOST[:PORT]` of registries inside that may be asked all the same.
    pub trusted: Vec<String>,
    /// `HOST[:PORT]` of registries that are asked without encryption; those on this machine always are.
    pub plain: Vec<String>,
}

/// Whether a registry may be in the network of this machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PrivateAddresses {
    /// The owner of this machine asks: wherever the reference leads.
    #[default]
    Allowed,
    /// Somebody asks from outside, who must not look around through us: only what anybody can reach.
    Refused,
}

/// An operating system and an architecture, in the words of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v7`, …
    pub variant: Option<String>,
}

impl Default for Platform {
    fn default() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "x86" => "386",
            "aarch64" => "arm64",
            "powerpc64" => "ppc64le",
            "loongarch64" => "loong64",
            other => other,
        };
        Self { architecture: architecture.into(), variant: None }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "linux/{}", self.architecture)?;
        self.variant.iter().try_for_each(|variant| write!(f, "/{variant}"))
    }
}

impl FromStr for Platform {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let plain = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        match parts[..] {
            ["linux", architecture, ref rest @ ..] if rest.len() < 2 && parts.iter().all(plain) => Ok(Self {
                architecture: architecture.into(),
                variant: rest.first().map(|variant| (*variant).to_owned()),
            }),
            _ => Err(format!(
                "{:?} is no platform: say linux/amd64 or linux/arm64",
                proto::text::visible(text)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_those_of_docker() {
        let registry = |reference: &str| Image::new(reference).registry().ok();
        assert_eq!(registry("debian:12").as_deref(), Some("docker.io"));
        assert_eq!(registry("ghcr.io/a/b:c").as_deref(), Some("ghcr.io"));
        assert_eq!(registry("127.0.0.1:5000/a@sha256:".to_owned().as_str()), None);
        assert_eq!(registry("localhost:5000/a").as_deref(), Some("localhost:5000"));
        for bad in ["", "UPPER/case", "a b", "http://host/a", "-", "a:b:c:d"] {
            assert_eq!(registry(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn platforms_are_linux() {
        let shown = |text: &str| text.parse::<Platform>().map(|platform| platform.to_string());
        assert_eq!(shown("linux/arm/v7").as_deref(), Ok("linux/arm/v7"));
        for bad in ["", "linux", "windows/amd64", "linux/", "linux/a/b/c", "linux/a b"] {
            assert!(shown(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_proves_who_pulls_never_shows() {
        let credentials = Some(RegistryCredentials { username: "me".into(), password: "hidden".into() });
        assert!(!format!("{:?}", Image { credentials, ..Image::new("a") }).contains("hidden"));
    }
}
