//! The egress proxy of a Body: its policy, its decisions, and the messages between it and its supervisor.
//!
//! Invariant: an empty policy denies everything, and so does a target in any spelling but the canonical one.
//! Trust: a Body chooses the targets, and the process that writes the spool reads a Body's bytes. Both are
//! hostile.

use serde::{Deserialize, Serialize};

/// Most rules of a policy.
const RULES_MAX: usize = 256;
/// Most characters of a target or a reason that are kept.
const SHOWN_LEN_MAX: usize = 200;

/// The process name of the egress proxy. Under this name `pal-launch` becomes the proxy.
pub const PROGRAM: &str = "pal-egress";
/// The proxy's socket, in the directory that the Body sees.
pub const SOCKET: &str = "egress.sock";
/// The part of the proxy's directory that the Body sees.
pub const SHARED: &str = "shared";
/// The spool of decisions, in the proxy's directory.
pub const SPOOL: &str = "events";
/// Longest line of the spool. A target and a reason have at most 200 characters each, and an escaped one at most 12 bytes.
pub const LINE_LEN_MAX: usize = 8 << 10;

/// The text is not a valid rule.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{0:?} is not a rule: write a name and a port such as `pypi.org:443` or `*.example.org:443`, followed by `+private` for a host of your own network, or `+plain` for plain http"
)]
pub struct RuleError(String);

/// One host name and port that a Body may reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    host: String,
    /// Whether the rule means the names below it, not the name itself.
    below: bool,
    port: u16,
    /// Whether the name may also resolve to an address of this host or of a private network.
    pub private: bool,
    transport: Transport,
}

/// The protocol of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TLS, which the proxy only forwards.
    Tls,
    /// Plain HTTP, for which the proxy sends the request itself.
    PlainHttp,
}

/// The rules of a Body; a target without a rule is denied.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy(Vec<Rule>);

impl Policy {
    /// Parses rules.
    pub fn parse<S: AsRef<str>>(rules: &[S]) -> Result<Self, RuleError> {
        if rules.len() > RULES_MAX {
            return Err(RuleError(format!("{} rules", rules.len())));
        }
        rules.iter().map(|rule| parse_rule(rule.as_ref())).collect::<Result<_, _>>().map(Self)
    }

    /// Finds the rule that allows a target; returns the target's name and port with it, or why no rule does.
    pub fn judge(&self, target: &str, transport: Transport) -> Result<(String, u16, &Rule), String> {
        let (host, port) = target.rsplit_once(':').ok_or("it has no port")?;
        let port: u16 = if port.bytes().all(|byte| byte.is_ascii_digit()) {
            port.parse().map_err(|_| "its port is not a number from 1 to 65535")?
        } else {
            return Err("its port is not a number from 1 to 65535".into());
        };
        let host = host.to_ascii_lowercase();
        if !is_name(&host) {
            return Err("it is not a plain host name: IP addresses and other spellings are denied".into());
        }
        let fits = |rule: &&Rule| {
            rule.transport == transport
                && rule.port == port
                && if rule.below {
                    host.strip_suffix(&rule.host).is_some_and(|front| front.ends_with('.') && front.len() > 1)
                } else {
                    rule.host == host
                }
        };
        match self.0.iter().find(fits) {
            Some(rule) => Ok((host, port, rule)),
            None if transport == Transport::PlainHttp => {
                Err(format!("no rule allows plain http to {host}:{port}"))
            }
            None => Err(format!("no rule names {host}:{port}")),
        }
    }
}

fn parse_rule(text: &str) -> Result<Rule, RuleError> {
    let bad = || RuleError(fit_to_show(text));
    let mut marks = text.split('+');
    let text = marks.next().unwrap_or_default();
    let (mut private, mut transport) = (false, Transport::Tls);
    for mark in marks {
        match mark {
            "private" => private = true,
            "plain" => transport = Transport::PlainHttp,
            _ => return Err(bad()),
        }
    }
    let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
    let (host, below) = host.strip_prefix("*.").map_or((host, false), |rest| (rest, true));
    let host = host.to_ascii_lowercase();
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| digits && *port != 0).ok_or_else(bad)?;
    // A rule for a whole top-level domain is surely a mistake.
    if !is_name(&host) || (below && !host.contains('.')) {
        Err(bad())
    } else {
        Ok(Rule { host, below, port, private, transport })
    }
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

