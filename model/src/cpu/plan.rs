//! A step, checked and cut into passes.
//!
//! The check makes every later access safe whatever the caller wrote: ranges, ids, positions,
//! page tables, and that no page is written by one sequence while another touches it. The cut
//! gives passes of at most [`PASS_ROWS_MAX`] rows; by PROTOCOL D1 it changes no result.

use super::attention::tile_rows;
use crate::backend::{Step, StepSequence};
use kvserve_kv::PageId;
use std::fmt;

/// Rows (tokens) of one pass: a whole prefill chunk (512) and a full decode batch (64).
pub const PASS_ROWS_MAX: usize = 512 + 64;

/// Why a step cannot be computed. All are mistakes of whoever planned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidStep {
    /// A sequence's tokens are none, or not in the step's tokens.
    Tokens {
        /// Which sequence.
        sequence: usize,
    },
    /// A token id is not in the vocabulary.
    TokenId {
        /// Which sequence.
        sequence: usize,
        /// The id.
        token: u32,
        /// Ids are below this.
        vocab: usize,
    },
    /// A sequence goes beyond the model's context.
    Context {
        /// Which sequence.
        sequence: usize,
        /// Position after its last token.
        end: usize,
        /// Tokens the model can hold.
        context: usize,
    },
    /// A sequence's pages are not in the step's pages, or too few.
    PageTable {
        /// Which sequence.
        sequence: usize,
        /// Pages it has.
        pages: usize,
        /// Pages its tokens need.
        needed: usize,
    },
    /// A page is not of this pool.
    PageId {
        /// Which sequence.
        sequence: usize,
        /// The page.
        page: u32,
        /// Pages of the pool.
        pool_pages: usize,
    },
    /// A page is written by one sequence and used by another, or twice by the same.
    PageShared {
        /// Which sequence.
        sequence: usize,
        /// The page.
        page: u32,
    },
}

impl fmt::Display for InvalidStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            InvalidStep::Tokens { sequence } => {
                write!(f, "sequence {sequence} of the step has no tokens in it")
            }
            InvalidStep::TokenId {
                sequence,
                token,
                vocab,
            } => write!(
                f,
                "sequence {sequence} has token {token}; ids are below {vocab}"
            ),
            InvalidStep::Context {
                sequence,
                end,
                context,
            } => write!(
                f,
                "sequence {sequence} would end at position {end}; the model holds {context}"
            ),
            InvalidStep::PageTable {
                sequence,
                pages,
                needed,
            } => write!(
                f,
                "sequence {sequence} needs {needed} pages and has {pages}"
            ),
            InvalidStep::PageId {
                sequence,
                page,
                pool_pages,
            } => write!(
                f,
                "sequence {sequence} names page {page}; the pool has {pool_pages}"
            ),
            InvalidStep::PageShared { sequence, page } => write!(
                f,
                "sequence {sequence} uses page {page}, which the step writes elsewhere too"
            ),
        }
    }
}

impl std::error::Error for InvalidStep {}

/// What steps are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub vocab: usize,
    pub context: usize,
    pub page_tokens: usize,
    pub pool_pages: usize,
}

/// Checks steps; keeps one word a page between checks, so that a check allocates nothing.
pub(crate) struct Checker {
    bounds: Bounds,
    /// Per page: the number of the step that last wrote it.
    written: Vec<u64>,
    step: u64,
}

impl Checker {
    pub fn new(bounds: Bounds) -> Self {
        Checker {
            bounds,
            written: vec![0; bounds.pool_pages],
            step: 0,
        }
    }

    /// # Errors
    /// The first mistake found.
    pub fn check(&mut self, step: &Step) -> Result<(), InvalidStep> {
        self.step += 1;
        for (index, sequence) in step.sequences.iter().enumerate() {
            let pages = self.check_ranges(step, index, sequence)?;
            let first_written = sequence.start / self.bounds.page_tokens;
            for page in &pages[first_written..] {
                let written = &mut self.written[page.0 as usize];
                if *written == self.step {
                    return Err(shared(index, *page));
                }
                *written = self.step;
            }
        }
        for (index, sequence) in step.sequences.iter().enumerate() {
            let read = sequence.start / self.bounds.page_tokens;
            for page in &step.pages[sequence.pages.clone()][..read] {
                if self.written[page.0 as usize] == self.step {
                    return Err(shared(index, *page));
                }
            }
        }
        Ok(())
    }

