//! Ports of sandboxes, and of the guest itself.

use std::{
    io::{Read, Write},
    time::Duration,
};

use serde_json::json;
use testkit::wait;

use crate::{
    client,
    server::{Sandbox, TestServer},
    server_test,
};

/// The port of the echo server.
pub const PORT: u16 = 18080;
/// A server that echoes each request, and echoes bytes after an upgrade.
pub const ECHO: &str = r#"
import http.server
class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade"):
            self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"); self.wfile.flush()
            while (data := self.connection.recv(4096)): self.connection.sendall(data)
            self.close_connection = True; return
        text = (self.requestline + "\n" + str(self.headers)).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.send_header("x-loWer-and-UPPER", "1")
        self.end_headers(); self.wfile.write(text)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", 18080), Echo).serve_forever()
"#;

/// Starts the echo server in a sandbox, and waits until its port is open.
fn serve_inside(server: &TestServer, sandbox: &Sandbox, headers: &[(&str, &str)]) {
    server.write(sandbox, "echo.py", ECHO).unwrap().expect(200);
    server.run(sandbox, "python3 echo.py >/dev/null 2>&1 &").unwrap().expect(200);
    let up = || (server.port(sandbox, PORT, "GET", "/", headers, b"").unwrap().status == 200).then_some(());
    wait::blocking(Duration::from_secs(15), "the port is open", up);
}

server_test! {
    /// Clients reach a port by header and by host name, with large bodies, and the key is never forwarded.
    fn a_port_is_reached_by_header_and_by_name(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        let closed = server.port(&made, PORT, "GET", "/", &[], b"").unwrap().expect(502).json();
        assert!(closed["message"].as_str().unwrap().contains("port is not open"), "{closed}");
        serve_inside(&server, &made, &[]);
        let said = server.port(&made, PORT, "GET", "/a?b=c", &[("X-API-KEY", &server.key), ("X-Mine", "1")], b"").unwrap().text();
        assert!(said.contains("GET /a?b=c") && said.to_lowercase().contains("x-mine: 1") && !said.contains(&server.key), "{said}");
        let large = vec![7; 8 << 20];
        assert!(server.port(&made, PORT, "POST", "/", &[], &large).unwrap().expect(200).body == large);
        let host = format!("{PORT}-{}.localhost:{}", made.id, server.address.port());
        let named = client::ask(server.address, "GET", "/named", &[("Host", &host)], b"").unwrap().expect(200).text();
        assert!(named.contains("GET /named"), "{named}");
    }
}

server_test! {
    /// Names of headers keep their case in both directions, and a program sees the host that its lease sets.
    fn headers_pass_as_they_came(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({ "network": { "maskRequestHost": "masked.test:${PORT}" } }));
        serve_inside(&server, &made, &[]);
        let answer = server.port(&made, PORT, "GET", "/", &[("X-MiXed-case", "1"), ("lower", "2"), ("UPPER", "3")], b"").unwrap().expect(200);
        let said = answer.text();
        for line in ["X-MiXed-case: 1", "lower: 2", "UPPER: 3", "E2b-Sandbox-Id: ", &format!("Host: masked.test:{PORT}")] {
            assert!(said.contains(&format!("\n{line}")), "{line}: {said}");
        }
        let names: Vec<&str> = answer.headers.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.contains(&"x-loWer-and-UPPER") && names.contains(&"Content-Length"), "{names:?}");
    }
}

server_test! {
    /// A key of the server reaches no program in a Body, whichever header has it; keys of others pass.
    fn keys_stay_outside(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        serve_inside(&server, &made, &[]);
        let (other, bearer) = (format!("e2b_{}", "0".repeat(40)), format!("Bearer {}", server.key));
        let headers = [
            ("Authorization", bearer.as_str()), ("X-API-Key", &other), ("Sec-WebSocket-Protocol", &format!("palisade, key.{}", server.key)),
            ("Cookie", &format!("session={}", server.key)), ("X-Mine", "kept"),
        ];
        let said = server.port(&made, PORT, "GET", "/", &headers, b"").unwrap().expect(200).text();
        assert!(said.contains("X-Mine: kept") && said.contains(&format!("X-API-Key: {other}")), "the rest passes: {said}");
        assert!(!said.contains(&server.key), "{said}");
        let theirs = server.port(&made, PORT, "GET", "/", &[("Authorization", "Bearer theirs")], b"").unwrap().expect(200).text();
        assert!(theirs.contains("Authorization: Bearer theirs"), "{theirs}");
    }
}

server_test! {
    /// An upgraded connection carries bytes in both directions.
    fn an_upgraded_connection_goes_through(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        serve_inside(&server, &made, &[]);
        let mut stream = client::dial(server.address);
        let host = format!("{PORT}-{}.localhost", made.id);
        let head = client::head("GET", "/", &[("Host", &host), ("Connection", "Upgrade"), ("Upgrade", "echo")]);
        stream.write_all(format!("{head}\r\n").as_bytes()).unwrap();
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
        assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
        for word in [b"hello", b"again"] {
            stream.write_all(word).unwrap();
            let mut back = [0; 5];
            stream.read_exact(&mut back).unwrap();
            assert_eq!(&back, word);
        }
    }
}

