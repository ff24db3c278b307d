//! The ledger as a shard shares it: the keeper of guards for the completion slab.

use super::Ledger;
use kvserve_runtime::GuardToken;
use kvserve_runtime::completion::GuardKeeper;
use std::cell::RefCell;

/// One shard's ledger behind shared references: the scheduler, the lease table and the
/// completion slab all hold an `Rc` of it.
///
/// The inner ledger is only borrowed for the length of one closure, and nothing that runs
/// inside may end a slot (drop a completion): that would come back here.
pub struct LedgerCell {
    ledger: RefCell<Ledger>,
}

impl LedgerCell {
    /// Wraps a ledger.
    pub fn new(ledger: Ledger) -> Self {
        LedgerCell {
            ledger: RefCell::new(ledger),
        }
    }

    /// Runs `act` on the ledger. It must neither call back into this cell nor drop a completion.
    pub fn with<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        act(&mut self.ledger.borrow_mut())
    }
}

impl GuardKeeper for LedgerCell {
    fn release(&self, guards: GuardToken) {
        self.ledger.borrow_mut().release(guards);
    }

    fn quarantine(&self, guards: GuardToken) {
        self.ledger.borrow_mut().quarantine(guards);
    }
}
