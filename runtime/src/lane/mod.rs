//! Engine lanes: pinned plain threads that take a job, run it, and give a completion.
//!
//! ```text
//!   shard: Lane::submit(work, job) ──bounded──► lane thread: worker(&mut job)
//!   shard: Lane::poll ◄─ Completed{work} ◄──bounded + eventfd── (in the order of the jobs)
//!   shard: Lane::collect ◄─ job
//! ```
//!
//! What is heavy runs here, beside the shards and never on them. A lane is a completion source
//! with one channel at a time. A job that runs cannot be stopped: a killed lane is `Draining`
//! until it ends; jobs that had not begun then end with `ECANCELED` and are not run. A panic
//! in a job ends the process. The sentinel watches the lane's [`LanePulse`].

mod pulse;
mod source;
mod thread;

pub use pulse::LanePulse;
pub use source::{Lane, LaneRefusal};
pub use thread::{LaneConfig, LaneOutcome};
