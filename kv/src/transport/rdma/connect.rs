//! Queue pairs from RESET to use: prepare, tell the other end, connect; and the side that serves.

use super::channel::{Channel, Remote};
use super::cut::{CutRule, REQUEST_BYTES_MAX};
use super::endpoint::{BadEndpoint, Endpoint, packet_number};
use super::transport::{CompletionShare, RdmaError, RdmaTransport};
use super::verbs::{PairLimits, PairPath, QueuePair, Responder};
use crate::transport::places::PeerPlaces;
use kvserve_runtime::ChannelId;

/// A queue pair that waits for the other end's answer. Dropping it destroys it.
pub struct Prepared {
    pair: QueuePair,
    share: CompletionShare,
    ours: Endpoint,
}

impl Prepared {
    /// What to tell the other end.
    pub fn endpoint(&self) -> &Endpoint {
        &self.ours
    }
}

/// A queue pair on which a peer reads from us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServedId {
    place: usize,
    pair: u32,
}

pub(super) struct Served {
    pair: QueuePair,
    broken: bool,
}

impl Served {
    pub(super) fn note_event(&mut self, pair: u32) {
        self.broken |= self.pair.number() == pair;
    }
}

impl RdmaTransport {
    fn check_usable(&self) -> Result<(), RdmaError> {
        if let Some(code) = self.broken {
            return Err(RdmaError::Broken(code));
        }
        let port = self.device.port(self.choice.port)?;
        match port.active {
            true => Ok(()),
            false => Err(RdmaError::PortDown(
                self.choice.device.clone(),
                self.choice.port,
            )),
        }
    }

    fn new_pair(&self, limits: PairLimits, serves: bool) -> Result<QueuePair, RdmaError> {
        let mut pair = QueuePair::new(&self.device, &self.queue, &self.region, limits)?;
        pair.init(self.choice.port, serves)?;
        Ok(pair)
    }

    fn endpoint_of(&self, pair: &QueuePair, psn: u32, serves: bool) -> Endpoint {
        let at_once = self.config.reads_at_once;
        Endpoint {
            ethernet: self.choice.ethernet,
            mtu: self.mtu as u8,
            reads_asked: at_once.min(self.limits.reads_asked_max).max(1),
            reads_answered: at_once.min(self.limits.reads_answered_max).max(1),
            lid: self.choice.lid,
            pair: pair.number(),
            psn: packet_number(psn),
            gid: self.choice.gid,
            key: if serves { self.region.remote_key() } else { 0 },
            pages: if serves { self.pool.pages() as u32 } else { 0 },
            base: if serves { self.region.base() } else { 0 },
            stride: self.pool.page_stride() as u64,
        }
    }

    fn path_to(&self, theirs: &Endpoint, mtu: u32) -> PairPath {
        PairPath {
            port: self.choice.port,
            gid_index: self.choice.gid_index,
            global: self.choice.ethernet,
            gid: theirs.gid,
            lid: theirs.lid,
            pair: theirs.pair,
            psn: theirs.psn,
            mtu,
            traffic_class: self.config.traffic_class,
        }
    }

    /// Work requests of one queue pair, and one for the marker.
    fn depth(&self) -> u32 {
        let most = self.limits.queue_max.saturating_sub(1).max(1);
        self.config.queue_depth.min(most)
    }

    fn scatter(&self) -> u32 {
        self.config.scatter_max.min(self.limits.scatter_max).max(1)
    }

    /// Makes a queue pair to pull over. `random` becomes its first packet number.
    ///
    /// # Errors
    /// [`RdmaError`]; a completion queue without room for it is refused here, so that it can
    /// never be overrun.
    pub fn prepare(&mut self, random: u32) -> Result<Prepared, RdmaError> {
        self.check_usable()?;
        let share = self.credit.take(self.depth() + 1)?;
        let limits = PairLimits {
            requests: self.depth() + 1,
            scatter: self.scatter(),
        };
        let pair = self.new_pair(limits, false)?;
        let ours = self.endpoint_of(&pair, random, false);
        Ok(Prepared { pair, share, ours })
    }

