//! Messages as protobuf: what can be read can be written and is the same when it is read again, also by way of JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|input: &[u8]| {
    let Some((number, bytes)) = input.split_first() else { return };
    fuzz::with_message!(number % 13, M => {
        let Ok(message) = M::decode(bytes) else { return };
        let bytes = message.encode_to_vec();
        assert_eq!(M::decode(bytes.as_slice()).expect("it was written"), message);
        // JSON has no word for the unknown value of an enum, so not everything can be written.
        if let Ok(text) = serde_json::to_string(&message) {
            assert_eq!(serde_json::from_str::<M>(&text).expect("it was written"), message, "{text}");
        }
    });
});
