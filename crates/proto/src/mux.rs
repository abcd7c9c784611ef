//! Many streams over the one line between a microVM's guest and its host.
//!
//! A frame is a header of eight bytes (kind, three bytes of length, four of the stream, little endian) and its
//! contents. Each direction of each stream has a window: a sender has sent no more than the receiver gave it credit
//! for, so a stream that nobody reads stops alone, and the others go on.
//!
//! Only the host opens streams. `Hold` and `Held` bring both directions to the end of a frame with nothing under way:
//! then the machine can be frozen, and whoever thaws it begins with a `Welcome` at a clean line.
//!
//! Trust: what comes from the other side is hostile. A frame that breaks a rule ends the line; none is skipped.

use std::collections::HashMap;

/// Length of a header.
pub const HEADER_LEN: usize = 8;
/// Most contents of one frame of data: small enough that no stream waits long for another's frame.
pub const DATA_LEN_MAX: usize = 16 << 10;
/// Most contents of a word between the two sides themselves.
pub const WORD_LEN_MAX: usize = 1 << 20;
/// What a sender may send before it has heard of any of it being read.
pub const WINDOW: u32 = 256 << 10;
/// Most streams at once.
pub const STREAMS_MAX: usize = 1024;

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Host: who the guest is from now on, as JSON. Streams that were open are gone.
    Welcome = 1,
    /// Guest: it is that, as JSON.
    Receipt = 2,
    /// Host: a new stream.
    Open = 3,
    /// Bytes of a stream.
    Data = 4,
    /// So many bytes were read: four bytes.
    Credit = 5,
    /// The sender of this sends no more on the stream.
    End = 6,
    /// The stream is gone.
    Reset = 7,
    /// Host: send nothing after your answer to this.
    Hold = 8,
    /// Guest: nothing follows.
    Held = 9,
    /// Host: go on where you were.
    GoOn = 10,
    /// Guest: it has ended in order, and its machine stops now.
    Bye = 11,
    /// Guest: it has just booted and waits for its welcome.
    Here = 12,
}

impl FrameKind {
    const ALL: [FrameKind; 12] = [
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
    ];

    /// How long its contents may be.
    fn len_max(self) -> usize {
        match self {
            Self::Welcome | Self::Receipt | Self::Held => WORD_LEN_MAX,
            Self::Data => DATA_LEN_MAX,
            Self::Credit => 4,
            _ => 0,
        }
    }
}

/// A rule that the other side broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MuxViolation {
    /// There is no such frame.
    #[error("a frame of unknown kind {0}")]
    Kind(u8),
    /// Longer than its kind may be.
    #[error("a frame of kind {0:?} with {1} bytes")]
    Length(FrameKind, usize),
    /// That side does not say that.
    #[error("a frame of kind {0:?} from the wrong side")]
    Side(FrameKind),
    /// More than there was credit for.
    #[error("more data than stream {0} has room for")]
    Window(u32),
    /// More credit than can be used.
    #[error("more credit than stream {0} can have")]
    Credit(u32),
    /// Too many, or one that is open.
    #[error("stream {0} cannot be opened")]
    Open(u32),
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MuxFrame {
    /// What it says.
    pub kind: FrameKind,
    /// Of which stream; 0 where it is about the line itself.
    pub stream: u32,
    /// Its contents.
    pub contents: Vec<u8>,
}

/// A frame as it travels.
pub fn seal(kind: FrameKind, stream: u32, contents: &[u8]) -> Vec<u8> {
    let len = (contents.len() as u32).to_le_bytes();
    let mut sealed = Vec::with_capacity(HEADER_LEN + contents.len());
    sealed.extend_from_slice(&[kind as u8, len[0], len[1], len[2]]);
    sealed.extend_from_slice(&stream.to_le_bytes());
    sealed.extend_from_slice(contents);
    sealed
}

/// Takes bytes as they arrive and gives whole frames.
#[derive(Debug, Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
    at: usize,
}

impl FrameReader {
    /// More bytes.
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

    /// The next whole frame, if there is one.
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

/// Which end of the line this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuxSide {
    /// Opens streams.
    Host,
    /// Answers them.
    Guest,
}

/// Who may send what, stream by stream.
#[derive(Debug)]
pub struct FlowLedger {
    side: MuxSide,
    streams: HashMap<u32, StreamAccount>,
}

#[derive(Debug, Clone, Copy)]
struct StreamAccount {
    /// What this side may send.
    credit: u32,
    /// What the other side may send.
    room: u32,
    /// The other side sends no more.
    ended_there: bool,
    /// This side sends no more.
    ended_here: bool,
}

const FRESH: StreamAccount =
    StreamAccount { credit: WINDOW, room: WINDOW, ended_there: false, ended_here: false };

/// What a frame that kept to the rules means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MuxEvent {
    /// A new stream.
    Opened(u32),
    /// Bytes of a stream.
    Data(u32, Vec<u8>),
    /// This side may send again on that stream.
    Credit(u32),
    /// No more comes on that stream.
    Ended(u32),
    /// That stream is gone.
    Reset(u32),
    /// About the line itself.
    Word(FrameKind, Vec<u8>),
    /// About a stream that is gone already.
    Late,
}

impl FlowLedger {
    /// No streams.
    pub fn new(side: MuxSide) -> Self {
        Self { side, streams: HashMap::new() }
    }

    /// Judges a frame of the other side.
    pub fn receive(&mut self, frame: MuxFrame) -> Result<MuxEvent, MuxViolation> {
        use FrameKind as K;
        let MuxFrame { kind, stream, contents } = frame;
        let from_host = matches!(kind, K::Welcome | K::Open | K::Hold | K::GoOn);
        let from_guest = matches!(kind, K::Receipt | K::Held | K::Bye | K::Here);
        if from_host && self.side == MuxSide::Host || from_guest && self.side == MuxSide::Guest {
            return Err(MuxViolation::Side(kind));
        }
        match kind {
            K::Open => {
                if self.streams.len() >= STREAMS_MAX || self.streams.contains_key(&stream) {
                    return Err(MuxViolation::Open(stream));
                }
                self.streams.insert(stream, FRESH);
                Ok(MuxEvent::Opened(stream))
            }
            K::Data | K::Credit | K::End | K::Reset => self.receive_on_stream(kind, stream, contents),
            word => Ok(MuxEvent::Word(word, contents)),
        }
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

    /// A stream of this side's own; false when there are too many.
    pub fn open(&mut self, stream: u32) -> bool {
        self.streams.len() < STREAMS_MAX && self.streams.insert(stream, FRESH).is_none()
    }

    /// How much may be sent on a stream now; none when it is gone.
    pub fn credit(&self, stream: u32) -> Option<u32> {
        self.streams.get(&stream).map(|account| account.credit)
    }

    /// So much is being sent.
    pub fn spend(&mut self, stream: u32, len: u32) {
        if let Some(account) = self.streams.get_mut(&stream) {
            account.credit = account.credit.saturating_sub(len);
        }
    }

    /// So much was read here; false when nobody is interested any more.
    pub fn give(&mut self, stream: u32, len: u32) -> bool {
        let account = self.streams.get_mut(&stream).filter(|account| !account.ended_there);
        account.map(|account| account.room = account.room.saturating_add(len).min(WINDOW)).is_some()
    }

    /// This side sends no more on a stream.
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

    /// A stream is gone; false when it was already.
    pub fn drop_stream(&mut self, stream: u32) -> bool {
        self.streams.remove(&stream).is_some()
    }

    /// All of them are.
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
