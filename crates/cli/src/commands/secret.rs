//! `pal secret`: stores secrets, and lets Bodies use them.
//!
//! Invariant: no value is printed, and none is read from an argument.

use std::io::{BufRead, IsTerminal, Read};

use fleet::{Fleet, Force, NetworkState, PolicyForce, SecretOrigin, SecretTerms, SecretView, Zeroizing};
use proto::{
    BodyId, Failure, Kind,
    egress::{SecretFields, SshLogin},
    text::visible,
};
use serde_json::json;

use crate::{
    args::{SecretCommand, SecretSetArgs},
    output::{self, Format},
    settings,
    table::Table,
    terminal::RawTerminal,
};

/// Most bytes that are read from standard input: well over the longest value.
const INPUT_LEN_MAX: u64 = 64 << 10;

/// Runs a command about secrets.
pub fn secret(fleet: &Fleet, command: SecretCommand, format: Format) -> Result<(), Failure> {
    let secrets = fleet.secrets();
    match command {
        SecretCommand::Set(args) => set(fleet, *args, format),
        SecretCommand::Ls => list(&secrets.list()?, format),
        SecretCommand::Rm { force, names } => names.iter().try_for_each(|name| {
            let bodies = secrets.remove(name, if force { Force::Yes } else { Force::No })?;
            match format {
                Format::Text => output::line(name),
                Format::Json => output::json(&json!({ "name": name, "bodies": bodies })),
            }
        }),
        SecretCommand::Grant(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            args.names.iter().try_for_each(|name| changed(&id, name, &secrets.grant(&id, name)?, format))
        }
        SecretCommand::Revoke(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            args.names.iter().try_for_each(|name| changed(&id, name, &secrets.revoke(&id, name)?, format))
        }
    }
}

fn set(fleet: &Fleet, args: SecretSetArgs, format: Format) -> Result<(), Failure> {
    let origin = match (args.file, args.from_env, args.from_command.is_empty()) {
        (Some(path), ..) => SecretOrigin::File(settings::absolute(&path)?),
        (None, Some(name), _) => SecretOrigin::Env(name),
        (None, None, false) => SecretOrigin::Command(args.from_command),
        (None, None, true) => SecretOrigin::Value(read_value(&args.name, args.ssh)?),
    };
    let terms = SecretTerms {
        service: args.service,
        hosts: args.to,
        fields: SecretFields {
            headers: args.header,
            basic: args.basic,
            query: args.query,
            body: args.body,
            sigv4: args.sigv4,
        },
        env: args.env,
        git: args.git,
        prefix: args.prefix,
        ssh: args.ssh.then_some(SshLogin { users: args.ssh_user, host_keys: args.host_key }),
        ..SecretTerms::new(args.name, origin)
    };
    let view = fleet.secrets().set(terms)?;
    match format {
        Format::Text => {
            output::line(&view.name)?;
            if view.bodies.is_empty() {
                let name = &view.name;
                output::talk(&format!(
                    "no Body may use it yet\n  hint: pal up --secret {name}, or pal secret grant BODY {name}"
                ));
            }
            Ok(())
        }
        Format::Json => output::json(&view),
    }
}

/// Reads a value from standard input: one line of a terminal, which does not show it, or all of anything else.
fn read_value(name: &str, is_ssh_key: bool) -> Result<Zeroizing<String>, Failure> {
    let cannot = |error: std::io::Error| {
        Failure::new(Kind::Usage, "cannot read the value from standard input")
            .because(error)
            .hint(format!("pipe it: pal secret set {} < FILE", visible(name)))
    };
    let mut value = Zeroizing::new(String::new());
    let input = std::io::stdin();
    if input.is_terminal() && is_ssh_key {
        return Err(cannot(std::io::Error::other("a key of ssh has several lines")));
    }
    if input.is_terminal() {
        output::talk(&format!("value of {} (not shown):", visible(name)));
        let _hidden = RawTerminal::enter_hidden()?;
        input.lock().take(INPUT_LEN_MAX).read_line(&mut value).map_err(cannot)?;
    } else {
        input.lock().take(INPUT_LEN_MAX).read_to_string(&mut value).map_err(cannot)?;
    }
    Ok(value)
}

fn list(views: &[SecretView], format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json_lines(views.iter().map(|view| json!(view)));
    }
    if views.is_empty() {
        output::talk("no secrets\n  hint: store one: pal secret set github --for github -- gh auth token");
        return Ok(());
    }
    let mut table = Table::new(&["NAME", "FROM", "TO", "IN", "VARIABLES", "BODIES"]);
    for view in views {
        let bodies: Vec<String> = view.bodies.iter().map(BodyId::to_string).collect();
        table.row([
            view.name.as_str(),
            view.source,
            &view.hosts.join(" "),
            &places(view).join(" "),
            &view.env.join(" "),
            if bodies.is_empty() { "-".to_owned() } else { bodies.join(" ") }.as_str(),
        ]);
    }
    output::data(table.render("").as_bytes())
}

/// The parts of a request in which a secret may stand, or the users as whom it logs in.
fn places(view: &SecretView) -> Vec<String> {
    if let Some(login) = &view.ssh {
        return login.users.iter().map(|user| format!("ssh:{user}")).collect();
    }
    let fields = &view.fields;
    let flags = [
        (fields.basic, "basic"),
        (fields.query, "query"),
        (fields.body, "body"),
        (fields.sigv4, "signatures"),
    ];
    let flags = flags.into_iter().filter(|(on, _)| *on).map(|(_, name)| name.to_owned());
    fields.headers.iter().cloned().chain(flags).collect()
}

fn changed(id: &BodyId, name: &str, state: &NetworkState, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        let force = state.in_force;
        return output::json(
            &json!({ "body": id, "name": name, "in_force": force, "secrets": state.secrets }),
        );
    }
    match state.in_force {
        PolicyForce::Now => {}
        PolicyForce::AtNextStart => output::talk(&format!(
            "it counts from the next start on\n  hint: start the Body again: pal stop {id} && pal start {id}"
        )),
        PolicyForce::AtRestart => {
            output::talk("the egress process does not answer; it counts as soon as it runs again");
        }
    }
    output::line(name)
}
