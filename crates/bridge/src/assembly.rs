//! Assembles the driver of one agent: its files, tools, middleware and system prompt.
//!
//! Invariant: the list of tools and the system prompt of an agent do not change between its requests, so that the cache of
//! a model's provider holds. The system prompt is fixed in the log by the first driver.
//! Invariant: replay uses the tools and the refinements of results that the agent used.

use std::sync::Arc;

use brain::{
    agent::{
        LiveSink, Middleware, NullSink, ToolRegistry,
        middleware::{
            AgentFiles as _, HookSet, MemoryFile, PromptParts, ResultEviction, SecretMask, system_prompt,
        },
    },
    library::{Library, LibraryError, Role},
};
use proto::{AgentId, BodyId, Failure, Kind, egress::EgressRule, event_data::AgentSpec};

use crate::{
    AgentHost, AgentRecord, AgentSettings, Workplace,
    files::{BodyBackend, CompositeFiles, HostAccess, HostDirectory, SharedStore, StateFiles},
    replay::{ReplayParts, ReplayReport},
    subagents::{Lineage, Subagents, find_role, roles_for_tasks, shape_tools},
    tools::registry,
    user_library::{
        SkillDirectory, read_config, read_library, read_repository, read_rules, skill_directories,
    },
    venue::{CallRouting, MicrovmSupport, VenueRouter, VenueRules, raise_risks, route_tools},
};

/// The directory of the Body for long results and older messages.
pub(crate) const ARTIFACTS_DIR: &str = "/tmp/palisade-agent";
/// Most rules of a network policy that the system prompt names.
const RULES_SHOWN_MAX: usize = 24;
/// The file with the memory of a user or a repository.
const MEMORY_FILE: &str = "AGENTS.md";
/// Tools whose calls may run in a Body for one call.
const ROUTED_TOOLS: &[&str] = &["execute"];
/// Tools that run commands in the Body itself, because these may go on after their call.
const SESSION_TOOLS: &[&str] = &["exec_command"];

/// The place of an agent's work, and its files.
pub(crate) struct AgentPlace {
    pub(crate) workplace: Arc<Workplace>,
    pub(crate) files: Arc<CompositeFiles>,
}

/// The tools of an agent, and the library that they come from.
pub(crate) struct AgentKit {
    pub(crate) place: AgentPlace,
    pub(crate) library: Library,
    pub(crate) role: Option<Role>,
    pub(crate) tools: ToolRegistry,
    /// Refuses calls that must not run where they would.
    pub(crate) router: Arc<VenueRouter>,
}

impl AgentHost {
    /// The files and the tools of an agent, without those that act on other agents or on servers.
    pub(crate) async fn make_kit(
        &self,
        record: &AgentRecord,
        body: &BodyId,
        live: &Arc<dyn LiveSink>,
    ) -> Result<AgentKit, Failure> {
        let settings = AgentSettings::of(&record.spec);
        let skills = skill_directories(&self.settings().config, &settings.skills);
        let place = self.make_place(record, body, &skills)?;
        let own = read_library(&self.settings().config, &skills)?;
        let library = own.merge(read_repository(place.files.as_ref(), place.workplace.workdir()).await);
        let role = self.choose_role(&record.spec, &library)?;
        let (tools, router) = self.make_tools(&place, role.as_ref(), live)?;
        Ok(AgentKit { place, library, role, tools, router })
    }

    /// The tools of an agent in a place: those of its role, each call routed by its risk.
    fn make_tools(
        &self,
        place: &AgentPlace,
        role: Option<&Role>,
        live: &Arc<dyn LiveSink>,
    ) -> Result<(ToolRegistry, Arc<VenueRouter>), Failure> {
        let mut tools = registry(&place.workplace, &place.files, live);
        let routing = self.make_routing(place, live)?;
        route_tools(&mut tools, ROUTED_TOOLS, &routing);
        raise_risks(&mut tools, SESSION_TOOLS, &routing);
        if let Some(role) = role {
            shape_tools(&mut tools, role, &routing);
        }
        Ok((tools, Arc::clone(&routing.router)))
    }

    fn make_routing(
        &self,
        place: &AgentPlace,
        live: &Arc<dyn LiveSink>,
    ) -> Result<Arc<CallRouting>, Failure> {
        let fleet = Arc::clone(self.agents().fleet());
        let microvms = MicrovmSupport::find(&fleet, place.workplace.body())?;
        let router = VenueRouter::new(VenueRules::load(&self.settings().config)?, microvms);
        let (workplace, files) = (Arc::clone(&place.workplace), Arc::clone(&place.files));
        let live = Arc::clone(live);
        let tools_in = Arc::new(move |body: &BodyId| {
            let other = Arc::new(workplace.in_body(body.clone()));
            registry(&other, &files, &live)
        });
        Ok(Arc::new(CallRouting {
            router: Arc::new(router),
            risks: Arc::new(read_rules(&self.settings().config)?),
            fleet,
            tools_in,
            person: self.settings().person.clone(),
        }))
    }

    /// The Body of an agent, and its files: those of the Body, memories that agents share, files in its own log, skills
    /// of the host.
    fn make_place(
        &self,
        record: &AgentRecord,
        body: &BodyId,
        skills: &[SkillDirectory],
    ) -> Result<AgentPlace, Failure> {
        let fleet = Arc::clone(self.agents().fleet());
        let workdir = match &record.spec.workdir {
            Some(workdir) => workdir.clone(),
            None => fleet.view(body)?.spec.workdir.unwrap_or_else(|| "/home/user".into()),
        };
        let workplace =
            Arc::new(Workplace::new(Arc::clone(&fleet), record.spec.id.clone(), body.clone(), workdir));
        // Agents of different keys of a server do not share memories.
        let owner = fleet.leases().get(body)?.and_then(|lease| lease.owner);
        let in_body = Arc::new(BodyBackend::new(Arc::clone(&workplace)));
        let mut files = CompositeFiles::new(in_body, workplace.workdir())
            .with_route("/memories/", Arc::new(SharedStore::new(fleet, owner)))
            .with_route("/agent/", Arc::new(StateFiles::open(self.agents(), record)?));
        for directory in skills {
            let opened = HostDirectory::open(&directory.path, HostAccess::ReadOnly)?;
            files = files.with_route(&directory.prefix, Arc::new(opened));
        }
        Ok(AgentPlace { workplace, files: Arc::new(files) })
    }

