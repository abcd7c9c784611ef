//! Files as data and holes.
//!
//! Invariant: a hole that the file system reports is never read, so a file costs what its data costs, whatever its
//! length.

use std::{
    fs::File,
    io,
    os::unix::fs::{FileExt, MetadataExt},
};

use rustix::{fs::SeekFrom, io::Errno};

/// The next part of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum SparsePiece {
    /// So many bytes were read.
    Data(usize),
    /// So many bytes are a hole.
    Hole(u64),
    /// The file ends here.
    End,
}

/// Whether a reader reports holes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holes {
    /// It does.
    Report,
    /// It reads them as zeros.
    Read,
}

/// Reads a file from its beginning.
#[derive(Debug)]
pub struct SparseReader {
    file: File,
    at: u64,
    /// Everything from `at` up to here is data.
    data_end: u64,
}

impl SparseReader {
    /// A reader of an open file.
    pub fn new(file: File, holes: Holes) -> io::Result<Self> {
        let found = file.metadata()?;
        let dense = found.blocks().saturating_mul(512) >= found.len();
        // A file of `/proc` has no length and is read to its end, as a dense file is.
        let data_end = if holes == Holes::Read || dense { u64::MAX } else { 0 };
        Ok(Self { file, at: 0, data_end })
    }

    /// Reads the next data into `buffer`, or passes over the next hole.
    pub fn next(&mut self, buffer: &mut [u8]) -> io::Result<SparsePiece> {
        if self.at >= self.data_end
            && let Some(hole) = self.find_data()?
        {
            return Ok(SparsePiece::Hole(hole));
        }
        let len = usize::try_from(self.data_end - self.at).unwrap_or(usize::MAX).min(buffer.len());
        loop {
            match self.file.read_at(&mut buffer[..len], self.at) {
                Ok(0) => return Ok(SparsePiece::End),
                Ok(read) => {
                    self.at += read as u64;
                    return Ok(SparsePiece::Data(read));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Finds the next data; returns the length of the hole before it, if there is one.
    fn find_data(&mut self) -> io::Result<Option<u64>> {
        let from = self.at;
        match rustix::fs::seek(&self.file, SeekFrom::Data(from)) {
            Ok(start) => {
                let end = rustix::fs::seek(&self.file, SeekFrom::Hole(start)).unwrap_or(u64::MAX);
                (self.at, self.data_end) = (start, end.max(start + 1));
            }
            // Only a hole is left, if anything is.
            Err(Errno::NXIO) => {
                let len = self.file.metadata()?.len();
                (self.at, self.data_end) = (len.max(from), if len > from { 0 } else { u64::MAX });
            }
            // The file system cannot tell.
            Err(_) => self.data_end = u64::MAX,
        }
        Ok(Some(self.at - from).filter(|hole| *hole > 0))
    }
}

/// Writes a new or truncated regular file from its beginning.
#[derive(Debug)]
pub struct SparseWriter {
    file: File,
    at: u64,
}

impl SparseWriter {
    /// A writer of an empty file.
    pub fn new(file: File) -> Self {
        Self { file, at: 0 }
    }

    /// Writes data.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Leaves a hole.
    pub fn skip(&mut self, len: u64) -> io::Result<()> {
        self.at = self.at.checked_add(len).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(())
    }

    /// Gives the file its length, and returns it.
    pub fn finish(self) -> io::Result<File> {
        if self.file.metadata()?.len() != self.at {
            self.file.set_len(self.at)?;
        }
        Ok(self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(from: File, to: File, holes: Holes) -> (u64, u64) {
        let (mut reader, mut writer) = (SparseReader::new(from, holes).unwrap(), SparseWriter::new(to));
        let (mut buffer, mut data, mut skipped) = (vec![0; 64 << 10], 0, 0);
        loop {
            match reader.next(&mut buffer).unwrap() {
                SparsePiece::Data(len) => {
                    data += len as u64;
                    writer.write(&buffer[..len]).unwrap();
                }
                SparsePiece::Hole(len) => {
                    skipped += len;
                    writer.skip(len).unwrap();
                }
                SparsePiece::End => break,
            }
        }
        writer.finish().unwrap();
        (data, skipped)
    }

    #[test]
    fn holes_stay_holes_at_any_length() {
        let dir = std::env::temp_dir().join(format!("pal-sparse-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (from, to) = (dir.join("from"), dir.join("to"));
        let len = 1 << 40;
        for shape in ["hole", "begin", "middle", "end", "empty", "dense"] {
            let file = File::create(&from).unwrap();
            match shape {
                "begin" => file.write_all_at(b"begin", 0).unwrap(),
                "middle" => file.write_all_at(b"middle", len / 2 + 17).unwrap(),
                "end" => file.write_all_at(b"end", len - 3).unwrap(),
                "dense" => file.write_all_at(&vec![7; 300_000], 0).unwrap(),
                _ => {}
            }
            if !["empty", "dense"].contains(&shape) {
                file.set_len(len).unwrap();
            }
            let whole = file.metadata().unwrap().len();
            let (data, skipped) = copy(File::open(&from).unwrap(), File::create(&to).unwrap(), Holes::Report);
            assert_eq!(data + skipped, whole, "{shape}");
            assert!(data <= 300_000, "{shape}: {data} bytes were read");
            let made = std::fs::metadata(&to).unwrap();
            assert_eq!(made.len(), whole, "{shape}");
            assert!(made.blocks() <= file.metadata().unwrap().blocks(), "{shape}");
            for at in [0, len / 2 + 17, len - 3] {
                let read = |path| {
                    let mut seen = [0; 8];
                    let many = File::open(path).unwrap().read_at(&mut seen, at).unwrap();
                    seen[..many].to_vec()
                };
                assert_eq!(read(&to), read(&from), "{shape} at {at}");
            }
        }
        // A file of `/proc` has no length but contents.
        let (data, _) =
            copy(File::open("/proc/self/status").unwrap(), File::create(&to).unwrap(), Holes::Report);
        assert!(data > 100);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
