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
//! Rules with methods, paths or headers, and the hosts of secrets, need the requests inside TLS: the egress process
//! answers the program with a certificate of the Body's own authority. All other TLS goes through unopened.
//!
//! Invariant: a target without a rule is denied, and so is a target in any spelling but the canonical one.
//! Invariant: a rule that denies wins over every rule that allows, and one that allows over every rule that asks.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
};

use serde::{Deserialize, Serialize};

use super::{
    fit_to_show, is_body_domain,
    request_match::{RequestPattern, RequestTarget},
};

/// Most rules of a policy.
pub const RULES_MAX: usize = 256;
/// Most examples of a rule.
const EXAMPLES_MAX: usize = 32;
/// Most headers of a rule, and the longest name or value of one, in bytes.
const HEADERS_MAX: usize = 32;
const HEADER_LEN_MAX: usize = 8 << 10;
/// Longest reason of a rule, in bytes.
const WHY_LEN_MAX: usize = 200;

/// A rule that cannot be used.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum RuleError {
    /// The text is not a rule.
    #[error(
        "{0:?} is not a rule: write a name and a port such as `pypi.org:443`, `*.example.org:443` or `db.example.org:5432`, followed by `+private` for a host of your own network, or `+plain` for plain http"
    )]
    Syntax(String),
    /// The policy has too many rules.
    #[error("{0} rules; a policy has at most {RULES_MAX}")]
    TooMany(usize),
    /// A reason or a list of examples is too long.
    #[error(
        "the rule {0:?} has a reason of more than {WHY_LEN_MAX} bytes, or more than {EXAMPLES_MAX} examples"
    )]
    TooLong(String),
    /// The headers of a rule cannot be set.
    #[error(
        "the rule {0:?} sets headers, which needs a name and a rule that allows, without `+tcp` and `+tunnel`; a name or a value of a header is at most 8 KiB of plain text"
    )]
    Headers(String),
    /// An example contradicts its rule.
    #[error("the rule {rule:?} should {} its example {example:?}", if *.is_match { "match" } else { "not match" })]
    Example {
        /// The rule.
        rule: String,
        /// The example.
        example: String,
        /// Whether the rule should match it.
        is_match: bool,
    },
}

/// The effect of a rule on the connections that it matches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleAction {
    /// The Body may make them.
    #[default]
    Allow,
    /// The Body may not.
    Deny,
    /// Connections wait until a change of the policy allows or denies them.
    Ask,
}

impl RuleAction {
    /// Its word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Ask => "ask",
        }
    }
}

/// A rule as a person or a preset wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressRule {
    /// The effect of the rule.
    #[serde(default, skip_serializing_if = "is_allow")]
    pub action: RuleAction,
    /// The targets, as `[METHODS ]HOST[:PORTS][/PATH][+MARK…]`.
    pub to: String,
    /// Headers that each request gets on its way out, in place of its own; `${NAME}` in a value stands for a secret that
    /// the Body may use.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// The reason for the rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Targets (`HOST:PORT`) that the rule must match; checked when it is read.
    #[serde(default, rename = "match", skip_serializing_if = "Vec::is_empty")]
    pub matches: Vec<String>,
    /// Targets that the rule must not match.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_match: Vec<String>,
}

fn is_allow(action: &RuleAction) -> bool {
    *action == RuleAction::Allow
}

impl EgressRule {
    /// A rule that allows these targets.
    pub fn allow(to: impl Into<String>) -> Self {
        Self {
            action: RuleAction::Allow,
            to: to.into(),
            headers: BTreeMap::new(),
            why: None,
            matches: Vec::new(),
            not_match: Vec::new(),
        }
    }

    /// A rule that denies these targets.
    pub fn deny(to: impl Into<String>) -> Self {
        Self { action: RuleAction::Deny, ..Self::allow(to) }
    }

    /// A rule that lets connections to these targets wait for a decision.
    pub fn ask(to: impl Into<String>) -> Self {
        Self { action: RuleAction::Ask, ..Self::allow(to) }
    }

    /// The rule, or in the place of one that allows a rule that asks about its host and ports.
    pub fn into_question(self) -> Self {
        match self.action {
            RuleAction::Allow => Self { why: self.why.clone(), ..Self::ask(self.host_and_ports()) },
            RuleAction::Deny | RuleAction::Ask => self,
        }
    }

