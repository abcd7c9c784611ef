//! Tests of rules and policies.

use super::*;

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
