//! Reads archives of unknown origin entry by entry, with limits, and never unpacks by path.
//!
//! Trust: everything in an archive is hostile. The reader counts sizes as bytes arrive, checks names before
//! it passes them on, and skips or refuses kinds that a layer does not use (devices, sparse maps,
//! capabilities).

use std::io::{self, BufRead, BufReader, Read};

use proto::pack::{LayerEntry, LayerEntryKind};
use tar::{Archive, EntryType, Header, PaxExtensions};

/// The longest extension header, with names and with attributes that are not kept.
const EXTENSION_LEN_MAX: u64 = 256 << 10;
/// The largest zstd window, as a power of two; it bounds the memory that decompression takes.
const WINDOW_LOG_MAX: u32 = 27;
/// How many bytes are read after an archive's end: tar pads its last record, by default to 10 KiB.
const PADDING_MAX: u64 = 4 << 20;
/// The owner of a file whose id no Body maps.
const NOBODY: u32 = 65_534;
const ID_MAX: u32 = 65_535;

/// Limits for the contents of an archive.
#[derive(Debug, Clone, Copy)]
pub struct ArchiveLimits {
    /// Contents of all files together.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
}

/// The meaning of special names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// A plain archive; no name is special.
    Plain,
    /// A layer of an image: the prefix `.wh.` marks a whiteout.
    Image,
}

/// Why an archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// The input is not an archive, is cut off, or is damaged.
    #[error("the archive cannot be read")]
    Read(#[source] io::Error),
    /// The archive exceeds a limit.
    #[error("the archive holds more than {0}")]
    TooMuch(String),
    /// The archive holds an entry that is not allowed.
    #[error("the archive holds {0}")]
    Refused(String),
    /// The receiver of the entries failed.
    #[error("cannot store the contents of the archive")]
    Sink(#[source] io::Error),
}

/// Receives entries one after the other; it must read all contents of a file.
pub trait Sink {
    /// Receives one entry.
    fn take(&mut self, entry: LayerEntry, contents: &mut dyn Read) -> io::Result<()>;
}

/// The totals of an archive.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArchiveTotals {
    /// Entries.
    pub entries: u64,
    /// Contents of files.
    pub bytes: u64,
}

/// Reads a tar archive, plain, gzip or zstd, to its end.
pub fn read(
    archive: impl Read,
    dialect: Dialect,
    bounds: ArchiveLimits,
    sink: &mut dyn Sink,
) -> Result<ArchiveTotals, ArchiveError> {
    let mut archive = BufReader::with_capacity(64 << 10, archive);
    let head = archive.fill_buf().map_err(ArchiveError::Read)?;
    match head {
        [0x1f, 0x8b, ..] => entries(flate2::bufread::MultiGzDecoder::new(archive), dialect, bounds, sink),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let mut plain = zstd::Decoder::with_buffer(archive).map_err(ArchiveError::Read)?;
            plain.window_log_max(WINDOW_LOG_MAX).map_err(ArchiveError::Read)?;
            entries(plain, dialect, bounds, sink)
        }
        _ => entries(archive, dialect, bounds, sink),
    }
}

fn entries(
    plain: impl Read,
    dialect: Dialect,
    bounds: ArchiveLimits,
    sink: &mut dyn Sink,
) -> Result<ArchiveTotals, ArchiveError> {
    // Headers and padding count too, so that an archive of nothing else ends.
    let stream_max = bounds.bytes.saturating_add(bounds.entries.saturating_mul(2048)).saturating_add(1 << 20);
    let mut archive = Archive::new(plain.take(stream_max));
    let mut counted = ArchiveTotals::default();
    let mut said = ExtensionHeaders::default();
    for entry in archive.entries().map_err(ArchiveError::Read)?.raw(true) {
        let mut entry = entry.map_err(ArchiveError::Read)?;
        counted.entries += 1;
        if counted.entries > bounds.entries {
            return Err(ArchiveError::TooMuch(format!("{} entries", bounds.entries)));
        }
        if said.read_header(&mut entry)? {
            continue;
        }
        let said = std::mem::take(&mut said);
        let Some(found) = said.entry(entry.header(), dialect)? else { continue };
        if let LayerEntryKind::File(size) = found.what {
            counted.bytes = counted.bytes.saturating_add(size);
            if counted.bytes > bounds.bytes {
                return Err(ArchiveError::TooMuch(proto::Size(bounds.bytes).to_string()));
            }
        }
        sink.take(found, &mut entry).map_err(ArchiveError::Sink)?;
    }
    // The writer pads the end of the archive and must not get SIGPIPE; a compressed archive ends with its
    // checksum.
    io::copy(&mut archive.into_inner().take(PADDING_MAX), &mut io::sink()).map_err(ArchiveError::Read)?;
    Ok(counted)
}

