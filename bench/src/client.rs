//! A small client: requests in sequence on one connection, and terminals over WebSocket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
};

use tungstenite::{Message, WebSocket, client::IntoClientRequest};

const PIECE: usize = 1 << 20;

/// One connection to a server.
pub struct Client {
    stream: BufReader<TcpStream>,
    key: String,
}

impl Client {
    /// Connects.
    pub fn connect(address: SocketAddr, key: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream: BufReader::with_capacity(PIECE, stream), key: key.to_owned() })
    }

    /// Sends a request, and returns the body of a successful answer.
    pub fn ask(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Vec<u8>> {
        self.head(method, path, headers, body.len() as u64)?;
        self.stream.get_mut().write_all(body)?;
        let mut kept = Vec::new();
        self.answer(&mut kept)?;
        Ok(kept)
    }

    /// Sends so many zero bytes; returns the length of the answer.
    pub fn send(&mut self, path: &str, headers: &[(&str, &str)], bytes: u64) -> io::Result<u64> {
        self.head("POST", path, headers, bytes)?;
        let piece = vec![0; PIECE];
        let mut left = bytes;
        while left > 0 {
            let now = left.min(PIECE as u64) as usize;
            self.stream.get_mut().write_all(&piece[..now])?;
            left -= now as u64;
        }
        self.answer(&mut io::sink())
    }

    /// Reads an answer and discards it; returns its length.
    pub fn receive(&mut self, path: &str, headers: &[(&str, &str)]) -> io::Result<u64> {
        self.head("GET", path, headers, 0)?;
        self.answer(&mut io::sink())
    }

    fn head(&mut self, method: &str, path: &str, headers: &[(&str, &str)], length: u64) -> io::Result<()> {
        let mut text = format!(
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-KEY: {}\r\nContent-Length: {length}\r\n",
            self.key
        );
        headers.iter().for_each(|(name, value)| text.push_str(&format!("{name}: {value}\r\n")));
        self.stream.get_mut().write_all(format!("{text}\r\n").as_bytes())
    }

    fn answer(&mut self, to: &mut impl Write) -> io::Result<u64> {
        let status = self.line()?;
        let (mut length, mut chunked) = (0, false);
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().map_err(io::Error::other)?;
            }
            chunked |= line == "transfer-encoding: chunked";
        }
        let mut passed = 0;
        if chunked {
            loop {
                let size = u64::from_str_radix(&self.line()?, 16).map_err(io::Error::other)?;
                passed += self.pass(size, to)?;
                self.line()?;
                if size == 0 {
                    break;
                }
            }
        } else {
            passed = self.pass(length, to)?;
        }
        match status.split(' ').nth(1) {
            Some(code) if code.starts_with('2') => Ok(passed),
            _ => Err(io::Error::other(format!("the server answered {status}"))),
        }
    }

    fn pass(&mut self, bytes: u64, to: &mut impl Write) -> io::Result<u64> {
        let passed = io::copy(&mut self.stream.by_ref().take(bytes), to)?;
        if passed == bytes { Ok(passed) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}

/// A terminal of a Body.
pub struct TerminalClient(WebSocket<TcpStream>);

impl TerminalClient {
    /// Opens a terminal.
    pub fn open(address: SocketAddr, key: &str, body: &str, query: &str) -> io::Result<Self> {
        let mut request = format!("ws://{address}/v1/bodies/{body}/pty?{query}")
            .into_client_request()
            .map_err(io::Error::other)?;
        request.headers_mut().insert("x-api-key", key.parse().map_err(io::Error::other)?);
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let (socket, _) =
            tungstenite::client(request, stream).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self(socket))
    }

    /// Types a text.
    pub fn type_in(&mut self, text: &str) -> io::Result<()> {
        self.0.send(Message::binary(text.as_bytes().to_vec())).map_err(io::Error::other)
    }

    /// Reads until a text appears.
    pub fn until(&mut self, text: &str) -> io::Result<()> {
        let mut shown = Vec::new();
        loop {
            if let Message::Binary(bytes) = self.0.read().map_err(io::Error::other)? {
                shown.extend_from_slice(&bytes);
                if shown.windows(text.len()).any(|part| part == text.as_bytes()) {
                    return Ok(());
                }
            }
        }
    }
}
