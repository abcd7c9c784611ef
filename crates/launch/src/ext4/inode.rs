//! Inodes of a disk: what a name stands for, where its contents are, and whether it hides what is below it.

use std::io;

use rustix::fs::FileType;

use super::{Disk, bytes_at, damaged, joined, u16_at, u32_at};

/// The inode of the root directory.
pub(super) const ROOT: u32 = 2;
const EXTENTS: u32 = 0x8_0000;
/// Contents that are encrypted, checked by the file system, or kept in the inode itself: no disk of ours has them.
const FOREIGN: u32 = 0x800 | 0x10_0000 | 0x1000_0000;
const EXTENT_MAGIC: u16 = 0xf30a;
const EXTENT_DEPTH_MAX: u16 = 5;
const EXTENTS_MAX: usize = 1 << 20;
const ATTRIBUTES_MAGIC: u32 = 0xea02_0000;
/// The mark of overlayfs on a directory that hides what lower layers have in it: `user.` is 1.
const OPAQUE: (u8, &[u8]) = (1, b"overlay.opaque");

/// An inode.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) mode: u32,
    pub(super) owner: (u32, u32),
    pub(super) len: u64,
    pub(super) mtime: (i64, u32),
    pub(super) links: u16,
    flags: u32,
    attributes: u64,
    bytes: Vec<u8>,
}

/// Where the contents of an inode are, in order.
#[derive(Debug, Default)]
pub(super) struct Extents(Vec<Extent>);

#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// The first block of the file.
    pub(super) logical: u64,
    /// The first block of the disk.
    pub(super) physical: u64,
    pub(super) count: u64,
}

impl Extents {
    pub(super) fn iter(&self) -> impl Iterator<Item = Extent> {
        self.0.iter().copied()
    }

    /// The block of the disk that holds a block of the file; none in a hole.
    pub(super) fn block(&self, logical: u64) -> Option<u64> {
        let index = self.0.partition_point(|extent| extent.logical <= logical);
        let extent = self.0.get(index.checked_sub(1)?)?;
        (logical - extent.logical < extent.count).then(|| extent.physical + (logical - extent.logical))
    }
}

impl Inode {
    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    fn pointers(&self) -> &[u8] {
        &self.bytes[0x28..0x64]
    }

    /// Whether overlayfs made it to hide a name of a lower layer.
    pub(super) fn is_whiteout(&self) -> bool {
        self.kind() == FileType::CharacterDevice && self.pointers()[..8].iter().all(|byte| *byte == 0)
    }
}

impl Disk {
    pub(super) fn inode(&self, number: u32) -> io::Result<Inode> {
        let index = number.checked_sub(1).filter(|_| number <= self.inodes);
        let index = index.ok_or_else(|| damaged("there is no such inode"))?;
        let table = self.tables.get((index / self.inodes_per_group) as usize);
        let table = *table.ok_or_else(|| damaged("an inode is in no group"))?;
        let at = u64::from(index % self.inodes_per_group) * self.inode_len as u64;
        let block = self.block(table + at / self.block_len as u64)?;
        let at = (at % self.block_len as u64) as usize;
        let bytes = block.get(at..at + self.inode_len).ok_or_else(|| damaged("an inode is cut short"))?;
        let half = |low, high| {
            Ok::<u32, io::Error>(u32::from(u16_at(bytes, low)?) | u32::from(u16_at(bytes, high)?) << 16)
        };
        let extra = bytes_at(bytes, 0x88).map_or(0, u32::from_le_bytes);
        let seconds = i64::from(u32_at(bytes, 0x10)?.cast_signed()) + (i64::from(extra & 3) << 32);
        Ok(Inode {
            mode: u16_at(bytes, 0)?.into(),
            owner: (half(0x2, 0x78)?, half(0x18, 0x7a)?),
            len: joined(u32_at(bytes, 0x4)?, u32_at(bytes, 0x6c)?),
            mtime: (seconds, (extra >> 2).min(999_999_999)),
            links: u16_at(bytes, 0x1a)?,
            flags: u32_at(bytes, 0x20)?,
            attributes: joined(u32_at(bytes, 0x68)?, u16_at(bytes, 0x76)?.into()),
            bytes: bytes.to_vec(),
        })
    }

    pub(super) fn extents(&self, inode: &Inode) -> io::Result<Extents> {
        if inode.flags & EXTENTS == 0 || inode.flags & FOREIGN != 0 {
            return Err(damaged("a file is kept in a way that no disk of a Body is"));
        }
        let mut found = Vec::new();
        self.extent_node(inode.pointers(), None, &mut found)?;
        found.sort_by_key(|extent| extent.logical);
        if found.windows(2).any(|pair| pair[0].logical + pair[0].count > pair[1].logical) {
            return Err(damaged("a file has two contents"));
        }
        Ok(Extents(found))
    }

