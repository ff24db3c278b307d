//! Where a token's keys and values lie inside a page.
//!
//! Page-major, all layers of a page adjacent, so that one page is one contiguous read:
//! `[layer][key, value][kv head][token in page][head dimension]`, elements little-endian.

use std::fmt;

/// Element type of keys and values in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum KvDtype {
    /// 4 bytes.
    F32 = 1,
    /// 2 bytes.
    Bf16 = 2,
}

impl KvDtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 => 2,
        }
    }
}

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOrValue {
    /// Keys (after rotary embedding).
    Key = 0,
    /// Values.
    Value = 1,
}

/// The shape of a page. Two nodes exchange pages only if all of it, and the kernel class that
/// computed them, is equal; [`KvLayout::hash`] is what `Hello` compares (PROTOCOL S2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Element type.
    pub dtype: KvDtype,
    /// Tokens a page holds.
    pub page_tokens: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// What computed the values: a CPU ISA level or a GPU, e.g. `cpu-f32-v1`. Pages of unlike
    /// classes differ in the last bits and are not mixed.
    pub kernel_class: String,
}

impl KvLayout {
    /// Tokens per page unless the user says otherwise (PROTOCOL 9).
    pub const PAGE_TOKENS_DEFAULT: usize = 16;

    /// Bytes of one (layer, key-or-value, head) plane of a page.
    pub fn plane_bytes(&self) -> usize {
        self.page_tokens * self.head_dim * self.dtype.bytes()
    }

    /// Bytes of one page, all layers.
    pub fn page_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * self.plane_bytes()
    }

    /// Byte offset inside a page of token `token` (within the page) of one head.
    pub fn offset(&self, layer: usize, part: KeyOrValue, kv_head: usize, token: usize) -> usize {
        debug_assert!(layer < self.layers && kv_head < self.kv_heads && token < self.page_tokens);
        ((layer * 2 + part as usize) * self.kv_heads + kv_head) * self.plane_bytes()
            + token * self.head_dim * self.dtype.bytes()
    }

    /// Pages that `tokens` tokens need.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// A stable hash over every field.
    pub fn hash(&self) -> u64 {
        let text = format!(
            "kvserve-layout-1/{}/{}/{}/{}/{}/{}",
            self.dtype as u8,
            self.page_tokens,
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.kernel_class
        );
        xxhash_rust::xxh3::xxh3_64(text.as_bytes())
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tokens x {} layers x {} heads x {} {:?} ({})",
            self.page_tokens,
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.kernel_class
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        KvLayout {
            dtype: KvDtype::Bf16,
            page_tokens: 4,
            layers: 3,
            kv_heads: 2,
            head_dim: 8,
            kernel_class: "test".into(),
        }
    }

    #[test]
    fn every_element_has_its_own_place_and_the_page_is_full() {
        let layout = layout();
        let row = layout.head_dim * layout.dtype.bytes();
        let mut seen = vec![false; layout.page_bytes()];
        for layer in 0..layout.layers {
            for part in [KeyOrValue::Key, KeyOrValue::Value] {
                for head in 0..layout.kv_heads {
                    for token in 0..layout.page_tokens {
                        let start = layout.offset(layer, part, head, token);
                        for byte in &mut seen[start..start + row] {
                            assert!(!std::mem::replace(byte, true), "two rows share a byte");
                        }
                    }
                }
            }
        }
        assert!(seen.into_iter().all(|byte| byte));
    }

    #[test]
    fn the_hash_moves_with_every_field() {
        let base = layout();
        let mut others = vec![base.clone(); 6];
        others[0].dtype = KvDtype::F32;
        others[1].page_tokens = 8;
        others[2].layers = 4;
        others[3].kv_heads = 1;
        others[4].head_dim = 16;
        others[5].kernel_class = "other".into();
        for other in others {
            assert_ne!(base.hash(), other.hash(), "{other}");
        }
    }
}
