//! Parses the server name of a TLS ClientHello without trusting any length in it.
//!
//! Invariant: a hello that two parsers could read differently is an error: two server names, bytes behind its end,
//! records that are no handshake.

/// Longest hello with its records.
pub const HELLO_LEN_MAX: usize = 64 << 10;
/// The type of a record with a handshake message, and the type of the message.
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const RECORD_LEN_MAX: usize = 1 << 14;

/// A ClientHello.
#[derive(Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// The server name that it asks for, if it asks for one.
    pub server_name: Option<String>,
}

/// The reason why bytes are no ClientHello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelloError {
    /// They are not TLS.
    NotTls,
    /// They begin like one, and are malformed or ambiguous.
    Malformed,
    /// The hello is longer than [`HELLO_LEN_MAX`].
    TooLong,
}

impl HelloError {
    /// The reason, for a decision.
    pub fn why(self) -> &'static str {
        match self {
            Self::NotTls => "its first bytes are not TLS with a server name",
            Self::Malformed => "its TLS hello is malformed",
            Self::TooLong => "its TLS hello is too long",
        }
    }
}

/// Collects a ClientHello from the records and pieces in which it comes.
#[derive(Debug, Default)]
pub struct HelloReader {
    /// The bytes after the last whole record.
    rest: Vec<u8>,
    /// The handshake messages of the records so far.
    message: Vec<u8>,
    len: usize,
}

impl HelloReader {
    /// Takes the next bytes. Returns the hello as soon as it is whole.
    pub fn push(&mut self, piece: &[u8]) -> Result<Option<ClientHello>, HelloError> {
        self.len += piece.len();
        self.rest.extend_from_slice(piece);
        while let Some(record) = self.record()? {
            self.message.extend(record);
            if let Some(hello) = self.hello()? {
                return Ok(Some(hello));
            }
        }
        if self.len > HELLO_LEN_MAX { Err(HelloError::TooLong) } else { Ok(None) }
    }

    /// Takes a whole record from the bytes.
    fn record(&mut self) -> Result<Option<Vec<u8>>, HelloError> {
        let wrong = if self.message.is_empty() { HelloError::NotTls } else { HelloError::Malformed };
        let starts = |at: usize, is: fn(u8) -> bool| self.rest.get(at).is_none_or(|byte| is(*byte));
        if !starts(0, |byte| byte == HANDSHAKE)
            || !starts(1, |byte| byte == 3)
            || !starts(2, |byte| byte <= 4)
        {
            return Err(wrong);
        }
        let [_, _, _, high, low, ..] = self.rest[..] else { return Ok(None) };
        let len = usize::from(u16::from_be_bytes([high, low]));
        if len == 0 || len > RECORD_LEN_MAX {
            return Err(HelloError::Malformed);
        }
        if self.rest.len() < 5 + len {
            return Ok(None);
        }
        let after = self.rest.split_off(5 + len);
        Ok(Some(std::mem::replace(&mut self.rest, after).split_off(5)))
    }

    fn hello(&self) -> Result<Option<ClientHello>, HelloError> {
        if self.message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(HelloError::Malformed);
        }
        let [_, high, middle, low, ref body @ ..] = self.message[..] else { return Ok(None) };
        let len = u32::from_be_bytes([0, high, middle, low]) as usize;
        match body.len() {
            _ if len > HELLO_LEN_MAX => Err(HelloError::TooLong),
            have if have < len => Ok(None),
            // A client sends no further message before the server has answered.
            have if have > len => Err(HelloError::Malformed),
            _ => parse_hello(body).map(Some).ok_or(HelloError::Malformed),
        }
    }
}

fn parse_hello(body: &[u8]) -> Option<ClientHello> {
    let mut hello = Reader(body);
    hello.take(34)?;
    hello.sized(1)?;
    hello.sized(2)?;
    hello.sized(1)?;
    // Before TLS 1.2 a hello could end here.
    let mut extensions = Reader(if hello.0.is_empty() { &[] } else { hello.sized(2)? });
    hello.0.is_empty().then_some(())?;
    let mut server_name = None;
    while !extensions.0.is_empty() {
        let kind = extensions.take(2)?;
        let body = extensions.sized(2)?;
        if kind == [0, 0] && server_name.replace(parse_names(body)?).is_some() {
            return None;
        }
    }
    Some(ClientHello { server_name })
}

