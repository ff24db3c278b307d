//! One choice's text: tokens in, pieces of text out. Sans-IO.
//!
//! Invariants: pieces put together are the whole text; never half a character; never a byte
//! of a stop string; after a finish nothing follows.

use super::stop::StopStrings;
use super::text::Detokenizer;
use crate::engine::{FinishReason, TokenEvent};

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
    stops: StopStrings,
    chars: usize,
    finished: bool,
}

impl Assembler {
    /// For one new text.
    pub fn new(detokenizer: Option<Box<dyn Detokenizer>>, stops: Vec<String>) -> Self {
        Assembler {
            detokenizer,
            stops: StopStrings::new(stops),
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
        let text = match &mut self.detokenizer {
            Some(detokenizer) => detokenizer.push(token.token),
            None => String::new(),
        };
        let offset_chars = self.chars;
        self.chars += text.chars().count();
        let matched = self.stops.push(&text);
        self.finished = matched.stopped;
        Piece {
            text: matched.text,
            token: Some(token),
            offset_chars,
            finish: matched.stopped.then_some(FinishReason::Stop),
        }
    }

    /// The generation ended: gives what was held back.
    pub fn finish(&mut self, reason: FinishReason) -> Piece {
        if self.finished {
            return Piece::default();
        }
        self.finished = true;
        let rest = match &mut self.detokenizer {
            Some(detokenizer) => detokenizer.finish(),
            None => String::new(),
        };
        let matched = self.stops.push(&rest);
        if matched.stopped {
            return Piece {
                text: matched.text,
                finish: Some(FinishReason::Stop),
                ..Piece::default()
            };
        }
        Piece {
            text: matched.text + &self.stops.finish(),
            finish: Some(reason),
            ..Piece::default()
        }
    }

    /// Whether the choice has ended.
    pub fn is_finished(&self) -> bool {
        self.finished
    }
}
