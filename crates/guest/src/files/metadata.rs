//! Metadata that callers attach to files: `X-Metadata-*` headers, stored as `user.e2b.*` extended attributes.

use std::{collections::BTreeMap, io, os::fd::AsFd, path::Path};

use hyper::HeaderMap;
use rustix::{fs::XattrFlags, io::Errno};

const PREFIX: &str = "user.e2b.";
const HEADER_PREFIX: &str = "x-metadata-";
const KEY_LEN_MAX: usize = 255 - PREFIX.len();
/// The room that ext4 has for the attributes of one file.
const TOTAL_LEN_MAX: usize = 4096;
const LIST_LEN_MAX: usize = 64 * 1024;

/// The metadata of a file.
pub type Metadata = BTreeMap<String, String>;

/// Reads the metadata that an upload attaches from its headers.
pub fn from_headers(headers: &HeaderMap) -> Result<Metadata, String> {
    let mut metadata = Metadata::new();
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX).filter(|key| !key.is_empty()) else {
            continue;
        };
        let printable = value.as_bytes().iter().all(|byte| (0x20..=0x7e).contains(byte));
        if key.len() > KEY_LEN_MAX {
            return Err(format!("metadata key {key:?} exceeds {KEY_LEN_MAX} bytes"));
        }
        if !printable {
            return Err(format!("metadata value for key {key:?} contains a non-printable-ASCII byte"));
        }
        metadata
            .entry(key.to_owned())
            .or_insert_with(|| String::from_utf8_lossy(value.as_bytes()).into_owned());
    }
    let total: usize = metadata.iter().map(|(key, value)| PREFIX.len() + key.len() + value.len()).sum();
    if total > TOTAL_LEN_MAX {
        return Err(format!("total metadata size {total} exceeds {TOTAL_LEN_MAX} bytes"));
    }
    Ok(metadata)
}

/// Reads the metadata of a file; empty where the file system has no extended attributes.
pub fn read(path: &Path) -> Metadata {
    let mut list = Vec::new();
    match rustix::fs::listxattr_query(path) {
        Ok(len @ 1..=LIST_LEN_MAX) => list.reserve(len),
        _ => return Metadata::new(),
    }
    if rustix::fs::listxattr(path, rustix::buffer::spare_capacity(&mut list)).is_err() {
        return Metadata::new();
    }
    let value = |name: &str| {
        let mut value = Vec::with_capacity(TOTAL_LEN_MAX);
        rustix::fs::getxattr(path, name, rustix::buffer::spare_capacity(&mut value)).ok()?;
        String::from_utf8(value).ok()
    };
    our_attributes(&list).filter_map(|name| Some((name[PREFIX.len()..].to_owned(), value(name)?))).collect()
}

/// Replaces the metadata of a file.
pub fn write(file: impl AsFd, metadata: &Metadata) -> io::Result<()> {
    let mut list = Vec::with_capacity(LIST_LEN_MAX);
    match rustix::fs::flistxattr(&file, rustix::buffer::spare_capacity(&mut list)) {
        // The contents are written already, so a file system without attributes does not fail the upload.
        Err(Errno::NOTSUP | Errno::NOSYS) => return Ok(()),
        listed => listed?,
    };
    for name in our_attributes(&list).filter(|name| !metadata.contains_key(&name[PREFIX.len()..])) {
        match rustix::fs::fremovexattr(&file, name) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(error) => return Err(error.into()),
        }
    }
    for (key, value) in metadata {
        match rustix::fs::fsetxattr(&file, format!("{PREFIX}{key}"), value.as_bytes(), XattrFlags::empty()) {
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn our_attributes(list: &[u8]) -> impl Iterator<Item = &str> {
    let names = list.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
    names.filter(|name| name.starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn headers_become_metadata() {
        let mut headers = HeaderMap::new();
        headers.insert("X-Metadata-Author", HeaderValue::from_static("me"));
        headers.insert("other", HeaderValue::from_static("x"));
        assert_eq!(from_headers(&headers), Ok(Metadata::from([("author".into(), "me".into())])));
        let long = HeaderName::from_bytes(format!("x-metadata-{}", "k".repeat(300)).as_bytes()).unwrap();
        headers.insert(long, HeaderValue::from_static("x"));
        assert!(from_headers(&headers).is_err());
    }

    #[test]
    fn values_that_are_not_text_are_refused() {
        let mut headers = HeaderMap::new();
        headers.insert("x-metadata-a", HeaderValue::from_bytes(b"\xff").unwrap());
        assert!(from_headers(&headers).is_err());
        headers.insert("x-metadata-a", HeaderValue::from_str(&"x".repeat(5000)).unwrap());
        assert!(from_headers(&headers).is_err());
    }
}
