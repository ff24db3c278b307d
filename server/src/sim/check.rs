//! The invariants by name (DESIGN 8), and where a run keeps the first one that broke.

/// DESIGN 8's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the numbers are DESIGN 8's, `rule` says them in words
pub enum Invariant {
    I1,
    I2,
    I3,
    I4,
    I5,
    I6,
    I7,
    I9,
    I10,
    I11,
    I12,
}

impl Invariant {
    /// All of them. (I8, no unbounded wait, is a lint, and the type of a deadline.)
    pub const ALL: [Invariant; 11] = [
        Invariant::I1,
        Invariant::I2,
        Invariant::I3,
        Invariant::I4,
        Invariant::I5,
        Invariant::I6,
        Invariant::I7,
        Invariant::I9,
        Invariant::I10,
        Invariant::I11,
        Invariant::I12,
    ];

    /// The rule in words.
    pub fn rule(self) -> &'static str {
        match self {
            Invariant::I1 => "every wait ends by its deadline, every slot by the drain bound",
            Invariant::I2 => "a page handed out is named by no outstanding operation",
            Invariant::I3 => "page counts add up, nothing leaks",
            Invariant::I4 => "posts made = retired + lost + not posted + outstanding",
            Invariant::I5 => "the right bytes and the right text, or an error",
            Invariant::I6 => "each slot, request and attempt ends once",
            Invariant::I7 => "a dead or frozen peer takes no more than its credits",
            Invariant::I9 => "dropping a future anywhere keeps the books",
            Invariant::I10 => "leased pages are reused only after release or a dead session",
            Invariant::I11 => "when faults stop, the same pair works again",
            Invariant::I12 => "watermarks never go back, nothing is read beyond them",
        }
    }
}

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which one.
    pub invariant: Invariant,
    /// What was seen, with the numbers.
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rule = self.invariant.rule();
        write!(f, "{:?} ({rule}): {}", self.invariant, self.what)
    }
}
