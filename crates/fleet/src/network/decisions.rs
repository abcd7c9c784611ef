//! Decisions about connections: judged without a connection, and collected from a Body's log.

use std::net::SocketAddr;

use proto::{
    BodyId, Event, EventData, Failure, Kind,
    egress::{EgressRule, NO_ANSWER, Policy, RequestTarget, WAITS, canonical_name, fit_to_show},
    event_data::{DecodedEvent, NetworkCounted, NetworkDenied},
};
use serde::Serialize;
use store::EventQuery;

use super::PolicyChanger;

/// The port of a target without one.
const USUAL_PORT: u16 = 443;
/// The beginning of the reason for a target without a rule.
const NO_RULE: &str = "no rule names";
/// The reason for a name that leads to an address of this host or of a private network contains this.
const PRIVATE: &str = "address of this host or its network";

/// The decision of a policy about a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PolicyVerdict {
    /// The target, as `[METHOD ]HOST:PORT[/PATH]`.
    pub to: String,
    /// Whether the policy allows it.
    pub allowed: bool,
    /// The rule that decides, or the reason why none does.
    pub why: String,
    /// The command that would allow it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
}

/// Judges a target as the egress process would, without a connection: it looks up no name.
pub fn judge_target(
    body: &BodyId,
    rules: &[EgressRule],
    ceiling: Option<&[EgressRule]>,
    target: &str,
) -> Result<PolicyVerdict, Failure> {
    let not_a_target = || {
        Failure::new(Kind::Usage, format!("{:?} is not a target", fit_to_show(target)))
            .hint("write a name or an address, and a port: pypi.org:443, 192.0.2.7:5432 or [2001:db8::1]:443")
    };
    let policy = Policy::new(rules).and_then(|policy| policy.below(ceiling));
    let policy = policy.map_err(|error| Failure::new(Kind::Internal, error.to_string()))?;
    let (method, place, path) = split_request(target);
    if method.is_some_and(|method| method.is_empty() || !method.bytes().all(|byte| byte.is_ascii_uppercase()))
    {
        return Err(not_a_target());
    }
    let has_port = place.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let whole = if has_port { place.to_owned() } else { format!("{place}:{USUAL_PORT}") };
    let (to, judged) = match whole.parse::<SocketAddr>() {
        Ok(_) if method.is_some() || path.is_some() => return Err(not_a_target()),
        Ok(address) => {
            let judge = |policy: &Policy| {
                policy.judge_address(address.ip(), address.port()).map(|permit| permit.rule)
            };
            (address.to_string(), with_terms(&policy, rules, judge))
        }
        Err(_) => {
            let (name, port) = Policy::target(&whole).map_err(|_| not_a_target())?;
            let path_asked = path.unwrap_or("/");
            let (path_asked, query) =
                path_asked.split_once('?').map_or((path_asked, None), |(path, query)| (path, Some(query)));
            let request = RequestTarget { query, ..RequestTarget::new(method.unwrap_or("GET"), path_asked) };
            let judge = |policy: &Policy| {
                policy.judge_name(&name, port).and_then(|permit| match method.or(path) {
                    Some(_) => policy.judge_request(&name, port, &request).map(|permit| permit.rule),
                    None => Ok(permit.rule),
                })
            };
            let front = method.map(|method| format!("{method} ")).unwrap_or_default();
            let to = format!("{front}{name}:{port}{}", path.unwrap_or_default());
            (to, with_terms(&policy, rules, judge))
        }
    };
    Ok(match judged {
        Ok(why) => PolicyVerdict { to, allowed: true, why, allow: None },
        Err(why) => PolicyVerdict { allow: allowing_command(body, &to, &why), to, allowed: false, why },
    })
}

/// The rule that decides, with its conditions, budgets and effects.
fn with_terms(
    policy: &Policy,
    rules: &[EgressRule],
    judge: impl Fn(&Policy) -> Result<String, String>,
) -> Result<String, String> {
    let shown = judge(policy)?;
    let is_it = |rule: &&EgressRule| {
        let alone = Policy::new(&[(*rule).clone()]);
        rule.shown() == shown && alone.is_ok_and(|policy| judge(&policy).is_ok())
    };
    let terms = rules.iter().find(is_it).map(EgressRule::details).unwrap_or_default();
    Ok(std::iter::once(shown).chain(terms).collect::<Vec<_>>().join("; "))
}

/// Splits a target into the method, host and port, and the path of a request.
fn split_request(target: &str) -> (Option<&str>, &str, Option<&str>) {
    let (method, rest) = match target.split_once(' ') {
        Some((method, rest)) => (Some(method), rest),
        None => (None, target),
    };
    match rest.find('/') {
        Some(at) => (method, &rest[..at], Some(&rest[at..])),
        None => (method, rest, None),
    }
}

