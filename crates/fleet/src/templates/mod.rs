//! Templates: their names, tags and builds, and the resolution of a template into the layers of a Body.
//!
//! Invariant: a recorded build is complete and never changes; names and tags may change.
//! Invariant: layers are shared; a layer is removed when no build, Body or snapshot uses it any more.

pub(crate) mod build;
mod build_context;
pub mod dockerfile;
mod image;
mod interpreter;
mod jobs;
mod setup;
pub(crate) mod start;

pub use build::{BaseImage, BuildRequest, BuildStep, Builds, Instruction, STEPS_MAX};
pub use build_context::pack_context;
pub use jobs::{BuildJob, BuildState, LogLine};
pub(crate) use jobs::{BuildJobRecord, BuildJobs};
pub use setup::{BASE, INTERPRETER, ProgressFn};

use std::{collections::BTreeSet, fs, io, path::PathBuf};

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
use serde::Serialize;
use serde_json::Value;
use store::{RecordKey, RecordTable};

use crate::{
    Fleet, GarbageItem, GcMode, data,
    records::{BUILD_JOBS, BUILDS, TEMPLATES, key_of},
};

/// Most tags of one template.
const TAGS_MAX: usize = 256;
/// Names with another meaning, which a template cannot have.
const RESERVED: &[&str] = &["host"];

/// A template as callers see it.
#[derive(Debug, Clone, Serialize)]
pub struct TemplateView {
    /// The record.
    #[serde(flatten)]
    pub template: Template,
    /// The complete builds, newest first.
    pub builds: Vec<TemplateBuild>,
    /// The size of its layers, including those that it shares with other templates.
    pub bytes: u64,
}

impl TemplateView {
    /// The build that the template's name refers to without a tag.
    pub fn default_build(&self) -> Option<&TemplateBuild> {
        let wanted = &self.template.tags.get(DEFAULT_TAG)?.build;
        self.builds.iter().find(|build| build.id == *wanted)
    }
}

/// A template, resolved to everything that a new Body takes from it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ResolvedTemplate {
    /// The layers below the Body's upper.
    pub rootfs: RootfsStack,
    /// The base that the Body's spec records.
    pub base: Option<BodyBase>,
    /// The settings that the Body inherits.
    pub settings: TemplateSettings,
    /// The repositories that a snapshot contains.
    pub workspaces: Vec<Workspace>,
    /// The home that a snapshot contains.
    pub home: Option<Home>,
    /// Shell commands that run at each start of its Bodies.
    pub at_start: Vec<String>,
    /// Ports inside that the user will want to reach.
    pub ports: Vec<u16>,
    /// The snapshot that the Body starts from.
    pub snapshot: Option<SnapshotSource>,
}

/// The templates of a fleet: their records, names, tags and complete builds.
#[derive(Debug, Clone, Copy)]
pub struct Templates<'a> {
    pub(crate) fleet: &'a Fleet,
}

