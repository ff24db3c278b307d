//! Settings of the RDMA transport, and which are refused.

use std::fmt;

/// READs on their way on one queue pair's own queue. 128 x 1 MiB is far above the product of
/// bandwidth and delay of a 400 Gbit/s link (50 GB/s x 20 µs = 1 MiB).
const QUEUE_DEPTH: u32 = 128;

/// Entries of the shard's completion queue: room for 60 queue pairs of [`QUEUE_DEPTH`] + 1.
const COMPLETIONS: u32 = 8192;

/// A completion is asked for at least every so many work requests: 16 of them make the cost of
/// one (some 100 ns) small, and a queue of 128 is still closed eight times over.
const SIGNAL_EVERY: u32 = 16;

/// Scatter entries asked for: what one READ of 1 MiB needs for scattered pages of 64 KiB.
const SCATTER: u32 = 16;

/// Settings of an RDMA transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaConfig {
    /// The device to use; `None`: the best one, see [`super::address`].
    pub device: Option<String>,
    /// The port to use; `None`: the first that is usable.
    pub port: Option<u8>,
    /// Acknowledgement timer: 4.096 µs x 2^this. 16 is 268 ms.
    pub timeout: u8,
    /// How often a lost packet is sent again. With `timeout` 16, 3 makes some 1.3 s.
    pub retry_cnt: u8,
    /// How often a receiver that is not ready is asked again.
    pub rnr_retry: u8,
    /// What our own end asks of senders when it is not ready; 12 is 0.64 ms.
    pub min_rnr_timer: u8,
    /// Work requests on one queue pair.
    pub queue_depth: u32,
    /// Entries of the completion queue.
    pub completions: u32,
    /// A completion is asked for at least every so many work requests.
    pub signal_every: u32,
    /// Scatter entries of one work request at most.
    pub scatter_max: u32,
    /// READs at once on one queue pair, asked and answered.
    pub reads_at_once: u8,
    /// The longest packet, as `ibv_mtu` (5: 4,096 bytes).
    pub mtu_max: u32,
    /// Queue pairs per peer and direction.
    pub pairs_per_peer: usize,
    /// Traffic class of packets on RoCE.
    pub traffic_class: u8,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        RdmaConfig {
            device: None,
            port: None,
            timeout: 16,
            retry_cnt: 3,
            rnr_retry: 6,
            min_rnr_timer: 12,
            queue_depth: QUEUE_DEPTH,
            completions: COMPLETIONS,
            signal_every: SIGNAL_EVERY,
            scatter_max: SCATTER,
            reads_at_once: 16,
            mtu_max: 5,
            pairs_per_peer: 2,
            traffic_class: 0,
        }
    }
}

/// A setting that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadSetting {
    /// `retry_cnt` beyond 6: 7 is "for ever" on soft-RoCE.
    RetryCnt(u8),
    /// `rnr_retry` beyond 6: 7 is "for ever" by the InfiniBand specification.
    RnrRetry(u8),
    /// `timeout` 0 is "never"; beyond 31 it does not exist.
    Timeout(u8),
    /// A number that must not be zero, or is too large: name, value, most.
    Range(&'static str, u32, u32),
    /// A completion queue that one queue pair alone could overrun: entries, needed.
    Completions(u32, u32),
}

impl fmt::Display for BadSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BadSetting::RetryCnt(value) => write!(
                f,
                "retry_cnt {value} is refused: 7 means \"for ever\" on some devices, so a read of \
                 a dead peer would never end; use 1 to 6"
            ),
            BadSetting::RnrRetry(value) => write!(
                f,
                "rnr_retry {value} is refused: 7 means \"for ever\", so a read of a peer that is \
                 not ready would never end; use 0 to 6"
            ),
            BadSetting::Timeout(value) => write!(
                f,
                "timeout {value} is refused: 0 means \"never\" and 31 (2.4 hours) is the largest; \
                 use 14 to 18 (67 ms to 1 s)"
            ),
            BadSetting::Range(name, value, most) => {
                write!(f, "{name} {value} is refused; use 1 to {most}")
            }
            BadSetting::Completions(entries, needed) => write!(
                f,
                "a completion queue of {entries} entries could be overrun by one queue pair, \
                 which needs {needed}; make it larger or the queue shorter"
            ),
        }
    }
}

impl std::error::Error for BadSetting {}

impl RdmaConfig {
    /// Refuses what could mean "for ever", and what cannot work.
    ///
    /// # Errors
    /// The first setting that is refused, with what to use.
    pub fn check(&self) -> Result<(), BadSetting> {
        if self.retry_cnt > 6 {
            return Err(BadSetting::RetryCnt(self.retry_cnt));
        }
        if self.rnr_retry > 6 {
            return Err(BadSetting::RnrRetry(self.rnr_retry));
        }
        if self.timeout == 0 || self.timeout > 31 {
            return Err(BadSetting::Timeout(self.timeout));
        }
        let ranges = [
            ("queue_depth", self.queue_depth, 16_384),
            ("completions", self.completions, 1 << 22),
            ("signal_every", self.signal_every, self.queue_depth),
            ("scatter_max", self.scatter_max, 256),
            ("reads_at_once", u32::from(self.reads_at_once), 255),
            ("mtu_max", self.mtu_max, 5),
            ("pairs_per_peer", self.pairs_per_peer as u32, 8),
        ];
        for (name, value, most) in ranges {
            if value == 0 || value > most {
                return Err(BadSetting::Range(name, value, most));
            }
        }
        let needed = self.queue_depth + 1;
        if self.completions < needed {
            return Err(BadSetting::Completions(self.completions, needed));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault 8.
    #[test]
    fn settings_that_mean_for_ever_are_refused_with_what_to_do() {
        let good = RdmaConfig::default();
        assert_eq!(good.check(), Ok(()));
        let cases = [
            (
                RdmaConfig {
                    retry_cnt: 7,
                    ..good.clone()
                },
                BadSetting::RetryCnt(7),
            ),
            (
                RdmaConfig {
                    rnr_retry: 7,
                    ..good.clone()
                },
                BadSetting::RnrRetry(7),
            ),
            (
                RdmaConfig {
                    timeout: 0,
                    ..good.clone()
                },
                BadSetting::Timeout(0),
            ),
            (
                RdmaConfig {
                    queue_depth: 0,
                    ..good.clone()
                },
                BadSetting::Range("queue_depth", 0, 16_384),
            ),
            (
                RdmaConfig {
                    completions: 128,
                    ..good
                },
                BadSetting::Completions(128, 129),
            ),
        ];
        for (config, refusal) in cases {
            assert_eq!(config.check(), Err(refusal));
            assert!(refusal.to_string().contains("use") || refusal.to_string().contains("make"));
        }
    }
}