/// The extension headers that apply to the entry after them.
#[derive(Default)]
struct ExtensionHeaders {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    owner: (Option<u64>, Option<u64>),
    mtime: Option<i64>,
}

impl ExtensionHeaders {
    /// Reads an extension header; false if the entry is none.
    fn read_header<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>) -> Result<bool, ArchiveError> {
        let kind = entry.header().entry_type();
        if !matches!(
            kind,
            EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader | EntryType::XGlobalHeader
        ) {
            return Ok(false);
        }
        let mut text = Vec::new();
        entry.take(EXTENSION_LEN_MAX + 1).read_to_end(&mut text).map_err(ArchiveError::Read)?;
        if text.len() as u64 > EXTENSION_LEN_MAX {
            return Err(ArchiveError::Refused("an extension header that is too long".into()));
        }
        let plain = |text: &[u8]| text.split(|byte| *byte == 0).next().unwrap_or_default().to_vec();
        match kind {
            EntryType::GNULongName => self.path = Some(plain(&text)),
            EntryType::GNULongLink => self.link = Some(plain(&text)),
            EntryType::XHeader => self.extensions(&text)?,
            _ => {}
        }
        Ok(true)
    }

    fn extensions(&mut self, text: &[u8]) -> Result<(), ArchiveError> {
        for extension in PaxExtensions::new(text) {
            let extension = extension.map_err(ArchiveError::Read)?;
            let value = extension.value_bytes();
            let number = || {
                std::str::from_utf8(value).ok().and_then(|text| text.split('.').next()?.parse::<i64>().ok())
            };
            match extension.key_bytes() {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = number().and_then(|size| u64::try_from(size).ok()),
                b"uid" => self.owner.0 = number().and_then(|id| u64::try_from(id).ok()),
                b"gid" => self.owner.1 = number().and_then(|id| u64::try_from(id).ok()),
                b"mtime" => self.mtime = number(),
                key if key.starts_with(b"GNU.sparse.") => {
                    return Err(ArchiveError::Refused("a sparse file".into()));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Converts the header to an entry; none for a kind that a layer does not use.
    fn entry(self, header: &Header, dialect: Dialect) -> Result<Option<LayerEntry>, ArchiveError> {
        let size = header.entry_size().map_err(ArchiveError::Read)?;
        if self.size.is_some_and(|said| said != size) {
            return Err(ArchiveError::Refused("an entry with two sizes".into()));
        }
        let raw = self.path.unwrap_or_else(|| header.path_bytes().into_owned());
        let mut path = clean(&raw)?;
        let link = || {
            self.link
                .clone()
                .or_else(|| header.link_name_bytes().map(|name| name.into_owned()))
                .unwrap_or_default()
        };
        let what = match header.entry_type() {
            EntryType::Directory => LayerEntryKind::Dir,
            EntryType::Regular | EntryType::Continuous => LayerEntryKind::File(size),
            EntryType::Symlink => LayerEntryKind::Link(bounded(link())?),
            EntryType::Link => LayerEntryKind::Same(clean(&link())?),
            EntryType::Char | EntryType::Block | EntryType::Fifo => return Ok(None),
            other => {
                return Err(ArchiveError::Refused(format!(
                    "an entry of kind {:?}",
                    char::from(other.as_byte())
                )));
            }
        };
        let what = match dialect {
            Dialect::Plain => what,
            Dialect::Image => whiteout(&mut path)?.unwrap_or(what),
        };
        if path.is_empty() && !matches!(what, LayerEntryKind::Dir | LayerEntryKind::Opaque) {
            return Err(ArchiveError::Refused("a root that is not a directory".into()));
        }
        let id = |said: Option<u64>, header: io::Result<u64>| {
            let id = said.or_else(|| header.ok()).unwrap_or(0);
            u32::try_from(id).ok().filter(|id| *id <= ID_MAX).unwrap_or(NOBODY)
        };
        Ok(Some(LayerEntry {
            path,
            what,
            mode: header.mode().unwrap_or(0o644) & 0o7777,
            owner: (id(self.owner.0, header.uid()), id(self.owner.1, header.gid())),
            mtime: self
                .mtime
                .or_else(|| header.mtime().ok().and_then(|time| i64::try_from(time).ok()))
                .unwrap_or(0),
        }))
    }
}

/// Removes `./` and `//` from a path; refuses a path with `..`.
fn clean(raw: &[u8]) -> Result<Vec<u8>, ArchiveError> {
    let parts: Vec<&[u8]> =
        raw.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    let path = parts.join(&b'/');
    proto::tree::check_path(&path).map_err(|error| ArchiveError::Refused(error.to_string()))?;
    Ok(path)
}

fn bounded(target: Vec<u8>) -> Result<Vec<u8>, ArchiveError> {
    let fits = !target.is_empty() && target.len() <= proto::tree::PATH_LEN_MAX && !target.contains(&0);
    if fits { Ok(target) } else { Err(ArchiveError::Refused("a link with an invalid target".into())) }
}

/// Parses a whiteout, and cuts its name from the path.
fn whiteout(path: &mut Vec<u8>) -> Result<Option<LayerEntryKind>, ArchiveError> {
    let cut = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
    let name = path[cut..].to_vec();
    if name == b".wh..wh..opq" {
        path.truncate(cut.saturating_sub(1));
        return Ok(Some(LayerEntryKind::Opaque));
    }
    let Some(hidden) = name.strip_prefix(b".wh.") else { return Ok(None) };
    if hidden.is_empty() || hidden == b"." || hidden == b".." || hidden.starts_with(b".wh.") {
        return Err(ArchiveError::Refused("a whiteout without a name".into()));
    }
    path.truncate(cut);
    path.extend_from_slice(hidden);
    Ok(Some(LayerEntryKind::Gone))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct EntryLog(Vec<(String, LayerEntryKind)>);

    impl Sink for EntryLog {
        fn take(&mut self, entry: LayerEntry, contents: &mut dyn Read) -> io::Result<()> {
            io::copy(contents, &mut io::sink())?;
            self.0.push((String::from_utf8_lossy(&entry.path).into_owned(), entry.what));
            Ok(())
        }
    }

    fn archive(entries: &[(&str, EntryType, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, kind, text) in entries {
            let mut header = Header::new_gnu();
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            // Written by hand, because the library refuses to write names that the reader must refuse.
            let name = &mut header.as_old_mut().name;
            name[..path.len().min(100)].copy_from_slice(&path.as_bytes()[..path.len().min(100)]);
            if matches!(kind, EntryType::Symlink | EntryType::Link) {
                header.as_old_mut().linkname[..text.len()].copy_from_slice(text.as_bytes());
                header.set_size(0);
            } else {
                header.set_size(text.len() as u64);
            }
            header.set_cksum();
            let contents = if header.entry_size().unwrap() == 0 { "" } else { text };
            builder.append(&header, contents.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    const BOUNDS: ArchiveLimits = ArchiveLimits { bytes: 1000, entries: 10 };

    fn seen(
        entries: &[(&str, EntryType, &str)],
        dialect: Dialect,
    ) -> Result<Vec<(String, LayerEntryKind)>, String> {
        let mut seen = EntryLog::default();
        read(&archive(entries)[..], dialect, BOUNDS, &mut seen).map_err(|error| error.to_string())?;
        Ok(seen.0)
    }

    #[test]
    fn an_archive_is_read_to_the_end_of_its_padding() {
        let mut padded = archive(&[("a", EntryType::Regular, "text")]);
        padded.resize(padded.len() + (1 << 20), 0);
        let mut rest = &padded[..];
        read(&mut rest, Dialect::Plain, BOUNDS, &mut EntryLog::default()).unwrap();
        assert_eq!(rest.len(), 0, "its writer still has something to say");

        let endless = padded[..].chain(io::repeat(0));
        read(endless, Dialect::Plain, BOUNDS, &mut EntryLog::default()).unwrap();
    }

    #[test]
    fn a_compressed_archive_is_held_against_its_checksum() {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        io::Write::write_all(&mut packer, &archive(&[("a", EntryType::Regular, "text")])).unwrap();
        let mut packed = packer.finish().unwrap();
        read(&packed[..], Dialect::Plain, BOUNDS, &mut EntryLog::default()).unwrap();
        let checksum = packed.len() - 8;
        packed[checksum] ^= 1;
        assert!(read(&packed[..], Dialect::Plain, BOUNDS, &mut EntryLog::default()).is_err());
    }

    #[test]
    fn entries_are_cleaned_and_devices_left_out() {
        let entries = [
            ("./", EntryType::Directory, ""),
            ("./a//b", EntryType::Regular, "text"),
            ("dev/null", EntryType::Char, ""),
            ("l", EntryType::Symlink, "/etc/passwd"),
            ("h", EntryType::Link, "./a/b"),
        ];
        let found = seen(&entries, Dialect::Plain).unwrap();
        let expected = [
            ("", LayerEntryKind::Dir),
            ("a/b", LayerEntryKind::File(4)),
            ("l", LayerEntryKind::Link(b"/etc/passwd".to_vec())),
            ("h", LayerEntryKind::Same(b"a/b".to_vec())),
        ];
        assert_eq!(found, expected.map(|(path, what)| (path.to_owned(), what)));
    }

    #[test]
    fn whiteouts_mean_something_only_in_images() {
        let entries = [
            ("a/.wh.b", EntryType::Regular, ""),
            ("a/.wh..wh..opq", EntryType::Regular, ""),
            (".wh.top", EntryType::Regular, ""),
        ];
        let image = seen(&entries, Dialect::Image).unwrap();
        assert_eq!(
            image,
            [("a/b", LayerEntryKind::Gone), ("a", LayerEntryKind::Opaque), ("top", LayerEntryKind::Gone)]
                .map(|(path, what)| (path.to_owned(), what))
        );
        assert_eq!(seen(&entries, Dialect::Plain).unwrap()[0].0, "a/.wh.b");
        for bad in [".wh.", ".wh...", ".wh..", "a/.wh..wh.x"] {
            assert!(seen(&[(bad, EntryType::Regular, "")], Dialect::Image).is_err(), "{bad}");
        }
    }

    #[test]
    fn zstd_is_read_and_bounded_as_what_it_holds() {
        let packed = |len: usize| {
            zstd::encode_all(&archive(&[("a", EntryType::Regular, &"x".repeat(len))])[..], 3).unwrap()
        };
        let mut seen = EntryLog::default();
        assert_eq!(
            read(&packed(900)[..], Dialect::Plain, BOUNDS, &mut seen).unwrap(),
            ArchiveTotals { entries: 1, bytes: 900 }
        );
        assert!(read(&packed(1001)[..], Dialect::Plain, BOUNDS, &mut seen).is_err());
    }

    #[test]
    fn what_climbs_or_is_too_much_is_refused() {
        for bad in ["../x", "a/../../x", "/..", "a/.."] {
            assert!(seen(&[(bad, EntryType::Regular, "x")], Dialect::Plain).is_err(), "{bad}");
        }
        assert!(seen(&[("a", EntryType::Link, "../../etc/passwd")], Dialect::Plain).is_err());
        assert!(
            seen(&[("a", EntryType::Regular, &"x".repeat(1001))], Dialect::Plain)
                .unwrap_err()
                .contains("more than")
        );
        assert!(seen(&[("a", EntryType::Regular, ""); 11], Dialect::Plain).unwrap_err().contains("entries"));
        assert!(seen(&[("a", EntryType::GNUSparse, "")], Dialect::Plain).is_err());
        let cut = archive(&[("a", EntryType::Regular, &"x".repeat(900))]);
        assert!(read(&cut[..700], Dialect::Plain, BOUNDS, &mut EntryLog::default()).is_err());
        assert!(
            read(&b"\x28\xb5\x2f\xfdnot zstd"[..], Dialect::Plain, BOUNDS, &mut EntryLog::default()).is_err()
        );
        assert!(read(&b"\x1f\x8bnot gzip"[..], Dialect::Plain, BOUNDS, &mut EntryLog::default()).is_err());
    }
}
