//! The ceiling of a policy: rules of the operator for all Bodies of a key.
//!
//! Invariant: what a policy below a ceiling permits, both the policy and the ceiling permit; the stricter of two
//! protocols counts. Rules are never compared with each other, only judged one after the other.

use super::{EgressRule, Permit, Policy, Protocol, RequestPermit, RuleError};

/// The beginning of the reason for a target that the ceiling does not allow.
pub const CEILING: &str = "the ceiling of the key that owns the Body";

impl Policy {
    /// The policy below a ceiling, if there is one.
    pub fn below(mut self, ceiling: Option<&[EgressRule]>) -> Result<Self, RuleError> {
        self.ceiling = ceiling.map(Self::new).transpose()?.map(Box::new);
        Ok(self)
    }

    /// Whether the ceiling passes a test; without a ceiling it does.
    pub(super) fn ceiling_has(&self, test: impl FnOnce(&Self) -> bool) -> bool {
        self.ceiling.as_deref().is_none_or(test)
    }

    /// The permission that a connection has below the ceiling.
    pub(super) fn permit_below(
        &self,
        own: Permit,
        judge: impl FnOnce(&Self) -> Result<Permit, String>,
    ) -> Result<Permit, String> {
        let Some(ceiling) = self.ceiling.as_deref() else { return Ok(own) };
        let above = judge(ceiling).map_err(|why| format!("{CEILING}: {why}"))?;
        let protocol = stricter(own.protocol, above.protocol)
            .ok_or_else(|| format!("{CEILING}: the rule `{}` means another protocol", above.rule))?;
        let (private, inspect) = (own.private && above.private, own.inspect || above.inspect);
        Ok(Permit { protocol, private, inspect, ..own })
    }

    /// The permission that a request has below the ceiling.
    pub(super) fn request_below(
        &self,
        own: RequestPermit,
        judge: impl FnOnce(&Self) -> Result<RequestPermit, String>,
    ) -> Result<RequestPermit, String> {
        match self.ceiling.as_deref() {
            None => Ok(own),
            Some(ceiling) => judge(ceiling).map(|_| own).map_err(|why| format!("{CEILING}: {why}")),
        }
    }
}

