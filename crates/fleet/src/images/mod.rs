//! Images of registries: found by reference, verified by digest, unpacked into layers of templates.
//!
//! Invariant: an object is used only if its digest matches the one requested. Only the meaning of a tag is taken from
//! the registry without proof; the digest that it resolved to is recorded.
//! Invariant: credentials go only to the registry they were given for and to the token service that it names. They are
//! never printed, stored or sent to the target of a redirect.
//! Trust: a registry is hostile. Every answer has a size limit and a deadline, redirects are few, and none leads from
//! a public server into a private network of this host.

mod address;
mod blob;
mod pull;
mod registry;
mod web;

pub use pull::{ImagePuller, PulledImage};

use std::{fmt, str::FromStr};

use oci_spec::distribution::Reference;
use proto::{Failure, Kind};

/// An image that a template begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The reference, as `docker pull` spells it.
    pub reference: String,
    /// The credentials for the registry; `None` for anonymous access.
    pub credentials: Option<RegistryCredentials>,
    /// The variant of the image; `None` for this host's platform.
    pub platform: Option<Platform>,
    /// The registries that may be asked.
    pub reach: RegistryAccess,
    /// The adaptation of the image to its use.
    pub dress: ImageProfile,
}

impl Image {
    /// An image of a public repository, unchanged, from any registry.
    pub fn new(reference: impl Into<String>) -> Self {
        Self {
            reference: reference.into(),
            credentials: None,
            platform: None,
            reach: RegistryAccess::default(),
            dress: ImageProfile::AsItIs,
        }
    }

    /// The name of the registry under which registry clients store credentials.
    pub fn registry(&self) -> Result<String, Failure> {
        Ok(self.parse()?.registry().to_owned())
    }

    fn parse(&self) -> Result<Reference, Failure> {
        let plain = |part: &str| {
            part.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
                && part.starts_with(|c: char| c.is_ascii_alphanumeric())
        };
        // The reference becomes part of a URL, so it is parsed strictly.
        let parsed = self
            .reference
            .parse::<Reference>()
            .ok()
            .filter(|reference| reference.repository().split('/').all(plain));
        parsed.ok_or_else(|| {
            Failure::new(Kind::Usage, format!("{:?} is not an image reference", self.shown())).hint(
                "name it as `docker pull` does: debian:12, ghcr.io/owner/name:tag, host:5000/name@sha256:…",
            )
        })
    }

    /// The reference, safe to print.
    fn shown(&self) -> String {
        proto::text::visible(&self.reference.chars().take(300).collect::<String>())
    }
}

/// The adaptation of an image to its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageProfile {
    /// The user and the working directory of the image's configuration.
    AsItIs,
    /// An account `user` with a home directory, which E2B's clients expect in every image.
    ForE2b,
}

/// Credentials for a registry. Their `Debug` output hides them.
#[derive(Clone, PartialEq, Eq)]
pub struct RegistryCredentials {
    /// The user name.
    pub username: String,
    /// The password or token.
    pub password: String,
}

impl fmt::Debug for RegistryCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

/// The registries that may be asked, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RegistryAccess {
    /// Whether registries on private addresses are allowed.
    pub inside: PrivateAddresses,
    /// `HOST[:PORT]` of registries on private addresses that are allowed even so.
    pub trusted: Vec<String>,
    /// `HOST[:PORT]` of registries that are asked over plain HTTP; registries on this host's loopback always are.
    pub plain: Vec<String>,
}

/// Whether a registry may be on a private address: on this host or in its networks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PrivateAddresses {
    /// It may: the owner of this host chose the reference.
    #[default]
    Allowed,
    /// It may not: a remote client chose the reference and must not probe the host's networks. Only public addresses
    /// are allowed.
    Refused,
}

/// An operating system and an architecture, in the terms of OCI images.
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
                "{:?} is not a supported platform: use linux/amd64 or linux/arm64",
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
