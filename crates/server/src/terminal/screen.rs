//! A terminal emulator that keeps the current screen of a terminal, to show it to viewers that join later.
//!
//! Trust: the input comes from a Body. It may not be text at all, and a bug in the emulator must cause no
//! more than a blank screen; so this module catches panics and starts with a new screen.
//! Invariant: the size of the screen bounds its memory, whatever the input; there is no scrollback.
//! Absent: combining characters are not kept.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use fleet::TtySize;

/// An emulated xterm-like terminal.
pub struct Screen {
    terminal: Option<avt::Terminal>,
    size: TtySize,
    /// The first bytes of a UTF-8 character whose rest has not arrived yet.
    partial: Vec<u8>,
    modes: TerminalModes,
}

impl Screen {
    /// A blank screen.
    pub fn new(size: TtySize) -> Self {
        Self { terminal: blank(size), size, partial: Vec::new(), modes: TerminalModes::default() }
    }

    /// The size of the screen.
    pub fn size(&self) -> TtySize {
        self.size
    }

    /// Processes output of a program.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.modes.feed(bytes);
        let joined;
        let bytes = if self.partial.is_empty() {
            bytes
        } else {
            self.partial.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.partial);
            &joined
        };
        let (text, rest) = decode(bytes);
        self.partial = rest.to_vec();
        self.guarded(|terminal| terminal.feed(text.as_str()));
    }

    /// Changes the size; text reflows as in common terminals.
    pub fn resize(&mut self, size: TtySize) {
        self.size = size;
        self.guarded(|terminal| terminal.resize(size.cols.into(), size.rows.into()));
    }

    /// The bytes that bring a terminal of the same size to the same state.
    pub fn restore(&self) -> Bytes {
        let shown = || self.terminal.as_ref().map(avt::Terminal::dump).unwrap_or_default();
        let shown = catch_unwind(AssertUnwindSafe(shown)).unwrap_or_default();
        let mut bytes = b"\x1bc".to_vec();
        bytes.extend_from_slice(self.modes.restore().as_bytes());
        bytes.extend_from_slice(shown.as_bytes());
        bytes.extend_from_slice(&self.partial);
        bytes.into()
    }

    /// The lines as a person sees them.
    #[cfg(test)]
    pub fn text(&self) -> Vec<String> {
        self.terminal.as_ref().map(|terminal| terminal.screen().text()).unwrap_or_default()
    }

    fn guarded(&mut self, act: impl FnOnce(&mut avt::Terminal)) {
        let done = catch_unwind(AssertUnwindSafe(|| self.terminal.as_mut().map(act)));
        if done.is_err() {
            self.terminal = blank(self.size);
        }
    }
}

fn blank(size: TtySize) -> Option<avt::Terminal> {
    avt::Terminal::with_scrollback(size.cols.into(), size.rows.into(), Some(0)).ok()
}

/// Decodes UTF-8, replaces invalid bytes, and returns an incomplete character at the end separately.
fn decode(bytes: &[u8]) -> (String, &[u8]) {
    let mut text = String::with_capacity(bytes.len());
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return (text, &[]);
            }
            Err(error) => {
                let (valid, after) = rest.split_at(error.valid_up_to());
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                match error.error_len() {
                    None => return (text, after),
                    Some(len) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &after[len..];
                    }
                }
            }
        }
    }
}

/// Private modes that change the input that a terminal sends and that the emulator does not keep: mouse,
/// focus, paste, keypad.
const PRIVATE: [u16; 8] = [1000, 1002, 1003, 1004, 1005, 1006, 1015, 2004];
const PARAMETERS_LEN_MAX: usize = 64;

#[derive(Debug, Default, PartialEq, Eq)]
struct TerminalModes {
    set: [bool; PRIVATE.len()],
    keypad: bool,
    place: ScreenPlace,
    parameters: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum ScreenPlace {
    #[default]
    Text,
    Escape,
    Private,
    Other,
}

impl TerminalModes {
    fn feed(&mut self, bytes: &[u8]) {
        // Most output has no escape sequence.
        let mut rest = bytes;
        while !rest.is_empty() {
            if self.place == ScreenPlace::Text {
                match rest.iter().position(|byte| *byte == 0x1b) {
                    Some(at) => rest = &rest[at..],
                    None => return,
                }
            }
            self.step(rest[0]);
            rest = &rest[1..];
        }
    }

