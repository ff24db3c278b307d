//! One choice's text: tokens in, pieces of text out. Sans-IO.
//!
//! Invariants: pieces put together are the whole text; never half a character; never a byte
//! of a stop string; after a finish nothing follows.

use super::text::Detokenizer;
use crate::engine::{FinishReason, TokenEvent};
use kvserve_model::StopMatcher;

/// What one event of the engine adds to a choice.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// New text; may be empty while characters or stop strings are open.
    pub text: String,
    /// The token that came, if one did.
    pub token: Option<TokenEvent>,
    /// Characters of text before that token.
    pub offset_chars: usize,
    /// The choice has ended.
    pub finish: Option<FinishReason>,
}

/// Detokeniser and stop strings of one choice.
pub struct Assembler {
    /// `None`: a model without a tokenizer; text stays empty.
    detokenizer: Option<Box<dyn Detokenizer>>,
    stops: StopMatcher,
    chars: usize,
    finished: bool,
}

impl Assembler {
    /// For one new text.
    pub fn new(detokenizer: Option<Box<dyn Detokenizer>>, stops: StopMatcher) -> Self {
        Assembler {
            detokenizer,
            stops,
            chars: 0,
            finished: false,
        }
    }

    /// A token came. With `finish` in the answer a stop string was completed: the caller
    /// drops the generation.
    pub fn token(&mut self, token: TokenEvent) -> Piece {
        if self.finished {
            return Piece::default();
        }
        let mut decoded = String::new();
        if let Some(detokenizer) = &mut self.detokenizer {
            detokenizer.push(token.token, &mut decoded);
        }
        let offset_chars = self.chars;
        self.chars += decoded.chars().count();
        let mut text = String::new();
        self.finished = self.stops.push(&decoded, &mut text).is_some();
        Piece {
            text,
            token: Some(token),
            offset_chars,
            finish: self.finished.then_some(FinishReason::Stop),
        }
    }

    /// The generation ended: gives what was held back.
    pub fn finish(&mut self, reason: FinishReason) -> Piece {
        if self.finished {
            return Piece::default();
        }
        self.finished = true;
        let mut rest = String::new();
        if let Some(detokenizer) = &mut self.detokenizer {
            detokenizer.finish(&mut rest);
        }
        let mut text = String::new();
        let stopped = self.stops.push(&rest, &mut text).is_some();
        self.stops.finish(&mut text);
        Piece {
            text,
            finish: Some(if stopped { FinishReason::Stop } else { reason }),
            ..Piece::default()
        }
    }
}
