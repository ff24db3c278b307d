//! Where the pages of leases lie in a peer's pool, as the peer told it: what one-sided transports
//! (shared memory, RDMA) read by.

use super::Read;
use crate::session::frame::LEASE_PAGES_MAX;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

/// A leased page as its owner names it: where it lies and what its generation was at the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Page in the peer's pool.
    pub page: u32,
    /// Its generation while the lease lives.
    pub generation: u64,
}

/// Why a lease's places were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnError {
    /// The channel is not there or not open.
    NotConnected,
    /// They do not follow on what is known of this lease: known, first.
    Gap(usize, usize),
    /// More places than a lease may have pages.
    TooMany(usize),
    /// A page that the peer's pool does not have: page, pages.
    Page(u32, usize),
}

impl Place {
    /// Whether the page is still the one that was leased, its generation being `now`. Asked
    /// before and after each copy of it (PROTOCOL X2).
    pub fn holds(self, now: u64) -> bool {
        self.generation == now
    }
}

impl fmt::Display for LearnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LearnError::NotConnected => f.write_str("the channel is not open"),
            LearnError::Gap(known, first) => {
                write!(f, "places from {first} on follow on {known} known ones")
            }
            LearnError::TooMany(count) => write!(f, "{count} places in one lease"),
            LearnError::Page(page, pages) => write!(f, "page {page} of a pool of {pages}"),
        }
    }
}

impl std::error::Error for LearnError {}

struct Lease {
    epoch: u32,
    places: Vec<Place>,
}

/// The leases of one channel's peer.
#[derive(Default)]
pub(super) struct Places {
    leases: HashMap<u64, Lease>,
}

impl Places {
    /// Takes places `first..` of a lease of a peer whose pool has `pages` pages. The same lease
    /// with another epoch begins anew.
    pub(super) fn learn(
        &mut self,
        pages: usize,
        lease: u64,
        epoch: u32,
        first: usize,
        places: &[Place],
    ) -> Result<(), LearnError> {
        if let Some(wrong) = places.iter().find(|place| place.page as usize >= pages) {
            return Err(LearnError::Page(wrong.page, pages));
        }
        if first + places.len() > LEASE_PAGES_MAX {
            return Err(LearnError::TooMany(first + places.len()));
        }
        let same = self.leases.get(&lease).filter(|known| known.epoch == epoch);
        let known = same.map_or(0, |known| known.places.len());
        if first != known {
            return Err(LearnError::Gap(known, first));
        }
        if first == 0 {
            let fresh = Lease {
                epoch,
                places: Vec::new(),
            };
            self.leases.insert(lease, fresh);
        }
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.places.extend_from_slice(places);
        }
        Ok(())
    }

    /// The lease is over.
    pub(super) fn forget(&mut self, lease: u64) {
        self.leases.remove(&lease);
    }

    /// All of them are.
    pub(super) fn clear(&mut self) {
        self.leases.clear();
    }

    /// Where the pages of a read lie; `None` when they were not told, or under another epoch.
    pub(super) fn of(&self, read: &Read) -> Option<&[Place]> {
        let first = read.first as usize;
        let known = self.leases.get(&read.lease);
        known
            .filter(|lease| lease.epoch == read.epoch)
            .and_then(|lease| lease.places.get(first..first.checked_add(read.into.len())?))
    }
}

/// The leases of one peer, shared by all channels to it: a read may be posted on any of them, and
/// on one that is made later.
#[derive(Clone, Default)]
pub struct PeerPlaces(Rc<RefCell<Places>>);

impl PeerPlaces {
    /// Takes places `first..` of a lease of a peer whose pool has `pages` pages.
    ///
    /// # Errors
    /// [`LearnError`]; then nothing was taken.
    pub fn learn(
        &self,
        pages: usize,
        lease: u64,
        epoch: u32,
        first: usize,
        places: &[Place],
    ) -> Result<(), LearnError> {
        self.0
            .borrow_mut()
            .learn(pages, lease, epoch, first, places)
    }

    /// The lease is over: reads of it that are posted from now on fail.
    pub fn forget(&self, lease: u64) {
        self.0.borrow_mut().forget(lease);
    }

    /// Where the pages of a read lie.
    pub(super) fn of(&self, read: &Read) -> Option<Vec<Place>> {
        self.0.borrow().of(read).map(<[Place]>::to_vec)
    }
}