    /// The rule with a reason.
    #[must_use]
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.why = Some(why.into());
        self
    }

    /// The host and the ports of the rule, without methods, path and marks.
    pub fn host_and_ports(&self) -> &str {
        let text = self.to.split('+').next().unwrap_or_default();
        split_path(text.split_once(' ').map_or(text, |(_, rest)| rest)).0
    }

    /// The rule as one line of text, for decisions and tables.
    pub fn shown(&self) -> String {
        let action = self.action.name();
        match &self.why {
            Some(why) => format!("{action} {} ({})", fit_to_show(&self.to), fit_to_show(why)),
            None => format!("{action} {}", fit_to_show(&self.to)),
        }
    }
}

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

#[derive(Debug, Clone, PartialEq, Eq)]
enum HostPattern {
    Any,
    Name(String),
    /// The names one label below.
    Child(String),
    /// The names any number of labels below.
    Below(String),
    Addresses {
        first: u128,
        last: u128,
    },
}

/// One rule, ready to judge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The requests to which the rule is limited.
    requests: RequestPattern,
    host: HostPattern,
    /// The first and the last port; none for 80 and 443.
    ports: Option<(u16, u16)>,
    private: bool,
    /// The protocol, if a mark names it.
    protocol: Option<Protocol>,
    inspect: bool,
    tunnel: bool,
    source: EgressRule,
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
    /// The rule, for the record.
    pub rule: String,
}

/// The permission of a rule for one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestPermit {
    /// The headers that the request gets.
    pub headers: BTreeMap<String, String>,
    /// The rule, for the record.
    pub rule: String,
}

/// The rules of a Body, ready to judge.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    rules: Vec<Rule>,
    /// The hosts of secrets.
    inspected: Vec<Rule>,
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
        Ok(Self { rules, inspected: Vec::new(), ceiling: None })
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

    /// Whether some rule allows a canonical name on some port, so that a resolver may answer it.
    pub fn resolves(&self, name: &str) -> bool {
        let covers = |rule: &&Rule| rule.covers_name(name);
        let denied = |rule: &Rule| rule.denies_connections() && rule.ports == Some((1, u16::MAX));
        let mut rules = self.rules.iter().filter(covers);
        rules.clone().any(|rule| rule.source.action != RuleAction::Deny)
            && !rules.any(denied)
            && self.ceiling_has(|ceiling| ceiling.resolves(name))
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
        let mut fitting = self.rules.iter().filter(|rule| rule.has_port(port) && covers(rule));
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
        let is_it = |rule: &&Rule| {
            rule.denies_connections() && rule.has_port(port) && rule.host.covers_address(address)
        };
        match self.rules.iter().find(is_it) {
            Some(rule) => Some(format!("the rule `{}` denies its address {address}", rule.source.shown())),
            None => self.ceiling.as_ref()?.denial_of_address(address, port),
        }
    }

    fn judge(&self, covers: &dyn Fn(&Rule) -> bool, port: u16, shown: &str) -> Result<Permit, String> {
        let fits = |rule: &&Rule| rule.has_port(port) && covers(rule);
        let fitting = self.rules.iter().filter(fits);
        if let Some(rule) = fitting.clone().find(|rule| rule.denies_connections()) {
            return Err(format!("the rule `{}` denies {shown}", rule.source.shown()));
        }
        let mut allowing = fitting.clone().filter(|rule| rule.source.action == RuleAction::Allow);
        let private = allowing.clone().any(Rule::may_be_private);
        let rule = allowing.next().ok_or_else(|| format!("no rule names {shown}"))?;
        // A rule that denies requests counts in spite of `+tunnel`.
        let denies = fitting.clone().any(|rule| rule.source.action == RuleAction::Deny);
        let needs =
            fitting.clone().any(Rule::needs_requests) || self.inspected.iter().any(|host| fits(&host));
        let inspect = denies || (needs && !rule.tunnel);
        Ok(Permit { protocol: rule.protocol_on(port), private, inspect, rule: rule.source.shown() })
    }

    /// The rule for a request to a canonical name, on a connection that is permitted, or the reason why there is none.
    pub fn judge_request(
        &self,
        name: &str,
        port: u16,
        request: &RequestTarget<'_>,
    ) -> Result<RequestPermit, String> {
        let shown = || format!("{} {name}:{port}{}", fit_to_show(request.method), fit_to_show(request.path));
        let fitting = || self.rules.iter().filter(|rule| rule.has_port(port) && rule.covers_name(name));
        // Servers read paths in ways of their own, so a condition on the path takes only paths with one reading.
        if fitting().any(|rule| rule.requests.is_limited()) {
            request.check_one_reading().map_err(|why| format!("{} {why}", shown()))?;
        }
        let decides = |rule: &&Rule| rule.source.action != RuleAction::Ask && rule.requests.covers(request);
        let mut matching = fitting().filter(decides);
        if let Some(rule) = matching.clone().find(|rule| rule.source.action == RuleAction::Deny) {
            return Err(format!("the rule `{}` denies {}", rule.source.shown(), shown()));
        }
        let rule = matching.next().ok_or_else(|| format!("no rule names {}", shown()))?;
        let own = RequestPermit { headers: rule.source.headers.clone(), rule: rule.source.shown() };
        self.request_below(own, |ceiling| ceiling.judge_request(name, port, request))
    }
}

