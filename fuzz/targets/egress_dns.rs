//! DNS messages of a Body: the reader never panics, and its answer is short, has the id of the message and deserves no
//! answer itself.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    egress::fuzzing::dns(input);
    if let Some(octets) = input.first_chunk() {
        egress::fuzzing::address(*octets);
    }
});
