//! The page ledger as a node's completion hub and the simulated cards see it: every guard has a
//! shadow that outlives it, every lease a shadow that tells what may be read.
//!
//! The shadow knows what the cores do not: which operation really still runs. It never decides
//! anything; it only says when a core was wrong.

use super::check::{Invariant, Violation};
use super::model::PAGE_TOKENS;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::ledger::{AllocateAs, LedgerCell, PageState};
use kvserve_kv::prefix::PrefixConfig;
use kvserve_kv::session::AttemptId;
use kvserve_kv::transport::sim::{SourceTouch, Witness};
use kvserve_kv::{Ledger, PageId, PoolMemory};
use kvserve_runtime::{GuardKeeper, GuardToken, Nanos};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// What became of a guard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Held.
    Live,
    /// Released: its operation must not touch its pages any more.
    Released,
    /// Quarantined: its operation may, for ever.
    Quarantined,
}

struct Guard {
    fate: Fate,
    /// Pages with the tenancy they had when they were named.
    pages: Vec<(PageId, u64)>,
}

/// What the checks know of a lease.
#[derive(Clone, Debug)]
pub struct LeaseShadow {
    /// The session it was granted to.
    pub session: PeerSession,
    /// The attempt it was granted to.
    pub id: AttemptId,
    /// Its pages.
    pub pages: Vec<PageId>,
    /// Pages published.
    pub ready: u32,
    /// The table has given its pages back.
    pub freed: bool,
    /// It was published whole.
    pub complete: bool,
    /// It was given up or asked for: no COMMIT may be answered OK any more.
    pub over: bool,
    /// Last grant, watermark, queue heartbeat or served read.
    pub moved_at: Nanos,
    /// The request's own deadline, as this node sees it.
    pub deadline: Nanos,
}

struct PageShadow {
    tenancy: u64,
    state: PageState,
}

/// One node's ledger with its shadows.
pub struct Keeper {
    /// The ledger itself.
    pub ledger: Rc<LedgerCell>,
    by_number: RefCell<BTreeMap<u32, u64>>,
    guards: RefCell<Vec<Guard>>,
    pages: RefCell<Vec<PageShadow>>,
    /// By lease number.
    pub leases: RefCell<BTreeMap<u64, LeaseShadow>>,
    broken: RefCell<Option<Violation>>,
}

impl Keeper {
    /// Around a fresh ledger.
    pub fn new(pages: usize, pool: Option<Arc<PoolMemory>>) -> Rc<Self> {
        let shadow = |_| PageShadow {
            tenancy: 0,
            state: PageState::Free,
        };
        Rc::new(Keeper {
            ledger: Rc::new(LedgerCell::new(
                pool.map_or_else(|| Ledger::new(pages), Ledger::of_pool)
                    .with_prefix_cache(PrefixConfig {
                        page_tokens: PAGE_TOKENS,
                        seed: 1,
                    }),
            )),
            by_number: RefCell::default(),
            guards: RefCell::default(),
            pages: RefCell::new((0..pages).map(shadow).collect()),
            leases: RefCell::default(),
            broken: RefCell::default(),
        })
    }

    /// Names pages; the token and the number of its shadow.
    pub fn guard(&self, pages: &[PageId]) -> (GuardToken, u64) {
        let token = self
            .ledger
            .with(|ledger| ledger.guard(pages.iter().copied()));
        let shadows = self.pages.borrow();
        let named = |page: &PageId| (*page, shadows[page.0 as usize].tenancy);
        let mut guards = self.guards.borrow_mut();
        guards.push(Guard {
            fate: Fate::Live,
            pages: pages.iter().map(named).collect(),
        });
        let shadow = guards.len() as u64 - 1;
        self.by_number
            .borrow_mut()
            .insert(token.number().get(), shadow);
        (token, shadow)
    }

    /// Takes pages for a pull, as the node's admission does.
    pub fn reserve(&self, count: usize, what: AllocateAs) -> Option<Vec<PageId>> {
        let mut out = Vec::with_capacity(count);
        let taken = self
            .ledger
            .with(|ledger| ledger.allocate(count, what, &mut out));
        taken.ok()?;
        let mut shadows = self.pages.borrow_mut();
        for page in &out {
            let shadow = &mut shadows[page.0 as usize];
            // Given up and handed out again within one event.
            if shadow.state != PageState::Free {
                shadow.tenancy += 1;
                shadow.state = PageState::Free;
            }
        }
        Some(out)
    }

    /// What became of a guard.
    pub fn fate(&self, shadow: u64) -> Fate {
        self.guards.borrow()[shadow as usize].fate
    }

