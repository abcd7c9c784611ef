//! An answer of a hostile endpoint in the format of OpenAI Responses; see `fuzz::read_answer`.
#![no_main]

use brain::model::Wire;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| fuzz::read_answer(Wire::Responses, input));
