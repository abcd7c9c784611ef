//! Bytes nobody can guess.

use std::io;

/// So many of them.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// What the kernel's own structure begins with: how many bits are credited, and how many bytes follow.
const FEED_MAX: usize = 64;

#[repr(C)]
struct RandomPool {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; FEED_MAX],
}

/// Mixes bytes that nobody else has into this kernel's randomness, and has it draw anew from now on. Needs its root.
pub fn feed(bytes: &[u8]) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let len = bytes.len().min(FEED_MAX);
    let mut pool = RandomPool {
        entropy_count: (len * 8) as libc::c_int,
        buf_size: len as libc::c_int,
        buf: [0; FEED_MAX],
    };
    pool.buf[..len].copy_from_slice(&bytes[..len]);
    let device = std::fs::File::options().read(true).write(true).open("/dev/urandom")?;
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    // SAFETY: the structure has the layout the kernel reads: two numbers and as many bytes as the second says.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY as _, &pool) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG as _) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
