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

    /// One template, by id, name or alias; a tag is ignored.
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

    /// A complete build, if there is one of that id.
    pub(crate) fn build(
        &self,
        template: &TemplateId,
        id: &BuildId,
    ) -> Result<Option<TemplateBuild>, Failure> {
        Ok(self.build_table().get(&build_key(template, id)?)?.map(|found| found.value))
    }

    /// The record of a template, by id, name or alias; a tag is ignored.
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
        self.build(&template.id, &id)?.ok_or_else(|| {
            Failure::new(Kind::NotFound, format!("build {id} of template {} does not exist", template.name))
                .hint("build it again: pal template build")
        })
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
            .snapshots()
            .find(crate::snapshots::bare(key))
            .map_err(|failure| if failure.kind == Kind::NotFound { unknown(key) } else { failure })?;
        self.origin_of_snapshot(manifest)
    }

    /// The same for a snapshot.
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
            snapshots: self.fleet.snapshots().below(spec)?,
            layers,
            workspaces: self.fleet.workspaces().workspaces_below(&spec.workspaces)?,
            home: self.fleet.homes().home_below(spec.home.as_ref())?,
        })
    }

    /// A template of that name, made if there is none.
    pub fn find_or_create(&self, name: &str) -> Result<Template, Failure> {
        let named = check_name(name)?;
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
        let (id, name) = (template.id.clone(), template.name.clone());
        self.fleet.log().note(TemplateCreated { template: id.clone(), name: name.clone() })?;
        match self.table().create(&key_of([&name])?, &template) {
            Ok(_) => Ok(template),
            // Another `pal` created it meanwhile: this one is none, and the log says so.
            Err(error) if error.is_conflict() => {
                self.fleet.log().note(TemplateRemoved { template: id, name: name.clone() })?;
                self.find(&name)?.ok_or_else(|| unknown(&name))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Changes a template's record; the change is an event first.
    fn change_template(
        &self,
        key: &str,
        change: impl Fn(&mut Template) -> Result<(), Failure>,
    ) -> Result<Template, Failure> {
        let Template { id, name, .. } = self.find(key)?.ok_or_else(|| unknown(key))?;
        let changed = self.table().change(&key_of([&name])?, |found| {
            // A template that was removed meanwhile, and perhaps another one that took its name.
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

    /// Whether Bodies of other keys may start from it.
    pub fn publish(&self, key: &str, public: bool) -> Result<Template, Failure> {
        self.change_template(key, |template| {
            template.public = public;
            Ok(())
        })
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

    /// Removes a template. Bodies and snapshots that stand on its layers keep them.
    pub fn remove(&self, key: &str) -> Result<TemplateId, Failure> {
        let template = self.find(key)?.ok_or_else(|| unknown(key))?;
        self.fleet.jobs.cancel_builds_of(&template.id);
        self.fleet
            .log()
            .note(TemplateRemoved { template: template.id.clone(), name: template.name.clone() })?;
        // Without its record it is no template any more; `gc` does the rest where this process is killed.
        self.table().remove(&key_of([&template.name])?)?;
        self.remove_leftovers(&template.id)?;
        self.fleet.garbage().drop_unused_layers()?;
        Ok(template.id)
    }

    /// Removes builds, jobs and files of a template that is none any more.
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

    /// Removes what templates left that were removed by a `pal` that was killed.
    pub(crate) fn sweep(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        // Builds first: a template that a build belongs to existed before it.
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
