//! `pal keys`: the API keys of `pal serve`.

use fleet::Fleet;
use proto::{Failure, egress::EgressRule, event_data::KeyRevoked};
use serde_json::json;
use server::{KeyReach, KeyStore, KeyTerms, Quota, Scope};

use crate::{
    age,
    args::{KeysCommand, NewKeyArgs},
    output::{self, Format},
    table::Table,
};

/// Most rules of a ceiling in a line of the list.
const RULES_SHOWN: usize = 3;

/// Creates, lists or revokes keys. A running server uses the change at once.
pub fn keys(fleet: &Fleet, command: &KeysCommand, format: Format) -> Result<(), Failure> {
    let keys = KeyStore::new(fleet.records().clone());
    match command {
        KeysCommand::Create(args) => create(fleet, &keys, args, format),
        KeysCommand::Ls => list(&keys, format),
        KeysCommand::Revoke { keys: ids } => ids.iter().try_for_each(|id| revoke(fleet, &keys, id, format)),
    }
}

fn create(fleet: &Fleet, keys: &KeyStore, args: &NewKeyArgs, format: Format) -> Result<(), Failure> {
    let scope = match args.scope.as_str() {
        "read" => Scope::Read,
        "admin" => Scope::Admin,
        _ => Scope::Run,
    };
    let quota = Quota {
        bodies: args.bodies.map(u64::from),
        cpu_milli: args.cpus.map(u64::from),
        memory_bytes: args.memory.map(|size| size.0),
        disk_bytes: args.disk.map(|size| size.0),
    };
    let reach = args.reach.as_deref().map(str::parse).transpose()?;
    let network = args.ceiling.rules()?;
    let (record, made) = keys.make(&KeyTerms { name: args.name.clone(), scope, reach, quota, network })?;
    fleet.log().note(record.created_event())?;
    match format {
        Format::Text => {
            output::line(&made.secret)?;
            output::talk(&format!("key {} is new; `pal` does not print it again", made.id));
            if scope == Scope::Read && record.full_reach() == KeyReach::Own {
                output::talk(
                    "it sees no Body: a key of scope read creates none, and this one reaches no others\n  hint: pal keys create NAME --scope read --reach all",
                );
            }
            Ok(())
        }
        Format::Json => output::json(&json!({ "id": made.id, "secret": made.secret })),
    }
}

fn list(keys: &KeyStore, format: Format) -> Result<(), Failure> {
    let records = keys.all()?;
    if format == Format::Json {
        let shown = records.iter().map(|record| {
            json!({ "id": record.id, "name": record.name, "scope": record.scope, "reach": record.full_reach(), "quota": record.quota,
                "network": record.network, "created_at": record.created_at, "revoked_at": record.revoked_at })
        });
        return output::json_lines(shown);
    }
    if records.is_empty() {
        output::talk("no keys\n  hint: create one with `pal keys create NAME`");
        return Ok(());
    }
    let mut table = Table::new(&["ID", "NAME", "SCOPE", "REACH", "NETWORK", "STATE", "AGE"]);
    for record in &records {
        let scope = json!(record.scope);
        let state = if record.revoked_at.is_some() { "revoked" } else { "valid" };
        let name = proto::text::visible(&record.name);
        table.row([
            &record.id,
            &name,
            scope.as_str().unwrap_or_default(),
            &proto::text::visible(&record.full_reach().to_string()),
            &ceiling(&record.network),
            state,
            &age::since(&record.created_at),
        ]);
    }
    table.drop_blank_columns();
    output::data(table.render("").as_bytes())
}

/// A ceiling in a few words.
fn ceiling(rules: &[EgressRule]) -> String {
    let shown: Vec<String> = rules.iter().take(RULES_SHOWN).map(EgressRule::shown).collect();
    match rules.len().saturating_sub(RULES_SHOWN) {
        0 if shown.is_empty() => "-".into(),
        0 => shown.join(", "),
        more => format!("{}, and {more} more", shown.join(", ")),
    }
}

fn revoke(fleet: &Fleet, keys: &KeyStore, id: &str, format: Format) -> Result<(), Failure> {
    keys.revoke(id)?;
    fleet.log().note(KeyRevoked { key: id.to_owned() })?;
    match format {
        Format::Text => output::line(id),
        Format::Json => output::json(&json!({ "id": id })),
    }
}
