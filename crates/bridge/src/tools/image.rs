//! Pictures that model APIs accept, told by their bytes.
//!
//! Invariant: a picture that an API would refuse never reaches a conversation: it would be refused again in every later
//! request.
//! Trust: the bytes come from a Body. Only headers are read, with checks of their lengths.

/// The longest side in pixels.
const SIDE_MAX: u32 = 8000;

/// The media type of a picture; none if the bytes are no picture that model APIs accept.
pub fn media_type(bytes: &[u8]) -> Option<&'static str> {
    let (media_type, size) = if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        ("image/png", png_size(bytes))
    } else if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
        ("image/gif", gif_size(bytes))
    } else if bytes.starts_with(b"\xff\xd8\xff") {
        ("image/jpeg", jpeg_size(bytes))
    } else if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
        ("image/webp", webp_size(bytes))
    } else {
        return None;
    };
    let (width, height) = size?;
    let fits = |side: u32| (1..=SIDE_MAX).contains(&side);
    (fits(width) && fits(height)).then_some(media_type)
}

fn be16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn le16(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn le24(bytes: &[u8], at: usize) -> Option<u32> {
    let [a, b, c] = bytes.get(at..at + 3)?.try_into().ok()?;
    Some(u32::from_le_bytes([a, b, c, 0]))
}

fn png_size(bytes: &[u8]) -> Option<(u32, u32)> {
    if bytes.get(12..16) != Some(b"IHDR") {
        return None;
    }
    let side = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    Some((side(16)?, side(20)?))
}

fn gif_size(bytes: &[u8]) -> Option<(u32, u32)> {
    Some((le16(bytes, 6)?, le16(bytes, 8)?))
}

/// Looks for the frame among the segments of a JPEG.
fn jpeg_size(bytes: &[u8]) -> Option<(u32, u32)> {
    let mut at = 2;
    loop {
        if *bytes.get(at)? != 0xff {
            return None;
        }
        let marker = *bytes.get(at + 1)?;
        match marker {
            0xff => at += 1,
            0x01 | 0xd0..=0xd8 => at += 2,
            0xc0..=0xcf if ![0xc4, 0xc8, 0xcc].contains(&marker) => {
                return Some((be16(bytes, at + 7)?, be16(bytes, at + 5)?));
            }
            _ => at += 2 + usize::try_from(be16(bytes, at + 2)?.max(2)).ok()?,
        }
    }
}

fn webp_size(bytes: &[u8]) -> Option<(u32, u32)> {
    match bytes.get(12..16)? {
        b"VP8 " => Some((le16(bytes, 26)? & 0x3fff, le16(bytes, 28)? & 0x3fff)),
        b"VP8L" => {
            let packed = u32::from_le_bytes(bytes.get(21..25)?.try_into().ok()?);
            Some(((packed & 0x3fff) + 1, ((packed >> 14) & 0x3fff) + 1))
        }
        b"VP8X" => Some((le24(bytes, 24)? + 1, le24(bytes, 27)? + 1)),
        _ => None,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A picture of one pixel.
    pub const PIXEL_PNG: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0\x1f\x15\xc4\x89\0\0\0\rIDATx\x9cc\xf8\xff\xff?\0\x05\xfe\x02\xfe\xa75\x81\x84\0\0\0\0IEND\xaeB`\x82";

    #[test]
    fn pictures_are_told_by_their_bytes() {
        assert_eq!(media_type(PIXEL_PNG), Some("image/png"));
        assert_eq!(media_type(b"GIF89a\x02\0\x03\0"), Some("image/gif"));
        let jpeg = b"\xff\xd8\xff\xe0\0\x04ab\xff\xc0\0\x11\x08\0\x10\0\x20\x03";
        assert_eq!(jpeg_size(jpeg), Some((32, 16)));
        assert_eq!(media_type(jpeg), Some("image/jpeg"));
        let webp = b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\x09\0\0\x13\0\0";
        assert_eq!(webp_size(webp), Some((10, 20)));
        assert_eq!(media_type(webp), Some("image/webp"));
    }

    #[test]
    fn bytes_that_an_api_would_refuse_are_no_picture() {
        for bytes in [
            b"".as_slice(),
            b"text",
            b"\x89PNG\r\n\x1a\n",
            b"GIF89a\0\0\0\0",
            b"GIF89a\xff\xff\xff\xff",
            b"\xff\xd8\xff",
            b"\xff\xd8\xff\xe0\xff\xff",
            b"RIFF\0\0\0\0WEBP",
        ] {
            assert_eq!(media_type(bytes), None, "{bytes:?}");
        }
    }
}
