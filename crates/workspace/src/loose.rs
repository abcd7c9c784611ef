//! Objects of a Body's git, taken as bytes: its packs as they are, its loose objects as a pack of ours, both for
//! `git index-pack`, which checks every one of them.
//!
//! Trust: names, lengths and contents are a Body's. A name that lies only means that its object is not found.

use std::{
    fs::File,
    io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write},
    path::Path,
};

use flate2::{Compression, bufread::ZlibDecoder, write::ZlibEncoder};
use sha1::{Digest, Sha1};

use crate::{
    Quarantine,
    error::{During, WorkspaceError},
    merged::{Dirs, Found},
};

/// Most loose objects.
const LOOSE_MAX: usize = 1_000_000;
/// All of them, unpacked.
const LOOSE_BYTES_MAX: u64 = 8 << 30;
/// Largest one, unpacked.
const OBJECT_MAX: u64 = 1 << 30;
/// Largest pack.
const PACK_MAX: u64 = 8 << 30;
/// Most packs.
const PACKS_MAX: usize = 1000;
/// Longest header of a loose object.
const HEADER_LEN_MAX: usize = 32;

/// Takes every object of a Body's `.git/objects` that the quarantine lacks.
pub fn import(quarantine: &Quarantine, objects: &Dirs) -> Result<(), WorkspaceError> {
    let entries = objects.entries().during("list the Body's objects")?;
    let mut loose = Vec::new();
    for (name, found) in entries {
        match found {
            Found::Dir { dirs, .. } if name == b"pack" => packs(quarantine, &dirs)?,
            Found::Dir { dirs, .. } if name.len() == 2 && is_hex(&name) => loose.push((name, dirs)),
            _ => {}
        }
    }
    loose_objects(quarantine, &loose)
}

fn packs(quarantine: &Quarantine, dirs: &Dirs) -> Result<(), WorkspaceError> {
    let entries = dirs.entries().during("list the Body's packs")?;
    let packs = entries.into_iter().filter(|(name, _)| name.starts_with(b"pack-") && name.ends_with(b".pack"));
    for (count, (name, found)) in packs.enumerate() {
        let Found::File(node) = found else { continue };
        if count >= PACKS_MAX {
            return Err(WorkspaceError::Hostile(format!("the Body's git has more than {PACKS_MAX} packs")));
        }
        if node.len > PACK_MAX {
            return Err(WorkspaceError::Hostile("a pack of the Body's git is larger than 8 GiB".into()));
        }
        // A pack is named by what is in it, so one that was taken need not be taken again; a lie costs its teller.
        let seen = quarantine.dir().join("taken").join(proto::event::hex(&name));
        if std::fs::read_to_string(&seen).is_ok_and(|len| len == node.len.to_string()) {
            continue;
        }
        let file = dirs.file(&node).during("open a pack of the Body")?;
        let limit = format!("--max-input-size={PACK_MAX}");
        quarantine.take_pack(&["index-pack", "--stdin", "--fsck-objects", &limit], file)?;
        std::fs::create_dir_all(quarantine.dir().join("taken")).during("note a pack")?;
        std::fs::write(seen, node.len.to_string()).during("note a pack")?;
    }
    Ok(())
}

fn loose_objects(quarantine: &Quarantine, dirs: &[(Vec<u8>, Dirs)]) -> Result<(), WorkspaceError> {
    let mut found = Vec::new();
    for (prefix, dirs) in dirs {
        for (name, entry) in dirs.entries().during("list the Body's objects")? {
            if let (38, true, Found::File(node)) = (name.len(), is_hex(&name), entry) {
                found.push(([prefix.as_slice(), &name].concat(), dirs, node));
            }
        }
        if found.len() > LOOSE_MAX {
            return Err(WorkspaceError::Hostile(format!("the Body's git has more than {LOOSE_MAX} loose objects")));
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    let names: Vec<u8> = found.iter().flat_map(|(id, ..)| id.iter().copied().chain([b'\n'])).collect();
    let said = quarantine.git().feed(["cat-file", "--batch-check=%(objectname)"], names)?;
    let missing: Vec<bool> = said.split(|byte| *byte == b'\n').map(|line| line.ends_with(b" missing")).collect();
    let wanted = found.into_iter().zip(missing).filter(|(_, missing)| *missing).map(|(found, _)| found);
    let stage = quarantine.stage()?;
    let path = stage.join("loose.pack");
    let mut pack = Pack::begin(&path).during("make a pack")?;
    for (_, dirs, node) in wanted {
        // One that cannot be read or unpacked is not there; whoever needs it will say so.
        let Ok(file) = dirs.file(&node) else { continue };
        match pack.add(file) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput) => {}
            Err(error) => return Err(error).during("pack the Body's objects"),
        }
        if pack.bytes > LOOSE_BYTES_MAX {
            return Err(WorkspaceError::Hostile("the Body's loose objects are larger than 8 GiB".into()));
        }
    }
    if pack.count == 0 {
        return Ok(());
    }
    let file = pack.finish().during("make a pack")?;
    quarantine.take_pack(&["index-pack", "--stdin", "--fsck-objects"], file)
}

