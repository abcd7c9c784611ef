//! Pulls an image and turns it into layers and template settings.

use std::time::Duration;

use body::{
    archive::{ArchiveLimits, Dialect},
    ids, layers,
};
use oci_spec::{
    distribution::Reference,
    image::{Arch, Descriptor, ImageConfiguration, ImageIndex, ImageManifest, MediaType, Os},
};
use proto::{
    Failure, Kind, LayerId, Size,
    event_data::ImagePulled,
    template::{LAYERS_MAX, TemplateSettings},
};
use sha2::{Digest as _, Sha256};

use super::{
    Image, ImageProfile, Platform,
    blob::Blob,
    registry::{RegistryClient, RegistryError, sha256},
    web::{HttpClient, WebError},
};
use crate::{Fleet, failures, templates::ProgressFn};

/// Largest compressed layer.
const LAYER_LEN_MAX: u64 = 16 << 30;
/// Largest whole image, unpacked.
const UNPACKED_MAX: u64 = 64 << 30;
/// Largest allowed ratio of unpacked to compressed size. Real files hardly exceed it; decompression bombs do.
const RATIO_MAX: u64 = 100;
const RATIO_FREE: u64 = 256 << 20;
/// How long the download of a layer may take at least; the slowest acceptable connection adds to it by the layer's
/// size.
const PATIENCE: Duration = Duration::from_secs(600);
const SLOWEST: u64 = 128 << 10;
/// Bytes that stay free on the disk.
const ROOM_LEFT: u64 = 256 << 20;
/// Deepest nesting of indexes.
const INDEXES_MAX: usize = 3;

/// An image that was pulled.
#[derive(Debug)]
pub struct PulledImage {
    /// The layers of its root, top first.
    pub layers: Vec<LayerId>,
    /// The template settings from its configuration.
    pub settings: TemplateSettings,
    /// The digest that the reference resolved to.
    pub digest: String,
}