server_test! {
    /// A private port requires its token; the guest has one of its own.
    fn a_private_port_wants_its_token(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({ "network": { "allowPublicTraffic": false } }));
        let token = made.said["trafficAccessToken"].as_str().unwrap().to_owned();
        let headers = [("e2b-traffic-access-token", token.as_str())];
        serve_inside(&server, &made, &headers);
        server.port(&made, PORT, "GET", "/", &[], b"").unwrap().expect(403);
        server.port(&made, PORT, "GET", "/", &[("e2b-traffic-access-token", "wrong")], b"").unwrap().expect(403);
        let said = server.port(&made, PORT, "GET", "/", &headers, b"").unwrap().expect(200).text();
        assert!(!said.contains(&token), "{said}");
        server.envd(&made, "GET", "/health", b"").unwrap().expect(204);
        assert!(server.create(json!({})).said["trafficAccessToken"].is_null());
    }
}

server_test! {
    /// The ports of a Body of `pal create` are only open to clients with a key.
    fn ports_of_pals_own_bodies_are_private(pal) {
        let server = TestServer::start(pal);
        let body = pal.ok("create");
        let made = Sandbox { id: body, token: String::new(), said: json!(null) };
        server.port(&made, PORT, "GET", "/", &[], b"").unwrap().expect(403);
        server.port(&made, PORT, "GET", "/", &[("X-API-KEY", &server.key)], b"").unwrap().expect(502);
    }
}

server_test! {
    /// The guest requires its token, and only envd's own paths reach it.
    fn the_guest_is_reached_by_envds_paths_alone(pal) {
        let server = TestServer::start(pal);
        let made = server.create(json!({}));
        server.port(&made, 49983, "POST", "/process.Process/List", &[("Content-Type", "application/json")], b"{}").unwrap().expect(401);
        server.port(&made, 49983, "GET", "/health", &[], b"").unwrap().expect(204);
        for path in ["/init", "/freeze", "/v1/guest", "/v1/tree?path=/", "/v1/dial?port=1", "/v1/shutdown", "/"] {
            server.envd(&made, "POST", path, b"{}").unwrap().expect(404);
        }
        let nobody = Sandbox { id: "nobody".into(), ..made.clone() };
        for path in ["/health", "/files?path=a"] {
            let refused = server.envd(&nobody, "GET", path, b"").unwrap().expect(502).json();
            assert_eq!(refused["message"], "The sandbox was not found");
        }
        let odd = Sandbox { id: "../../etc".into(), ..made };
        server.envd(&odd, "GET", "/health", b"").unwrap().expect(502);
    }
}

server_test! {
    /// If a sandbox ends or is paused, its streams break off, and none looks complete.
    fn streams_of_what_ends_break_off(pal) {
        let server = TestServer::start(pal);
        for end in ["DELETE /sandboxes/", "POST pause"] {
            let made = server.create(json!({}));
            let heard = std::thread::scope(|scope| {
                let stream = scope.spawn(|| server.run(&made, "echo first; sleep 4321"));
                wait::blocking(Duration::from_secs(10), "it runs", || (!server.processes(&made).is_empty()).then_some(()));
                match end {
                    "POST pause" => server.ask("POST", &format!("/sandboxes/{}/pause", made.id), json!({})).expect(204),
                    _ => server.ask("DELETE", &format!("/sandboxes/{}", made.id), json!(null)).expect(204),
                };
                stream.join().unwrap()
            });
            assert!(heard.as_ref().is_ok_and(|heard| !heard.whole), "{end}: {heard:?}");
        }
    }
}

server_test! {
    /// A signed URL needs neither header nor token, and reaches the sandbox whose token signed it.
    fn signed_urls_lead_to_their_sandbox(pal) {
        use sha2::{Digest, Sha256};
        let server = TestServer::start(pal);
        let (made, _other) = (server.create(json!({})), server.create(json!({})));
        server.write(&made, "sig.txt", "signed").unwrap().expect(200);
        let hash: Vec<u8> = Sha256::digest(format!("sig.txt:read::{}", made.token)).to_vec();
        let signature = format!("v1_{}", base64(&hash)).replace('+', "%2B").replace('/', "%2F");
        let get = |path: &str| client::ask(server.address, "GET", path, &[], b"").unwrap();
        assert_eq!(get(&format!("/files?path=sig.txt&signature={signature}")).expect(200).text(), "signed");
        get(&format!("/files?path=other.txt&signature={signature}")).expect(401);
        get("/files?path=sig.txt&signature=v1_x").expect(401);
    }
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits =
            three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        (0..=three.len())
            .for_each(|place| text.push(char::from(ALPHABET[(bits >> (18 - 6 * place)) as usize & 63])));
    }
    text
}
