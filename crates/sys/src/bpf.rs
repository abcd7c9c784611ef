//! Instructions for small hand-written seccomp filters. `seccomp` compiles the filter of a Body.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, c_ulong, sock_filter, sock_fprog,
};

/// Offset of the call's number in `seccomp_data`.
pub const NUMBER: u32 = 0;
/// Offset of the architecture in `seccomp_data`.
pub const ARCHITECTURE: u32 = 4;
/// Offset of the arguments in `seccomp_data`; eight bytes each.
pub const ARGUMENTS: u32 = 16;
/// The architecture of this program.
#[cfg(target_arch = "x86_64")]
pub const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
pub const NATIVE: u32 = 0xc000_00b7;

/// Loads a 32-bit word of `seccomp_data`.
pub const LOAD: u32 = BPF_LD | BPF_W | BPF_ABS;
/// Jumps depending on whether the loaded word equals a number.
pub const EQUAL: u32 = BPF_JMP | BPF_JEQ | BPF_K;
/// Returns the filter's verdict.
pub const ANSWER: u32 = BPF_RET | BPF_K;

/// One instruction: its code, how many instructions to skip if true and if false, and its operand.
pub const fn step(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

/// Installs a filter for the caller and everything that it executes. Returns the kernel's result: negative for an
/// error.
pub fn install(program: &mut [sock_filter], flags: c_ulong) -> c_long {
    let program = sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the call, and its length is passed along.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &program) }
}
