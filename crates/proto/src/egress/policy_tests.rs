//! Tests of rules and policies.

use std::collections::BTreeMap;

use super::*;
use crate::egress::{RuleLimit, RuleResponse};

fn policy(rules: &[&str]) -> Policy {
    Policy::parse(rules).unwrap()
}

/// Judges a target as the proxy does.
fn judge(policy: &Policy, target: &str) -> Result<Permit, String> {
    let (name, port) = Policy::target(target)?;
    policy.judge_name(&name, port)
}

#[test]
fn names_are_let_through_in_one_spelling_only() {
    let policy = policy(&["pypi.org:443", "**.pythonhosted.org:443", "*.one.test"]);
    for target in [
        "pypi.org:443",
        "PyPI.org:443",
        "files.pythonhosted.org:443",
        "a.b.pythonhosted.org:443",
        "a.one.test:443",
        "a.one.test:80",
    ] {
        assert!(judge(&policy, target).is_ok(), "{target}");
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
        "a.b.one.test:443",
        "one.test:443",
        "xone.test:443",
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
        assert!(judge(&policy, target).is_err(), "{target:?}");
    }
    assert!(judge(&Policy::default(), "pypi.org:443").is_err(), "an empty list denies");
}

#[test]
fn rules_that_mean_too_much_or_nothing_are_refused() {
    for rule in [
        "",
        "*.org:443",
        "**.org:443",
        "*.:443",
        "**:443",
        "a.*.org:443",
        "pypi.org:0",
        "pypi.org:2-1",
        "pypi.org:1-",
        "pypi.org.:443",
        "a b:1",
        "https://pypi.org:443",
        "pypi.org:443 +private",
        "pypi.org:443+",
        "pypi.org:443+tls+tcp",
        "pypi.org:443+quic",
        "pypi.org:+443",
        "+plain",
        "192.0.2.1/24:443",
        "192.0.2.0/33:443",
        "192.0.2:443",
        "[2001:db8::1:443",
        "2001:db8::1",
    ] {
        assert!(Policy::parse(&[rule]).is_err(), "{rule:?}");
    }
    let many: Vec<String> = (0..=RULES_MAX).map(|nr| format!("a{nr}.test")).collect();
    assert_eq!(Policy::parse(&many), Err(RuleError::TooMany(RULES_MAX + 1)));
}

#[test]
fn a_rule_names_the_protocol_and_what_its_name_may_lead_to() {
    let of = |rule: &str, target: &str| judge(&policy(&[rule]), target).unwrap();
    assert_eq!(of("a.test:443", "a.test:443").protocol, Protocol::Tls);
    assert_eq!(of("a.test", "a.test:80").protocol, Protocol::Http);
    assert_eq!(of("a.test:80+plain", "a.test:80").protocol, Protocol::PlainHttp);
    assert_eq!(of("a.test:5432", "a.test:5432").protocol, Protocol::Tcp);
    assert_eq!(of("a.test:8000-8080+http", "a.test:8040").protocol, Protocol::Http);
    assert_eq!(of("a.test:*", "a.test:443").protocol, Protocol::Tls);
    assert!(of("registry.corp:8443+private", "registry.corp:8443").private);
    assert!(!of("*:*", "a.test:22").private);
}

