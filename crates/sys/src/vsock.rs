//! Stream sockets between a microVM and its host.

use std::{
    io, mem,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// The vsock address of the host.
pub const HOST: u32 = libc::VMADDR_CID_HOST;
/// Connections that may wait; more than one never does.
const WAITING_MAX: i32 = 4;

/// Listens on a vsock port of this microVM; non-blocking.
pub fn listen(port: u32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed, and the result is a descriptor or an error.
    let fd = unsafe {
        libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_port = port;
    address.svm_cid = libc::VMADDR_CID_ANY;
    let len = mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address outlives the call, and its length is passed along.
    let bound = unsafe { libc::bind(fd, (&raw const address).cast(), len) };
    // SAFETY: no memory is passed.
    if bound < 0 || unsafe { libc::listen(fd, WAITING_MAX) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

/// Accepts a connection, and returns it with the address of its peer.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<(OwnedFd, u32)> {
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    let mut len = mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t;
    // SAFETY: the address outlives the call, and its length is passed along; the kernel writes no more than that.
    let fd = unsafe {
        libc::accept4(listener.as_raw_fd(), (&raw mut address).cast(), &raw mut len, libc::SOCK_CLOEXEC)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which has no other owner.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, address.svm_cid))
}
