//! Images as users name them, and the credentials for pulling them.

use std::path::{Path, PathBuf};

use docker_credential::{CredentialRetrievalError as Trouble, DockerCredential};
use fleet::{
    BASE, BaseImage, Fleet, INTERPRETER, Image, PrivateAddresses, RegistryAccess, RegistryCredentials,
};
use proto::{Failure, Kind};

use crate::{args::PullArgs, settings::variable};

/// The name under which Docker stores the credentials of Docker Hub.
const DOCKERS_OWN: &str = "https://index.docker.io/v1/";
const ARCHIVES: &[&str] = &[".tar", ".tar.gz", ".tgz", ".tar.zst"];

/// Whether a source is a file: it exists, or it looks like a path.
pub fn is_file(source: &str) -> bool {
    Path::new(source).exists()
        || source.starts_with(['/', '.'])
        || ARCHIVES.iter().any(|end| source.ends_with(end))
}

/// Resolves FROM: a template of that name if there is one, else an image.
pub fn origin(fleet: &Fleet, from: String, pull: &PullArgs) -> Result<BaseImage, Failure> {
    let own = from == BASE || from == INTERPRETER;
    if own || fleet.templates().find(&from)?.is_some() {
        Ok(BaseImage::Template(from))
    } else {
        image(&from, pull).map(BaseImage::Image)
    }
}

/// An image, with the credentials that Docker has for its registry.
pub fn image(reference: &str, pull: &PullArgs) -> Result<Image, Failure> {
    let image = Image { platform: pull.platform.clone(), ..Image::new(reference) };
    let registry = image.registry()?;
    let plain = if pull.plain_http { vec![registry.clone()] } else { Vec::new() };
    Ok(Image {
        credentials: credentials(&registry)?,
        reach: RegistryAccess { plain, ..RegistryAccess::default() },
        ..image
    })
}

/// An image that a repository names, not the user: only from public registries, without credentials.
pub fn image_of_repository(reference: &str) -> Result<Image, Failure> {
    let image = Image::new(reference);
    let registry = image.registry()?;
    let trusted = variable("PAL_REGISTRIES")?
        .map(|list| list.split(',').map(str::to_owned).collect())
        .unwrap_or_default();
    let reach = RegistryAccess { inside: PrivateAddresses::Refused, trusted, ..RegistryAccess::default() };
    Ok(Image { credentials: credentials(&registry)?, reach, ..image })
}

fn credentials(registry: &str) -> Result<Option<RegistryCredentials>, Failure> {
    if !is_known_to_docker()? {
        return Ok(None);
    }
    let kept_as = if registry == "docker.io" { DOCKERS_OWN } else { registry };
    let unusable = |why: &str| {
        Failure::new(Kind::Host, format!("cannot use Docker's credentials for {registry}: {why}"))
            .hint(format!("log in again: docker login {registry}"))
    };
    match docker_credential::get_credential(kept_as) {
        Ok(DockerCredential::UsernamePassword(username, password)) => {
            Ok(Some(RegistryCredentials { username, password }))
        }
        Ok(DockerCredential::IdentityToken(_)) => Err(unusable("it is an identity token, not a password")),
        Err(Trouble::NoCredentialConfigured | Trouble::ConfigNotFound) => Ok(None),
        // A credential helper prints this for an unknown registry.
        Err(Trouble::HelperFailure { stdout, stderr, .. })
            if format!("{stdout}{stderr}").contains("not found") =>
        {
            Ok(None)
        }
        Err(Trouble::HelperFailure { helper, .. }) => Err(unusable(&format!("its helper {helper} fails"))),
        Err(error) => Err(unusable(&error.to_string())),
    }
}

/// Whether Docker has a configuration file.
fn is_known_to_docker() -> Result<bool, Failure> {
    let place = |name, below| -> Result<Option<PathBuf>, Failure> {
        Ok(variable(name)?.map(|dir| Path::new(&dir).join(below)))
    };
    let dir = match place("DOCKER_CONFIG", "")? {
        Some(dir) => Some(dir),
        None => place("HOME", ".docker")?,
    };
    Ok(dir.is_some_and(|dir| dir.join("config.json").exists()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_images_are_told_apart() {
        for (source, expected) in [
            ("/x", true),
            ("./x", true),
            ("root.tar.gz", true),
            ("src", true),
            ("debian:12", false),
            ("ghcr.io/a/b", false),
        ] {
            assert_eq!(is_file(source), expected, "{source}");
        }
    }
}
