//! What the process was started with: its arguments and environment, where the kernel put them.
//!
//! Why not `std::env`: it copies them. Who forks to become another process has to forget them, wherever they are.

use std::{
    ffi::CStr,
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use libc::{c_char, c_int};

/// The vector of arguments, as the C library hands it to initialisers.
static ARGUMENTS: AtomicPtr<*mut c_char> = AtomicPtr::new(ptr::null_mut());

extern "C" fn remember(_count: c_int, arguments: *mut *mut c_char, _environment: *mut *mut c_char) {
    ARGUMENTS.store(arguments, Ordering::Relaxed);
}

/// Has the program call a function of its own before `main`, and before the standard library prepares for that: with
/// one thread and its [`arguments`](crate::origin::arguments), with signals as its parent left them, and perhaps without
/// [standard streams](crate::origin::has_standard_streams). A panic there ends the program.
#[macro_export]
macro_rules! before_main {
    ($act:path) => {
        #[allow(
            unsafe_code,
            reason = "an initialiser is unsafe to name; what is safe about this one is said in `sys`"
        )]
        const _: () = {
            extern "C" fn first(_: i32, arguments: *mut *mut i8, _: *mut *mut i8) {
                $crate::origin::begin(arguments.cast());
                let act: fn() = $act;
                act();
            }
            #[used]
            // SAFETY: an initialiser with the signature that glibc and musl call it with.
            #[unsafe(link_section = ".init_array")]
            static FIRST: extern "C" fn(i32, *mut *mut i8, *mut *mut i8) = first;
        };
    };
}

/// What [`before_main!`] begins with: initialisers have no order among each other.
#[doc(hidden)]
pub fn begin(arguments: *mut *mut c_char) {
    remember(0, arguments, ptr::null_mut());
}

/// Whether the process was started with standard input, output and error. Where one is missing, whatever is opened
/// next takes its place, until the standard library has filled it.
pub fn has_standard_streams() -> bool {
    // SAFETY: F_GETFD takes any number.
    (0..3).all(|number| unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0)
}

#[used]
// SAFETY: an initialiser with the signature that glibc and musl call it with; it stores a pointer and returns.
#[unsafe(link_section = ".init_array")]
static REMEMBER: extern "C" fn(c_int, *mut *mut c_char, *mut *mut c_char) = remember;

unsafe extern "C" {
    static mut environ: *const *const c_char;
}

/// The only variable of a process that has forgotten its own.
const PATH: &CStr = c"PATH=/usr/bin:/bin:/usr/local/bin";

struct Environment([*const c_char; 2]);
// SAFETY: never written, and what it points to is static and never written.
unsafe impl Sync for Environment {}
static ENVIRONMENT: Environment = Environment([PATH.as_ptr(), ptr::null()]);

/// The arguments after the program's name, without a copy of any.
pub fn arguments() -> impl Iterator<Item = &'static CStr> {
    let mut next = ARGUMENTS.load(Ordering::Relaxed);
    let read = move || {
        if next.is_null() {
            return None;
        }
        // SAFETY: the kernel ends the vector with null, and this stops there; each entry before that is a string that
        // lives as long as the process, and only `forget` writes to it, in a process that no longer holds one.
        let text = unsafe { *next };
        if text.is_null() {
            return None;
        }
        // SAFETY: as above.
        next = unsafe { next.add(1) };
        // SAFETY: as above.
        Some(unsafe { CStr::from_ptr(text) })
    };
    std::iter::from_fn(read).skip(1)
}

/// Overwrites arguments and environment, so that neither `/proc` nor this memory tells them any more. `name` is what
/// `ps` shows from now on, as far as there is room. Only `PATH` is left, for helpers of the system.
///
/// For a process with one thread that was just forked, and asks for neither again.
pub fn forget(name: &CStr) {
    let arguments = ARGUMENTS.load(Ordering::Relaxed);
    if arguments.is_null() {
        return;
    }
    // SAFETY: one thread, so nobody reads `environ` meanwhile; what it is set to is static.
    unsafe { environ = ENVIRONMENT.0.as_ptr() };
    #[expect(
        clippy::multiple_unsafe_ops_per_block,
        reason = "one walk over two vectors, safe as a whole or not at all"
    )]
    // SAFETY: two vectors that end with null stand one behind the other on the stack; each entry is a string in the
    // area the kernel filled at exec, which is writable and belongs to nobody else. The strings of the first stand
    // without gaps, so there is room for a name from the first's beginning to the last's end.
    unsafe {
        let mut entry = arguments;
        let mut room = 0;
        while !(*entry).is_null() {
            room += wipe(*entry) + 1;
            entry = entry.add(1);
        }
        let variables = entry.add(1);
        let mut entry = variables;
        while !(*entry).is_null() {
            wipe(*entry);
            entry = entry.add(1);
        }
        let name = name.to_bytes();
        if room > name.len() {
            ptr::copy_nonoverlapping(name.as_ptr(), (*arguments).cast(), name.len());
        }
    }
}

/// Overwrites a string; says how long it was.
///
/// # Safety
/// It ends with a zero, and nobody else reads or writes it.
unsafe fn wipe(text: *mut c_char) -> usize {
    // SAFETY: it ends with a zero.
    let len = unsafe { libc::strlen(text) };
    // SAFETY: those bytes are the string's own, which is nobody else's.
    unsafe { ptr::write_bytes(text, 0, len) };
    len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_those_of_the_process() {
        let found: Vec<String> = arguments().map(|text| text.to_string_lossy().into_owned()).collect();
        assert_eq!(found, std::env::args().skip(1).collect::<Vec<_>>());
    }
}
