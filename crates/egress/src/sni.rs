//! Parses the server name of a TLS ClientHello without trusting any length in it.

/// The name that a ClientHello asks for; `None` for a hello with two of them, because two parsers could use different
/// ones.
pub fn server_name(record: &[u8]) -> Option<String> {
    let mut at = Reader(record);
    (at.take(1)? == [22]).then_some(())?;
    at.take(2)?;
    let mut hello = Reader(at.sized(2)?);
    (hello.take(1)? == [1]).then_some(())?;
    let mut hello = Reader(hello.sized(3)?);
    hello.take(34)?;
    hello.sized(1)?;
    hello.sized(2)?;
    hello.sized(1)?;
    let mut extensions = Reader(hello.sized(2)?);
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.take(2)?;
        let body = extensions.sized(2)?;
        if kind == [0, 0] {
            if found.is_some() {
                return None;
            }
            let mut names = Reader(Reader(body).sized(2)?);
            (names.take(1)? == [0]).then_some(())?;
            let name = names.sized(2)?;
            names.0.is_empty().then_some(())?;
            found = Some(String::from_utf8(name.to_owned()).ok()?);
        }
    }
    found
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// The bytes after a length field of `bytes` bytes.
    fn sized(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let len = self.take(bytes)?.iter().fold(0, |len, byte| len << 8 | usize::from(*byte));
        self.take(len)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A ClientHello that asks for these names.
    pub fn hello_for(names: &[&str]) -> Vec<u8> {
        let sized =
            |bytes: &[u8], width: usize| [&(bytes.len() as u32).to_be_bytes()[4 - width..], bytes].concat();
        let extension = |name: &&str| {
            [&[0, 0][..], &sized(&sized(&[&[0][..], &sized(name.as_bytes(), 2)].concat(), 2), 2)].concat()
        };
        let extensions: Vec<u8> = names.iter().flat_map(extension).collect();
        let body = [
            &[3, 3][..],
            &[0; 32],
            &sized(&[], 1),
            &sized(&[0x13, 1], 2),
            &sized(&[0], 1),
            &sized(&extensions, 2),
        ]
        .concat();
        [&[22, 3, 1][..], &sized(&[&[1][..], &sized(&body, 3)].concat(), 2)].concat()
    }

    #[test]
    fn the_name_of_a_hello_is_read_and_nonsense_has_none() {
        let hello = hello_for(&["pypi.org"]);
        assert_eq!(server_name(&hello).as_deref(), Some("pypi.org"));
        assert_eq!(server_name(&hello_for(&[])), None);
        assert_eq!(server_name(&hello_for(&["pypi.org", "evil.io"])), None);
        for len in 0..hello.len() {
            assert_eq!(server_name(&hello[..len]), None, "cut at {len}");
        }
    }
}
