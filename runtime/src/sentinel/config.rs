//! The sentinel's settings and their defaults.

use std::net::SocketAddr;
use std::time::Duration;

/// Settings of a [`super::Sentinel`]. The defaults are those of PROTOCOL section 9.
#[derive(Clone, Debug)]
pub struct SentinelConfig {
    /// Where to answer `/health`; `None`: nowhere. Port 0 takes a free one.
    pub health_listen: Option<SocketAddr>,
    /// Between looks while anything is active: how long a shard can sleep with runnable tasks.
    pub tick: Duration,
    /// Between looks while nothing is.
    pub idle_tick: Duration,
    /// Between pings of a shard that seems to sleep rightly.
    pub idle_ping: Duration,
    /// A shard that stands still for longer is unhealthy. 700 ms, plus at most 100 ms until an
    /// idle shard is pinged and a tick, is within the second that is promised.
    pub shard_still_max: Duration,
    /// A lane that has a job and stands still for longer is unhealthy.
    pub lane_still_max: Duration,
    /// A shard that stands still for longer ends the process.
    pub shard_abort_after: Duration,
    /// A lane that stands still for longer ends the process.
    pub lane_abort_after: Duration,
}

impl Default for SentinelConfig {
    fn default() -> Self {
        SentinelConfig {
            health_listen: None,
            tick: Duration::from_millis(5),
            idle_tick: Duration::from_millis(20),
            idle_ping: Duration::from_millis(100),
            shard_still_max: Duration::from_millis(700),
            lane_still_max: Duration::from_secs(1),
            shard_abort_after: Duration::from_secs(10),
            lane_abort_after: Duration::from_secs(10),
        }
    }
}
