//! The index of the prefix cache: which whole page of tokens follows which (PROTOCOL C2).
//!
//! ```text
//!   salt "" ──▶ page 7 (tokens 0..16) ──▶ page 3 (16..32) ──▶ page 9 (32..48)
//!                                    └──▶ page 5 (16..32, other tokens)
//!   salt "a" ─▶ page 2 (tokens 0..16: the same tokens, never the same entry)
//! ```
//! Sans-IO and without a page's bytes: it owns the tree, the hash table over it and the queue of
//! entries that nobody uses. It never decides who owns a page or when one may be evicted: that
//! is [`crate::ledger::Ledger`], the only user. An entry's place is its page's number, so the
//! memory is bounded by the pool, and neither looking up nor inserting allocates.
//!
//! What it keeps: a hit has compared the parent entry, the salt and every token id; the hash
//! only finds candidates. An entry is found only while its parent is there.

mod index;
mod salts;

#[cfg(test)]
mod tests;

pub(crate) use index::PrefixIndex;
pub use index::{Inserted, PrefixConfig};
pub use salts::CACHE_SALT_BYTES_MAX;
