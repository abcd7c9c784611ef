//! Server-sent events: bytes in any cut in, whole events out.
//!
//! Invariant: how the network cuts the bytes changes nothing; the parser decodes text only line by line.
//! Invariant: an event and a stream have a size limit.

use crate::model::ModelError;

/// The largest single event, in bytes.
pub const EVENT_BYTES_MAX: usize = 16 << 20;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SseEvent {
    /// The field `event`, possibly empty.
    pub name: String,
    /// The lines of the fields `data`, joined by newlines.
    pub data: String,
}

/// A parser of server-sent events.
#[derive(Debug, Default)]
pub struct SseParser {
    /// The bytes of the line that is not complete yet.
    line: Vec<u8>,
    event: SseEvent,
    has_data: bool,
    /// Whether the last byte was a carriage return, so that a line feed belongs to it.
    after_return: bool,
    /// Whether a line was seen; only before it a byte order mark may stand.
    has_begun: bool,
}

impl SseParser {
    /// Reads more bytes and hands over every event that they complete.
    pub fn push(
        &mut self,
        bytes: &[u8],
        take: &mut dyn FnMut(SseEvent) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let mut rest = bytes;
        while let Some(first) = rest.first() {
            if self.after_return && *first == b'\n' {
                self.after_return = false;
                rest = &rest[1..];
                continue;
            }
            self.after_return = false;
            let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                return self.extend_line(rest);
            };
            self.extend_line(&rest[..end])?;
            self.after_return = rest[end] == b'\r';
            rest = &rest[end + 1..];
            if let Some(event) = self.end_line()? {
                take(event)?;
            }
        }
        Ok(())
    }

    /// The event that the end of the stream completes: some servers leave out the last empty line.
    pub fn finish(&mut self) -> Result<Option<SseEvent>, ModelError> {
        if !self.line.is_empty() {
            self.end_line()?;
        }
        Ok(self.dispatch())
    }

    fn extend_line(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        if self.line.len() + self.event.data.len() + bytes.len() > EVENT_BYTES_MAX {
            return Err(ModelError::TooLarge { limit_bytes: EVENT_BYTES_MAX });
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }

    fn end_line(&mut self) -> Result<Option<SseEvent>, ModelError> {
        let line = std::mem::take(&mut self.line);
        let mut line = line.as_slice();
        if !std::mem::replace(&mut self.has_begun, true) {
            line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
        }
        if line.is_empty() {
            return Ok(self.dispatch());
        }
        if line[0] == b':' {
            return Ok(None);
        }
        let line = std::str::from_utf8(line)
            .map_err(|_| ModelError::MalformedStream { message: "a line is not UTF-8".to_owned() })?;
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "event" => value.clone_into(&mut self.event.name),
            "data" => {
                if std::mem::replace(&mut self.has_data, true) {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(value);
            }
            _ => {}
        }
        Ok(None)
    }

    fn dispatch(&mut self) -> Option<SseEvent> {
        let event = std::mem::take(&mut self.event);
        std::mem::take(&mut self.has_data).then_some(event)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Parses pieces and also the end; panics on errors.
    fn parse<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<(String, String)> {
        let (mut parser, mut events) = (SseParser::default(), Vec::new());
        for piece in pieces {
            let mut take = |event: SseEvent| {
                events.push((event.name, event.data));
                Ok(())
            };
            parser.push(piece, &mut take).unwrap();
        }
        events.extend(parser.finish().unwrap().map(|event| (event.name, event.data)));
        events
    }

    fn pair(name: &str, data: &str) -> (String, String) {
        (name.to_owned(), data.to_owned())
    }

    #[test]
    fn events_are_read_as_the_standard_says() {
        let cases: [(&str, &[(&str, &str)]); 13] = [
            ("data: a\n\n", &[("", "a")]),
            ("data:a\n\ndata:  b\n\n", &[("", "a"), ("", " b")]),
            ("event: x\r\ndata: a\r\n\r\n", &[("x", "a")]),
            ("event: x\rdata: a\r\rdata: b\r\r", &[("x", "a"), ("", "b")]),
            ("data: a\ndata: b\ndata\n\n", &[("", "a\nb\n")]),
            (": comment\n\n:\n\ndata: a\n: x\n\n", &[("", "a")]),
            ("id: 1\nretry: 5\nfoo: bar\nfoo\ndata: a\n\n", &[("", "a")]),
            ("event: lost\n\ndata: a\n\n", &[("", "a")]),
            ("data:\n\n", &[("", "")]),
            ("\u{feff}data: a\n\n", &[("", "a")]),
            ("data: {\"a\": \"b:c\"}\n\n", &[("", "{\"a\": \"b:c\"}")]),
            ("data: a\n\ndata: end", &[("", "a"), ("", "end")]),
            ("\n\n\r\n", &[]),
        ];
        for (stream, expected) in cases {
            let expected: Vec<_> = expected.iter().map(|(name, data)| pair(name, data)).collect();
            assert_eq!(parse([stream.as_bytes()]), expected, "{stream:?}");
        }
    }

    #[test]
    fn every_cut_gives_the_same_events() {
        let stream =
            "\u{feff}event: ä\r\ndata: 日本🦀\r\n\r\n: c\rdata: a\rdata: b\r\rdata: x\n\ndata: last\n";
        let whole = parse([stream.as_bytes()]);
        assert_eq!(whole.len(), 4);
        for at in 0..=stream.len() {
            let (left, right) = stream.as_bytes().split_at(at);
            assert_eq!(parse([left, right]), whole, "cut at {at}");
        }
        assert_eq!(parse(stream.as_bytes().chunks(1)), whole);
    }

    #[test]
    fn text_that_is_not_utf8_is_malformed() {
        let mut parser = SseParser::default();
        let result = parser.push(b"data: \xff\n\n", &mut |_| Ok(()));
        assert!(matches!(result, Err(ModelError::MalformedStream { .. })), "{result:?}");
    }

    #[test]
    fn an_endless_event_is_refused() {
        for piece in [&b"a"[..], b"data: a\n"] {
            let (mut parser, mut sent) = (SseParser::default(), 0);
            let many = piece.repeat(1 << 16);
            let error = loop {
                sent += many.len();
                assert!(sent < 8 * EVENT_BYTES_MAX, "the parser takes it all");
                if let Err(error) = parser.push(&many, &mut |_| Ok(())) {
                    break error;
                }
            };
            assert_eq!(error, ModelError::TooLarge { limit_bytes: EVENT_BYTES_MAX });
        }
    }

    proptest! {
        #[test]
        fn any_text_in_any_cut_gives_the_same_events(
            lines in prop::collection::vec("(data|event|id|:|)(: ?)?[a-z:é日 ]{0,6}", 0..12),
            ends in prop::collection::vec(prop::sample::select(vec!["\n", "\r", "\r\n"]), 12),
            size in 1usize..7,
        ) {
            let stream: String = lines.iter().zip(&ends).map(|(line, end)| format!("{line}{end}")).collect();
            prop_assert_eq!(parse(stream.as_bytes().chunks(size)), parse([stream.as_bytes()]));
        }
    }
}
