//! `pal net`: shows and changes what a Body may reach.

use std::time::Duration;

use fleet::{Fleet, NetworkProposal, NetworkState, PolicyChanger, PolicyForce, allowing_command};
use proto::{
    BodyId, Event, EventData, Failure,
    egress::{EgressRule, fit_to_show},
    event_data::{
        DecodedEvent, NetworkAllowed, NetworkAsked, NetworkChanged, NetworkCounted, NetworkDenied,
        NetworkNamed, NetworkSpent,
    },
    spec::Egress,
    text::visible,
};

use super::choose;
use crate::{
    args::{NetCommand, NetWatchArgs},
    failure,
    output::{self, Format},
    table::Table,
};

/// How many events are read at once.
const PAGE: usize = 1000;
/// How long a follower waits before it imports decisions into the log again.
const WAIT: Duration = Duration::from_millis(500);
/// The exit code of a test whose target is denied.
const DENIED: u8 = 1;

/// Runs a command about networks.
pub fn net(fleet: &Fleet, command: NetCommand, format: Format) -> Result<u8, Failure> {
    let changer = PolicyChanger::of(fleet);
    match command {
        NetCommand::Show(of) => {
            let view = choose::body(fleet, of.body.as_deref())?;
            show(&changer.show(view.id())?, format)?;
        }
        NetCommand::Allow(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            let rules = Egress { allow: args.targets.clone(), ..Egress::default() };
            fleet::network_warnings(&rules).iter().for_each(|warning| failure::warn(warning, format));
            changed(&changer.allow(&id, &args.targets)?, format)?;
        }
        NetCommand::Ask(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            changed(&changer.ask(&id, &args.targets)?, format)?;
        }
        NetCommand::Deny(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            changed(&changer.deny(&id, &args.targets)?, format)?;
        }
        NetCommand::Accept(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            changed(&changer.accept(&id, &args.from)?, format)?;
        }
        NetCommand::Reject(args) => {
            let id = fleet.find(&args.body)?.spec.id;
            changed(&changer.reject(&id, &args.from)?, format)?;
        }
        NetCommand::Watch(args) => watch(fleet, &args, format)?,
        NetCommand::Test { body, target } => return test(fleet, &body, &target, format),
        NetCommand::Learn(of) => {
            let view = choose::body(fleet, of.body.as_deref())?;
            learn(&changer.propose(view.id())?, format)?;
        }
    }
    Ok(0)
}

fn show(state: &NetworkState, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json(state);
    }
    if !state.policy {
        output::talk(&format!(
            "Body {0} reaches only itself\n  hint: allow a target: pal net allow {0} HOST:PORT",
            state.id
        ));
        return Ok(());
    }
    let open = match state.open {
        Some(1) => ", 1 open connection".to_owned(),
        Some(open) => format!(", {open} open connections"),
        None => String::new(),
    };
    output::talk(&format!("policy {}{open}{}", state.generation, deferral(state)));
    if !state.accept.is_empty() {
        output::talk(&format!("other Bodies may connect: {}", visible(&state.accept.join(", "))));
    }
    if let Some(ceiling) = &state.ceiling {
        let rules: Vec<String> = ceiling.iter().map(EgressRule::shown).collect();
        output::talk(&format!(
            "the ceiling of its key must allow each connection, too: {}",
            rules.join(", ")
        ));
    }
    if state.rules.is_empty() {
        output::talk("no rule: nothing is allowed");
        return Ok(());
    }
    output::data(table(&state.rules).render("").as_bytes())
}

/// When a policy counts that does not count now.
fn deferral(state: &NetworkState) -> String {
    match state.in_force {
        PolicyForce::Now => String::new(),
        PolicyForce::AtNextStart => "; it counts from the next start on".into(),
        PolicyForce::AtRestart => {
            "; the egress process does not answer, and reads it when it runs again".into()
        }
    }
}

fn table(rules: &[EgressRule]) -> Table {
    let mut table = Table::new(&["ACTION", "TO", "TERMS", "WHY"]);
    for rule in rules {
        let terms = Some(rule.details().join("; ")).filter(|terms| !terms.is_empty());
        let (action, why) = (rule.action.name(), rule.why.as_deref().unwrap_or("-"));
        table.row([action, &rule.to, terms.as_deref().unwrap_or("-"), why]);
    }
    table.drop_blank_columns();
    table
}

fn changed(state: &NetworkState, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json(state);
    }
    let closed = match state.closed {
        None => String::new(),
        Some(1) => "; 1 connection was closed".to_owned(),
        Some(closed) => format!("; {closed} connections were closed"),
    };
    output::talk(&format!("policy {}{closed}{}", state.generation, deferral(state)));
    if state.in_force == PolicyForce::AtNextStart {
        output::talk(&format!("  hint: start the Body again: pal stop {0} && pal start {0}", state.id));
    }
    output::line(&state.id)
}

fn test(fleet: &Fleet, key: &str, target: &str, format: Format) -> Result<u8, Failure> {
    let spec = fleet.find(key)?.spec;
    let rules = spec.egress.as_ref().map(Egress::all_rules).unwrap_or_default();
    let ceiling = PolicyChanger::of(fleet).show(&spec.id)?.ceiling;
    let verdict = fleet::judge_target(&spec.id, &rules, ceiling.as_deref(), target)?;
    match format {
        Format::Json => output::json(&verdict)?,
        Format::Text => {
            let word = if verdict.allowed { "allowed" } else { "denied" };
            output::line(format_args!("{word}: {}: {}", verdict.to, visible(&verdict.why)))?;
            if let Some(command) = &verdict.allow {
                output::talk(&format!("  hint: allow it: {command}"));
            }
        }
    }
    Ok(if verdict.allowed { 0 } else { DENIED })
}

