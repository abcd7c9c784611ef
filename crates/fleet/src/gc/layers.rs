//! Finds layers that are in use, and removes the others.

use std::{collections::BTreeSet, fs};

use body::{BodyDir, layers, snapshot};
use proto::{Failure, LayerId};

use crate::{GarbageCollector, GarbageItem, GcMode, failures};

impl GarbageCollector<'_> {
    /// The layers that a build, a Body or a snapshot uses.
    fn needed_layers(&self) -> Result<BTreeSet<LayerId>, Failure> {
        let mut needed = BTreeSet::new();
        for template in self.fleet.templates().records()? {
            let builds = self.fleet.templates().builds(&template.id)?;
            needed.extend(builds.into_iter().flat_map(|build| build.layers));
        }
        for id in self.fleet.ids()? {
            let dir = BodyDir::at(self.fleet.body_path(&id));
            let Ok(spec) = dir.spec().or_else(|_| dir.draft()) else { continue };
            needed.extend(spec.base.into_iter().flat_map(|base| base.layers));
            needed.extend(spec.workspaces.into_iter().flat_map(|workspace| workspace.layers));
            needed.extend(spec.home.into_iter().flat_map(|home| home.layers));
        }
        needed.extend(self.fleet.homes().records()?.into_iter().flat_map(|home| home.layers));
        for manifest in self.fleet.snapshots().manifests() {
            needed.extend(manifest.base.into_iter().flat_map(|base| base.layers));
            needed.extend(manifest.workspaces.into_iter().flat_map(|workspace| workspace.layers));
            needed.extend(manifest.home.into_iter().flat_map(|home| home.layers));
        }
        Ok(needed)
    }

    /// Removes unused layers. While a build runs, all layers stay, because the build may be about to use them.
    pub(crate) fn drop_unused_layers(&self) -> Result<(), Failure> {
        self.sweep_layers(GcMode::Remove, &mut Vec::new())
    }

    /// Removes unused layers with the budget of the settings, or only lists them in `found`.
    pub(crate) fn sweep_layers(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) -> Result<(), Failure> {
        self.sweep_layers_to(sweep, self.fleet.settings().budget()?.0, found)
    }

    /// Removes unused layers, but keeps up to `budget` bytes of workspace layers, which a later Body may use again.
    pub(crate) fn sweep_layers_to(
        &self,
        sweep: GcMode,
        budget: u64,
        found: &mut Vec<GarbageItem>,
    ) -> Result<(), Failure> {
        if !self.fleet.templates().layers_dir().is_dir() {
            return Ok(());
        }
        let Some(_idle) = self.no_build_runs() else { return Ok(()) };
        self.sweep_blobs(sweep, found);
        let needed = self.needed_layers()?;
        let entries = fs::read_dir(self.fleet.templates().layers_dir()).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()).filter(|path| path.is_dir()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.parse::<LayerId>().is_ok_and(|id| needed.contains(&id)) {
                continue;
            }
            let record = layers::read(&path);
            if record.as_ref().is_ok_and(Self::is_spare) {
                continue;
            }
            let why =
                if record.is_ok() { "no template, Body or snapshot uses it" } else { "it is incomplete" };
            let bytes = record.as_ref().map_or(0, |record| record.bytes);
            found.push(GarbageItem { kind: "layer", name, bytes, why: why.to_owned() });
            if sweep == GcMode::Remove {
                let nobody = proto::spec::Ids { users: Vec::new(), groups: Vec::new() };
                let ids =
                    record.map(|record| record.ids).or_else(|_| body::ids::of_layers()).unwrap_or(nobody);
                snapshot::remove(&self.fleet.launch_context.programs, &ids, &path)
                    .map_err(failures::removal)?;
            }
        }
        self.sweep_spares(&needed, budget, sweep, found)
    }

    /// Removes partial downloads from registries.
    fn sweep_blobs(&self, sweep: GcMode, found: &mut Vec<GarbageItem>) {
        let entries = fs::read_dir(self.fleet.image_puller().images_dir()).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let bytes = fs::metadata(&path).map_or(0, |about| about.len());
            found.push(GarbageItem {
                kind: "download",
                name,
                bytes,
                why: "the download is incomplete".to_owned(),
            });
            if sweep == GcMode::Remove {
                let _ = fs::remove_file(&path);
            }
        }
    }

    /// Takes the build lock in shared mode, so that garbage collection, which needs it exclusively, leaves all layers
    /// alone.
    pub(crate) fn building(&self) -> Result<fs::File, Failure> {
        use rustix::fs::FlockOperation::LockShared;
        let lock = self.build_lock().and_then(|file| {
            rustix::fs::flock(&file, LockShared)?;
            Ok(file)
        });
        lock.map_err(|error| {
            Failure::new(proto::Kind::Host, "cannot lock the layers for a build").because(error)
        })
    }

    fn no_build_runs(&self) -> Option<fs::File> {
        let file = self.build_lock().ok()?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).ok().map(|()| file)
    }

    fn build_lock(&self) -> std::io::Result<fs::File> {
        let dir = self.fleet.templates().layers_dir();
        fs::create_dir_all(&dir)?;
        fs::File::create(dir.join("lock"))
    }
}
