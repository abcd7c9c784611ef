//! Random bytes from the kernel.

use std::io;

/// Returns `N` random bytes.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Most bytes that `feed` takes. The kernel's structure has two numbers before them: credited bits and byte count.
const FEED_MAX: usize = 64;

#[repr(C)]
struct RandomPool {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; FEED_MAX],
}

/// Adds bytes to the kernel's random pool and reseeds its generator. Needs root.
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
