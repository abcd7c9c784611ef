//! The egress policy of a Body: which names and addresses it may reach, on which ports, by which protocol.
//!
//! A rule has one form on the command line, in `palisade.toml`, in the API and in the spec:
//!
//! ```text
//! [METHODS ]HOST[:PORTS][/PATH][+MARK…]
//!
//! METHODS GET,HEAD              only these methods of HTTP; without methods: all
//! HOST    api.example.org       this name
//!         *.example.org         the names one label below it
//!         **.example.org        all names below it, not itself
//!         192.0.2.7  [2001:db8::1]  192.0.2.0/24    addresses, for programs that connect to them without a name
//!         *                     every public name and address
//!         db.body.internal      the Body with the name or id `db`; `*` does not mean it
//! PORTS   443   8000-8080   *   without ports: 80 and 443
//! PATH    /repos/me/**          only these paths: `*` is any text without a slash, `**` is any text
//! MARK    tls, http, tcp        the protocol; without one, TLS on port 443, HTTP on port 80, and TCP elsewhere
//!         plain                 HTTP of which only GET and HEAD may be asked
//!         private               the name may lead to an address of this host or of a private network
//!         inspect               the requests in TLS are read and judged one by one, as where methods or paths are named
//!         tunnel                TLS is never opened, for programs that trust one certificate only
//! ```
//!
//! The other fields of a rule ([`EgressRule`]) have no form in this text: conditions on queries and headers, windows,
//! limits, headers to set, answers, and other hosts.
//!
//! Rules about requests, and the hosts of secrets, need the requests inside TLS: the egress process answers the program
//! with a certificate of the Body's own authority. All other TLS goes through unopened.
//!
//! Invariant: a target without a rule is denied, and so is a target in any spelling but the canonical one.
//! Invariant: a rule that denies wins over every rule that allows, and one that allows over every rule that asks.

use std::{collections::BTreeMap, net::IpAddr, time::SystemTime};

use super::{
    EgressRule, RuleAction, RuleBudget, RuleError, RuleResponse,
    ceiling::CEILING,
    fit_to_show,
    request_conditions::ConditionFit,
    request_match::RequestTarget,
    rule_reader::{HostPattern, Rule, canonical_name, read_port, read_rule, read_secret_host},
    window::RuleWindow,
};

/// Most rules of a policy.
pub const RULES_MAX: usize = 256;

/// The protocol that a rule permits on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TLS whose server name is the name of the connection.
    Tls,
    /// HTTP/1.1 whose `Host` is the name of the connection, one request on each connection.
    Http,
    /// Such HTTP, of which only GET and HEAD may be asked.
    PlainHttp,
    /// Any bytes; TLS and HTTP among them must name the name of the connection.
    Tcp,
}

/// The permission of a rule for one connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permit {
    /// The protocol that the connection must speak.
    pub protocol: Protocol,
    /// Whether the target may be an address of this host or of a private network: a rule says `+private`, or names the
    /// address.
    pub private: bool,
    /// Whether each request on the connection is judged, inside TLS, too.
    pub inspect: bool,
    /// Whether a rule may answer requests or send them to another host, so that nothing goes to the host of the connection
    /// before the first request is judged.
    pub connects_late: bool,
    /// The times and the budgets of the rule.
    pub terms: PermitTerms,
    /// The rule, for the record.
    pub rule: String,
}

/// The terms on which a rule allows: it counts in a window, and up to a budget.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PermitTerms {
    /// The times at which the rule counts; none for all.
    pub window: Option<RuleWindow>,
    /// The budgets of the rule.
    pub budget: Option<RuleBudget>,
}

/// The permission of a rule for one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestPermit {
    /// The headers that the request gets.
    pub set_headers: BTreeMap<String, String>,
    /// The answer to the request, which then goes nowhere.
    pub respond: Option<RuleResponse>,
    /// The host to which the request goes in place of its own.
    pub forward: Option<ForwardHost>,
    /// The times and the budgets of the rule.
    pub terms: PermitTerms,
    /// The rule, for the record.
    pub rule: String,
}

