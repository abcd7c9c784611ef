//! Tests of rules with conditions, budgets, answers of their own and other hosts, on inspected connections.

use std::collections::BTreeMap;

use proto::egress::{RuleLimit, RuleResponse};

use super::*;

fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[tokio::test]
async fn conditions_on_queries_and_headers_are_judged() {
    local(async {
        let paged = EgressRule {
            query: pairs(&[("page", "[0-9]*")]),
            headers: pairs(&[("x-team", "agents")]),
            ..EgressRule::allow("localhost:PORT+private")
        };
        let world = World::new(vec![paged], SecretTable::default()).await;
        for protocol in [HTTP1, H2] {
            world.arrived.borrow_mut().clear();
            let ask = async |path: &str, teams: &[&str]| {
                let mut request = world.request(protocol, Method::GET, path, "");
                for team in teams {
                    request.headers_mut().append("x-team", team.parse().unwrap());
                }
                world.ask(protocol, request).await.0.as_u16()
            };
            assert_eq!(ask("/?page=1", &["agents"]).await, 200);
            assert_eq!(world.arrived.borrow().len(), 1);
            for (path, teams) in [
                ("/?page=x", &["agents"][..]),
                ("/", &["agents"]),
                ("/?page=1&page=2", &["agents"]),
                ("/?page=1&%70age=2", &["agents"]),
                ("/?page=1;page=2", &["agents"]),
                ("/?page=1", &["others"]),
                ("/?page=1", &[]),
                ("/?page=1", &["agents", "agents"]),
            ] {
                assert_eq!(ask(path, teams).await, 403, "{path} {teams:?}");
            }
            assert_eq!(world.arrived.borrow().len(), 1, "nothing that was refused arrived");
        }
    })
    .await;
}

#[tokio::test]
async fn a_rule_answers_without_a_connection_to_the_host() {
    local(async {
        let response =
            RuleResponse { status: 203, headers: pairs(&[("x-own", "yes")]), body: "CANNED".into() };
        let rules = vec![
            EgressRule {
                respond: Some(response.clone()),
                ..EgressRule::allow("GET,HEAD localhost:PORT/own")
            },
            EgressRule { respond: Some(response), ..EgressRule::allow("nowhere.test:443") },
            EgressRule::allow("GET localhost:PORT/real+private"),
        ];
        let world = World::new(rules, SecretTable::default()).await;
        for protocol in [HTTP1, H2] {
            world.arrived.borrow_mut().clear();
            let before = world.accepted.get();
            let ask = async |method: Method, path: &str| {
                world.ask(protocol, world.request(protocol, method, path, "")).await
            };
            let (status, headers, body) = ask(Method::GET, "/own").await;
            assert_eq!((status.as_u16(), body.as_str()), (203, "CANNED"));
            assert!(headers.contains("\"x-own\": \"yes\""), "{headers}");
            let (status, headers, body) = ask(Method::HEAD, "/own").await;
            assert_eq!((status.as_u16(), body.as_str()), (203, ""));
            assert!(headers.contains("\"content-length\": \"6\""), "{headers}");
            assert_eq!(ask(Method::POST, "/own").await.0, 403);
            assert_eq!(world.accepted.get(), before, "not even a connection");
            assert_eq!(ask(Method::GET, "/real").await.0, 200);
            assert_eq!((world.arrived.borrow().len(), world.accepted.get()), (1, before + 1));
        }
        let decisions = world.decisions();
        assert!(decisions[0].contains("answers the request"), "{decisions:?}");
    })
    .await;
}

