//! The data types of RFC 4251: numbers, and texts behind their length.

/// Reads data types from the beginning of a message.
#[derive(Debug, Clone)]
pub struct SshReader<'a> {
    rest: &'a [u8],
}

impl<'a> SshReader<'a> {
    /// A reader of a whole message.
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// The next bytes.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    /// A byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    /// A number of 32 bits.
    pub fn number(&mut self) -> Option<u32> {
        self.take(4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes)
    }

    /// A text, which may be any bytes.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        self.take(len)
    }

    /// A number of any length that is not negative, without zeros before it.
    pub fn mpint(&mut self) -> Option<&'a [u8]> {
        let bytes = self.string()?;
        if bytes.first().is_some_and(|first| first & 0x80 != 0) {
            return None;
        }
        Some(without_zeros(bytes))
    }

    /// The bytes that were not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The value, if nothing follows it.
    pub fn finish<T>(self, value: T) -> Option<T> {
        self.rest.is_empty().then_some(value)
    }
}

/// A number without the zeros before it.
pub fn without_zeros(bytes: &[u8]) -> &[u8] {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    &bytes[zeros..]
}

/// Appends a text behind its length.
pub fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
    out.extend_from_slice(text);
}

/// Appends a number that is not negative.
pub fn put_mpint(out: &mut Vec<u8>, number: &[u8]) {
    let number = without_zeros(number);
    // A first bit that is set would make it negative.
    let zero: &[u8] = if number.first().is_some_and(|first| first & 0x80 != 0) { &[0] } else { &[] };
    put_string(out, &[zero, number].concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_types_are_read_as_they_were_written_and_never_beyond_the_end() {
        let mut message = vec![7, 0, 0, 1, 0];
        put_string(&mut message, b"text");
        put_mpint(&mut message, &[0, 0, 0x80, 1]);
        put_mpint(&mut message, &[0, 0]);
        let read = |message: &[u8]| {
            let mut reader = SshReader::new(message);
            let read =
                (reader.byte()?, reader.number()?, reader.string()?.to_vec(), reader.mpint()?.to_vec());
            assert_eq!(reader.mpint()?, b"");
            reader.finish(read)
        };
        assert_eq!(read(&message), Some((7, 256, b"text".to_vec(), vec![0x80, 1])));
        for len in 0..message.len() {
            assert_eq!(read(&message[..len]), None, "cut at {len}");
        }
        assert_eq!(read(&[&message[..], &[0]].concat()), None);
        assert_eq!(SshReader::new(&[0, 0, 0, 1, 0x80]).mpint(), None, "it is negative");
        assert_eq!(SshReader::new(&[0xff; 8]).string(), None);
    }
}