/// The host to which a rule sends requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardHost {
    /// Its name.
    pub name: String,
    /// Its port.
    pub port: u16,
    /// Whether it may be this host or one of a private network.
    pub private: bool,
}

/// The rules of a Body, ready to judge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
    /// The hosts of secrets.
    inspected: Vec<Rule>,
    /// The time at which it judges, if not the present one.
    time: Option<SystemTime>,
    /// The rules above it.
    pub(super) ceiling: Option<Box<Policy>>,
}

impl Policy {
    /// Reads rules, and checks their examples.
    pub fn new(rules: &[EgressRule]) -> Result<Self, RuleError> {
        if rules.len() > RULES_MAX {
            return Err(RuleError::TooMany(rules.len()));
        }
        let rules = rules.iter().map(read_rule).collect::<Result<_, _>>()?;
        Ok(Self { rules, inspected: Vec::new(), time: None, ceiling: None })
    }

    /// The policy as it judges at this time.
    #[must_use]
    pub fn at(self, time: SystemTime) -> Self {
        Self { time: Some(time), ..self }
    }

    /// The policy, which also inspects TLS to these hosts: the hosts of secrets, each as `HOST[:PORTS]` or as a pattern of
    /// names, on port 443 without ports.
    pub fn inspecting<S: AsRef<str>>(
        mut self,
        hosts: impl IntoIterator<Item = S>,
    ) -> Result<Self, RuleError> {
        for host in hosts {
            self.inspected.push(read_secret_host(host.as_ref())?);
        }
        Ok(self)
    }

    /// The names whose TLS is inspected, as a certificate names them: a name stands for those below it, too. None if
    /// the rules inspect TLS to every name.
    pub fn inspected_names(&self) -> Option<Vec<String>> {
        let rules = self.rules.iter().filter(|rule| rule.needs_requests()).chain(&self.inspected);
        let above = match &self.ceiling {
            Some(ceiling) => ceiling.inspected_names()?,
            None => Vec::new(),
        };
        let mut names = rules
            .filter_map(|rule| match &rule.host {
                HostPattern::Any => Some(None),
                HostPattern::Name(name) | HostPattern::Child(name) | HostPattern::Below(name) => {
                    Some(Some(name.clone()))
                }
                HostPattern::Addresses { .. } => None,
            })
            .collect::<Option<Vec<_>>>()?;
        names.extend(above);
        names.sort();
        names.dedup();
        Some(names)
    }

    /// Reads rules that allow.
    pub fn parse<S: AsRef<str>>(rules: &[S]) -> Result<Self, RuleError> {
        let rules: Vec<EgressRule> = rules.iter().map(|rule| EgressRule::allow(rule.as_ref())).collect();
        Self::new(&rules)
    }

    /// Splits a target `HOST:PORT` into a canonical name and a port; the error is a reason for the record.
    pub fn target(text: &str) -> Result<(String, u16), String> {
        let (host, port) = text.rsplit_once(':').ok_or("it has no port")?;
        let port = read_port(port).ok_or("its port is not a number from 1 to 65535")?;
        let host = canonical_name(host)
            .ok_or("it is not a plain host name: IP addresses and other spellings are denied")?;
        Ok((host, port))
    }

    /// Whether some rule allows a canonical name on some port, at some time, so that a resolver may answer it.
    pub fn resolves(&self, name: &str) -> bool {
        let time = self.time();
        let covers = |rule: &&Rule| rule.covers_name(name);
        let denied = |rule: &Rule| {
            rule.denies_connections() && rule.ports == Some((1, u16::MAX)) && rule.counts_at(time)
        };
        let mut rules = self.rules.iter().filter(covers);
        rules.clone().any(|rule| rule.source.action != RuleAction::Deny)
            && !rules.any(denied)
            && self.ceiling_has(|ceiling| ceiling.resolves(name))
    }

    fn time(&self) -> SystemTime {
        self.time.unwrap_or_else(SystemTime::now)
    }

