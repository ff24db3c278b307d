//! Byte layouts of the frames: little-endian, fixed order, counts checked against both the cap
//! and the bytes that are there before anything is allocated.

use super::frame::*;

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// No such kind.
    Kind(u8),
    /// The body ends before this field.
    Short(&'static str),
    /// The body goes on after its last field, by this many bytes.
    Long(usize),
    /// A count or length is over its cap.
    Cap(&'static str, u64),
    /// A number that names nothing.
    Value(&'static str, u64),
    /// A text that is not UTF-8.
    Text(&'static str),
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Kind(kind) => write!(f, "frame kind {kind} is not known"),
            Malformed::Short(field) => write!(f, "frame ends before {field}"),
            Malformed::Long(bytes) => write!(f, "frame has {bytes} bytes too many"),
            Malformed::Cap(field, value) => write!(f, "{field} = {value} is over its cap"),
            Malformed::Value(field, value) => write!(f, "{field} = {value} has no meaning"),
            Malformed::Text(field) => write!(f, "{field} is not UTF-8"),
        }
    }
}

impl Frame {
    /// The kind byte on the wire.
    pub fn kind(&self) -> u8 {
        match self {
            Frame::Challenge(_) => 1,
            Frame::Proof(_) => 2,
            Frame::Refused { .. } => 3,
            Frame::Hello(_) => 4,
            Frame::Welcome => 5,
            Frame::DataOpen(_) => 6,
            Frame::DataAccepted(_) => 7,
            Frame::Heartbeat => 16,
            Frame::Prefill { .. } => 17,
            Frame::Granted { .. } => 18,
            Frame::Busy { .. } => 19,
            Frame::PrefillRefused { .. } => 20,
            Frame::Queued { .. } => 21,
            Frame::Watermark { .. } => 22,
            Frame::FirstToken { .. } => 23,
            Frame::Complete { .. } => 24,
            Frame::Aborted { .. } => 25,
            Frame::Commit { .. } => 26,
            Frame::CommitAnswer { .. } => 27,
            Frame::Release { .. } => 28,
            Frame::ReleaseAnswer { .. } => 29,
            Frame::Cancel { .. } => 30,
            Frame::Renew { .. } => 31,
            Frame::FenceQuery { .. } => 32,
            Frame::FenceAnswer { .. } => 33,
            Frame::App { .. } => 34,
            Frame::Bye { .. } => 35,
            Frame::Places { .. } => 36,
            Frame::RdmaAsk { .. } => 37,
            Frame::RdmaAnswer { .. } => 38,
        }
    }

    /// Appends the body (without kind) to `out`. Callers keep the caps of [`super::frame`];
    /// lists beyond them would be refused by the peer.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut w = Writer { out };
        match self {
            Frame::Challenge(c) => {
                w.u16(c.protocol_min);
                w.u16(c.protocol_max);
                w.raw(&c.nonce);
                w.text(&c.node_id);
                w.u64(c.incarnation);
                w.u8(c.role as u8);
            }
            Frame::Proof(mac) | Frame::DataAccepted(mac) => w.raw(mac),
            Frame::Refused { reason, text } => {
                w.u16(*reason as u16);
                w.text(text);
            }
            Frame::Hello(h) => {
                w.u64(h.features);
                w.u64(h.fingerprint);
                w.u64(h.layout_hash);
                w.u64(h.page_bytes);
                w.u32(h.lease_pages_max);
                w.text(&h.api_url);
                w.raw(&h.shm.boot_id);
                w.text(&h.shm.socket);
                w.raw(&h.shm.nonce);
            }
            Frame::Welcome | Frame::Heartbeat => {}
            Frame::DataOpen(d) => {
                w.u64(d.opener);
                w.u64(d.target);
                w.u16(d.lane);
                w.u64(d.count);
                w.raw(&d.token);
            }
            Frame::Prefill {
                id,
                left_ns,
                held_pages,
                prompt,
                payload,
            } => {
                w.id(*id);
                w.u64(*left_ns);
                w.u32(*held_pages);
                w.u32s(prompt);
                w.bytes(payload);
            }
            Frame::Granted {
                id,
                lease,
                epoch,
                pages,
            } => {
                w.id(*id);
                w.u64(*lease);
                w.u32(*epoch);
                w.u32(*pages);
            }
            Frame::Busy { id, retry_ms } => {
                w.id(*id);
                w.u32(*retry_ms);
            }
            Frame::PrefillRefused { id, refusal, code } => {
                w.id(*id);
                w.u8(*refusal as u8);
                w.u16(*code);
            }
            Frame::Queued { id, ahead } => {
                w.id(*id);
                w.u32(*ahead);
            }
            Frame::Watermark {
                id,
                lease,
                first,
                checksums,
            } => {
                w.id(*id);
                w.u64(*lease);
                w.u32(*first);
                w.u64s(checksums);
            }
            Frame::FirstToken { id, payload } => {
                w.id(*id);
                w.bytes(payload);
            }
            Frame::Complete {
                id,
                lease,
                pages,
                tail_tokens,
                first,
                checksums,
            } => {
                w.id(*id);
                w.u64(*lease);
                w.u32(*pages);
                w.u32(*tail_tokens);
                w.u32(*first);
                w.u64s(checksums);
            }
            Frame::Aborted { id, reason } => {
                w.id(*id);
                w.u16(*reason as u16);
            }
            Frame::Commit {
                id,
                grantor,
                lease,
                epoch,
                pages,
            } => {
                w.id(*id);
                w.u64(*grantor);
                w.u64(*lease);
                w.u32(*epoch);
                w.u32(*pages);
            }
            Frame::CommitAnswer { id, lease, outcome } => {
                w.id(*id);
                w.u64(*lease);
                w.u8(*outcome as u8);
            }
            Frame::Release { id, lease, epoch } => {
                w.id(*id);
                w.u64(*lease);
                w.u32(*epoch);
            }
            Frame::ReleaseAnswer { id, lease }
            | Frame::FenceQuery { id, lease }
            | Frame::FenceAnswer { id, lease } => {
                w.id(*id);
                w.u64(*lease);
            }
            Frame::Cancel { id } => w.id(*id),
            Frame::Renew {
                grant_highest,
                live,
            } => {
                w.u64(*grant_highest);
                w.u32(live.len() as u32);
                for (id, lease) in live {
                    w.id(*id);
                    w.u64(*lease);
                }
            }
            Frame::App { kind, bytes } => {
                w.u16(*kind);
                w.bytes(bytes);
            }
            Frame::Bye { reason } => w.u16(*reason as u16),
            Frame::Places {
                id,
                lease,
                first,
                places,
            } => {
                w.id(*id);
                w.u64(*lease);
                w.u32(*first);
                w.u32(places.len() as u32);
                for (page, generation) in places {
                    w.u32(*page);
                    w.u64(*generation);
                }
            }
            Frame::RdmaAsk {
                pair,
                serial,
                endpoint,
            } => {
                w.u8(*pair);
                w.u32(*serial);
                w.bytes(endpoint);
            }
            Frame::RdmaAnswer {
                pair,
                serial,
                endpoint,
                text,
            } => {
                w.u8(*pair);
                w.u32(*serial);
                w.bytes(endpoint);
                w.text(text);
            }
        }
    }

    /// Reads a body of kind `kind`.
    ///
    /// # Errors
    /// [`Malformed`] with the field; nothing larger than the body is ever allocated.
    pub fn decode(kind: u8, body: &[u8]) -> Result<Frame, Malformed> {
        let mut r = Reader { rest: body };
        let frame = match kind {
            1 => Frame::Challenge(Challenge {
                protocol_min: r.u16("protocol_min")?,
                protocol_max: r.u16("protocol_max")?,
                nonce: r.array("nonce")?,
                node_id: r.text("node_id", NODE_ID_BYTES_MAX)?,
                incarnation: r.u64("incarnation")?,
                role: {
                    let number = r.u8("role")?;
                    Role::from_wire(number).ok_or(Malformed::Value("role", number.into()))?
                },
            }),
            2 => Frame::Proof(r.array("proof")?),
            3 => Frame::Refused {
                reason: r.refuse_reason()?,
                text: r.text("text", REASON_TEXT_BYTES_MAX)?,
            },
            4 => Frame::Hello(Hello {
                features: r.u64("features")?,
                fingerprint: r.u64("fingerprint")?,
                layout_hash: r.u64("layout_hash")?,
                page_bytes: r.u64("page_bytes")?,
                lease_pages_max: r.u32("lease_pages_max")?,
                api_url: r.text("api_url", API_URL_BYTES_MAX)?,
                shm: ShmOffer {
                    boot_id: r.array("boot_id")?,
                    socket: r.text("socket", SHM_SOCKET_BYTES_MAX)?,
                    nonce: r.array("pool nonce")?,
                },
            }),
            5 => Frame::Welcome,
            6 => Frame::DataOpen(DataOpen {
                opener: r.u64("opener")?,
                target: r.u64("target")?,
                lane: r.u16("lane")?,
                count: r.u64("count")?,
                token: r.array("token")?,
            }),
            7 => Frame::DataAccepted(r.array("token")?),
            16 => Frame::Heartbeat,
            17 => Frame::Prefill {
                id: r.id()?,
                left_ns: r.u64("left_ns")?,
                held_pages: r.u32("held_pages")?,
                prompt: r.u32s("prompt", PROMPT_TOKENS_MAX)?,
                payload: r.bytes("payload", PAYLOAD_BYTES_MAX)?,
            },
            18 => Frame::Granted {
                id: r.id()?,
                lease: r.u64("lease")?,
                epoch: r.u32("epoch")?,
                pages: r.u32_at_most("pages", LEASE_PAGES_MAX)?,
            },
            19 => Frame::Busy {
                id: r.id()?,
                retry_ms: r.u32("retry_ms")?,
            },
            20 => Frame::PrefillRefused {
                id: r.id()?,
                refusal: match r.u8("refusal")? {
                    1 => RefusedKind::Invalid,
                    2 => RefusedKind::Draining,
                    other => return Err(Malformed::Value("refusal", other.into())),
                },
                code: r.u16("code")?,
            },
            21 => Frame::Queued {
                id: r.id()?,
                ahead: r.u32("ahead")?,
            },
            22 => Frame::Watermark {
                id: r.id()?,
                lease: r.u64("lease")?,
                first: r.u32_at_most("first", LEASE_PAGES_MAX)?,
                checksums: r.u64s("checksums", CHECKSUMS_PER_FRAME_MAX)?,
            },
            23 => Frame::FirstToken {
                id: r.id()?,
                payload: r.bytes("payload", PAYLOAD_BYTES_MAX)?,
            },
            24 => Frame::Complete {
                id: r.id()?,
                lease: r.u64("lease")?,
                pages: r.u32_at_most("pages", LEASE_PAGES_MAX)?,
                tail_tokens: r.u32("tail_tokens")?,
                first: r.u32_at_most("first", LEASE_PAGES_MAX)?,
                checksums: r.u64s("checksums", CHECKSUMS_PER_FRAME_MAX)?,
            },
            25 => Frame::Aborted {
                id: r.id()?,
                reason: {
                    let number = r.u16("reason")?;
                    AbortReason::from_wire(number)
                        .ok_or(Malformed::Value("reason", number.into()))?
                },
            },
            26 => Frame::Commit {
                id: r.id()?,
                grantor: r.u64("grantor")?,
                lease: r.u64("lease")?,
                epoch: r.u32("epoch")?,
                pages: r.u32("pages")?,
            },
            27 => Frame::CommitAnswer {
                id: r.id()?,
                lease: r.u64("lease")?,
                outcome: {
                    let number = r.u8("outcome")?;
                    CommitOutcome::from_wire(number)
                        .ok_or(Malformed::Value("outcome", number.into()))?
                },
            },
            28 => Frame::Release {
                id: r.id()?,
                lease: r.u64("lease")?,
                epoch: r.u32("epoch")?,
            },
            29 => Frame::ReleaseAnswer {
                id: r.id()?,
                lease: r.u64("lease")?,
            },
            30 => Frame::Cancel { id: r.id()? },
            31 => {
                let grant_highest = r.u64("grant_highest")?;
                let count = r.count("live", RENEW_LIST_MAX, 28)?;
                let mut live = Vec::with_capacity(count);
                for _ in 0..count {
                    live.push((r.id()?, r.u64("lease")?));
                }
                Frame::Renew {
                    grant_highest,
                    live,
                }
            }
            32 => Frame::FenceQuery {
                id: r.id()?,
                lease: r.u64("lease")?,
            },
            33 => Frame::FenceAnswer {
                id: r.id()?,
                lease: r.u64("lease")?,
            },
            34 => Frame::App {
                kind: r.u16("kind")?,
                bytes: r.bytes("bytes", APP_BYTES_MAX)?,
            },
            35 => Frame::Bye {
                reason: r.refuse_reason()?,
            },
            36 => {
                let (id, lease) = (r.id()?, r.u64("lease")?);
                let first = r.u32_at_most("first", LEASE_PAGES_MAX)?;
                let count = r.count("places", PLACES_PER_FRAME_MAX, 12)?;
                let mut places = Vec::with_capacity(count);
                for _ in 0..count {
                    places.push((r.u32("page")?, r.u64("generation")?));
                }
                Frame::Places {
                    id,
                    lease,
                    first,
                    places,
                }
            }
            37 => Frame::RdmaAsk {
                pair: r.u8("pair")?,
                serial: r.u32("serial")?,
                endpoint: r.bytes("endpoint", RDMA_ENDPOINT_BYTES_MAX)?,
            },
            38 => Frame::RdmaAnswer {
                pair: r.u8("pair")?,
                serial: r.u32("serial")?,
                endpoint: r.bytes("endpoint", RDMA_ENDPOINT_BYTES_MAX)?,
                text: r.text("text", REASON_TEXT_BYTES_MAX)?,
            },
            other => return Err(Malformed::Kind(other)),
        };
        match r.rest.len() {
            0 => Ok(frame),
            left => Err(Malformed::Long(left)),
        }
    }
}

