//! A verbs library without hardware: what the RDMA transport's tests run on.
//!
//! Two devices are joined by a [`Wire`], made per test, so that parallel tests never meet. A thread
//! per wire is the two cards: it moves bytes, completes work, lets timers run out. Faults are
//! made by the wire's methods. Statuses and their order are those seen on soft-RoCE (Linux 6.12):
//!
//! | fault | here | first error | the rest |
//! |---|---|---|---|
//! | peer killed, exits, destroys its queue pair, moves it to ERR | [`Wire::kill`], the verbs | RETRY_EXC (12) after (retry_cnt + 1) x timer x 1.15 | flush (5) |
//! | the same with `retry_cnt` 7 or `timeout` 0 | the same | none, ever | - |
//! | memory region deregistered, wrong key, out of range | the verbs | REM_ACCESS (10) at once | flush; the peer's queue pair in ERR, its receives flushed, event QP_ACCESS_ERR there |
//! | link down, own or the peer's | [`Wire::link_down`] | none: only flush (5), at once | event PORT_ERR on both |
//! | all packets lost | [`Wire::lose_all`] | RETRY_EXC (12) after the timers | flush |
//! | peer frozen | nothing to do | none: READs succeed | - |
//! | own queue pair to ERR | the verbs | flush (5) of all, in order | - |
//! | own queue pair destroyed with work outstanding | the verbs | none: those completions never come | - |
//! | post on a queue pair in ERR | the verbs | rc 0, then flush (5) | - |
//!
//! Beyond what soft-RoCE shows by itself: [`Rule`]s for one device's work requests (an error in
//! the middle of an unsignalled run, a lost or a doubled completion), posts that get `ENOMEM`,
//! flushes that never come, a destroy that fails, a device that dies.
//!
//! Time: an acknowledgement timer is [`TIME_SCALE`] times shorter than the verbs' 4.096 µs x
//! 2^timeout, so that 1.3 s are 13 ms.
//!
//! ```text
//!  exports.rs  the C face: `ibv_*`                       device.rs  what those pointers point at
//!  wire.rs     the control face, the thread              card.rs    what a card does with one request
//! ```

mod card;
mod device;
mod exports;
mod wire;

pub use exports::verbs;
pub use wire::{Rule, TIME_SCALE, Wire, WireCounters, last_completion_ns};
