//! Reads rules: the text of their targets, and the other fields, which must mean something together.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    time::SystemTime,
};

use super::{
    EgressRule, Protocol, RuleAction, RuleBudget, RuleError, RuleResponse, fit_to_show, is_body_domain,
    request_conditions::{ConditionFit, ValueConditions},
    request_match::{RequestPattern, RequestTarget},
    rule::{EXAMPLES_MAX, WHY_LEN_MAX},
    window::RuleWindow,
};

/// Most headers of a rule, and the longest name or value of one, in bytes.
const HEADERS_MAX: usize = 32;
const HEADER_LEN_MAX: usize = 8 << 10;
/// Longest body of an answer of a rule, in bytes.
const BODY_LEN_MAX: usize = 64 << 10;

/// The hosts of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HostPattern {
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
pub(super) struct Rule {
    /// The requests to which the rule is limited.
    pub requests: RequestPattern,
    pub host: HostPattern,
    /// The first and the last port; none for 80 and 443.
    pub ports: Option<(u16, u16)>,
    private: bool,
    /// The protocol, if a mark names it.
    protocol: Option<Protocol>,
    inspect: bool,
    pub tunnel: bool,
    /// The times at which the rule counts; none for all.
    pub window: Option<RuleWindow>,
    pub budget: Option<RuleBudget>,
    /// The host and the port to which requests go in place of their own.
    pub forward: Option<(String, u16)>,
    pub source: EgressRule,
}

impl Rule {
    /// Whether the rule is about a canonical name. `*` allows public names, and other Bodies are none.
    pub fn covers_name(&self, name: &str) -> bool {
        let is_public = self.host == HostPattern::Any && self.source.action != RuleAction::Deny;
        self.host.covers_name(name) && !(is_public && is_body_domain(name))
    }

    pub fn has_port(&self, port: u16) -> bool {
        match self.ports {
            Some((first, last)) => (first..=last).contains(&port),
            None => matches!(port, 80 | 443),
        }
    }

    /// Whether the rule denies whole connections, and not only some requests on them.
    pub fn denies_connections(&self) -> bool {
        self.source.action == RuleAction::Deny && !self.requests.is_limited()
    }

    /// Whether the rule can be judged only by the requests on a connection.
    pub fn needs_requests(&self) -> bool {
        self.inspect
            || self.requests.is_limited()
            || !self.source.set_headers.is_empty()
            || self.replaces_host()
    }

    /// Whether requests of the rule do not go to their own host.
    pub fn replaces_host(&self) -> bool {
        self.source.respond.is_some() || self.forward.is_some()
    }

    /// Whether the rule counts at a time.
    pub fn counts_at(&self, time: SystemTime) -> bool {
        self.window.as_ref().is_none_or(|window| window.has(time))
    }

    /// Whether the hosts to which the rule lets connections go may be private: the host that it forwards to is another.
    pub fn opens_private(&self) -> bool {
        self.forward.is_none() && self.may_be_private()
    }

    /// A rule that names addresses means just these, wherever they lead.
    pub fn may_be_private(&self) -> bool {
        self.private || matches!(self.host, HostPattern::Addresses { .. })
    }

    pub fn protocol_on(&self, port: u16) -> Protocol {
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
        let (path, query) = path.split_once('?').map_or((path, None), |(path, query)| (path, Some(query)));
        let Some((host, port)) = target.rsplit_once(':') else { return false };
        let Some(port) = read_port(port) else { return false };
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let covers = match (address, canonical_name(host)) {
            (Ok(address), _) => self.host.covers_address(address),
            (Err(_), Some(name)) => self.covers_name(&name),
            (Err(_), None) => false,
        };
        let request = RequestTarget { query, ..RequestTarget::new(method, path) };
        // An example has no headers.
        covers && self.has_port(port) && self.requests.fit_line(&request) == ConditionFit::Yes
    }
}

impl Rule {
    fn headers_fit(&self) -> bool {
        let headers = &self.source.set_headers;
        headers.is_empty()
            || (self.source.action == RuleAction::Allow
                && headers.len() <= HEADERS_MAX
                && self.is_readable()
                && headers.iter().all(is_header))
    }

    /// Requests can be read in HTTP and in TLS only, and TLS needs a name.
    fn is_readable(&self) -> bool {
        !self.tunnel
            && !matches!(self.host, HostPattern::Addresses { .. })
            && self.protocol.is_none_or(|protocol| protocol != Protocol::Tcp)
    }

    /// Says what is wrong with the fields behind the targets, if they mean nothing together.
    fn check_fields(&self) -> Result<(), &'static str> {
        let source = &self.source;
        if source.action != RuleAction::Allow {
            if source.limit.is_some() || self.replaces_host() {
                return Err("only a rule that allows has `limit`, `respond` or `forward`");
            }
            if source.action == RuleAction::Ask && self.requests.has_values() {
                return Err(
                    "a connection waits as a whole, so a rule that asks has no `query` and no `headers`",
                );
            }
        }
        if (self.requests.has_values() || self.replaces_host()) && !self.is_readable() {
            return Err(
                "`query`, `headers`, `respond` and `forward` need a name and requests that can be read, \
                 without `+tcp` and `+tunnel`",
            );
        }
        if source.respond.is_some() && self.forward.is_some() {
            return Err("`respond` and `forward` exclude each other");
        }
        if source.respond.is_some() && !source.set_headers.is_empty() {
            return Err("`respond` sends no request, so `set_headers` means nothing beside it");
        }
        if source.respond.is_some() && self.budget.as_ref().is_some_and(|budget| budget.bytes.is_some()) {
            return Err("`respond` sends nothing to a host, so a budget of bytes means nothing beside it");
        }
        source.respond.as_ref().map_or(Ok(()), check_response)
    }
}

