//! `pal templates` and `pal setup`.

use fleet::{Fleet, TemplateView};
use proto::{Failure, Size};
use serde_json::json;

use crate::{
    age,
    args::{Templates, TemplatesCommand},
    output::{self, Format},
    table::Table,
};

/// Lists the templates, or does what else was asked.
pub async fn templates(fleet: &Fleet, args: Templates, format: Format) -> Result<(), Failure> {
    match args.command.unwrap_or(TemplatesCommand::Ls) {
        TemplatesCommand::Ls => list(&fleet.templates()?, format),
        TemplatesCommand::Inspect { template } => inspect(&fleet.template(&template)?, format),
        TemplatesCommand::Rm { templates } => templates.iter().try_for_each(|key| {
            let id = fleet.remove_template(key)?;
            match format {
                Format::Text => output::line(id),
                Format::Json => output::json(&json!({ "id": id })),
            }
        }),
    }
}

fn list(views: &[TemplateView], format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json(&views);
    }
    if views.is_empty() {
        output::talk("no templates but `host`, this machine's own root\n  hint: make one from Debian's packages with `pal setup base`");
        return Ok(());
    }
    let mut table = Table::new(&["NAME", "ID", "TAGS", "BUILDS", "SIZE", "AGE"]);
    for view in views {
        let tags: Vec<&str> = view.template.tags.keys().map(String::as_str).collect();
        let (size, age) = (Size(view.bytes).to_string(), age::since(&view.template.updated_at));
        table.row([&view.template.name, view.template.id.as_str(), &tags.join(","), &view.builds.len().to_string(), &size, &age]);
    }
    output::data(table.render("").as_bytes())
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
        table.row(["sudo", if settings.sudo { "yes: setuid programs gain what root of the Body has" } else { "no" }]);
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

/// Makes a template of pal's own.
pub fn setup(fleet: &Fleet, template: &str, format: Format) -> Result<(), Failure> {
    let view = fleet.setup(template, &mut |said| output::talk(said))?;
    match format {
        Format::Text => output::line(&view.template.id),
        Format::Json => output::json(&view),
    }
}
