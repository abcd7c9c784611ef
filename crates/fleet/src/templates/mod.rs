//! Templates: their names, their tags, their builds, and what a Body made from one stands on.
//!
//! Invariant: a build that is written down is whole and never changes; names and tags move, builds do not.
//! Invariant: layers are shared and go when no build, Body or snapshot stands on them any more.

pub(crate) mod build;
pub mod dockerfile;
mod image;
mod interpreter;
mod jobs;
mod setup;
pub(crate) mod start;

pub use build::{BaseImage, BuildRequest, BuildStep, Builds, Instruction, STEPS_MAX};
pub(crate) use jobs::BuildJobs;
pub use jobs::{BuildJob, BuildState, LogLine};
pub use setup::{BASE, INTERPRETER, ProgressFn};

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    path::PathBuf,
};

use body::{
    driver::SnapshotSource,
    layers,
    root::{LowerLayer, RootfsStack},
    snapshot::SnapshotManifest,
};
use proto::{
    Failure, Kind, LayerId, Spec, TemplateId,
    event_data::{TemplateBuilt, TemplateChanged, TemplateCreated, TemplateRemoved},
    spec::Home,
    template::{
        BodyBase, BuildId, DEFAULT_TAG, Tag, Template, TemplateBuild, TemplateName, TemplateSettings, VERSION,
    },
    workspace::Workspace,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{Fleet, data};

const RECORD_LEN_MAX: u64 = 1 << 20;
/// Most tags of one template.
const TAGS_MAX: usize = 256;
/// Names that mean something else.
const RESERVED: &[&str] = &["host"];

/// A template as callers see it.
#[derive(Debug, Clone, Serialize)]
pub struct TemplateView {
    /// Its record.
    #[serde(flatten)]
    pub template: Template,
    /// Its builds that are whole, newest first.
    pub builds: Vec<TemplateBuild>,
    /// What its layers take, those it shares with others included.
    pub bytes: u64,
}

impl TemplateView {
    /// The build that the name alone means.
    pub fn default_build(&self) -> Option<&TemplateBuild> {
        let wanted = &self.template.tags.get(DEFAULT_TAG)?.build;
        self.builds.iter().find(|build| build.id == *wanted)
    }
}

/// What a Body is to be made from.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResolvedTemplate {
    /// What is below its upper.
    pub rootfs: RootfsStack,
    /// What its spec says of that.
    pub base: Option<BodyBase>,
    /// What it takes over.
    pub settings: TemplateSettings,
    /// Repositories that come with a snapshot.
    pub workspaces: Vec<Workspace>,
    /// The home that comes with it.
    pub home: Option<Home>,
    /// What its Bodies run at each start.
    pub at_start: Vec<String>,
    /// Their ports that somebody will want to reach.
    pub ports: Vec<u16>,
    /// The snapshot that it starts from.
    pub snapshot: Option<SnapshotSource>,
}