    /// Notes every page that changed since the last call, calling `handed_out` for those that
    /// left Free.
    pub fn note_states(&self, mut handed_out: impl FnMut(PageId)) {
        let mut shadows = self.pages.borrow_mut();
        self.ledger.with(|ledger| {
            for (place, shadow) in (0..).map(PageId).zip(shadows.iter_mut()) {
                let state = ledger.state(place);
                if state == shadow.state {
                    continue;
                }
                match (shadow.state, state) {
                    (_, PageState::Free) => shadow.tenancy += 1,
                    (PageState::Free, _) => handed_out(place),
                    // Evicted from the prefix cache and handed out within one event.
                    (
                        PageState::Ready | PageState::Leased | PageState::Stopping,
                        PageState::Building | PageState::Pulling,
                    ) => {
                        shadow.tenancy += 1;
                        handed_out(place);
                    }
                    _ => {}
                }
                shadow.state = state;
            }
        });
    }

    /// The first thing that was wrong in a callback.
    pub fn take_broken(&self) -> Option<Violation> {
        self.broken.borrow_mut().take()
    }

    fn ended(&self, token: &GuardToken, fate: Fate) {
        let shadow = self.by_number.borrow_mut().remove(&token.number().get());
        match shadow {
            Some(shadow) => self.guards.borrow_mut()[shadow as usize].fate = fate,
            None => {
                self.broken.borrow_mut().get_or_insert(Violation {
                    invariant: Invariant::I6,
                    what: format!("guard {} ended twice", token.number()),
                });
            }
        }
    }
}

impl GuardKeeper for Keeper {
    fn release(&self, guards: GuardToken) {
        self.ended(&guards, Fate::Released);
        self.ledger.release(guards);
    }

    fn quarantine(&self, guards: GuardToken) {
        self.ended(&guards, Fate::Quarantined);
        self.ledger.quarantine(guards);
    }
}

impl Witness for Keeper {
    fn write(&self, tag: u64, page: PageId) -> Result<(), String> {
        let guards = self.guards.borrow();
        let guard = &guards[tag as usize];
        let state = self.ledger.with(|ledger| ledger.state(page));
        let tenancy = self.pages.borrow()[page.0 as usize].tenancy;
        let wrong = |why: String| Err(format!("I2: the card writes page {}, {why}", page.0));
        match guard.fate {
            Fate::Released => return wrong("whose guard was released".into()),
            Fate::Quarantined => {
                return match state {
                    PageState::Quarantined => Ok(()),
                    other => wrong(format!("lost to quarantine, yet {}", other.label())),
                };
            }
            Fate::Live => {}
        }
        match guard.pages.iter().find(|(named, _)| *named == page) {
            None => wrong("which its guard does not name".into()),
            Some((_, named)) if *named != tenancy => {
                wrong("which was given away since it was posted".into())
            }
            Some(_) => match state {
                PageState::Pulling | PageState::Stopping | PageState::Quarantined => Ok(()),
                PageState::Free | PageState::Building | PageState::Ready | PageState::Leased => {
                    wrong(format!("which is {}", state.label()))
                }
            },
        }
    }

    fn is_given_up(&self, tag: u64) -> bool {
        self.fate(tag) == Fate::Quarantined
    }

    fn read(&self, touch: SourceTouch) -> Result<(), String> {
        let SourceTouch {
            lease,
            index,
            page,
            guard,
        } = touch;
        let leases = self.leases.borrow();
        let Some(shadow) = leases.get(&lease) else {
            return Err(format!("I10: a read names lease {lease}, never granted"));
        };
        if index >= shadow.ready {
            let ready = shadow.ready;
            return Err(format!(
                "I12: page {index} of lease {lease} is read, {ready} are published"
            ));
        }
        if shadow.pages.get(index as usize) != Some(&page) {
            return Err(format!("I10: lease {lease} has no such page {}", page.0));
        }
        match guard.map(|guard| self.fate(guard)) {
            Some(Fate::Live) => Ok(()),
            Some(Fate::Released | Fate::Quarantined) => Err(format!(
                "I10: page {} of lease {lease} is read, the read's guard has ended",
                page.0
            )),
            None if shadow.freed => Err(format!(
                "I10: page {} is read under lease {lease}, which was given back",
                page.0
            )),
            None => match self.ledger.with(|ledger| ledger.state(page)) {
                PageState::Leased => Ok(()),
                state => Err(format!(
                    "I10: page {} of lease {lease} is read and is {}",
                    page.0,
                    state.label()
                )),
            },
        }
    }
}