#[test]
fn addresses_are_named_as_addresses() {
    let policy = policy(&["192.0.2.0/24:5432", "[2001:db8::]/32", "[2001:db8::7]:22", "203.0.113.7:*"]);
    let judge = |address: &str, port| policy.judge_address(address.parse().unwrap(), port).is_ok();
    assert!(judge("192.0.2.255", 5432) && judge("::ffff:192.0.2.9", 5432));
    assert!(judge("2001:db8:1::9", 443) && judge("2001:db8::7", 22) && judge("203.0.113.7", 1));
    for (address, port) in [("192.0.3.0", 5432), ("192.0.2.1", 443), ("2001:db9::", 443), ("203.0.113.8", 1)]
    {
        assert!(!judge(address, port), "{address}:{port}");
    }
    assert!(policy.judge_name("a.test", 443).is_err(), "no name is covered by an address");
    let rules = [EgressRule::allow("*:*"), EgressRule::deny("192.0.2.0/24:*")];
    let policy = Policy::new(&rules).unwrap();
    let denied = |address: &str| policy.denial_of_address(address.parse().unwrap(), 443).is_some();
    assert!(policy.judge_name("a.test", 443).is_ok() && denied("192.0.2.7") && !denied("192.0.3.7"));
    let all = self::policy(&["*", "10.0.0.0/8", "db.corp:443+private"]);
    let private = |address: &str| all.judge_address(address.parse().unwrap(), 443).unwrap().private;
    assert!(private("10.0.0.7") && !private("192.168.0.7"), "only addresses that a rule names");
    let private = |name: &str| all.judge_name(name, 443).unwrap().private;
    assert!(private("db.corp") && !private("a.test"));
}

#[test]
fn a_rule_that_denies_wins() {
    let rules = [
        EgressRule::allow("*"),
        EgressRule::deny("**.evil.test:*").because("it sells data"),
        EgressRule::deny("a.test:80"),
    ];
    let policy = Policy::new(&rules).unwrap();
    assert!(policy.judge_name("good.test", 443).is_ok() && policy.resolves("good.test"));
    let why = policy.judge_name("x.evil.test", 443).unwrap_err();
    assert_eq!(why, "the rule `deny **.evil.test:* (it sells data)` denies x.evil.test:443");
    assert!(!policy.resolves("x.evil.test") && policy.resolves("a.test"));
    assert!(policy.judge_name("a.test", 443).is_ok() && policy.judge_name("a.test", 80).is_err());
    assert!(!Policy::default().resolves("a.test"));
}

#[test]
fn a_rule_that_asks_counts_after_all_others() {
    let rules = |more: &[EgressRule]| {
        let rules =
            [&[EgressRule::ask("*:*").because("new hosts"), EgressRule::allow("a.test")], more].concat();
        Policy::new(&rules).unwrap()
    };
    let policy = rules(&[]);
    assert_eq!(policy.asking_name("b.test", 22).as_deref(), Some("ask *:* (new hosts)"));
    assert!(policy.judge_name("b.test", 22).is_err() && policy.resolves("b.test"));
    assert_eq!((policy.asking_name("a.test", 443), policy.judge_name("a.test", 443).is_ok()), (None, true));
    assert!(policy.asking_address("192.0.2.7".parse().unwrap(), 443).is_some());
    assert_eq!(rules(&[EgressRule::deny("b.test:*")]).asking_name("b.test", 22), None);
    assert_eq!(rules(&[EgressRule::allow("b.test:22")]).asking_name("b.test", 22), None);
    assert!(Policy::new(&[EgressRule::ask("GET a.test/x")]).is_err(), "a connection waits as a whole");
}