/// Follows the events about the network of a Body until the Body is removed.
fn watch(fleet: &Fleet, args: &NetWatchArgs, format: Format) -> Result<(), Failure> {
    let id = choose::body(fleet, args.of.body.as_deref())?.spec.id;
    let mut after = if args.all { 0 } else { fleet.log().last_pos()? };
    loop {
        for event in fleet.log().follow(after, Some(&id), PAGE, WAIT)? {
            after = event.pos;
            if event.kind == "body.removed" {
                return Ok(());
            }
            if !event.kind.starts_with("network.") {
                continue;
            }
            match format {
                Format::Json => output::json(&event)?,
                Format::Text => output::line(text(&id, &event))?,
            }
        }
    }
}

/// One line about an event of the network.
fn text(id: &BodyId, event: &Event) -> String {
    let (word, to, why) = match event.decode() {
        DecodedEvent::Known(EventData::NetworkAllowed(NetworkAllowed { to, why, from, .. })) => {
            ("allowed", with_caller(to, from.as_ref()), why)
        }
        DecodedEvent::Known(EventData::NetworkDenied(NetworkDenied { to, why, from, .. })) => {
            let way = from.is_none().then(|| allowing_command(id, &to, &why)).flatten();
            let way = way.map(|command| format!("; allow it: {command}")).unwrap_or_default();
            ("denied", with_caller(to, from.as_ref()), format!("{why}{way}"))
        }
        DecodedEvent::Known(EventData::NetworkAsked(NetworkAsked { to, why, .. })) => {
            let ways = allowing_command(id, &to, &why);
            let ways = ways.map(|allow| format!("; {allow}; {}", allow.replacen("allow", "deny", 1)));
            ("asks", to, format!("{why}{}", ways.unwrap_or_default()))
        }
        DecodedEvent::Known(EventData::NetworkCounted(NetworkCounted {
            to,
            allowed,
            why,
            count,
            from,
            ..
        })) => {
            let word = if allowed { "allowed" } else { "denied" };
            let is_own_denial = !allowed && from.is_none();
            let way = is_own_denial.then(|| allowing_command(id, &to, &why)).flatten();
            let way = way.map(|command| format!("; allow it: {command}")).unwrap_or_default();
            (word, with_caller(to, from.as_ref()), format!("{count} times: {why}{way}"))
        }
        DecodedEvent::Known(EventData::NetworkNamed(NetworkNamed { to, address, .. })) => {
            ("named", to, format!("{address} stands for it"))
        }
        DecodedEvent::Known(EventData::NetworkSpent(NetworkSpent { to, bytes, why, .. })) => {
            ("spent", to, format!("at most {bytes} bytes; {why}"))
        }
        DecodedEvent::Known(EventData::NetworkChanged(NetworkChanged {
            generation,
            rules,
            secrets,
            accept,
        })) => {
            let s = if rules.len() == 1 { "" } else { "s" };
            let used =
                if secrets.is_empty() { String::new() } else { format!(", secrets {}", secrets.join(" ")) };
            let accepts = match accept.is_empty() {
                true => String::new(),
                false => format!(", accepts {}", accept.join(" ")),
            };
            ("changed", format!("policy {generation}"), format!("{} rule{s}{used}{accepts}", rules.len()))
        }
        _ => ("event", event.kind.clone(), fit_to_show(&event.data.to_string())),
    };
    format!("{}  {word:<7}  {}  {}", visible(&event.at), visible(&to), visible(&why))
}

/// The target of a connection, behind the Body that made it if it was another one.
fn with_caller(to: String, from: Option<&String>) -> String {
    match from {
        Some(from) => format!("{from} to {to}"),
        None => to,
    }
}

fn learn(proposal: &NetworkProposal, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return output::json(proposal);
    }
    if proposal.wanted.is_empty() {
        output::talk(&format!("Body {} was denied nothing that its policy does not allow now", proposal.id));
        return Ok(());
    }
    let mut table = Table::new(&["TARGET", "TIMES", "WHY"]);
    for one in &proposal.wanted {
        table.row([&one.to, &one.count.to_string(), &one.why]);
    }
    output::data(table.render("").as_bytes())?;
    if let Some(settings) = &proposal.settings {
        output::line(format_args!("\n# for later Bodies, in palisade.toml:\n{}", settings.trim_end()))?;
    }
    if let Some(command) = &proposal.command {
        output::line(format_args!("\n# for this Body:\n{command}"))?;
    }
    output::talk("read each line before you allow it: a program in the Body chose these targets");
    Ok(())
}

#[cfg(test)]
mod tests {
    use proto::egress::RuleLimit;

    use super::*;

    #[test]
    fn rules_are_a_table_with_their_reasons() {
        let rules = [EgressRule::allow("pypi.org:443").because("pip"), EgressRule::deny("**.evil.test:*")];
        assert_eq!(
            table(&rules).render(""),
            "ACTION  TO              WHY\nallow   pypi.org:443    pip\ndeny    **.evil.test:*  -\n"
        );
        let limit = RuleLimit { rate: Some("60/min".into()), bytes: Some("1MiB".into()) };
        let forward = Some("b.test:443".into());
        let rule = EgressRule { limit: Some(limit), forward, ..EgressRule::allow("a.test:443") };
        let terms = "at most 60/min; at most 1MiB; forwards to b.test:443";
        assert!(table(&[rule]).render("").contains(terms));
    }
}
