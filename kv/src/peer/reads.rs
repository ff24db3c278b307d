//! The reads of attempts: queued for a credit, posted, posted again, and what became of them.
//!
//! Who goes next is decided in [`crate::credits`], when a lost read may be posted again in the
//! completion slab (PROTOCOL E5). This file carries it out: one read is one slot for as long as
//! it takes, over as many channels as it takes, and one credit for each of its posts.

use super::hub::{Inner, Pages};
use super::migrate::AttemptCell;
use super::session::{PullPath, Session};
use crate::credits::{Credit, Want};
use crate::lease::PeerSession;
use crate::ledger::PageState;
use crate::pool::PageId;
use crate::pull::{AttemptPhase, PullEvent};
use crate::transport::{Read, Transport, code};
use kvserve_runtime::completion::Completion;
use kvserve_runtime::{ChannelId, ChannelKind, EndReason, Nanos, WorkId};
use std::future::Future;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

/// One read to be posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct PostArgs {
    pub read: u64,
    pub first: u32,
    pub count: u32,
    pub lease: u64,
    pub epoch: u32,
}

/// A read in the credit queue.
#[derive(Debug)]
pub(super) struct Queued {
    attempt: Weak<AttemptCell>,
    post: PostArgs,
}

/// A read that was posted and has not ended well.
pub(super) struct OutRead {
    post: PostArgs,
    into: Vec<PageId>,
    /// Gone once its waiter's end has come, or it was cancelled.
    wait: Option<Completion>,
    /// Gone while it waits for another, to be posted again.
    credit: Option<Credit<PeerSession>>,
}

/// What the reads of an attempt have to tell.
pub(super) struct ReadNews {
    pub ended: Vec<(u64, Result<(), EndReason>)>,
    /// Their channel is gone and quiet: to be posted again.
    pub owed: Vec<PostArgs>,
}

impl AttemptCell {
    /// Posts one read, or posts it again.
    fn post(&self, inner: &Inner, post: PostArgs, credit: Credit<PeerSession>) -> bool {
        let channel = credit.channel();
        let again = (self.out.borrow().iter()).any(|out| out.post.read == post.read);
        let begun = match again {
            true => Ok(()),
            false => self.begin_read(inner, post),
        };
        if begun.is_err() {
            self.give_back(inner, credit, false);
            return false;
        }
        let mut out = self.out.borrow_mut();
        let Some(entry) = out.iter_mut().find(|out| out.post.read == post.read) else {
            drop(out);
            self.give_back(inner, credit, false);
            return false;
        };
        let replaced = entry.credit.replace(credit);
        debug_assert!(replaced.is_none(), "a read has one credit");
        let Some(slot) = entry.wait.as_ref().map(Completion::slot) else {
            return true; // it has ended meanwhile, and says so by itself
        };
        let read = Read {
            lease: post.lease,
            epoch: post.epoch,
            first: post.first,
            into: entry.into.clone(),
        };
        drop(out);
        let (Some(pages), Ok(work)) = (&inner.pages, inner.hub.reserve(slot, channel, 1)) else {
            return false;
        };
        if let Err(code) = pages.post(channel, work, read) {
            inner.hub.unpost(work, 1, code);
            return false;
        }
        if again {
            inner.count(|counters| counters.reads_reposted += 1);
            self.session.reposts.set(self.session.reposts.get() + 1);
            // A post of its own: the limit without a byte begins anew. Three posts at most.
            self.events_push(PullEvent::Moved(inner.hub.now()));
        } else {
            self.session.reads.set(self.session.reads.get() + 1);
        }
        self.ring_driver();
        true
    }

    /// Guards the targets of a read and begins its slot.
    fn begin_read(&self, inner: &Inner, post: PostArgs) -> Result<(), ()> {
        let pages = inner.pages.as_ref().ok_or(())?;
        let from = post.first as usize;
        let into = self.target_run(from, post.count as usize).ok_or(())?;
        let guards = pages
            .ledger
            .with(|ledger| ledger.guard(into.iter().copied()));
        let wait = match inner.hub.begin("peer.read", self.deadline, Some(guards)) {
            Ok(wait) => wait,
            Err(full) => {
                if let Some(guards) = full.guards {
                    pages.ledger.with(|ledger| ledger.release(guards));
                }
                return Err(());
            }
        };
        inner.hub.set_owner(wait.slot(), self.id().request.counter);
        inner.hub.allow_reposts(wait.slot());
        // From here on the slot holds the guards: the run counts as unquiet until its good end.
        self.out.borrow_mut().push(OutRead {
            post,
            into,
            wait: Some(wait),
            credit: None,
        });
        Ok(())
    }

