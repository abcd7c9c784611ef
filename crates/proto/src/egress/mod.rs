//! The egress proxy of a Body: its policy, its decisions, and the messages between it and its supervisor.
//!
//! Trust: a Body chooses the targets, and the process that writes the spool reads a Body's bytes. Both are
//! hostile.

mod ceiling;
mod corporate;
mod limit;
mod peers;
mod policy;
mod request_conditions;
mod request_match;
mod rule;
mod rule_reader;
mod secret;
mod trust_store;
mod window;

use std::{
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};

use crate::BodyName;
pub use ceiling::CEILING;
pub use corporate::{CorporateLogin, CorporateProxyOrder, read_no_proxy, read_proxy_url};
pub use limit::{ByteBudget, RequestRate, RuleBudget};
pub use peers::{
    ACCEPT_MAX, AcceptError, AcceptList, AcceptRule, BODY_DOMAIN, BodyIdentity, PEER_LINE_LEN_MAX, PEERS,
    PeerAnswer, PeerCall, PeerRefusal, PeerRequest, body_label, is_body_domain, no_such_body,
};
pub use policy::{ForwardHost, Permit, PermitTerms, Policy, Protocol, RULES_MAX, RequestPermit};
pub use request_match::{RequestPattern, RequestTarget};
pub use rule::{EgressRule, RuleAction, RuleError, RuleLimit, RuleResponse};
pub use rule_reader::{canonical_name, is_secret_host};
pub use secret::{
    AuthorityOrder, EgressSecret, PLACEHOLDER_MARK, SECRETS_MAX, SecretFields, SshKeyOrder, SshLogin,
    is_placeholder_byte,
};
pub use trust_store::java_trust_store;

/// Most characters of a target or a reason that are kept.
const SHOWN_LEN_MAX: usize = 200;

/// The process name of the egress proxy. Under this name `pal-launch` becomes the proxy.
pub const PROGRAM: &str = "pal-egress";
/// The proxy's socket, in the directory that the Body sees. It also speaks the protocol of ssh agents.
pub const SOCKET: &str = "egress.sock";
/// The part of the proxy's directory that the Body sees.
pub const SHARED: &str = "shared";
/// The certificates that programs of the Body trust, in that part.
pub const CERTIFICATES: &str = "certificates.pem";
/// The same certificates for Java, beside that file.
pub const JAVA_CERTIFICATES: &str = "certificates.p12";
/// The file in the data directory with the key of sealed values.
pub const SECRETS_KEY: &str = "secrets.key";
/// The spool of decisions, in the proxy's directory.
pub const SPOOL: &str = "events";
/// The newest orders of the proxy, in its directory: `pal` writes them before it sends them, and the supervisor gives them
/// to a proxy that it restarts.
pub const ORDERS: &str = "policy.json";
/// The socket on which the proxy takes new orders from `pal`, in its directory.
pub const CONTROL: &str = "control.sock";
/// Longest orders, answer or control message.
pub const MESSAGE_LEN_MAX: u64 = 1 << 20;

/// The argument that tells `pal-egress` that four more descriptors follow: [`RedirectSocket::ALL`].
pub const TRANSPARENT: &str = "transparent";
/// The port on the Body's loopback to which the kernel redirects every TCP connection that a program makes to another
/// host.
pub const REDIRECT_PORT: u16 = 15001;
/// The first of the addresses that stand for names: 198.18.0.0/15, which no host of the Internet has.
pub const NAMED_FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// The number of leading bits that these addresses share.
pub const NAMED_BITS: u8 = 15;
/// The target of a CONNECT request, with which the guest of a microVM reaches the proxy's resolver: DNS messages follow,
/// each behind its length, as over TCP.
pub const RESOLVER: &str = "resolver.palisade.invalid:53";

/// A socket in the Body's network namespace that the proxy holds, in the order in which the supervisor sends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedirectSocket {
    /// Listens on 127.0.0.1 at [`REDIRECT_PORT`].
    Tcp4,
    /// Listens on ::1 at [`REDIRECT_PORT`].
    Tcp6,
    /// DNS over UDP on 127.0.0.1:53.
    DnsUdp,
    /// Listens for DNS over TCP on 127.0.0.1:53.
    DnsTcp,
}