/// Pulls images from registries into layers.
#[derive(Debug, Clone, Copy)]
pub struct ImagePuller<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl ImagePuller<'_> {
    /// Pulls an image. Skips layers that exist already, and resumes interrupted downloads.
    pub async fn pull(&self, image: &Image, say: ProgressFn<'_>) -> Result<PulledImage, Failure> {
        let reference = image.parse()?;
        self.pull_from(image, &reference, say).await.map_err(|error| match error {
            PullError::Registry(error) => refused(image, error),
            PullError::Failure(failure) => failure,
        })
    }

    async fn pull_from(
        &self,
        image: &Image,
        reference: &Reference,
        say: ProgressFn<'_>,
    ) -> Result<PulledImage, PullError> {
        let host = reference.resolve_registry();
        let web = HttpClient::from(host, image.reach.clone()).await.map_err(RegistryError::from)?;
        let registry = RegistryClient::new(
            web,
            host.to_owned(),
            reference.repository().to_owned(),
            image.credentials.clone(),
        );
        let platform = image.platform.clone().unwrap_or_default();
        let found = find(&registry, reference, &platform).await?;
        check_layers(found.manifest.layers())?;
        let bytes = registry.small(found.manifest.config().digest()).await?;
        let config: ImageConfiguration =
            serde_json::from_slice(&bytes).map_err(|_| malformed("its configuration is malformed"))?;
        check_platform(&config, &platform)?;
        let settings = settings(&config, image.dress)?;
        crate::create::check_env(&settings.env)?;
        say(&format!(
            "{} is {}, {platform}, {} layers",
            image.shown(),
            found.digest,
            found.manifest.layers().len()
        ));
        let mut layers = Vec::new();
        let mut unpacked = 0;
        for (index, layer) in found.manifest.layers().iter().enumerate() {
            let what = format!("layer {} of {}", index + 1, found.manifest.layers().len());
            let (id, bytes) = self.pull_layer(&registry, layer, UNPACKED_MAX - unpacked, &what, say).await?;
            unpacked += bytes.min(UNPACKED_MAX - unpacked);
            // Of a layer that occurs twice only the upper one is visible, and overlayfs refuses duplicates.
            layers.retain(|known| *known != id);
            layers.insert(0, id);
        }
        self.fleet.log().note(ImagePulled {
            image: reference.whole(),
            digest: found.digest.clone(),
            platform: platform.to_string(),
            layers: layers.clone(),
        })?;
        Ok(PulledImage { layers, settings, digest: found.digest })
    }

    /// Pulls one layer. Returns its id and its unpacked size.
    async fn pull_layer(
        &self,
        registry: &RegistryClient,
        layer: &Descriptor,
        room: u64,
        what: &str,
        say: ProgressFn<'_>,
    ) -> Result<(LayerId, u64), PullError> {
        let id = id_of(sha256(layer.digest())?)?;
        let about = format!("layer {} of an image", layer.digest());
        let here = || {
            layers::read(&self.fleet.templates().layers_dir().join(id.as_str()))
                .ok()
                .filter(|record| record.about == about)
                .map(|record| record.bytes)
        };
        if let Some(bytes) = here() {
            say(&format!("{what}: here already"));
            return Ok((id, bytes));
        }
        self.check_room(layer.size())?;
        let brought = async {
            let mut blob = Blob::take(&self.images_dir(), registry.host(), layer.digest()).await?;
            if here().is_none() {
                say(&format!("{what}: {}", Size(layer.size())));
                blob.fetch(registry, layer.digest(), layer.size(), what, say).await?;
            }
            Ok::<_, RegistryError>(blob)
        };
        let patience = PATIENCE + Duration::from_secs(layer.size() / SLOWEST);
        let blob = tokio::time::timeout(patience, brought)
            .await
            .map_err(|_| RegistryError::from(WebError::Silent(registry.host().to_owned())))??;
        if let Some(bytes) = here() {
            // Another process pulled the layer while this one waited for the lock.
            blob.remove();
            return Ok((id, bytes));
        }
        say(&format!("{what}: unpacking"));
        let bounds = ArchiveLimits {
            bytes: (layer.size().saturating_mul(RATIO_MAX).saturating_add(RATIO_FREE)).min(room),
            ..layers::UNPACKED_MAX
        };
        Ok((id.clone(), self.unpack(blob, id, about, bounds).await?))
    }

    /// Refuses a layer that would fill the disk: a full disk breaks the work of every Body.
    fn check_room(&self, bytes: u64) -> Result<(), Failure> {
        let free = rustix::fs::statvfs(&self.fleet.data)
            .map(|of| of.f_bavail.saturating_mul(of.f_frsize))
            .unwrap_or(u64::MAX);
        if free.saturating_sub(ROOM_LEFT) >= bytes {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Limit,
            format!("the disk has no room for a layer of {}: {} are free", Size(bytes), Size(free)),
        )
        .hint("make room: pal gc"))
    }

    /// Unpacks a blob on a thread of its own, because that takes long and blocks on the disk. The blob stays locked
    /// until the end, even if the caller has given up.
    async fn unpack(
        &self,
        blob: Blob,
        id: LayerId,
        about: String,
        bounds: ArchiveLimits,
    ) -> Result<u64, Failure> {
        let file = blob
            .open()
            .map_err(|error| Failure::new(Kind::Host, "cannot read the downloaded layer").because(error))?;
        let (programs, dir) =
            (self.fleet.launch_context.programs.clone(), self.fleet.templates().layers_dir());
        let ids = ids::of_layers().map_err(failures::ids)?;
        let unpacked = tokio::task::spawn_blocking(move || {
            let unpack = || {
                let drawn: [u8; 6] = sys::random::bytes().map_err(|error| {
                    Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
                })?;
                let draft = layers::LayerDraft::begin(
                    &programs,
                    &dir,
                    &format!("{id}.part{}", proto::event::hex(&drawn)),
                    ids,
                )
                .map_err(failures::layer)?;
                draft.unpack(file, Dialect::Image, bounds).map_err(|error| {
                    Failure::new(Kind::Usage, "a layer of the image cannot be unpacked").because(error)
                })?;
                draft
                    .finish(id, &about, store::clock::now())
                    .map_err(failures::layer)
                    .map(|record| record.bytes)
            };
            let unpacked = unpack();
            blob.remove();
            unpacked
        });
        unpacked
            .await
            .map_err(|error| Failure::new(Kind::Internal, "unpacking was interrupted").because(error))?
    }

    /// The directory of unfinished downloads.
    pub(crate) fn images_dir(&self) -> std::path::PathBuf {
        self.fleet.data.join("images")
    }
}