/// The target of a rule that would allow what was denied for this reason; none if a rule does not help.
pub fn allowing_target(to: &str, why: &str) -> Option<String> {
    let target = if why.starts_with(NO_RULE) || why.starts_with(NO_ANSWER) || why.ends_with(WAITS) {
        to.to_owned()
    } else if why.contains(PRIVATE) {
        format!("{to}+private")
    } else {
        return None;
    };
    // A Body chooses the text, so only a name or an address becomes a rule. The resolver denies names without a port.
    let (method, place, path) = split_request(to);
    let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
    let is_plain = (canonical_name(host).is_some() || place.parse::<SocketAddr>().is_ok())
        && method.is_none_or(|method| method.bytes().all(|byte| byte.is_ascii_uppercase()))
        && path.is_none_or(|path| {
            path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/-._~%@".contains(&byte))
        });
    (is_plain && Policy::new(&[EgressRule::allow(&target)]).is_ok()).then_some(target)
}

/// The command that would allow what was denied for this reason.
pub fn allowing_command(body: &BodyId, to: &str, why: &str) -> Option<String> {
    allowing_target(to, why).map(|target| format!("pal net allow {body} '{target}'"))
}

/// A target that the egress process of a Body denied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WantedTarget {
    /// The target, as the Body named it.
    pub to: String,
    /// The reason of the last denial.
    pub why: String,
    /// How many connections were denied.
    pub count: u64,
    /// The target of a rule that would allow it; none if a rule does not help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
}

/// A proposal for the policy of a Body, from what it was denied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NetworkProposal {
    /// The Body.
    pub id: BodyId,
    /// The denied targets, the first one first.
    pub wanted: Vec<WantedTarget>,
    /// The command that allows all of them that a rule can allow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The text for palisade.toml that does the same for later Bodies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
}

impl PolicyChanger<'_> {
    /// Proposes rules for what the egress process of a Body denied so far and the present policy still denies.
    pub fn propose(&self, id: &BodyId) -> Result<NetworkProposal, Failure> {
        let rules = self.fleet.view(id)?.spec.egress.map(|egress| egress.all_rules()).unwrap_or_default();
        let ceiling = self.fleet.egress().ceiling_of(id)?;
        let judge = |to: &str| judge_target(id, &rules, ceiling.as_deref(), to);
        let log = self.fleet.log();
        log.drain_egress(id)?;
        let events = log.read(&EventQuery::of_body(id))?;
        let mut wanted = collect(&events);
        wanted.retain(|one| judge(&one.to).map_or(true, |verdict| !verdict.allowed));
        Ok(proposal(id, wanted))
    }
}

/// The denied targets of these events.
fn collect(events: &[Event]) -> Vec<WantedTarget> {
    let mut wanted: Vec<WantedTarget> = Vec::new();
    for event in events {
        let (to, why, total) = match event.decode() {
            DecodedEvent::Known(EventData::NetworkDenied(NetworkDenied { to, why, from: None, .. })) => {
                (to, why, None)
            }
            DecodedEvent::Known(EventData::NetworkCounted(NetworkCounted {
                to,
                allowed: false,
                why,
                count,
                from: None,
                ..
            })) => (to, why, Some(count)),
            _ => continue,
        };
        let allow = allowing_target(&to, &why);
        match wanted.iter_mut().find(|known| known.to == to) {
            Some(known) => {
                known.count = total.map_or(known.count + 1, |total| total.max(known.count));
                (known.why, known.allow) = (why, allow);
            }
            None => wanted.push(WantedTarget { to, why, count: total.unwrap_or(1), allow }),
        }
    }
    wanted
}

fn proposal(id: &BodyId, wanted: Vec<WantedTarget>) -> NetworkProposal {
    let targets: Vec<&str> = wanted.iter().filter_map(|one| one.allow.as_deref()).collect();
    let quoted = |mark: char, list: &[&str]| {
        list.iter().map(|target| format!("{mark}{target}{mark}")).collect::<Vec<_>>()
    };
    let command =
        (!targets.is_empty()).then(|| format!("pal net allow {id} {}", quoted('\'', &targets).join(" ")));
    let is_for_file =
        |target: &&&str| super::rule_reach(&EgressRule::allow(**target)) == Some(super::RuleReach::Names);
    let names: Vec<&str> = targets.iter().filter(is_for_file).copied().collect();
    let settings =
        (!names.is_empty()).then(|| format!("[network]\nallow = [{}]\n", quoted('"', &names).join(", ")));
    NetworkProposal { id: id.clone(), wanted, command, settings }
}

#[cfg(test)]
mod tests {
    use proto::egress::RuleLimit;

    use super::*;

    fn body() -> BodyId {
        "k3v9".parse().unwrap()
    }