impl RedirectSocket {
    /// All of them, in the order of their descriptors.
    pub const ALL: [Self; 4] = [Self::Tcp4, Self::Tcp6, Self::DnsUdp, Self::DnsTcp];
}

/// Whether an address stands for a name.
pub fn is_named_address(address: Ipv4Addr) -> bool {
    let mask = u32::MAX << (32 - NAMED_BITS);
    address.to_bits() & mask == NAMED_FIRST.to_bits()
}
/// Longest line of the spool. A target and a reason have at most 200 characters each, and an escaped one at most 12 bytes.
pub const LINE_LEN_MAX: usize = 8 << 10;

/// The beginning of the reason for a refused name that a rule allows, but that no name server resolves.
pub const NOT_RESOLVED: &str = "its name cannot be resolved";
/// The reason for a refused name that a rule allows, but that accepts no connection.
pub const NOT_ACCEPTED: &str = "no address of it accepts the connection";

/// The beginning of the reason for a refused name that a rule allows, but to which the corporate proxy opens no connection.
pub const NOT_PROXIED: &str = "the corporate proxy";

/// The beginning of the reason for a connection that waited for a decision in vain.
pub const NO_ANSWER: &str = "no answer came in time to the rule";

/// The end of the reason for a connection that waits for a decision.
pub const WAITS: &str = "waits for a decision";

/// Whether a reason says that a rule allows the name, and that it still could not be reached.
pub fn is_unreachable(why: &str) -> bool {
    why.starts_with(NOT_RESOLVED) || why.starts_with(NOT_PROXIED) || why == NOT_ACCEPTED
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
    /// The resolver gave a name an address that stands for it.
    #[serde(rename = "network.named")]
    Named,
    /// A connection waits for a change of the policy.
    #[serde(rename = "network.asked")]
    Asked,
    /// The proxy is about to forward bytes of a rule with a budget.
    #[serde(rename = "network.spent")]
    Spent,
}

impl DecisionKind {
    /// The event's type.
    pub fn event(self) -> &'static str {
        match self {
            Self::Allowed => "network.allowed",
            Self::Denied => "network.denied",
            Self::Counted => "network.counted",
            Self::Named => "network.named",
            Self::Asked => "network.asked",
            Self::Spent => "network.spent",
        }
    }
}

/// A decision about connections of a Body: the data of its event.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// The address that stands for the name; only where the resolver gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// The bytes that a rule has spent of its budget, where they are recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spent: Option<SpentBytes>,
    /// The name or id of the Body that connected, if another Body did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<BodyName>,
}

/// The bytes that a rule has spent.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SpentBytes {
    /// The key of its budget: [`RuleBudget::key`].
    pub key: String,
    /// How many bytes, at most.
    pub bytes: u64,
}

impl Decision {
    /// A decision that allows a connection.
    pub fn allowed(to: &str, why: &str) -> Self {
        Self { to: fit_to_show(to), allowed: true, why: fit_to_show(why), ..Self::default() }
    }

    /// The resolver's choice of the address that stands for a name.
    pub fn named(name: &str, address: IpAddr) -> Self {
        Self { address: Some(address), ..Self::allowed(name, "a rule names it") }
    }

    /// The bytes that a rule has spent of its budget.
    pub fn spent(budget: &RuleBudget, bytes: u64) -> Self {
        let of = budget.bytes.as_ref().map_or("", |budget| &budget.text);
        let spent = Some(SpentBytes { key: budget.key.clone(), bytes });
        Self { spent, ..Self::allowed(&budget.rule, &format!("its budget of bytes is {of}")) }
    }

    /// A decision that denies a connection.
    pub fn denied(to: &str, why: &str) -> Self {
        Self { to: fit_to_show(to), allowed: false, why: fit_to_show(why), ..Self::default() }
    }