    /// Takes what the reads have to tell.
    pub(super) fn poll_reads(&self, inner: &Inner, cx: &mut Context<'_>) -> Option<ReadNews> {
        let mut news = ReadNews {
            ended: Vec::new(),
            owed: Vec::new(),
        };
        let mut lost = Vec::new();
        for out in self.out.borrow_mut().iter_mut() {
            let Some(wait) = &mut out.wait else {
                continue;
            };
            match Pin::new(&mut *wait).poll(cx) {
                Poll::Ready(result) => {
                    out.wait = None;
                    news.ended.push((out.post.read, result));
                }
                Poll::Pending => {
                    let owed = out.credit.is_some() && inner.hub.posts_owed(wait.slot()) > 0;
                    if owed {
                        lost.extend(out.credit.take());
                        news.owed.push(out.post);
                    }
                }
            }
        }
        for credit in lost {
            self.give_back(inner, credit, false);
        }
        let any = !news.ended.is_empty() || !news.owed.is_empty();
        any.then_some(news)
    }

    pub(super) fn read_ended(&self, inner: &Inner, read: u64, result: Result<(), EndReason>) {
        match result {
            Ok(()) => {
                self.read_is_quiet(inner, read);
                self.feed(inner, PullEvent::ReadDone(read));
            }
            Err(reason) => self.feed(inner, PullEvent::ReadEnded(read, reason)),
        }
    }

    fn read_is_quiet(&self, inner: &Inner, read: u64) {
        let mut out = self.out.borrow_mut();
        let place = out.iter().position(|out| out.post.read == read);
        let ended = place.map(|place| out.swap_remove(place));
        drop(out);
        if let Some(credit) = ended.and_then(|ended| ended.credit) {
            let bytes = self.session.bytes_pulled.get() + credit.bytes();
            self.session.bytes_pulled.set(bytes);
            self.give_back(inner, credit, true);
        }
    }

    /// Cancels all reads: those that wait for a credit, and those that are out. The guards stay
    /// with their slots, the credits until those are quiet.
    pub(super) fn stop_reads(&self, inner: &Inner) {
        let me = self.id();
        let gone = |queued: &Queued| {
            let attempt = queued.attempt.upgrade();
            attempt.is_none_or(|attempt| attempt.id() == me)
        };
        (inner.credits.borrow_mut()).retain(self.session.number, |queued| !gone(queued));
        let waits: Vec<_> = (self.out.borrow_mut().iter_mut())
            .filter_map(|out| out.wait.take())
            .collect();
        drop(waits);
    }

    /// Nothing of it is out any more, or its pages are quarantined.
    pub(super) fn forget_reads(&self, inner: &Inner) {
        let reads = self.out.take();
        for read in reads {
            if let Some(credit) = read.credit {
                self.give_back(inner, credit, false);
            }
        }
        self.session.pump(inner);
    }

    /// Whether nothing that was posted can touch a target any more, or its page is quarantined.
    pub(super) fn is_quiet(&self, inner: &Inner) -> bool {
        let out = self.out.borrow();
        let pages = out.iter().flat_map(|out| &out.into);
        inner.pages.as_ref().is_none_or(|parts| {
            parts.ledger.with(|ledger| {
                (pages.clone()).all(|page| {
                    ledger.named(*page) == 0 || ledger.state(*page) == PageState::Quarantined
                })
            })
        })
    }

    /// Whether a target was quarantined: a channel of it could not be proven quiet.
    pub(super) fn is_stuck(&self, inner: &Inner) -> bool {
        let out = self.out.borrow();
        let mut pages = out.iter().flat_map(|out| &out.into);
        inner.pages.as_ref().is_some_and(|parts| {
            (parts.ledger)
                .with(|ledger| pages.any(|page| ledger.state(*page) == PageState::Quarantined))
        })
    }

