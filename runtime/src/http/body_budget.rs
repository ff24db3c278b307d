//! What all request bodies may hold at once.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// 32 bodies of the default limit; a prompt of a full context is well below 1 MiB.
const PROCESS_BYTES_MAX: u64 = 256 * 1024 * 1024;

static OF_PROCESS: OnceLock<BodyBudget> = OnceLock::new();

/// Bytes of request bodies in memory, over all listeners that share a clone of it. A body counts
/// from its first byte until the handler lets go of it.
#[derive(Clone)]
pub struct BodyBudget(Arc<Held>);

struct Held {
    bytes: AtomicU64,
    bytes_max: u64,
}

impl BodyBudget {
    /// A budget of which nothing is used.
    pub fn new(bytes_max: u64) -> Self {
        BodyBudget(Arc::new(Held {
            bytes: AtomicU64::new(0),
            bytes_max,
        }))
    }

    /// The one that all listeners of the process share by default: 256 MiB.
    pub fn of_process() -> Self {
        let budget = OF_PROCESS.get_or_init(|| BodyBudget::new(PROCESS_BYTES_MAX));
        budget.clone()
    }

    /// The limit, bytes.
    pub fn bytes_max(&self) -> u64 {
        self.0.bytes_max
    }

    /// Bytes held now.
    pub fn bytes_held(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// A share of nothing, which can grow.
    pub(super) fn share(&self) -> BodyShare {
        BodyShare {
            budget: self.clone(),
            bytes: 0,
        }
    }
}

/// Two budgets are equal when they are one and the same.
impl PartialEq for BodyBudget {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for BodyBudget {}

impl fmt::Debug for BodyBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "BodyBudget({} of {})",
            self.bytes_held(),
            self.bytes_max()
        )
    }
}

/// One body's part of a budget; given back when dropped.
pub(super) struct BodyShare {
    budget: BodyBudget,
    bytes: u64,
}

impl BodyShare {
    /// Takes `more` bytes; `false`, and nothing taken, when they are not there.
    pub(super) fn grow(&mut self, more: u64) -> bool {
        let held = &self.budget.0;
        let before = held.bytes.fetch_add(more, Ordering::Relaxed);
        if before + more > held.bytes_max {
            held.bytes.fetch_sub(more, Ordering::Relaxed);
            return false;
        }
        self.bytes += more;
        true
    }

    pub(super) fn bytes_max(&self) -> u64 {
        self.budget.bytes_max()
    }

    /// This share, leaving one of nothing in its place.
    pub(super) fn take(&mut self) -> BodyShare {
        let rest = self.budget.share();
        std::mem::replace(self, rest)
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        self.budget.0.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_take_no_more_than_there_is_and_give_all_back() {
        let budget = BodyBudget::new(100);
        let (mut one, mut two) = (budget.share(), budget.share());
        assert!(one.grow(60) && two.grow(40) && !two.grow(1));
        let moved = one.take();
        drop(one);
        assert_eq!(budget.bytes_held(), 100);
        drop(moved);
        assert!(two.grow(60));
        drop(two);
        assert_eq!(budget.bytes_held(), 0);
    }
}