    #[test]
    fn a_target_is_judged_with_its_rule_and_a_way_on() {
        let rules = [EgressRule::allow("pypi.org:443").because("pip"), EgressRule::deny("**.evil.test:*")];
        let judge = |target: &str| judge_target(&body(), &rules, None, target).unwrap();
        let good = judge("PyPI.org");
        assert_eq!(
            (good.to.as_str(), good.allowed, good.why.as_str()),
            ("pypi.org:443", true, "allow pypi.org:443 (pip)")
        );
        let bad = judge("pypi.org:22");
        assert_eq!(bad.allow.as_deref(), Some("pal net allow k3v9 'pypi.org:22'"));
        let evil = judge("x.evil.test:443");
        assert_eq!((evil.allowed, evil.allow), (false, None));
        assert_eq!(judge("192.0.2.7:5432").allow.as_deref(), Some("pal net allow k3v9 '192.0.2.7:5432'"));
        let ceiling = [EgressRule::allow("pypi.org")];
        let below = |target: &str| {
            judge_target(&body(), &[EgressRule::allow("*:*")], Some(&ceiling), target).unwrap()
        };
        assert!(below("pypi.org").allowed);
        let above = below("a.test");
        assert_eq!((above.allowed, above.allow), (false, None), "no command of the Body's user helps");
        assert!(above.why.starts_with(proto::egress::CEILING), "{}", above.why);
        let rules = [EgressRule::allow("GET api.test/repos/**")];
        let judge = |target: &str| judge_target(&body(), &rules, None, target).unwrap();
        assert!(judge("api.test").allowed && judge("api.test/repos/a").allowed);
        let post = judge("POST api.test/repos/a");
        assert_eq!(
            (post.allowed, post.allow.as_deref()),
            (false, Some("pal net allow k3v9 'POST api.test:443/repos/a'"))
        );
        assert!(!judge("api.test/other").allowed);
        let judge = |target: &str| judge_target(&body(), &rules, None, target);
        assert!(judge("https://pypi.org").is_err());
        assert!(judge("get api.test").is_err(), "methods are in upper case");
        assert!(judge("a b c:1").is_err());
    }

    #[test]
    fn a_verdict_names_the_terms_of_its_rule() {
        let query = [("page".to_owned(), "[0-9]*".to_owned())].into();
        let limit = RuleLimit { rate: Some("60/min".into()), bytes: None };
        let rules = [
            EgressRule { query, ..EgressRule::allow("GET api.test/list") },
            EgressRule {
                limit: Some(limit),
                window: Some("00:00-24:00".into()),
                ..EgressRule::allow("b.test:22")
            },
        ];
        let judge = |target: &str| judge_target(&body(), &rules, None, target).unwrap();
        let page = judge("GET api.test/list?page=7");
        assert_eq!(
            (page.allowed, page.why.as_str()),
            (true, "allow GET api.test/list; only query page=[0-9]*")
        );
        assert!(!judge("GET api.test/list?page=x").allowed && !judge("GET api.test/list").allowed);
        assert_eq!(judge("b.test:22").why, "allow b.test:22; only 00:00-24:00 UTC; at most 60/min");
    }

    #[test]
    fn no_text_of_a_body_becomes_a_command() {
        for to in [
            "GET a.test:443/'; rm -rf ~ '",
            "GET a.test:443/**",
            "get a.test:443/",
            "a.test:443'; rm -rf ~ '",
            "*:*",
            "$(id):443",
            "",
            "?",
            "\\u{1b}:1",
            "**.test.x:443",
        ] {
            assert_eq!(allowing_target(to, &format!("{NO_RULE} {to}")), None, "{to}");
        }
        assert_eq!(
            allowing_target("a.test", "no rule names it").as_deref(),
            Some("a.test"),
            "of the resolver"
        );
        let post = "POST a.test:443/repos/b";
        assert_eq!(allowing_target(post, &format!("{NO_RULE} {post}")).as_deref(), Some(post));
        let why = "its name resolves to an address of this host or its network";
        assert_eq!(allowing_target("db.corp:5432", why).as_deref(), Some("db.corp:5432+private"));
        assert_eq!(allowing_target("a.test:443", "its TLS server name is b.test"), None);
    }

    #[test]
    fn a_proposal_has_a_command_and_a_text() {
        let one = |to: &str, allow: Option<&str>| WantedTarget {
            to: to.into(),
            why: "w".into(),
            count: 1,
            allow: allow.map(str::to_owned),
        };
        let wanted = vec![
            one("a.test:443", Some("a.test:443")),
            one("?", None),
            one("db.corp:5432", Some("db.corp:5432+private")),
        ];
        let proposed = proposal(&body(), wanted);
        assert_eq!(
            proposed.command.as_deref(),
            Some("pal net allow k3v9 'a.test:443' 'db.corp:5432+private'")
        );
        assert_eq!(proposed.settings.as_deref(), Some("[network]\nallow = [\"a.test:443\"]\n"));
        assert_eq!(proposal(&body(), Vec::new()).command, None);
    }
}