/// The templates of a fleet: their records, names, tags and builds that are complete.
#[derive(Debug, Clone, Copy)]
pub struct Templates<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Templates<'_> {
    pub(crate) fn template_dir(&self, id: &TemplateId) -> PathBuf {
        self.fleet.data.join("templates").join(id.as_str())
    }

    pub(crate) fn layers_dir(&self) -> PathBuf {
        self.fleet.data.join("layers")
    }

    /// All templates, by name.
    pub fn list(&self) -> Result<Vec<TemplateView>, Failure> {
        let mut views: Vec<TemplateView> =
            self.template_records().into_iter().map(|template| self.template_view(template)).collect();
        views.sort_by(|a, b| a.template.name.cmp(&b.template.name));
        Ok(views)
    }

    /// One template, by id, name or alias; a tag is ignored.
    pub fn view(&self, key: &str) -> Result<TemplateView, Failure> {
        self.find(key)?.map(|template| self.template_view(template)).ok_or_else(|| unknown(key))
    }

    pub(crate) fn template_records(&self) -> Vec<Template> {
        let entries = fs::read_dir(self.fleet.data.join("templates")).into_iter().flatten().flatten();
        entries.filter_map(|entry| read_record(&entry.path().join("manifest.json")).ok()).collect()
    }

    fn template_view(&self, template: Template) -> TemplateView {
        let mut builds = self.builds(&template.id);
        builds.sort_by(|a, b| b.created_at.cmp(&a.created_at));
        let layers: BTreeSet<&LayerId> = builds.iter().flat_map(|build| &build.layers).collect();
        let bytes = layers
            .into_iter()
            .filter_map(|id| layers::read(&self.layers_dir().join(id.as_str())).ok())
            .map(|layer| layer.bytes)
            .sum();
        TemplateView { template, builds, bytes }
    }

    pub(crate) fn builds(&self, id: &TemplateId) -> Vec<TemplateBuild> {
        let entries = fs::read_dir(self.template_dir(id).join("builds")).into_iter().flatten().flatten();
        let whole = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "json"));
        whole.filter_map(|path| read_record(&path).ok()).collect()
    }

    /// The record of a template, by id, name or alias; a tag is ignored.
    pub fn find(&self, key: &str) -> Result<Option<Template>, Failure> {
        let Ok(named) = key.parse::<TemplateName>() else { return Ok(None) };
        if let Ok(id) = named.name.parse::<TemplateId>()
            && let Ok(template) = read_record(&self.template_dir(&id).join("manifest.json"))
        {
            return Ok(Some(template));
        }
        let called =
            |template: &Template| template.name == named.name || template.aliases.contains(&named.name);
        Ok(self.template_records().into_iter().find(called))
    }

    /// The build that `key` means: by name and tag, by id and tag, or by the build's own id.
    pub fn find_build(&self, key: &str) -> Result<TemplateBuild, Failure> {
        let template = self.find(key)?.ok_or_else(|| unknown(key))?;
        let asked = key.parse::<TemplateName>().ok().and_then(|named| named.tag);
        let tag = asked.as_deref().unwrap_or(DEFAULT_TAG);
        let by_id = || tag.parse::<BuildId>().ok();
        let meant = |tag: &str| template.tags.get(tag).map(|tag| tag.build.clone());
        // Without a default, a template has been built under other tags only; the name alone then means none of them.
        let latest = || meant(DEFAULT_TAG).filter(|_| tag == "latest");
        let id = meant(tag).or_else(by_id).or_else(latest).ok_or_else(|| {
            Failure::new(
                Kind::NotFound,
                format!(
                    "template {} has no build with the tag {:?}",
                    template.name,
                    proto::text::visible(tag)
                ),
            )
            .hint(format!("see its tags: pal template inspect {}", template.name))
        })?;
        read_record(&self.template_dir(&template.id).join("builds").join(format!("{id}.json"))).map_err(
            |error| {
                Failure::new(Kind::NotFound, format!("build {id} of template {} is not there", template.name))
                    .because(error)
                    .hint("build it again: pal template build")
            },
        )
    }

    /// What a Body of that template is made from.
    pub(crate) fn resolve(&self, key: &str) -> Result<ResolvedTemplate, Failure> {
        if key == "host" {
            return Ok(ResolvedTemplate::default());
        }
        if self.find(key)?.is_some() {
            return self.origin_of(self.find_build(key)?);
        }
        let manifest = self
            .fleet
            .find_snapshot(crate::snapshots::bare(key))
            .map_err(|failure| if failure.kind == Kind::NotFound { unknown(key) } else { failure })?;
        self.origin_of_snapshot(manifest)
    }

    /// The same for a snapshot.
    pub(crate) fn origin_of_snapshot(&self, manifest: SnapshotManifest) -> Result<ResolvedTemplate, Failure> {
        let rootfs = self.fleet.under_snapshot(&manifest)?;
        let dir = self.fleet.snapshot_path(&manifest.id);
        Ok(ResolvedTemplate {
            rootfs,
            base: manifest.base.clone(),
            settings: TemplateSettings::default(),
            workspaces: manifest.workspaces.clone(),
            home: manifest.home.clone(),
            at_start: manifest.at_start.clone(),
            ports: manifest.ports.clone(),
            snapshot: Some(SnapshotSource { dir, manifest }),
        })
    }

    /// The same for a build.
    pub(crate) fn origin_of(&self, build: TemplateBuild) -> Result<ResolvedTemplate, Failure> {
        if build.layers.is_empty() {
            // Made where there was nothing to make it from: the host's own root.
            return Ok(ResolvedTemplate { settings: build.settings, ..ResolvedTemplate::default() });
        }
        let layers = self.layers_below(&build.layers)?;
        let base = BodyBase {
            template: build.template,
            build: build.id,
            layers: build.layers,
            sudo: build.settings.sudo,
            start: build.settings.start.clone(),
        };
        let rootfs = RootfsStack { layers: Some(layers), ..RootfsStack::default() };
        Ok(ResolvedTemplate {
            rootfs,
            base: Some(base),
            settings: build.settings,
            ..ResolvedTemplate::default()
        })
    }

    pub(crate) fn layers_below(&self, ids: &[LayerId]) -> Result<Vec<LowerLayer>, Failure> {
        let below = |id: &LayerId| {
            layers::below(&self.layers_dir().join(id.as_str())).map_err(|error| {
                Failure::new(Kind::Host, format!("layer {id} of the template cannot be used"))
                    .because(error)
                    .hint("build the template again: pal template build, or pal setup base")
            })
        };
        ids.iter().map(below).collect()
    }

    /// What is below a Body that exists.
    pub(crate) fn rootfs_stack(&self, spec: &Spec) -> Result<RootfsStack, Failure> {
        let layers = spec.base.as_ref().map(|base| self.layers_below(&base.layers)).transpose()?;
        Ok(RootfsStack {
            snapshots: self.fleet.below(spec)?,
            layers,
            workspaces: self.fleet.workspaces().workspaces_below(&spec.workspaces)?,
            home: self.fleet.homes().home_below(spec.home.as_ref())?,
        })
    }

    /// A template of that name, made if there is none.
    pub fn find_or_create(&self, name: &str) -> Result<Template, Failure> {
        let named = check_name(name)?;
        let _lock = self.lock_templates()?;
        if let Some(template) = self.find(&named.name)? {
            return Ok(template);
        }
        let drawn = sys::random::bytes()
            .map_err(|error| Failure::new(Kind::Host, "cannot draw an id").because(error))?;
        let now = store::clock::now();
        let template = Template {
            v: VERSION,
            id: TemplateId::from_random(drawn),
            name: named.name,
            aliases: Vec::new(),
            owner: None,
            public: false,
            tags: Default::default(),
            created_at: now.clone(),
            updated_at: now,
        };
        self.fleet
            .log()
            .note(TemplateCreated { template: template.id.clone(), name: template.name.clone() })?;
        self.write_template(&template)?;
        Ok(template)
    }

    fn write_template(&self, template: &Template) -> Result<(), Failure> {
        let dir = self.template_dir(&template.id);
        let written = fs::create_dir_all(dir.join("builds"))
            .and_then(|()| write_record(&dir.join("manifest.json"), template));
        written.map_err(|error| {
            Failure::new(Kind::Host, "cannot write the template down")
                .because(error)
                .hint("make room: pal gc")
        })
    }

    /// Changes a template's record while nobody else does.
    fn change_template<T>(
        &self,
        key: &str,
        change: impl FnOnce(&mut Template) -> Result<T, Failure>,
    ) -> Result<(Template, T), Failure> {
        let _lock = self.lock_templates()?;
        let mut template = self.find(key)?.ok_or_else(|| unknown(key))?;
        let before = template.clone();
        let done = change(&mut template)?;
        if template != before {
            template.updated_at = store::clock::now();
            self.fleet.log().note(TemplateChanged {
                template: template.id.clone(),
                name: template.name.clone(),
                public: template.public,
                tags: template.tags.clone(),
            })?;
            self.write_template(&template)?;
        }
        Ok((template, done))
    }

    /// One at a time, of all `pal`s on this data.
    fn lock_templates(&self) -> Result<File, Failure> {
        let dir = self.fleet.data.join("templates");
        let locked =
            fs::create_dir_all(&dir).and_then(|()| File::create(dir.join("lock"))).and_then(|file| {
                rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
                Ok(file)
            });
        locked.map_err(|error| Failure::new(Kind::Host, "cannot lock the templates").because(error))
    }

    /// Whether Bodies of other keys may start from it.
    pub fn publish(&self, key: &str, public: bool) -> Result<Template, Failure> {
        self.change_template(key, |template| {
            template.public = public;
            Ok(())
        })
        .map(|(template, ())| template)
    }

    /// Has a template that is new belong to a key.
    pub fn assign_owner(&self, key: &str, owner: &str) -> Result<(), Failure> {
        self.change_template(key, |template| {
            if template.owner.is_none() && template.tags.is_empty() {
                template.owner = Some(owner.to_owned());
            }
            Ok(())
        })
        .map(drop)
    }

    /// Where files that were sent for its builds are kept.
    pub fn files_dir(&self, id: &TemplateId) -> PathBuf {
        self.template_dir(id).join("files")
    }

    /// What whoever may send these files was told, and nobody else can know.
    pub fn upload_token(&self, id: &TemplateId, hash: &str) -> String {
        data::upload_token(&self.fleet.key, id, hash)
    }

    /// Has these tags mean the build that `target` means today.
    pub fn tag(&self, target: &str, tags: &[String]) -> Result<BuildId, Failure> {
        let build = self.find_build(target)?;
        check_tags(tags)?;
        self.change_template(build.template.as_str(), |template| {
            let since = store::clock::now();
            template.tags.extend(
                tags.iter().map(|tag| (tag.clone(), Tag { build: build.id.clone(), since: since.clone() })),
            );
            if template.tags.len() > TAGS_MAX {
                return Err(Failure::new(Kind::Limit, format!("a template has at most {TAGS_MAX} tags"))
                    .hint("remove some first"));
            }
            Ok(())
        })?;
        Ok(build.id)
    }

    /// Removes tags; those that are not there are an error.
    pub fn untag(&self, key: &str, tags: &[String]) -> Result<(), Failure> {
        self.change_template(key, |template| {
            for tag in tags {
                let gone = template.tags.remove(tag);
                gone.ok_or_else(|| {
                    Failure::new(
                        Kind::NotFound,
                        format!("template {} has no tag {:?}", template.name, proto::text::visible(tag)),
                    )
                })?;
            }
            Ok(())
        })
        .map(drop)
    }

    /// Writes a whole build down and points tags at it.
    pub(crate) fn keep_build(&self, build: &TemplateBuild, tags: &[String]) -> Result<(), Failure> {
        let path = self.template_dir(&build.template).join("builds").join(format!("{}.json", build.id));
        self.fleet.log().note(TemplateBuilt {
            template: build.template.clone(),
            build: build.id.clone(),
            tags: tags.to_vec(),
            bytes: build.bytes,
        })?;
        write_record(&path, build).map_err(|error| {
            Failure::new(Kind::Host, "cannot write the build down").because(error).hint("make room: pal gc")
        })?;
        self.change_template(build.template.as_str(), |template| {
            let since = store::clock::now();
            template.tags.extend(
                tags.iter().map(|tag| (tag.clone(), Tag { build: build.id.clone(), since: since.clone() })),
            );
            Ok(())
        })
        .map(drop)
    }

    /// Removes a template. Bodies and snapshots that stand on its layers keep them.
    pub fn remove(&self, key: &str) -> Result<TemplateId, Failure> {
        let _lock = self.lock_templates()?;
        let template = self.find(key)?.ok_or_else(|| unknown(key))?;
        self.fleet.jobs.cancel_builds_of(&template.id);
        self.fleet
            .log()
            .note(TemplateRemoved { template: template.id.clone(), name: template.name.clone() })?;
        let dir = self.template_dir(&template.id);
        // Without its manifest it is none any more, whatever becomes of us.
        let removed = fs::remove_file(dir.join("manifest.json")).and_then(|()| fs::remove_dir_all(&dir));
        removed.map_err(|error| {
            Failure::new(Kind::Host, "cannot remove the template").because(error).hint("try again: pal gc")
        })?;
        self.fleet.garbage().drop_unused_layers()?;
        Ok(template.id)
    }
}

