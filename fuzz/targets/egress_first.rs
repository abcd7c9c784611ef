//! The first bytes of a Body on a connection of any protocol: no cut lets through what another one denies.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    egress::fuzzing::first_bytes(stream, &pieces);
});
