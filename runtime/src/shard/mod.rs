//! Shards: one pinned executor a core, behind our own narrow face. The only door to glommio.
//!
//! ```text
//!   plain thread / other shard                    this shard (one thread)
//!   ─────────────────────────────                 ─────────────────────────────────────
//!   Notice::ring ──► Doorbell (stack + eventfd) ─► doorbell task ─► Seat ─► the waiting task
//!   Sentinel ──────► ShardRemote::ping ──────────► doorbell task ─► ShardPulse::turn
//! ```
//!
//! **No waker of an executor task ever lives on another thread**, with one exception: the
//! sentinel's last resort, stored once and woken by reference. Waits register their waker in a
//! shard-local [`Seat`]; other threads only push the seat's [`Notice`]. So task reference
//! counts are touched by one thread only, and a wake that races with the end of its task
//! cannot touch freed memory.
//!
//! It never runs anything heavy, and it makes no latency class under 1 ms: with a shorter
//! preempt timer this executor tends to park with runnable tasks (see `sentinel`).

mod bell;
mod event_fd;
mod face;
mod guard;
mod launch;
mod nudge;
pub mod poll_loop;
mod pulse;
mod timers;

pub use bell::{Notice, Seat};
pub use event_fd::EventFd;
pub use face::{DeadlinePassed, Shard, Task};
pub(crate) use guard::panic_message;
pub use guard::{AbortOnUnwind, abort_on_unwind, abort_process};
pub(crate) use launch::thread_name;
pub use launch::{ShardConfig, ShardHandle};
pub use pulse::{ShardPulse, ShardRemote};