/// An image reference, resolved to a manifest.
struct ResolvedImage {
    manifest: ImageManifest,
    digest: String,
}

enum PullError {
    Registry(RegistryError),
    Failure(Failure),
}

impl From<RegistryError> for PullError {
    fn from(error: RegistryError) -> Self {
        Self::Registry(error)
    }
}

impl From<Failure> for PullError {
    fn from(failure: Failure) -> Self {
        Self::Failure(failure)
    }
}

/// The id of an image's layer. The hash prevents collisions with other kinds of layers, whatever digest a registry
/// sends.
fn id_of(digest: &str) -> Result<LayerId, RegistryError> {
    let own = proto::event::hex(&Sha256::digest(format!("layer of an image {digest}")));
    own[..32].parse().map_err(|_| malformed("a layer's digest cannot be used as an id"))
}

fn malformed(why: &str) -> RegistryError {
    RegistryError::Senseless(why.to_owned())
}

/// Finds the manifest for a platform, through indexes if necessary.
async fn find(
    registry: &RegistryClient,
    reference: &Reference,
    platform: &Platform,
) -> Result<ResolvedImage, PullError> {
    let mut key = reference.digest().or(reference.tag()).unwrap_or("latest").to_owned();
    let mut meant = None;
    for _ in 0..INDEXES_MAX {
        let (bytes, digest) = registry.manifest(&key).await?;
        let meant = meant.get_or_insert(digest.clone());
        match read_manifest(&bytes)? {
            RegistryManifest::Image(manifest) => {
                return Ok(ResolvedImage { manifest: *manifest, digest: meant.clone() });
            }
            RegistryManifest::Index(index) => key = choose(&index, platform)?,
        }
    }
    Err(malformed("its indexes are nested too deeply").into())
}

enum RegistryManifest {
    Image(Box<ImageManifest>),
    Index(Box<ImageIndex>),
}

/// Detects the kind of a manifest from its contents: some registries send no media type, and old ones send their own.
fn read_manifest(bytes: &[u8]) -> Result<RegistryManifest, RegistryError> {
    #[derive(serde::Deserialize)]
    struct ManifestOutline {
        manifests: Option<serde::de::IgnoredAny>,
        layers: Option<serde::de::IgnoredAny>,
    }
    let wrong = || malformed("its manifest is malformed");
    let kind: ManifestOutline = serde_json::from_slice(bytes).map_err(|_| wrong())?;
    match (kind.manifests, kind.layers) {
        (Some(_), None) => serde_json::from_slice(bytes)
            .map(|index| RegistryManifest::Index(Box::new(index)))
            .map_err(|_| wrong()),
        (None, Some(_)) => serde_json::from_slice(bytes)
            .map(|manifest| RegistryManifest::Image(Box::new(manifest)))
            .map_err(|_| wrong()),
        (None, None) => Err(malformed(
            "its manifest has schema version 1, which has no verifiable digest: push the image again with a newer Docker",
        )),
        (Some(_), Some(_)) => Err(wrong()),
    }
}

/// The digest of the variant that runs on a platform.
fn choose(index: &ImageIndex, platform: &Platform) -> Result<String, Failure> {
    let fits = |entry: &&Descriptor| {
        entry.platform().as_ref().is_some_and(|of| {
            let variant = platform.variant.is_none() || *of.variant() == platform.variant;
            *of.os() == Os::Linux
                && *of.architecture() == Arch::from(platform.architecture.as_str())
                && variant
        })
    };
    index.manifests().iter().find(fits).map(|entry| entry.digest().to_string()).ok_or_else(|| {
        let there: Vec<String> = index
            .manifests()
            .iter()
            .filter_map(|entry| entry.platform().as_ref())
            .filter(|of| !matches!(of.os(), Os::Other(_)))
            .map(|of| proto::text::visible(&format!("{}/{}", of.os(), of.architecture())))
            .take(20)
            .collect();
        Failure::new(Kind::NotFound, format!("the image has no variant for {platform}"))
            .hint(format!("it has: {}", there.join(", ")))
    })
}