    fn extent_node(&self, node: &[u8], above: Option<u16>, found: &mut Vec<Extent>) -> io::Result<()> {
        let (count, depth) = (usize::from(u16_at(node, 2)?), u16_at(node, 6)?);
        if u16_at(node, 0)? != EXTENT_MAGIC
            || depth > EXTENT_DEPTH_MAX
            || above.is_some_and(|above| depth + 1 != above)
        {
            return Err(damaged("the extents of a file make no sense"));
        }
        for index in 0..count {
            let entry = node
                .get(12 + index * 12..24 + index * 12)
                .ok_or_else(|| damaged("an extent is cut short"))?;
            if depth > 0 {
                let child = self.block(joined(u32_at(entry, 4)?, u16_at(entry, 8)?.into()))?;
                self.extent_node(&child, Some(depth), found)?;
                continue;
            }
            let count = u64::from(u16_at(entry, 4)?);
            let physical = joined(u32_at(entry, 8)?, u16_at(entry, 6)?.into());
            // Reserved blocks that were never written read as zeros, as a hole does.
            if count > 0x8000 {
                continue;
            }
            if found.len() >= EXTENTS_MAX || physical + count > self.blocks {
                return Err(damaged("a file has contents beyond the disk's end"));
            }
            found.push(Extent { logical: u32_at(entry, 0)?.into(), physical, count });
        }
        Ok(())
    }

    /// The names in a directory and their inodes, without `.` and `..`.
    pub(super) fn entries(&self, dir: &Inode, entries_max: usize) -> io::Result<Vec<(Vec<u8>, u32)>> {
        let extents = self.extents(dir)?;
        let mut names = Vec::new();
        for extent in extents.iter() {
            for index in 0..extent.count {
                if (extent.logical + index) * self.block_len as u64 >= dir.len {
                    break;
                }
                self.names(&self.block(extent.physical + index)?, &mut names)?;
                if names.len() > entries_max {
                    return Err(damaged("a directory has more entries than the disk has inodes"));
                }
            }
        }
        Ok(names)
    }

    /// Hashed directories keep their index in entries without an inode, so one way of reading fits both kinds.
    fn names(&self, block: &[u8], names: &mut Vec<(Vec<u8>, u32)>) -> io::Result<()> {
        let mut at = 0;
        while at + 8 <= block.len() {
            let (inode, len) = (u32_at(block, at)?, usize::from(u16_at(block, at + 4)?));
            if len < 8 || at + len > block.len() {
                return Err(damaged("a directory makes no sense"));
            }
            let name_len = usize::from(block[at + 6]);
            let name =
                block[at..at + len].get(8..8 + name_len).ok_or_else(|| damaged("a name is cut short"))?;
            if inode != 0 && name != b"." && name != b".." {
                if name.is_empty() || name.contains(&b'/') || name.contains(&0) {
                    return Err(damaged("a name is none"));
                }
                names.push((name.to_vec(), inode));
            }
            at += len;
        }
        Ok(())
    }

    /// Where a symbolic link leads.
    pub(super) fn link_target(&self, inode: &Inode) -> io::Result<Vec<u8>> {
        let len = usize::try_from(inode.len).unwrap_or(usize::MAX);
        if inode.flags & EXTENTS == 0 && len < 60 {
            return Ok(inode.pointers()[..len].to_vec());
        }
        if len >= self.block_len {
            return Err(damaged("a link is too long"));
        }
        let first = self.extents(inode)?.block(0).ok_or_else(|| damaged("a link leads nowhere"))?;
        Ok(self.block(first)?[..len].to_vec())
    }

    /// Whether a directory hides what lower layers have in it.
    pub(super) fn is_opaque(&self, inode: &Inode) -> io::Result<bool> {
        let extra = if inode.bytes.len() > 0x82 { usize::from(u16_at(&inode.bytes, 0x80)?) } else { 0 };
        if let Some(inside) = inode.bytes.get(128 + extra..).filter(|inside| inside.len() > 4)
            && u32_at(inside, 0)? == ATTRIBUTES_MAGIC
            && has_opaque(&inside[4..], &inside[4..])?
        {
            return Ok(true);
        }
        if inode.attributes == 0 {
            return Ok(false);
        }
        let block = self.block(inode.attributes)?;
        if u32_at(&block, 0)? != ATTRIBUTES_MAGIC {
            return Err(damaged("the attributes of a file make no sense"));
        }
        has_opaque(&block[32..], &block)
    }
}

fn has_opaque(entries: &[u8], values: &[u8]) -> io::Result<bool> {
    let mut at = 0;
    while entries.len() >= at + 16 && u32_at(entries, at)? != 0 {
        let (name_len, group) = (usize::from(entries[at]), entries[at + 1]);
        let (value, len) = (usize::from(u16_at(entries, at + 2)?), u32_at(entries, at + 8)?);
        let name =
            entries.get(at + 16..at + 16 + name_len).ok_or_else(|| damaged("an attribute is cut short"))?;
        if (group, name) == OPAQUE {
            return Ok(len == 1 && values.get(value) == Some(&b'y'));
        }
        at += (16 + name_len).next_multiple_of(4);
    }
    Ok(false)
}
