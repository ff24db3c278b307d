//! A TCP relay between two nodes, on plain threads, that can freeze or be cut.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of the frame that accepts a data connection.
const ACCEPT_BYTES: usize = 4 + 1 + 32;

pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    frozen: AtomicBool,
    /// As `frozen`, for what goes to the target only.
    deaf: AtomicBool,
    /// As `frozen`, for the answers on all connections but the first: the data connections. What
    /// accepts such a connection still passes.
    data_held: AtomicBool,
    closed: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

impl Relay {
    pub fn to(target: SocketAddr) -> Relay {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared::default());
        let own = shared.clone();
        std::thread::spawn(move || {
            for (number, near) in listener.incoming().enumerate() {
                if own.closed.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else {
                    continue;
                };
                for (from, to, inward) in [(&near, &far, true), (&far, &near, false)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    from.set_nodelay(true).unwrap();
                    own.streams.lock().unwrap().push(from.try_clone().unwrap());
                    let shared = own.clone();
                    let is_data = number > 0;
                    std::thread::spawn(move || pass_on(from, to, &shared, inward, is_data));
                }
            }
        });
        Relay { address, shared }
    }

    /// Nothing passes from now on; the connections stay open.
    pub fn freeze(&self) {
        self.shared.frozen.store(true, Ordering::SeqCst);
    }

    /// The target hears nothing from now on; what it says still passes.
    pub fn deafen(&self) {
        self.shared.deaf.store(true, Ordering::SeqCst);
    }

    pub fn thaw(&self) {
        self.shared.deaf.store(false, Ordering::SeqCst);
        self.shared.frozen.store(false, Ordering::SeqCst);
    }

    /// No page passes on connections after the first (which carries control), or all again.
    pub fn hold_data(&self, held: bool) {
        self.shared.data_held.store(held, Ordering::SeqCst);
    }

    /// Closes every connection but the first.
    pub fn cut_data(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(2..) {
            let _gone: std::io::Result<()> = stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes every connection; new ones are taken again.
    pub fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _gone: std::io::Result<()> = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        self.cut();
        let _wake: std::io::Result<TcpStream> = TcpStream::connect(self.address);
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, shared: &Shared, inward: bool, is_data: bool) {
    let mut accepted = if is_data && !inward { ACCEPT_BYTES } else { 0 };
    let frozen = |accepted: usize| {
        shared.frozen.load(Ordering::SeqCst)
            || inward && shared.deaf.load(Ordering::SeqCst)
            || is_data && !inward && accepted == 0 && shared.data_held.load(Ordering::SeqCst)
    };
    from.set_read_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        while frozen(accepted) {
            if shared.closed.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let most = if accepted > 0 { accepted } else { buffer.len() };
        match from.read(&mut buffer[..most]) {
            Ok(0) => break,
            Ok(count) => {
                while frozen(accepted) && !shared.closed.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                accepted = accepted.saturating_sub(count);
                if to.write_all(&buffer[..count]).is_err() {
                    break;
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    let _gone: std::io::Result<()> = to.shutdown(Shutdown::Both);
}