fn is_hex(name: &[u8]) -> bool {
    name.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A pack of whole objects.
struct Pack {
    file: File,
    count: u32,
    bytes: u64,
}

impl Pack {
    fn begin(path: &Path) -> io::Result<Self> {
        let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.write_all(b"PACK\0\0\0\x02\0\0\0\0")?;
        Ok(Self { file, count: 0, bytes: 0 })
    }

    /// Adds a loose object; what is no object is an error and leaves no trace.
    fn add(&mut self, loose: File) -> io::Result<()> {
        let before = self.file.stream_position()?;
        match self.try_add(loose) {
            Ok(size) => {
                self.count += 1;
                self.bytes += size;
                Ok(())
            }
            Err(error) => {
                self.file.set_len(before)?;
                self.file.seek(SeekFrom::Start(before))?;
                Err(error)
            }
        }
    }

    fn try_add(&mut self, loose: File) -> io::Result<u64> {
        let mut contents = BufReader::new(ZlibDecoder::new(BufReader::new(loose)));
        let (kind, size) = header(&mut contents)?;
        let mut out = BufWriter::new(&mut self.file);
        out.write_all(&entry_header(kind, size))?;
        let mut packed = ZlibEncoder::new(out, Compression::fast());
        let copied = io::copy(&mut contents.by_ref().take(size), &mut packed)?;
        let more = contents.read(&mut [0])? != 0;
        packed.finish()?.flush()?;
        if copied != size || more { Err(io::ErrorKind::InvalidData.into()) } else { Ok(size) }
    }

    /// Puts the count in, and the checksum of all at the end.
    fn finish(mut self) -> io::Result<File> {
        self.file.seek(SeekFrom::Start(8))?;
        self.file.write_all(&self.count.to_be_bytes())?;
        self.file.seek(SeekFrom::Start(0))?;
        let mut hasher = Sha1::new();
        let mut buffer = vec![0; 256 << 10];
        loop {
            match self.file.read(&mut buffer)? {
                0 => break,
                len => hasher.update(&buffer[..len]),
            }
        }
        self.file.write_all(&hasher.finalize())?;
        self.file.seek(SeekFrom::Start(0))?;
        Ok(self.file)
    }
}

/// `blob 12` and a zero: what a loose object begins with. Gives the number its kind has in a pack.
fn header(contents: &mut impl Read) -> io::Result<(u8, u64)> {
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let mut text = Vec::new();
    loop {
        let mut byte = [0];
        contents.read_exact(&mut byte)?;
        match byte[0] {
            0 => break,
            _ if text.len() >= HEADER_LEN_MAX => return Err(bad()),
            byte => text.push(byte),
        }
    }
    let text = String::from_utf8(text).map_err(|_| bad())?;
    let (kind, size) = text.split_once(' ').ok_or_else(bad)?;
    let number = match kind {
        "commit" => 1,
        "tree" => 2,
        "blob" => 3,
        "tag" => 4,
        _ => return Err(bad()),
    };
    let size: u64 = size.parse().map_err(|_| bad())?;
    if size > OBJECT_MAX { Err(bad()) } else { Ok((number, size)) }
}

/// Kind and size as a pack has them: four bits, then seven a byte.
fn entry_header(kind: u8, size: u64) -> Vec<u8> {
    let mut bytes = vec![kind << 4 | (size & 15) as u8];
    let mut rest = size >> 4;
    while rest > 0 {
        if let Some(last) = bytes.last_mut() {
            *last |= 128;
        }
        bytes.push((rest & 127) as u8);
        rest >>= 7;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_a_pack_hold_kind_and_size() {
        assert_eq!(entry_header(3, 5), [0x35]);
        assert_eq!(entry_header(1, 16), [0x90, 0x01]);
        assert_eq!(entry_header(2, 0x1234), [0xa4, 0xa3, 0x02]);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for bad in [&b"blob\0"[..], b"blob x\0", b"blob -1\0", b"what 1\0", b"blob 99999999999\0", b"blob 1", &[b'x'; 100]] {
            assert!(header(&mut &bad[..]).is_err(), "{bad:?}");
        }
        assert_eq!(header(&mut &b"commit 12\0rest"[..]).unwrap(), (1, 12));
    }
}
