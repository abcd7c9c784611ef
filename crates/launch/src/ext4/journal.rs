//! The journal of a disk: what its kernel had committed there and not yet written to its place.
//!
//! A transaction counts once its commit block is there, as for a kernel that mounts the disk after a loss of power.

use std::{collections::HashMap, io};

use super::{Disk, bytes_at, damaged, inode::Extents, joined};

pub(super) const MAGIC: u32 = 0xc03b_3998;
const HEADER_LEN: usize = 12;
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const REVOKE: u32 = 5;
/// Revocations, 64-bit block numbers, checksums of the second and third kind.
const KNOWN: u32 = 0x1 | 0x2 | 0x8 | 0x10;
const WIDE: u32 = 0x2;
const CHECKSUM_2: u32 = 0x8;
const CHECKSUM_3: u32 = 0x10;
const ESCAPED: u32 = 1;
const SAME_UUID: u32 = 2;
const LAST: u32 = 8;

/// Where the newest contents of a block are.
#[derive(Debug, Clone, Copy)]
pub(super) struct JournalCopy {
    /// The block of the disk that holds them.
    pub(super) at: u64,
    /// Whether its first word was replaced, because the journal would have taken it for its own mark.
    pub(super) escaped: bool,
}

struct DiskJournal<'a> {
    disk: &'a Disk,
    extents: Extents,
    features: u32,
    first: u32,
    end: u32,
}

/// A block that a transaction changed.
struct LoggedBlock {
    sequence: u32,
    number: u64,
    copy: JournalCopy,
}

fn word(bytes: &[u8], at: usize) -> io::Result<u32> {
    bytes_at(bytes, at).map(u32::from_be_bytes)
}

/// The blocks whose newest contents are in the journal in that inode.
pub(super) fn find_copies(disk: &Disk, inode: u32) -> io::Result<HashMap<u64, JournalCopy>> {
    let inode = disk.inode(inode)?;
    let extents = disk.extents(&inode)?;
    let sb = disk.stored_block(extents.block(0).ok_or_else(|| damaged("its journal has no beginning"))?)?;
    let start = word(&sb, 0x1c)?;
    if word(&sb, 0)? != MAGIC || word(&sb, 0xc)? as usize != disk.block_len {
        return Err(damaged("its journal has no superblock"));
    }
    if start == 0 {
        return Ok(HashMap::new());
    }
    let features = word(&sb, 0x28)?;
    if features & !KNOWN != 0 {
        let what = format!("the disk's journal has features that cannot be read: {:#x}", features & !KNOWN);
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    let journal = DiskJournal { disk, extents, features, first: word(&sb, 0x14)?, end: word(&sb, 0x10)? };
    if journal.first == 0 || journal.first >= journal.end || !(journal.first..journal.end).contains(&start) {
        return Err(damaged("its journal makes no sense"));
    }
    journal.scan(start, word(&sb, 0x18)?)
}

impl DiskJournal<'_> {
    fn scan(&self, start: u32, sequence: u32) -> io::Result<HashMap<u64, JournalCopy>> {
        let (mut at, mut sequence) = (start, sequence);
        let (mut logged, mut revoked) = (Vec::new(), HashMap::new());
        // Of the transaction that has no commit block yet.
        let (mut open_logged, mut open_revoked) = (Vec::new(), Vec::new());
        let mut left = self.end - self.first;
        while left > 0 {
            let bytes = self.read(at)?;
            if word(&bytes, 0)? != MAGIC || word(&bytes, 8)? != sequence {
                break;
            }
            at = self.after(at, 1);
            left -= 1;
            match word(&bytes, 4)? {
                DESCRIPTOR => {
                    let count = self.tags(&bytes, sequence, at, &mut open_logged)?;
                    at = self.after(at, count);
                    left = left.saturating_sub(count);
                }
                REVOKE => open_revoked.extend(self.revoked(&bytes)?),
                COMMIT => {
                    logged.append(&mut open_logged);
                    revoked.extend(open_revoked.drain(..).map(|number| (number, sequence)));
                    sequence = sequence.wrapping_add(1);
                }
                _ => break,
            }
        }
        let mut copies = HashMap::new();
        for LoggedBlock { sequence, number, copy } in logged {
            let newer = |revoked: &u32| sequence.wrapping_sub(*revoked).cast_signed() > 0;
            if revoked.get(&number).is_none_or(newer) {
                copies.insert(number, copy);
            } else {
                copies.remove(&number);
            }
        }
        Ok(copies)
    }

    fn read(&self, at: u32) -> io::Result<Vec<u8>> {
        self.disk.stored_block(self.place(at)?)
    }

    fn place(&self, at: u32) -> io::Result<u64> {
        self.extents.block(at.into()).ok_or_else(|| damaged("its journal has a hole"))
    }

    fn after(&self, at: u32, count: u32) -> u32 {
        let len = u64::from(self.end - self.first);
        let from_first = u64::from(at - self.first) + u64::from(count);
        self.first + (from_first % len) as u32
    }

    /// The blocks that a descriptor names; their contents follow it, from `at` on.
    fn tags(&self, bytes: &[u8], sequence: u32, at: u32, logged: &mut Vec<LoggedBlock>) -> io::Result<u32> {
        let wide = self.features & WIDE != 0;
        let third = self.features & CHECKSUM_3 != 0;
        let checked = self.features & (CHECKSUM_2 | CHECKSUM_3) != 0;
        let tag_len = match (third, wide) {
            (true, _) => 16,
            (false, true) => 12 + if checked { 2 } else { 0 },
            (false, false) => 8 + if checked { 2 } else { 0 },
        };
        let end = bytes.len() - if checked { 4 } else { 0 };
        let (mut place, mut count) = (HEADER_LEN, 0);
        while place + tag_len <= end {
            let flags = if third {
                word(bytes, place + 4)?
            } else {
                u32::from(u16::from_be_bytes(bytes_at(bytes, place + 6)?))
            };
            let high = if wide { word(bytes, place + 8)? } else { 0 };
            let copy = JournalCopy { at: self.place(self.after(at, count))?, escaped: flags & ESCAPED != 0 };
            logged.push(LoggedBlock { sequence, number: joined(word(bytes, place)?, high), copy });
            count += 1;
            place += tag_len + if flags & SAME_UUID == 0 { 16 } else { 0 };
            if flags & LAST != 0 {
                break;
            }
        }
        Ok(count)
    }

    fn revoked(&self, bytes: &[u8]) -> io::Result<Vec<u64>> {
        let used = (word(bytes, 12)? as usize).min(bytes.len());
        let len = if self.features & WIDE != 0 { 8 } else { 4 };
        let records = bytes.get(16..used).unwrap_or_default().chunks_exact(len);
        records
            .map(|record| match len {
                8 => bytes_at(record, 0).map(u64::from_be_bytes),
                _ => word(record, 0).map(u64::from),
            })
            .collect()
    }
}
