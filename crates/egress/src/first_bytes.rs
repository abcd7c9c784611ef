//! The first bytes of a program on a connection of any protocol: TLS and HTTP among them must name the host of the
//! connection, because servers of many names would follow another name.
//!
//! Absent on purpose: TLS that begins later in a conversation (STARTTLS), HTTP/2 without TLS, and the second request on
//! a connection. A rule for such hosts says `+tls` or `+http` where that matters.

use proto::egress::fit_to_show;

use crate::{
    client::{HEAD_LEN_MAX, find_head_end},
    client_hello::HelloReader,
    http_head::{HttpRequest, is_token_byte},
    target::Target,
};

/// Longest method of a request: no server knows a longer one.
const METHOD_LEN_MAX: usize = 64;

/// The judgement of the bytes so far.
#[derive(Debug, PartialEq, Eq)]
pub enum FirstBytesVerdict {
    /// They may go out, and so may all further ones.
    Pass,
    /// They could become a request; they may go out if the program sends no more for a while.
    Unclear,
    /// They are the beginning of a hello or a request, and must wait for the rest of it.
    Incomplete,
    /// They name another host.
    Deny(String),
}

/// Collects the first bytes.
#[derive(Debug, Default)]
pub struct FirstBytes {
    bytes: Vec<u8>,
    hello: HelloReader,
    /// The empty lines before the first one.
    skipped: usize,
    /// Whether the first line is one of a request.
    is_request: bool,
}

impl FirstBytes {
    /// Takes the next bytes of a program that connects to `target`.
    pub fn push(&mut self, piece: &[u8], target: &Target) -> FirstBytesVerdict {
        let seen = self.bytes.len();
        self.bytes.extend_from_slice(piece);
        let is = |at: usize, fits: fn(u8) -> bool| self.bytes.get(at).is_none_or(|byte| fits(*byte));
        if self.bytes.is_empty() {
            return FirstBytesVerdict::Unclear;
        }
        if is(0, |byte| byte == 22) && is(1, |byte| byte == 3) && is(2, |byte| byte <= 4) {
            return self.judge_hello(seen, target);
        }
        self.judge_text(seen, target)
    }

    fn judge_hello(&mut self, seen: usize, target: &Target) -> FirstBytesVerdict {
        match self.hello.push(&self.bytes[seen..]) {
            Ok(None) => FirstBytesVerdict::Incomplete,
            Ok(Some(hello)) => match hello.server_name {
                Some(name) if !target.is_server_name(&name) => {
                    FirstBytesVerdict::Deny(format!("its TLS server name is {}", fit_to_show(&name)))
                }
                _ => FirstBytesVerdict::Pass,
            },
            Err(error) => FirstBytesVerdict::Deny(error.why().to_owned()),
        }
    }

    /// Looks at new bytes only, because a program may send one at a time.
    fn judge_text(&mut self, seen: usize, target: &Target) -> FirstBytesVerdict {
        // Servers skip empty lines before a request.
        while matches!(self.bytes.get(self.skipped), Some(b'\r' | b'\n')) {
            self.skipped += 1;
        }
        let (text, seen) = (&self.bytes[self.skipped..], seen.saturating_sub(self.skipped));
        let is_long = self.bytes.len() > HEAD_LEN_MAX;
        if !self.is_request {
            match text[seen..].iter().position(|byte| *byte == b'\n') {
                None if !could_be_request(text, seen) => return FirstBytesVerdict::Pass,
                None if is_long => {
                    return FirstBytesVerdict::Deny("its first line is too long".to_owned());
                }
                None => return FirstBytesVerdict::Unclear,
                Some(end) if !is_request_line(&text[..seen + end]) => return FirstBytesVerdict::Pass,
                Some(_) => self.is_request = true,
            }
        }
        match find_head_end(text, seen) {
            Some(end) => judge_head(&text[..end], target),
            // A head whose lines end with a bare line feed has two readings.
            None if text[seen.saturating_sub(1)..].windows(2).any(|two| two == b"\n\n") => {
                FirstBytesVerdict::Deny("its HTTP request is malformed".to_owned())
            }
            None if is_long => FirstBytesVerdict::Deny("its head is too long".to_owned()),
            None => FirstBytesVerdict::Incomplete,
        }
    }
}

/// Whether the beginning of a line, of which the first `seen` bytes could, can be the one of a request: a method, then
/// anything that is printable. Once it cannot, no further byte changes that.
fn could_be_request(text: &[u8], seen: usize) -> bool {
    let front = &text[..text.len().min(METHOD_LEN_MAX + 1)];
    let method = front.iter().take_while(|byte| is_token_byte(**byte)).count();
    let printable = |byte: &u8| !byte.is_ascii_control() || matches!(byte, b'\t' | b'\r');
    let is_method = match front.get(method) {
        None => method <= METHOD_LEN_MAX,
        Some(next) => method > 0 && matches!(next, b' ' | b'\t'),
    };
    is_method && text[seen..].iter().all(printable)
}

