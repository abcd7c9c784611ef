//! Messages as proto3 JSON: a parsed message can be written, and is the same after it is read again.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((number, text)) = input.split_first() else { return };
    fuzz::with_message!(number % 13, M => {
        let Ok(message) = serde_json::from_slice::<M>(text) else { return };
        let text = serde_json::to_string(&message).expect("it was read");
        assert_eq!(serde_json::from_str::<M>(&text).expect("it was written"), message, "{text}");
    });
});
