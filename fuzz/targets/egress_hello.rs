//! TLS hellos of a Body: the reader never panics, and finds the same name however the network cuts the stream.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    egress::fuzzing::client_hello(stream, &pieces);
});
