//! The simulator's transport: a network card of plain data structures, stepped by its owner.
//!
//! Owns: the memory of simulated pools, the links between them, the reads under way, and the
//! faults that were armed on a link. It copies real bytes, one page a step.
//! Never does: look at a clock, draw a random number, decide when a step happens.
//! Asserts: at *each touch* of a page it asks the [`Witness`] of the page's node whether the
//! operation may touch it then (invariants I2, I10, I12).
//!
//! ```text
//!   node ── SimTransport (Transport) ──post──▶ Fabric ◀── step(link), answer(link) ── simulator
//!                        ◀─completions──         │
//!                                                └─ Witness::{write, read} at each page
//! ```
//! Three kinds of links: *served* ones, where the other side's software answers each read (as TCP
//! does), *one-sided* ones, where its memory is read behind its back until the link is destroyed
//! (as RDMA does), and *mapped* ones, where the reader copies out of a map that nobody can take
//! away, and the pages' generations tell what was reused (as over shared memory).

mod fabric;
mod link;
mod memory;
mod transport;

pub use fabric::{Ask, Fabric, READS_IN_FLIGHT_MAX, SourceTouch, Stepped, Witness};
pub use link::{Flush, LinkId, LinkKind, OpFault};
pub use memory::SimMemory;
pub use transport::SimTransport;

#[cfg(test)]
mod tests;
