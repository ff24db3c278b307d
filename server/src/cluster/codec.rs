//! The two frames of the cluster layer: fixed layouts, little-endian, length caps (PROTOCOL S5).

use kvserve_kv::peer::PathCounters;

/// The longest name, model id or address a frame carries.
const TEXT_MAX: usize = 256;
/// Prefill nodes a roster can name.
const ROSTER_MAX: usize = 256;
/// Paths a report names: 64 of some 320 bytes at most stay far below an App frame's 256 KiB.
pub const PATHS_MAX: usize = 64;

/// What a node tells the proxy about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeReport {
    /// 1 hybrid, 2 prefill, 3 decode.
    pub role: u8,
    /// Whether it admits work.
    pub ready: bool,
    /// Whether it can migrate now: a decode node that a prefill node is up for, and every other
    /// node.
    pub paired: bool,
    /// Requests (or prefills for peers) it works on.
    pub unfinished: u32,
    /// Of them, those that wait.
    pub queued: u32,
    /// Free KV pages.
    pub pages_free: u32,
    /// All KV pages.
    pub pages_total: u32,
    /// Pages in quarantine.
    pub pages_quarantined: u32,
    /// Name of the model it serves.
    pub model: String,
    /// Where peers reach it, `host:port`; empty when it does not listen for peers.
    pub peer_address: String,
    /// How pages come to it from each prefill node, the first [`PATHS_MAX`] of them.
    pub paths: Vec<PathReport>,
}

/// How pages come from one prefill node, and what they have met on their way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathReport {
    /// The prefill node.
    pub node_id: String,
    /// `shm`, `tcp`, or nothing while there is no way.
    pub path: String,
    /// What its session has moved.
    pub moved: PathCounters,
    /// Reads in flight.
    pub credit_reads: u32,
    /// Their bytes.
    pub credit_bytes: u64,
    /// Reads that wait for a credit.
    pub waiting: u32,
}

/// One prefill node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RosterEntry {
    /// Its node id.
    pub node_id: String,
    /// Where peers reach it.
    pub peer_address: String,
}

/// All prefill nodes the proxy knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Roster {
    /// In order of node id.
    pub prefill: Vec<RosterEntry>,
}

/// A frame that is not what this version writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodecError {
    /// Which frame.
    pub frame: &'static str,
    /// Bytes that came.
    pub bytes: usize,
}

impl std::fmt::Display for CodecError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} bytes are not a valid {} frame",
            self.bytes, self.frame
        )
    }
}

impl NodeReport {
    /// Writes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(32 + self.model.len() + self.peer_address.len());
        out.push(self.role);
        out.push(self.ready as u8);
        out.push(self.paired as u8);
        for value in [
            self.unfinished,
            self.queued,
            self.pages_free,
            self.pages_total,
            self.pages_quarantined,
        ] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        put_text(&mut out, &self.model);
        put_text(&mut out, &self.peer_address);
        let paths = &self.paths[..self.paths.len().min(PATHS_MAX)];
        out.extend_from_slice(&(paths.len() as u16).to_le_bytes());
        for path in paths {
            path.encode(&mut out);
        }
        out
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`CodecError`] for anything this version does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        let mut reader = Reader(bytes);
        (|| {
            let report = NodeReport {
                role: reader.u8().filter(|role| (1..=3).contains(role))?,
                ready: reader.flag()?,
                paired: reader.flag()?,
                unfinished: reader.u32()?,
                queued: reader.u32()?,
                pages_free: reader.u32()?,
                pages_total: reader.u32()?,
                pages_quarantined: reader.u32()?,
                model: reader.text()?,
                peer_address: reader.text()?,
                paths: reader.paths()?,
            };
            reader.0.is_empty().then_some(report)
        })()
        .ok_or(CodecError {
            frame: "node report",
            bytes: bytes.len(),
        })
    }
}