    /// The decision about a connection that another Body made.
    #[must_use]
    pub fn of_peer(self, from: &BodyIdentity) -> Self {
        Self { from: from.label().parse().ok(), ..self }
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
            DecisionKind::Denied | DecisionKind::Asked => !line.data.allowed && line.data.count.is_none(),
            DecisionKind::Counted => line.data.count.is_some(),
            DecisionKind::Spent => {
                let is_key = |key: &str| key.len() == 32 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
                let spent = line.data.spent.as_ref().is_some_and(|spent| is_key(&spent.key));
                spent && line.data.allowed && line.data.count.is_none()
            }
            DecisionKind::Named => {
                let name = canonical_name(&line.data.to).is_some_and(|name| name == line.data.to);
                name && line.data.allowed && line.data.address.is_some() && line.data.count.is_none()
            }
        };
        let sound = sound && (line.data.address.is_none() || line.kind == DecisionKind::Named);
        let sound = sound && (line.data.spent.is_none() || line.kind == DecisionKind::Spent);
        let is_of_peer =
            matches!(line.kind, DecisionKind::Allowed | DecisionKind::Denied | DecisionKind::Counted);
        let sound = sound && (line.data.from.is_none() || is_of_peer);
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

/// The orders of a `pal-egress`. The supervisor sends them at its start, after these descriptors: the listening socket, the
/// spool, the pidfd of the Body's first process, the control listener, the listener for other Bodies, and with
/// [`TRANSPARENT`] the redirected sockets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressOrders {
    /// The rules of the policy.
    #[serde(default)]
    pub rules: Vec<EgressRule>,
    /// The number of the policy: each change has the next one.
    #[serde(default)]
    pub generation: u64,
    /// When a decision counts as recorded.
    pub flush: Flush,
    /// The secrets that the Body may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<EgressSecret>,
    /// The keys of ssh that the Body may use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ssh_keys: Vec<SshKeyOrder>,
    /// The authority whose certificates the proxy shows for inspected names; none if it inspects none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<AuthorityOrder>,
    /// The Body itself; without it the proxy takes and makes no connections from Body to Body.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<BodyIdentity>,
    /// The other Bodies that may connect, each as `BODY:PORTS`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accept: Vec<String>,
    /// The ceiling of the key that owns the Body: every connection must be allowed by these rules, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Vec<EgressRule>>,
    /// The proxy of the operator's network; without it the egress process connects to hosts directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corporate_proxy: Option<CorporateProxyOrder>,
}

impl EgressOrders {
    /// Orders without secrets.
    pub fn new(rules: Vec<EgressRule>, generation: u64, flush: Flush) -> Self {
        Self {
            rules,
            generation,
            flush,
            secrets: Vec::new(),
            ssh_keys: Vec::new(),
            authority: None,
            body: None,
            accept: Vec::new(),
            ceiling: None,
            corporate_proxy: None,
        }
    }

    /// The policy, with the hosts of the secrets, below the ceiling.
    pub fn policy(&self) -> Result<Policy, RuleError> {
        let hosts = self.secrets.iter().flat_map(|secret| &secret.hosts);
        Policy::new(&self.rules)?.inspecting(hosts)?.below(self.ceiling.as_deref())
    }
}

/// The first message of the supervisor to a new `pal-egress`.
#[derive(Clone, Serialize, Deserialize)]
pub struct EgressStart {
    /// The newest orders.
    pub orders: EgressOrders,
    /// The key that opens the sealed parts of these and of later orders, in hexadecimal; none where the data directory has
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The file of the certificates that this host trusts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bundle: Option<PathBuf>,
}

/// A message of `pal` to a running `pal-egress`, one line on a connection to [`CONTROL`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EgressControl {
    /// Replace the policy, and close the connections that it no longer allows.
    Replace(Box<EgressOrders>),
    /// Report the state.
    Status,
}

/// The answer to a control message, one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EgressReply {
    /// The state, after the change if the message asked for one.
    State {
        /// The number of the policy in force.
        generation: u64,
        /// The connections that are open.
        open: usize,
        /// The connections that the change closed.
        closed: usize,
    },
    /// The orders cannot be used, and nothing changed.
    Refused {
        /// The reason.
        why: String,
    },
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