/// Whether a careless server would take a line for the first one of a request.
fn is_request_line(line: &[u8]) -> bool {
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
    let is_http = |word: &[u8]| word.len() >= 6 && word[..6].eq_ignore_ascii_case(b"HTTP/1");
    could_be_request(line, 0) && words.next_back().is_some_and(is_http)
}

fn judge_head(head: &[u8], target: &Target) -> FirstBytesVerdict {
    let judged = HttpRequest::parse(head)
        .and_then(|request| if request.has_host() { request.check_host(target) } else { Ok(()) });
    match judged {
        Ok(()) => FirstBytesVerdict::Pass,
        Err(denial) => FirstBytesVerdict::Deny(denial.why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client_hello::tests::{hello_for, torn_hello_for},
        target::Host,
    };

    fn target() -> Target {
        Target { host: Host::Name("a.test".into()), port: 2525 }
    }

    /// The verdict on bytes in one piece, which is the last one on the same bytes one by one.
    fn judge(bytes: &[u8]) -> FirstBytesVerdict {
        let whole = FirstBytes::default().push(bytes, &target());
        let mut slow = FirstBytes::default();
        let mut last = FirstBytesVerdict::Unclear;
        for byte in bytes {
            last = slow.push(&[*byte], &target());
            if matches!(last, FirstBytesVerdict::Pass | FirstBytesVerdict::Deny(_)) {
                break;
            }
        }
        let same = |one: &FirstBytesVerdict, two: &FirstBytesVerdict| {
            std::mem::discriminant(one) == std::mem::discriminant(two)
        };
        assert!(same(&whole, &last), "{:?}: {whole:?} {last:?}", String::from_utf8_lossy(bytes));
        whole
    }

    #[test]
    fn protocols_without_a_name_pass_at_once() {
        for bytes in [
            &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
            b"EHLO me\r\n",
            b"*1\r\n$4\r\nPING\r\n",
            b"AMQP\0\0\x09\x01",
            b"\0\0\0\x08\x04\xd2\x16\x2f",
            b"8=FIX.4.2\x01",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"A\0\0\0",
            b"\x16\x00",
            b"HTTP/1.1\r\n",
        ] {
            assert_eq!(judge(bytes), FirstBytesVerdict::Pass, "{:?}", String::from_utf8_lossy(bytes));
        }
        // A program that waits for an answer now must get one.
        assert_eq!(judge(b"JDWP-Handshake"), FirstBytesVerdict::Unclear);
    }

    #[test]
    fn tls_and_http_must_name_the_host() {
        let get = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\nA: b\r\n\r\n");
        let passes = |bytes: &[u8]| {
            assert_eq!(judge(bytes), FirstBytesVerdict::Pass, "{:?}", String::from_utf8_lossy(bytes));
        };
        passes(&hello_for(&["a.test"]));
        passes(&hello_for(&[]));
        passes(&torn_hello_for("A.test"));
        passes(get("a.test").as_bytes());
        passes(get("A.test:2525").as_bytes());
        passes(b"POST http://a.test:2525/ HTTP/1.1\r\nHost: a.test\r\n\r\n");
        passes(b"GET / HTTP/1.0\r\nUpgrade: x\r\n\r\n");
        for bad in [
            hello_for(&["evil.io"]),
            torn_hello_for("evil.io"),
            hello_for(&["a.test", "evil.io"]),
            get("evil.io").into_bytes(),
            get("a.test:80").into_bytes(),
            format!("\r\n{}", get("evil.io")).into_bytes(),
            b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: evil.io\r\n\r\n".to_vec(),
            b"GET http://evil.io/ HTTP/1.1\r\nHost: a.test\r\n\r\n".to_vec(),
            b"GET\t/ http/1.1\nHost: evil.io\n\n".to_vec(),
            b"GET  / HTTP/1.1\r\nHost:\n evil.io\r\n\r\n".to_vec(),
            b"CONNECT evil.io:443 HTTP/1.1\r\nHost: a.test\r\n\r\n".to_vec(),
            [&b"GET / HTTP/1.1\r\n"[..], &[b'a'; HEAD_LEN_MAX]].concat(),
            [&b"GET /"[..], &[b'a'; HEAD_LEN_MAX]].concat(),
            vec![b'\n'; HEAD_LEN_MAX + 1],
            format!("GET /{} HTTP/1.1\r\nHost: evil.io\r\n\r\n", "a".repeat(30_000)).into_bytes(),
            b"1GET / HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_vec(),
            b"GET /\xff HTTP/1.1\r\nHost: evil.io\r\n\r\n".to_vec(),
        ] {
            assert!(matches!(judge(&bad), FirstBytesVerdict::Deny(_)), "{:?}", String::from_utf8_lossy(&bad));
        }
    }

    #[test]
    fn a_part_of_a_request_waits_for_the_rest() {
        let (hello, get) = (hello_for(&["a.test"]), b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n");
        for len in 1..hello.len() {
            assert_eq!(judge(&hello[..len]), FirstBytesVerdict::Incomplete, "{len}");
        }
        for len in 1..get.len() {
            let expected = if len < 16 { FirstBytesVerdict::Unclear } else { FirstBytesVerdict::Incomplete };
            assert_eq!(judge(&get[..len]), expected, "{len}");
        }
    }
}
