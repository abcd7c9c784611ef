//! Reads Firecracker's metrics: a line of counts each minute, and one whenever it is asked to flush.
//!
//! Each line counts since the line before, and Firecracker keeps its write offset whatever happens to the file. So
//! the counts are added up here, and the part of the file that was read is returned to the kernel as a hole; the file
//! is never truncated.
//!
//! Trust: a hypervisor that was taken over may write anything to the file. The length of its lines is limited.

use std::{collections::BTreeMap, fs::File, io, os::unix::fs::FileExt};

use proto::vm::DiskTraffic;
use rustix::fs::FallocateFlags;
use serde_json::Value;

/// Firecracker supports fewer.
const DRIVES_MAX: usize = 64;
/// Longest line.
const LINE_LEN_MAX: usize = 256 << 10;
/// Most bytes per read.
const READ_LEN_MAX: usize = 4 << 20;

/// The counts so far.
#[derive(Debug)]
pub struct MetricsReader {
    file: File,
    /// The offset up to which the file was read.
    at: u64,
    /// The beginning of an incomplete line.
    begun: Vec<u8>,
    pub counted: BTreeMap<String, DiskTraffic>,
}

impl MetricsReader {
    /// Starts with an empty file.
    pub fn of(file: File) -> Self {
        Self { file, at: 0, begun: Vec::new(), counted: BTreeMap::new() }
    }

    /// Reads the new lines.
    pub fn catch_up(&mut self) -> io::Result<()> {
        let (mut piece, mut read) = ([0; 16 << 10], 0);
        while read < READ_LEN_MAX {
            let len = self.file.read_at(&mut piece, self.at)?;
            if len == 0 {
                break;
            }
            self.at += len as u64;
            read += len;
            self.begun.extend_from_slice(&piece[..len]);
            if let Some(end) = self.begun.iter().rposition(|byte| *byte == b'\n') {
                let lines: Vec<u8> = self.begun.drain(..=end).collect();
                add_up(&String::from_utf8_lossy(&lines), &mut self.counted);
            }
            if self.begun.len() > LINE_LEN_MAX {
                self.begun.clear();
            }
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if self.at > 0 {
            rustix::fs::fallocate(&self.file, flags, 0, self.at)?;
        }
        Ok(())
    }
}

/// Adds up metrics, one JSON object per line.
pub fn add_up(written: &str, counted: &mut BTreeMap<String, DiskTraffic>) {
    for line in written.lines() {
        let told: Value = serde_json::from_str(line).unwrap_or_default();
        let devices = told.as_object().into_iter().flatten();
        for (name, device) in devices.filter_map(|(name, one)| Some((name.strip_prefix("block_")?, one))) {
            let count = |name: &str| device[name].as_u64().unwrap_or(0);
            let sum = counted.entry(name.to_owned()).or_default();
            sum.reads = sum.reads.saturating_add(count("read_count"));
            sum.read_bytes = sum.read_bytes.saturating_add(count("read_bytes"));
            sum.writes = sum.writes.saturating_add(count("write_count"));
            sum.written_bytes = sum.written_bytes.saturating_add(count("write_bytes"));
        }
    }
    while counted.len() > DRIVES_MAX {
        counted.pop_last();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const LINE: &str = r#"{"utc_timestamp_ms":1,"block":{"read_bytes":9},"block_upper":{"read_count":1,"read_bytes":512,"write_count":2,"write_bytes":1024}}"#;

    fn times(count: u64) -> BTreeMap<String, DiskTraffic> {
        let upper = DiskTraffic {
            reads: count,
            read_bytes: 512 * count,
            writes: 2 * count,
            written_bytes: 1024 * count,
        };
        BTreeMap::from([("upper".to_owned(), upper)])
    }

    #[test]
    fn what_was_told_is_added_up() {
        let mut counted = BTreeMap::new();
        add_up(&format!("{LINE}\n{LINE}\nno json\n"), &mut counted);
        assert_eq!(counted, times(2));
    }

    #[test]
    fn whoever_goes_on_writing_where_it_stopped_is_understood_and_takes_no_room() {
        let file = File::from(rustix::fs::memfd_create("metrics", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let mut measured = MetricsReader::of(file.try_clone().unwrap());
        let mut at = 0;
        let mut write = |text: &str| {
            file.write_all_at(text.as_bytes(), at).unwrap();
            at += text.len() as u64;
        };
        for round in 1..=3 {
            write(&format!("{LINE}\n"));
            measured.catch_up().unwrap();
            assert_eq!(measured.counted, times(round));
        }
        let (half, rest) = LINE.split_at(20);
        write(half);
        measured.catch_up().unwrap();
        assert_eq!(measured.counted, times(3), "a line that is not whole is waited for");
        write(&format!("{rest}\n"));
        measured.catch_up().unwrap();
        assert_eq!(measured.counted, times(4));
        (0..2000).for_each(|_| write(&format!("{LINE}\n")));
        measured.catch_up().unwrap();
        assert_eq!(measured.counted, times(2004));
        assert!(file.metadata().unwrap().blocks() * 512 <= 8192, "what was read is given back");
        write(&"x".repeat(2 * LINE_LEN_MAX));
        measured.catch_up().unwrap();
        assert!(measured.begun.len() <= LINE_LEN_MAX);
    }
}