struct Writer<'a> {
    out: &'a mut Vec<u8>,
}

impl Writer<'_> {
    fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }
    fn u8(&mut self, value: u8) {
        self.out.push(value);
    }
    fn u16(&mut self, value: u16) {
        self.raw(&value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.raw(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.raw(&value.to_le_bytes());
    }
    fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.raw(bytes);
    }
    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }
    fn u32s(&mut self, values: &[u32]) {
        self.u32(values.len() as u32);
        self.out.reserve(values.len() * 4);
        for value in values {
            self.u32(*value);
        }
    }
    fn u64s(&mut self, values: &[u64]) {
        self.u32(values.len() as u32);
        for value in values {
            self.u64(*value);
        }
    }
    fn id(&mut self, id: AttemptId) {
        self.u64(id.request.incarnation);
        self.u64(id.request.counter);
        self.u32(id.attempt);
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, field: &'static str, bytes: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self
            .rest
            .split_at_checked(bytes)
            .ok_or(Malformed::Short(field))?;
        self.rest = rest;
        Ok(taken)
    }
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(Malformed::Short(field))?;
        self.rest = rest;
        Ok(*taken)
    }
    fn u8(&mut self, field: &'static str) -> Result<u8, Malformed> {
        Ok(self.array::<1>(field)?[0])
    }
    fn u16(&mut self, field: &'static str) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }
    fn u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }
    fn u64(&mut self, field: &'static str) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }
    fn u32_at_most(&mut self, field: &'static str, max: usize) -> Result<u32, Malformed> {
        let value = self.u32(field)?;
        if value as usize > max {
            return Err(Malformed::Cap(field, value.into()));
        }
        Ok(value)
    }
    /// A count of items of `item_bytes` each: within the cap and within what is there.
    fn count(
        &mut self,
        field: &'static str,
        max: usize,
        item_bytes: usize,
    ) -> Result<usize, Malformed> {
        let count = self.u32_at_most(field, max)? as usize;
        if self.rest.len() < count * item_bytes {
            return Err(Malformed::Short(field));
        }
        Ok(count)
    }
    fn bytes(&mut self, field: &'static str, max: usize) -> Result<Vec<u8>, Malformed> {
        let count = self.count(field, max, 1)?;
        Ok(self.take(field, count)?.to_vec())
    }
    fn text(&mut self, field: &'static str, max: usize) -> Result<String, Malformed> {
        let count = self.count(field, max, 1)?;
        let text = std::str::from_utf8(self.take(field, count)?);
        Ok(text.map_err(|_| Malformed::Text(field))?.to_owned())
    }
    fn u32s(&mut self, field: &'static str, max: usize) -> Result<Vec<u32>, Malformed> {
        let count = self.count(field, max, 4)?;
        (0..count).map(|_| self.u32(field)).collect()
    }
    fn u64s(&mut self, field: &'static str, max: usize) -> Result<Vec<u64>, Malformed> {
        let count = self.count(field, max, 8)?;
        (0..count).map(|_| self.u64(field)).collect()
    }
    fn id(&mut self) -> Result<AttemptId, Malformed> {
        Ok(AttemptId {
            request: RequestId {
                incarnation: self.u64("request")?,
                counter: self.u64("request")?,
            },
            attempt: self.u32("attempt")?,
        })
    }
    fn refuse_reason(&mut self) -> Result<RefuseReason, Malformed> {
        let number = self.u16("reason")?;
        RefuseReason::from_wire(number).ok_or(Malformed::Value("reason", number.into()))
    }
}
