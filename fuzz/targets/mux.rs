//! The channel of a hostile microVM: however it is cut, the parser returns the same frames and verdicts, and
//! no stream ever holds more than its window.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::mux::{MuxEvent, FrameReader, FlowLedger, MuxSide, MuxViolation, WINDOW};

const STREAMS: u32 = 8;

fn hear(pieces: &[&[u8]]) -> (Vec<MuxEvent>, Option<MuxViolation>) {
    let (mut intake, mut ledger) = (FrameReader::default(), FlowLedger::new(MuxSide::Host));
    for stream in 1..=STREAMS {
        assert!(ledger.open(stream));
    }
    let mut heard = Vec::new();
    let mut held = [0u64; STREAMS as usize + 1];
    for piece in pieces {
        intake.push(piece);
        loop {
            let frame = match intake.next() {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(violation) => return (heard, Some(violation)),
            };
            match ledger.receive(frame) {
                Ok(said) => {
                    if let MuxEvent::Data(stream, bytes) = &said {
                        held[*stream as usize] += bytes.len() as u64;
                        assert!(held[*stream as usize] <= u64::from(WINDOW), "more than its window");
                    }
                    heard.push(said);
                }
                Err(violation) => return (heard, Some(violation)),
            }
        }
    }
    (heard, None)
}

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    assert_eq!(hear(&pieces), hear(&[stream]));
});