    /// The rule for a connection to a canonical name, or the reason why there is none.
    pub fn judge_name(&self, name: &str, port: u16) -> Result<Permit, String> {
        let own = self.judge(&|rule| rule.covers_name(name), port, &format!("{name}:{port}"))?;
        self.permit_below(own, |ceiling| ceiling.judge_name(name, port))
    }

    /// The rule for a connection to an address without a name, or the reason why there is none.
    pub fn judge_address(&self, address: IpAddr, port: u16) -> Result<Permit, String> {
        let shown = std::net::SocketAddr::new(address, port).to_string();
        let own = self.judge(&|rule| rule.host.covers_address(address), port, &shown)?;
        self.permit_below(own, |ceiling| ceiling.judge_address(address, port))
    }

    /// The rule by which a connection to a canonical name waits for a decision, if no other rule decides about it.
    pub fn asking_name(&self, name: &str, port: u16) -> Option<String> {
        let asking = self.asking(&|rule| rule.covers_name(name), port);
        asking.filter(|_| self.ceiling_has(|ceiling| ceiling.judge_name(name, port).is_ok()))
    }

    /// The rule by which a connection to an address without a name waits for a decision.
    pub fn asking_address(&self, address: IpAddr, port: u16) -> Option<String> {
        let asking = self.asking(&|rule| rule.host.covers_address(address), port);
        asking.filter(|_| self.ceiling_has(|ceiling| ceiling.judge_address(address, port).is_ok()))
    }

    fn asking(&self, covers: &dyn Fn(&Rule) -> bool, port: u16) -> Option<String> {
        let time = self.time();
        let fits = |rule: &&Rule| rule.has_port(port) && covers(rule) && rule.counts_at(time);
        let mut fitting = self.rules.iter().filter(fits);
        let is_decided = |rule: &Rule| rule.source.action == RuleAction::Allow || rule.denies_connections();
        match fitting.clone().any(is_decided) {
            true => None,
            false => {
                fitting.find(|rule| rule.source.action == RuleAction::Ask).map(|rule| rule.source.shown())
            }
        }
    }

    /// Why a name that a rule allows may not lead to this address, if a rule denies the address.
    pub fn denial_of_address(&self, address: IpAddr, port: u16) -> Option<String> {
        match self.denying(&|rule| rule.host.covers_address(address), port) {
            Some(rule) => Some(format!("the rule `{}` denies its address {address}", rule.source.shown())),
            None => self.ceiling.as_ref()?.denial_of_address(address, port),
        }
    }

    /// Why a rule may not send requests to this host, if a rule denies it or the ceiling does not allow it.
    pub fn denial_of_forward(&self, host: &ForwardHost) -> Option<String> {
        let ForwardHost { name, port, private } = host;
        match self.denying(&|rule| rule.covers_name(name), *port) {
            Some(rule) => Some(format!("the rule `{}` denies {name}:{port}", rule.source.shown())),
            None => match self.ceiling.as_ref()?.judge_name(name, *port) {
                Err(why) => Some(format!("{CEILING}: {why}")),
                Ok(above) if above.inspect => {
                    Some(format!("{CEILING} allows only some requests to {name}:{port}"))
                }
                Ok(above) if *private && !above.private => {
                    Some(format!("{CEILING} allows no private address for {name}:{port}"))
                }
                Ok(_) => None,
            },
        }
    }

    fn denying(&self, covers: &dyn Fn(&Rule) -> bool, port: u16) -> Option<&Rule> {
        let time = self.time();
        let denies = |rule: &&Rule| {
            rule.denies_connections() && rule.has_port(port) && covers(rule) && rule.counts_at(time)
        };
        self.rules.iter().find(denies)
    }

