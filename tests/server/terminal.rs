//! Terminals over WebSocket: several viewers, a restored screen, no lost bytes.

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tungstenite::{Message, WebSocket, client::IntoClientRequest, protocol::WebSocketConfig};

use crate::{client, native::create, server::TestServer, server_test};

/// One viewer.
struct TerminalViewer {
    socket: WebSocket<TcpStream>,
    /// Bytes of the terminal since the last screen.
    shown: Vec<u8>,
    /// Other messages.
    said: Vec<Value>,
}

impl TerminalViewer {
    fn join(server: &TestServer, body: &str, query: &str) -> Self {
        let mut request =
            format!("ws://{}/v1/bodies/{body}/pty?{query}", server.address).into_client_request().unwrap();
        request.headers_mut().insert("x-api-key", server.key.parse().unwrap());
        let config = WebSocketConfig::default().max_message_size(None);
        let (socket, _) =
            tungstenite::client::client_with_config(request, client::dial(server.address), Some(config))
                .unwrap();
        Self { socket, shown: Vec::new(), said: Vec::new() }
    }

    fn type_in(&mut self, text: &str) {
        self.socket.send(Message::binary(text.as_bytes().to_vec())).unwrap();
    }

    /// Reads the next message; false at the end.
    fn step(&mut self) -> bool {
        match self.socket.read() {
            Ok(Message::Binary(bytes)) => self.shown.extend_from_slice(&bytes),
            Ok(Message::Text(text)) => {
                let said: Value = serde_json::from_str(&text).unwrap();
                if said["type"] == "screen" {
                    self.shown.clear();
                }
                self.said.push(said);
            }
            Ok(_) => {}
            Err(_) => return false,
        }
        true
    }

    #[track_caller]
    fn until(&mut self, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut looked = 0;
        loop {
            // Searches only new bytes, unless a screen has replaced the old ones.
            let from = if looked <= self.shown.len() { looked.saturating_sub(text.len()) } else { 0 };
            if self.shown[from..].windows(text.len()).any(|part| part == text.as_bytes()) {
                return;
            }
            looked = self.shown.len();
            let last = String::from_utf8_lossy(&self.shown[looked.saturating_sub(300)..]).into_owned();
            assert!(Instant::now() < deadline && self.step(), "{text:?} is not in …{last:?}");
        }
    }

    fn sees(&self, text: &str) -> bool {
        self.shown.windows(text.len()).any(|part| part == text.as_bytes())
    }
}

server_test! {
    /// A viewer that connects again sees the screen; others watch and cannot type.
    fn a_screen_is_restored_for_whoever_comes_later(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let mut first = TerminalViewer::join(&server, &id, "cols=100&rows=30");
        first.type_in("stty size; echo mar''ked\n");
        first.until("30 100");
        first.until("marked");
        let mut onlooker = TerminalViewer::join(&server, &id, "mode=watch");
        onlooker.until("marked");
        onlooker.type_in("echo in''truder\n");
        first.type_in("echo se''cond\n");
        onlooker.until("second");
        drop(first);
        let mut again = TerminalViewer::join(&server, &id, "");
        again.until("second");
        assert!(again.sees("marked") && !again.sees("intruder"));
        again.socket.send(Message::text(r#"{"type":"resize","cols":90,"rows":20}"#)).unwrap();
        again.type_in("stty size\n");
        again.until("20 90");
        while !onlooker.said.iter().any(|said| said["type"] == "size" && said["cols"] == 90) {
            assert!(onlooker.step());
        }
        again.type_in("exit 7\n");
        while again.step() {}
        assert!(again.said.iter().any(|said| said["type"] == "ended" && said["code"] == 7), "{:?}", again.said);
    }
}

server_test! {
    /// A killed server leaves the terminal running, and the next one shows its screen.
    fn a_terminal_outlives_the_server(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let mut first = TerminalViewer::join(&server, &id, "name=work&cols=80&rows=24");
        first.type_in("word=sur''vivor; echo $word\n");
        first.until("survivor");
        let pid = first.said[0]["pid"].clone();
        server.kill();
        let server = TestServer::start(pal);
        let listed = server.get(&format!("/v1/bodies/{id}/terminals")).expect(200).json();
        assert_eq!(listed["items"], json!([{ "name": "work", "pid": pid }]));
        let mut again = TerminalViewer::join(&server, &id, "name=work");
        again.until("survivor");
        assert_eq!(again.said[0]["pid"], pid);
        again.type_in("echo still-$word\n");
        again.until("still-survivor");
    }
}

server_test! {
    /// A slow viewer that types alone slows the command, and gets every byte in order.
    fn nothing_is_lost_or_reordered(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let command = "stty%20-opost%20-echo;%20read%20go;%20i=0;%20while%20[%20$i%20-lt%2040000%20];%20do%20i=$((i%2B1));%20echo%20n$i;%20done;%20echo%20over";
        let mut viewer = TerminalViewer::join(&server, &id, &format!("cols=80&rows=24&command={command}"));
        viewer.type_in("\n");
        // Reads nothing for a while: all buffers are full, and the command waits.
        std::thread::sleep(Duration::from_secs(2));
        while viewer.step() {}
        let text = String::from_utf8_lossy(&viewer.shown).into_owned();
        let numbers: Vec<u32> = text.lines().filter_map(|line| line.trim().rsplit_once('n')?.1.parse().ok()).collect();
        assert!(numbers.iter().copied().eq(1..=40_000), "{} numbers, from {:?} to {:?}", numbers.len(), numbers.first(), numbers.last());
        let screens = viewer.said.iter().filter(|said| said["type"] == "screen").count();
        assert_eq!(screens, 1, "it was waited for: {:?}", viewer.said);
    }
}

server_test! {
    /// The server does not wait for a viewer that watches and does not read; it gets the screen when it reads
    /// again.
    fn a_viewer_who_does_not_read_holds_nobody_up(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let mut typist = TerminalViewer::join(&server, &id, "cols=80&rows=24");
        let mut sleeper = TerminalViewer::join(&server, &id, "mode=watch");
        typist.type_in("seq 1 1500000; echo al''l\n");
        typist.until("\r\nall");
        sleeper.until("\r\nall");
        let screens = sleeper.said.iter().filter(|said| said["type"] == "screen").count();
        assert!(screens >= 2, "it was told that it missed something: {:?}", sleeper.said);
    }
}

server_test! {
    /// Impossible terminals are refused before anything starts.
    fn impossible_terminals_are_refused(pal) {
        let server = TestServer::start(pal);
        let id = create(&server, json!({}));
        let refused = |query: &str, status: u16| {
            let answer = server.get(&format!("/v1/bodies/{id}/pty?{query}"));
            assert_eq!((answer.status, &answer.json()["status"]), (status, &json!(status)), "{query}: {}", answer.text());
        };
        for query in ["cols=0&rows=0", "cols=100000&rows=24", "cols=80&rows=501", "cols=-1", "cols=x", "name=a%20b", "mode=steal", "other=1"] {
            refused(query, 400);
        }
        refused("", 426);
        let lost = server.get("/v1/bodies/nobody/pty");
        assert_eq!(lost.status, 404);
        assert_eq!(server.get(&format!("/v1/bodies/{id}/terminals")).json()["items"], json!([]));
    }
}