impl Rule {
    /// `*` allows public names, and other Bodies are none.
    fn covers_name(&self, name: &str) -> bool {
        let is_public = self.host == HostPattern::Any && self.source.action != RuleAction::Deny;
        self.host.covers_name(name) && !(is_public && is_body_domain(name))
    }

    fn has_port(&self, port: u16) -> bool {
        match self.ports {
            Some((first, last)) => (first..=last).contains(&port),
            None => matches!(port, 80 | 443),
        }
    }

    /// Whether the rule denies whole connections, and not only some requests on them.
    fn denies_connections(&self) -> bool {
        self.source.action == RuleAction::Deny && !self.requests.is_limited()
    }

    /// Whether the rule can be judged only by the requests on a connection.
    fn needs_requests(&self) -> bool {
        self.inspect || self.requests.is_limited() || !self.source.headers.is_empty()
    }

    /// A rule that names addresses means just these, wherever they lead.
    fn may_be_private(&self) -> bool {
        self.private || matches!(self.host, HostPattern::Addresses { .. })
    }

    fn protocol_on(&self, port: u16) -> Protocol {
        self.protocol.unwrap_or(match port {
            443 => Protocol::Tls,
            80 => Protocol::Http,
            _ if self.needs_requests() => Protocol::Tls,
            _ => Protocol::Tcp,
        })
    }

    fn matches(&self, example: &str) -> bool {
        let (method, target) = example.split_once(' ').unwrap_or(("GET", example));
        let (target, path) = target.split_at(target.find('/').unwrap_or(target.len()));
        let path = if path.is_empty() { "/" } else { path };
        let Some((host, port)) = target.rsplit_once(':') else { return false };
        let Some(port) = read_port(port) else { return false };
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let covers = match (address, canonical_name(host)) {
            (Ok(address), _) => self.host.covers_address(address),
            (Err(_), Some(name)) => self.covers_name(&name),
            (Err(_), None) => false,
        };
        covers && self.has_port(port) && self.requests.covers(&RequestTarget { method, path })
    }
}

impl Rule {
    fn headers_fit(&self) -> bool {
        let is_text = |text: &str| {
            text.len() <= HEADER_LEN_MAX && !text.contains(|c: char| c.is_control() || !c.is_ascii())
        };
        let fits = |(name, value): (&String, &String)| {
            is_text(value) && name.len() <= HEADER_LEN_MAX && is_header_name(name)
        };
        let headers = &self.source.headers;
        headers.is_empty()
            || (self.source.action == RuleAction::Allow
                && headers.len() <= HEADERS_MAX
                && !self.tunnel
                && self.protocol != Some(Protocol::Tcp)
                && !matches!(self.host, HostPattern::Addresses { .. })
                && headers.iter().all(fits))
    }
}

