//! Connections from Body to Body: their names, the rules by which a Body accepts them, and the messages about them.
//!
//! A program in the Body `app` connects to `db.body.internal:5432`. The policy of `app` must allow that name, and the
//! policy of `db` must accept `app` on that port.
//!
//! ```text
//! app's pal-egress ──PeerRequest──▶ app's supervisor ──connects, PeerCall──▶ db's pal-egress (peers.sock)
//!                  ◀─descriptor───                                                  │ judges, records
//! db's pal-egress  ──PeerRequest──▶ db's supervisor ──connects──▶ db's guest ──▶ port 5432 in db
//! ```
//! The supervisors find the Body, and only they know the tokens of guests.
//!
//! Invariant: a name stands for Bodies of one owner only. Between Bodies of two owners both policies must name the other
//! Body by its id, which no other Body ever gets.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{EgressRule, REDIRECT_PORT, fit_to_show};
use crate::{BodyId, BodyName, guest::EGRESS_PORT};

/// The domain of Bodies: the name or id of a Body is one label in front of it.
pub const BODY_DOMAIN: &str = "body.internal";
/// The socket on which the egress process of a Body takes connections of other Bodies, in its directory.
pub const PEERS: &str = "peers.sock";
/// Most rules by which a Body accepts connections.
pub const ACCEPT_MAX: usize = 256;
/// Longest message about a connection from Body to Body.
pub const PEER_LINE_LEN_MAX: usize = 4 << 10;

/// Ports in a Body that belong to Palisade: its resolver, its proxy, and the redirected connections.
const OWN_PORTS: [u16; 3] = [53, EGRESS_PORT, REDIRECT_PORT];

/// Whether a name in its canonical spelling is one of the domain of Bodies.
pub fn is_body_domain(name: &str) -> bool {
    name.strip_suffix(BODY_DOMAIN).is_some_and(|front| front.is_empty() || front.ends_with('.'))
}

impl EgressRule {
    /// Whether the rule is about other Bodies, and about nothing else.
    pub fn is_about_bodies(&self) -> bool {
        let place = self.host_and_ports();
        let host = place.rsplit_once(':').map_or(place, |(host, _)| host);
        is_body_domain(&host.to_ascii_lowercase())
    }
}

/// The name or id of the Body that a name in the domain of Bodies means.
pub fn body_label(name: &str) -> Option<BodyName> {
    name.strip_suffix(BODY_DOMAIN)?.strip_suffix('.')?.parse().ok()
}

/// The reason for a Body that cannot be reached, whether it does not exist, does not run or belongs to another owner.
pub fn no_such_body(label: &BodyName) -> String {
    format!("no Body that you may reach by this name runs and accepts connections: {label}")
}

/// A Body, as the rules of another one know it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BodyIdentity {
    /// Its id.
    pub id: BodyId,
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<BodyName>,
    /// The API key that owns it; none if it belongs to the operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

impl BodyIdentity {
    /// Its name, or its id if it has none.
    pub fn label(&self) -> &str {
        self.name.as_ref().map_or(self.id.as_str(), BodyName::as_str)
    }
}

/// A connection of a Body to a port of another one: the first line on a connection to [`PEERS`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerCall {
    /// The Body that connects.
    pub from: BodyIdentity,
    /// The name or id by which it calls the other one.
    pub to: BodyName,
    /// The port.
    pub port: u16,
}

/// The answer to a [`PeerCall`], one line. After [`PeerAnswer::Ready`] the bytes of the program behind the port follow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerAnswer {
    /// The connection is open.
    Ready,
    /// It is not.
    Refused {
        /// The reason.
        why: String,
        /// Whether the policies allow it, and the port does not answer.
        unreachable: bool,
    },
}

/// A request of `pal-egress` to its supervisor, one line. The answer is a descriptor, or a line with a [`PeerRefusal`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerRequest {
    /// Connect to the egress process of another Body, and send it the [`PeerCall`].
    Body {
        /// The name or id of the other Body.
        to: BodyName,
        /// The port there.
        port: u16,
    },
    /// Connect to the guest of the own Body, and ask it for a port.
    Own {
        /// The port.
        port: u16,
    },
}