impl PathReport {
    fn encode(&self, out: &mut Vec<u8>) {
        put_text(out, &self.node_id);
        put_text(out, &self.path);
        let PathCounters {
            reads,
            bytes,
            reposts,
            mismatches,
            fallbacks,
        } = self.moved;
        let credit_bytes = self.credit_bytes;
        for value in [reads, bytes, reposts, mismatches, fallbacks, credit_bytes] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        for value in [self.credit_reads, self.waiting] {
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
}

impl Roster {
    /// Writes it; entries beyond the cap are left out.
    pub fn encode(&self) -> Vec<u8> {
        let entries = &self.prefill[..self.prefill.len().min(ROSTER_MAX)];
        let mut out = Vec::with_capacity(2 + entries.len() * 64);
        out.extend_from_slice(&(entries.len() as u16).to_le_bytes());
        for entry in entries {
            put_text(&mut out, &entry.node_id);
            put_text(&mut out, &entry.peer_address);
        }
        out
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`CodecError`] for anything this version does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, CodecError> {
        let mut reader = Reader(bytes);
        (|| {
            let count = reader.u16()? as usize;
            if count > ROSTER_MAX {
                return None;
            }
            let mut prefill = Vec::with_capacity(count);
            for _ in 0..count {
                prefill.push(RosterEntry {
                    node_id: reader.text()?,
                    peer_address: reader.text()?,
                });
            }
            reader.0.is_empty().then_some(Roster { prefill })
        })()
        .ok_or(CodecError {
            frame: "roster",
            bytes: bytes.len(),
        })
    }
}

/// Writes a text of at most [`TEXT_MAX`] bytes, cut at a character's border.
fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&(end as u16).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn paths(&mut self) -> Option<Vec<PathReport>> {
        let count = self.u16()? as usize;
        if count > PATHS_MAX {
            return None;
        }
        let path = |reader: &mut Self| {
            Some(PathReport {
                node_id: reader.text()?,
                path: reader.text()?,
                moved: PathCounters {
                    reads: reader.u64()?,
                    bytes: reader.u64()?,
                    reposts: reader.u64()?,
                    mismatches: reader.u64()?,
                    fallbacks: reader.u64()?,
                },
                credit_bytes: reader.u64()?,
                credit_reads: reader.u32()?,
                waiting: reader.u32()?,
            })
        };
        (0..count).map(|_| path(self)).collect()
    }

    fn text(&mut self) -> Option<String> {
        let length = self.u16()? as usize;
        if length > TEXT_MAX || length > self.0.len() {
            return None;
        }
        let (head, tail) = self.0.split_at(length);
        self.0 = tail;
        String::from_utf8(head.to_vec()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> NodeReport {
        NodeReport {
            role: 3,
            ready: true,
            paired: false,
            unfinished: 1,
            queued: 2,
            pages_free: 3,
            pages_total: 4,
            pages_quarantined: 5,
            model: "m".into(),
            peer_address: "127.0.0.1:1".into(),
            paths: vec![PathReport {
                node_id: "p".into(),
                path: "shm".into(),
                moved: PathCounters {
                    reads: 1,
                    bytes: 2,
                    reposts: 3,
                    mismatches: 4,
                    fallbacks: 5,
                },
                credit_reads: 6,
                credit_bytes: 7,
                waiting: 8,
            }],
        }
    }

    #[test]
    fn frames_survive_the_way_and_no_prefix_or_mutation_panics() {
        let roster = Roster {
            prefill: vec![RosterEntry {
                node_id: "a".into(),
                peer_address: "[::1]:5".into(),
            }],
        };
        assert_eq!(NodeReport::decode(&report().encode()), Ok(report()));
        assert_eq!(Roster::decode(&roster.encode()), Ok(roster.clone()));
        for bytes in [report().encode(), roster.encode()] {
            for length in 0..bytes.len() {
                assert!(NodeReport::decode(&bytes[..length]).is_err());
                assert!(Roster::decode(&bytes[..length]).is_err());
            }
            for index in 0..bytes.len() {
                for value in [0, 1, 0x7F, 0xFF] {
                    let mut bytes = bytes.clone();
                    bytes[index] = value;
                    let _ = NodeReport::decode(&bytes);
                    let _ = Roster::decode(&bytes);
                }
            }
        }
    }

    #[test]
    fn long_texts_are_cut_not_refused() {
        let mut long = report();
        long.model = "é".repeat(200);
        let back = NodeReport::decode(&long.encode()).unwrap();
        assert_eq!(back.model, "é".repeat(128));
    }
}
