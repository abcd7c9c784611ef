//! Envelopes from a hostile peer: however the stream is cut, the parser returns the same messages and the
//! same error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::envelope::{Envelope, EnvelopeError, EnvelopeReader, seal};

fn open(pieces: &[&[u8]]) -> (Vec<Envelope>, Result<(), EnvelopeError>) {
    let mut opener = EnvelopeReader::new(4096);
    let mut opened = Vec::new();
    for piece in pieces {
        opener.push(piece);
        loop {
            match opener.next() {
                Ok(Some(envelope)) => opened.push(envelope),
                Ok(None) => break,
                Err(error) => return (opened, Err(error)),
            }
        }
    }
    (opened, opener.finish())
}

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    let opened = open(&pieces);
    assert_eq!(opened, open(&[stream]));
    let sealed: Vec<u8> = opened.0.iter().flat_map(|one| seal(one.flags, &one.message)).collect();
    assert!(stream.starts_with(&sealed), "what was opened is what was sent");
});
