//! Reads the writable disk of a microVM, an ext4 file system, without mounting it: the host's kernel never parses it.
//!
//! The reader knows what `mke2fs` and the guest's kernel make of that disk: extents, linear and hashed directories, extended
//! attributes, and a journal that was not written back. It writes nothing to the disk.
//!
//! Invariant: a disk that needs a feature beyond these is refused by name, never read wrongly.
//! Trust: root of a microVM can write any byte of its disk. Each number is checked before it is used, and depth, entries and
//! bytes have the limits that the disk's own size sets.

mod extract;
mod inode;
mod journal;

pub use extract::extract;

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
};

const SUPERBLOCK_AT: u64 = 1024;
const MAGIC: u16 = 0xef53;
/// Features without which a disk would be read wrongly, and that this reader knows: types in directories, a journal to be
/// replayed, extents, 64-bit block numbers, flexible groups, a checksum seed, large directories.
const KNOWN: u32 = 0x2 | 0x4 | 0x40 | 0x80 | 0x200 | 0x2000 | 0x4000;
const HAS_JOURNAL: u32 = 0x4;
const WIDE: u32 = 0x80;
const GROUPS_MAX: u64 = 1 << 20;

/// A disk that is open to be read.
#[derive(Debug)]
pub struct Disk {
    file: File,
    len: u64,
    block_len: usize,
    blocks: u64,
    inodes: u32,
    inodes_per_group: u32,
    inode_len: usize,
    /// The first block of each group's inodes.
    tables: Vec<u64>,
    /// Blocks whose newest contents are in the journal.
    replayed: HashMap<u64, journal::JournalCopy>,
}

pub(crate) fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the disk is damaged: {what}"))
}

fn bytes_at<const LEN: usize>(bytes: &[u8], at: usize) -> io::Result<[u8; LEN]> {
    let found = at.checked_add(LEN).and_then(|end| bytes.get(at..end)).and_then(|part| part.try_into().ok());
    found.ok_or_else(|| damaged("a record is cut short"))
}

fn u16_at(bytes: &[u8], at: usize) -> io::Result<u16> {
    bytes_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> io::Result<u32> {
    bytes_at(bytes, at).map(u32::from_le_bytes)
}

/// A number whose halves are apart.
fn joined(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl Disk {
    /// Opens a disk, and finds what its journal holds.
    pub fn open(file: File) -> io::Result<Self> {
        let len = file.metadata()?.size();
        let mut sb = [0; 1024];
        file.read_exact_at(&mut sb, SUPERBLOCK_AT)?;
        if u16_at(&sb, 0x38)? != MAGIC {
            return Err(damaged("it holds no ext4 file system"));
        }
        let (compat, incompat) = (u32_at(&sb, 0x5c)?, u32_at(&sb, 0x60)?);
        if incompat & !KNOWN != 0 {
            let what = format!("the disk has features that cannot be read: {:#x}", incompat & !KNOWN);
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let wide = incompat & WIDE != 0;
        let shift = u32_at(&sb, 0x18)?;
        if shift > 2 {
            return Err(damaged("its blocks are longer than 4 KiB"));
        }
        let block_len = 1024usize << shift;
        let blocks = joined(u32_at(&sb, 0x4)?, if wide { u32_at(&sb, 0x150)? } else { 0 });
        let (per_group, inodes_per_group) = (u64::from(u32_at(&sb, 0x20)?), u32_at(&sb, 0x28)?);
        let inode_len = usize::from(u16_at(&sb, 0x58)?);
        let first = u64::from(u32_at(&sb, 0x14)?);
        if blocks.checked_mul(block_len as u64).is_none_or(|bytes| bytes > len)
            || per_group == 0
            || inodes_per_group == 0
            || !(128..=block_len).contains(&inode_len)
            || first >= blocks
        {
            return Err(damaged("its superblock makes no sense"));
        }
        let groups = (blocks - first).div_ceil(per_group);
        let descriptor_len = if wide { usize::from(u16_at(&sb, 0xfe)?).max(64) } else { 32 };
        if groups > GROUPS_MAX || descriptor_len > block_len {
            return Err(damaged("its groups make no sense"));
        }
        let mut disk = Self {
            file,
            len,
            block_len,
            blocks,
            inodes: u32_at(&sb, 0)?,
            inodes_per_group,
            inode_len,
            tables: Vec::new(),
            replayed: HashMap::new(),
        };
        disk.tables = disk.group_tables(first + 1, groups, descriptor_len, wide)?;
        if compat & HAS_JOURNAL != 0 {
            disk.replayed = journal::find_copies(&disk, u32_at(&sb, 0xe0)?)?;
        }
        Ok(disk)
    }

    fn group_tables(&self, first: u64, groups: u64, len: usize, wide: bool) -> io::Result<Vec<u64>> {
        let in_block = (self.block_len / len) as u64;
        let mut tables = Vec::new();
        for block in 0..groups.div_ceil(in_block) {
            let bytes = self.block(first + block)?;
            let here = in_block.min(groups - block * in_block) as usize;
            for descriptor in bytes.chunks_exact(len).take(here) {
                let high = if wide { u32_at(descriptor, 0x28)? } else { 0 };
                tables.push(joined(u32_at(descriptor, 0x8)?, high));
            }
        }
        Ok(tables)
    }

    /// One block, as the journal has it where it does.
    fn block(&self, number: u64) -> io::Result<Vec<u8>> {
        match self.replayed.get(&number) {
            Some(copy) => {
                let mut bytes = self.stored_block(copy.at)?;
                if copy.escaped {
                    bytes[..4].copy_from_slice(&journal::MAGIC.to_be_bytes());
                }
                Ok(bytes)
            }
            None => self.stored_block(number),
        }
    }

    fn stored_block(&self, number: u64) -> io::Result<Vec<u8>> {
        if number >= self.blocks {
            return Err(damaged("a block is beyond its end"));
        }
        let mut bytes = vec![0; self.block_len];
        self.file.read_exact_at(&mut bytes, number * self.block_len as u64)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