/// Why a supervisor does not connect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerRefusal {
    /// The reason.
    pub why: String,
}

/// A rule that cannot be used.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum AcceptError {
    /// The text is not a rule.
    #[error(
        "{0:?} does not say which Body may connect: write its name or id and a port, such as `app:5432`, `app:8000-8080` or `app:*`"
    )]
    Syntax(String),
    /// The port belongs to Palisade.
    #[error("{0:?} names a port of Palisade itself, which no other Body reaches")]
    OwnPort(String),
    /// The list is too long.
    #[error("{0} Bodies to accept; a policy has at most {ACCEPT_MAX}")]
    TooMany(usize),
}

/// A rule by which a Body accepts connections: `BODY:PORTS`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcceptRule {
    from: BodyName,
    first: u16,
    last: u16,
}

impl FromStr for AcceptRule {
    type Err = AcceptError;

    fn from_str(text: &str) -> Result<Self, AcceptError> {
        let syntax = || AcceptError::Syntax(fit_to_show(text));
        let (from, ports) = text.split_once(':').ok_or_else(syntax)?;
        let port = |digits: &str| {
            let is_plain = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
            digits.parse::<u16>().ok().filter(|_| is_plain)
        };
        let (first, last) = match ports {
            "*" => (Some(1), Some(u16::MAX)),
            ports => {
                let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
                (port(first), port(last))
            }
        };
        let (first, last) = first.zip(last).filter(|(first, last)| first <= last).ok_or_else(syntax)?;
        if first == last && OWN_PORTS.contains(&first) {
            return Err(AcceptError::OwnPort(fit_to_show(text)));
        }
        Ok(Self { from: from.parse().map_err(|_| syntax())?, first, last })
    }
}

/// The rules by which a Body accepts connections of others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AcceptList(Vec<AcceptRule>);

impl AcceptList {
    /// Reads the rules.
    pub fn new<S: AsRef<str>>(rules: &[S]) -> Result<Self, AcceptError> {
        if rules.len() > ACCEPT_MAX {
            return Err(AcceptError::TooMany(rules.len()));
        }
        rules.iter().map(|rule| rule.as_ref().parse()).collect::<Result<_, _>>().map(Self)
    }

    /// The names and ids of the Bodies in it.
    pub fn bodies(&self) -> impl Iterator<Item = &BodyName> {
        self.0.iter().map(|rule| &rule.from)
    }

    /// Whether some Body may connect to a port.
    pub fn has_port(&self, port: u16) -> bool {
        self.0.iter().any(|rule| rule.has_port(port))
    }

    /// Whether the Body `own` accepts a connection, or the reason why not.
    pub fn judge(&self, own: &BodyIdentity, call: &PeerCall) -> Result<(), String> {
        let is_same_owner = own.owner == call.from.owner;
        if !is_same_owner && call.to.as_str() != own.id.as_str() {
            return Err(no_such_body(&call.to));
        }
        let names = |rule: &&AcceptRule| {
            let is_name = is_same_owner && call.from.name.as_ref() == Some(&rule.from);
            is_name || rule.from.as_str() == call.from.id.as_str()
        };
        let (from, port) = (call.from.label(), call.port);
        match self.0.iter().filter(names).any(|rule| rule.has_port(port)) {
            true => Ok(()),
            false if !is_same_owner => Err(no_such_body(&call.to)),
            false if OWN_PORTS.contains(&port) => {
                Err(format!("port {port} of every Body belongs to Palisade"))
            }
            false => Err(format!(
                "{to} does not accept {from} on port {port}: pal net accept {to} {from}:{port}",
                to = call.to
            )),
        }
    }
}