#[test]
fn requests_are_judged_by_rules_with_methods_and_paths() {
    let policy = Policy::new(&[
        EgressRule::allow("GET,HEAD api.test/repos/**"),
        EgressRule::allow("POST api.test:443/graphql").because("search"),
        EgressRule::deny("GET api.test/repos/secret/**"),
        EgressRule::allow("free.test"),
        EgressRule::allow("*.pinned.test+tunnel"),
    ])
    .unwrap();
    let permit = policy.judge_name("api.test", 443).unwrap();
    assert!(permit.inspect && permit.protocol == Protocol::Tls);
    assert!(!policy.judge_name("free.test", 443).unwrap().inspect);
    let judge = |method, path| policy.judge_request("api.test", 443, &RequestTarget::new(method, path));
    assert!(judge("GET", "/repos/a").is_ok() && judge("POST", "/graphql").is_ok());
    assert_eq!(
        judge("GET", "/repos/secret/a").unwrap_err(),
        "the rule `deny GET api.test/repos/secret/**` denies GET api.test:443/repos/secret/a"
    );
    assert_eq!(judge("DELETE", "/repos/a").unwrap_err(), "no rule names DELETE api.test:443/repos/a");
    assert!(judge("GET", "/repos/../graphql").is_err());
    let with_secret = policy.clone().inspecting(["free.test", "x.pinned.test"]).unwrap();
    assert!(with_secret.judge_name("free.test", 443).unwrap().inspect);
    assert!(!with_secret.judge_name("free.test", 80).unwrap().inspect, "secrets go over TLS");
    assert!(!with_secret.judge_name("x.pinned.test", 443).unwrap().inspect);
    assert_eq!(with_secret.inspected_names().unwrap(), ["api.test", "free.test", "x.pinned.test"]);
    assert_eq!(Policy::parse(&["GET *:443"]).unwrap().inspected_names(), None);
    assert!(policy.clone().inspecting(["*"]).is_err() && policy.inspecting(["192.0.2.7"]).is_err());
    for bad in
        ["GET ", "get a.test", "GET a.test+tunnel", "a.test/x+tcp", "192.0.2.7:443+inspect", "GET 192.0.2.7"]
    {
        assert!(Policy::parse(&[bad]).is_err(), "{bad}");
    }
}

#[test]
fn headers_of_a_rule_are_checked() {
    let rule = |to: &str, name: &str, value: &str| EgressRule {
        set_headers: [(name.to_owned(), value.to_owned())].into(),
        ..EgressRule::allow(to)
    };
    let policy = Policy::new(&[rule("a.test", "x-team", "agents ${key}")]).unwrap();
    let target = RequestTarget::new("GET", "/");
    assert_eq!(policy.judge_request("a.test", 443, &target).unwrap().set_headers["x-team"], "agents ${key}");
    for (to, name, value) in [
        ("a.test", "host", "b"),
        ("a.test", "Content-Length", "1"),
        ("a.test", "x y", "b"),
        ("a.test", "x", "a\r\nb: c"),
        ("a.test+tunnel", "x", "y"),
        ("a.test:5432+tcp", "x", "y"),
        ("192.0.2.7", "x", "y"),
    ] {
        assert!(matches!(Policy::new(&[rule(to, name, value)]), Err(RuleError::Headers(_))), "{to} {name}");
    }
    let deny = EgressRule { action: RuleAction::Deny, ..rule("a.test", "x", "y") };
    assert!(Policy::new(&[deny]).is_err());
}

#[test]
fn examples_are_checked() {
    let rule = |matches: &[&str], not_match: &[&str]| {
        let owned = |list: &[&str]| list.iter().map(|one| (*one).to_owned()).collect();
        let rule = EgressRule::allow("api.example.org:443");
        Policy::new(&[EgressRule { matches: owned(matches), not_match: owned(not_match), ..rule }])
    };
    rule(&["api.example.org:443"], &["api.example.org.evil.io:443", "api.example.org:80"]).unwrap();
    let wrong = rule(&["api.example.org:80"], &[]).unwrap_err();
    assert_eq!(
        wrong.to_string(),
        "the rule \"api.example.org:443\" should match its example \"api.example.org:80\""
    );
    assert!(rule(&[], &["api.example.org:443"]).is_err());
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// A time in the week of Monday, 2026-01-05.
fn at(day: u64, hour: u64) -> SystemTime {
    std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_767_571_200 + (day * 24 + hour) * 3600)
}

