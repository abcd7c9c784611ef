//! `pal port forward`: ports of this machine lead to ports inside a Body.

use std::{
    io::{Read, Write},
    net::TcpStream,
    process::{Child, Stdio},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    cli_test,
    pal::{Pal, await_word, signal},
};

/// A server inside a Body that answers each line with `got LINE`.
const ECHO: &str = "import socketserver\n\
class H(socketserver.StreamRequestHandler):\n    def handle(self):\n        for line in self.rfile:\n            self.wfile.write(b'got ' + line)\n\
class S(socketserver.ThreadingTCPServer):\n    allow_reuse_address = True\n    request_queue_size = 64\n\
server = S(('127.0.0.1', 7000), H)\nprint('listening', flush=True)\nserver.serve_forever()\n";

fn ask(address: &str, line: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(line.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Forwards a port to a free one, and returns the process and the address.
fn forward(pal: &Pal, body: &str) -> (Child, String) {
    let words = ["port", "forward", body, "7000:0", "--json"];
    let mut child = pal.command(words).stderr(Stdio::null()).spawn().unwrap();
    let said: Value = serde_json::from_str(&await_word(&mut child, "\n")).unwrap();
    assert_eq!((&said["id"], &said["port"]), (&body.into(), &7000.into()));
    let local = said["local"].as_str().unwrap().to_owned();
    assert!(local.starts_with("127.0.0.1:"), "{local}");
    (child, local)
}

cli_test! {
    /// A port is reached while `pal port forward` runs, by many connections, and refused before and after.
    fn a_port_is_forwarded_until_the_command_ends(pal) {
        let body = pal.ok("create");
        let (mut child, local) = forward(pal, &body);
        assert!(ask(&local, "early\n").map_or(true, |text| text.is_empty()), "nothing listens inside");
        let mut server = pal.command(["exec", &body, "--", "python3", "-c", ECHO]).spawn().unwrap();
        await_word(&mut server, "listening\n");
        let asked: Vec<String> = std::thread::scope(|scope| {
            let local = &local;
            let asking: Vec<_> = (0..20).map(|nr| scope.spawn(move || ask(local, &format!("{nr}\n")).unwrap())).collect();
            asking.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(asked, (0..20).map(|nr| format!("got {nr}\n")).collect::<Vec<_>>());
        signal(&child, Signal::INT);
        assert!(child.wait().unwrap().success());
        assert!(TcpStream::connect(&local).is_err(), "it listens only while it runs");
        pal.ok(&format!("rm --force {body}"));
        server.wait().unwrap();
    }
}

cli_test! {
    /// A Body that does not run, a taken port and a bad pair are errors that say what to do.
    fn mistakes_are_said_before_anything_listens(pal) {
        let body = pal.ok("create");
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let refused = pal.line(&format!("port forward {body} 7000:{port}"));
        assert!(refused.code != 0 && refused.talk.contains("LOCAL 0 takes any that is free"), "{refused:?}");
        assert_eq!(pal.line(&format!("port forward {body} 0")).code, 2);
        pal.ok(&format!("stop --grace 0s {body}"));
        let stopped = pal.line(&format!("port forward {body} 7000:0"));
        assert!(stopped.code != 0 && stopped.talk.contains("pal start"), "{stopped:?}");
        pal.ok(&format!("rm --force {body}"));
    }
}
