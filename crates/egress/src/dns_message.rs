//! DNS messages between the programs of a Body and its resolver: one question in, one short answer out.
//!
//! The reader is written by hand: `hickory-proto` alone would bring some fifty crates (`idna` with the tables of ICU,
//! `url`, `rand`) into this process, and it keeps records that this resolver never reads.
//!
//! Trust: every message is hostile. No length is believed, a name in a question has no pointers, and a label keeps no
//! character that could mean another label.

/// Longest message without EDNS.
const PLAIN_LEN_MAX: usize = 512;
/// Longest message at all.
pub const MESSAGE_LEN_MAX: usize = 4096;
/// The longest answer by UDP that this resolver says it can send; its answers are far shorter.
const EDNS_LEN: u16 = 1232;
const HEADER_LEN: usize = 12;
/// Longest name on the wire.
const NAME_LEN_MAX: usize = 255;
/// How long a program may keep an answer, in seconds.
const TTL: u32 = 5;

pub const A: u16 = 1;
pub const PTR: u16 = 12;
pub const AAAA: u16 = 28;
pub const SVCB: u16 = 64;
pub const HTTPS: u16 = 65;
const OPT: u16 = 41;
pub const INTERNET: u16 = 1;

/// The result of a query, as the last four bits of the flags or as an extended code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseCode {
    NoError = 0,
    FormatError = 1,
    ServerFailure = 2,
    NameError = 3,
    NotImplemented = 4,
    Refused = 5,
    /// Needs EDNS: the query's version of it is unknown.
    BadVersion = 16,
}

/// A question of a program.
#[derive(Debug, PartialEq, Eq)]
pub struct Query<'a> {
    id: [u8; 2],
    recursion_desired: bool,
    /// The question section, as it came: some programs compare the spelling of its name.
    section: &'a [u8],
    /// The name in lower case, without a dot at its end; bytes that no host name has are escaped.
    pub name: String,
    pub kind: u16,
    pub class: u16,
    /// The version of EDNS, if the query uses it.
    edns: Option<u8>,
}

/// The record of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum DnsRecord {
    Address(std::net::Ipv4Addr),
    Name(String),
}

/// Parses a query. The error is the message to answer it with, or none if it deserves no answer.
pub fn parse(message: &[u8]) -> Result<Query<'_>, Option<Vec<u8>>> {
    let Some((header, rest)) = message.split_at_checked(HEADER_LEN) else { return Err(None) };
    // An answer to an answer could go back and forth for ever.
    if header[2] & 0x80 != 0 {
        return Err(None);
    }
    let id = [header[0], header[1]];
    let bare = |code| Some(header_of(id, header[2] & 1 != 0, code, [0; 3]));
    if header[2] & 0x78 != 0 {
        return Err(bare(ResponseCode::NotImplemented));
    }
    let count = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    if message.len() > MESSAGE_LEN_MAX || [count(4), count(6), count(8)] != [1, 0, 0] || count(10) > 1 {
        return Err(bare(ResponseCode::FormatError));
    }
    let query = parse_sections(id, header[2] & 1 != 0, rest, count(10) == 1);
    let query = query.filter(|query| query.edns.is_some() || message.len() <= PLAIN_LEN_MAX);
    let query = query.ok_or_else(|| bare(ResponseCode::FormatError))?;
    match query.edns {
        Some(1..) => Err(Some(query.answer(ResponseCode::BadVersion, None))),
        _ => Ok(query),
    }
}

fn parse_sections(id: [u8; 2], recursion_desired: bool, rest: &[u8], has_more: bool) -> Option<Query<'_>> {
    let (name, name_len) = parse_name(rest)?;
    let (section, more) = rest.split_at_checked(name_len + 4)?;
    let number = |at: usize| u16::from_be_bytes([section[at], section[at + 1]]);
    let edns = if has_more { Some(parse_edns(more)?) } else { None };
    (has_more || more.is_empty()).then_some(())?;
    let (kind, class) = (number(name_len), number(name_len + 2));
    Some(Query { id, recursion_desired, section, name, kind, class, edns })
}

/// Reads a name and its length on the wire.
fn parse_name(bytes: &[u8]) -> Option<(String, usize)> {
    let (mut name, mut at) = (String::new(), 0);
    loop {
        let len = usize::from(*bytes.get(at)?);
        at += 1;
        if len == 0 {
            return (at <= NAME_LEN_MAX).then_some((name, at));
        }
        // Longer ones are pointers, or nothing that is defined.
        let label = (len < 64).then(|| bytes.get(at..at + len)).flatten()?;
        at += len;
        if at > NAME_LEN_MAX {
            return None;
        }
        if !name.is_empty() {
            name.push('.');
        }
        for byte in label {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => {
                    name.push(char::from(byte.to_ascii_lowercase()));
                }
                other => name.push_str(&format!("\\{other:03}")),
            }
        }
    }
}

/// Reads the one additional record that a query may have, and returns the version of EDNS. Its options are ignored.
fn parse_edns(record: &[u8]) -> Option<u8> {
    let [0, high, low, _, _, _, version, _, _, len_high, len_low, options @ ..] = record else { return None };
    let len = usize::from(u16::from_be_bytes([*len_high, *len_low]));
    (u16::from_be_bytes([*high, *low]) == OPT && options.len() == len).then_some(*version)
}

fn header_of(id: [u8; 2], recursion_desired: bool, code: ResponseCode, counts: [u16; 3]) -> Vec<u8> {
    let [questions, answers, more] = counts;
    // An answer; recursion is available.
    let flags = [0x80 | u8::from(recursion_desired), 0x80 | (code as u8 & 15)];
    let mut message = [id, flags].concat();
    message.extend([questions, answers, 0, more].iter().flat_map(|count| count.to_be_bytes()));
    message
}

