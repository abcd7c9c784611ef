//! Server-sent events of a hostile endpoint: however they are cut, the parser returns the same events.
#![no_main]

use brain::model::{
    ModelError,
    codec::sse::{SseEvent, SseParser},
};
use libfuzzer_sys::fuzz_target;

fn read(pieces: &[&[u8]]) -> (Vec<SseEvent>, Option<ModelError>) {
    let (mut parser, mut events) = (SseParser::default(), Vec::new());
    for piece in pieces {
        let mut take = |event| {
            events.push(event);
            Ok(())
        };
        if let Err(error) = parser.push(piece, &mut take) {
            return (events, Some(error));
        }
    }
    match parser.finish() {
        Ok(last) => events.extend(last),
        Err(error) => return (events, Some(error)),
    }
    (events, None)
}

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    assert_eq!(read(&pieces), read(&[stream]));
});