/// Shortens a Body's text and escapes it for a terminal.
pub fn fit_to_show(text: &str) -> String {
    crate::text::visible(&text.chars().take(SHOWN_LEN_MAX).collect::<String>())
}

/// The kind of event that a line of the spool becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecisionKind {
    /// The proxy allowed a connection.
    #[serde(rename = "network.allowed")]
    Allowed,
    /// The proxy denied a connection.
    #[serde(rename = "network.denied")]
    Denied,
    /// The proxy repeated a recorded decision; the event has the total number.
    #[serde(rename = "network.counted")]
    Counted,
}

impl DecisionKind {
    /// The event's type.
    pub fn event(self) -> &'static str {
        match self {
            Self::Allowed => "network.allowed",
            Self::Denied => "network.denied",
            Self::Counted => "network.counted",
        }
    }
}

/// A decision about connections of a Body: the data of its event.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Decision {
    /// The target, as far as the proxy understood it, escaped for a terminal.
    pub to: String,
    /// Whether the Body may reach it.
    pub allowed: bool,
    /// The reason.
    pub why: String,
    /// How many connections, if more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl Decision {
    /// A decision that allows a connection.
    pub fn allowed(to: &str, why: &str) -> Self {
        Self { to: fit_to_show(to), allowed: true, why: fit_to_show(why), count: None }
    }

    /// A decision that denies a connection.
    pub fn denied(to: &str, why: &str) -> Self {
        Self { to: fit_to_show(to), allowed: false, why: fit_to_show(why), count: None }
    }
}

/// One line of the spool: a decision that the proxy wrote before it forwarded a byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpoolLine {
    /// The event that it becomes.
    pub kind: DecisionKind,
    /// When the proxy decided, in microseconds since 1970.
    pub at_us: u64,
    /// The decision.
    pub data: Decision,
}

impl SpoolLine {
    /// Parses a line; none if the line is incomplete, or if no `pal-egress` could have written it.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let line: Self = serde_json::from_slice(line).ok()?;
        let sound = match line.kind {
            DecisionKind::Allowed => line.data.allowed && line.data.count.is_none(),
            DecisionKind::Denied => !line.data.allowed && line.data.count.is_none(),
            DecisionKind::Counted => line.data.count.is_some(),
        };
        // A text that is escaped already stays the same when it is escaped again.
        let fit = |text: &str| text.len() <= 12 * SHOWN_LEN_MAX && crate::text::visible(text) == text;
        (sound && fit(&line.data.to) && fit(&line.data.why)).then_some(line)
    }
}

/// When a decision counts as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flush {
    /// After the kernel has it: it survives the end of every process.
    Kernel,
    /// After the disk has it: it survives a power failure.
    Disk,
}

/// The supervisor's first message to a `pal-egress`. Three descriptors come before it: the listening socket,
/// the spool, and the pidfd of the Body's first process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressOrders {
    /// The rules of the policy.
    pub allow: Vec<String>,
    /// When a decision counts as recorded.
    pub flush: Flush,
}

