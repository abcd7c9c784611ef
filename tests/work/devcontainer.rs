//! devcontainer.json: the root, the user, the variables and the commands that it defines, and the notes about
//! the rest.

use fleet::{Force, UpRequest};
use proto::{Kind, event_data::BodyCreated};
use serde_json::json;
use testkit::{
    Bodies, body_test,
    registry::{CannedResponse, ImageLayer, ScriptedServer, TAR, TestRegistry, image},
    roots,
};

use crate::{
    ecosystems::{asked, prepared, steps},
    repo::HostRepo,
};

/// A registry with a small image, and the image's name.
fn pushed() -> (TestRegistry, String) {
    let registry = TestRegistry::open();
    let parts = image(
        &[ImageLayer(TAR, roots::small())],
        json!({ "Env": ["PATH=/bin", "COLOUR=green"], "User": "user" }),
    );
    registry.push("dev", "1", &parts);
    let reference = format!("{}/dev:1", registry.host());
    (registry, reference)
}

fn write(json: &str) -> String {
    format!("mkdir -p .devcontainer; cat > .devcontainer/devcontainer.json <<'END'\n{json}\nEND\n")
}

#[body_test]
async fn commands_variables_and_ports_hold_and_the_rest_is_told(t: Bodies) {
    let file = r#"{ // mine
        "containerEnv": { "FROM": "there", "SECRET": "${localEnv:SECRET}", "OTHER": "${localEnv:OTHER:else}" }, "remoteEnv": { "AT": "${containerWorkspaceFolder}/x" },
        "remoteUser": "vscode", "forwardPorts": [3000], "initializeCommand": "touch /tmp/palisade-initialized", "runArgs": ["--privileged"],
        "onCreateCommand": ["echo", "once"], "postCreateCommand": { "a": "echo $FROM > ~/made; git config user.name evil", "b": "echo $AT >> ~/made" },
        "postStartCommand": "date +%N >> ~/starts", "features": { "ghcr.io/devcontainers/features/git:1": {}, "ghcr.io/a/b/nothing:1": {} },
    }"#;
    let host = HostRepo::make(&t, "app", &write(file));
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    let told = said.join("\n");
    for word in [
        "initializeCommand is not honoured",
        "runArgs",
        "there is no account vscode",
        "is provided by the template's `git`",
        "a/b/nothing:1 is not installed",
        "--env SECRET=",
    ] {
        assert!(told.contains(word), "{word}: {told}");
    }
    assert_eq!(
        t.sh(&body, "cat ~/made; echo $FROM $OTHER ${SECRET-unset}; git config user.name; id -un").await.ok(),
        "there\n/workspace/app/x\nthere else unset\nagent\nuser"
    );
    assert!(!std::path::Path::new("/tmp/palisade-initialized").exists(), "nothing of it ran on the host");
    assert_eq!(t.fleet().view(&body).unwrap().spec.ports, [3000]);
    assert_eq!(t.sh(&body, "wc -l < ~/starts").await.ok(), "1");
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "wc -l < ~/starts").await.ok(), "2", "at each start");
    // A given variable is passed on.
    let mut given = asked(&t, &host);
    given.create.env.insert("SECRET".into(), "s3".into());
    let (body, _) = prepared(&t, given).await;
    assert_eq!(t.sh(&body, "echo $SECRET").await.ok(), "s3");
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn an_image_is_what_its_bodies_are_made_of(t: Bodies) {
    let (registry, reference) = pushed();
    let file = format!(
        r#"{{ "image": "{reference}", "remoteUser": "root", "remoteEnv": {{ "PATH": "/extra:${{containerEnv:PATH}}" }}, "postCreateCommand": "echo $COLOUR > /opt-made; id -un >> /opt-made" }}"#
    );
    let host = HostRepo::make(&t, "app", &(write(&file) + "echo hello > hello"));
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(steps(&said), 1, "{said:?}");
    assert_eq!(
        t.sh(&body, "cat /opt-made hello; echo $PATH; echo $COLOUR; ls /usr/share 2>/dev/null; true")
            .await
            .ok(),
        "green\nroot\nhello\n/extra:/bin\ngreen",
        "and nothing of the host"
    );
    drop(registry);
    host.commit("echo more > more", "another commit");
    let (second, said) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(said, Vec::<String>::new(), "nothing is fetched or made again");
    assert_eq!(t.sh(&second, "cat more /opt-made").await.ok(), "more\ngreen\nroot");
    // --template overrides the root.
    t.fleet().remove(&second, Force::Yes).await.unwrap();
    host.commit(
        "rm -r .devcontainer; echo '{ \"image\": \"127.0.0.1:1/none:1\" }' > .devcontainer.json",
        "an image that is not there",
    );
    let failure = t.fleet().workspaces().up(asked(&t, &host)).await.unwrap_err();
    assert!(failure.hints.iter().any(|hint| hint.contains("--template")), "{failure}: {:?}", failure.hints);
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_dockerfile_is_built_from_what_git_has_and_what_is_not_done_is_refused(t: Bodies) {
    let (_registry, reference) = pushed();
    let docker = format!(
        "ARG BASE={reference}\nFROM $BASE AS dev\nARG V=1\nENV MADE=\"v $V\"\nUSER root\nCOPY --chown=user conf/ /conf/\nRUN mkdir /tool && echo \"$V\" > /tool/version\nWORKDIR /tool\nCMD [\"x\"]\nUSER user\n"
    );
    let file = r#"{ "build": { "dockerfile": "Dockerfile", "context": "..", "args": { "V": "2" }, "target": "dev" } }"#;
    let make = format!(
        "{}mkdir conf; echo a > conf/a; echo secret > untracked; echo untracked > .gitignore; cat > .devcontainer/Dockerfile <<'END'\n{docker}END\n",
        write(file)
    );
    let host = HostRepo::make(&t, "app", &make);
    host.sh("echo b > conf/b");
    let (body, said) = prepared(&t, asked(&t, &host)).await;
    assert!(said.iter().any(|line| line.contains("CMD is ignored")), "{said:?}");
    assert_eq!(
        t.sh(&body, "cat /tool/version; ls /conf; stat -c %U /conf/a; echo $MADE; id -un; pwd").await.ok(),
        "2\na\nuser\nv 2\nuser\n/workspace/app",
        "what is not committed is not copied"
    );
    host.commit("rm conf/b; echo more > more", "nothing that decides");
    let (_, said) = prepared(&t, asked(&t, &host)).await;
    assert!(!said.iter().any(|line| line.contains("making the template")), "{said:?}");
    host.commit("echo b > conf/b; echo c > conf/c", "something that is copied");
    let (third, _) = prepared(&t, asked(&t, &host)).await;
    assert_eq!(t.sh(&third, "ls /conf").await.ok(), "a\nb\nc");
    host.commit("echo 'ADD https://example.com/x /x' >> .devcontainer/Dockerfile", "not done");
    let failure = t.fleet().workspaces().up(UpRequest { ..asked(&t, &host) }).await.unwrap_err();
    assert_eq!(failure.kind, Kind::Usage);
    assert!(failure.message.contains(".devcontainer/Dockerfile: line 11: ADD is not supported"), "{failure}");
}

#[body_test(except(user = "a root file system of its own needs subordinate ids"))]
async fn a_dockerfile_fetches_packages_by_plain_http_where_a_rule_says_so(t: Bodies) {
    let (_registry, reference) = pushed();
    let mirror = ScriptedServer::start(|_| CannedResponse::ok("PACKAGE\n"));
    let port = mirror.host().replace("127.0.0.1:", "");
    // A plain request, as apt sends it to a proxy.
    let fetch = format!(
        "exec 3<>/dev/tcp/127.0.0.1/3128 && printf 'GET http://localhost:{port}/pool/a.deb HTTP/1.1\\r\\nHost: localhost:{port}\\r\\nConnection: close\\r\\n\\r\\n' >&3 && cat <&3 > /fetched; case $(cat /fetched) in *PACKAGE*) ;; *) exit 7 ;; esac"
    );
    let docker = format!("FROM {reference}\nUSER root\nRUN {fetch}\n");
    let host = HostRepo::make(
        &t,
        "app",
        &format!(
            "{}cat > .devcontainer/Dockerfile <<'END'\n{docker}END\n",
            write(r#"{ "build": { "dockerfile": "Dockerfile" } }"#)
        ),
    );
    let failure = t.fleet().workspaces().up(asked(&t, &host)).await.unwrap_err();
    assert!(failure.message.contains("status 7") && mirror.asked().is_empty(), "{failure}");
    host.commit(
        &format!("printf '[prepare]\\nallow = [\"localhost:{port}+plain+private\"]\\n' > palisade.toml"),
        "a mirror of ours",
    );
    let (body, _) = prepared(&t, asked(&t, &host)).await;
    assert!(t.sh(&body, "cat /fetched").await.ok().ends_with("PACKAGE"));
    assert_eq!(mirror.asked().len(), 1);
    // Mirrors of Debian and the like need no rule of the repository.
    let built = t
        .events()
        .into_iter()
        .filter_map(|event| event.data_as::<BodyCreated>())
        .map(|created| format!("{:?}", created.spec.egress));
    let built: Vec<String> = built.filter(|egress| egress.contains(&port)).collect();
    assert!(
        built
            .iter()
            .any(|egress| egress.contains("deb.debian.org:80+plain") && egress.contains("pypi.org:443")),
        "{built:?}"
    );
}
