//! HTTP requests of a Body: a head that is let through is sent as one that names the judged host only, and the end of a
//! chunked body is the same in every cut.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    egress::fuzzing::http_head(stream);
    egress::fuzzing::http_body(stream, &pieces);
});
