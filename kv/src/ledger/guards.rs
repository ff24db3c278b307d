//! The table behind guard tokens: each token is a list of pages, kept in one arena of nodes.
//!
//! Nodes are used again from a free list, so the arena's memory is the peak of pages named at
//! once and a steady step allocates nothing. A token's number is its first node's place plus 1.

use crate::pool::PageId;
use kvserve_runtime::GuardToken;
use std::num::NonZeroU32;

/// "No node": the arena holds at most `u32::MAX - 1` nodes.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
enum Role {
    /// In the free list.
    Idle,
    /// First node of a live token; it carries no page, so that a token may be empty.
    Head,
    /// One page of a live token.
    Page(PageId),
}

struct Node {
    role: Role,
    next: u32,
}

pub(super) struct GuardTable {
    nodes: Vec<Node>,
    idle: u32,
    live: usize,
}

impl GuardTable {
    pub(super) fn new() -> Self {
        GuardTable {
            nodes: Vec::new(),
            idle: NONE,
            live: 0,
        }
    }

    /// Tokens given out and not yet back.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Makes a token that names `pages`, calling `named` for each.
    pub(super) fn issue(
        &mut self,
        pages: impl IntoIterator<Item = PageId>,
        mut named: impl FnMut(PageId),
    ) -> GuardToken {
        let head = self.take(Role::Head);
        let mut tail = head;
        for page in pages {
            named(page);
            let node = self.take(Role::Page(page));
            self.nodes[tail as usize].next = node;
            tail = node;
        }
        self.live += 1;
        let number = NonZeroU32::new(head + 1).expect("a node's place plus 1 is not 0");
        GuardToken::issue(number)
    }

    /// Ends a token, calling `ended` for each page it named, in the order in which they were
    /// named: pages that lie side by side are freed, and handed out again, side by side.
    ///
    /// Panics on a token that this table did not issue or that has already ended: tokens cannot
    /// be copied, so this is a broken invariant.
    pub(super) fn end(&mut self, token: GuardToken, mut ended: impl FnMut(PageId)) {
        let head = token.number().get() - 1;
        let is_head = self
            .nodes
            .get(head as usize)
            .is_some_and(|node| matches!(node.role, Role::Head));
        assert!(is_head, "guard token {} is not live here", head + 1);
        let mut at = head;
        while at != NONE {
            let node = &mut self.nodes[at as usize];
            let (role, next) = (node.role, node.next);
            node.role = Role::Idle;
            node.next = self.idle;
            self.idle = at;
            match role {
                Role::Page(page) => ended(page),
                Role::Head => {}
                Role::Idle => unreachable!("an idle node in the list of guard {}", head + 1),
            }
            at = next;
        }
        self.live -= 1;
    }

    fn take(&mut self, role: Role) -> u32 {
        if self.idle == NONE {
            let place = self.nodes.len() as u32;
            assert!(place < NONE - 1, "{place} pages named at once");
            self.nodes.push(Node { role, next: NONE });
            return place;
        }
        let place = self.idle;
        let node = &mut self.nodes[place as usize];
        self.idle = node.next;
        *node = Node { role, next: NONE };
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_load_of_guards_keeps_its_memory() {
        let mut table = GuardTable::new();
        for round in 0..100u32 {
            let first = table.issue((0..7).map(PageId), |_| {});
            let second = table.issue([PageId(round)], |_| {});
            let empty = table.issue([], |_| {});
            assert_eq!(table.live(), 3);
            let mut pages = Vec::new();
            table.end(first, |page| pages.push(page.0));
            assert_eq!(pages, (0..7).collect::<Vec<_>>());
            table.end(empty, |_| panic!("an empty guard names nothing"));
            table.end(second, |page| assert_eq!(page.0, round));
        }
        assert_eq!(table.live(), 0);
        assert_eq!(table.nodes.len(), 8 + 2 + 1);
    }

    #[test]
    #[should_panic(expected = "is not live here")]
    fn a_forged_token_is_noticed() {
        let mut table = GuardTable::new();
        let token = table.issue([PageId(1), PageId(2)], |_| {});
        // The node after the head is a page, not a token.
        let forged = NonZeroU32::new(token.number().get() + 1).unwrap();
        table.end(GuardToken::issue(forged), |_| {});
    }
}
