//! The scheduler's bounds.

/// Bounds of one scheduler; the defaults are PROTOCOL 9.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerLimits {
    /// Sequences that take part in steps at once.
    pub running_max: usize,
    /// Sequences that wait for admission at most.
    pub queued_max: usize,
    /// Prefill tokens in one step at most, over all sequences.
    pub chunk_tokens_max: usize,
    /// Tokens a page holds.
    pub page_tokens: usize,
}

impl SchedulerLimits {
    /// Limits for pages of `page_tokens`, all else by default.
    pub fn with_page_tokens(page_tokens: usize) -> Self {
        SchedulerLimits {
            running_max: 64,
            queued_max: 256,
            chunk_tokens_max: 512,
            page_tokens,
        }
    }

    /// Pages that hold `tokens` tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }
}