/// The protocol that satisfies both, if one does.
fn stricter(one: Protocol, other: Protocol) -> Option<Protocol> {
    match (one, other) {
        (one, other) if one == other => Some(one),
        (Protocol::Tcp, other) | (other, Protocol::Tcp) => Some(other),
        (Protocol::Http | Protocol::PlainHttp, Protocol::Http | Protocol::PlainHttp) => {
            Some(Protocol::PlainHttp)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::{ForwardHost, RequestTarget};

    fn rules(texts: &[&str]) -> Vec<EgressRule> {
        let rule = |text: &&str| match text.strip_prefix('!') {
            Some(text) => EgressRule::deny(text),
            None => EgressRule::allow(*text),
        };
        texts.iter().map(rule).collect()
    }

    fn policy(own: &[&str], ceiling: &[&str]) -> Policy {
        Policy::new(&rules(own)).unwrap().below(Some(&rules(ceiling))).unwrap()
    }

    #[test]
    fn a_connection_needs_the_policy_and_the_ceiling() {
        let both =
            policy(&["a.test:443", "b.test:443", "**.c.test:*"], &["a.test", "*.c.test:1-9", "!x.c.test:*"]);
        assert!(both.judge_name("a.test", 443).is_ok() && both.judge_name("y.c.test", 9).is_ok());
        for (name, port, why) in [
            ("a.test", 80, "no rule names a.test:80"),
            ("b.test", 443, "the ceiling of the key that owns the Body: no rule names b.test:443"),
            ("y.c.test", 10, "the ceiling of the key that owns the Body: no rule names y.c.test:10"),
            (
                "x.c.test",
                9,
                "the ceiling of the key that owns the Body: the rule `deny x.c.test:*` denies x.c.test:9",
            ),
        ] {
            assert_eq!(both.judge_name(name, port).unwrap_err(), why, "{name}");
        }
        assert!(both.resolves("a.test") && !both.resolves("b.test") && !both.resolves("x.c.test"));
        let addresses = policy(&["*:*"], &["192.0.2.0/24:*", "d.test:*", "!192.0.2.7:*"]);
        assert!(addresses.judge_address([192, 0, 2, 8].into(), 1).is_ok());
        assert!(addresses.judge_address([192, 0, 2, 7].into(), 1).is_err());
        assert!(addresses.judge_address([192, 0, 3, 1].into(), 1).is_err());
        assert!(addresses.denial_of_address([192, 0, 2, 7].into(), 1).is_some(), "of a name, too");
        assert!(policy(&["*:*"], &[]).judge_name("a.test", 443).is_err(), "an empty ceiling allows nothing");
    }

    #[test]
    fn the_stricter_permission_counts() {
        let permit = |own: &str, ceiling: &str, port| policy(&[own], &[ceiling]).judge_name("a.test", port);
        let protocol =
            |own: &str, ceiling: &str, port| permit(own, ceiling, port).map(|permit| permit.protocol);
        assert_eq!(protocol("a.test:443+tcp", "*:*", 443), Ok(Protocol::Tls));
        assert_eq!(protocol("a.test:443", "*:*+tcp", 443), Ok(Protocol::Tls));
        assert_eq!(protocol("a.test:80", "a.test:80+plain", 80), Ok(Protocol::PlainHttp));
        assert!(protocol("a.test:80+tls", "a.test:80", 80).unwrap_err().contains("another protocol"));
        let private = |own: &str, ceiling: &str| permit(own, ceiling, 443).unwrap().private;
        assert!(private("a.test+private", "*:*+private"));
        assert!(!private("a.test+private", "*:*") && !private("a.test", "*:*+private"));
        assert!(
            permit("a.test:443+tunnel", "GET a.test:443/x", 443).unwrap().inspect,
            "in spite of `+tunnel`"
        );
    }

    #[test]
    fn a_request_needs_both_and_certificates_are_for_both() {
        let both = policy(&["a.test:443"], &["GET a.test:443/repos/**"]);
        let judge = |method, path| both.judge_request("a.test", 443, &RequestTarget::new(method, path));
        assert_eq!(judge("GET", "/repos/x").unwrap().rule, "allow a.test:443");
        assert!(judge("POST", "/repos/x").unwrap_err().starts_with(CEILING));
        assert!(judge("GET", "/other").is_err());
        assert_eq!(both.inspected_names().unwrap(), ["a.test"]);
        assert_eq!(policy(&["a.test"], &["GET *:443"]).inspected_names(), None);
    }

    #[test]
    fn requests_are_forwarded_only_to_hosts_that_the_ceiling_allows() {
        let host = |name: &str, private| ForwardHost { name: name.into(), port: 443, private };
        let both = policy(&["*:*"], &["b.test:443", "GET c.test:443/x"]);
        assert_eq!(both.denial_of_forward(&host("b.test", false)), None);
        for (host, part) in [
            (host("evil.test", false), "no rule names evil.test:443"),
            (host("c.test", false), "only some requests"),
            (host("b.test", true), "no private address"),
        ] {
            let why = both.denial_of_forward(&host).unwrap();
            assert!(why.starts_with(CEILING) && why.contains(part), "{why}");
        }
        assert_eq!(Policy::new(&[]).unwrap().denial_of_forward(&host("evil.test", true)), None);
    }

    #[test]
    fn a_question_about_a_target_that_the_ceiling_denies_is_not_asked() {
        let own = [EgressRule::ask("*:*")];
        let both = Policy::new(&own).unwrap().below(Some(&rules(&["a.test"]))).unwrap();
        assert!(both.asking_name("a.test", 443).is_some() && both.asking_name("b.test", 443).is_none());
        assert!(both.asking_address([192, 0, 2, 1].into(), 443).is_none());
    }
}
