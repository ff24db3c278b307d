//! Stop strings in a text that arrives in pieces.
//!
//! Text that may be the beginning of a stop string is held back; everything else passes at once.
//! The end of an answer does not depend on where the pieces are cut: the first stop string to be
//! complete, character by character, ends it (of several that end together, the longest).

use std::fmt;

/// Most stop strings of a request.
pub const STOPS_MAX: usize = 16;
/// Longest stop string in bytes, hence the most text held back.
pub const STOP_BYTES_MAX: usize = 1024;

/// Stop strings that are not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopError {
    /// More than [`STOPS_MAX`].
    TooMany {
        /// How many.
        found: usize,
    },
    /// One is empty or longer than [`STOP_BYTES_MAX`].
    Length {
        /// Which.
        index: usize,
        /// Its length in bytes.
        bytes: usize,
    },
}

impl fmt::Display for StopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopError::TooMany { found } => {
                write!(f, "{found} stop strings, at most {STOPS_MAX} are taken")
            }
            StopError::Length { index, bytes } => write!(
                f,
                "stop string {index} has {bytes} bytes, it must have 1 to {STOP_BYTES_MAX}"
            ),
        }
    }
}

impl std::error::Error for StopError {}

#[derive(Clone, Debug)]
struct Stop {
    bytes: Vec<u8>,
    /// `fallback[n]`: the longest proper beginning of the string that also ends its first
    /// `n + 1` bytes (Knuth, Morris, Pratt).
    fallback: Vec<usize>,
    /// Bytes of the string that the text ends with at present.
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len()];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = fallback[length - 1];
            }
            if bytes[at] == bytes[length] {
                length += 1;
            }
            fallback[at] = length;
        }
        Self {
            bytes,
            fallback,
            matched: 0,
        }
    }

    /// Takes a byte; true if the string is complete.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }
}

/// Watches the text of one answer for its stop strings.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    include_stop: bool,
    held: String,
    found: Option<usize>,
}

impl StopMatcher {
    /// Watches for `stops`. `include_stop`: the stop string itself stays in the text.
    ///
    /// # Errors
    /// [`StopError`].
    pub fn new<S: AsRef<str>>(stops: &[S], include_stop: bool) -> Result<Self, StopError> {
        if stops.len() > STOPS_MAX {
            return Err(StopError::TooMany { found: stops.len() });
        }
        for (index, stop) in stops.iter().enumerate() {
            let bytes = stop.as_ref().len();
            if bytes == 0 || bytes > STOP_BYTES_MAX {
                return Err(StopError::Length { index, bytes });
            }
        }
        let stops = stops.iter().map(|stop| Stop::new(stop.as_ref())).collect();
        Ok(Self {
            stops,
            include_stop,
            held: String::new(),
            found: None,
        })
    }

    /// Takes the next text and appends to `out` what is safe to give away. `Some(index)`: that
    /// stop string is complete, the answer ends here; later text is swallowed.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.found.is_some() {
            return self.found;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            if let Some((index, length)) = self.step(byte) {
                let end = before + at + 1;
                let cut = if self.include_stop { end } else { end - length };
                out.push_str(&self.held[..cut]);
                self.held.clear();
                self.found = Some(index);
                return self.found;
            }
        }
        // A stop string begins with a whole character, so this cuts at a border.
        let possible = self
            .stops
            .iter()
            .map(|stop| stop.matched)
            .max()
            .unwrap_or(0);
        let safe = self.held.len() - possible;
        out.push_str(&self.held[..safe]);
        self.held.drain(..safe);
        None
    }

    /// The answer ends otherwise: appends what was held back.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Bytes held back.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Steps all strings; the longest that is complete, with its length.
    fn step(&mut self, byte: u8) -> Option<(usize, usize)> {
        let mut complete = None;
        for (index, stop) in self.stops.iter_mut().enumerate() {
            let length = stop.bytes.len();
            if stop.step(byte) && complete.is_none_or(|(_, longest)| length > longest) {
                complete = Some((index, length));
            }
        }
        complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops, false).unwrap();
        let mut out = String::new();
        for piece in pieces {
            if let Some(index) = matcher.push(piece, &mut out) {
                return (out, Some(index));
            }
        }
        matcher.finish(&mut out);
        (out, None)
    }

    #[test]
    fn a_stop_over_borders_is_cut_whole() {
        assert_eq!(
            run(&["STOP"], &["abS", "T", "OP more"]),
            ("ab".into(), Some(0))
        );
        assert_eq!(run(&["STOP"], &["abS", "TA"]), ("abSTA".into(), None));
        assert_eq!(
            run(&["\n\n"], &["a\n", "b\n", "\nc"]),
            ("a\nb".into(), Some(0))
        );
    }

    #[test]
    fn only_a_possible_beginning_is_held_back() {
        let mut matcher = StopMatcher::new(&["STOP"], false).unwrap();
        let mut out = String::new();
        assert_eq!(matcher.push("text ST", &mut out), None);
        assert_eq!((out.as_str(), matcher.held_bytes()), ("text ", 2));
        matcher.push("SS", &mut out);
        assert_eq!((out.as_str(), matcher.held_bytes()), ("text STS", 1));
    }

    #[test]
    fn overlapping_beginnings_are_not_lost() {
        assert_eq!(run(&["aab"], &["aa", "ab", "x"]), ("a".into(), Some(0)));
        assert_eq!(run(&["é!"], &["日é", "é!"]), ("日é".into(), Some(0)));
    }

    #[test]
    fn of_two_that_end_together_the_longer_wins() {
        assert_eq!(run(&["b", "ab"], &["xab"]), ("x".into(), Some(1)));
        assert_eq!(run(&["abc", "b"], &["xabc"]), ("xa".into(), Some(1)));
    }

    #[test]
    fn any_cut_gives_the_same_answer() {
        let text = "one two\nthree <|end|> four";
        for stops in [
            &["<|end|>", "th"][..],
            &["<|end|>"],
            &["e <", "zzz"],
            &["four."],
        ] {
            let whole = run(stops, &[text]);
            for cut in 1..text.len() {
                let (left, right) = text.split_at(cut);
                assert_eq!(run(stops, &[left, right]), whole, "{stops:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn the_stop_can_stay_and_bounds_hold() {
        let mut matcher = StopMatcher::new(&["END"], true).unwrap();
        let mut out = String::new();
        matcher.push("x EN", &mut out);
        assert_eq!(matcher.push("D y", &mut out), Some(0));
        assert_eq!(matcher.push("more", &mut out), Some(0));
        assert_eq!(out, "x END");
        assert_eq!(
            StopMatcher::new(&[""], false).unwrap_err(),
            StopError::Length { index: 0, bytes: 0 }
        );
        let many = vec!["x"; STOPS_MAX + 1];
        assert_eq!(
            StopMatcher::new(&many, false).unwrap_err(),
            StopError::TooMany { found: 17 }
        );
    }
}
