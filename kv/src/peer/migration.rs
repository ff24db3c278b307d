//! The waiter's end of a migration: news in order, and cancellation by `Drop`.

use super::hub::Inner;
use super::migrate::{AttemptCell, QUIET_LOOK};
use super::wait::Woken;
use crate::pool::PageId;
use crate::pull::{FailReason, MigrationError, PullEvent, Stage};
use crate::session::AttemptId;
use std::rc::Rc;
use std::time::Duration;

/// Beyond the request's deadline the waiter looks by itself: the machine has ended long before.
const WAITER_SLACK: Duration = Duration::from_secs(5);

/// News of a migration.
#[derive(Debug)]
pub enum MigrationEvent {
    /// The prefill node has reserved the pages.
    Granted,
    /// The first token, opaque.
    FirstToken(Vec<u8>),
    /// All pages are in place and checked; COMMIT is under way. The engine may read them;
    /// nothing computed from them may leave before `Committed`.
    Placed,
    /// COMMIT was answered OK. The pages, still in state Pulling, are the caller's: it calls
    /// `commit` or `adopt` on the ledger.
    Committed {
        /// The target pages that were given over.
        pages: Vec<PageId>,
    },
    /// It failed. The target pages go back to the ledger when the last post is quiet and the
    /// migration is dropped: until then whoever plans with them may do so.
    Failed(MigrationError),
}

/// A migration under way: news for its waiter. Dropping it cancels: nothing more is posted, the
/// lease is released after the last post is quiet, and only then the target pages are freed.
#[must_use = "dropping a migration cancels it"]
pub struct Migration {
    inner: Rc<Inner>,
    cell: Rc<AttemptCell>,
    over: Option<MigrationError>,
}

impl Migration {
    pub(super) fn new(inner: Rc<Inner>, cell: Rc<AttemptCell>) -> Self {
        Migration {
            inner,
            cell,
            over: None,
        }
    }

    /// Which attempt this is.
    pub fn id(&self) -> AttemptId {
        self.cell.id()
    }

    /// Pages in place and checked, of how many.
    pub fn progress(&self) -> (u32, u32) {
        self.cell.progress()
    }

    /// The next news. `Committed` and `Failed` are the last; asked again after them, it says
    /// `Failed` with reason `Cancelled`. Ends by the request's deadline.
    pub async fn next(&mut self) -> MigrationEvent {
        if let Some(error) = &self.over {
            return MigrationEvent::Failed(error.clone());
        }
        let give_up = self.cell.deadline.at().after(WAITER_SLACK);
        loop {
            let event = self.cell.news.borrow_mut().pop_front();
            if let Some(event) = event {
                match &event {
                    MigrationEvent::Granted
                    | MigrationEvent::FirstToken(_)
                    | MigrationEvent::Placed => {}
                    MigrationEvent::Committed { .. } | MigrationEvent::Failed(_) => {
                        let after = MigrationError::new(Stage::Commit, FailReason::Cancelled);
                        self.over = Some(after);
                    }
                }
                return event;
            }
            if self.inner.hub.now() >= give_up {
                // The machine's own limits have ended it before; this keeps P5 whatever happens.
                let error = MigrationError::new(Stage::Commit, FailReason::RequestDeadline);
                self.over = Some(error.clone());
                return MigrationEvent::Failed(error);
            }
            match self.cell.waiter_bell.wait(give_up).await {
                Woken::Rung | Woken::Deadline => {}
                Woken::NoSlot => self.inner.shard.sleep(QUIET_LOOK).await,
            }
        }
    }
}

impl Drop for Migration {
    fn drop(&mut self) {
        self.cell.waiter_gone.set(true);
        let unread = self.cell.news.take();
        for event in unread {
            free_committed(&self.inner, event);
        }
        self.cell.feed(&self.inner, PullEvent::Cancel);
        self.cell.free_targets(&self.inner);
    }
}

/// Pages of a commit that nobody took: nobody else knows them.
pub(super) fn free_committed(inner: &Inner, event: MigrationEvent) {
    match event {
        MigrationEvent::Committed { pages: unclaimed } => {
            if let Some(pages) = &inner.pages {
                pages.ledger.with(|ledger| ledger.free(&unclaimed));
            }
        }
        MigrationEvent::Granted
        | MigrationEvent::FirstToken(_)
        | MigrationEvent::Placed
        | MigrationEvent::Failed(_) => {}
    }
}
