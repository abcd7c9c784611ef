//! Preparing a Body: which hosts it reaches, and the failure of a step.
//!
//! These reach crates.io and PyPI.

use fleet::{Force, PrepareChoice, UpRequest};
use proto::{
    Event, Kind,
    event_data::{NetworkAllowed, NetworkDenied},
};
use testkit::{Bodies, body_test};

use crate::{
    ecosystems::{asked, prepared, steps},
    repo::{HostRepo, up},
};

#[body_test]
async fn preparing_reaches_the_names_it_may_and_work_reaches_none(t: Bodies) {
    let probe = "curl -sS -m 20 -o /dev/null -w '%{http_code}' https://pypi.org/simple/six/ > open; curl -sS -m 20 https://crates.io/ > closed 2>&1; curl -sS -m 5 --noproxy '*' https://pypi.org/ > direct 2>&1; curl -sS -m 5 http://pypi.org/ > plain 2>&1; true";
    let host = HostRepo::make(
        &t,
        "app",
        &format!(
            "cat > palisade.toml <<'END'\n[prepare]\nallow = [\"pypi.org:443\"]\ncommands = [\"\"\"{probe}\"\"\"]\n[env]\nCOLOUR = \"green\"\nEND"
        ),
    );
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 1);
    assert_eq!(
        t.sh(&body, "cat open; echo; echo $COLOUR").await.ok(),
        "200\ngreen",
        "the door is open to the name that is allowed"
    );
    let denied = t.sh(&body, "cat closed direct plain").await.ok();
    assert!(denied.contains("403") || denied.contains("CONNECT tunnel failed"), "{denied}");
    let events = t.events();
    let allowed = events.iter().filter_map(Event::data_as).map(|data: NetworkAllowed| data.to);
    let denied = events.iter().filter_map(Event::data_as).map(|data: NetworkDenied| data.to);
    assert!(allowed.collect::<Vec<_>>().contains(&"pypi.org:443".to_owned()), "{events:?}");
    assert!(denied.collect::<Vec<_>>().contains(&"crates.io:443".to_owned()), "{events:?}");
    let now = t.sh(&body, "curl -sS -m 5 https://pypi.org/ 2>&1; curl -sS -m 5 -x http://127.0.0.1:3128 https://pypi.org/ 2>&1; ls /run/palisade 2>&1; env | grep -ci proxy").await;
    assert!(
        !now.text().contains("<html") && now.text().ends_with('0'),
        "the way out is gone: {}",
        now.text()
    );
}

#[body_test]
async fn a_step_that_fails_is_shown_with_its_output_and_leaves_nothing(t: Bodies) {
    let host = HostRepo::make(
        &t,
        "app",
        "printf '[prepare]\\ncommands = [\"echo made it this far; exit 3\"]\\n' > palisade.toml",
    );
    let failure = t.fleet().workspaces().up(asked(&t, &host)).await.unwrap_err();
    assert!(
        failure.kind == Kind::Conflict
            && failure.message.contains("made it this far")
            && failure.message.contains("code 3"),
        "{failure}"
    );
    assert!(failure.hints.iter().any(|hint| hint.contains("--no-prepare")));
    assert_eq!(t.fleet().list().unwrap().len(), 0, "no Body is left");
    let body = up(&t, UpRequest { prepare: PrepareChoice::No, ..asked(&t, &host) }).await.spec.id;
    assert_eq!(t.sh(&body, "ls").await.ok(), "palisade.toml");
    host.commit("echo nonsense > palisade.toml", "nonsense");
    assert_eq!(t.fleet().workspaces().up(asked(&t, &host)).await.unwrap_err().kind, Kind::Usage);
    t.fleet().remove(&body, Force::Yes).await.unwrap();
}