#[tokio::test]
async fn requests_go_to_another_host_and_secrets_follow_the_real_one() {
    local(async {
        let all = || SecretFields { body: true, ..fields(&["authorization"]) };
        let secrets = || {
            table(vec![
                secret("real", &["localhost:1-65535"], all()),
                secret("named", &["api.test:443"], all()),
            ])
        };
        let rule = EgressRule {
            forward: Some("localhost:PORT".into()),
            ..EgressRule::allow("api.test:443+private")
        };
        for protocol in [HTTP1, H2] {
            let world = World::new(vec![rule.clone()], secrets()).await;
            let world = World { target: "api.test:443".into(), ..world };
            let with = |value: &str| {
                let mut request = world.request(protocol, Method::POST, "/v1?x=1", "a real-palph0aaaa b");
                request.headers_mut().insert("authorization", value.parse().unwrap());
                request.headers_mut().insert("forwarded", "host=liar.test".parse().unwrap());
                request
            };
            let (status, headers, text) = world.ask(protocol, with("Bearer real-palph0aaaa")).await;
            assert_eq!(status, 200, "{text}");
            let arrived = world.arrived.borrow()[0].clone();
            assert!(arrived.contains("authorization: Bearer value-of-real\n"), "{arrived}");
            assert!(arrived.contains("forwarded: host=api.test\n") && !arrived.contains("liar"), "{arrived}");
            assert!(arrived.ends_with("body=a value-of-real b"), "{arrived}");
            let host = format!("localhost:{}", world.port);
            let first = match protocol == H2 {
                true => format!("POST https://{host}/v1?x=1\n"),
                false => format!("POST /v1?x=1\nhost: {host}\n"),
            };
            assert!(arrived.contains(&host) && arrived.matches("api.test").count() == 1, "{arrived}");
            assert!(protocol != H2 || arrived.starts_with(&first), "{arrived}");
            assert!(![headers, text].concat().contains("value-of-real"));
            let why = format!("sends the request to {host}");
            assert!(world.decisions()[0].contains(&why), "{:?}", world.decisions());
            let (status, _, text) = world.ask(protocol, with("Bearer named-palph0aaaa")).await;
            assert_eq!(status, 403, "{text}");
            assert!(text.contains("does not belong to localhost"), "{text}");
            // A rule that denies wins, also about the other host.
            let denied = Policy::new(&[
                EgressRule { forward: Some(host.clone()), ..rule.clone() },
                EgressRule::deny("localhost:*"),
            ]);
            *world.proxy.policy.borrow_mut() = denied.unwrap();
            assert_eq!(world.ask(protocol, with("x")).await.0, 403);
            // Without the mark the other host is a public one.
            let public = EgressRule { forward: Some(host), ..EgressRule::allow("api.test:443") };
            *world.proxy.policy.borrow_mut() = Policy::new(&[public]).unwrap();
            let (status, _, text) = world.ask(protocol, with("x")).await;
            assert!(status == 403 && text.contains("address of this host"), "{status} {text}");
            assert_eq!(world.arrived.borrow().len(), 1);
        }
    })
    .await;
}

#[tokio::test]
async fn http_2_of_a_program_becomes_http_1_where_the_other_host_speaks_no_other() {
    local(async {
        let rule = EgressRule {
            forward: Some("localhost:PORT".into()),
            ..EgressRule::allow("api.test:443+private")
        };
        let world = World::with_protocols(vec![rule], SecretTable::default(), &[HTTP1]).await;
        let world = World { target: "api.test:443".into(), ..world };
        let mut request = world.request(H2, Method::POST, "/x", "text");
        request.headers_mut().append("cookie", "a=1".parse().unwrap());
        request.headers_mut().append("cookie", "b=2".parse().unwrap());
        let (status, _, text) = world.ask(H2, request).await;
        assert_eq!(status, 200, "{text}");
        let arrived = world.arrived.borrow()[0].clone();
        assert!(arrived.starts_with("POST /x\n") && arrived.ends_with("body=text"), "{arrived}");
        assert!(arrived.contains(&format!("host: localhost:{}\n", world.port)), "{arrived}");
        assert!(arrived.contains("cookie: a=1; b=2\n"), "{arrived}");
    })
    .await;
}

#[tokio::test]
async fn budgets_count_requests_and_their_bytes() {
    local(async {
        let limit = |rate: Option<&str>, bytes: Option<&str>| {
            Some(RuleLimit { rate: rate.map(str::to_owned), bytes: bytes.map(str::to_owned) })
        };
        for protocol in [HTTP1, H2] {
            let rules = vec![
                EgressRule {
                    limit: limit(Some("2/h"), None),
                    ..EgressRule::allow("localhost:PORT/rate+private")
                },
                EgressRule {
                    limit: limit(None, Some("64KiB")),
                    ..EgressRule::allow("localhost:PORT/bytes+private")
                },
            ];
            let world = World::new(rules, SecretTable::default()).await;
            let ask = async |path: &str, body: &str| {
                world.ask(protocol, world.request(protocol, Method::POST, path, body)).await
            };
            assert_eq!(
                (ask("/rate", "").await.0, ask("/rate", "").await.0),
                (StatusCode::OK, StatusCode::OK)
            );
            let (status, _, text) = ask("/rate", "").await;
            assert_eq!(status, 429);
            assert!(text.contains("has spent its rate of 2/h"), "{text}");
            assert_eq!(ask("/bytes", "few").await.0, 200);
            let arrived = world.arrived.borrow().len();
            // The request breaks off, so it has no answer or a refusal.
            let stream = world.connect(&[protocol]).await.unwrap();
            let sent = world.request(protocol, Method::POST, "/bytes", &"x".repeat(100 << 10));
            if let Ok((status, _)) = World::send(protocol, stream, sent).await {
                assert_ne!(status, 200);
            }
            assert_eq!(world.arrived.borrow().len(), arrived, "no whole request arrived");
            let (status, _, text) = ask("/bytes", "").await;
            assert_eq!(status, 403);
            assert!(text.contains("has spent its budget of 64KiB"), "{text}");
            assert!(world.decisions().iter().any(|line| line.contains("has spent its budget")));
        }
    })
    .await;
}
