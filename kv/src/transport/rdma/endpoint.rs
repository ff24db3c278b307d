//! What the two ends of a connection tell each other, and what follows from both.
//!
//! ```text
//! endpoint (56), little-endian: version 1 · ethernet 1 · mtu 1 · reads asked 1 · reads answered 1
//!   · zero 1 · lid 2 · pair 4 · psn 4 · gid 16 · key 4 · pages 4 · base 8 · stride 8
//! ```

use std::fmt;

/// Bytes of an endpoint on the wire.
pub const ENDPOINT_BYTES: usize = 56;

const VERSION: u8 = 1;

/// Queue pairs and packet numbers have 24 bits.
const NUMBER_MAX: u32 = (1 << 24) - 1;

/// One end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether its link is Ethernet.
    pub ethernet: bool,
    /// The longest packet, as `ibv_mtu`.
    pub mtu: u8,
    /// READs it asks at once at most.
    pub reads_asked: u8,
    /// READs it answers at once at most.
    pub reads_answered: u8,
    /// Local id, on InfiniBand.
    pub lid: u16,
    /// Its queue pair.
    pub pair: u32,
    /// Its first packet number, random.
    pub psn: u32,
    /// Its GID.
    pub gid: [u8; 16],
    /// The key of its pool; 0 on an end that serves nothing.
    pub key: u32,
    /// Pages of its pool; 0 on an end that serves nothing.
    pub pages: u32,
    /// Address of its first page.
    pub base: u64,
    /// Bytes from one page to the next.
    pub stride: u64,
}

/// Bytes that are no endpoint, or two that do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadEndpoint {
    /// Bytes.
    Length(usize),
    /// Version.
    Version(u8),
    /// A number out of its range: which, value.
    Number(&'static str, u64),
    /// One link is Ethernet, the other InfiniBand.
    Links,
    /// Pages of the other end are shorter than ours: stride, page bytes.
    Stride(u64, usize),
}

impl fmt::Display for BadEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadEndpoint::Length(bytes) => {
                write!(f, "an endpoint of {bytes} bytes, not {ENDPOINT_BYTES}")
            }
            BadEndpoint::Version(version) => write!(f, "an endpoint of version {version}"),
            BadEndpoint::Number(name, value) => write!(f, "an endpoint whose {name} is {value}"),
            BadEndpoint::Links => f.write_str(
                "one end is on Ethernet and the other on InfiniBand; choose devices of one kind",
            ),
            BadEndpoint::Stride(stride, page) => {
                write!(
                    f,
                    "the peer's pages are {stride} bytes apart, ours have {page}"
                )
            }
        }
    }
}

impl std::error::Error for BadEndpoint {}

/// What both ends can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// `ibv_mtu`.
    pub mtu: u32,
    /// READs that `ours` asks of `theirs` at once.
    pub asks: u8,
    /// READs that `ours` answers to `theirs` at once.
    pub answers: u8,
}

impl Endpoint {
    /// The wire form.
    pub fn encode(&self) -> [u8; ENDPOINT_BYTES] {
        let mut bytes = [0; ENDPOINT_BYTES];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        put(&[
            VERSION,
            u8::from(self.ethernet),
            self.mtu,
            self.reads_asked,
            self.reads_answered,
            0,
        ]);
        put(&self.lid.to_le_bytes());
        put(&self.pair.to_le_bytes());
        put(&self.psn.to_le_bytes());
        put(&self.gid);
        put(&self.key.to_le_bytes());
        put(&self.pages.to_le_bytes());
        put(&self.base.to_le_bytes());
        put(&self.stride.to_le_bytes());
        bytes
    }