impl AcceptRule {
    fn has_port(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port) && !OWN_PORTS.contains(&port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(id: &str, name: Option<&str>, owner: Option<&str>) -> BodyIdentity {
        BodyIdentity {
            id: id.parse().unwrap(),
            name: name.map(|name| name.parse().unwrap()),
            owner: owner.map(str::to_owned),
        }
    }

    #[test]
    fn a_name_below_the_domain_is_a_body() {
        assert_eq!(body_label("db.body.internal").unwrap().as_str(), "db");
        for other in ["body.internal", "a.b.body.internal", ".body.internal", "-.body.internal"] {
            assert!(is_body_domain(other) && body_label(other).is_none(), "{other}");
        }
        for other in ["xbody.internal", "internal", "body.internal.test", "db.body.internal.test"] {
            assert!(!is_body_domain(other) && body_label(other).is_none(), "{other}");
        }
        for rule in
            ["db.body.internal:5432", "GET DB.Body.Internal/x", "**.body.internal:*+tcp", "body.internal"]
        {
            assert!(EgressRule::allow(rule).is_about_bodies(), "{rule}");
        }
        for rule in ["*:*", "*.internal:1", "a.test/db.body.internal", "[::1]:80"] {
            assert!(!EgressRule::allow(rule).is_about_bodies(), "{rule}");
        }
    }

    #[test]
    fn a_rule_names_a_body_and_ports() {
        for good in ["app:5432", "app:1-65535", "app:*", "k3v9:80", "a-1:3000-4000"] {
            assert!(good.parse::<AcceptRule>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "app",
            "app:",
            ":5432",
            "app:0",
            "app:05",
            "app:70000",
            "app:9-1",
            "app:1-",
            "app:+1",
            "APP:1",
            "*:1",
            "app.x:1",
            "app:1:2",
            "app:*-*",
            "app:53",
            "app:3128",
            "app:15001",
        ] {
            assert!(bad.parse::<AcceptRule>().is_err(), "{bad}");
        }
        assert!(AcceptList::new(&vec!["app:1"; ACCEPT_MAX]).is_ok());
        assert_eq!(
            AcceptList::new(&vec!["app:1"; ACCEPT_MAX + 1]),
            Err(AcceptError::TooMany(ACCEPT_MAX + 1))
        );
    }

    #[test]
    fn names_count_among_the_bodies_of_one_owner_and_ids_everywhere() {
        let judge = |rules: &[&str], own: &BodyIdentity, from: &BodyIdentity, to: &str, port| {
            let call = PeerCall { from: from.clone(), to: to.parse().unwrap(), port };
            AcceptList::new(rules).unwrap().judge(own, &call)
        };
        let (db, app) = (body("db1", Some("db"), None), body("app1", Some("app"), None));
        assert_eq!(judge(&["app:5432"], &db, &app, "db", 5432), Ok(()));
        assert_eq!(judge(&["app1:5432"], &db, &app, "db1", 5432), Ok(()));
        for rules in [&["app:5433"][..], &["other:5432"], &[]] {
            let why = judge(rules, &db, &app, "db", 5432).unwrap_err();
            assert!(why.contains("pal net accept db app:5432"), "{why}");
        }
        // A Body of another owner that took the name of the accepted one, or of the called one.
        let thief = body("zzz1", Some("app"), Some("key"));
        let no_body = Err(no_such_body(&"db".parse().unwrap()));
        assert_eq!(judge(&["app:*"], &db, &thief, "db", 5432), no_body);
        assert_eq!(judge(&["app:*"], &db, &thief, "db1", 5432), Err(no_such_body(&"db1".parse().unwrap())));
        let fake = body("zzz2", Some("db"), Some("key"));
        assert_eq!(judge(&["app:*", "app1:*"], &fake, &app, "db", 5432), no_body);
        // A name that is spelt like the id of an accepted Body is no id.
        let spelt = body("zzz3", Some("app1"), Some("key"));
        assert!(judge(&["app1:*"], &db, &spelt, "db1", 5432).is_err());
        // Between owners both sides name the id.
        let (mine, yours) = (body("m1", Some("m"), Some("one")), body("y1", Some("y"), Some("two")));
        assert_eq!(judge(&["y1:80"], &mine, &yours, "m1", 80), Ok(()));
        assert!(judge(&["y1:80"], &mine, &yours, "m", 80).is_err());
        // The ports of Palisade are in no range.
        for port in OWN_PORTS {
            assert!(judge(&["app:*"], &db, &app, "db", port).is_err(), "{port}");
        }
    }
}
