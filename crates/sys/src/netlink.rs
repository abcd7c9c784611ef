//! Netlink: messages to the kernel's network tables, and its answers.
//!
//! Invariant: [`send`] succeeds only if the kernel acknowledged every message that asks for it.

use std::io;

use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

const HEADER_LEN: usize = size_of::<libc::nlmsghdr>();
/// Longest answer: the kernel's error number and a copy of the message.
const ANSWER_LEN_MAX: usize = 8 << 10;

/// One attribute, padded to its alignment.
pub(crate) type Attribute = Vec<u8>;

/// An attribute with raw contents.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Attribute {
    let len = size_of::<libc::nlattr>() + value.len();
    let mut bytes = Vec::with_capacity(len.next_multiple_of(4));
    bytes.extend((len as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(len.next_multiple_of(4), 0);
    bytes
}

/// An attribute with a number in network byte order, as all of nf_tables have them.
pub(crate) fn number(kind: u16, value: i32) -> Attribute {
    attribute(kind, &value.to_be_bytes())
}

/// An attribute with a text, which ends with a zero byte.
pub(crate) fn text(kind: u16, value: &str) -> Attribute {
    attribute(kind, &[value.as_bytes(), b"\0"].concat())
}

/// An attribute that consists of attributes.
pub(crate) fn nested(kind: u16, parts: &[Attribute]) -> Attribute {
    attribute(libc::NLA_F_NESTED as u16 | kind, &parts.concat())
}

/// A message with its flags, the header of its family, and its attributes.
pub(crate) struct Message {
    kind: u16,
    flags: u16,
    contents: Vec<u8>,
}

impl Message {
    /// A message that the kernel does not acknowledge.
    pub(crate) fn new(kind: u16, header: &[u8], attributes: &[Attribute]) -> Self {
        let contents = [header, &attributes.concat()].concat();
        Self { kind, flags: libc::NLM_F_REQUEST as u16, contents }
    }

    /// Asks the kernel to create something new, behind what is there, and to acknowledge it.
    pub(crate) fn creates(self) -> Self {
        let flags = libc::NLM_F_ACK | libc::NLM_F_CREATE | libc::NLM_F_EXCL | libc::NLM_F_APPEND;
        Self { flags: self.flags | flags as u16, ..self }
    }

    fn is_acknowledged(&self) -> bool {
        self.flags & libc::NLM_F_ACK as u16 != 0
    }

    fn write(&self, sequence: u32, bytes: &mut Vec<u8>) {
        bytes.extend(((HEADER_LEN + self.contents.len()) as u32).to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        // The port id of the sender; the kernel knows it.
        bytes.extend([0; 4]);
        // The parts of a message have a length that is a multiple of four, so no padding is needed.
        bytes.extend(&self.contents);
    }
}

/// Sends messages to a netlink family of the caller's network namespace, and returns the first error.
pub(crate) fn send(family: Option<Protocol>, messages: &[Message]) -> io::Result<()> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, family)?;
    let mut bytes = Vec::new();
    for (message, sequence) in messages.iter().zip(1..) {
        message.write(sequence, &mut bytes);
    }
    rustix::net::send(&socket, &bytes, SendFlags::empty())?;
    let mut missing = messages.iter().filter(|message| message.is_acknowledged()).count();
    let mut answer = vec![0; ANSWER_LEN_MAX];
    while missing > 0 {
        // The kernel has answered when `send` returns, so this never waits.
        let (len, _) = rustix::net::recv(&socket, answer.as_mut_slice(), RecvFlags::DONTWAIT)?;
        missing = missing.saturating_sub(count_acknowledged(&answer[..len])?);
    }
    Ok(())
}

/// Counts the acknowledgements of an answer; fails if one of them is an error.
fn count_acknowledged(mut answer: &[u8]) -> io::Result<usize> {
    let mut count = 0;
    while !answer.is_empty() {
        let (len, kind, code) = read_answer(answer).ok_or(io::ErrorKind::InvalidData)?;
        if i32::from(kind) == libc::NLMSG_ERROR {
            match code {
                0 => count += 1,
                code => return Err(io::Error::from_raw_os_error(-code)),
            }
        }
        answer = answer.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(count)
}

/// The length of the first message of an answer, its kind, and the error number that begins its contents.
fn read_answer(answer: &[u8]) -> Option<(usize, u16, i32)> {
    let (len, rest) = answer.split_first_chunk()?;
    let (kind, _) = rest.split_first_chunk()?;
    let (code, _) = answer.get(HEADER_LEN..)?.split_first_chunk()?;
    let len = usize::try_from(u32::from_ne_bytes(*len)).ok().filter(|len| *len >= HEADER_LEN)?;
    Some((len, u16::from_ne_bytes(*kind), i32::from_ne_bytes(*code)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_nested() {
        let inner = [text(1, "lo"), number(2, 1)];
        let bytes = nested(3, &inner);
        let expected = [20, 0, 3, 0x80, 7, 0, 1, 0, b'l', b'o', 0, 0, 8, 0, 2, 0, 0, 0, 0, 1];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn an_answer_is_an_acknowledgement_or_an_error() {
        let answer = |kind: i32, code: i32| {
            let mut bytes = Vec::new();
            let contents = code.to_ne_bytes().to_vec();
            Message { kind: kind as u16, flags: 0, contents }.write(1, &mut bytes);
            bytes
        };
        let done = answer(libc::NLMSG_ERROR, 0);
        assert_eq!(count_acknowledged(&[done.clone(), done.clone()].concat()).unwrap(), 2);
        assert_eq!(count_acknowledged(&answer(libc::NLMSG_NOOP, 0)).unwrap(), 0);
        let failed = [done, answer(libc::NLMSG_ERROR, -libc::ENOENT)].concat();
        assert_eq!(count_acknowledged(&failed).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        for bad in [&failed[..7], &[0; 20][..]] {
            assert_eq!(count_acknowledged(bad).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
