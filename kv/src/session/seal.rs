//! Keys, the seal on each frame, and taking frames out of a byte stream.
//!
//! Plain frame:  `length:4 kind:1 body`. Sealed frame: `length:4 kind:1 sequence:8
//! incarnation:8 body mac:16`, the MAC being HMAC-SHA256 over all before it, cut to 16 bytes,
//! under a key per direction. A frame that fails its check ends the session: on TCP it can only
//! be an attack or a broken peer.

use super::codec::Malformed;
use super::frame::{DataOpen, FRAME_BYTES_MAX, Frame, HANDSHAKE_FRAME_BYTES_MAX};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;

/// Bytes of a frame's truncated MAC.
pub const MAC_BYTES: usize = 16;
/// Bytes between the length word and the body of a sealed frame: kind, sequence, incarnation.
const SEALED_HEAD_BYTES: usize = 1 + 8 + 8;

/// The cluster's shared key. It never travels and is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct PeerKey([u8; 32]);

impl PeerKey {
    /// Wraps 32 secret bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        PeerKey(bytes)
    }

    /// HMAC-SHA256 of the parts under this key. Parts must be of fixed length or
    /// length-prefixed, so that no two lists of parts give the same bytes.
    pub(super) fn mac(&self, parts: &[&[u8]]) -> [u8; 32] {
        mac(&self.0, parts).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    pub(super) fn verify(&self, parts: &[&[u8]], expected: &[u8; 32]) -> bool {
        mac(&self.0, parts).verify_slice(expected).is_ok()
    }

    fn derive(&self, label: &[u8], transcript: &[u8; 32]) -> PeerKey {
        PeerKey(self.mac(&[label, transcript]))
    }
}

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerKey(..)")
    }
}

fn mac(key: &[u8; 32], parts: &[&[u8]]) -> Hmac<Sha256> {
    // HMAC takes a key of any length.
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("hmac accepts 32 bytes");
    for part in parts {
        mac.update(part);
    }
    mac
}

/// Why the bytes of a connection are not acceptable. Each ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireError {
    /// A frame over the cap: its claimed length and the cap.
    TooLong(usize, usize),
    /// A frame shorter than its fixed fields.
    TooShort(usize),
    /// The MAC is wrong.
    Mac,
    /// The sequence number is not the next: got, wanted.
    Sequence(u64, u64),
    /// The body is not a frame.
    Malformed(Malformed),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::TooLong(length, max) => {
                write!(f, "a frame of {length} bytes is over the cap of {max}")
            }
            WireError::TooShort(length) => write!(f, "a frame of {length} bytes has no header"),
            WireError::Mac => f.write_str("a frame's MAC does not match"),
            WireError::Sequence(got, wanted) => {
                write!(f, "frame number {got} came where {wanted} was due")
            }
            WireError::Malformed(malformed) => malformed.fmt(f),
        }
    }
}

/// Cuts a byte stream into frames. Holds at most one frame and what a single read brought.
#[derive(Debug)]
pub struct FrameStream {
    buffer: Vec<u8>,
    start: usize,
    frame_bytes_max: usize,
}

impl Default for FrameStream {
    fn default() -> Self {
        Self::new()
    }
}

impl FrameStream {
    /// A stream before the proofs: small frames only.
    pub fn new() -> Self {
        FrameStream {
            buffer: Vec::new(),
            start: 0,
            frame_bytes_max: HANDSHAKE_FRAME_BYTES_MAX,
        }
    }

    /// The peer has proven the key: frames of full size from now on.
    pub fn trust(&mut self) {
        self.frame_bytes_max = FRAME_BYTES_MAX;
    }

    /// Appends what a read brought.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.start = 0;
        } else if self.start > FRAME_BYTES_MAX {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame after its length word, if it is there.
    ///
    /// # Errors
    /// [`WireError::TooLong`] as soon as the length word shows it.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, WireError> {
        let rest = &self.buffer[self.start..];
        let Some((length, _)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.frame_bytes_max {
            return Err(WireError::TooLong(length, self.frame_bytes_max));
        }
        if length == 0 {
            return Err(WireError::TooShort(0));
        }
        if rest.len() < 4 + length {
            return Ok(None);
        }
        let from = self.start + 4;
        self.start = from + length;
        Ok(Some(&self.buffer[from..from + length]))
    }

    /// Bytes that came after the last frame taken; a data connection hands them on.
    pub fn rest(&self) -> &[u8] {
        &self.buffer[self.start..]
    }
}