    fn step(&mut self, byte: u8) {
        self.place = match (&self.place, byte) {
            (_, 0x1b) => ScreenPlace::Escape,
            (ScreenPlace::Escape, b'[') => {
                self.parameters.clear();
                ScreenPlace::Other
            }
            (ScreenPlace::Escape, b'=' | b'>') => {
                self.keypad = byte == b'=';
                ScreenPlace::Text
            }
            (ScreenPlace::Escape, b'c') => {
                *self = Self::default();
                ScreenPlace::Text
            }
            (ScreenPlace::Other, b'?') if self.parameters.is_empty() => ScreenPlace::Private,
            (ScreenPlace::Private, b'0'..=b'9' | b';') if self.parameters.len() < PARAMETERS_LEN_MAX => {
                self.parameters.push(char::from(byte));
                ScreenPlace::Private
            }
            (ScreenPlace::Private, b'h' | b'l') => {
                self.switch(byte == b'h');
                ScreenPlace::Text
            }
            // Another sequence: the next escape begins a new one.
            _ => ScreenPlace::Text,
        };
    }

    fn switch(&mut self, on: bool) {
        for mode in self.parameters.split(';').filter_map(|mode| mode.parse::<u16>().ok()) {
            if let Some(at) = PRIVATE.iter().position(|known| *known == mode) {
                self.set[at] = on;
            }
        }
    }

    fn restore(&self) -> String {
        let on = PRIVATE.iter().zip(self.set).filter(|(_, set)| *set);
        let mut text: String = on.map(|(mode, _)| format!("\x1b[?{mode}h")).collect();
        if self.keypad {
            text.push_str("\x1b=");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: TtySize = TtySize { cols: 20, rows: 5 };

    fn screen(fed: &[&[u8]]) -> Screen {
        let mut screen = Screen::new(SIZE);
        fed.iter().for_each(|bytes| screen.feed(bytes));
        screen
    }

    #[test]
    fn a_restored_screen_shows_the_same_and_goes_on_from_there() {
        let wide = "\u{30cf}".repeat(3);
        let cases: [&[&[u8]]; 7] = [
            &[b"hello\r\nworld"],
            &[b"\x1b[31mred\x1b[0m plain \x1b[1;44mbold on blue"],
            &[b"shell$ vi\r\n", b"\x1b[?1049h\x1b[2J\x1b[3;5Hin the editor"],
            &["čaj a ".as_bytes(), wide.as_bytes()],
            &[b"a very long line that is wrapped at the right edge of the screen"],
            &[b"\x1b[2;4r\x1b[4;1Hin a region\n\n\n"],
            &[b"cut in a sequence \x1b[3"],
        ];
        for fed in cases {
            let first = screen(fed);
            let mut again = screen(&[&first.restore()]);
            assert_eq!(again.text(), first.text(), "{fed:?}");
            let mut first = first;
            for rest in [&b"1mX\x1b[?1049l"[..], b"Y\r\nZ"] {
                first.feed(rest);
                again.feed(rest);
                assert_eq!(again.text(), first.text(), "{fed:?}, then {rest:?}");
            }
        }
    }

    #[test]
    fn a_character_in_two_pieces_is_one_character() {
        let whole = "š€😀".as_bytes();
        for cut in 0..whole.len() {
            let halves = screen(&[&whole[..cut], &whole[cut..]]);
            assert_eq!(halves.text()[0].trim_end(), "š€😀", "cut at {cut}");
            let mut restored = screen(&[&screen(&[&whole[..cut]]).restore()]);
            restored.feed(&whole[cut..]);
            assert_eq!(restored.text()[0].trim_end(), "š€😀", "restored at {cut}");
        }
    }

    #[test]
    fn modes_of_keys_mouse_and_paste_are_restored() {
        let shown = screen(&[b"\x1b[?2004h\x1b[?1000;1006h\x1b=\x1b[?25h", b"\x1b[?1000l"]);
        let restored = shown.restore();
        assert!(restored.starts_with(b"\x1bc\x1b[?1006h\x1b[?2004h\x1b="), "{restored:?}");
        assert_eq!(screen(&[&restored]).modes.set, shown.modes.set);
        assert_eq!(screen(&[b"\x1b[?2004h", b"\x1bc"]).modes, TerminalModes::default());
        assert_eq!(screen(&[b"\x1b[?20", b"04h"]).modes.restore(), "\x1b[?2004h");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn nothing_a_body_writes_harms_the_screen(
            pieces in prop::collection::vec(prop_oneof![
                prop::collection::vec(any::<u8>(), 0..200),
                "\\x1b\\[[?]?[0-9;]{0,8}[@-~]".prop_map(String::into_bytes),
                "\\PC{0,30}".prop_map(String::into_bytes),
            ], 0..30),
            sizes in prop::collection::vec((1..200u16, 1..100u16), 0..4),
        ) {
            let mut screen = Screen::new(SIZE);
            for (at, piece) in pieces.iter().enumerate() {
                screen.feed(piece);
                if let Some((cols, rows)) = sizes.get(at) {
                    screen.resize(TtySize { cols: *cols, rows: *rows });
                }
            }
            let mut again = Screen::new(screen.size());
            again.feed(&screen.restore());
            prop_assert_eq!(again.text(), screen.text());
        }
    }
}
