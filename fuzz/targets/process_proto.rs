//! Messages as protobuf: a parsed message can be written, and is the same after it is read again, also
//! through JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|input: &[u8]| {
    let Some((number, bytes)) = input.split_first() else { return };
    fuzz::with_message!(number % 13, M => {
        let Ok(message) = M::decode(bytes) else { return };
        let bytes = message.encode_to_vec();
        assert_eq!(M::decode(bytes.as_slice()).expect("it was written"), message);
        // JSON cannot express an unknown value of an enum, so some messages cannot be written.
        if let Ok(text) = serde_json::to_string(&message) {
            assert_eq!(serde_json::from_str::<M>(&text).expect("it was written"), message, "{text}");
        }
    });
});
