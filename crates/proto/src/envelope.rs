//! Connect's envelopes: one byte of flags, four bytes of length, the message.
//!
//! Trust: the peer is hostile. A length over the limit is an error before anything is buffered.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Flag of the last envelope of a stream.
pub const END: u8 = 0x02;
/// Flag of a compressed message; Palisade neither sends nor accepts one.
pub const COMPRESSED: u8 = 0x01;
const HEAD_LEN: usize = 5;

/// Why a stream of envelopes is invalid.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EnvelopeError {
    /// The message is longer than the limit.
    #[error("a message of {len} bytes is over the limit of {max}")]
    TooLong {
        /// The length in the header.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The flags are unknown.
    #[error("unknown flags {0:#04x} on a message")]
    Flags(u8),
    /// The stream ended inside a message.
    #[error("the stream was cut inside a message")]
    Cut,
}

/// One envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// [`END`] or 0.
    pub flags: u8,
    /// The message.
    pub message: Bytes,
}

/// Wraps a message in an envelope.
pub fn seal(flags: u8, message: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD_LEN + message.len());
    out.put_u8(flags);
    out.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    out.put_slice(message);
    out.freeze()
}

/// Parses envelopes from bytes that arrive in pieces.
#[derive(Debug)]
pub struct EnvelopeReader {
    held: BytesMut,
    len_max: usize,
}

impl EnvelopeReader {
    /// Accepts messages of at most `len_max` bytes.
    pub fn new(len_max: usize) -> Self {
        Self { held: BytesMut::new(), len_max }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// The next complete envelope, if it has arrived.
    #[expect(clippy::should_implement_trait, reason = "none now is not the end: more may arrive")]
    pub fn next(&mut self) -> Result<Option<Envelope>, EnvelopeError> {
        let Some(head) = self.held.get(..HEAD_LEN) else { return Ok(None) };
        let flags = head[0];
        let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if flags & !END != 0 {
            return Err(EnvelopeError::Flags(flags));
        }
        if len > self.len_max {
            return Err(EnvelopeError::TooLong { len: len as u64, max: self.len_max as u64 });
        }
        if self.held.len() < HEAD_LEN + len {
            return Ok(None);
        }
        self.held.advance(HEAD_LEN);
        Ok(Some(Envelope { flags, message: self.held.split_to(len).freeze() }))
    }

    /// Checks that the stream may end here.
    pub fn finish(&self) -> Result<(), EnvelopeError> {
        if self.held.is_empty() { Ok(()) } else { Err(EnvelopeError::Cut) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_survive_any_cutting() {
        let sent = [seal(0, b"one"), seal(0, b""), seal(END, b"{}")].concat();
        for cut in 1..sent.len() {
            let mut opener = EnvelopeReader::new(16);
            let mut got = Vec::new();
            for piece in sent.chunks(cut) {
                opener.push(piece);
                while let Some(envelope) = opener.next().unwrap() {
                    got.push((envelope.flags, envelope.message.to_vec()));
                }
            }
            assert_eq!(got, [(0, b"one".to_vec()), (0, vec![]), (END, b"{}".to_vec())]);
            opener.finish().unwrap();
        }
    }

    #[test]
    fn an_endless_message_is_refused_by_its_head() {
        let mut opener = EnvelopeReader::new(1024);
        opener.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(opener.next(), Err(EnvelopeError::TooLong { len: 0xffff_ffff, max: 1024 }));
        let mut opener = EnvelopeReader::new(1024);
        opener.push(&[0x80, 0, 0, 0, 0]);
        assert_eq!(opener.next(), Err(EnvelopeError::Flags(0x80)));
        let mut opener = EnvelopeReader::new(1024);
        opener.push(&[0, 0, 0]);
        assert_eq!((opener.next(), opener.finish()), (Ok(None), Err(EnvelopeError::Cut)));
    }
}
