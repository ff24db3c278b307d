//! The sentinel: one plain thread outside all executors that sees whether shards and engine
//! lanes move.
//!
//! It does four things: it **pings** shards that may have work and do not turn (an executor
//! can park with runnable tasks, see below), it measures for how long each shard and lane
//! stands **still**, it answers **`/health`** on its own listener from atomics, and it
//! **aborts** the process when one stands still beyond a hard limit.
//!
//! ```text
//!   every 5 ms while anything is active, else every 40 ms:
//!     shard:  turns moved? ── yes ─► alive
//!                 │ no
//!             pinged, not answered ─► still += one period, ping again   ─► 503 ─► abort
//!             used CPU since the last look, or too few quiet answers
//!             since it did, or the last ping is old ─► ping
//!     lane:   has jobs and its progress does not move ─► still += one period
//! ```
//!
//! Why pings: if the executor's preempt timer fires between its arming and the first task, it
//! takes "nothing ran" for "nothing to run" and parks, with tasks runnable, until unrelated
//! I/O. Only a wake from another thread cures it. A shard that sleeps rightly uses no CPU, and
//! is then pinged only at the slow rate, so an idle process costs well under 1 % of a CPU.
//!
//! Each tick credits at most one period, whatever the clock says: a process that was frozen
//! (SIGSTOP, a paused VM) and goes on has not stood still (PROTOCOL S4). Waiting for a peer is
//! no standing still: such a shard answers its pings, and such a lane has no job. A process whose
//! threads want to run and get no CPU is told as unhealthy, but not ended.

mod config;
mod health;
mod listener;
mod starved;
mod thread;
mod watch;

pub use config::SentinelConfig;
pub use health::{HealthView, Standing, StandingKind};
pub use thread::Sentinel;