fn check_layers(layers: &[Descriptor]) -> Result<(), Failure> {
    if layers.len() > LAYERS_MAX {
        return Err(Failure::new(
            Kind::Limit,
            format!("the image has {} layers, and a template has at most {LAYERS_MAX}", layers.len()),
        )
        .hint("make one with fewer: docker build --squash, or one RUN for several"));
    }
    if layers.is_empty() {
        return Err(Failure::new(Kind::Usage, "the image has no layers"));
    }
    for layer in layers {
        let kind = layer.media_type();
        let elsewhere = matches!(
            kind,
            MediaType::ImageLayerNonDistributable
                | MediaType::ImageLayerNonDistributableGzip
                | MediaType::ImageLayerNonDistributableZstd
        );
        let docker = |kind: &str| kind.starts_with("application/vnd.docker.image.rootfs.diff.tar");
        let known = match kind {
            MediaType::ImageLayer | MediaType::ImageLayerGzip | MediaType::ImageLayerZstd => true,
            MediaType::Other(kind) => docker(kind),
            _ => false,
        };
        if elsewhere || !known {
            return Err(Failure::new(
                Kind::Usage,
                format!(
                    "a layer of the image has an unsupported media type: {}",
                    proto::text::visible(kind.as_ref())
                ),
            ));
        }
        if layer.size() > LAYER_LEN_MAX {
            return Err(Failure::new(
                Kind::Limit,
                format!(
                    "a layer of the image has {}, and the limit is {}",
                    Size(layer.size()),
                    Size(LAYER_LEN_MAX)
                ),
            ));
        }
    }
    Ok(())
}

fn check_platform(config: &ImageConfiguration, platform: &Platform) -> Result<(), Failure> {
    if *config.os() == Os::Linux && *config.architecture() == Arch::from(platform.architecture.as_str()) {
        return Ok(());
    }
    let found = proto::text::visible(&format!("{}/{}", config.os(), config.architecture()));
    Err(Failure::new(Kind::NotFound, format!("the image is for {found}, not for {platform}"))
        .hint("to use it anyway, name its platform: --platform"))
}

/// The template settings from an image's configuration.
fn settings(config: &ImageConfiguration, dress: ImageProfile) -> Result<TemplateSettings, RegistryError> {
    let said = config.config().as_ref();
    let pair = |line: &String| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let env = said
        .and_then(|said| said.env().as_ref())
        .map(|env| env.iter().filter_map(pair).collect())
        .unwrap_or_default();
    if dress == ImageProfile::ForE2b {
        return Ok(TemplateSettings {
            env,
            user: Some("user".into()),
            workdir: Some("/home/user".into()),
            sudo: true,
            ..TemplateSettings::default()
        });
    }
    let user = said.and_then(|said| said.user().as_deref()).filter(|user| !user.is_empty()).unwrap_or("root");
    let workdir =
        said.and_then(|said| said.working_dir().as_deref()).filter(|dir| !dir.is_empty()).unwrap_or("/");
    crate::create::check_inside(std::path::Path::new(workdir))
        .map_err(|_| malformed("its working directory is not an absolute path"))?;
    // In nearly all images a group given by name is the account's own group, so the name is dropped.
    let (name, group) = user.split_once(':').unwrap_or((user, ""));
    let numbers = [name, group].iter().all(|part| part.parse::<u32>().is_ok());
    let user = if numbers { user } else { name };
    Ok(TemplateSettings {
        env,
        user: Some(user.to_owned()),
        workdir: Some(workdir.to_owned()),
        ..TemplateSettings::default()
    })
}