    fn choose_role(&self, spec: &AgentSpec, library: &Library) -> Result<Option<Role>, Failure> {
        let Some(name) = spec.role.as_deref() else { return Ok(None) };
        find_role(library, name).map(Some).ok_or_else(|| {
            let known: Vec<&str> = library.roles().map(|role| role.name.as_str()).collect();
            Failure::new(Kind::Usage, format!("there is no role {name}"))
                .hint(format!("the roles are {}", known.join(", ")))
        })
    }

    /// The middleware that changes results before they are recorded, outermost first.
    pub(crate) fn refiners(&self, secrets: Vec<String>, place: &AgentPlace) -> [Arc<dyn Middleware>; 2] {
        let results = format!("{ARTIFACTS_DIR}/large_tool_results");
        [
            Arc::new(SecretMask::new(secrets)),
            Arc::new(ResultEviction::new(Arc::clone(&place.files) as _, results)),
        ]
    }

    /// The system prompt of an agent: its role, its place, its plans and skills, and the memory of user and repository.
    pub(crate) async fn make_prompt(&self, spec: &AgentSpec, kit: &AgentKit) -> Result<Vec<String>, Failure> {
        let workdir = kit.place.workplace.workdir();
        let mut memory = Vec::new();
        if let Some(text) = read_config(&self.settings().config, MEMORY_FILE)? {
            memory.push(MemoryFile { path: format!("{MEMORY_FILE} of the user"), text });
        }
        let path = format!("{}/{MEMORY_FILE}", workdir.trim_end_matches('/'));
        // A repository without a readable file has no memory; its text is data, and no reason to stop.
        if let Ok(Some(text)) = kit.place.files.read(&path).await {
            memory.push(MemoryFile { path, text });
        }
        let plan = match spec.plan.as_deref() {
            Some(name) => Some(kit.library.plan(name).ok_or_else(|| {
                let known: Vec<&str> = kit.library.plans().map(|plan| plan.name.as_str()).collect();
                Failure::new(Kind::Usage, format!("there is no plan {name}"))
                    .hint(format!("the plans are {}", known.join(", ")))
            })?),
            None => None,
        };
        Ok(system_prompt(&PromptParts {
            role: kit.role.as_ref(),
            workdir: Some(workdir),
            facts: self.body_facts(kit.place.workplace.body())?,
            mode: Some(&spec.mode),
            plan,
            plans: kit.library.plans().collect(),
            skills: kit.library.skills().collect(),
            memory,
        }))
    }

    /// Facts about a Body that an agent in it should know.
    fn body_facts(&self, body: &BodyId) -> Result<Vec<String>, Failure> {
        let spec = self.agents().fleet().view(body)?.spec;
        let rules = spec.egress.as_ref().map(proto::spec::Egress::all_rules).unwrap_or_default();
        let network = match &rules[..] {
            [] => "It has no network but its own loopback.".to_owned(),
            rules => {
                let shown: Vec<String> = rules.iter().take(RULES_SHOWN_MAX).map(EgressRule::shown).collect();
                let more = match rules.len().saturating_sub(RULES_SHOWN_MAX) {
                    0 => String::new(),
                    more => format!("; and {more} more"),
                };
                format!("Its network reaches only what these rules name: {}{more}.", shown.join("; "))
            }
        };
        Ok(vec![
            format!("You work in a sandbox of layer {}, from template {}.", spec.layer, spec.template),
            network,
        ])
    }

    /// The hooks of the user.
    pub(crate) fn read_hooks(&self) -> Result<HookSet, Failure> {
        match read_config(&self.settings().config, "hooks.toml")? {
            Some(text) => HookSet::parse("hooks.toml", &text).map_err(LibraryError::into_failure),
            None => Ok(HookSet::default()),
        }
    }

    /// The tool by which an agent gives tasks to others.
    pub(crate) fn subagents(
        &self,
        spec: &AgentSpec,
        library: &Library,
        lineage: &Lineage,
        live: &Arc<dyn LiveSink>,
    ) -> Arc<Subagents> {
        Subagents::new(
            self.agents().clone(),
            spec,
            roles_for_tasks(library),
            Arc::new(self.clone()),
            lineage.clone(),
            Arc::clone(live),
        )
    }

    /// Runs the recorded calls of an agent again in a fresh Body, and compares the results.
    pub async fn replay(&self, id: &AgentId) -> Result<ReplayReport, Failure> {
        let record = self.agents().find(id.as_str())?;
        let library = read_library(&self.settings().config, &[])?;
        let role = self.choose_role(&record.spec, &library)?;
        let live: Arc<dyn LiveSink> = Arc::new(NullSink);
        self.agents()
            .replay(id, |loaded, body| {
                let place = self.make_place(&loaded.record, body, &[])?;
                let (tools, _) = self.make_tools(&place, role.as_ref(), &live)?;
                Ok(ReplayParts {
                    tools,
                    refiners: self.refiners(self.model_secrets(&record.spec), &place).to_vec(),
                })
            })
            .await
    }
}
