//! The network that a request asks for, and the policy that follows from it.

use proto::{
    Failure, Kind,
    egress::{AcceptList, EgressRule, Policy},
    spec::Egress,
};

use super::Preset;

/// The network that a request asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkRequest {
    /// Presets; their rules follow all others.
    pub presets: Vec<Preset>,
    /// Targets that are allowed.
    pub allow: Vec<String>,
    /// Targets that are denied.
    pub deny: Vec<String>,
    /// Targets whose connections wait for a decision.
    pub ask: Vec<String>,
    /// Further rules.
    pub rules: Vec<EgressRule>,
    /// Whether each rule that allows asks instead; rules about other Bodies do not.
    pub asks: bool,
    /// Other Bodies that may connect, each as `BODY:PORTS`.
    pub accept: Vec<String>,
}

impl NetworkRequest {
    /// Whether the request says nothing about the network.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the rules depend on the remotes of a repository.
    pub fn needs_remotes(&self) -> bool {
        self.presets.contains(&Preset::Git)
    }

    /// The policy; none if the request asks for no network. `remotes` has the addresses of the repository's remotes.
    pub fn policy(&self, remotes: &[String]) -> Result<Option<Egress>, Failure> {
        let rules = self.all_rules(remotes)?;
        check(&rules)?;
        check_accept(&self.accept)?;
        let accept = self.accept.clone();
        Ok((!rules.is_empty() || !accept.is_empty()).then(|| Egress { rules, accept, ..Egress::default() }))
    }

    /// All rules: those of the caller first, because the first rule that allows decides about the protocol.
    pub(super) fn all_rules(&self, remotes: &[String]) -> Result<Vec<EgressRule>, Failure> {
        if self.presets.contains(&Preset::Closed) && self.presets.len() > 1 {
            return Err(Failure::new(Kind::Usage, "the network preset `closed` excludes other presets")
                .hint("leave it out: a network is closed apart from what is named"));
        }
        let own = self
            .deny
            .iter()
            .map(EgressRule::deny)
            .chain(self.allow.iter().map(EgressRule::allow))
            .chain(self.rules.iter().cloned())
            .chain(self.ask.iter().map(EgressRule::ask));
        let mut rules = Vec::new();
        own.for_each(|rule| add(&mut rules, rule));
        for preset in &self.presets {
            preset.rules(remotes)?.into_iter().for_each(|rule| add(&mut rules, rule));
        }
        match self.asks {
            true => Ok(rules
                .into_iter()
                .map(|rule| if rule.is_about_bodies() { rule } else { rule.into_question() })
                .collect()),
            false => Ok(rules),
        }
    }

    /// The rules of a ceiling that the request describes. One that is closed denies everything.
    pub fn ceiling(&self) -> Result<Vec<EgressRule>, Failure> {
        let rules = self.all_rules(&[])?;
        check(&rules)?;
        let is_closed = rules.is_empty() && self.presets == [Preset::Closed];
        Ok(if is_closed { vec![EgressRule::deny("*:*")] } else { rules })
    }

    /// The request in a few words: its presets and targets.
    pub(super) fn summary(&self) -> String {
        let rule = |rule: &EgressRule| match rule.action {
            proto::egress::RuleAction::Allow => proto::egress::fit_to_show(&rule.to),
            proto::egress::RuleAction::Deny => format!("not {}", proto::egress::fit_to_show(&rule.to)),
            proto::egress::RuleAction::Ask => format!("ask {}", proto::egress::fit_to_show(&rule.to)),
        };
        let presets = self.presets.iter().map(ToString::to_string);
        let allow = self.allow.iter().map(|to| proto::egress::fit_to_show(to));
        let deny = self.deny.iter().map(|to| format!("not {}", proto::egress::fit_to_show(to)));
        let accept = self.accept.iter().map(|from| format!("accepts {}", proto::egress::fit_to_show(from)));
        let rules = self.rules.iter().map(rule);
        presets.chain(allow).chain(rules).chain(deny).chain(accept).collect::<Vec<_>>().join(", ")
    }
}

/// Adds a rule, unless one for these targets with the same effect is there.
fn add(rules: &mut Vec<EgressRule>, rule: EgressRule) {
    if !rules.iter().any(|known| known.has_same_targets(&rule) && known.action == rule.action) {
        rules.push(rule);
    }
}

/// Checks rules.
pub(crate) fn check(rules: &[EgressRule]) -> Result<(), Failure> {
    Policy::new(rules).map(drop).map_err(|error| {
        Failure::new(Kind::Usage, error.to_string()).hint("for example: --allow git.example.org:443")
    })
}

/// Checks the Bodies that may connect.
pub(crate) fn check_accept(accept: &[String]) -> Result<(), Failure> {
    AcceptList::new(accept)
        .map(drop)
        .map_err(|error| Failure::new(Kind::Usage, error.to_string()).hint("for example: --accept app:5432"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(|one| (*one).to_owned()).collect()
    }

    #[test]
    fn what_the_caller_names_stands_before_the_presets() {
        let request = NetworkRequest {
            presets: vec![Preset::Registries, Preset::Open],
            allow: strings(&["db.corp:5432+private", "pypi.org:443"]),
            deny: strings(&["**.evil.test:*"]),
            ask: Vec::new(),
            rules: vec![EgressRule::allow("pypi.org:443").because("twice")],
            asks: false,
            accept: Vec::new(),
        };
        let rules = request.policy(&[]).unwrap().unwrap().all_rules();
        let shown: Vec<_> = rules.iter().take(3).map(EgressRule::shown).collect();
        assert_eq!(shown, ["deny **.evil.test:*", "allow db.corp:5432+private", "allow pypi.org:443"]);
        assert_eq!(rules.last().unwrap().to, "*:*");
        assert_eq!(rules.iter().filter(|rule| rule.to == "pypi.org:443").count(), 1);
        assert_eq!(
            request.summary(),
            "registries, open, db.corp:5432+private, pypi.org:443, pypi.org:443, not **.evil.test:*"
        );
    }

    #[test]
    fn what_asks_allows_nothing() {
        let allow = strings(&["a.test:443", "GET b.test/x+inspect"]);
        let request =
            NetworkRequest { allow, deny: strings(&["c.test"]), asks: true, ..NetworkRequest::default() };
        let rules = request.policy(&[]).unwrap().unwrap().all_rules();
        assert_eq!(
            rules.iter().map(EgressRule::shown).collect::<Vec<_>>(),
            ["deny c.test", "ask a.test:443", "ask b.test"]
        );
    }

    #[test]
    fn a_request_for_no_network_makes_no_policy() {
        assert_eq!(NetworkRequest::default().policy(&[]).unwrap(), None);
        let closed = NetworkRequest { presets: vec![Preset::Closed], ..NetworkRequest::default() };
        assert_eq!(closed.policy(&[]).unwrap(), None);
        let both = NetworkRequest { presets: vec![Preset::Closed, Preset::Models], ..closed };
        assert!(both.policy(&[]).is_err());
        let odd = NetworkRequest { allow: strings(&["https://pypi.org"]), ..NetworkRequest::default() };
        assert!(odd.policy(&[]).unwrap_err().message.contains("is not a rule"));
        let git = NetworkRequest { presets: vec![Preset::Git], ..NetworkRequest::default() };
        assert!(git.needs_remotes() && git.policy(&[]).is_err());
    }
}
