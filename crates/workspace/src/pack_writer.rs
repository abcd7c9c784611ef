//! Writes packs without deltas, and their indexes.
//!
//! Invariant: a pack holds an object once, under the id of its content.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use flate2::{Compress, Compression, Crc, FlushCompress, Status};
use sha1::{Digest, Sha1};

/// An object id.
pub type ObjectId = [u8; 20];

/// The kind of an object, with the number that packs use for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A commit.
    Commit = 1,
    /// A tree.
    Tree = 2,
    /// The contents of a file, or the target of a symbolic link.
    Blob = 3,
    /// An annotated tag.
    Tag = 4,
}

impl ObjectKind {
    fn word(self) -> &'static str {
        match self {
            Self::Commit => "commit",
            Self::Tree => "tree",
            Self::Blob => "blob",
            Self::Tag => "tag",
        }
    }

    /// Parses the kind in the header of a loose object.
    pub fn of(word: &str) -> Option<Self> {
        [Self::Commit, Self::Tree, Self::Blob, Self::Tag].into_iter().find(|sort| sort.word() == word)
    }
}

/// Length of one piece of contents, and of compressed bytes.
const PIECE_LEN: usize = 64 << 10;

/// A pack that is being written.
#[derive(Debug)]
pub struct PackWriter {
    file: File,
    deflater: Deflater,
    path: PathBuf,
    objects: BTreeMap<ObjectId, (u32, u64)>,
    /// Total length of all contents.
    pub bytes: u64,
}

impl PackWriter {
    /// Begins a pack at a path.
    pub fn begin(path: &Path) -> io::Result<Self> {
        let mut file = File::options().read(true).write(true).create_new(true).open(path)?;
        file.write_all(b"PACK\0\0\0\x02\0\0\0\0")?;
        let deflater = Deflater::new();
        Ok(Self { file, deflater, path: path.to_owned(), objects: BTreeMap::new(), bytes: 0 })
    }

    /// Whether it holds no object.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Whether it holds an object.
    pub fn has(&self, id: &ObjectId) -> bool {
        self.objects.contains_key(id)
    }

