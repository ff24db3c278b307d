//! Stop strings over the borders of tokens.
//!
//! Invariant: text goes out only when it can no longer be part of a stop string, so no
//! byte of a stop string (nor anything after it) ever reaches the client.

/// Matches one text, given in pieces, against a few stop strings.
#[derive(Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text not given out yet: always a proper prefix of some stop string, so it is shorter
    /// than the longest of them.
    held: String,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub struct Matched {
    /// Text that may go out now.
    pub text: String,
    /// Whether a stop string was completed; nothing may follow.
    pub stopped: bool,
}

impl StopStrings {
    /// None of `stops` may be empty.
    pub fn new(stops: Vec<String>) -> Self {
        debug_assert!(stops.iter().all(|stop| !stop.is_empty()));
        StopStrings {
            stops,
            held: String::new(),
        }
    }

    /// Takes the next piece.
    pub fn push(&mut self, piece: &str) -> Matched {
        if self.stops.is_empty() {
            return Matched {
                text: piece.to_owned(),
                stopped: false,
            };
        }
        self.held.push_str(piece);
        let first = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()))
            .min();
        if let Some(start) = first {
            self.held.truncate(start);
            return Matched {
                text: std::mem::take(&mut self.held),
                stopped: true,
            };
        }
        let keep_from = self.held.len() - self.open_suffix();
        let rest = self.held.split_off(keep_from);
        Matched {
            text: std::mem::replace(&mut self.held, rest),
            stopped: false,
        }
    }

    /// The end of the text: what was held back is plain text after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest suffix of the held text that a stop string begins with.
    fn open_suffix(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest - 1);
        for (start, _) in self.held.char_indices().filter(|(start, _)| *start >= from) {
            let suffix = &self.held[start..];
            if self.stops.iter().any(|stop| stop.starts_with(suffix)) {
                return suffix.len();
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopStrings::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = String::new();
        for piece in pieces {
            let matched = matcher.push(piece);
            out += &matched.text;
            if matched.stopped {
                return (out, true);
            }
        }
        out += &matcher.finish();
        (out, false)
    }

    #[test]
    fn a_stop_string_over_three_pieces_never_shows() {
        assert_eq!(
            run(&["END."], &["a E", "N", "D", ". b"]),
            ("a ".into(), true)
        );
    }

    #[test]
    fn what_only_looked_like_one_comes_out_at_last() {
        assert_eq!(
            run(&["END."], &["a E", "N", "Dx"]),
            ("a ENDx".into(), false)
        );
        assert_eq!(run(&["END."], &["a EN"]), ("a EN".into(), false));
    }

    #[test]
    fn the_earliest_of_several_wins() {
        assert_eq!(run(&["cd", "bc"], &["abcd"]), ("a".into(), true));
        assert_eq!(run(&["aab"], &["aa", "aab"]), ("aa".into(), true));
    }

    #[test]
    fn any_split_of_any_text_gives_the_same() {
        let text = "xéaéabéabcé終わりéz";
        let chars: Vec<String> = text.chars().map(String::from).collect();
        for split in 1..chars.len() {
            let pieces: Vec<String> = chars.chunks(split).map(|chunk| chunk.concat()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            assert_eq!(
                run(&["éabc", "わり"], &pieces),
                ("xéaéab".into(), true),
                "chunks of {split}"
            );
            assert_eq!(run(&["終わらない"], &pieces), (text.into(), false));
        }
    }

    #[test]
    fn held_text_is_shorter_than_the_longest_stop_string() {
        let mut matcher = StopStrings::new(vec!["ababac".into()]);
        for _ in 0..100 {
            matcher.push("ab");
            assert!(matcher.held.len() < 6);
        }
    }
}
