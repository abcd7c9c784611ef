//! An event from any source: its hash is the same after it was written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::Event;

fuzz_target!(|input: &[u8]| {
    let Ok(event) = serde_json::from_slice::<Event>(input) else { return };
    let text = serde_json::to_string(&event).expect("it was read");
    let again: Event = serde_json::from_str(&text).expect("it was written");
    assert_eq!(again, event);
    assert_eq!(again.digest(), event.digest());
    // Both copies decode in the same way, known or unknown.
    assert_eq!(again.decode(), event.decode());
});