/// Converts an error into a failure with a hint for the user.
fn refused(image: &Image, error: RegistryError) -> Failure {
    let kind = match &error {
        RegistryError::NotFound(_) => Kind::NotFound,
        RegistryError::Unauthorized(_) | RegistryError::Web(WebError::Within(_) | WebError::Plain(_)) => {
            Kind::Denied
        }
        RegistryError::Senseless(_) => Kind::Usage,
        _ => Kind::Host,
    };
    let hint = match &error {
        RegistryError::Unauthorized(_) => "give credentials: docker login, or fromImageRegistry in a build",
        RegistryError::NotFound(_) => {
            "check the name and the tag; a registry may hide a private repository as not found"
        }
        RegistryError::Web(WebError::Within(_)) => {
            "the administrator of this server can allow it: pal serve --registry HOST:PORT"
        }
        RegistryError::Web(WebError::Plain(_)) => "use https, or allow plain HTTP: --plain-http",
        RegistryError::Forged { .. } => {
            "a proxy changes the registry's answers, or the registry is broken; try again"
        }
        RegistryError::Web(WebError::Unreachable { .. }) => {
            "check the name of the registry and the network of this host; downloaded parts are kept"
        }
        RegistryError::Keep(_) => "make room: pal gc",
        _ => "try again later: the downloaded parts are kept",
    };
    // The message contains the causes in one line, because clients of a build see only the message.
    let why = std::iter::successors(std::error::Error::source(&error), |cause| cause.source())
        .fold(error.to_string(), |said, cause| format!("{said}: {cause}"));
    Failure::new(kind, format!("cannot pull the image {}: {why}", image.shown())).hint(hint)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(user: &str, dir: &str) -> ImageConfiguration {
        let text = json!({ "architecture": "amd64", "os": "linux", "rootfs": { "type": "layers", "diff_ids": [] },
            "config": { "User": user, "WorkingDir": dir, "Env": ["PATH=/a:/b", "EMPTY=", "odd"] } });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn a_configuration_becomes_settings() {
        for (user, expected) in [
            ("", "root"),
            ("app", "app"),
            ("app:staff", "app"),
            ("1000", "1000"),
            ("1000:1000", "1000:1000"),
            ("1000:staff", "1000"),
        ] {
            assert_eq!(
                settings(&config(user, "/srv"), ImageProfile::AsItIs).unwrap().user.as_deref(),
                Some(expected),
                "{user:?}"
            );
        }
        let as_it_is = settings(&config("", ""), ImageProfile::AsItIs).unwrap();
        assert_eq!((as_it_is.workdir.as_deref(), as_it_is.sudo), (Some("/"), false));
        assert_eq!(
            as_it_is.env.into_iter().collect::<Vec<_>>(),
            [("EMPTY", ""), ("PATH", "/a:/b")].map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        assert!(settings(&config("", "/a/../../b"), ImageProfile::AsItIs).is_err());
        assert_eq!(
            settings(&config("app", "/srv"), ImageProfile::ForE2b).unwrap().workdir.as_deref(),
            Some("/home/user")
        );
    }

    #[test]
    fn an_index_has_one_variant_for_a_platform() {
        let entry = |digit: char, os: &str, architecture: &str| {
            json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "size": 1,
            "digest": format!("sha256:{}", digit.to_string().repeat(64)), "platform": { "os": os, "architecture": architecture } })
        };
        let text = json!({ "schemaVersion": 2, "manifests": [entry('a', "windows", "amd64"), entry('b', "linux", "arm64"), entry('c', "linux", "amd64"), entry('d', "unknown", "unknown")] });
        let Ok(RegistryManifest::Index(index)) = read_manifest(text.to_string().as_bytes()) else {
            panic!("it is an index")
        };
        let chosen = |platform: &str| choose(&index, &platform.parse().unwrap());
        assert!(chosen("linux/amd64").unwrap().starts_with("sha256:cc"));
        assert!(chosen("linux/arm64").unwrap().starts_with("sha256:bb"));
        assert!(chosen("linux/riscv64").unwrap_err().hints[0].contains("linux/arm64"));
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"manifests":1}"#,
            r#"{"layers":[{}]}"#,
            r#"{"schemaVersion":1,"fsLayers":[]}"#,
        ] {
            assert!(read_manifest(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
