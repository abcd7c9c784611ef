//! `pal net`: the policy of a Body, shown, changed and tested.

use serde_json::{Value, json};

use crate::cli_test;

fn object(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

cli_test! {
    /// A policy is shown with its reasons, tested without a connection, and kept over a stop and a start.
    fn a_policy_is_changed_and_kept(pal) {
        let body = pal.ok("create");
        let shown = pal.line(&format!("net show {body}"));
        assert_eq!((shown.code, shown.out.as_str()), (0, ""));
        assert!(shown.talk.contains("reaches only itself"), "{shown:?}");
        let denied = pal.line(&format!("net test {body} pypi.org:443"));
        assert_eq!((denied.code, denied.out.as_str()), (1, "denied: pypi.org:443: no rule names pypi.org:443\n"));
        assert!(denied.talk.contains(&format!("pal net allow {body} 'pypi.org:443'")), "{denied:?}");
        // A Body that runs without a policy has no process that could get one.
        let first = object(&pal.ok(&format!("net allow {body} pypi.org:443 --json")));
        assert_eq!((&first["in_force"], &first["generation"]), (&json!("at_next_start"), &json!(1)));
        let later = pal.line(&format!("net deny {body} **.evil.test:*"));
        assert!(later.talk.contains("pal stop"), "{later:?}");
        assert_eq!(
            pal.line(&format!("net show {body}")).out,
            "ACTION  TO\ndeny    **.evil.test:*\nallow   pypi.org:443\n"
        );
        let allowed = pal.line(&format!("net test {body} pypi.org"));
        assert_eq!((allowed.code, allowed.out.as_str()), (0, "allowed: pypi.org:443: allow pypi.org:443\n"));
        let evil = object(&pal.line(&format!("net test {body} x.evil.test:1 --json")).out);
        assert_eq!((&evil["allowed"], evil.get("allow")), (&json!(false), None));
        pal.ok(&format!("stop --grace 0s {body}"));
        pal.ok(&format!("start {body}"));
        let shown = object(&pal.ok(&format!("net show {body} --json")));
        assert_eq!((&shown["in_force"], &shown["open"]), (&json!("now"), &json!(0)), "{shown}");
        // The process that runs now gets a change at once.
        let changed = object(&pal.ok(&format!("net allow {body} **.evil.test:* --json")));
        assert_eq!((&changed["in_force"], &changed["generation"]), (&json!("now"), &json!(3)));
        let changes: Vec<Value> = pal
            .events()
            .into_iter()
            .filter(|event| event["type"] == "network.changed")
            .map(|event| event["data"]["generation"].clone())
            .collect();
        assert_eq!(changes, [1, 2, 3]);
        let env = pal.ok(&format!("exec {body} -- /bin/sh -c env"));
        assert!(env.contains("https_proxy=http://127.0.0.1:"), "{env}");
        assert_eq!(object(&pal.ok(&format!("net learn {body} --json")))["wanted"], json!([]));
        // A fork has the policy; a Body from a snapshot has none.
        let fork = pal.ok(&format!("fork {body}"));
        assert_eq!(object(&pal.ok(&format!("net show {fork} --json")))["rules"], changed["rules"]);
        let snapshot = pal.ok(&format!("snapshot {body}"));
        let other = pal.ok(&format!("create --template {snapshot}"));
        assert_eq!(object(&pal.ok(&format!("net show {other} --json")))["policy"], false);
        for id in [body, fork, other] {
            pal.ok(&format!("rm --force {id}"));
        }
        pal.ok(&format!("snapshot rm {snapshot}"));
    }
}

cli_test! {
    /// An open network is a warning; a mistake is a usage error that names it.
    fn an_open_network_is_said_loudly(pal) {
        let body = pal.line("create --net open,registries --deny **.evil.test:*");
        assert_eq!(body.code, 0, "{body:?}");
        assert!(body.talk.contains("warning: OPEN NETWORK: the rule `*:*`"), "{body:?}");
        pal.ok(&format!("rm --force {}", body.out.trim_end()));
        for (bad, said) in [
            ("create --net registry", "there is no network preset \"registry\""),
            ("create --allow https://pypi.org", "is not a rule"),
            ("create --net closed,open", "excludes other presets"),
            ("net test nobody pypi.org", "nobody"),
        ] {
            let refused = pal.line(bad);
            assert!(refused.code >= 2 && refused.talk.contains(said), "{bad}: {refused:?}");
        }
    }
}
