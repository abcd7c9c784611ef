//! Masks: answers that repeat the value of a secret reach the program without it.
//!
//! A server may send back what it was sent: trace pages, error texts, redirects. The value is looked for as it is, in
//! base64 at every alignment, in hexadecimal, percent-encoded, and escaped for JSON.
//! Absent on purpose: values that a server encrypts, compresses or computes with.

use base64::{
    Engine,
    engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD},
};

/// The shortest form that is looked for: shorter ones would occur by chance.
const FORM_LEN_MIN: usize = 6;
/// The byte that takes the place of each byte of a form, so that lengths stay.
const MASK: u8 = b'*';

/// The forms of some values.
#[derive(Debug, Clone, Default)]
pub struct Mask {
    forms: Vec<Vec<u8>>,
    longest: usize,
}

impl Mask {
    /// The mask of these values.
    pub fn of<'a>(values: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut forms: Vec<Vec<u8>> = values.into_iter().flat_map(forms_of).collect();
        forms.retain(|form| form.len() >= FORM_LEN_MIN);
        // The longest first: a shorter form may be a part of it.
        forms.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        forms.dedup();
        let longest = forms.first().map_or(0, Vec::len);
        Self { forms, longest }
    }

    /// Whether nothing is masked.
    pub fn is_empty(&self) -> bool {
        self.forms.is_empty()
    }

    /// Masks a text in place, and returns whether it had a form.
    pub fn apply(&self, text: &mut [u8]) -> bool {
        let mut found_any = false;
        for form in &self.forms {
            let found: Vec<usize> = memchr::memmem::find_iter(text, form).collect();
            found_any |= !found.is_empty();
            for at in found {
                text[at..at + form.len()].fill(MASK);
            }
        }
        found_any
    }

    /// How many of the last bytes of a text could be the beginning of a form that goes on in the next piece.
    pub fn hold_back(&self, text: &[u8]) -> usize {
        let most = self.longest.saturating_sub(1).min(text.len());
        let is_beginning = |len: &usize| {
            self.forms.iter().any(|form| form.len() > *len && form.starts_with(&text[text.len() - len..]))
        };
        (1..=most).rev().find(is_beginning).unwrap_or(0)
    }
}

fn forms_of(value: &[u8]) -> Vec<Vec<u8>> {
    let hex = |upper: bool| -> Vec<u8> {
        let digits =
            value.iter().map(|byte| if upper { format!("{byte:02X}") } else { format!("{byte:02x}") });
        digits.collect::<String>().into_bytes()
    };
    let percent = |upper: bool| -> Vec<u8> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
        let written = value.iter().map(|byte| match (plain(*byte), upper) {
            (true, _) => char::from(*byte).to_string(),
            (false, true) => format!("%{byte:02X}"),
            (false, false) => format!("%{byte:02x}"),
        });
        written.collect::<String>().into_bytes()
    };
    // Some servers encode every byte.
    let percent_all = |upper: bool| hex(upper).chunks(2).flat_map(|pair| [b'%', pair[0], pair[1]]).collect();
    let escaped = |upper: bool| -> Vec<u8> {
        let units = String::from_utf8_lossy(value).encode_utf16().collect::<Vec<_>>();
        let written = units
            .into_iter()
            .map(|unit| if upper { format!("\\u{unit:04X}") } else { format!("\\u{unit:04x}") });
        written.collect::<String>().into_bytes()
    };
    let json = serde_json::to_string(&String::from_utf8_lossy(value)).unwrap_or_default();
    let mut forms = vec![
        value.to_vec(),
        hex(false),
        hex(true),
        percent(false),
        percent(true),
        percent_all(false),
        percent_all(true),
        escaped(false),
        escaped(true),
        json.trim_matches('"').as_bytes().to_vec(),
    ];
    for front in 0..3 {
        // The characters that depend on the bytes before and behind the value are left out.
        let padded = [&[0; 3][..front], value].concat();
        let (skipped, whole) = ((8 * front).div_ceil(6), 8 * padded.len() / 6);
        for text in [STANDARD_NO_PAD.encode(&padded), URL_SAFE_NO_PAD.encode(&padded)] {
            forms.push(text.as_bytes().get(skipped..whole).unwrap_or_default().to_vec());
        }
    }
    forms
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::{STANDARD, URL_SAFE};

    use super::*;

    const VALUE: &[u8] = b"ghp_s3cr3t/with+odd?bytes\"and\\more";

    fn masked(text: &[u8]) -> Vec<u8> {
        let mut text = text.to_vec();
        Mask::of([VALUE]).apply(&mut text);
        text
    }

    #[test]
    fn a_value_is_found_in_every_form() {
        let text = String::from_utf8(VALUE.to_vec()).unwrap();
        let hex: String = VALUE.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut forms =
            vec![text.clone(), hex.clone(), hex.to_uppercase(), serde_json::to_string(&text).unwrap()];
        forms.push(text.chars().map(|c| format!("\\u{:04x}", c as u32)).collect());
        forms.push(
            VALUE
                .iter()
                .map(|byte| match byte.is_ascii_alphanumeric() || b"-._~".contains(byte) {
                    true => (*byte as char).to_string(),
                    false => format!("%{byte:02X}"),
                })
                .collect(),
        );
        forms.push(VALUE.iter().map(|byte| format!("%{byte:02X}")).collect());
        for form in &forms {
            let told = format!("before {form} behind");
            let masked = masked(told.as_bytes());
            assert!(masked.windows(8).any(|eight| eight == b"********"), "{form}");
            assert_eq!(masked.len(), told.len());
        }
        for front in ["", "u", "us", "user:", "a-longer-user:"] {
            let whole = [front.as_bytes(), VALUE, b"-behind"].concat();
            for told in [STANDARD.encode(&whole), URL_SAFE.encode(&whole)] {
                let left = masked(told.as_bytes());
                let stars = left.iter().filter(|byte| **byte == MASK).count();
                assert!(stars >= VALUE.len() * 4 / 3 - 4, "{front}: {}", String::from_utf8_lossy(&left));
            }
        }
        assert_eq!(masked(b"nothing of it"), b"nothing of it");
    }

    #[test]
    fn a_form_in_two_pieces_is_held_back() {
        let mask = Mask::of([VALUE]);
        let text = [b"xx ", VALUE, b" yy"].concat();
        for cut in 0..text.len() {
            let (mut out, mut carry) = (Vec::new(), Vec::new());
            for piece in [&text[..cut], &text[cut..]] {
                carry.extend_from_slice(piece);
                mask.apply(&mut carry);
                let rest = carry.split_off(carry.len() - mask.hold_back(&carry));
                out.append(&mut carry);
                carry = rest;
            }
            out.append(&mut carry);
            assert_eq!(out, masked(&text), "cut at {cut}");
        }
    }
}
