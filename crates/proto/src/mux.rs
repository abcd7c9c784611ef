//! Multiplexes many streams over the one channel between a microVM's guest and its host.
//!
//! A frame is a header of eight bytes (kind, three bytes of length, four bytes of stream number, little
//! endian) and its contents. Each direction of each stream has a window: a sender sends no more than the
//! receiver gave it credit for. So a stream that its receiver does not read blocks only itself.
//!
//! The host opens streams to the guest's services. The guest opens streams to one service of the host, the Body's egress
//! proxy; their numbers begin at [`GUEST_STREAMS`]. `Hold` and `Held` stop both directions at the end of a frame with nothing in
//! flight; then the host can take a snapshot. After a restore, the host begins with a `Welcome` on the empty
//! channel.
//!
//! Trust: the peer is hostile. A frame that breaks a rule ends the channel; no frame is skipped.

use std::collections::HashMap;

/// Length of a header.
pub const HEADER_LEN: usize = 8;
/// Longest contents of a data frame: short enough that no stream waits long for a frame of another.
pub const DATA_LEN_MAX: usize = 16 << 10;
/// Longest contents of a frame about the channel itself.
pub const WORD_LEN_MAX: usize = 1 << 20;
/// How many bytes a sender may send before the receiver has confirmed any.
pub const WINDOW: u32 = 256 << 10;
/// Most streams at once.
pub const STREAMS_MAX: usize = 1024;

/// The number of the first stream that a guest opens; those of the host are below.
pub const GUEST_STREAMS: u32 = 1 << 31;
/// Most streams at once that a guest opened.
pub const GUEST_STREAMS_MAX: usize = 256;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Host: the guest's setup as JSON. All open streams are gone.
    Welcome = 1,
    /// Guest: its receipt as JSON, after it has applied the setup.
    Receipt = 2,
    /// Host: a new stream.
    Open = 3,
    /// Bytes of a stream.
    Data = 4,
    /// The receiver has read so many bytes: a number of four bytes.
    Credit = 5,
    /// The sender sends no more on this stream.
    End = 6,
    /// The stream is closed in both directions.
    Reset = 7,
    /// Host: asks the guest to send nothing after its answer.
    Hold = 8,
    /// Guest: its answer, after which it sends nothing.
    Held = 9,
    /// Host: the guest may send again.
    GoOn = 10,
    /// Guest: it has shut down, and its microVM stops now.
    Bye = 11,
    /// Guest: it has booted and waits for its setup.
    Here = 12,
    /// Guest: a new stream to the Body's egress proxy.
    Ask = 13,
}

impl FrameKind {
    const ALL: [FrameKind; 13] = [
        Self::Welcome,
        Self::Receipt,
        Self::Open,
        Self::Data,
        Self::Credit,
        Self::End,
        Self::Reset,
        Self::Hold,
        Self::Held,
        Self::GoOn,
        Self::Bye,
        Self::Here,
        Self::Ask,
    ];

    /// Longest contents of a frame of this kind.
    fn len_max(self) -> usize {
        match self {
            Self::Welcome | Self::Receipt | Self::Held => WORD_LEN_MAX,
            Self::Data => DATA_LEN_MAX,
            Self::Credit => 4,
            _ => 0,
        }
    }
}

/// A rule that the peer broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MuxViolation {
    /// The kind of the frame is unknown.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// The frame is longer than its kind allows.
    #[error("a frame of kind {0:?} with {1} bytes")]
    Length(FrameKind, usize),
    /// Only the other side may send this kind.
    #[error("a frame of kind {0:?} from the wrong side")]
    Side(FrameKind),
    /// The peer sent more data than it had credit for.
    #[error("more data than stream {0} has room for")]
    Window(u32),
    /// The peer gave more credit than the window allows.
    #[error("more credit than stream {0} can have")]
    Credit(u32),
    /// Too many streams are open, or this one is.
    #[error("stream {0} cannot be opened")]
    Open(u32),
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MuxFrame {
    /// The kind.
    pub kind: FrameKind,
    /// The stream; 0 for a frame about the channel itself.
    pub stream: u32,
    /// Its contents.
    pub contents: Vec<u8>,
}