    fn give_back(&self, inner: &Inner, credit: Credit<PeerSession>, in_place: bool) {
        let now = inner.hub.now();
        (inner.credits.borrow_mut()).give_back(now, credit, in_place);
    }
}

impl Pages {
    /// Posts one read on a channel of either kind; the source's code if it was not taken.
    fn post(&self, channel: ChannelId, work: WorkId, read: Read) -> Result<(), u32> {
        let posted = match channel.kind {
            ChannelKind::SharedMemory => self.shm.borrow_mut().post(channel, work, vec![read]),
            ChannelKind::Rdma => {
                self.shm.borrow_mut().inner_mut().forget_sums(&read.into);
                match &self.rdma {
                    Some(rdma) => rdma.transport.borrow_mut().post(channel, work, vec![read]),
                    None => return Err(code::NOT_CONNECTED),
                }
            }
            _ => {
                self.shm.borrow_mut().inner_mut().forget_sums(&read.into);
                self.transport.borrow_mut().post(channel, work, vec![read])
            }
        };
        posted.map_err(|failed| failed.code)
    }

    /// When a byte last moved on a channel.
    pub(super) fn moved_at(&self, channel: ChannelId) -> Nanos {
        match channel.kind {
            ChannelKind::SharedMemory => self.shm.borrow().moved_at(channel),
            ChannelKind::Rdma => (self.rdma.as_ref())
                .map_or(Nanos(0), |rdma| rdma.transport.borrow().moved_at(channel)),
            _ => self.transport.borrow().moved_at(channel),
        }
    }
}

impl Session {
    /// Queues a read for a credit, and posts what may be posted.
    pub(super) fn queue_read(&self, inner: &Inner, cell: &AttemptCell, post: PostArgs) {
        let attempt = self.attempts.borrow().get(&cell.id()).map(Rc::downgrade);
        let Some(attempt) = attempt else {
            return;
        };
        let page_bytes = inner.config.page_bytes as u64;
        let want = Want {
            bytes: u64::from(post.count) * page_bytes,
            deadline: cell.deadline.at(),
        };
        let queued = Queued { attempt, post };
        let now = inner.hub.now();
        let refused = (inner.credits.borrow_mut()).queue(now, self.number, want, queued);
        match refused {
            Ok(()) => {
                if let PullPath::Open(channel) = self.pull_path()
                    && !inner.hub.channel_is_open(channel)
                {
                    inner.check_pull_path(self);
                }
                self.pump(inner);
            }
            Err((error, _)) => cell.feed(inner, PullEvent::NoCredit(post.read, error)),
        }
    }

    /// Posts what waits and may go, of this session and of others: a credit of one may be what
    /// another has waited for.
    pub(super) fn pump(&self, inner: &Inner) {
        if inner.pumping.replace(true) {
            return; // the call below us on the stack goes on
        }
        loop {
            let now = inner.hub.now();
            let next = (inner.credits.borrow_mut()).next(now, |peer| inner.channel_to_read(peer));
            let Some((credit, Queued { attempt, post })) = next else {
                break;
            };
            let wanted =
                (attempt.upgrade()).filter(|attempt| attempt.phase() == AttemptPhase::Pulling);
            match wanted {
                Some(attempt) => {
                    if !attempt.post(inner, post, credit) {
                        attempt.feed(inner, PullEvent::NotPosted(post.read));
                    }
                }
                None => (inner.credits.borrow_mut()).give_back(now, credit, false),
            }
        }
        inner.pumping.set(false);
    }
}

impl Inner {
    /// The channel that takes a read of this session now.
    fn channel_to_read(&self, peer: PeerSession) -> Option<ChannelId> {
        let session = self.session_numbered(peer)?;
        let pages = self.pages.as_ref()?;
        let takes =
            |channel: ChannelId| self.hub.channel_is_open(channel) && pages.room(channel) > 0;
        if !session.is_live() {
            return None;
        }
        match session.pull_path() {
            PullPath::Open(channel) if channel.kind == ChannelKind::Rdma => {
                session.rdma.channel_that(takes)
            }
            PullPath::Open(channel) if takes(channel) => Some(channel),
            PullPath::Open(_) | PullPath::None => None,
        }
    }
}
