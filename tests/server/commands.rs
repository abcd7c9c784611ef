//! Commands of envd's clients: the log has them before they start, and when they end.

use std::{
    io::{Read, Write},
    time::Duration,
};

use serde_json::{Value, json};
use testkit::wait;

use crate::{
    client,
    pal::Pal,
    server::{Sandbox, TestServer},
    server_test,
};

const START: &str = "/process.Process/Start";

fn request(command: &str) -> Vec<u8> {
    let start = json!({ "process": { "cmd": "/bin/sh", "args": ["-c", command], "envs": { "SECRET": "hidden" }, "cwd": "/" }, "stdin": false }).to_string();
    [&[0][..], &(start.len() as u32).to_be_bytes(), start.as_bytes()].concat()
}

fn headers<'a>(made: &'a Sandbox, token: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let own = [
        ("E2b-Sandbox-Id", made.id.as_str()),
        ("E2b-Sandbox-Port", "49983"),
        ("X-Access-Token", token),
        ("Content-Type", "application/connect+json"),
    ];
    own.into_iter().chain(more.iter().copied()).collect()
}

fn events(pal: &Pal, made: &Sandbox) -> Vec<Value> {
    let text = pal.ok("events --json");
    let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|event| event["body"] == made.id && event["type"].as_str().unwrap().starts_with("exec."))
        .collect()
}

/// The last event of a Body's commands, once there are so many.
#[track_caller]
fn last(pal: &Pal, made: &Sandbox, count: usize) -> Value {
    wait::blocking(Duration::from_secs(10), &format!("{count} events"), || {
        events(pal, made).get(count - 1).cloned()
    })
}

server_test! {
    /// The log has the caller, the command and its end; neither its variables nor its output.
    fn commands_of_envds_clients_are_in_the_log(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let send = |command: &str, token: &str, more: &[(&str, &str)]| {
            client::ask(server.address, "POST", START, &headers(&made, token, more), &request(command)).unwrap()
        };
        // A client without the token starts nothing, and adds no event.
        send("true", "wrong", &[]);
        assert_eq!(events(pal, &made), Vec::<Value>::new());

        assert!(send("echo words; exit 3", &made.token, &[]).expect(200).whole);
        let (started, ended) = (last(pal, &made, 1), last(pal, &made, 2));
        assert_eq!(started["type"], "exec.started");
        assert_eq!(started["data"]["argv"], json!(["/bin/sh", "-c", "echo words; exit 3"]));
        assert_eq!((&started["data"]["by"], &started["data"]["workdir"], &started["data"]["env"]), (&json!("envd"), &json!("/"), &json!(["SECRET"])));
        assert_eq!((&ended["type"], &ended["data"]["exec"], &ended["data"]["code"]), (&json!("exec.ended"), &started["seq"], &json!(3)));
        // Output that is longer than the part that the server inspects.
        send("head -c 3000000 /dev/zero | tr '\\0' x; kill -9 $$", &made.token, &[]).expect(200);
        assert_eq!((&last(pal, &made, 4)["data"]["code"], &last(pal, &made, 4)["data"]["signal"]), (&json!(137), &json!(9)));
        // A command that never ran, and one that ran too long.
        send("true", &made.token, &[("Authorization", "Basic bm9ib2R5LWhlcmU6")]).expect(200);
        assert!(last(pal, &made, 6)["data"]["error"].as_str().unwrap().contains("nobody-here"));
        assert_eq!(last(pal, &made, 5)["data"]["user"], "nobody-here");
        send("sleep 1000", &made.token, &[("Connect-Timeout-Ms", "300")]).expect(200);
        assert_eq!((&last(pal, &made, 8)["data"]["code"], &last(pal, &made, 8)["data"]["timed_out"]), (&json!(124), &json!(true)));
        assert!(!events(pal, &made).iter().any(|event| event.to_string().contains("hidden") || event.to_string().contains("words\\n")));

        // A client that disconnects leaves the command running.
        let mut stream = client::dial(server.address);
        let (head, body) = (client::head("POST", START, &headers(&made, &made.token, &[])), request("sleep 1000"));
        stream.write_all(format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes()).and_then(|()| stream.write_all(&body)).unwrap();
        let mut heard = [0; 64];
        assert!(stream.read(&mut heard).unwrap() > 0);
        assert_eq!(last(pal, &made, 9)["type"], "exec.started");
        drop(stream);
        assert_eq!((&last(pal, &made, 10)["type"], &last(pal, &made, 10)["data"]["exec"]), (&json!("exec.detached"), &last(pal, &made, 9)["seq"]));
        assert!(server.processes(&made).iter().any(|args| args.contains("sleep 1000")));
    }
}
