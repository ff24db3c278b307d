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
    /// One more owner (a sequence, a lease, the prefix cache) for a page that is whole.
    Share,
    /// A lease ended and its owner keeps the page; `leased`: another lease of it goes on.
    Unlease {
        /// Whether another lease holds the page.
        leased: bool,
    },
    /// A lease ended and gives the page up with it.
    EndLease {
        /// Whether anybody else owns the page.
        shared: bool,
        /// Whether another lease holds the page.
        leased: bool,
        /// Whether a guard names it.
        named: bool,
    },
    /// The migration that wrote it was proven whole (COMMIT OK).
    Commit,
    /// As `Commit`, for the tail page into which this node goes on writing.
    Adopt,
    /// An owner gives it up.
    Free {
        /// Whether anybody else owns the page.
        shared: bool,
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
        // A leased page becomes whole while its peer already waits for it.
        PageEvent::MarkReady => match state {
            Building => Some(Ready),
            Leased => Some(Leased),
            Free | Ready | Pulling | Stopping | Quarantined => None,
        },
        // Who shares a page must know that nobody writes it any more, and that what is in it is
        // proven (PROTOCOL C2): never a page of a migration before COMMIT's OK.
        PageEvent::Share => match state {
            Ready | Leased => Some(state),
            Free | Building | Pulling | Stopping | Quarantined => None,
        },
        // A prompt's pages are reserved before the grant (L1), so a lease also starts on pages
        // that are still being built; the watermark says what of it may be read.
        PageEvent::Lease => match state {
            Building | Ready | Leased => Some(Leased),
            Free | Pulling | Stopping | Quarantined => None,
        },
        PageEvent::Unlease { leased } => match state {
            Leased => Some(if leased { Leased } else { Ready }),
            Free | Building | Ready | Pulling | Stopping | Quarantined => None,
        },
        PageEvent::EndLease {
            shared,
            leased,
            named,
        } => match state {
            Leased => Some(match (shared, leased, named) {
                (true, true, _) => Leased,
                (true, false, _) => Ready,
                (false, _, true) => Stopping,
                (false, _, false) => Free,
            }),
            Quarantined => Some(Quarantined),
            Free | Building | Ready | Pulling | Stopping => None,
        },
        PageEvent::Commit => match state {
            Pulling => Some(Ready),
            Free | Building | Ready | Leased | Stopping | Quarantined => None,
        },
        PageEvent::Adopt => match state {
            Pulling => Some(Building),
            Free | Building | Ready | Leased | Stopping | Quarantined => None,
        },
        PageEvent::Free { shared, named } => match state {
            // A page has more than one owner only once it is whole.
            Ready | Leased if shared => Some(state),
            Building | Ready | Pulling => Some(if named { Stopping } else { Free }),
            // The last owner of a leased page is its lease: `EndLease`.
            Leased => None,
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

    fn all_events() -> Vec<PageEvent> {
        let mut events = vec![
            PageEvent::Allocate(AllocateAs::Building),
            PageEvent::Allocate(AllocateAs::Pulling),
            PageEvent::MarkReady,
            PageEvent::Lease,
            PageEvent::Share,
            PageEvent::Commit,
            PageEvent::Adopt,
            PageEvent::LastGuardEnded,
            PageEvent::Quarantine,
        ];
        let flags = [false, true];
        for leased in flags {
            events.push(PageEvent::Unlease { leased });
            for named in flags {
                events.push(PageEvent::Free {
                    shared: leased,
                    named,
                });
                for shared in flags {
                    events.push(PageEvent::EndLease {
                        shared,
                        leased,
                        named,
                    });
                }
            }
        }
        events
    }

    /// Every state with every event: what is left out is not allowed.
    #[test]
    fn every_event_in_every_state() {
        use PageState::{Building, Free, Leased, Pulling, Quarantined, Ready, Stopping};
        let expected = |state: PageState, event: PageEvent| match event {
            PageEvent::Allocate(what) => (state == Free).then_some(match what {
                AllocateAs::Building => Building,
                AllocateAs::Pulling => Pulling,
            }),
            PageEvent::MarkReady if state == Building => Some(Ready),
            PageEvent::MarkReady => (state == Leased).then_some(Leased),
            PageEvent::Lease => [Building, Ready, Leased].contains(&state).then_some(Leased),
            PageEvent::Share => [Ready, Leased].contains(&state).then_some(state),
            PageEvent::Unlease { leased } => {
                (state == Leased).then_some(if leased { Leased } else { Ready })
            }
            PageEvent::EndLease { .. } | PageEvent::Free { .. } if state == Quarantined => {
                Some(Quarantined)
            }
            PageEvent::EndLease {
                shared,
                leased,
                named,
            } => (state == Leased).then_some(if shared && leased {
                Leased
            } else if shared {
                Ready
            } else if named {
                Stopping
            } else {
                Free
            }),
            PageEvent::Free { shared, named } => match state {
                Ready | Leased if shared => Some(state),
                Building | Ready | Pulling => Some(if named { Stopping } else { Free }),
                Free | Leased | Stopping | Quarantined => None,
            },
            PageEvent::Commit => (state == Pulling).then_some(Ready),
            PageEvent::Adopt => (state == Pulling).then_some(Building),
            PageEvent::LastGuardEnded => match state {
                Free => None,
                Stopping => Some(Free),
                Building | Ready | Leased | Pulling | Quarantined => Some(state),
            },
            PageEvent::Quarantine => (state != Free).then_some(Quarantined),
        };
        for state in PageState::ALL {
            for event in all_events() {
                let after = next(state, event);
                assert_eq!(after, expected(state, event), "{state:?} {event:?}");
                if state == Quarantined {
                    assert!(
                        matches!(after, None | Some(Quarantined)),
                        "{event:?} leads out of quarantine"
                    );
                }
            }
        }
    }

    #[test]
    fn an_unproven_page_is_never_ready_or_shared_without_commit() {
        for event in all_events() {
            let after = next(PageState::Pulling, event);
            let proven = matches!(after, Some(PageState::Ready | PageState::Leased));
            assert_eq!(proven, event == PageEvent::Commit, "{event:?}");
        }
        assert_eq!(next(PageState::Pulling, PageEvent::Share), None);
    }
}