/// Encodes a frame.
pub fn seal(kind: FrameKind, stream: u32, contents: &[u8]) -> Vec<u8> {
    let len = (contents.len() as u32).to_le_bytes();
    let mut sealed = Vec::with_capacity(HEADER_LEN + contents.len());
    sealed.extend_from_slice(&[kind as u8, len[0], len[1], len[2]]);
    sealed.extend_from_slice(&stream.to_le_bytes());
    sealed.extend_from_slice(contents);
    sealed
}

/// Parses frames from bytes that arrive in pieces.
#[derive(Debug, Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
    at: usize,
}

impl FrameReader {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.at > 0 && self.at == self.bytes.len() {
            self.bytes.clear();
            self.at = 0;
        } else if self.at > DATA_LEN_MAX {
            self.bytes.drain(..self.at);
            self.at = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete frame, if it has arrived.
    #[expect(clippy::should_implement_trait, reason = "none now is not the end: more may arrive")]
    pub fn next(&mut self) -> Result<Option<MuxFrame>, MuxViolation> {
        let Some(header) = self.bytes.get(self.at..self.at + HEADER_LEN) else { return Ok(None) };
        let kind = FrameKind::ALL
            .into_iter()
            .find(|kind| *kind as u8 == header[0])
            .ok_or(MuxViolation::Kind(header[0]))?;
        let len = u32::from_le_bytes([header[1], header[2], header[3], 0]) as usize;
        if len > kind.len_max() || kind == FrameKind::Credit && len != 4 {
            return Err(MuxViolation::Length(kind, len));
        }
        let stream = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        let from = self.at + HEADER_LEN;
        let Some(contents) = self.bytes.get(from..from + len) else { return Ok(None) };
        let frame = MuxFrame { kind, stream, contents: contents.to_vec() };
        self.at = from + len;
        Ok(Some(frame))
    }
}

/// The side of the channel that a process is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuxSide {
    /// Opens streams.
    Host,
    /// Accepts streams.
    Guest,
}

/// The flow control of all streams: how much each side may send.
#[derive(Debug)]
pub struct FlowLedger {
    side: MuxSide,
    streams: HashMap<u32, StreamAccount>,
}

#[derive(Debug, Clone, Copy)]
struct StreamAccount {
    /// How many bytes this side may send.
    credit: u32,
    /// How many bytes the peer may send.
    room: u32,
    /// The peer sends no more.
    ended_there: bool,
    /// This side sends no more.
    ended_here: bool,
}

const FRESH: StreamAccount =
    StreamAccount { credit: WINDOW, room: WINDOW, ended_there: false, ended_here: false };

/// The meaning of a valid frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MuxEvent {
    /// The peer opened a stream.
    Opened(u32),
    /// Bytes of a stream.
    Data(u32, Vec<u8>),
    /// This side may send again on a stream.
    Credit(u32),
    /// The peer sends no more on a stream.
    Ended(u32),
    /// The peer closed a stream.
    Reset(u32),
    /// A frame about the channel itself.
    Word(FrameKind, Vec<u8>),
    /// A frame of a stream that is closed already.
    Late,
}

impl FlowLedger {
    /// Starts without streams.
    pub fn new(side: MuxSide) -> Self {
        Self { side, streams: HashMap::new() }
    }

