//! The initramfs: a cpio archive in the format `newc`, of directories, files and devices.

/// An archive that is being written.
#[derive(Debug, Default)]
pub struct CpioArchive {
    bytes: Vec<u8>,
    entries: u32,
}

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const DEVICE: u32 = 0o020_000;
const LAST: &str = "TRAILER!!!";

impl CpioArchive {
    /// Adds a directory.
    pub fn dir(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, &[], (0, 0));
    }

    /// Adds a file.
    pub fn file(&mut self, path: &str, mode: u32, contents: &[u8]) {
        self.entry(path, FILE | mode, contents, (0, 0));
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, DEVICE | 0o600, &[], (major, minor));
    }

    /// Finishes the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(LAST, 0, &[], (0, 0));
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8], device: (u32, u32)) {
        self.entries += 1;
        let inode = if path == LAST { 0 } else { self.entries };
        let links = if mode & DIRECTORY != 0 { 2 } else { 1 };
        let fields = [
            inode,
            mode,
            0,
            0,
            links,
            0,
            contents.len() as u32,
            0,
            0,
            device.0,
            device.1,
            path.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        fields.iter().for_each(|field| self.bytes.extend_from_slice(format!("{field:08x}").as_bytes()));
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_kernel_reads() {
        let mut archive = CpioArchive::default();
        archive.dir("d");
        archive.file("d/f", 0o755, b"hello");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8(bytes).unwrap();
        assert!(
            text.starts_with("07070100000001000041ed0000000000000000000000020000000000000000"),
            "{text:?}"
        );
        assert!(
            text.contains("0000000400000000d/f\0") && text.contains("hello\0\0\0") && text.contains(LAST)
        );
    }
}