    /// Adds an object of exactly `len` bytes. If `contents` has more or fewer, this fails and adds nothing.
    pub fn add(&mut self, sort: ObjectKind, len: u64, contents: impl Read) -> io::Result<ObjectId> {
        self.add_if(sort, len, contents, |_| true)?.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Adds an object if `wanted` accepts its id.
    pub fn add_if(
        &mut self,
        sort: ObjectKind,
        len: u64,
        contents: impl Read,
        pleases: impl FnOnce(&ObjectId) -> bool,
    ) -> io::Result<Option<ObjectId>> {
        let before = self.file.stream_position()?;
        let written = self.write(sort, len, contents);
        match written {
            Ok((id, _)) if self.has(&id) => {
                self.back_to(before)?;
                Ok(Some(id))
            }
            Ok((id, crc)) if pleases(&id) => {
                self.objects.insert(id, (crc, before));
                self.bytes += len;
                Ok(Some(id))
            }
            Ok(_) => {
                self.back_to(before)?;
                Ok(None)
            }
            Err(error) => {
                self.back_to(before)?;
                Err(error)
            }
        }
    }

    fn back_to(&mut self, at: u64) -> io::Result<()> {
        self.file.set_len(at)?;
        self.file.seek(SeekFrom::Start(at)).map(drop)
    }

    fn write(&mut self, sort: ObjectKind, len: u64, contents: impl Read) -> io::Result<(ObjectId, u32)> {
        let mut out = CrcWriter { out: BufWriter::new(&mut self.file), crc: Crc::new() };
        out.write_all(&entry_header(sort as u8, len))?;
        let mut name = Sha1::new();
        name.update(format!("{} {len}\0", sort.word()));
        // One byte more than announced shows that the contents grew.
        let read = self.deflater.run(contents.take(len.saturating_add(1)), &mut name, &mut out)?;
        if read != len {
            return Err(io::ErrorKind::InvalidData.into());
        }
        out.flush()?;
        Ok((name.finalize().into(), out.crc.sum()))
    }

    /// Writes the number of objects into the header and the checksum to the end.
    pub fn finish(mut self) -> io::Result<FinishedPack> {
        let count =
            u32::try_from(self.objects.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.file.seek(SeekFrom::Start(8))?;
        self.file.write_all(&count.to_be_bytes())?;
        self.file.seek(SeekFrom::Start(0))?;
        let mut hasher = Sha1::new();
        let mut buffer = vec![0; 256 << 10];
        loop {
            match self.file.read(&mut buffer)? {
                0 => break,
                len => hasher.update(&buffer[..len]),
            }
        }
        let checksum: ObjectId = hasher.finalize().into();
        self.file.write_all(&checksum)?;
        self.file.seek(SeekFrom::Start(0))?;
        Ok(FinishedPack { file: self.file, path: self.path, objects: self.objects, checksum })
    }
}

/// A complete pack.
#[derive(Debug)]
pub struct FinishedPack {
    /// The pack file, positioned at its start.
    pub file: File,
    path: PathBuf,
    objects: BTreeMap<ObjectId, (u32, u64)>,
    checksum: ObjectId,
}

impl FinishedPack {
    /// Writes the index beside the pack; from then on git finds the objects.
    pub fn index(&self) -> io::Result<()> {
        let mut bytes = b"\xfftOc\0\0\0\x02".to_vec();
        let mut counts = [0u32; 256];
        self.objects.keys().for_each(|id| counts[usize::from(id[0])] += 1);
        let mut sum = 0;
        counts.iter().for_each(|count| {
            sum += count;
            bytes.extend(sum.to_be_bytes());
        });
        self.objects.keys().for_each(|id| bytes.extend(id));
        self.objects.values().for_each(|(crc, _)| bytes.extend(crc.to_be_bytes()));
        // Offsets of more than 31 bits go into a table of their own.
        let mut far = Vec::new();
        for (_, at) in self.objects.values() {
            match u32::try_from(*at).ok().filter(|at| *at < 1 << 31) {
                Some(near) => bytes.extend(near.to_be_bytes()),
                None => {
                    bytes.extend((1 << 31 | far.len() as u32).to_be_bytes());
                    far.push(*at);
                }
            }
        }
        far.iter().for_each(|at| bytes.extend(at.to_be_bytes()));
        bytes.extend(self.checksum);
        let end = Sha1::digest(&bytes);
        bytes.extend(end);
        std::fs::write(self.path.with_extension("idx"), bytes)
    }
}

/// Writes to a file and computes a CRC.
struct CrcWriter<W> {
    out: W,
    crc: Crc,
}

impl<W: Write> Write for CrcWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = self.out.write(bytes)?;
        self.crc.update(&bytes[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Compresses objects one after the other. Its state takes 300 KiB, which would cost more than the compression of a
/// small file if each object had its own.
#[derive(Debug)]
struct Deflater {
    zlib: Compress,
    piece: Vec<u8>,
    packed: Vec<u8>,
}

impl Deflater {
    fn new() -> Self {
        let zlib = Compress::new(Compression::fast(), true);
        Self { zlib, piece: vec![0; PIECE_LEN], packed: vec![0; PIECE_LEN] }
    }

    /// Compresses all contents to `out` and hashes them; returns their length.
    fn run(&mut self, mut contents: impl Read, name: &mut Sha1, out: &mut impl Write) -> io::Result<u64> {
        self.zlib.reset();
        loop {
            let len = match contents.read(&mut self.piece) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                len => len?,
            };
            name.update(&self.piece[..len]);
            self.push(len, if len == 0 { FlushCompress::Finish } else { FlushCompress::None }, out)?;
            if len == 0 {
                return Ok(self.zlib.total_in());
            }
        }
    }

    /// Compresses the first `len` bytes of the piece.
    fn push(&mut self, len: usize, flush: FlushCompress, out: &mut impl Write) -> io::Result<()> {
        let mut done = 0;
        loop {
            let (read, written) = (self.zlib.total_in(), self.zlib.total_out());
            let status = self
                .zlib
                .compress(&self.piece[done..len], &mut self.packed, flush)
                .map_err(io::Error::other)?;
            done += (self.zlib.total_in() - read) as usize;
            let made = (self.zlib.total_out() - written) as usize;
            out.write_all(&self.packed[..made])?;
            // zlib may hold more back while its output fills the whole buffer.
            let over = if flush == FlushCompress::Finish {
                status == Status::StreamEnd
            } else {
                done == len && made < self.packed.len()
            };
            if over {
                return Ok(());
            }
        }
    }
}

/// An object id as hexadecimal text.
pub fn hex(id: &ObjectId) -> String {
    proto::event::hex(id)
}

/// Parses an object id from hexadecimal text.
pub fn id_of(text: &[u8]) -> Option<ObjectId> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let mut id = [0; 20];
    if text.len() != 40 {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(text.chunks(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(id)
}

/// Kind and size in the encoding of packs: four bits of the size, then seven per byte.
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
    fn git_reads_what_was_packed_and_indexed() {
        let dir = std::env::temp_dir().join(format!("pal-pack-{}", std::process::id()));
        crate::bare_repo::make(&dir, &[], None).unwrap();
        let mut pack =
            PackWriter::begin(&dir.join("objects/pack/pack-0000000000000000000000000000000000000000.pack"))
                .unwrap();
        let id = pack.add(ObjectKind::Blob, 6, &b"hello\n"[..]).unwrap();
        assert_eq!(hex(&id), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(pack.add(ObjectKind::Blob, 6, &b"hello\n"[..]).unwrap(), id, "once");
        for wrong in [5, 7] {
            assert!(pack.add(ObjectKind::Blob, wrong, &b"hello\n"[..]).is_err());
        }
        let big = pack.add(ObjectKind::Blob, 300_000, io::repeat(7).take(300_000)).unwrap();
        assert_eq!(pack.add_if(ObjectKind::Blob, 1, &b"x"[..], |_| false).unwrap(), None);
        pack.finish().unwrap().index().unwrap();
        let git = crate::Git::at(&dir);
        assert_eq!(git.run(["cat-file", "blob", &hex(&id)]).unwrap(), b"hello\n");
        assert_eq!(git.run(["cat-file", "blob", &hex(&big)]).unwrap().len(), 300_000);
        git.run(["fsck", "--full", "--strict"]).unwrap();
        git.run(
            ["verify-pack", "objects/pack/pack-0000000000000000000000000000000000000000.idx"]
                .map(|arg| if arg.starts_with("objects") { dir.join(arg) } else { arg.into() }),
        )
        .unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn names_are_read_and_written() {
        let text = "00ff10ce013625030ba8dba906f756967f9e9ca3";
        assert_eq!(hex(&id_of(text.as_bytes()).unwrap()), text);
        assert_eq!((id_of(b"00"), id_of(&[b'g'; 40])), (None, None));
    }
}
