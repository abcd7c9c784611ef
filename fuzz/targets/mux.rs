//! The channel of a hostile microVM: however it is cut, the parser returns the same frames and verdicts, and
//! no stream ever holds more than its window.
#![no_main]

use std::collections::HashMap;

use libfuzzer_sys::fuzz_target;
use proto::mux::{MuxEvent, FrameReader, FlowLedger, MuxSide, MuxViolation, WINDOW};

const STREAMS: u32 = 8;

fn hear(pieces: &[&[u8]]) -> (Vec<MuxEvent>, Option<MuxViolation>) {
    let (mut intake, mut ledger) = (FrameReader::default(), FlowLedger::new(MuxSide::Host));
    for stream in 1..=STREAMS {
        assert!(ledger.open(stream));
    }
    let mut heard = Vec::new();
    // The guest may open streams of its own, so the ids are not only those that were opened above.
    let mut held: HashMap<u32, u64> = HashMap::new();
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
                    if let MuxEvent::Opened(stream) = &said {
                        held.insert(*stream, 0);
                    }
                    if let MuxEvent::Data(stream, bytes) = &said {
                        let held = held.entry(*stream).or_default();
                        *held += bytes.len() as u64;
                        assert!(*held <= u64::from(WINDOW), "more than its window");
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
