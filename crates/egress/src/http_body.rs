//! Bodies of HTTP/1 requests: finds their end, and refuses those of which two parsers could find different ends.

use crate::http_head::parse_header;

/// Longest size line of a chunk: four GiB.
const SIZE_DIGITS_MAX: usize = 8;
/// Longest part behind the last chunk.
const TRAILER_LEN_MAX: usize = 8 << 10;
/// Trailers that a careless server could take for headers that matter.
const TRAILERS_REFUSED: &[&str] = &["content-length", "host", "transfer-encoding", "connection", "upgrade"];

/// The length of a body, as the head of its request gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyLength {
    /// This many bytes.
    Known(u64),
    /// Chunks, each behind its size.
    Chunked,
}

/// A body whose chunks are malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadChunk;

#[derive(Debug, PartialEq, Eq)]
enum MessageState {
    /// So many bytes are left, and then the body ends.
    Rest(u64),
    /// The size line of a chunk.
    Size(Vec<u8>),
    /// So many bytes of the chunk are left.
    Chunk(u64),
    /// The line end behind a chunk.
    ChunkEnd(usize),
    /// The lines behind the last chunk.
    Trailer { line: Vec<u8>, len: usize },
}

/// Finds the end of a body.
#[derive(Debug)]
pub struct BodyReader(MessageState);

impl BodyReader {
    /// A reader of a body of this length.
    pub fn new(length: BodyLength) -> Self {
        Self(match length {
            BodyLength::Known(len) => MessageState::Rest(len),
            BodyLength::Chunked => MessageState::Size(Vec::new()),
        })
    }

    /// Whether the body is complete.
    pub fn is_done(&self) -> bool {
        self.0 == MessageState::Rest(0)
    }

    /// Takes the next bytes, and returns how many of them belong to the body.
    pub fn push(&mut self, bytes: &[u8]) -> Result<usize, BadChunk> {
        let mut at = 0;
        while at < bytes.len() && !self.is_done() {
            at += self.step(&bytes[at..])?;
        }
        Ok(at)
    }

    /// Takes at least one byte.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, BadChunk> {
        let fitting = |left: u64| usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
        match &mut self.0 {
            MessageState::Rest(left) => {
                let taken = fitting(*left);
                *left -= taken as u64;
                Ok(taken)
            }
            MessageState::Chunk(left) => {
                let taken = fitting(*left);
                *left -= taken as u64;
                if *left == 0 {
                    self.0 = MessageState::ChunkEnd(0);
                }
                Ok(taken)
            }
            MessageState::ChunkEnd(at) => {
                (bytes[0] == b"\r\n"[*at]).then_some(()).ok_or(BadChunk)?;
                self.0 = if *at == 0 { MessageState::ChunkEnd(1) } else { MessageState::Size(Vec::new()) };
                Ok(1)
            }
            MessageState::Size(line) => {
                line.push(bytes[0]);
                if let Some(size) = parse_size(line)? {
                    self.0 = match size {
                        0 => MessageState::Trailer { line: Vec::new(), len: 0 },
                        size => MessageState::Chunk(size),
                    };
                }
                Ok(1)
            }
            MessageState::Trailer { line, len } => {
                line.push(bytes[0]);
                *len += 1;
                (*len <= TRAILER_LEN_MAX).then_some(()).ok_or(BadChunk)?;
                if let Some(end) = line.strip_suffix(b"\r\n") {
                    if end.is_empty() {
                        self.0 = MessageState::Rest(0);
                    } else {
                        check_trailer(end)?;
                        line.clear();
                    }
                }
                Ok(1)
            }
        }
    }
}

/// The size of a chunk, once its line is complete. Extensions are refused: no client of ours needs one.
fn parse_size(line: &[u8]) -> Result<Option<u64>, BadChunk> {
    let (digits, end) = line.split_at(line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count());
    let sound =
        digits.len() <= SIZE_DIGITS_MAX && (end.is_empty() || !digits.is_empty()) && b"\r\n".starts_with(end);
    sound.then_some(()).ok_or(BadChunk)?;
    if end.len() < 2 {
        return Ok(None);
    }
    let text = std::str::from_utf8(digits).map_err(|_| BadChunk)?;
    u64::from_str_radix(text, 16).map(Some).map_err(|_| BadChunk)
}

fn check_trailer(line: &[u8]) -> Result<(), BadChunk> {
    let text = std::str::from_utf8(line).map_err(|_| BadChunk)?;
    let (name, _) = parse_header(text).map_err(|_| BadChunk)?;
    let refused = TRAILERS_REFUSED.iter().any(|refused| name.eq_ignore_ascii_case(refused));
    if refused { Err(BadChunk) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of a chunked body, read as a whole and byte by byte; none if it is not complete.
    fn end(body: &[u8]) -> Result<Option<usize>, BadChunk> {
        let mut whole = BodyReader::new(BodyLength::Chunked);
        let at = whole.push(body).map(|at| whole.is_done().then_some(at));
        let mut slow = BodyReader::new(BodyLength::Chunked);
        let mut taken = 0;
        let slowly = body.iter().try_for_each(|byte| slow.push(&[*byte]).map(|len| taken += len));
        assert_eq!(slowly.map(|()| slow.is_done().then_some(taken)), at, "{body:?}");
        at
    }

    #[test]
    fn the_end_of_a_body_is_found_and_no_byte_beyond_it_taken() {
        for body in [
            &b"0\r\n\r\n"[..],
            b"5\r\nhello\r\n0\r\n\r\n",
            b"000A\r\n0123456789\r\n1\r\nx\r\n0\r\n\r\n",
            b"1\r\nx\r\n0\r\nx-checksum: 1\r\nother:\r\n\r\n",
        ] {
            assert_eq!(end(body), Ok(Some(body.len())));
            assert_eq!(end(&[body, b"GET / HTTP/1.1\r\n"].concat()), Ok(Some(body.len())));
            for len in 0..body.len() {
                assert_eq!(end(&body[..len]), Ok(None), "cut at {len}");
            }
        }
        let mut known = BodyReader::new(BodyLength::Known(5));
        assert_eq!((known.push(b"abc"), known.is_done()), (Ok(3), false));
        assert_eq!((known.push(b"defGET"), known.is_done()), (Ok(2), true));
        assert_eq!(known.push(b"GET"), Ok(0));
    }

    #[test]
    fn chunks_with_two_readings_are_refused() {
        for body in [
            &b"\r\n"[..],
            b"5;ext=1\r\nhello",
            b"5 \r\nhello",
            b" 5\r\nhello",
            b"+5\r\nhello",
            b"0x5\r\nhello",
            b"5\nhello\n",
            b"5\rhello",
            b"123456789\r\n",
            b"5\r\nhelloX",
            b"5\r\nhello\n",
            b"0\r\nno trailer\r\n",
            b"0\r\nContent-Length: 5\r\n\r\n",
            b"0\r\na: b\nc: d\r\n",
            &[&b"0\r\n"[..], &[b'a'; TRAILER_LEN_MAX + 1]].concat(),
        ] {
            assert_eq!(end(body), Err(BadChunk), "{:?}", String::from_utf8_lossy(body));
        }
    }
}