/// A plain frame as bytes.
pub fn plain(frame: &Frame) -> Vec<u8> {
    let mut out = vec![0; 4];
    out.push(frame.kind());
    frame.encode(&mut out);
    let length = (out.len() - 4) as u32;
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

/// Reads a plain frame (without its length word).
///
/// # Errors
/// When it is not one.
pub fn open_plain(bytes: &[u8]) -> Result<Frame, WireError> {
    let (kind, body) = bytes.split_first().ok_or(WireError::TooShort(0))?;
    Frame::decode(*kind, body).map_err(WireError::Malformed)
}

/// What came out of a sealed frame.
#[derive(Debug, PartialEq, Eq)]
pub struct Opened {
    /// The sender's incarnation as the frame names it.
    pub incarnation: u64,
    /// The frame.
    pub frame: Frame,
}

/// The two directions of a proven session: keys and sequence numbers.
#[derive(Debug)]
pub struct SealedChannel {
    send_key: PeerKey,
    receive_key: PeerKey,
    data_key: PeerKey,
    send_sequence: u64,
    receive_sequence: u64,
    incarnation: u64,
}

impl SealedChannel {
    /// Derives the session's keys from the shared key and the handshake's transcript hash.
    pub(super) fn new(
        key: &PeerKey,
        transcript: &[u8; 32],
        dialler: bool,
        incarnation: u64,
    ) -> Self {
        let forth = key.derive(b"kvserve frames dialler->acceptor", transcript);
        let back = key.derive(b"kvserve frames acceptor->dialler", transcript);
        let (send_key, receive_key) = if dialler {
            (forth, back)
        } else {
            (back, forth)
        };
        SealedChannel {
            send_key,
            receive_key,
            data_key: key.derive(b"kvserve data connections", transcript),
            send_sequence: 0,
            receive_sequence: 0,
            incarnation,
        }
    }

    /// Seals a frame into bytes to be sent, in this order.
    pub fn seal(&mut self, frame: &Frame) -> Vec<u8> {
        let mut out = vec![0; 4];
        out.push(frame.kind());
        out.extend_from_slice(&self.send_sequence.to_le_bytes());
        out.extend_from_slice(&self.incarnation.to_le_bytes());
        frame.encode(&mut out);
        let length = (out.len() - 4 + MAC_BYTES) as u32;
        out[..4].copy_from_slice(&length.to_le_bytes());
        let tag = self.send_key.mac(&[&out]);
        out.extend_from_slice(&tag[..MAC_BYTES]);
        self.send_sequence += 1;
        out
    }

    /// Checks and reads a sealed frame (without its length word).
    ///
    /// # Errors
    /// [`WireError`]; the session must end.
    pub fn open(&mut self, bytes: &[u8]) -> Result<Opened, WireError> {
        if bytes.len() < SEALED_HEAD_BYTES + MAC_BYTES {
            return Err(WireError::TooShort(bytes.len()));
        }
        let (signed, tag) = bytes.split_at(bytes.len() - MAC_BYTES);
        let length = (bytes.len() as u32).to_le_bytes();
        if mac(&self.receive_key.0, &[&length, signed])
            .verify_truncated_left(tag)
            .is_err()
        {
            return Err(WireError::Mac);
        }
        let sequence = u64::from_le_bytes(signed[1..9].try_into().expect("8 bytes"));
        let incarnation = u64::from_le_bytes(signed[9..17].try_into().expect("8 bytes"));
        if sequence != self.receive_sequence {
            return Err(WireError::Sequence(sequence, self.receive_sequence));
        }
        self.receive_sequence += 1;
        let frame =
            Frame::decode(signed[0], &signed[SEALED_HEAD_BYTES..]).map_err(WireError::Malformed)?;
        Ok(Opened { incarnation, frame })
    }

    /// The first frame of the session's data connection number `count`.
    pub fn data_open(&self, target: u64, lane: u16, count: u64) -> DataOpen {
        let mut open = DataOpen {
            opener: self.incarnation,
            target,
            lane,
            count,
            token: [0; 32],
        };
        open.token = self.data_key.mac(&[&data_bytes(b"open", &open)]);
        open
    }

    /// Whether a `DataOpen` was made by the peer of this session.
    pub fn data_open_is_genuine(&self, open: &DataOpen) -> bool {
        self.data_key
            .verify(&[&data_bytes(b"open", open)], &open.token)
    }

    /// The acceptor's answer to `open`.
    pub fn data_accept(&self, open: &DataOpen) -> [u8; 32] {
        self.data_key.mac(&[&data_bytes(b"take", open)])
    }

    /// Whether the answer is the peer's.
    pub fn data_accept_is_genuine(&self, open: &DataOpen, answer: &[u8; 32]) -> bool {
        self.data_key.verify(&[&data_bytes(b"take", open)], answer)
    }
}

/// The bytes a data connection's proofs are over: fixed lengths, one label per direction.
fn data_bytes(label: &[u8; 4], open: &DataOpen) -> [u8; 30] {
    let mut bytes = [0; 30];
    bytes[..4].copy_from_slice(label);
    bytes[4..12].copy_from_slice(&open.opener.to_le_bytes());
    bytes[12..20].copy_from_slice(&open.target.to_le_bytes());
    bytes[20..22].copy_from_slice(&open.lane.to_le_bytes());
    bytes[22..].copy_from_slice(&open.count.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::frame::RefuseReason;
    use super::*;

    fn pair() -> (SealedChannel, SealedChannel) {
        let key = PeerKey::new([7; 32]);
        (
            SealedChannel::new(&key, &[1; 32], true, 11),
            SealedChannel::new(&key, &[1; 32], false, 22),
        )
    }

    #[test]
    fn a_sealed_frame_opens_once_and_in_order() {
        let (mut a, mut b) = pair();
        let first = a.seal(&Frame::Heartbeat);
        let second = a.seal(&Frame::Bye {
            reason: RefuseReason::ShuttingDown,
        });
        let opened = b.open(&first[4..]).unwrap();
        assert_eq!((opened.incarnation, opened.frame), (11, Frame::Heartbeat));
        assert_eq!(
            b.open(&first[4..]),
            Err(WireError::Sequence(0, 1)),
            "a replay"
        );
        assert!(b.open(&second[4..]).is_ok());
    }

    #[test]
    fn a_frame_sent_back_to_its_sender_does_not_open() {
        let (mut a, _) = pair();
        let frame = a.seal(&Frame::Heartbeat);
        assert_eq!(a.open(&frame[4..]), Err(WireError::Mac));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let (mut a, _) = pair();
        let sealed = a.seal(&Frame::App {
            kind: 3,
            bytes: vec![1, 2, 3],
        });
        for bit in 0..(sealed.len() - 4) * 8 {
            let (_, mut b) = pair();
            let mut bent = sealed[4..].to_vec();
            bent[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(b.open(&bent), Err(WireError::Mac), "bit {bit}");
        }
    }

    #[test]
    fn the_stream_gives_whole_frames_and_refuses_long_ones_at_once() {
        let mut stream = FrameStream::new();
        let bytes = plain(&Frame::Proof([9; 32]));
        for byte in &bytes[..bytes.len() - 1] {
            stream.push(&[*byte]);
            assert_eq!(stream.next_frame(), Ok(None));
        }
        stream.push(&bytes[bytes.len() - 1..]);
        stream.push(b"xy");
        let frame = stream.next_frame().unwrap().unwrap().to_vec();
        assert_eq!(open_plain(&frame), Ok(Frame::Proof([9; 32])));
        assert_eq!(stream.rest(), b"xy");

        let mut stream = FrameStream::new();
        stream.push(&(HANDSHAKE_FRAME_BYTES_MAX as u32 + 1).to_le_bytes());
        assert!(matches!(
            stream.next_frame(),
            Err(WireError::TooLong(_, HANDSHAKE_FRAME_BYTES_MAX))
        ));
        stream.trust();
        assert_eq!(stream.next_frame(), Ok(None));
    }

    #[test]
    fn a_data_token_is_bound_to_everything_it_names() {
        let (a, b) = pair();
        let open = a.data_open(22, 0, 1);
        assert!(b.data_open_is_genuine(&open));
        for bend in [
            |o: &mut DataOpen| o.opener += 1,
            |o: &mut DataOpen| o.target += 1,
            |o: &mut DataOpen| o.lane += 1,
            |o: &mut DataOpen| o.count += 1,
            |o: &mut DataOpen| o.token[0] ^= 1,
        ] {
            let mut bent = open.clone();
            bend(&mut bent);
            assert!(!b.data_open_is_genuine(&bent), "{bent:?}");
        }
        assert!(a.data_accept_is_genuine(&open, &b.data_accept(&open)));
        assert!(
            !a.data_accept_is_genuine(&open, &open.token),
            "an echo proves nothing"
        );
    }
}