/// Reads the one name of a server name extension.
fn parse_names(body: &[u8]) -> Option<String> {
    let mut list = Reader(body);
    let mut names = Reader(list.sized(2)?);
    (names.take(1)? == [0]).then_some(())?;
    let name = names.sized(2)?;
    (names.0.is_empty() && list.0.is_empty()).then_some(())?;
    String::from_utf8(name.to_owned()).ok()
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// The bytes after a length field of `bytes` bytes.
    fn sized(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let len = self.take(bytes)?.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
        self.take(len)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    fn sized(bytes: &[u8], width: usize) -> Vec<u8> {
        [&(bytes.len() as u32).to_be_bytes()[4 - width..], bytes].concat()
    }

    /// The message of a ClientHello that asks for these names, with a padding of this length.
    fn message_for(names: &[&str], padding: usize) -> Vec<u8> {
        let extension = |name: &&str| {
            [&[0, 0][..], &sized(&sized(&[&[0][..], &sized(name.as_bytes(), 2)].concat(), 2), 2)].concat()
        };
        // The padding comes first, as the large key shares of today do.
        let mut extensions = [&[0, 21][..], &sized(&vec![0; padding], 2)].concat();
        extensions.extend(names.iter().flat_map(extension));
        let lists = [sized(&[], 1), sized(&[0x13, 1], 2), sized(&[0], 1), sized(&extensions, 2)].concat();
        let body = [&[3, 3][..], &[0; 32], &lists].concat();
        [&[1][..], &sized(&body, 3)].concat()
    }

    /// A ClientHello with a hidden one inside (ECH), as browsers send also where no server asks for it.
    pub fn hiding_hello_for(name: &str) -> Vec<u8> {
        let mut message = message_for(&[name], 0);
        // An outer hello: HKDF-SHA256, AES-128-GCM, a key and a payload.
        let hidden = [&[0, 0, 1, 0, 1, 7][..], &sized(&[9; 32], 2), &sized(&[8; 200], 2)].concat();
        let extension = [&[0xfe, 0x0d][..], &sized(&hidden, 2)].concat();
        // The lengths of the message and of its extensions stand behind the type, and before the first extension.
        let add = |message: &mut [u8], at: usize, width: usize| {
            let old = message[at..at + width].iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
            let new = ((old + extension.len()) as u32).to_be_bytes();
            message[at..at + width].copy_from_slice(&new[4 - width..]);
        };
        add(&mut message, 1, 3);
        add(&mut message, 4 + 2 + 32 + 1 + 4 + 2, 2);
        message.extend(&extension);
        records(&message, RECORD_LEN_MAX)
    }

    /// A message in records of at most this length.
    fn records(message: &[u8], len: usize) -> Vec<u8> {
        message.chunks(len).flat_map(|piece| [&[22, 3, 1][..], &sized(piece, 2)].concat()).collect()
    }

    /// A ClientHello that asks for these names.
    pub fn hello_for(names: &[&str]) -> Vec<u8> {
        records(&message_for(names, 0), RECORD_LEN_MAX)
    }

    /// A ClientHello in many records.
    pub fn torn_hello_for(name: &str) -> Vec<u8> {
        records(&message_for(&[name], 1500), 7)
    }

    fn read(bytes: &[u8]) -> Result<Option<ClientHello>, HelloError> {
        HelloReader::default().push(bytes)
    }

    fn named(name: &str) -> Result<Option<ClientHello>, HelloError> {
        Ok(Some(ClientHello { server_name: Some(name.into()) }))
    }

    #[test]
    fn the_name_of_a_hello_is_read_and_nonsense_has_none() {
        let hello = hello_for(&["pypi.org"]);
        assert_eq!(read(&hello), named("pypi.org"));
        assert_eq!(read(&hello_for(&[])), Ok(Some(ClientHello { server_name: None })));
        assert_eq!(read(&hello_for(&["pypi.org", "evil.io"])), Err(HelloError::Malformed));
        assert_eq!(read(&hello_for(&["pypi.org", "pypi.org"])), Err(HelloError::Malformed));
        for len in 0..hello.len() {
            assert_eq!(read(&hello[..len]), Ok(None), "cut at {len}");
        }
        for other in [&b"GET / HTTP/1.1"[..], b"\x16\x02", b"\x16\x03\x09", b"\x80\x2e\x01"] {
            assert_eq!(read(other), Err(HelloError::NotTls));
        }
    }

    #[test]
    fn a_hello_in_many_records_and_pieces_is_put_together() {
        let torn = torn_hello_for("pypi.org");
        assert_eq!(read(&torn), named("pypi.org"));
        let mut reader = HelloReader::default();
        let (last, front) = torn.split_last().unwrap();
        for byte in front {
            assert_eq!(reader.push(&[*byte]), Ok(None));
        }
        assert_eq!(reader.push(&[*last]), named("pypi.org"));
        // Bytes of the next record, such as early data, do not matter here.
        assert_eq!(read(&[&torn[..], &[23, 3, 3]].concat()), named("pypi.org"));
    }

    #[test]
    fn a_hello_with_a_hidden_one_counts_by_its_outer_name() {
        assert_eq!(read(&hiding_hello_for("pypi.org")), named("pypi.org"));
    }

    #[test]
    fn a_hello_with_two_readings_is_an_error() {
        let message = message_for(&["pypi.org"], 0);
        let second = [&message[..], &message_for(&["evil.io"], 0)].concat();
        let mut empty = hello_for(&["pypi.org"]);
        empty.splice(0..0, [22, 3, 1, 0, 0]);
        let mut mixed = records(&message, 20);
        mixed[25] = 23;
        let mut not_hello = message.clone();
        not_hello[0] = 2;
        for bad in [records(&second, RECORD_LEN_MAX), empty, mixed, records(&not_hello, 100)] {
            assert_eq!(read(&bad), Err(HelloError::Malformed));
        }
        assert_eq!(read(&records(&[1, 1, 0, 1], 4)), Err(HelloError::TooLong));
        let mut endless = HelloReader::default();
        let piece = records(&[[1, 0, 255, 255]; 10].concat(), 1);
        let result = (0..1000).find_map(|_| endless.push(&piece).err());
        assert_eq!(result, Some(HelloError::TooLong));
    }
}
