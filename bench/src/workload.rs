//! The workload that is measured inside and outside: this program itself, called with `--work`.
//!
//! It prints nanoseconds, a count and a sum, so that a comparison can check that both runs did the same work.

use std::{
    fs, hint, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Instant,
};

const CPU_STEPS: u64 = 150_000_000;

/// The output of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkloadOutput {
    /// How long it took.
    pub nanoseconds: u64,
    /// How much work was done.
    pub count: u64,
    /// A checksum of the results.
    pub sum: u64,
}

impl WorkloadOutput {
    /// Parses the output of a run.
    pub fn parse(text: &str) -> io::Result<Self> {
        let mut words = text.split_ascii_whitespace().map(|word| word.parse::<u64>());
        match (words.next(), words.next(), words.next()) {
            (Some(Ok(nanoseconds)), Some(Ok(count)), Some(Ok(sum))) => Ok(Self { nanoseconds, count, sum }),
            _ => Err(io::Error::other(format!("the work printed {text:?}"))),
        }
    }
}

/// Runs the workload that the words name.
pub fn main(words: &[String]) -> io::Result<()> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let began = Instant::now();
    let (count, sum) = match words.as_slice() {
        ["cpu"] => (CPU_STEPS, spin(CPU_STEPS)),
        ["files", limit, dirs @ ..] => read_files(limit.parse().map_err(io::Error::other)?, dirs)?,
        ["make", count, dir] => make_files(count.parse().map_err(io::Error::other)?, Path::new(dir))?,
        _ => return Err(io::Error::other("work is: cpu | files LIMIT DIR… | make COUNT DIR")),
    };
    println!("{} {count} {sum}", began.elapsed().as_nanos());
    Ok(())
}

/// Integer work that no compiler can compute in advance.
fn spin(steps: u64) -> u64 {
    let mut state = hint::black_box(0x9e37_79b9_7f4a_7c15_u64);
    for _ in 0..steps {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
    }
    state
}

/// Walks directories in the order of their names, stats each entry and reads files, up to a limit; does not
/// follow symbolic links.
fn read_files(limit: u64, dirs: &[&str]) -> io::Result<(u64, u64)> {
    let mut waiting: Vec<PathBuf> = dirs.iter().rev().map(PathBuf::from).collect();
    let (mut count, mut sum) = (0, 0);
    let mut buffer = vec![0u8; 64 << 10];
    while let Some(dir) = waiting.pop() {
        let mut entries = fs::read_dir(&dir)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            let found = entry.metadata()?;
            // Files that not every user may read would be other work for root outside than for a Body's user.
            if found.is_dir() && found.mode() & 0o005 == 0o005 {
                waiting.push(entry.path());
            } else if found.is_file() && found.mode() & 0o004 != 0 && count < limit {
                sum += read_some(&entry.path(), &mut buffer)?;
                count += 1;
            }
        }
        if count >= limit {
            break;
        }
    }
    Ok((count, sum))
}

/// The first 64 KiB of a file: its length, mixed with a byte from its middle.
fn read_some(path: &Path, buffer: &mut [u8]) -> io::Result<u64> {
    let length = io::Read::read(&mut fs::File::open(path)?, buffer)?;
    let byte = buffer.get(..length).and_then(|read| read.get(length / 2)).copied().unwrap_or_default();
    Ok(length as u64 + u64::from(byte))
}

/// Small files of different lengths, a hundred in each directory.
fn make_files(count: u64, dir: &Path) -> io::Result<(u64, u64)> {
    let mut sum = 0;
    for number in 0..count {
        let below = dir.join(format!("{:03}", number / 100));
        if number % 100 == 0 {
            fs::create_dir_all(&below)?;
        }
        let length = 200 + (number * 7919) % 3800;
        fs::write(below.join(format!("{number:05}.txt")), vec![b'a' + (number % 26) as u8; length as usize])?;
        sum += length;
    }
    Ok((count, sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_is_what_is_read() -> io::Result<()> {
        let dir = std::env::temp_dir().join(format!("bench-workload-{}", std::process::id()));
        let (made, bytes) = make_files(250, &dir)?;
        let (read, sum) = read_files(1000, &[&dir.to_string_lossy()])?;
        fs::remove_dir_all(&dir)?;
        let middles: u64 = (0..250).map(|number| u64::from(b'a') + number % 26).sum();
        assert_eq!((read, sum), (made, bytes + middles));
        assert!(WorkloadOutput::parse("1 2").is_err());
        assert_eq!(WorkloadOutput::parse("1 2 3\n")?, WorkloadOutput { nanoseconds: 1, count: 2, sum: 3 });
        Ok(())
    }
}