/// Whether a header of this name may be set: it says nothing about the connection or the length of the body.
fn is_header_name(name: &str) -> bool {
    let token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    let refused = [
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    !name.is_empty() && name.bytes().all(token) && !refused.iter().any(|own| name.eq_ignore_ascii_case(own))
}

impl HostPattern {
    fn covers_name(&self, name: &str) -> bool {
        let front = |below: &str| name.strip_suffix(below).and_then(|front| front.strip_suffix('.'));
        match self {
            Self::Any => true,
            Self::Name(own) => own == name,
            Self::Child(below) => front(below).is_some_and(|front| !front.is_empty() && !front.contains('.')),
            Self::Below(below) => front(below).is_some_and(|front| !front.is_empty()),
            Self::Addresses { .. } => false,
        }
    }

    fn covers_address(&self, address: IpAddr) -> bool {
        match self {
            Self::Any => true,
            Self::Addresses { first, last } => (*first..=*last).contains(&number(address)),
            Self::Name(_) | Self::Child(_) | Self::Below(_) => false,
        }
    }
}

/// An address as a number; IPv4 as the IPv6 address to which it is mapped, so that both spellings are one.
fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn read_rule(source: &EgressRule) -> Result<Rule, RuleError> {
    let too_long = source.why.as_ref().is_some_and(|why| why.len() > WHY_LEN_MAX)
        || source.matches.len() > EXAMPLES_MAX
        || source.not_match.len() > EXAMPLES_MAX;
    if too_long {
        return Err(RuleError::TooLong(fit_to_show(&source.to)));
    }
    let rule = parse_rule(source).ok_or_else(|| RuleError::Syntax(fit_to_show(&source.to)))?;
    if !rule.headers_fit() {
        return Err(RuleError::Headers(fit_to_show(&source.to)));
    }
    let examples = source.matches.iter().map(|example| (example, true));
    for (example, is_match) in examples.chain(source.not_match.iter().map(|example| (example, false))) {
        if rule.matches(example) != is_match {
            let (rule, example) = (fit_to_show(&source.to), fit_to_show(example));
            return Err(RuleError::Example { rule, example, is_match });
        }
    }
    Ok(rule)
}

/// Reads a host of a secret.
fn read_secret_host(host: &str) -> Result<Rule, RuleError> {
    let rule = parse_rule(&EgressRule::allow(host)).filter(|rule| {
        let is_named = !matches!(rule.host, HostPattern::Any | HostPattern::Addresses { .. });
        is_named && !host.contains(['+', '/', ' '])
    });
    let rule = rule.ok_or_else(|| RuleError::Syntax(fit_to_show(host)))?;
    Ok(Rule { ports: rule.ports.or(Some((443, 443))), inspect: true, ..rule })
}

/// Whether a secret that belongs to `host` may go to a canonical name on a port.
pub fn is_secret_host(host: &str, name: &str, port: u16) -> bool {
    read_secret_host(host).is_ok_and(|rule| rule.has_port(port) && rule.host.covers_name(name))
}

fn parse_rule(source: &EgressRule) -> Option<Rule> {
    let mut marks = source.to.split('+');
    let (methods, text) = match marks.next()?.split_once(' ') {
        Some((methods, rest)) => (Some(methods), rest),
        None => (None, source.to.split('+').next()?),
    };
    let (text, path) = split_path(text);
    let requests = RequestPattern::parse(methods, path)?;
    let (mut private, mut inspect, mut tunnel, mut protocol) = (false, false, false, None);
    for mark in marks {
        let flag = match mark {
            "private" => Some(&mut private),
            "inspect" => Some(&mut inspect),
            "tunnel" => Some(&mut tunnel),
            _ => None,
        };
        if let Some(flag) = flag {
            *flag = true;
            continue;
        }
        let named = match mark {
            "plain" => Protocol::PlainHttp,
            "tls" => Protocol::Tls,
            "http" => Protocol::Http,
            "tcp" => Protocol::Tcp,
            _ => return None,
        };
        if protocol.replace(named).is_some_and(|other| other != named) {
            return None;
        }
    }
    let (host, ports) = split_ports(text)?;
    let rule = Rule {
        requests,
        host: parse_host(host)?,
        ports,
        private,
        protocol,
        inspect,
        tunnel,
        source: source.clone(),
    };
    // Requests can be read in HTTP and in TLS only, and TLS needs a name.
    let is_readable = !rule.tunnel
        && !matches!(rule.host, HostPattern::Addresses { .. })
        && rule.protocol.is_none_or(|protocol| protocol != Protocol::Tcp);
    let is_judgeable = !rule.needs_requests() || is_readable || !rule.source.headers.is_empty();
    // A connection waits as a whole.
    let is_askable = source.action != RuleAction::Ask || !rule.needs_requests();
    (is_judgeable && is_askable).then_some(rule)
}

/// Splits a rule into host and ports, and the path. The slash of a range of addresses is followed by its number of bits.
fn split_path(text: &str) -> (&str, Option<&str>) {
    let is_range = |host: &str| host.ends_with(']') || host.parse::<std::net::Ipv4Addr>().is_ok();
    match text.find('/') {
        Some(at) if !is_range(&text[..at]) => (&text[..at], Some(&text[at..])),
        _ => (text, None),
    }
}

/// Splits a rule into its host and its ports.
fn split_ports(text: &str) -> Option<(&str, Option<(u16, u16)>)> {
    let (host, ports) = match text.rsplit_once(':') {
        // The colons of an address in brackets belong to it.
        Some((_, rest)) if rest.ends_with(']') || rest.contains("]/") => (text, None),
        Some((host, ports)) => (host, Some(ports)),
        None => (text, None),
    };
    let ports = match ports {
        None => None,
        Some("*") => Some((1, u16::MAX)),
        Some(ports) => {
            let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
            let (first, last) = (read_port(first)?, read_port(last)?);
            (first <= last).then_some(Some((first, last)))?
        }
    };
    Some((host, ports))
}

fn parse_host(host: &str) -> Option<HostPattern> {
    if host == "*" {
        return Some(HostPattern::Any);
    }
    if let Some(addresses) = parse_addresses(host) {
        return Some(addresses);
    }
    let (below, make): (&str, fn(String) -> HostPattern) = if let Some(rest) = host.strip_prefix("**.") {
        (rest, HostPattern::Below)
    } else if let Some(rest) = host.strip_prefix("*.") {
        (rest, HostPattern::Child)
    } else {
        (host, HostPattern::Name)
    };
    let name = below.to_ascii_lowercase();
    // A rule for a whole top-level domain is surely a mistake.
    let is_whole_domain = below.len() != host.len() && !name.contains('.');
    (is_name(&name) && !is_whole_domain).then(|| make(name))
}

/// An address, or a range as `ADDRESS/BITS`; IPv6 stands in brackets.
fn parse_addresses(host: &str) -> Option<HostPattern> {
    let (address, bits) = match host.split_once('/') {
        Some((address, bits)) => (address, Some(bits.parse::<u32>().ok().filter(|_| is_digits(bits))?)),
        None => (host, None),
    };
    let address: IpAddr = match address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(v6) => IpAddr::V6(v6.parse::<Ipv6Addr>().ok()?),
        None => IpAddr::V4(address.parse().ok()?),
    };
    let width = if address.is_ipv4() { 32 } else { 128 };
    let bits = bits.unwrap_or(width);
    if bits > width {
        return None;
    }
    let hosts = match width - bits {
        128 => u128::MAX,
        free => (1u128 << free) - 1,
    };
    let first = number(address);
    // A range begins at its first address.
    (first & hosts == 0).then_some(HostPattern::Addresses { first, last: first | hosts })
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn read_port(text: &str) -> Option<u16> {
    text.parse().ok().filter(|port| is_digits(text) && *port != 0)
}

/// A name in the one spelling that rules compare; none if the text is no plain host name.
pub fn canonical_name(host: &str) -> Option<String> {
    let name = host.to_ascii_lowercase();
    is_name(&name).then_some(name)
}

/// Whether a name has the only spelling that rules accept: lower-case labels, no dot at the end, and no
/// numeric last label, which some resolvers read as part of an IP address.
fn is_name(host: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
    };
    let numeric = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit()) || label.starts_with("0x");
    let last = host.rsplit('.').next().unwrap_or(host);
    host.len() <= 253 && host.split('.').all(label) && !numeric(last)
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