    /// Reads and checks the wire form.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadEndpoint> {
        let bytes: &[u8; ENDPOINT_BYTES] = bytes
            .try_into()
            .map_err(|_| BadEndpoint::Length(bytes.len()))?;
        fn part<const N: usize>(bytes: &[u8; ENDPOINT_BYTES], at: usize) -> [u8; N] {
            let mut part = [0; N];
            part.copy_from_slice(&bytes[at..at + N]);
            part
        }
        if bytes[0] != VERSION {
            return Err(BadEndpoint::Version(bytes[0]));
        }
        let end = Endpoint {
            ethernet: bytes[1] != 0,
            mtu: bytes[2],
            reads_asked: bytes[3],
            reads_answered: bytes[4],
            lid: u16::from_le_bytes(part(bytes, 6)),
            pair: u32::from_le_bytes(part(bytes, 8)),
            psn: u32::from_le_bytes(part(bytes, 12)),
            gid: part(bytes, 16),
            key: u32::from_le_bytes(part(bytes, 32)),
            pages: u32::from_le_bytes(part(bytes, 36)),
            base: u64::from_le_bytes(part(bytes, 40)),
            stride: u64::from_le_bytes(part(bytes, 48)),
        };
        let bad = |name, value: u64| Err(BadEndpoint::Number(name, value));
        if end.mtu == 0 || end.mtu > 5 {
            return bad("mtu", end.mtu.into());
        }
        if end.reads_asked == 0 || end.reads_answered == 0 {
            return bad("reads at once", 0);
        }
        if end.pair == 0 || end.pair > NUMBER_MAX {
            return bad("queue pair", end.pair.into());
        }
        if end.psn > NUMBER_MAX {
            return bad("packet number", end.psn.into());
        }
        let bytes = u64::from(end.pages).checked_mul(end.stride);
        if bytes
            .and_then(|bytes| end.base.checked_add(bytes))
            .is_none()
        {
            return bad("pool", end.base);
        }
        Ok(end)
    }

    /// What both ends can do: the smaller of each.
    ///
    /// # Errors
    /// When they do not fit together.
    pub fn agree(ours: &Endpoint, theirs: &Endpoint) -> Result<Agreed, BadEndpoint> {
        if ours.ethernet != theirs.ethernet {
            return Err(BadEndpoint::Links);
        }
        Ok(Agreed {
            mtu: u32::from(ours.mtu.min(theirs.mtu)),
            asks: ours.reads_asked.min(theirs.reads_answered),
            answers: ours.reads_answered.min(theirs.reads_asked),
        })
    }
}

/// A packet number: the low 24 bits of a random number.
pub fn packet_number(random: u32) -> u32 {
    random & NUMBER_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end() -> Endpoint {
        Endpoint {
            ethernet: true,
            mtu: 5,
            reads_asked: 16,
            reads_answered: 8,
            lid: 0x1234,
            pair: 77,
            psn: NUMBER_MAX,
            gid: [9; 16],
            key: 0xDEAD_BEEF,
            pages: 1000,
            base: 1 << 46,
            stride: 64 * 1024,
        }
    }

    #[test]
    fn what_is_told_is_what_was_meant() {
        assert_eq!(Endpoint::decode(&end().encode()), Ok(end()));
    }

    #[test]
    fn lies_are_refused_by_name() {
        assert_eq!(Endpoint::decode(&[1; 7]), Err(BadEndpoint::Length(7)));
        let told = |change: fn(&mut Endpoint)| {
            let mut lie = end();
            change(&mut lie);
            Endpoint::decode(&lie.encode())
        };
        let bad = |name, value| Err(BadEndpoint::Number(name, value));
        assert_eq!(told(|end| end.mtu = 6), bad("mtu", 6));
        assert_eq!(told(|end| end.mtu = 0), bad("mtu", 0));
        assert_eq!(told(|end| end.reads_asked = 0), bad("reads at once", 0));
        assert_eq!(told(|end| end.pair = 1 << 24), bad("queue pair", 1 << 24));
        assert_eq!(told(|end| end.psn = 1 << 24), bad("packet number", 1 << 24));
        assert_eq!(told(|end| end.base = u64::MAX), bad("pool", u64::MAX));
        let mut other = end().encode();
        other[0] = 2;
        assert_eq!(Endpoint::decode(&other), Err(BadEndpoint::Version(2)));
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut state = 7_u64;
        for _ in 0..20_000 {
            let mut bytes = [0; ENDPOINT_BYTES];
            for byte in &mut bytes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                *byte = (state >> 56) as u8;
            }
            bytes[0] = VERSION;
            if let Ok(end) = Endpoint::decode(&bytes) {
                assert_eq!(Endpoint::decode(&end.encode()), Ok(end));
            }
        }
    }

    #[test]
    fn the_smaller_of_each_is_agreed() {
        let theirs = Endpoint {
            mtu: 3,
            reads_asked: 4,
            reads_answered: 2,
            ..end()
        };
        let agreed = Endpoint::agree(&end(), &theirs).unwrap();
        assert_eq!((agreed.mtu, agreed.asks, agreed.answers), (3, 2, 4));
        let other = Endpoint {
            ethernet: false,
            ..theirs
        };
        assert_eq!(Endpoint::agree(&end(), &other), Err(BadEndpoint::Links));
    }
}
