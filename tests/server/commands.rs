//! Commands that envd's clients start: the log has them before they run, with their output and their end.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use proto::{
    connect::Codec,
    envelope::{self, EnvelopeReader},
    wire::process::{
        ProcessConfig, StartRequest, StartResponse,
        process_event::{Event, data_event::Output},
    },
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

/// A stream that was opened and not read to its end.
fn open(server: &TestServer, made: &Sandbox, command: &str) -> TcpStream {
    let mut stream = client::dial(server.address);
    let (head, body) = (client::head("POST", START, &headers(made, &made.token, &[])), request(command));
    let head = format!("{head}Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body)).unwrap();
    let mut first = [0; 64];
    assert!(stream.read(&mut first).unwrap() > 0);
    stream
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
    /// The log has the user, the command, the names of its variables, its output and its end.
    fn commands_of_envds_clients_are_in_the_log(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let send = |command: &str, token: &str, more: &[(&str, &str)]| {
            client::ask(server.address, "POST", START, &headers(&made, token, more), &request(command)).unwrap()
        };
        // A client without the token starts nothing, and fills no log.
        send("true", "wrong", &[]);
        assert_eq!(events(pal, &made), Vec::<Value>::new());

        assert!(send("echo words; echo woes >&2; exit 3", &made.token, &[]).expect(200).whole);
        let (started, ended) = (last(pal, &made, 1), last(pal, &made, 2));
        assert_eq!(started["type"], "exec.started");
        assert_eq!(started["data"]["argv"], json!(["/bin/sh", "-c", "echo words; echo woes >&2; exit 3"]));
        assert_eq!((&started["data"]["by"], &started["data"]["workdir"], &started["data"]["env"]), (&json!("envd"), &json!("/"), &json!(["SECRET"])));
        assert_eq!((&ended["type"], &ended["data"]["exec"], &ended["data"]["code"]), (&json!("exec.ended"), &started["seq"], &json!(3)));
        assert_eq!((&ended["data"]["stdout"]["text"], &ended["data"]["stderr"]["text"]), (&json!("words\n"), &json!("woes\n")));
        assert_eq!(pal.line(&format!("logs {}", made.id)).out, "words\nwoes\n");
        // Output that is too long for an event is an artifact.
        send("head -c 3000000 /dev/zero | tr '\\0' x; kill -9 $$", &made.token, &[]).expect(200);
        let ended = last(pal, &made, 4);
        assert_eq!((&ended["data"]["code"], &ended["data"]["signal"], &ended["data"]["stdout"]["bytes"]), (&json!(137), &json!(9), &json!(3_000_000)));
        assert_eq!(pal.line(&format!("logs --last 1 {}", made.id)).out, "x".repeat(3_000_000));
        // A command that never ran, and one that ran too long.
        send("true", &made.token, &[("Authorization", "Basic bm9ib2R5LWhlcmU6")]).expect(200);
        assert!(last(pal, &made, 6)["data"]["error"].as_str().unwrap().contains("nobody-here"));
        assert_eq!(last(pal, &made, 5)["data"]["user"], "nobody-here");
        let late = send("echo early; sleep 1000", &made.token, &[("Connect-Timeout-Ms", "300")]).expect(200);
        assert!(late.whole && late.text().contains("deadline_exceeded"), "{}", late.text());
        let ended = last(pal, &made, 8);
        assert_eq!((&ended["data"]["code"], &ended["data"]["timed_out"], &ended["data"]["stdout"]["text"]), (&json!(124), &json!(true), &json!("early\n")));
        assert!(!events(pal, &made).iter().any(|event| event.to_string().contains("hidden")));
    }
}

server_test! {
    /// A client that disconnects leaves its command running; the log has that, and its output and end when it ends.
    fn a_command_whose_client_disconnects_is_recorded_to_its_end(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let stream = open(&server, &made, "until [ -e /tmp/go ]; do sleep 0.02; done; echo late; exit 4");
        assert_eq!(last(pal, &made, 1)["type"], "exec.started");
        drop(stream);
        assert_eq!((&last(pal, &made, 2)["type"], &last(pal, &made, 2)["data"]["exec"]), (&json!("exec.detached"), &last(pal, &made, 1)["seq"]));
        assert!(server.processes(&made).iter().any(|args| args.contains("/tmp/go")));
        server.run(&made, "touch /tmp/go").unwrap().expect(200);
        let ended = wait::blocking(Duration::from_secs(10), "the end of the first command", || {
            let seq = last(pal, &made, 1)["seq"].clone();
            events(pal, &made).into_iter().find(|event| event["type"] == "exec.ended" && event["data"]["exec"] == seq)
        });
        assert_eq!((&ended["data"]["code"], &ended["data"]["stdout"]["text"]), (&json!(4), &json!("late\n")));
    }
}

server_test! {
    /// A server that stops says so of the commands whose clients it had.
    fn a_server_that_stops_detaches_its_commands(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let _stream = open(&server, &made, "sleep 1000");
        assert_eq!(last(pal, &made, 1)["type"], "exec.started");
        assert_eq!(server.stop(), Some(0));
        assert_eq!(last(pal, &made, 2)["type"], "exec.detached");
        pal.ok(&format!("rm --force {}", made.id));
    }
}

server_test! {
    /// The binary codec has the same events, and a terminal's output is its own.
    fn binary_clients_get_binary_events(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let command = "printf '\\377'; echo woes >&2; exit 3";
        let process = ProcessConfig { cmd: "/bin/sh".into(), args: vec!["-c".into(), command.into()], ..ProcessConfig::default() };
        let start = StartRequest { process: Some(process), stdin: Some(false), ..StartRequest::default() };
        let sent = envelope::seal(0, &Codec::Proto.encode(&start));
        let headers: Vec<_> = headers(&made, &made.token, &[]).into_iter().filter(|(name, _)| *name != "Content-Type").chain([("Content-Type", "application/connect+proto")]).collect();
        let answer = client::ask(server.address, "POST", START, &headers, &sent).unwrap().expect(200);
        assert_eq!((answer.header("content-type"), answer.whole), (Some("application/connect+proto"), true));
        let mut reader = EnvelopeReader::new(1 << 20);
        reader.push(&answer.body);
        let (mut out, mut errors, mut code, mut last) = (Vec::new(), Vec::new(), None, Vec::new());
        while let Some(envelope) = reader.next().unwrap() {
            if envelope.flags & envelope::END != 0 {
                last = envelope.message.to_vec();
                continue;
            }
            match Codec::Proto.decode::<StartResponse>(&envelope.message).unwrap().event.unwrap().event.unwrap() {
                Event::Data(data) => match data.output.unwrap() {
                    Output::Stdout(bytes) => out.extend_from_slice(&bytes),
                    Output::Stderr(bytes) => errors.extend_from_slice(&bytes),
                    Output::Pty(bytes) => panic!("{bytes:?}"),
                },
                Event::End(end) => code = Some((end.exit_code, end.exited, end.status)),
                Event::Start(start) => assert!(start.pid > 1),
                Event::Keepalive(_) => {}
            }
        }
        assert_eq!((out, errors, code, last), (vec![0xff], b"woes\n".to_vec(), Some((3, true, "exit status 3".into())), b"{}".to_vec()));
        // Requests that cannot be read are refused in Connect's words, and never recorded.
        let refused = |kind: &str, body: &[u8]| {
            let headers: Vec<_> = headers.iter().copied().filter(|(name, _)| *name != "Content-Type").chain([("Content-Type", kind)]).collect();
            client::ask(server.address, "POST", START, &headers, body).unwrap()
        };
        assert_eq!(refused("application/json", b"{}").status, 415);
        assert!(refused("application/connect+json", b"garbage").expect(200).text().contains("invalid_argument"));
        assert!(refused("application/connect+json", &envelope::seal(0, b"{}")).expect(200).text().contains("no process is described"));
        assert_eq!(events(pal, &made).len(), 2);
    }
}

server_test! {
    /// A client that does not read makes its command wait, and the server holds a bounded part of the output.
    fn a_client_that_does_not_read_makes_its_command_wait(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let stream = open(&server, &made, "head -c 50000000 /dev/zero; echo done > /tmp/done");
        std::thread::sleep(Duration::from_secs(1));
        assert!(server.processes(&made).iter().any(|args| args.contains("50000000")), "it waits for its client");
        drop(stream);
        let ended = wait::blocking(Duration::from_secs(20), "its end", || {
            events(pal, &made).into_iter().find(|event| event["type"] == "exec.ended")
        });
        assert_eq!(ended["data"]["stdout"]["bytes"], json!(50_000_000));
    }
}