#[test]
fn conditions_fail_closed_in_both_directions() {
    let pages = |action| EgressRule {
        action,
        query: map(&[("page", "[0-9]*")]),
        ..EgressRule::allow("GET a.test:443/list")
    };
    let team =
        |action| EgressRule { action, headers: map(&[("x-team", "a*")]), ..EgressRule::allow("a.test:443") };
    let judge = |rules: &[EgressRule], query: &str, headers: &[(&str, &[u8])]| {
        let policy = Policy::new(rules).unwrap();
        let request = RequestTarget { query: Some(query), headers, ..RequestTarget::new("GET", "/list") };
        policy.judge_request("a.test", 443, &request)
    };
    let (allowing, all) = ([pages(RuleAction::Allow)], EgressRule::allow("a.test:443"));
    let denying = [all.clone(), pages(RuleAction::Deny)];
    for (query, allows, denies) in
        [("page=7", true, true), ("page=x", false, false), ("", false, false), ("page=7&page=x", false, true)]
    {
        assert_eq!(judge(&allowing, query, &[]).is_ok(), allows, "{query}");
        assert_eq!(judge(&denying, query, &[]).is_err(), denies, "{query}");
    }
    let why = judge(&allowing, "page=7;x", &[]).unwrap_err();
    assert_eq!(why, "GET a.test:443/list has a query or headers that servers read differently");
    let (one, two): (&[(&str, &[u8])], _) =
        (&[("X-Team", b"ab")], [("x-team", &b"ab"[..]), ("x-team", b"c")]);
    assert!(judge(&[team(RuleAction::Allow)], "", one).is_ok());
    assert!(judge(&[team(RuleAction::Allow)], "", &two).is_err());
    assert!(judge(&[all.clone(), team(RuleAction::Deny)], "", &two).is_err());
    assert!(judge(&[all, team(RuleAction::Deny)], "", &[]).is_ok());
    let policy = Policy::new(&allowing).unwrap();
    assert!(policy.judge_name("a.test", 443).unwrap().inspect);
    assert_eq!(policy.inspected_names().unwrap(), ["a.test"]);
}

#[test]
fn a_rule_counts_in_its_window_only() {
    let window = |rule: EgressRule| EgressRule { window: Some("mon-fri 08:00-18:00".into()), ..rule };
    let rules = [
        window(EgressRule::allow("a.test:443")),
        window(EgressRule::deny("b.test:*")),
        EgressRule::allow("b.test:443"),
        window(EgressRule::ask("c.test:443")),
    ];
    let policy = Policy::new(&rules).unwrap();
    let (day, night) = (policy.clone().at(at(1, 9)), policy.at(at(1, 19)));
    let names = |policy: &Policy| ["a.test", "b.test"].map(|name| policy.judge_name(name, 443).is_ok());
    assert_eq!((names(&day), names(&night)), ([true, false], [false, true]));
    assert_eq!(
        night.judge_name("a.test", 443).unwrap_err(),
        "the rule `allow a.test:443` counts only in its window mon-fri 08:00-18:00 (UTC)"
    );
    assert!(day.asking_name("c.test", 443).is_some() && night.asking_name("c.test", 443).is_none());
    assert!(night.resolves("a.test"), "a name has an address, so that the reason can be told");
    assert_eq!((day.resolves("b.test"), night.resolves("b.test")), (false, true));
}

#[test]
fn a_rule_answers_or_sends_requests_elsewhere() {
    let response = RuleResponse { status: 200, headers: BTreeMap::new(), body: "hi".into() };
    let rules = [
        EgressRule { respond: Some(response.clone()), ..EgressRule::allow("GET a.test:443/x") },
        EgressRule { forward: Some("B.test:8443".into()), ..EgressRule::allow("a.test:443+private") },
    ];
    let policy = Policy::new(&rules).unwrap();
    let permit = policy.judge_name("a.test", 443).unwrap();
    assert!(permit.inspect && permit.connects_late);
    assert!(!permit.private, "the mark is about the other host");
    let judge = |path| policy.judge_request("a.test", 443, &RequestTarget::new("GET", path)).unwrap();
    assert_eq!(judge("/x").respond, Some(response));
    let host = ForwardHost { name: "b.test".into(), port: 8443, private: true };
    assert_eq!(judge("/y").forward, Some(host.clone()));
    assert_eq!(policy.denial_of_forward(&host), None);
    let denied = Policy::new(&[rules.as_slice(), &[EgressRule::deny("b.test:*")]].concat()).unwrap();
    assert!(denied.denial_of_forward(&host).is_some());
}

