//! A relay between two nodes that understands where frames begin (never what is in them: they
//! are sealed), so that a test can act at an exact step of the protocol: kill a process before a
//! `Commit` is delivered, flip a bit of a page, hold everything back.

use kvserve_kv::session::frame::{FRAME_BYTES_MAX, Frame};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From who dialled (the decode node) to who listens (the prefill node).
    Forth,
    /// Back.
    Back,
}

/// What passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// A frame of this kind, whole.
    Frame(Way, u8),
    /// Bytes on a data connection after its opening.
    Data(Way),
}

/// What happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Pass,
    /// It is not delivered.
    Drop,
    /// A bit of it is flipped, in the middle.
    Flip,
    /// Half of it is delivered.
    Half,
    /// The connection is closed instead.
    Close,
}

type Script = Box<dyn FnMut(Flow) -> Act + Send>;

#[derive(Default)]
struct Shared {
    closed: AtomicBool,
    frozen: AtomicBool,
    script: Mutex<Option<Script>>,
    streams: Mutex<Vec<TcpStream>>,
}

/// The relay; dropping it closes all its connections.
pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl Relay {
    pub fn to(target: SocketAddr) -> Relay {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let address = listener.local_addr().expect("bound");
        let shared = Arc::new(Shared::default());
        let own = shared.clone();
        std::thread::spawn(move || {
            for near in listener.incoming() {
                if own.closed.load(SeqCst) {
                    return;
                }
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(target)) else {
                    continue; // dropping the near end closes it
                };
                if connect(&near, &far, &own).is_err() {
                    let _ = near.shutdown(Shutdown::Both);
                }
            }
        });
        Relay { address, shared }
    }

    /// Asks `script` about everything that passes from now on.
    pub fn script(&self, script: impl FnMut(Flow) -> Act + Send + 'static) {
        *self.shared.script.lock().expect("script") = Some(Box::new(script));
    }

    /// Lets everything pass.
    pub fn pass(&self) {
        *self.shared.script.lock().expect("script") = None;
    }

    /// Runs `act` once, when `flow` passes for the first time; then lets everything pass. What
    /// `act` gives is what happens to it.
    pub fn once(&self, flow: Flow, act: impl FnOnce() -> Act + Send + 'static) -> Arc<AtomicBool> {
        let struck = Arc::new(AtomicBool::new(false));
        let mine = struck.clone();
        let mut act = Some(act);
        self.script(move |seen| match act.take_if(|_| seen == flow) {
            Some(act) => {
                let verdict = act();
                mine.store(true, SeqCst);
                verdict
            }
            None => Act::Pass,
        });
        struck
    }

    /// Nothing passes until [`Relay::thaw`]; connections stay open.
    pub fn freeze(&self) {
        self.shared.frozen.store(true, SeqCst);
    }

    pub fn thaw(&self) {
        self.shared.frozen.store(false, SeqCst);
    }

    /// Closes every connection; new ones are taken again.
    pub fn cut(&self) {
        for stream in self.shared.streams.lock().expect("streams").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.closed.store(true, SeqCst);
        self.cut();
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

fn connect(near: &TcpStream, far: &TcpStream, shared: &Arc<Shared>) -> std::io::Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    // Known by the first frame of the dialler, for both directions.
    let data = Arc::new(AtomicBool::new(false));
    let mut streams = shared.streams.lock().expect("streams");
    // Ended ones would pile up over thousands of requests.
    streams.retain(|stream| stream.peer_addr().is_ok());
    for (from, to, way) in [(near, far, Way::Forth), (far, near, Way::Back)] {
        let (from, to) = (from.try_clone()?, to.try_clone()?);
        streams.push(from.try_clone()?);
        let (shared, data) = (shared.clone(), data.clone());
        std::thread::spawn(move || {
            // An end of either side ends both, and only that.
            let _ = pass_on(&from, &to, way, &data, &shared);
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
    Ok(())
}

/// Passes bytes on, frame by frame, or as they come on a data connection.
fn pass_on(
    from: &TcpStream,
    mut to: &TcpStream,
    way: Way,
    data: &AtomicBool,
    shared: &Shared,
) -> std::io::Result<()> {
    let data_open = kind_of_data_open();
    let mut raw = false;
    loop {
        let (flow, mut bytes) = if raw {
            (Flow::Data(way), read_some(from, shared)?)
        } else {
            let frame = read_frame(from, shared)?;
            let kind = frame[4];
            if way == Way::Forth && kind == data_open {
                data.store(true, SeqCst);
            }
            // Each side's first frame on a data connection is its last.
            raw = data.load(SeqCst);
            (Flow::Frame(way, kind), frame)
        };
        while shared.frozen.load(SeqCst) {
            if shared.closed.load(SeqCst) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let act = match &mut *shared.script.lock().expect("script") {
            Some(script) => script(flow),
            None => Act::Pass,
        };
        match act {
            Act::Pass => to.write_all(&bytes)?,
            Act::Drop => {}
            Act::Flip => {
                let middle = bytes.len() / 2;
                bytes[middle] ^= 0x10;
                to.write_all(&bytes)?;
            }
            Act::Half => to.write_all(&bytes[..bytes.len() / 2])?,
            Act::Close => return Ok(()),
        }
    }
}

fn kind_of_data_open() -> u8 {
    Frame::DataOpen(kvserve_kv::session::frame::DataOpen {
        opener: 0,
        target: 0,
        lane: 0,
        count: 0,
        token: [0; 32],
    })
    .kind()
}

/// A whole frame with its length word.
fn read_frame(from: &TcpStream, shared: &Shared) -> std::io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    read_full(from, &mut frame, shared)?;
    let length = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
    if length == 0 || length > FRAME_BYTES_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    frame.resize(4 + length, 0);
    read_full(from, &mut frame[4..], shared)?;
    Ok(frame)
}

fn read_full(from: &TcpStream, into: &mut [u8], shared: &Shared) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        filled += read_once(from, &mut into[filled..], shared)?;
    }
    Ok(())
}

fn read_some(from: &TcpStream, shared: &Shared) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; 64 * 1024];
    let count = read_once(from, &mut bytes, shared)?;
    bytes.truncate(count);
    Ok(bytes)
}

fn read_once(mut from: &TcpStream, into: &mut [u8], shared: &Shared) -> std::io::Result<usize> {
    loop {
        if shared.closed.load(SeqCst) {
            return Err(ErrorKind::ConnectionAborted.into());
        }
        match from.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
