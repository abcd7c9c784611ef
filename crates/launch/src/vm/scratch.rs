//! The file to which a hypervisor writes memory: a file of its Body, from which the VMM process copies.
//!
//! Invariant: the VMM process writes the saved files; the hypervisor never has them open.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::FileExt,
    path::Path,
};

/// The path of the file.
pub const PLACE: &str = "/save/ram";
/// Most bytes of saved state besides memory.
pub const SMALL_LEN_MAX: u64 = 64 << 20;
const CHUNK: usize = 1 << 20;
const PAGE: usize = 4096;

/// Opens the file as a hypervisor would.
pub fn open() -> io::Result<File> {
    File::options().read(true).write(true).open(PLACE)
}

/// Copies the memory that was written there to `ram`, and empties the file.
pub async fn keep_file(ram: File, memory_bytes: u64) -> io::Result<()> {
    let kept = tokio::task::spawn_blocking(move || {
        let scratch = open()?;
        let kept = copy_memory(&scratch, &ram, memory_bytes);
        scratch.set_len(0)?;
        kept
    });
    kept.await.map_err(io::Error::other)?
}

/// Copies all pages that are not zero.
fn copy_memory(from: &File, to: &File, len: u64) -> io::Result<()> {
    if from.metadata()?.len() != len {
        return Err(io::Error::other("its hypervisor saved another amount of memory than the microVM has"));
    }
    to.set_len(len)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        let piece = CHUNK.min(usize::try_from(len - at).unwrap_or(CHUNK));
        from.read_exact_at(&mut buffer[..piece], at)?;
        for (index, page) in buffer[..piece].chunks(PAGE).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                to.write_all_at(page, at + (index * PAGE) as u64)?;
            }
        }
        at += piece as u64;
    }
    Ok(())
}

/// Copies a small file; a larger one is refused.
pub fn copy_small(from: &Path, mut to: File) -> io::Result<()> {
    let mut bytes = Vec::new();
    File::open(from)?.take(SMALL_LEN_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > SMALL_LEN_MAX {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    to.write_all(&bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn memory_is_copied_whole_and_without_its_zeros() {
        let dir = std::env::temp_dir().join(format!("pal-scratch-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let make = |name: &str| {
            File::options().read(true).write(true).create(true).truncate(true).open(dir.join(name)).unwrap()
        };
        let (from, to) = (make("from"), make("to"));
        let mut memory = vec![0; 8 << 20];
        memory[5] = 1;
        memory[(3 << 20) + 4096..(3 << 20) + 8192].fill(7);
        from.write_all_at(&memory, 0).unwrap();
        copy_memory(&from, &to, 8 << 20).unwrap();
        assert!(std::fs::read(dir.join("to")).unwrap() == memory);
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20, "two pages, not eight MiB");
        assert!(copy_memory(&from, &to, 9 << 20).is_err(), "a hypervisor that wrote less than all");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
