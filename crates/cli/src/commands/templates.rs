//! `pal template` and `pal setup`.

pub mod images;

use std::{fs::File, path::Path, time::Duration};

use fleet::{BuildRequest, BuildStep, CustomKernel, Dockerfile, Fleet, TemplateView};
use proto::{
    Failure, Kind, Size,
    template::{StartCommand, TemplateSettings},
    vm::{Accelerator, Engine},
};
use serde_json::json;

use crate::{
    age,
    args::{ImportArgs, PullArgs, SetupArgs, TemplateArgs, TemplateCommand},
    output::{self, Format},
    settings::allowed_hosts,
    table::Table,
};

/// How wide the tags of a template may be in a list.
const TAGS_WIDTH: usize = 24;

/// Runs a command about templates; lists them by default.
pub async fn template(fleet: &Fleet, args: TemplateArgs, format: Format) -> Result<(), Failure> {
    match args.command.unwrap_or(TemplateCommand::Ls) {
        TemplateCommand::Ls => list(&fleet.templates().list()?, format),
        TemplateCommand::Inspect { template } => inspect(&fleet.templates().view(&template)?, format),
        TemplateCommand::Import(args) => print_template(&import(fleet, args).await?, format),
        TemplateCommand::Build { name, file, start, ready, force, allow, offline, pull } => {
            let start =
                (start.is_some() || ready.is_some()).then_some(StartCommand { command: start, ready });
            let view = build(
                fleet,
                &name,
                &file,
                BuildOptions { start, force, allow: allowed_hosts(offline, &allow)? },
                &pull,
            )
            .await?;
            print_template(&view, format)
        }
        TemplateCommand::Rm { templates } => templates.iter().try_for_each(|key| {
            let id = fleet.templates().remove(key)?;
            match format {
                Format::Text => output::line(id),
                Format::Json => output::json(&json!({ "id": id })),
            }
        }),
    }
}

fn list(views: &[TemplateView], format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json_lines(views);
    }
    if views.is_empty() {
        output::talk(
            "no templates but `host`, this host's own root file system\n  hint: create one from Debian's packages with `pal setup base`",
        );
        return Ok(());
    }
    let mut table = Table::new(&["NAME", "ID", "TAGS", "BUILDS", "SIZE", "AGE"]);
    for view in views {
        let tags: Vec<&str> = view.template.tags.keys().map(String::as_str).collect();
        let (size, age) = (Size(view.bytes).to_string(), age::since(&view.template.updated_at));
        table.row([
            &view.template.name,
            view.template.id.as_str(),
            &shorten_tags(&tags),
            &view.builds.len().to_string(),
            &size,
            &age,
        ]);
    }
    output::data(table.render("").as_bytes())
}

/// The tags as far as they fit into their column, and how many more there are; `template inspect` shows all.
fn shorten_tags(tags: &[&str]) -> String {
    let fits = |count: &usize| tags[..*count].join(",").chars().count() <= TAGS_WIDTH;
    let shown = (1..=tags.len()).take_while(fits).last().unwrap_or(tags.len().min(1));
    let more = tags.len() - shown;
    let text = tags[..shown].join(",");
    if more == 0 { text } else { format!("{text} +{more}") }
}

fn inspect(view: &TemplateView, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json(view);
    }
    let mut table = Table::bare();
    let template = &view.template;
    table.row(["name", &template.name]);
    table.row(["id", template.id.as_str()]);
    table.row(["made", &template.created_at]);
    for (tag, meant) in &template.tags {
        table.row(["tag", &format!("{tag}: {}", meant.build)]);
    }
    if let Some(build) = view.default_build() {
        let settings = &build.settings;
        table.row(["source", &build.source]);
        table.row(["layers", &format!("{}, {}", build.layers.len(), Size(build.bytes))]);
        table.row(["user", settings.user.as_deref().unwrap_or("user")]);
        table.row(["workdir", settings.workdir.as_deref().unwrap_or("the user's home")]);
        table.row(["sudo", if settings.sudo { "yes: setuid programs work" } else { "no" }]);
        let start = settings.start.iter();
        for line in start.flat_map(|start| [("start", &start.command), ("ready", &start.ready)]) {
            if let (name, Some(command)) = line {
                table.row([name, command]);
            }
        }
        for (name, value) in &settings.env {
            table.row(["env", &format!("{name}={value}")]);
        }
    }
    output::data(table.render("").as_bytes())
}

async fn import(fleet: &Fleet, args: ImportArgs) -> Result<TemplateView, Failure> {
    let settings = TemplateSettings { user: args.user, sudo: args.sudo, ..TemplateSettings::default() };
    let file = Path::new(&args.source);
    let built = if images::is_file(&args.source) {
        let archive = File::open(file).map_err(|error| unreadable(file, error))?;
        fleet.builds().import_template(
            &args.name,
            &format!("the archive {}", file.display()),
            settings,
            archive,
        )?
    } else {
        let image = images::image(&args.source, &args.pull)?;
        fleet.builds().import_image(&args.name, &image, settings, &mut |said| output::talk(said)).await?
    };
    fleet.templates().view(built.template.as_str())
}

/// The options of a build, besides its steps.
struct BuildOptions {
    start: Option<StartCommand>,
    force: bool,
    allow: Vec<String>,
}

