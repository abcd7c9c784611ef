//! A plain QEMU that boots Palisade's guest kernel and initramfs up to the first process: the baseline for
//! microVMs.

use std::{
    fs,
    io::{self, Read},
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fleet::BootFiles;

use crate::{context::BenchContext, run::find};

const QEMU: &str = "qemu-system-x86_64";
/// The output of the first process.
const WORD: &[u8] = b"init\n";
const PATIENCE: Duration = Duration::from_secs(60);
/// The minimal kernel command line under emulation: its console, and its clock rate, without which it may
/// hang.
const LEAST: &[&str] = &["console=", "quiet", "panic=", "tsc_early_khz="];

/// The kernel command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelArguments {
    /// The minimal one.
    Least,
    /// The one of Palisade, which makes the kernel faster.
    Same,
}

/// The files to boot.
pub struct PlainQemu {
    boots: BootFiles,
    initrd: PathBuf,
    init: PathBuf,
}

impl PlainQemu {
    /// Prepares an initramfs with one more file than Palisade's: the first process.
    pub fn prepare(context: &BenchContext, boots: BootFiles) -> io::Result<Self> {
        find(QEMU).ok_or_else(|| io::Error::other(format!("{QEMU} is not installed")))?;
        let initrd = context.scratch.join("plain.cpio");
        let mut bytes = fs::read(&boots.initrd)?;
        // The kernel unpacks concatenated archives.
        bytes.extend(archive("plain", &program()));
        fs::write(&initrd, bytes)?;
        Ok(Self { boots, initrd, init: "/plain".into() })
    }

    /// The time from the start of QEMU to the output of the first process.
    pub fn boot(&self, told: KernelArguments) -> io::Result<Duration> {
        let words = self.boots.cmdline.split(' ').filter(|word| {
            told == KernelArguments::Same || LEAST.iter().any(|least| word.starts_with(least))
        });
        let cmdline =
            words.chain([format!("rdinit={}", self.init.display()).as_str()]).collect::<Vec<_>>().join(" ");
        let mut command = Command::new(QEMU);
        command.args([
            "-M",
            "microvm",
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-serial",
            "stdio",
        ]);
        command.args(["-m", &format!("{}M", self.boots.memory.0 >> 20), "-append", &cmdline]);
        command.arg("-kernel").arg(&self.boots.kernel).arg("-initrd").arg(&self.initrd);
        let began = Instant::now();
        let mut child =
            ChildGuard(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?);
        read_until_ready(&mut child.0)?;
        Ok(began.elapsed())
    }
}

/// Waits for the output; ends a QEMU that does not print it.
fn read_until_ready(child: &mut Child) -> io::Result<()> {
    let mut stdout = child.stdout.take().ok_or_else(|| io::Error::other("no console"))?;
    let (said, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut all, mut buffer) = (Vec::<u8>::new(), [0; 512]);
        while let Ok(len @ 1..) = stdout.read(&mut buffer) {
            all.extend(buffer[..len].iter().filter(|byte| **byte != b'\r'));
            if all.windows(WORD.len()).any(|window| window == WORD) {
                let _ = said.send(());
                return;
            }
        }
    });
    heard.recv_timeout(PATIENCE).map_err(|_| io::Error::other("the kernel did not come to its first process"))
}

struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The smallest program that prints the word and then waits forever.
fn program() -> Vec<u8> {
    let code: &[u8] = &[
        0xb8, 1, 0, 0, 0, // mov eax, write
        0xbf, 1, 0, 0, 0, // mov edi, stdout
        0x48, 0x8d, 0x35, 16, 0, 0, 0, // lea rsi, [rip + 16]
        0xba, 5, 0, 0, 0, // mov edx, 5
        0x0f, 0x05, // syscall
        0xb8, 34, 0, 0, 0, // mov eax, pause
        0x0f, 0x05, // syscall
        0xeb, 0xf7, // jmp to pause
    ];
    const AT: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let len = HEADERS + (code.len() + WORD.len()) as u64;
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    elf.extend([2u16, 62].map(u16::to_le_bytes).concat());
    elf.extend(1u32.to_le_bytes());
    elf.extend([AT + HEADERS, 64, 0].map(u64::to_le_bytes).concat());
    elf.extend(0u32.to_le_bytes());
    elf.extend([64u16, 56, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
    // One segment, readable and executable.
    elf.extend([1u32, 5].map(u32::to_le_bytes).concat());
    elf.extend([0, AT, AT, len, len, 0x1000].map(u64::to_le_bytes).concat());
    elf.extend_from_slice(code);
    elf.extend_from_slice(WORD);
    elf
}

/// A cpio archive of one program.
fn archive(name: &str, contents: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut entry = |name: &str, mode: u32, contents: &[u8]| {
        let fields = [1, mode, 0, 0, 1, 0, contents.len() as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        bytes.extend_from_slice(b"070701");
        fields.iter().for_each(|field| bytes.extend_from_slice(format!("{field:08x}").as_bytes()));
        bytes.extend_from_slice(name.as_bytes());
        bytes.push(0);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend_from_slice(contents);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    };
    entry(name, 0o100_755, contents);
    entry("TRAILER!!!", 0, &[]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_process_says_its_word() {
        let path = std::env::temp_dir().join(format!("pal-bench-init-{}", std::process::id()));
        fs::write(&path, program()).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let mut child = ChildGuard(Command::new(&path).stdout(Stdio::piped()).spawn().unwrap());
        read_until_ready(&mut child.0).unwrap();
        drop(child);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn an_archive_is_aligned() {
        let bytes = archive("plain", b"12345");
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(&bytes[116..121], b"12345");
    }
}
