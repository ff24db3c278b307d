//! Descriptors over Unix sockets, seals and read-only maps, each call behind a safe function.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Room for the control message of one descriptor, in words so that it is aligned.
const CONTROL_WORDS: usize = 8;

/// What a message with a descriptor brought.
pub(crate) struct DescriptorMessage {
    /// Bytes received.
    pub count: usize,
    /// The descriptor, if one came with them.
    pub descriptor: Option<OwnedFd>,
}

fn control_message(
    bytes: &mut libc::iovec,
    control: &mut [u64; CONTROL_WORDS],
    length: usize,
) -> libc::msghdr {
    // SAFETY: all zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = length as _;
    message
}

fn control_length() -> usize {
    // SAFETY: plain arithmetic.
    let length = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as usize;
    assert!(length <= CONTROL_WORDS * 8, "room for one descriptor");
    length
}

/// Sends `bytes` and a descriptor with them, without blocking; all of it or an error.
pub(crate) fn send_descriptor(socket: RawFd, bytes: &[u8], descriptor: RawFd) -> io::Result<()> {
    let mut vector = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = [0u64; CONTROL_WORDS];
    let message = control_message(&mut vector, &mut control, control_length());
    // SAFETY: the control buffer has room for one header and one descriptor; the kernel reads
    // everything before it returns.
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
        libc::CMSG_DATA(header)
            .cast::<RawFd>()
            .write_unaligned(descriptor);
        libc::sendmsg(
            socket,
            &raw const message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    match sent {
        count if count == bytes.len() as isize => Ok(()),
        count if count < 0 => Err(io::Error::last_os_error()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Receives bytes and at most one descriptor, without blocking. More descriptors than one are
/// refused and closed by the kernel.
pub(crate) fn receive_descriptor(socket: RawFd, into: &mut [u8]) -> io::Result<DescriptorMessage> {
    let mut vector = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    let mut control = [0u64; CONTROL_WORDS];
    let mut message = control_message(&mut vector, &mut control, control_length());
    // SAFETY: both buffers are valid for writes of their lengths during the call.
    let count = unsafe {
        libc::recvmsg(
            socket,
            &raw mut message,
            libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC,
        )
    };
    if count < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut descriptor = None;
    // SAFETY: the kernel has filled in the headers; each descriptor in them is ours to own.
    unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        if !header.is_null()
            && (*header).cmsg_level == libc::SOL_SOCKET
            && (*header).cmsg_type == libc::SCM_RIGHTS
            && (*header).cmsg_len as usize >= libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize
        {
            let fd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            descriptor = Some(OwnedFd::from_raw_fd(fd));
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "more than one descriptor in a message",
        ));
    }
    Ok(DescriptorMessage {
        count: count as usize,
        descriptor,
    })
}

/// The user at the other end of a connected Unix socket, as the kernel noted it at connect.
pub(crate) fn peer_uid(socket: RawFd) -> io::Result<u32> {
    // SAFETY: all zero is a valid ucred.
    let mut credentials: libc::ucred = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the buffer has that length.
    let got = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if got == 0 {
        Ok(credentials.uid)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The user that this process acts as.
pub(crate) fn own_uid() -> u32 {
    // SAFETY: it only reads.
    unsafe { libc::geteuid() }
}

/// Size, mode and owner of a descriptor.
pub(super) struct Status {
    pub(super) bytes: u64,
    pub(super) mode: u32,
    pub(super) uid: u32,
}

pub(super) fn status(fd: &OwnedFd) -> io::Result<Status> {
    // SAFETY: all zero is a valid stat; the call fills it.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor and a buffer of the right type.
    if unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Status {
        bytes: stat.st_size.max(0) as u64,
        mode: stat.st_mode,
        uid: stat.st_uid,
    })
}

/// The seals of a descriptor; 0 when it is nothing that can be sealed.
pub(super) fn seals(fd: &OwnedFd) -> i32 {
    // SAFETY: a plain query.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals.max(0)
}

/// A read-only map of a whole descriptor.
pub(super) struct ReadMap {
    start: ptr::NonNull<u8>,
    bytes: usize,
}

impl ReadMap {
    pub(super) fn new(fd: &OwnedFd, bytes: usize) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping was just made with this length; a hint only.
        unsafe { libc::madvise(address, bytes, libc::MADV_HUGEPAGE) };
        let start = ptr::NonNull::new(address.cast::<u8>()).expect("mmap gave a null mapping");
        Ok(ReadMap { start, bytes })
    }

    /// First byte; valid for (volatile) reads of [`ReadMap::bytes`] as long as `self` lives.
    pub(super) fn start(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ReadMap {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
