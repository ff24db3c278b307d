//! Random ids and seeds of one shard: unguessable is not needed, unique is.

use kvserve_runtime::Nanos;
use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A 64-bit mixing generator (a Weyl sequence through a finaliser), seeded from the process's
/// random hash keys and the clock.
pub struct RandomIds {
    state: Cell<u64>,
}

impl Default for RandomIds {
    fn default() -> Self {
        let mut hasher = RandomState::new().build_hasher();
        hasher.write_u64(Nanos::now().0);
        RandomIds {
            state: Cell::new(hasher.finish()),
        }
    }
}

impl RandomIds {
    /// The next number.
    pub fn number(&self) -> u64 {
        let state = self.state.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.state.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// `prefix` and 96 random bits in hex.
    pub fn id(&self, prefix: &str) -> String {
        format!("{prefix}{:016x}{:08x}", self.number(), self.number() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_of_several_shards_do_not_meet() {
        let shards: Vec<RandomIds> = (0..4).map(|_| RandomIds::default()).collect();
        let ids: HashSet<String> = shards
            .iter()
            .flat_map(|shard| (0..1000).map(|_| shard.id("cmpl-")))
            .collect();
        assert_eq!(ids.len(), 4000);
        assert!(ids.iter().all(|id| id.len() == 5 + 24));
    }
}
