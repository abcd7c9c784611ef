//! Requests on inspected connections: rules with conditions and terms, the places of secrets, and the masks of answers.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let (stream, pieces) = fuzz::cut(input);
    egress::fuzzing::mask(stream, &pieces);
    let mut lines = stream.split(|byte| *byte == b'\n').map(|line| std::str::from_utf8(line).unwrap_or_default());
    let mut line = || lines.next().unwrap_or_default();
    let (rule, method, path, header) = (line(), line(), line(), line());
    egress::fuzzing::rule(rule, method, path);
    let value = lines.next().unwrap_or_default();
    egress::fuzzing::request(header, value.as_bytes(), path);
    egress::fuzzing::conditions(rule, header, path, value.as_bytes());
    egress::fuzzing::rule_terms(rule, method, header, path);
});