impl Templates<'_> {
    pub(crate) fn template_dir(&self, id: &TemplateId) -> PathBuf {
        self.fleet.data.join("templates").join(id.as_str())
    }

    fn table(&self) -> RecordTable<'_, Template> {
        self.fleet.table(TEMPLATES)
    }

    fn build_table(&self) -> RecordTable<'_, TemplateBuild> {
        self.fleet.table(BUILDS)
    }

    pub(crate) fn layers_dir(&self) -> PathBuf {
        self.fleet.data.join("layers")
    }

    /// All templates, by name.
    pub fn list(&self) -> Result<Vec<TemplateView>, Failure> {
        let mut views = self
            .records()?
            .into_iter()
            .map(|template| self.template_view(template))
            .collect::<Result<Vec<_>, _>>()?;
        views.sort_by(|a, b| a.template.name.cmp(&b.template.name));
        Ok(views)
    }

    /// Returns one template by id, name or alias; ignores a tag.
    pub fn view(&self, key: &str) -> Result<TemplateView, Failure> {
        self.template_view(self.find(key)?.ok_or_else(|| unknown(key))?)
    }

    pub(crate) fn records(&self) -> Result<Vec<Template>, Failure> {
        Ok(self.table().values(None)?)
    }

    fn template_view(&self, template: Template) -> Result<TemplateView, Failure> {
        let mut builds = self.builds(&template.id)?;
        builds.sort_by(|a, b| b.created_at.cmp(&a.created_at));
        let layers: BTreeSet<&LayerId> = builds.iter().flat_map(|build| &build.layers).collect();
        let bytes = layers
            .into_iter()
            .filter_map(|id| layers::read(&self.layers_dir().join(id.as_str())).ok())
            .map(|layer| layer.bytes)
            .sum();
        Ok(TemplateView { template, builds, bytes })
    }

    /// The complete builds of a template.
    pub(crate) fn builds(&self, id: &TemplateId) -> Result<Vec<TemplateBuild>, Failure> {
        Ok(self.build_table().values(Some(&key_of([id.as_str()])?))?)
    }

    /// A complete build by its id, if there is one.
    pub(crate) fn build(
        &self,
        template: &TemplateId,
        id: &BuildId,
    ) -> Result<Option<TemplateBuild>, Failure> {
        Ok(self.build_table().get(&build_key(template, id)?)?.map(|found| found.value))
    }

    /// The record of a template by id, name or alias; ignores a tag.
    pub fn find(&self, key: &str) -> Result<Option<Template>, Failure> {
        let Ok(named) = key.parse::<TemplateName>() else { return Ok(None) };
        let mut templates = self.records()?;
        let by_id = templates.iter().position(|template| template.id.as_str() == named.name);
        let by_name = || {
            templates
                .iter()
                .position(|template| template.name == named.name || template.aliases.contains(&named.name))
        };
        Ok(by_id.or_else(by_name).map(|at| templates.swap_remove(at)))
    }

    /// Finds the build that `key` refers to: by name and tag, by id and tag, or by the build's own id.
    pub fn find_build(&self, key: &str) -> Result<TemplateBuild, Failure> {
        let template = self.find(key)?.ok_or_else(|| unknown(key))?;
        let asked = key.parse::<TemplateName>().ok().and_then(|named| named.tag);
        let tag = asked.as_deref().unwrap_or(DEFAULT_TAG);
        let by_id = || tag.parse::<BuildId>().ok();
        let meant = |tag: &str| template.tags.get(tag).map(|tag| tag.build.clone());
        // A template without a default build was only built under other tags; its plain name refers to none of them.
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
        self.build(&template.id, &id)?.ok_or_else(|| {
            Failure::new(Kind::NotFound, format!("build {id} of template {} does not exist", template.name))
                .hint("build it again: pal template build")
        })
    }

    /// Resolves the name of a template or a snapshot for a new Body.
    pub(crate) fn resolve(&self, key: &str) -> Result<ResolvedTemplate, Failure> {
        if key == "host" {
            return Ok(ResolvedTemplate::default());
        }
        if self.find(key)?.is_some() {
            return self.origin_of(self.find_build(key)?);
        }
        let manifest = self
            .fleet
            .snapshots()
            .find(crate::snapshots::bare(key))
            .map_err(|failure| if failure.kind == Kind::NotFound { unknown(key) } else { failure })?;
        self.origin_of_snapshot(manifest)
    }

    /// Resolves a snapshot for a new Body.
    pub(crate) fn origin_of_snapshot(&self, manifest: SnapshotManifest) -> Result<ResolvedTemplate, Failure> {
        let rootfs = self.fleet.snapshots().under_snapshot(&manifest)?;
        let dir = self.fleet.snapshots().path(&manifest.id);
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

    /// Resolves a build for a new Body.
    pub(crate) fn origin_of(&self, build: TemplateBuild) -> Result<ResolvedTemplate, Failure> {
        if build.layers.is_empty() {
            // A build without layers: `base` on a host that could not build it, where it is the host's own root.
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

    /// The layers below an existing Body.
    pub(crate) fn rootfs_stack(&self, spec: &Spec) -> Result<RootfsStack, Failure> {
        let layers = spec.base.as_ref().map(|base| self.layers_below(&base.layers)).transpose()?;
        Ok(RootfsStack {
            snapshots: self.fleet.snapshots().below(spec)?,
            layers,
            workspaces: self.fleet.workspaces().workspaces_below(&spec.workspaces)?,
            home: self.fleet.homes().home_below(spec.home.as_ref())?,
        })
    }

    /// Finds the template of that name, or creates it.
    pub fn find_or_create(&self, name: &str) -> Result<Template, Failure> {
        let named = check_name(name)?;
        if let Some(template) = self.find(&named.name)? {
            return Ok(template);
        }
        let drawn = sys::random::bytes().map_err(|error| {
            Failure::new(Kind::Host, "cannot read random bytes from the kernel").because(error)
        })?;
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
        let (id, name) = (template.id.clone(), template.name.clone());
        self.fleet.log().note(TemplateCreated { template: id.clone(), name: name.clone() })?;
        match self.table().create(&key_of([&name])?, &template) {
            Ok(_) => Ok(template),
            // Another `pal` created it meanwhile: this creation is void, and the log records that.
            Err(error) if error.is_conflict() => {
                self.fleet.log().note(TemplateRemoved { template: id, name: name.clone() })?;
                self.find(&name)?.ok_or_else(|| unknown(&name))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Changes a template's record; the event of the change comes first.
    fn change_template(
        &self,
        key: &str,
        change: impl Fn(&mut Template) -> Result<(), Failure>,
    ) -> Result<Template, Failure> {
        let Template { id, name, .. } = self.find(key)?.ok_or_else(|| unknown(key))?;
        let changed = self.table().change(&key_of([&name])?, |found| {
            // The template may have been removed meanwhile, and another may have its name.
            let before = found.filter(|found| found.id == id).ok_or_else(|| unknown(key))?;
            let mut template = before.clone();
            change(&mut template)?;
            if template == *before {
                return Ok(None);
            }
            template.updated_at = store::clock::now();
            self.fleet.log().note(TemplateChanged {
                template: template.id.clone(),
                name: template.name.clone(),
                public: template.public,
                tags: template.tags.clone(),
            })?;
            Ok::<_, Failure>(Some(template))
        })?;
        changed.ok_or_else(|| unknown(key))
    }

    /// Sets whether Bodies of other API keys may start from the template.
    pub fn publish(&self, key: &str, public: bool) -> Result<Template, Failure> {
        self.change_template(key, |template| {
            template.public = public;
            Ok(())
        })
    }

    /// Sets the API key that owns a new template.
    pub fn assign_owner(&self, key: &str, owner: &str) -> Result<(), Failure> {
        self.change_template(key, |template| {
            if template.owner.is_none() && template.tags.is_empty() {
                template.owner = Some(owner.to_owned());
            }
            Ok(())
        })
        .map(drop)
    }

    /// The directory of the files that clients uploaded for its builds.
    pub fn files_dir(&self, id: &TemplateId) -> PathBuf {
        self.template_dir(id).join("files")
    }

    /// The token that a client needs to upload these files. Only clients that may upload them receive it.
    pub fn upload_token(&self, id: &TemplateId, hash: &str) -> String {
        data::upload_token(&self.fleet.key, id, hash)
    }

    /// Points these tags at the build that `target` refers to now.
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

    /// Removes tags; a missing tag is an error.
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

    /// Records a complete build and points tags at it.
    pub(crate) fn keep_build(&self, build: &TemplateBuild, tags: &[String]) -> Result<(), Failure> {
        self.fleet.log().note(TemplateBuilt {
            template: build.template.clone(),
            build: build.id.clone(),
            tags: tags.to_vec(),
            bytes: build.bytes,
        })?;
        self.build_table().create(&build_key(&build.template, &build.id)?, build)?;
        self.change_template(build.template.as_str(), |template| {
            let since = store::clock::now();
            template.tags.extend(
                tags.iter().map(|tag| (tag.clone(), Tag { build: build.id.clone(), since: since.clone() })),
            );
            Ok(())
        })
        .map(drop)
    }

    /// Removes a template. Bodies and snapshots that use its layers keep them.
    pub fn remove(&self, key: &str) -> Result<TemplateId, Failure> {
        let template = self.find(key)?.ok_or_else(|| unknown(key))?;
        self.fleet.jobs.cancel_builds_of(&template.id);
        self.fleet
            .log()
            .note(TemplateRemoved { template: template.id.clone(), name: template.name.clone() })?;
        // Without its record the template is gone; if this process is killed now, `gc` removes the rest.
        self.table().remove(&key_of([&template.name])?)?;
        self.remove_leftovers(&template.id)?;
        self.fleet.garbage().drop_unused_layers()?;
        Ok(template.id)
    }

    /// Removes the builds, jobs and files of a removed template.
    fn remove_leftovers(&self, id: &TemplateId) -> Result<(), Failure> {
        for bucket in [BUILDS, BUILD_JOBS] {
            let table = self.fleet.table::<Value>(bucket);
            for record in self.fleet.records().list(bucket, Some(&key_of([id.as_str()])?))?.records {
                table.remove(&record.key)?;
            }
        }
        match fs::remove_dir_all(self.template_dir(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Failure::new(Kind::Host, "cannot remove the files of the template")
                    .because(error)
                    .hint("try again: pal gc"))
            }
            _ => Ok(()),
        }
    }

    /// Removes the remains of templates whose removal was interrupted.
    pub(crate) fn sweep(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        // Builds are listed first: a build's template was created before the build.
        let mut left = BTreeSet::new();
        for bucket in [BUILDS, BUILD_JOBS] {
            let records = self.fleet.records().list(bucket, None)?.records.into_iter();
            left.extend(records.filter_map(|record| Some(record.key.as_str().split_once('.')?.0.to_owned())));
        }
        let dirs = fs::read_dir(self.fleet.data.join("templates")).into_iter().flatten().flatten();
        let dirs = dirs.filter(|entry| entry.path().is_dir());
        left.extend(dirs.filter_map(|entry| entry.file_name().into_string().ok()));
        let known: BTreeSet<String> =
            self.records()?.into_iter().map(|template| template.id.to_string()).collect();
        for id in left.difference(&known).filter_map(|id| id.parse::<TemplateId>().ok()) {
            let why = "its template is gone".to_owned();
            found.push(GarbageItem { kind: "template", name: id.to_string(), bytes: 0, why });
            if sweep == GcMode::Remove {
                self.remove_leftovers(&id)?;
            }
        }
        Ok(())
    }
}

pub(crate) fn build_key(template: &TemplateId, build: &BuildId) -> Result<RecordKey, Failure> {
    key_of([template.as_str(), build.as_str()])
}

/// Checks the name of a template.
pub(crate) fn check_name(name: &str) -> Result<TemplateName, Failure> {
    let named: TemplateName = name
        .parse()
        .map_err(|error: proto::template::NameError| Failure::new(Kind::Usage, error.to_string()))?;
    if RESERVED.contains(&named.name.as_str()) {
        return Err(Failure::new(
            Kind::Usage,
            format!("{} means this host's own root and cannot name a template", named.name),
        )
        .hint("choose another name"));
    }
    Ok(named)
}

pub(crate) fn unknown(key: &str) -> Failure {
    let shown: String = proto::text::visible(&key.chars().take(200).collect::<String>());
    let failure = Failure::new(Kind::NotFound, format!("there is no template {shown:?}"));
    match key {
        _ if RESERVED.contains(&key) => Failure::new(
            Kind::NotFound,
            format!("{shown} is this host's own root: Bodies use it, but nothing can be built on it or removed from it"),
        )
        .hint("build on Debian's packages instead: pal setup base, then FROM base"),
        "base" | "code-interpreter-v1" => {
            failure.hint(format!("create it once, from Debian's packages: pal setup {key}"))
        }
        _ => failure
            .hint("templates are `host`, what `pal template ls` lists, and your snapshots: pal snapshot ls"),
    }
}

/// Checks the tags that a client sends.
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
