//! Cache salts by number, so that entries compare one word. A leaf.

use std::collections::BTreeMap;

/// Longest salt that a request may name: a UUID or a SHA-512 in hex fit.
pub const CACHE_SALT_BYTES_MAX: usize = 128;

/// Salts of the entries without a parent; as many as those at most.
#[derive(Default)]
pub(super) struct Salts {
    numbers: BTreeMap<Box<[u8]>, u32>,
    /// By number: how many entries name it, and the salt itself.
    uses: Vec<(u32, Box<[u8]>)>,
    spare: Vec<u32>,
}

impl Salts {
    /// The number of a salt that some entry names.
    pub(super) fn find(&self, salt: &[u8]) -> Option<u32> {
        self.numbers.get(salt).copied()
    }

    /// One more entry names this salt.
    pub(super) fn take(&mut self, salt: &[u8]) -> u32 {
        if let Some(number) = self.find(salt) {
            self.uses[number as usize].0 += 1;
            return number;
        }
        let number = self.spare.pop().unwrap_or_else(|| {
            self.uses.push((0, Box::default()));
            (self.uses.len() - 1) as u32
        });
        self.uses[number as usize] = (1, salt.into());
        self.numbers.insert(salt.into(), number);
        number
    }

    /// One entry fewer names it.
    pub(super) fn drop_one(&mut self, number: u32) {
        let (uses, salt) = &mut self.uses[number as usize];
        *uses -= 1;
        if *uses == 0 {
            self.numbers.remove(salt);
            *salt = Box::default();
            self.spare.push(number);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }
}
