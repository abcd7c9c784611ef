//! Imports the objects of a Body's git as bytes: its packs as they are, its loose objects as a new pack. `git
//! index-pack` checks every object of both.
//!
//! Trust: names, lengths and contents come from the Body. A loose object whose content does not match its
//! name is ignored.

use std::{
    fs::File,
    io::{self, BufReader, Read},
};

use flate2::bufread::ZlibDecoder;

use crate::{
    Quarantine,
    error::{ErrorContext, WorkspaceError},
    objects::Objects,
    overlay_reader::{OverlayDir, OverlayEntry},
    pack_writer::{ObjectKind, PackWriter, id_of},
};

/// Most loose objects.
const LOOSE_MAX: usize = 1_000_000;
/// Total size of loose objects, uncompressed.
const LOOSE_BYTES_MAX: u64 = 8 << 30;
/// Largest loose object, uncompressed.
const OBJECT_MAX: u64 = 1 << 30;
/// Total size of packs.
const PACK_MAX: u64 = 8 << 30;
/// Most packs.
const PACKS_MAX: usize = 1000;
/// Longest header of a loose object.
const HEADER_LEN_MAX: usize = 32;

/// Imports every object of a Body's `.git/objects` that the quarantine lacks.
pub fn import(
    quarantine: &Quarantine,
    known: &mut Objects,
    objects: &OverlayDir,
) -> Result<(), WorkspaceError> {
    let entries = objects.entries().during("list the Body's objects")?;
    let mut loose = Vec::new();
    for (name, found) in &entries {
        let OverlayEntry::Dir(inner) = found else { continue };
        if name == b"pack" {
            packs(quarantine, &objects.enter(inner).during("open the Body's packs")?)?;
        } else if name.len() == 2 && is_hex(name) {
            let dir = objects.enter(inner).during("open the Body's objects")?;
            let there = dir.entries().during("list the Body's objects")?;
            let names = there.into_iter().filter(|(rest, found)| {
                rest.len() == 38 && is_hex(rest) && matches!(found, OverlayEntry::File(_))
            });
            loose.extend(
                names.map(|(rest, _)| {
                    String::from_utf8_lossy(&[name.as_slice(), &rest].concat()).into_owned()
                }),
            );
        }
        if loose.len() > LOOSE_MAX {
            return Err(WorkspaceError::Hostile(format!(
                "the Body's git has more than {LOOSE_MAX} loose objects"
            )));
        }
    }
    loose_objects(quarantine, known, objects, loose)
}

fn packs(quarantine: &Quarantine, dirs: &OverlayDir) -> Result<(), WorkspaceError> {
    let entries = dirs.entries().during("list the Body's packs")?;
    let packs =
        entries.into_iter().filter(|(name, _)| name.starts_with(b"pack-") && name.ends_with(b".pack"));
    let mut left = PACK_MAX;
    for (count, (name, found)) in packs.enumerate() {
        let OverlayEntry::File(node) = found else { continue };
        if count >= PACKS_MAX {
            return Err(WorkspaceError::Hostile(format!("the Body's git has more than {PACKS_MAX} packs")));
        }
        left = left.checked_sub(node.len).ok_or_else(|| {
            WorkspaceError::Hostile("the packs of the Body's git are larger than 8 GiB".into())
        })?;
        // A pack is named after its contents, so one that was imported is skipped. A Body that reuses a name
        // hurts only itself.
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

fn loose_objects(
    quarantine: &Quarantine,
    known: &mut Objects,
    objects: &OverlayDir,
    names: Vec<String>,
) -> Result<(), WorkspaceError> {
    let there = known.about(&names)?;
    let wanted: Vec<String> =
        names.into_iter().zip(there).filter(|(_, there)| there.is_none()).map(|(name, _)| name).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let stage = quarantine.stage()?;
    let mut pack = PackWriter::begin(&stage.join("loose.pack")).during("make a pack")?;
    let mut last: Option<(&str, OverlayDir)> = None;
    for name in &wanted {
        let (prefix, rest) = name.split_at(2);
        if last.as_ref().is_none_or(|(before, _)| *before != prefix) {
            last = objects.dir(prefix).map(|dirs| (prefix, dirs));
        }
        // An unreadable or corrupt object counts as missing; git reports it if a commit needs it.
        let Some((_, dirs)) = &last else { continue };
        let Some(OverlayEntry::File(node)) = dirs.get(rest) else { continue };
        let Ok(file) = dirs.file(&node) else { continue };
        match add(&mut pack, name, file) {
            Ok(()) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidInput
                ) => {}
            Err(error) => return Err(error).during("pack the Body's objects"),
        }
        if pack.bytes > LOOSE_BYTES_MAX {
            return Err(WorkspaceError::Hostile("the Body's loose objects are larger than 8 GiB".into()));
        }
    }
    if pack.is_empty() {
        return Ok(());
    }
    let finished = pack.finish().during("make a pack")?;
    quarantine.take_pack(&["index-pack", "--stdin", "--fsck-objects"], finished.file)
}

/// Adds a loose object to the pack; ignores a file that is no object or does not match its name.
fn add(pack: &mut PackWriter, name: &str, loose: File) -> io::Result<()> {
    let mut contents = BufReader::new(ZlibDecoder::new(BufReader::new(loose)));
    let (sort, len) = header(&mut contents)?;
    pack.add_if(sort, len, contents, |id| id_of(name.as_bytes()).as_ref() == Some(id)).map(drop)
}

fn is_hex(name: &[u8]) -> bool {
    name.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Parses the header of a loose object, such as `blob 12\0`.
fn header(contents: &mut impl Read) -> io::Result<(ObjectKind, u64)> {
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
    let sort = ObjectKind::of(kind).ok_or_else(bad)?;
    let size: u64 = size.parse().map_err(|_| bad())?;
    if size > OBJECT_MAX { Err(bad()) } else { Ok((sort, size)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_object_is_refused() {
        for bad in [
            &b"blob\0"[..],
            b"blob x\0",
            b"blob -1\0",
            b"what 1\0",
            b"blob 99999999999\0",
            b"blob 1",
            &[b'x'; 100],
        ] {
            assert!(header(&mut &bad[..]).is_err(), "{bad:?}");
        }
        assert_eq!(header(&mut &b"commit 12\0rest"[..]).unwrap(), (ObjectKind::Commit, 12));
    }
}