/// A name that a template may have.
pub(crate) fn check_name(name: &str) -> Result<TemplateName, Failure> {
    let named: TemplateName = name
        .parse()
        .map_err(|error: proto::template::NameError| Failure::new(Kind::Usage, error.to_string()))?;
    if RESERVED.contains(&named.name.as_str()) {
        return Err(Failure::new(
            Kind::Usage,
            format!("{} means this machine's own root and cannot name a template", named.name),
        )
        .hint("choose another name"));
    }
    Ok(named)
}

pub(crate) fn unknown(key: &str) -> Failure {
    let shown: String = proto::text::visible(&key.chars().take(200).collect::<String>());
    let failure = Failure::new(Kind::NotFound, format!("there is no template {shown:?}"));
    match key {
        "base" | "code-interpreter-v1" => {
            failure.hint(format!("make it once, from Debian's packages: pal setup {key}"))
        }
        _ => failure
            .hint("templates are `host`, what `pal template ls` lists, and your snapshots: pal snapshot ls"),
    }
}

/// Tags as clients may send them.
pub fn check_tags(tags: &[String]) -> Result<(), Failure> {
    match tags.iter().find(|tag| !proto::template::is_plain(tag)) {
        Some(bad) => Err(Failure::new(
            Kind::Usage,
            format!("{:?} cannot be a tag", proto::text::visible(&bad.chars().take(200).collect::<String>())),
        )
        .hint("use letters, digits, `-`, `_` and `.`")),
        None => Ok(()),
    }
}

fn read_record<T: DeserializeOwned>(path: &std::path::Path) -> io::Result<T> {
    let text = sys::fd::read_small(path, RECORD_LEN_MAX)?;
    Ok(serde_json::from_str(&text)?)
}

fn write_record(path: &std::path::Path, record: &impl Serialize) -> io::Result<()> {
    sys::fd::write_whole(path, &serde_json::to_vec(record)?)
}