#[test]
fn fields_that_mean_nothing_together_are_refused() {
    let allow = || EgressRule::allow("a.test:443");
    let respond = |status, body: &str| RuleResponse { status, headers: BTreeMap::new(), body: body.into() };
    let with = |rule: EgressRule| EgressRule { respond: Some(respond(200, "")), ..rule };
    let limited = |rule: EgressRule, bytes: &str| EgressRule {
        limit: Some(RuleLimit { rate: None, bytes: Some(bytes.into()) }),
        ..rule
    };
    let forward = |to: &str, host: &str| EgressRule { forward: Some(host.into()), ..EgressRule::allow(to) };
    let windowed = |text: &str| EgressRule { window: Some(text.into()), ..allow() };
    for good in [
        with(allow()),
        limited(allow(), "1MiB"),
        forward("a.test:80+plain", "b.test:80"),
        windowed("00:00-24:00"),
    ] {
        assert!(Policy::new(std::slice::from_ref(&good)).is_ok(), "{good:?}");
    }
    for (bad, word) in [
        (with(EgressRule::deny("a.test")), "only a rule that allows"),
        (limited(EgressRule::ask("a.test"), "1MiB"), "only a rule that allows"),
        (
            EgressRule { query: map(&[("a", "b")]), ..EgressRule::ask("a.test") },
            "a connection waits as a whole",
        ),
        (with(EgressRule::allow("a.test:443+tunnel")), "requests that can be read"),
        (forward("a.test:5432+tcp", "b.test:5432"), "requests that can be read"),
        (forward("192.0.2.7:80", "b.test:80"), "requests that can be read"),
        (
            EgressRule { headers: map(&[("x", "y")]), ..EgressRule::allow("a.test+tunnel") },
            "requests that can be read",
        ),
        (
            EgressRule { respond: Some(respond(200, "")), ..forward("a.test", "b.test:80") },
            "exclude each other",
        ),
        (EgressRule { set_headers: map(&[("x", "y")]), ..with(allow()) }, "`set_headers`"),
        (with(limited(allow(), "1MiB")), "budget of bytes"),
        (limited(allow(), "1MB"), "`bytes`"),
        (EgressRule { limit: Some(RuleLimit::default()), ..allow() }, "needs `rate` or `bytes`"),
        (windowed("always"), "`window`"),
        (forward("a.test", "b.test"), "`forward`"),
        (forward("a.test", "192.0.2.7:80"), "`forward`"),
        (forward("a.test", "b.test:0"), "`forward`"),
        (EgressRule { respond: Some(respond(101, "")), ..allow() }, "`status`"),
        (EgressRule { respond: Some(respond(204, "x")), ..allow() }, "has no body"),
        (EgressRule { respond: Some(respond(200, &"x".repeat((64 << 10) + 1))), ..allow() }, "64 KiB"),
        (EgressRule { headers: map(&[("host", "x")]), ..allow() }, "`headers`"),
        (EgressRule { query: map(&[("a", "[")]), ..allow() }, "`query`"),
    ] {
        let refused = Policy::new(std::slice::from_ref(&bad)).unwrap_err().to_string();
        assert!(refused.contains(word), "{bad:?}: {refused}");
    }
    let odd = RuleResponse { headers: map(&[("Content-Length", "1")]), ..respond(200, "") };
    assert!(Policy::new(&[EgressRule { respond: Some(odd), ..allow() }]).is_err());
}

#[test]
fn examples_have_queries() {
    let rule = EgressRule { query: map(&[("page", "?")]), ..EgressRule::allow("a.test:443") };
    let example = |text: &str| Policy::new(&[EgressRule { matches: vec![text.into()], ..rule.clone() }]);
    assert!(example("GET a.test:443/x?page=1").is_ok() && example("GET a.test:443/x?page=12").is_err());
}
