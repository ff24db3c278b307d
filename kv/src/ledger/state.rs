//! The states of a page and every event on every state, without a wildcard.

use crate::pool::PageId;
use std::fmt;

/// What a page is used for (PROTOCOL C1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Nobody owns or names it; only such a page is handed out.
    Free,
    /// An engine writes keys and values into it.
    Building,
    /// Whole; read by engine steps and prefix hits.
    Ready,
    /// Granted to a peer, that may read it.
    Leased,
    /// A migration writes into it; nothing in it is proven yet.
    Pulling,
    /// Its owner gave it up, an operation still names it.
    Stopping,
    /// It could not be proven quiet; out of use for the life of the process.
    Quarantined,
}

impl PageState {
    /// Number of states.
    pub const COUNT: usize = 7;

    /// Every state, in the order of [`PageState::index`].
    pub const ALL: [PageState; Self::COUNT] = [
        PageState::Free,
        PageState::Building,
        PageState::Ready,
        PageState::Leased,
        PageState::Pulling,
        PageState::Stopping,
        PageState::Quarantined,
    ];

    /// A dense number below [`PageState::COUNT`].
    pub fn index(self) -> usize {
        match self {
            PageState::Free => 0,
            PageState::Building => 1,
            PageState::Ready => 2,
            PageState::Leased => 3,
            PageState::Pulling => 4,
            PageState::Stopping => 5,
            PageState::Quarantined => 6,
        }
    }

    /// A short stable label for metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            PageState::Free => "free",
            PageState::Building => "building",
            PageState::Ready => "ready",
            PageState::Leased => "leased",
            PageState::Pulling => "pulling",
            PageState::Stopping => "stopping",
            PageState::Quarantined => "quarantined",
        }
    }
}

/// What a page is allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AllocateAs {
    /// An engine of this node will write it.
    Building,
    /// A migration will write it.
    Pulling,
}

/// What can happen to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageEvent {
    /// It is handed out.
    Allocate(AllocateAs),
    /// The engine has filled it.
    MarkReady,
    /// It is granted to a peer.
    Lease,
    /// The lease ended and its owner keeps the page.
    Unlease,
    /// The migration that wrote it was proven whole (COMMIT OK).
    Commit,
    /// As `Commit`, for the tail page into which this node goes on writing.
    Adopt,
    /// Its owner gives it up; `named`: an operation still names it.
    Free {
        /// Whether a guard names it.
        named: bool,
    },
    /// The last guard that named it ended.
    LastGuardEnded,
    /// A guard that named it could not be proven quiet.
    Quarantine,
}

/// An event that the page's state does not allow: a bug of the caller, never a peer's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IllegalEvent {
    /// Which page.
    pub page: PageId,
    /// Its state.
    pub state: PageState,
    /// What was asked.
    pub event: PageEvent,
}

impl fmt::Display for IllegalEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "page {} is {}: the event {:?} is not allowed there",
            self.page.0,
            self.state.label(),
            self.event
        )
    }
}

impl std::error::Error for IllegalEvent {}

/// The state after `event`, or `None` when it is not allowed in `state`.
pub(super) fn next(state: PageState, event: PageEvent) -> Option<PageState> {
    use PageState::{Building, Free, Leased, Pulling, Quarantined, Ready, Stopping};
    match event {
        PageEvent::Allocate(what) => match state {
            Free => Some(match what {
                AllocateAs::Building => Building,
                AllocateAs::Pulling => Pulling,
            }),
            Building | Ready | Leased | Pulling | Stopping | Quarantined => None,
        },
        PageEvent::MarkReady => match state {
            Building => Some(Ready),
            Free | Ready | Leased | Pulling | Stopping | Quarantined => None,
        },
        // A prompt's pages are reserved before the grant (L1), so a lease also starts on pages
        // that are still being built; the watermark says what of it may be read.
        PageEvent::Lease => match state {
            Building | Ready => Some(Leased),
            Free | Leased | Pulling | Stopping | Quarantined => None,
        },
        PageEvent::Unlease => match state {
            Leased => Some(Ready),
            Free | Building | Ready | Pulling | Stopping | Quarantined => None,
        },
        PageEvent::Commit => match state {
            Pulling => Some(Ready),
            Free | Building | Ready | Leased | Stopping | Quarantined => None,
        },
        PageEvent::Adopt => match state {
            Pulling => Some(Building),
            Free | Building | Ready | Leased | Stopping | Quarantined => None,
        },
        PageEvent::Free { named } => match state {
            Building | Ready | Leased | Pulling => Some(if named { Stopping } else { Free }),
            // Its owner may learn of the quarantine later than the ledger, and gives up what it
            // owned in the ordinary way.
            Quarantined => Some(Quarantined),
            Free | Stopping => None,
        },
        PageEvent::LastGuardEnded => match state {
            Stopping => Some(Free),
            Building | Ready | Leased | Pulling | Quarantined => Some(state),
            // A guard never names a Free page.
            Free => None,
        },
        PageEvent::Quarantine => match state {
            Building | Ready | Leased | Pulling | Stopping | Quarantined => Some(Quarantined),
            Free => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_indices_are_dense_and_distinct() {
        for (index, state) in PageState::ALL.into_iter().enumerate() {
            assert_eq!(state.index(), index);
            for other in &PageState::ALL[index + 1..] {
                assert_ne!(state.label(), other.label());
            }
        }
    }

    #[test]
    fn quarantined_is_final_and_only_free_is_handed_out() {
        for state in PageState::ALL {
            for what in [AllocateAs::Building, AllocateAs::Pulling] {
                let after = next(state, PageEvent::Allocate(what));
                assert_eq!(after.is_some(), state == PageState::Free, "{state:?}");
            }
        }
        let events = [
            PageEvent::MarkReady,
            PageEvent::Lease,
            PageEvent::Unlease,
            PageEvent::Commit,
            PageEvent::Adopt,
            PageEvent::Free { named: true },
            PageEvent::Free { named: false },
            PageEvent::LastGuardEnded,
            PageEvent::Quarantine,
        ];
        for event in events {
            let after = next(PageState::Quarantined, event);
            assert!(
                matches!(after, None | Some(PageState::Quarantined)),
                "{event:?} leads out of quarantine"
            );
            assert_eq!(
                next(PageState::Free, event),
                None,
                "{event:?} on a free page"
            );
        }
    }

    #[test]
    fn an_unproven_page_is_never_ready_without_commit() {
        for event in [PageEvent::MarkReady, PageEvent::Lease, PageEvent::Unlease] {
            assert_eq!(next(PageState::Pulling, event), None);
        }
        assert_eq!(
            next(PageState::Pulling, PageEvent::Commit),
            Some(PageState::Ready)
        );
    }
}
