//! The few words in which small filters of system calls are written. The filter of a Body is compiled by `filter`.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, c_ulong, sock_filter, sock_fprog,
};

/// Where the number of the call, its architecture and its arguments are in what is known of it.
pub const NUMBER: u32 = 0;
/// See [`NUMBER`].
pub const ARCHITECTURE: u32 = 4;
/// See [`NUMBER`]; eight bytes each.
pub const ARGUMENTS: u32 = 16;
/// The architecture of this program.
#[cfg(target_arch = "x86_64")]
pub const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub const NATIVE: u32 = 0xc000_00b7;

/// Loads a word of what is known of the call.
pub const LOAD: u32 = BPF_LD | BPF_W | BPF_ABS;
/// Whether it is that number.
pub const EQUAL: u32 = BPF_JMP | BPF_JEQ | BPF_K;
/// What becomes of the call.
pub const ANSWER: u32 = BPF_RET | BPF_K;

/// One step: what it does, how many to skip if so and if not, and with which number.
pub const fn step(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Puts a filter over the caller and what it executes. Gives what the kernel does: negative for an error.
pub fn install(program: &mut [sock_filter], flags: c_ulong) -> c_long {
    let program = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the call, and its length is passed along.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program) }
}