    /// Everything about one sequence; gives the pages that its tokens lie in.
    fn check_ranges<'a>(
        &self,
        step: &'a Step,
        index: usize,
        sequence: &StepSequence,
    ) -> Result<&'a [PageId], InvalidStep> {
        let Bounds {
            vocab,
            context,
            page_tokens,
            pool_pages,
        } = self.bounds;
        let tokens = step.tokens.get(sequence.tokens.clone()).unwrap_or_default();
        if tokens.is_empty() {
            return Err(InvalidStep::Tokens { sequence: index });
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(InvalidStep::TokenId {
                sequence: index,
                token: *token,
                vocab,
            });
        }
        let end = sequence.start.saturating_add(tokens.len());
        if end > context {
            return Err(InvalidStep::Context {
                sequence: index,
                end,
                context,
            });
        }
        let table = step.pages.get(sequence.pages.clone()).unwrap_or_default();
        let needed = end.div_ceil(page_tokens);
        let Some(pages) = table.get(..needed) else {
            return Err(InvalidStep::PageTable {
                sequence: index,
                pages: table.len(),
                needed,
            });
        };
        if let Some(page) = pages.iter().find(|page| page.0 as usize >= pool_pages) {
            return Err(InvalidStep::PageId {
                sequence: index,
                page: page.0,
                pool_pages,
            });
        }
        Ok(pages)
    }
}

fn shared(sequence: usize, page: PageId) -> InvalidStep {
    InvalidStep::PageShared {
        sequence,
        page: page.0,
    }
}

/// One token of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub token: u32,
    pub position: usize,
    pub sequence: usize,
}

/// Consecutive rows of one sequence that attention takes together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTile {
    pub first_row: usize,
    pub rows: usize,
}

/// The rows of one pass.
#[derive(Default)]
pub(crate) struct Pass {
    pub rows: Vec<Row>,
    pub tiles: Vec<RowTile>,
    /// Rows to sample after.
    pub samples: Vec<usize>,
    /// No sequence has more than one row: no row's attention reads what another row stores.
    pub single: bool,
}

/// Where in a step the next pass begins.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cursor {
    sequence: usize,
    tokens_done: usize,
}

impl Pass {
    /// Room for every pass of at most `PASS_ROWS_MAX` rows.
    pub fn with_room() -> Self {
        Pass {
            rows: Vec::with_capacity(PASS_ROWS_MAX),
            tiles: Vec::with_capacity(PASS_ROWS_MAX),
            samples: Vec::with_capacity(PASS_ROWS_MAX),
            single: true,
        }
    }