/// The answer of `pal-egress` after it has confined itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EgressAnswer {
    /// It serves connections.
    Ready {
        /// The Landlock ABI that confines it; 0 where the kernel has none.
        landlock: i64,
    },
    /// It could not start.
    Failed {
        /// The step that failed.
        step: String,
        /// The kernel's error.
        cause: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &[&str]) -> Policy {
        Policy::parse(rules).unwrap()
    }

    #[test]
    fn names_are_let_through_in_one_spelling_only() {
        let policy = policy(&["pypi.org:443", "*.pythonhosted.org:443"]);
        for target in
            ["pypi.org:443", "PyPI.org:443", "files.pythonhosted.org:443", "a.b.pythonhosted.org:443"]
        {
            assert!(
                policy.judge(target, Transport::Tls).is_ok()
                    && policy.judge(target, Transport::PlainHttp).is_err(),
                "{target}"
            );
        }
        for target in [
            "pypi.org:80",
            "pypi.org:4430",
            "pypi.org",
            "pypi.org:",
            "pypi.org:+443",
            "pypi.org.:443",
            "pypi.org.evil.io:443",
            "evilpypi.org:443",
            "pythonhosted.org:443",
            ".pythonhosted.org:443",
            "xpythonhosted.org:443",
            "user@pypi.org:443",
            "pypi.org@evil.io:443",
            "pypi.org\0.evil.io:443",
            "evil.io\0.pypi.org:443",
            "evil.io#pypi.org:443",
            "evil.io/pypi.org:443",
            "[::1]:443",
            "127.0.0.1:443",
            "2130706433:443",
            "0x7f000001:443",
            "0177.0.0.1:443",
            "127.1:443",
            "[::ffff:127.0.0.1]:443",
            "1.2.3.0x4:443",
            "",
            ":443",
            "..:443",
            "-x.org:443",
            "pypi.org:443:443",
            "pypi .org:443",
            "pypi.org:65979",
            "xn--pypi\u{202e}.org:443",
            "pypi\u{3002}org:443",
        ] {
            assert!(policy.judge(target, Transport::Tls).is_err(), "{target:?}");
        }
        assert!(Policy::default().judge("pypi.org:443", Transport::Tls).is_err(), "an empty list denies");
    }

    #[test]
    fn rules_that_mean_too_much_or_nothing_are_refused() {
        for rule in [
            "",
            "pypi.org",
            "*:443",
            "*.org:443",
            "*.:443",
            "pypi.org:0",
            "127.0.0.1:443",
            "pypi.org.:443",
            "a b:1",
            "https://pypi.org:443",
            "pypi.org:443 +private",
            "pypi.org:443+",
            "pypi.org:443+tls",
            "pypi.org:+443",
            "+plain",
        ] {
            assert!(Policy::parse(&[rule]).is_err(), "{rule:?}");
        }
        assert!(policy(&["registry.corp:8443+private"]).0[0].private);
        let both = policy(&["mirror.corp:80+plain+private"]);
        assert!(
            both.0[0].private
                && both.judge("mirror.corp:80", Transport::PlainHttp).is_ok()
                && both.judge("mirror.corp:80", Transport::Tls).is_err()
        );
    }

    #[test]
    fn only_lines_that_the_process_writes_are_decisions() {
        let line = |kind: &str, data: &str| format!(r#"{{"kind":"{kind}","at_us":1,"data":{data}}}"#);
        let denied = Decision::denied("evil.io\u{1b}[2J:443", "no rule names it");
        assert_eq!(denied.to, "evil.io\\u{1b}[2J:443");
        let whole = SpoolLine { kind: DecisionKind::Denied, at_us: 1, data: denied };
        let text = serde_json::to_string(&whole).unwrap();
        assert_eq!(SpoolLine::parse(text.as_bytes()), Some(whole));
        for len in 0..text.len() {
            assert_eq!(SpoolLine::parse(&text.as_bytes()[..len]), None, "cut at {len}");
        }
        for bad in [
            line("body.removed", r#"{"to":"a:1","allowed":true,"why":"x"}"#),
            line("network.allowed", r#"{"to":"a:1","allowed":false,"why":"x"}"#),
            line("network.denied", r#"{"to":"a:1","allowed":true,"why":"x"}"#),
            line("network.allowed", r#"{"to":"a:1","allowed":true,"why":"x","count":2}"#),
            line("network.counted", r#"{"to":"a:1","allowed":true,"why":"x"}"#),
            line("network.allowed", r#"{"to":"\u001b[2J","allowed":true,"why":"x"}"#),
            line("network.allowed", &format!(r#"{{"to":"{}","allowed":true,"why":"x"}}"#, "a".repeat(3000))),
        ] {
            assert_eq!(SpoolLine::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
