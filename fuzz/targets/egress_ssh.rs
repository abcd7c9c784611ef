//! Messages of a Body to its ssh agent, and the readers of keys: nothing panics, and nothing is signed without a key.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| egress::fuzzing::ssh(input));