    /// Takes the next rows of a checked step; false when none are left. `group` is the query
    /// heads per key head.
    pub fn fill(&mut self, step: &Step, cursor: &mut Cursor, group: usize) -> bool {
        self.rows.clear();
        self.tiles.clear();
        self.samples.clear();
        self.single = true;
        while self.rows.len() < PASS_ROWS_MAX && cursor.sequence < step.sequences.len() {
            let sequence = &step.sequences[cursor.sequence];
            let tokens = &step.tokens[sequence.tokens.clone()][cursor.tokens_done..];
            let take = tokens.len().min(PASS_ROWS_MAX - self.rows.len());
            self.single &= take == 1;
            let first = self.rows.len();
            for (i, token) in tokens[..take].iter().enumerate() {
                self.rows.push(Row {
                    token: *token,
                    position: sequence.start + cursor.tokens_done + i,
                    sequence: cursor.sequence,
                });
            }
            for done in (0..take).step_by(tile_rows(group)) {
                self.tiles.push(RowTile {
                    first_row: first + done,
                    rows: (take - done).min(tile_rows(group)),
                });
            }
            if take < tokens.len() {
                cursor.tokens_done += take;
                break;
            }
            if sequence.sample.is_some() {
                self.samples.push(self.rows.len() - 1);
            }
            *cursor = Cursor {
                sequence: cursor.sequence + 1,
                tokens_done: 0,
            };
        }
        !self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds {
        vocab: 10,
        context: 20,
        page_tokens: 4,
        pool_pages: 8,
    };

    fn step(sequences: &[(usize, usize, &[u32])]) -> Step {
        let mut step = Step::default();
        for (start, count, pages) in sequences {
            let tokens = step.tokens.len()..step.tokens.len() + count;
            step.tokens.extend((0..*count).map(|i| (i % 10) as u32));
            let table = step.pages.len()..step.pages.len() + pages.len();
            step.pages.extend(pages.iter().map(|page| PageId(*page)));
            step.sequences.push(StepSequence {
                tokens,
                start: *start,
                pages: table,
                sample: None,
            });
        }
        step
    }

    fn outcome(step: &Step) -> Result<(), InvalidStep> {
        Checker::new(BOUNDS).check(step)
    }

    #[test]
    fn good_steps_pass_also_with_a_shared_prefix_and_pages_ahead() {
        assert_eq!(outcome(&step(&[])), Ok(()));
        let good = step(&[(4, 1, &[0, 1]), (5, 4, &[0, 2, 3, 7]), (0, 20, &[4, 5, 6])]);
        let sequence = 2;
        let (pages, needed) = (3, 5);
        let short = InvalidStep::PageTable {
            sequence,
            pages,
            needed,
        };
        assert_eq!(outcome(&good), Err(short));
        let good = step(&[(4, 1, &[0, 1]), (5, 4, &[0, 2, 3, 7]), (0, 12, &[4, 5, 6])]);
        let mut checker = Checker::new(BOUNDS);
        for _ in 0..3 {
            assert_eq!(checker.check(&good), Ok(()));
        }
    }

    #[test]
    fn every_mistake_is_named() {
        let sequence = 0;
        let none = InvalidStep::Tokens { sequence };
        assert_eq!(outcome(&step(&[(0, 0, &[0])])), Err(none));
        let mut beyond = step(&[(0, 3, &[0])]);
        beyond.sequences[0].tokens = 1..9;
        assert_eq!(outcome(&beyond), Err(none));
        beyond.sequences[0].tokens = std::ops::Range { start: 2, end: 1 };
        assert_eq!(outcome(&beyond), Err(none));
        let mut id = step(&[(0, 3, &[0])]);
        id.tokens[1] = 10;
        let (token, vocab) = (10, 10);
        let expected = InvalidStep::TokenId {
            sequence,
            token,
            vocab,
        };
        assert_eq!(outcome(&id), Err(expected));
        let (end, context) = (21, 20);
        let expected = InvalidStep::Context {
            sequence,
            end,
            context,
        };
        assert_eq!(outcome(&step(&[(18, 3, &[0, 1, 2, 3, 4])])), Err(expected));
        let far = outcome(&step(&[(usize::MAX, 1, &[0])]));
        assert!(matches!(far, Err(InvalidStep::Context { .. })), "{far:?}");
        let (page, pool_pages) = (8, 8);
        let expected = InvalidStep::PageId {
            sequence,
            page,
            pool_pages,
        };
        assert_eq!(outcome(&step(&[(0, 3, &[8])])), Err(expected));
    }

    #[test]
    fn a_page_is_written_once_and_not_read_meanwhile() {
        let shared = |sequence, page| Err(InvalidStep::PageShared { sequence, page });
        assert_eq!(outcome(&step(&[(0, 1, &[3]), (0, 1, &[3])])), shared(1, 3));
        assert_eq!(outcome(&step(&[(0, 5, &[3, 3])])), shared(0, 3));
        let reads_later = step(&[(0, 4, &[3]), (4, 1, &[3, 1])]);
        assert_eq!(outcome(&reads_later), shared(1, 3));
        let reads_earlier = step(&[(4, 1, &[3, 1]), (0, 4, &[3])]);
        assert_eq!(outcome(&reads_earlier), shared(0, 3));
    }

    #[test]
    fn passes_cover_every_row_once_in_order() {
        let mut long = Step::default();
        for count in [700usize, 1, 3, 600] {
            let tokens = long.tokens.len()..long.tokens.len() + count;
            long.tokens.extend(std::iter::repeat_n(1, count));
            long.sequences.push(StepSequence {
                tokens,
                start: 5,
                pages: 0..0,
                sample: Some(greedy()),
            });
        }
        let (mut pass, mut cursor) = (Pass::with_room(), Cursor::default());
        let (mut rows, mut samples) = (Vec::new(), Vec::new());
        while pass.fill(&long, &mut cursor, 3) {
            assert!(pass.rows.len() <= PASS_ROWS_MAX);
            let tiled: usize = pass.tiles.iter().map(|tile| tile.rows).sum();
            assert_eq!(tiled, pass.rows.len());
            samples.extend(pass.samples.iter().map(|row| pass.rows[*row].sequence));
            rows.extend(pass.rows.iter().map(|row| (row.sequence, row.position)));
        }
        let expected: Vec<_> = [700usize, 1, 3, 600]
            .into_iter()
            .enumerate()
            .flat_map(|(sequence, count)| (5..5 + count).map(move |at| (sequence, at)))
            .collect();
        assert_eq!(rows, expected);
        assert_eq!(samples, [0, 1, 2, 3]);
    }

    fn greedy() -> crate::backend::SampleSpec {
        crate::backend::SampleSpec {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
            choice: 0,
            position: 0,
            logprobs: None,
            min_p: 0.0,
            banned: Vec::new(),
            shaping: None,
        }
    }
}