impl Query<'_> {
    /// The message that answers the query.
    pub fn answer(&self, code: ResponseCode, record: Option<&DnsRecord>) -> Vec<u8> {
        let counts = [1, u16::from(record.is_some()), u16::from(self.edns.is_some())];
        let mut message = header_of(self.id, self.recursion_desired, code, counts);
        message.extend_from_slice(self.section);
        if let Some(record) = record {
            let (kind, data) = record.encode();
            // The name is the one of the question, right behind the header.
            message.extend_from_slice(&[0xc0, HEADER_LEN as u8]);
            message.extend([kind, INTERNET].iter().flat_map(|number| number.to_be_bytes()));
            message.extend(TTL.to_be_bytes());
            message.extend((data.len() as u16).to_be_bytes());
            message.extend(data);
        }
        if self.edns.is_some() {
            message.push(0);
            message.extend([OPT, EDNS_LEN].iter().flat_map(|number| number.to_be_bytes()));
            message.extend([code as u8 >> 4, 0, 0, 0, 0, 0]);
        }
        message
    }
}

impl DnsRecord {
    fn encode(&self) -> (u16, Vec<u8>) {
        match self {
            Self::Address(address) => (A, address.octets().to_vec()),
            Self::Name(name) => (PTR, encode_name(name)),
        }
    }
}

/// A canonical name on the wire.
pub fn encode_name(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut bytes: Vec<u8> =
        labels.flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat()).collect();
    bytes.push(0);
    bytes
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A query of one type for one name.
    pub fn query(name: &str, kind: u16) -> Vec<u8> {
        let mut message = vec![0xab, 0xcd, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        message.extend(encode_name(name));
        message.extend([kind, INTERNET].iter().flat_map(|number| number.to_be_bytes()));
        message
    }

    fn with_edns(mut message: Vec<u8>, version: u8, options: &[u8]) -> Vec<u8> {
        message[11] = 1;
        message.extend([0, 0, 41, 16, 0, 0, version, 0, 0]);
        message.extend((options.len() as u16).to_be_bytes());
        message.extend(options);
        message
    }

    /// The response code of an answer, and the number of its records.
    pub fn outcome(answer: &[u8]) -> (u8, u8) {
        assert!(answer[..2] == [0xab, 0xcd] && answer[2] & 0x80 != 0, "{answer:?}");
        (answer[3] & 15, answer[7])
    }

    #[test]
    fn one_question_is_read_and_answered() {
        let message = query("A.Test", A);
        let read = parse(&message).unwrap();
        assert_eq!((read.name.as_str(), read.kind, read.class), ("a.test", A, INTERNET));
        let answer = read.answer(ResponseCode::NoError, Some(&DnsRecord::Address([198, 18, 0, 1].into())));
        assert_eq!(outcome(&answer), (0, 1));
        assert_eq!(&answer[12..12 + message.len() - 12], &message[12..], "the question in its own spelling");
        assert_eq!(answer[message.len()..], [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 198, 18, 0, 1]);
        let pointer = read.answer(ResponseCode::NoError, Some(&DnsRecord::Name("b.test".into())));
        assert!(pointer.ends_with(&[0, 8, 1, b'b', 4, b't', b'e', b's', b't', 0]));
    }

    #[test]
    fn edns_is_tolerated_and_its_options_go_nowhere() {
        let long = with_edns(query("a.test", A), 0, &[7; 2000]);
        let answer = parse(&long).unwrap().answer(ResponseCode::NoError, None);
        assert!(answer.ends_with(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]), "{answer:?}");
        let newer = with_edns(query("a.test", A), 1, &[]);
        let answer = parse(&newer).unwrap_err().unwrap();
        assert!(answer.ends_with(&[0, 0, 41, 4, 208, 1, 0, 0, 0, 0, 0]), "{answer:?}");
        assert_eq!(outcome(&parse(&with_edns(query("a.test", A), 0, &[7; 4090])).unwrap_err().unwrap()).0, 1);
    }

    #[test]
    fn malformed_messages_are_errors_or_deserve_silence() {
        let good = query("a.test", A);
        for len in 0..good.len() {
            let cut = parse(&good[..len]).unwrap_err();
            assert_eq!(cut.map(|answer| outcome(&answer).0), (len >= 12).then_some(1), "cut at {len}");
        }
        let changed = |at: usize, byte: u8| {
            let mut message = good.clone();
            message[at] = byte;
            parse(&message).unwrap_err().map(|answer| outcome(&answer).0)
        };
        assert_eq!(changed(2, 0x81), None, "an answer");
        assert_eq!(changed(2, 0x29), Some(4), "an update");
        for (at, byte, what) in [
            (5, 2, "two questions"),
            (5, 0, "no question"),
            (7, 1, "an answer record"),
            (9, 1, "an authority record"),
            (11, 1, "an additional record that is not there"),
            (12, 0xc0, "a pointer"),
            (12, 0x40, "a label of an undefined kind"),
            (12, 60, "a label beyond the end"),
        ] {
            assert_eq!(changed(at, byte), Some(1), "{what}");
        }
        let mut trailing = good.clone();
        trailing.push(0);
        assert!(parse(&trailing).is_err());
        let long = query(&["a".repeat(63).as_str(); 4].join("."), A);
        assert!(parse(&long).is_err(), "a name of more than 255 bytes");
    }

    #[test]
    fn a_label_with_a_dot_is_no_two_labels() {
        let mut message = query("pypiXorg", A);
        message[12 + 5] = b'.';
        assert_eq!(parse(&message).unwrap().name, "pypi\\046org");
        message[12 + 5] = 0;
        assert_eq!(parse(&message).unwrap().name, "pypi\\000org");
    }
}