    fn judge(&self, covers: &dyn Fn(&Rule) -> bool, port: u16, shown: &str) -> Result<Permit, String> {
        if let Some(rule) = self.denying(covers, port) {
            return Err(format!("the rule `{}` denies {shown}", rule.source.shown()));
        }
        let time = self.time();
        let fits = |rule: &&Rule| rule.has_port(port) && covers(rule);
        let fitting = self.rules.iter().filter(fits);
        let mut allowing = fitting.clone().filter(|rule| rule.source.action == RuleAction::Allow);
        let counting = allowing.clone().filter(|rule| rule.counts_at(time));
        let private = counting.clone().any(Rule::opens_private);
        let Some(rule) = counting.clone().next() else {
            return Err(match allowing.next() {
                Some(rule) => outside_window(rule),
                None => format!("no rule names {shown}"),
            });
        };
        // Rules count outside of their windows here, so that a connection stays as it is when a window begins. A rule that
        // denies requests counts in spite of `+tunnel`.
        let denies = fitting.clone().any(|rule| rule.source.action == RuleAction::Deny);
        let needs =
            fitting.clone().any(Rule::needs_requests) || self.inspected.iter().any(|host| fits(&host));
        let inspect = denies || (needs && !rule.tunnel);
        Ok(Permit {
            protocol: rule.protocol_on(port),
            private,
            inspect,
            connects_late: inspect && allowing.any(Rule::replaces_host),
            terms: rule.terms(),
            rule: rule.source.shown(),
        })
    }

    /// The rule for a request to a canonical name, on a connection that is permitted, or the reason why there is none.
    pub fn judge_request(
        &self,
        name: &str,
        port: u16,
        request: &RequestTarget<'_>,
    ) -> Result<RequestPermit, String> {
        let shown = || format!("{} {name}:{port}{}", fit_to_show(request.method), fit_to_show(request.path));
        let time = self.time();
        let named = || self.rules.iter().filter(|rule| rule.has_port(port) && rule.covers_name(name));
        // Servers read paths in ways of their own, so a condition takes only paths with one reading.
        if named().any(|rule| rule.requests.is_limited()) {
            request.check_one_reading().map_err(|why| format!("{} {why}", shown()))?;
        }
        let of = |action: RuleAction| {
            let rules = named().filter(move |rule| rule.source.action == action);
            rules.map(|rule| (rule, rule.requests.fit(request)))
        };
        let counts = |rule: &Rule| rule.counts_at(time);
        // A request that some servers read as a denied one is denied, and one is allowed only if all read it so.
        if let Some((rule, _)) =
            of(RuleAction::Deny).find(|(rule, fit)| counts(rule) && *fit != ConditionFit::No)
        {
            return Err(format!("the rule `{}` denies {}", rule.source.shown(), shown()));
        }
        let allowing = |wanted: ConditionFit| of(RuleAction::Allow).filter(move |(_, fit)| *fit == wanted);
        match allowing(ConditionFit::Yes).find(|(rule, _)| counts(rule)) {
            Some((rule, _)) => self
                .request_below(rule.permit_request(), |ceiling| ceiling.judge_request(name, port, request)),
            None => Err(match allowing(ConditionFit::Yes).next() {
                Some((rule, _)) => outside_window(rule),
                None if allowing(ConditionFit::Ambiguous).next().is_some() => {
                    format!("{} has a query or headers that servers read differently", shown())
                }
                None => format!("no rule names {}", shown()),
            }),
        }
    }
}

/// The reason for the denial of what a rule allows at other times.
fn outside_window(rule: &Rule) -> String {
    let window = rule.window.as_ref().map_or("", RuleWindow::text);
    format!("the rule `{}` counts only in its window {window} (UTC)", rule.source.shown())
}

impl Rule {
    fn terms(&self) -> PermitTerms {
        PermitTerms { window: self.window.clone(), budget: self.budget.clone() }
    }

    fn permit_request(&self) -> RequestPermit {
        let private = self.may_be_private();
        let forward = self.forward.as_ref().map(|(name, port)| ForwardHost {
            name: name.clone(),
            port: *port,
            private,
        });
        RequestPermit {
            set_headers: self.source.set_headers.clone(),
            respond: self.source.respond.clone(),
            forward,
            terms: self.terms(),
            rule: self.source.shown(),
        }
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
