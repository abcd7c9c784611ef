//! The network that a repository's palisade.toml asks for.
//!
//! Trust: the file comes from the repository, and other people may have written it. Its rules apply because the owner
//! of the repository runs `pal up`, but a file cannot open everything, name addresses or reach private networks.

use proto::{Failure, Kind, egress::fit_to_show};
use workspace::NetworkSettings;

use super::{NetworkRequest, Preset, RuleReach, request, rule_reach};

/// The request in palisade.toml, in its own words and as a policy that was checked; none if the file asks for nothing.
pub(crate) fn repository_policy(
    settings: &NetworkSettings,
    remotes: &[String],
) -> Result<Option<(NetworkRequest, String)>, Failure> {
    if *settings == NetworkSettings::default() {
        return Ok(None);
    }
    let NetworkSettings { preset, allow, deny, rules, accept } = settings.clone();
    let presets =
        preset.iter().map(|name| name.parse()).collect::<Result<Vec<Preset>, _>>().map_err(of_file)?;
    let request = NetworkRequest { presets, allow, deny, rules, accept, ..NetworkRequest::default() };
    let all = request.all_rules(remotes).map_err(of_file)?;
    request::check(&all).map_err(of_file)?;
    request::check_accept(&request.accept).map_err(of_file)?;
    for rule in &all {
        let why = match rule_reach(rule) {
            None | Some(RuleReach::Names) => continue,
            Some(RuleReach::Everything) => "opens the network",
            Some(RuleReach::PublicAddresses) => "names addresses",
            Some(RuleReach::Private) => "reaches this host or a private network",
        };
        let to = fit_to_show(&rule.to);
        let named = match request.presets.contains(&Preset::Open) && to == "*:*" {
            true => "pal up --net open".to_owned(),
            false => format!("pal up --net closed --allow '{to}'"),
        };
        return Err(Failure::new(
            Kind::Denied,
            format!(
                "palisade.toml: the rule `{to}` of [network] {why}, which a file of a repository may not do"
            ),
        )
        .hint(format!("if you want that, say it on the command line: {named}"))
        .hint("or leave the rule out of palisade.toml"));
    }
    let summary = request.summary();
    // The remotes are those of this repository, so its presets become rules here.
    let expanded = NetworkRequest { rules: all, accept: request.accept, ..NetworkRequest::default() };
    Ok(Some((expanded, summary)))
}

fn of_file(failure: Failure) -> Failure {
    let message = format!("palisade.toml: [network]: {}", failure.message);
    Failure { message, ..failure }.hint("see docs/guides/network.md")
}

#[cfg(test)]
mod tests {
    use proto::egress::EgressRule;

    use super::*;

    fn allow(rules: &[&str]) -> NetworkSettings {
        let allow = rules.iter().map(|one| (*one).to_owned()).collect();
        NetworkSettings { allow, ..NetworkSettings::default() }
    }

    #[test]
    fn a_file_asks_for_names_only() {
        let settings = NetworkSettings {
            preset: vec!["models".into()],
            deny: vec!["*:25".into()],
            ..allow(&["api.example.org:443"])
        };
        let (request, summary) = repository_policy(&settings, &[]).unwrap().unwrap();
        assert_eq!(summary, "models, api.example.org:443, not *:25");
        let rules = request.policy(&[]).unwrap().unwrap().all_rules();
        assert!(
            rules.contains(&EgressRule::deny("*:25"))
                && rules.iter().any(|rule| rule.to == "api.openai.com:443")
        );
        assert!(repository_policy(&NetworkSettings::default(), &[]).unwrap().is_none());
        for rule in ["*", "*:443", "1.1.1.1:443", "10.0.0.0/8", "db.corp:5432+private", "[::1]:80"] {
            let refused = repository_policy(&allow(&[rule]), &[]).unwrap_err();
            assert_eq!(refused.kind, Kind::Denied, "{rule}");
            assert!(refused.message.contains(&format!("palisade.toml: the rule `{rule}`")), "{refused}");
        }
        let open = NetworkSettings { preset: vec!["open".into()], ..NetworkSettings::default() };
        let refused = repository_policy(&open, &[]).unwrap_err();
        assert!(refused.hints[0].contains("pal up --net open"), "{:?}", refused.hints);
    }

    #[test]
    fn a_mistake_names_the_file_and_the_rule() {
        let refused = repository_policy(&allow(&["https://x.org"]), &[]).unwrap_err();
        assert!(
            refused.message.starts_with("palisade.toml: [network]: \"https://x.org\" is not a rule"),
            "{refused}"
        );
        let odd = NetworkSettings { preset: vec!["registry".into()], ..NetworkSettings::default() };
        let refused = repository_policy(&odd, &[]).unwrap_err();
        assert_eq!(refused.message, "palisade.toml: [network]: there is no network preset \"registry\"");
    }
}
