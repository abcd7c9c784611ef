//! The query of a URL, form-decoded to bytes: paths need not be UTF-8.

/// The parts of a query.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct UrlQuery(Vec<(Vec<u8>, Vec<u8>)>);

const PARTS_MAX: usize = 64;

impl UrlQuery {
    pub fn parse(query: Option<&str>) -> Self {
        let parts = query.unwrap_or_default().split('&').filter(|part| !part.is_empty()).take(PARTS_MAX);
        Self(
            parts
                .map(|part| part.split_once('=').unwrap_or((part, "")))
                .map(|(k, v)| (decode(k), decode(v)))
                .collect(),
        )
    }

    /// The first value of a parameter, as bytes.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(key, _)| key == name.as_bytes()).map(|(_, value)| value.as_slice())
    }

    /// The first value of a parameter, if it is UTF-8.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.bytes(name).and_then(|value| std::str::from_utf8(value).ok())
    }
}

fn decode(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        match (first, tail) {
            (b'+', _) => out.push(b' '),
            (b'%', [high, low, after @ ..]) => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => {
                    out.push(high << 4 | low);
                    rest = after;
                }
                _ => out.push(b'%'),
            },
            (byte, _) => out.push(*byte),
        }
    }
    out
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded_as_forms() {
        let query = UrlQuery::parse(Some("path=a+b%20c%2B%ff%&username=&x&path=second"));
        assert_eq!(query.bytes("path"), Some(&b"a b c+\xff%"[..]));
        assert_eq!((query.text("path"), query.text("username"), query.text("x")), (None, Some(""), Some("")));
        assert_eq!((query.text("y"), UrlQuery::parse(None)), (None, UrlQuery::default()));
    }
}