async fn build(
    fleet: &Fleet,
    name: &str,
    file: &Path,
    wanted: BuildOptions,
    pull: &PullArgs,
) -> Result<TemplateView, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| unreadable(file, error))?;
    let context = file.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Dockerfile { from, acts, notes } = fleet::read_recipe(&text, &Default::default(), None)?;
    notes.iter().for_each(|note| output::talk(note));
    let from = images::origin(fleet, from, pull)?;
    let builds = fleet.builds();
    let asked = builds.request(name, &[], None, None)?;
    let job = builds.begin(&asked.template, &asked.id)?;
    let files = fleet.templates().files_dir(&job.template);
    let steps = acts
        .into_iter()
        .map(|act| Ok(BuildStep { act: fleet::pack_context(act, context, &files)?, force: false }));
    let steps = steps.collect::<Result<Vec<_>, Failure>>()?;
    let done = builds.build(
        &job,
        BuildRequest { from, steps, start: wanted.start, force: wanted.force, allow: wanted.allow },
    );
    let mut done = std::pin::pin!(done);
    let mut told = 0;
    let built = loop {
        let ended = tokio::time::timeout(Duration::from_millis(100), done.as_mut()).await;
        let (_, said) = job.log_lines(told, usize::MAX);
        said.iter().for_each(|said| output::talk(&proto::text::visible(&said.message)));
        told += said.len();
        if let Ok(built) = ended {
            break built;
        }
    };
    built?;
    fleet.templates().view(job.template.as_str())
}

fn print_template(view: &TemplateView, format: Format) -> Result<(), Failure> {
    match format {
        Format::Text => output::line(&view.template.id),
        Format::Json => output::json(view),
    }
}

fn unreadable(file: &Path, error: std::io::Error) -> Failure {
    Failure::new(Kind::NotFound, format!("cannot read {}", file.display()))
        .because(error)
        .hint("name a file that exists")
}

/// Creates one of pal's own templates, or prepares this host for microVMs.
pub fn setup(fleet: &Fleet, args: &SetupArgs, format: Format) -> Result<(), Failure> {
    let mut say = |said: &str| output::talk(said);
    if args.template == "microvm"
        && let Some(engine) = args.engine
    {
        return setup_engine(fleet, engine, args, format);
    }
    if args.template == "microvm" {
        let own = args.kernel.clone().map(|file| CustomKernel { file, modules: args.modules.clone() });
        let report = fleet.microvms().setup(own, &mut say)?;
        return match format {
            Format::Json => output::json(&report),
            Format::Text => output::line(format!(
                "microVMs are set up: the kernel {} boots; try: pal run --layer microvm -- uname -a",
                report.last_boot.release
            )),
        };
    }
    if args.engine.is_some() {
        return Err(Failure::new(Kind::Usage, "only `pal setup microvm` has an engine")
            .hint("write: pal setup microvm --engine ENGINE"));
    }
    if args.kernel.is_some() {
        return Err(Failure::new(Kind::Usage, "only `pal setup microvm` has a kernel")
            .hint("write: pal setup microvm --kernel FILE"));
    }
    let view = match std::env::var_os("PATH").filter(|path| !path.is_empty()) {
        Some(path) => fleet.builds().setup_with(
            &args.template,
            &std::env::split_paths(&path).collect::<Vec<_>>(),
            &mut say,
        )?,
        None => fleet.builds().setup(&args.template, &mut say)?,
    };
    print_template(&view, format)
}

/// The path of a hypervisor on the caller's PATH, unless a setting names one.
fn on_path(engine: Engine, fleet: &Fleet) -> Option<std::path::PathBuf> {
    let decided = fleet.settings().read().is_ok_and(|settings| settings.program(engine).is_some());
    let path = std::env::var_os("PATH").filter(|_| engine != Engine::Qemu && !decided)?;
    std::env::split_paths(&path)
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(engine.name()))
        .find(|program| program.is_file())
}

/// Prepares a further hypervisor, and boots a microVM under it.
fn setup_engine(fleet: &Fleet, engine: Engine, args: &SetupArgs, format: Format) -> Result<(), Failure> {
    let program = args.program.as_deref().map(crate::settings::absolute).transpose()?;
    let program = program.or_else(|| on_path(engine, fleet));
    let known = fleet.microvms().setup_engine(engine, program, &mut |said: &str| output::talk(said))?;
    if format == Format::Json {
        return output::json(&known);
    }
    match &known.verdict {
        Some(verdict) if verdict.accelerator == Accelerator::Kvm => output::line(format!(
            "microVMs run under {}; try: pal run --layer microvm --engine {engine} -- uname -a",
            known.version
        )),
        verdict => {
            let why = verdict.as_ref().map_or("it was not tested", |verdict| verdict.why.as_str());
            Err(Failure::new(
                Kind::Host,
                format!("{} is installed, but no microVM boots under it", known.version),
            )
            .because(why.to_owned())
            .hint("use a host with (nested) virtualisation, or the engine that emulates: --engine qemu"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_tags_fit_into_their_column() {
        assert_eq!(shorten_tags(&[]), "");
        assert_eq!(shorten_tags(&["default", "v1"]), "default,v1");
        let many: Vec<String> = (0..32).map(|number| format!("v{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(shorten_tags(&many), "v0,v1,v2,v3,v4,v5,v6,v7 +24");
        assert_eq!(
            shorten_tags(&["a-tag-that-is-longer-than-the-column", "b"]),
            "a-tag-that-is-longer-than-the-column +1"
        );
    }
}
