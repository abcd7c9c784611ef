//! An event from anywhere: its hash is the same after it has been written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::Event;

fuzz_target!(|input: &[u8]| {
    let Ok(event) = serde_json::from_slice::<Event>(input) else { return };
    let text = serde_json::to_string(&event).expect("it was read");
    let again: Event = serde_json::from_str(&text).expect("it was written");
    assert_eq!(again, event);
    assert_eq!(again.digest(), event.digest());
    // Whatever its data is, it is known or it is not.
    assert_eq!(again.decode(), event.decode());
});