    /// Checks a frame of the peer against the rules.
    pub fn receive(&mut self, frame: MuxFrame) -> Result<MuxEvent, MuxViolation> {
        use FrameKind as K;
        let MuxFrame { kind, stream, contents } = frame;
        let from_host = matches!(kind, K::Welcome | K::Open | K::Hold | K::GoOn);
        let from_guest = matches!(kind, K::Receipt | K::Held | K::Bye | K::Here | K::Ask);
        if from_host && self.side == MuxSide::Host || from_guest && self.side == MuxSide::Guest {
            return Err(MuxViolation::Side(kind));
        }
        match kind {
            K::Open | K::Ask => {
                if (kind == K::Ask) != (stream >= GUEST_STREAMS) || !self.has_room(stream) {
                    return Err(MuxViolation::Open(stream));
                }
                self.streams.insert(stream, FRESH);
                Ok(MuxEvent::Opened(stream))
            }
            K::Data | K::Credit | K::End | K::Reset => self.receive_on_stream(kind, stream, contents),
            word => Ok(MuxEvent::Word(word, contents)),
        }
    }

    fn has_room(&self, stream: u32) -> bool {
        let of_guest = || self.streams.keys().filter(|open| **open >= GUEST_STREAMS).count();
        self.streams.len() < STREAMS_MAX
            && !self.streams.contains_key(&stream)
            && (stream < GUEST_STREAMS || of_guest() < GUEST_STREAMS_MAX)
    }

    fn receive_on_stream(
        &mut self,
        kind: FrameKind,
        stream: u32,
        contents: Vec<u8>,
    ) -> Result<MuxEvent, MuxViolation> {
        let Some(account) = self.streams.get_mut(&stream) else { return Ok(MuxEvent::Late) };
        match kind {
            FrameKind::Data => {
                let room = account.room.checked_sub(contents.len() as u32).filter(|_| !account.ended_there);
                account.room = room.ok_or(MuxViolation::Window(stream))?;
                Ok(MuxEvent::Data(stream, contents))
            }
            FrameKind::Credit => {
                let given = contents.try_into().map_or(0, u32::from_le_bytes);
                let credit = account.credit.checked_add(given).filter(|credit| *credit <= WINDOW);
                account.credit = credit.ok_or(MuxViolation::Credit(stream))?;
                Ok(MuxEvent::Credit(stream))
            }
            FrameKind::End => {
                account.ended_there = true;
                self.forget_if_over(stream);
                Ok(MuxEvent::Ended(stream))
            }
            _ => {
                self.streams.remove(&stream);
                Ok(MuxEvent::Reset(stream))
            }
        }
    }

    /// Opens a stream from this side; false if too many are open.
    pub fn open(&mut self, stream: u32) -> bool {
        self.streams.len() < STREAMS_MAX && self.streams.insert(stream, FRESH).is_none()
    }

    /// How many bytes this side may send on a stream; none if it is closed.
    pub fn credit(&self, stream: u32) -> Option<u32> {
        self.streams.get(&stream).map(|account| account.credit)
    }

    /// Notes that this side sends so many bytes.
    pub fn spend(&mut self, stream: u32, len: u32) {
        if let Some(account) = self.streams.get_mut(&stream) {
            account.credit = account.credit.saturating_sub(len);
        }
    }

    /// Notes that this side has read so many bytes; false if the peer needs no credit, because it sends no
    /// more.
    pub fn give(&mut self, stream: u32, len: u32) -> bool {
        let account = self.streams.get_mut(&stream).filter(|account| !account.ended_there);
        account.map(|account| account.room = account.room.saturating_add(len).min(WINDOW)).is_some()
    }

    /// Notes that this side sends no more on a stream.
    pub fn end(&mut self, stream: u32) {
        if let Some(account) = self.streams.get_mut(&stream) {
            account.ended_here = true;
        }
        self.forget_if_over(stream);
    }

    fn forget_if_over(&mut self, stream: u32) {
        if self.streams.get(&stream).is_some_and(|account| account.ended_here && account.ended_there) {
            self.streams.remove(&stream);
        }
    }

    /// Closes a stream; false if it was closed.
    pub fn drop_stream(&mut self, stream: u32) -> bool {
        self.streams.remove(&stream).is_some()
    }