    /// Connects a prepared queue pair with the end that serves, as `channel`. Reads on it are of
    /// the leases that `places` knows.
    ///
    /// # Errors
    /// [`RdmaError`]; the queue pair is gone then.
    pub fn connect(
        &mut self,
        channel: ChannelId,
        prepared: Prepared,
        theirs: &Endpoint,
        places: &PeerPlaces,
    ) -> Result<(), RdmaError> {
        let Prepared {
            mut pair,
            share,
            ours,
        } = prepared;
        let agreed = Endpoint::agree(&ours, theirs).map_err(RdmaError::Endpoint)?;
        if theirs.stride < self.page_bytes as u64 {
            let bad = BadEndpoint::Stride(theirs.stride, self.page_bytes);
            return Err(RdmaError::Endpoint(bad));
        }
        let index = channel.index as usize;
        if self.channels.len() <= index {
            self.channels.resize_with(index + 1, || None);
            self.numbers.resize(index + 1, 0);
        }
        if self.channels[index].is_some() {
            return Err(RdmaError::ChannelInUse(channel.index));
        }
        let responder = Responder {
            reads_max: agreed.answers,
            min_rnr_timer: self.config.min_rnr_timer,
        };
        pair.ready_to_receive(&self.path_to(theirs, agreed.mtu), responder)?;
        let retries = (
            self.config.timeout,
            self.config.retry_cnt,
            self.config.rnr_retry,
        );
        pair.ready_to_send(ours.psn, agreed.asks, retries)?;
        let remote = Remote {
            key: theirs.key,
            base: theirs.base,
            pages: theirs.pages as usize,
            rule: CutRule {
                page_bytes: self.page_bytes,
                stride: self.pool.page_stride(),
                stride_remote: theirs.stride as usize,
                scatter_max: self.scatter() as usize,
                bytes_max: REQUEST_BYTES_MAX.min(self.message_bytes_max as usize),
            },
            signal_every: self.config.signal_every.min(self.depth()) as usize,
        };
        let depth = self.depth() as usize;
        let first = self.numbers[index];
        let opened = Channel::new(channel, pair, remote, places.clone(), depth, first, share);
        self.channels[index] = Some(Box::new(opened));
        self.live.push(channel.index);
        Ok(())
    }

    /// Makes a queue pair over which the peer at `theirs` may read this pool. `random` becomes its
    /// first packet number. Gives what to tell it.
    ///
    /// # Errors
    /// [`RdmaError`].
    pub fn serve(
        &mut self,
        theirs: &Endpoint,
        random: u32,
    ) -> Result<(ServedId, Endpoint), RdmaError> {
        self.check_usable()?;
        debug_assert!(self.access.serves, "the pool is registered for reading");
        let limits = PairLimits {
            requests: 1,
            scatter: 1,
        };
        let mut pair = self.new_pair(limits, true)?;
        let ours = self.endpoint_of(&pair, random, true);
        let agreed = Endpoint::agree(&ours, theirs).map_err(RdmaError::Endpoint)?;
        let responder = Responder {
            reads_max: agreed.answers,
            min_rnr_timer: self.config.min_rnr_timer,
        };
        pair.ready_to_receive(&self.path_to(theirs, agreed.mtu), responder)?;
        let id = self.served.iter().position(Option::is_none);
        let place = id.unwrap_or(self.served.len());
        if place == self.served.len() {
            self.served.push(None);
        }
        let id = ServedId {
            place,
            pair: pair.number(),
        };
        self.served[place] = Some(Served {
            pair,
            broken: false,
        });
        Ok((id, ours))
    }

    /// Whether a serving queue pair stands, as far as this side can tell.
    pub fn serves(&self, id: ServedId) -> bool {
        let served = self.served.get(id.place).and_then(Option::as_ref);
        served.is_some_and(|served| served.pair.number() == id.pair && !served.broken)
    }

    /// Ends a serving queue pair: on return the peer can read over it no more (PROTOCOL S3). A
    /// number that is not known (any more) is passed over.
    pub fn stop_serving(&mut self, id: ServedId) {
        let known = self.served.get_mut(id.place);
        let Some(known) = known.filter(|served| {
            let served = served.as_ref();
            served.is_some_and(|served| served.pair.number() == id.pair)
        }) else {
            return;
        };
        if let Some(mut served) = known.take() {
            // ERR already ends what the card answers; a queue pair that then refuses to go costs
            // its memory, which it only ever reads.
            let ended = served.pair.to_error();
            if served.pair.destroy().is_err() || ended.is_err() {
                self.counters.pairs_stuck += 1;
            }
        }
    }
}