fn is_header((name, value): (&String, &String)) -> bool {
    let is_text = value.len() <= HEADER_LEN_MAX && !value.contains(|c: char| c.is_control() || !c.is_ascii());
    is_text && name.len() <= HEADER_LEN_MAX && is_header_name(name)
}

fn check_response(response: &RuleResponse) -> Result<(), &'static str> {
    let RuleResponse { status, headers, body } = response;
    if !(200..=599).contains(status) {
        return Err("the `status` of its answer is none from 200 to 599");
    }
    if matches!(status, 204 | 205 | 304) && !body.is_empty() {
        return Err("an answer with its `status` has no body");
    }
    if body.len() > BODY_LEN_MAX {
        return Err("the `body` of its answer has more than 64 KiB");
    }
    match headers.len() <= HEADERS_MAX && headers.iter().all(is_header) && !has_name_twice(headers) {
        true => Ok(()),
        false => Err("its answer has more than 32 headers, or one that cannot be set"),
    }
}

fn has_name_twice(headers: &BTreeMap<String, String>) -> bool {
    let mut names: Vec<_> = headers.keys().map(|name| name.to_ascii_lowercase()).collect();
    names.sort();
    names.windows(2).any(|two| two[0] == two[1])
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
    pub fn covers_name(&self, name: &str) -> bool {
        let front = |below: &str| name.strip_suffix(below).and_then(|front| front.strip_suffix('.'));
        match self {
            Self::Any => true,
            Self::Name(own) => own == name,
            Self::Child(below) => front(below).is_some_and(|front| !front.is_empty() && !front.contains('.')),
            Self::Below(below) => front(below).is_some_and(|front| !front.is_empty()),
            Self::Addresses { .. } => false,
        }
    }

    pub fn covers_address(&self, address: IpAddr) -> bool {
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

/// Reads a rule, and checks its examples.
pub(super) fn read_rule(source: &EgressRule) -> Result<Rule, RuleError> {
    let too_long = source.why.as_ref().is_some_and(|why| why.len() > WHY_LEN_MAX)
        || source.matches.len() > EXAMPLES_MAX
        || source.not_match.len() > EXAMPLES_MAX;
    if too_long {
        return Err(RuleError::TooLong(fit_to_show(&source.to)));
    }
    let rule = parse_rule(source).ok_or_else(|| RuleError::Syntax(fit_to_show(&source.to)))?;
    let rule = read_fields(rule)
        .and_then(|rule| rule.check_fields().map(|()| rule))
        .map_err(|why| RuleError::Field { rule: fit_to_show(&source.to), why: why.to_owned() })?;
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

/// Reads the fields behind the targets.
fn read_fields(rule: Rule) -> Result<Rule, &'static str> {
    let source = &rule.source;
    let query = ValueConditions::of_query(&source.query)
        .ok_or("a parameter of its `query` has a name or a pattern that cannot be used")?;
    let headers = ValueConditions::of_headers(&source.headers, is_header_name)
        .ok_or("one of its `headers` has a name or a pattern that cannot be used")?;
    let window = match source.window.as_deref().map(RuleWindow::parse) {
        Some(None) => {
            return Err("its `window` is none such as `mon-fri 08:00-18:00` (UTC) or `22:00-06:00`");
        }
        window => window.flatten(),
    };
    let forward = match source.forward.as_deref().map(parse_forward) {
        Some(None) => return Err("its `forward` is no `HOST:PORT` with a name as the host"),
        forward => forward.flatten(),
    };
    let budget = RuleBudget::of(source)?;
    let requests = rule.requests.clone().with_values(query, headers);
    Ok(Rule { requests, window, budget, forward, ..rule })
}

fn parse_forward(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.split_once(':')?;
    Some((canonical_name(host)?, read_port(port)?))
}

/// Reads a host of a secret.
pub(super) fn read_secret_host(host: &str) -> Result<Rule, RuleError> {
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
        window: None,
        budget: None,
        forward: None,
        source: source.clone(),
    };
    let needs_requests = rule.inspect || rule.requests.is_limited();
    let is_judgeable = !needs_requests || rule.is_readable();
    // A connection waits as a whole.
    let is_askable = source.action != RuleAction::Ask || !needs_requests;
    (is_judgeable && is_askable).then_some(rule)
}

/// Splits a rule into host and ports, and the path. The slash of a range of addresses is followed by its number of bits.
pub(super) fn split_path(text: &str) -> (&str, Option<&str>) {
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

pub(super) fn read_port(text: &str) -> Option<u16> {
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