    /// Closes all streams.
    pub fn clear(&mut self) {
        self.streams.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: FrameKind, stream: u32, contents: &[u8]) -> MuxFrame {
        MuxFrame { kind, stream, contents: contents.to_vec() }
    }

    #[test]
    fn frames_come_back_however_they_are_cut() {
        let sent = [
            frame(FrameKind::Data, 7, b"hello"),
            frame(FrameKind::End, 7, b""),
            frame(FrameKind::Credit, 9, &[1, 0, 0, 0]),
        ];
        let bytes: Vec<u8> =
            sent.iter().flat_map(|frame| seal(frame.kind, frame.stream, &frame.contents)).collect();
        for cut in 1..bytes.len() {
            let mut intake = FrameReader::default();
            let mut heard = Vec::new();
            for piece in bytes.chunks(cut) {
                intake.push(piece);
                while let Some(frame) = intake.next().unwrap() {
                    heard.push(frame);
                }
            }
            assert_eq!(heard, sent, "cut to pieces of {cut}");
        }
    }

    #[test]
    fn a_length_that_lies_ends_the_line() {
        let check = |header: [u8; 8]| {
            let mut intake = FrameReader::default();
            intake.push(&header);
            intake.next()
        };
        assert_eq!(check([0, 0, 0, 0, 0, 0, 0, 0]), Err(MuxViolation::Kind(0)));
        assert_eq!(check([255, 0, 0, 0, 0, 0, 0, 0]), Err(MuxViolation::Kind(255)));
        assert_eq!(
            check([4, 255, 255, 255, 1, 0, 0, 0]),
            Err(MuxViolation::Length(FrameKind::Data, 0xff_ffff))
        );
        assert_eq!(check([5, 3, 0, 0, 1, 0, 0, 0]), Err(MuxViolation::Length(FrameKind::Credit, 3)));
        assert_eq!(check([6, 1, 0, 0, 1, 0, 0, 0]), Err(MuxViolation::Length(FrameKind::End, 1)));
        assert_eq!(check([4, 5, 0, 0, 1, 0, 0, 0]), Ok(None), "the rest may still come");
    }

    #[test]
    fn a_sender_has_its_window_and_no_more() {
        let mut host = FlowLedger::new(MuxSide::Host);
        assert!(host.open(1));
        let full = vec![0; DATA_LEN_MAX];
        for _ in 0..WINDOW as usize / DATA_LEN_MAX {
            host.receive(frame(FrameKind::Data, 1, &full)).unwrap();
        }
        assert_eq!(host.receive(frame(FrameKind::Data, 1, b"x")), Err(MuxViolation::Window(1)));
        assert!(host.give(1, 1));
        assert_eq!(host.receive(frame(FrameKind::Data, 1, b"x")), Ok(MuxEvent::Data(1, b"x".to_vec())));
        assert_eq!(
            host.receive(frame(FrameKind::Credit, 1, &[1, 0, 0, 0])),
            Err(MuxViolation::Credit(1)),
            "nothing was sent"
        );
    }

    #[test]
    fn a_guest_opens_nothing_and_says_nothing_of_gone_streams() {
        let mut host = FlowLedger::new(MuxSide::Host);
        for kind in [FrameKind::Open, FrameKind::Welcome, FrameKind::Hold, FrameKind::GoOn] {
            assert_eq!(host.receive(frame(kind, 5, b"")), Err(MuxViolation::Side(kind)));
        }
        assert_eq!(host.receive(frame(FrameKind::Data, 5, b"x")), Ok(MuxEvent::Late));
        assert!(host.open(5));
        host.end(5);
        assert_eq!(host.receive(frame(FrameKind::End, 5, b"")), Ok(MuxEvent::Ended(5)));
        assert_eq!(host.credit(5), None, "both ends are over");
    }
}
