//! The reads of attempts: queued for a credit, posted, posted again, and what became of them.

use super::path::PullPath;
use super::pull::Pull;
use super::wait::Wait;
use super::{Key, Node, PAGE_BYTES};
use crate::sim::check::Invariant;
use crate::sim::context::Context;
use kvserve_kv::credits::{Allowance, Credit, CreditLimits, Want};
use kvserve_kv::lease::PeerSession;
use kvserve_kv::ledger::PageState;
use kvserve_kv::pull::{AttemptPhase, PullEvent};
use kvserve_kv::transport::sim::{LinkId, READS_IN_FLIGHT_MAX};
use kvserve_kv::{PageId, Read, Transport};
use kvserve_runtime::{EndReason, GuardKeeper as _, WorkId};
use std::collections::VecDeque;

/// So few that reads wait, for their peer and for all.
pub const CREDITS: CreditLimits = CreditLimits {
    channel: Allowance {
        reads: 5,
        bytes: u64::MAX,
    },
    peer: Allowance {
        reads: 5,
        bytes: u64::MAX,
    },
    shard: Allowance {
        reads: 7,
        bytes: u64::MAX,
    },
    waiting_max: 256,
};

/// One read to be posted.
#[derive(Clone, Copy, Debug)]
pub struct PostArgs {
    pub read: u64,
    pub first: u32,
    pub count: u32,
    pub lease: u64,
    pub epoch: u32,
}

/// A read that was posted and has not ended well.
pub struct OutRead {
    post: PostArgs,
    into: Vec<PageId>,
    /// What the fabric asks the ledger about at each touch.
    shadow: u64,
    pub wait: Option<Wait>,
    credit: Option<Credit<PeerSession>>,
    /// Where it was posted last.
    posted: Option<(WorkId, LinkId)>,
}

impl Node {
    /// Queues a read for a credit; [`Node::pump`] posts what may go.
    pub(super) fn queue_read(
        &mut self,
        pull: &Pull,
        key: Key,
        post: PostArgs,
        events: &mut VecDeque<PullEvent>,
    ) {
        let want = Want {
            bytes: u64::from(post.count) * PAGE_BYTES as u64,
            deadline: pull.deadline.at(),
        };
        let queued = self.credits.queue(self.turned_at, key.0, want, (key, post));
        if let Err((error, _)) = queued {
            events.push_back(PullEvent::NoCredit(post.read, error));
        }
    }

    /// Posts what waits and may go.
    pub(super) fn pump(&mut self, context: &mut Context) {
        loop {
            let (sessions, hub, fabric) = (&self.sessions, &self.hub, &self.fabric);
            let channel_of = |peer: PeerSession| {
                let session = sessions.get(&peer).filter(|session| !session.ended)?;
                let PullPath::Open(channel, link) = session.path else {
                    return None;
                };
                let room = fabric.borrow().in_flight(link) < READS_IN_FLIGHT_MAX;
                (room && hub.channel_is_open(channel)).then_some(channel)
            };
            let Some((credit, (key, post))) = self.credits.next(self.turned_at, channel_of) else {
                return;
            };
            let Some(mut pull) = self.pulls.remove(&key) else {
                self.credits.give_back(self.turned_at, credit, false);
                continue;
            };
            let wanted = pull.machine.phase() == AttemptPhase::Pulling;
            let posted = if wanted {
                self.post(context, &mut pull, post, credit)
            } else {
                self.credits.give_back(self.turned_at, credit, false);
                true
            };
            self.pulls.insert(key, pull);
            if !posted {
                self.feed(context, key, PullEvent::NotPosted(post.read));
            }
        }
    }

    /// Posts one read, or posts it again.
    fn post(
        &mut self,
        context: &mut Context,
        pull: &mut Pull,
        post: PostArgs,
        credit: Credit<PeerSession>,
    ) -> bool {
        let again = pull.out.iter().any(|out| out.post.read == post.read);
        if !again && !self.begin_read(pull, post) {
            self.credits.give_back(self.turned_at, credit, false);
            return false;
        }
        let channel = credit.channel();
        let session = self.sessions.get(&credit.peer());
        let link = session.and_then(|session| match session.path {
            PullPath::Open(_, link) => Some(link),
            PullPath::None(_) | PullPath::Opening(_) => None,
        });
        let out = pull.out.iter_mut().find(|out| out.post.read == post.read);
        let (Some(out), Some(link)) = (out, link) else {
            self.credits.give_back(self.turned_at, credit, false);
            return false;
        };
        out.credit = Some(credit);
        let Some(slot) = out.wait.as_ref().map(Wait::slot) else {
            return true; // it has ended meanwhile, and says so by itself
        };
        if again {
            self.judge_repost(context, &out.into);
        }
        let Ok(work) = self.hub.reserve(slot, channel, 1) else {
            return false;
        };
        let read = Read {
            lease: post.lease,
            epoch: post.epoch,
            first: post.first,
            into: out.into.clone(),
        };
        let posted = {
            let mut transport = self.transport.borrow_mut();
            transport.set_tag(out.shadow);
            transport.post(channel, work, vec![read])
        };
        if let Err(failed) = posted {
            context.note(|| format!("{}: a post failed", self.plan.name));
            self.hub.unpost(work, 1, failed.code);
            return false;
        }
        out.posted = Some((work, link));
        if again {
            let mut effects = Vec::new();
            let now = self.turned_at;
            (pull.machine).on(now, PullEvent::Moved(now), &mut effects);
        }
        true
    }

    /// E5: what is posted again must not be under way anywhere any more.
    fn judge_repost(&self, context: &mut Context, into: &[PageId]) {
        context.coverage.hit("read posted again");
        let fabric = self.fabric.borrow();
        if let Some(page) = (into.iter()).find(|page| fabric.targets(self.endpoint, **page)) {
            let what = format!(
                "{}: a read into page {} is posted again while its old channel drains (E5)",
                self.plan.name, page.0
            );
            context.broke(Invariant::I2, what);
        }
    }

    /// Guards the targets of a read and begins its slot.
    fn begin_read(&mut self, pull: &mut Pull, post: PostArgs) -> bool {
        let from = post.first as usize;
        let Some(into) = pull.targets.get(from..from + post.count as usize) else {
            return false;
        };
        let into = into.to_vec();
        let (guards, shadow) = self.keeper.guard(&into);
        let completion = match self.hub.begin("peer.read", pull.deadline, Some(guards)) {
            Ok(completion) => completion,
            Err(full) => {
                if let Some(guards) = full.guards {
                    self.keeper.release(guards);
                }
                return false;
            }
        };
        self.hub.allow_reposts(completion.slot());
        pull.out.push(OutRead {
            post,
            into,
            shadow,
            wait: Some(Wait::new(completion)),
            credit: None,
            posted: None,
        });
        true
    }

    /// Takes what the reads have to tell.
    pub(super) fn read_completions(&mut self, context: &mut Context) {
        let due = |(key, pull): (&Key, &Pull)| pull.waits().any(Wait::is_due).then_some(*key);
        let keys: Vec<Key> = self.pulls.iter().filter_map(due).collect();
        for key in keys {
            let mut ended: Vec<(u64, Result<(), EndReason>)> = Vec::new();
            let mut owed: Vec<PostArgs> = Vec::new();
            let Some(mut pull) = self.pulls.remove(&key) else {
                continue;
            };
            for out in &mut pull.out {
                let Some(wait) = out.wait.as_mut().filter(|wait| wait.is_due()) else {
                    continue;
                };
                match wait.poll() {
                    Some(result) => {
                        out.wait = None;
                        ended.push((out.post.read, result));
                    }
                    None => {
                        let lost = out.credit.is_some() && self.hub.posts_owed(wait.slot()) > 0;
                        if let Some(credit) = out.credit.take_if(|_| lost) {
                            self.credits.give_back(self.turned_at, credit, false);
                            owed.push(out.post);
                        }
                    }
                }
            }
            let mut events = VecDeque::new();
            for post in owed {
                self.queue_read(&pull, key, post, &mut events);
            }
            self.pulls.insert(key, pull);
            for (read, result) in ended {
                events.push_back(match result {
                    Ok(()) => {
                        self.read_is_quiet(context, key, read);
                        PullEvent::ReadDone(read)
                    }
                    Err(reason) => PullEvent::ReadEnded(read, reason),
                });
            }
            for event in events {
                self.feed(context, key, event);
            }
            self.check_path(key.0);
            self.pump(context);
        }
    }

    fn read_is_quiet(&mut self, context: &mut Context, key: Key, read: u64) {
        let Some(pull) = self.pulls.get_mut(&key) else {
            return;
        };
        let Some(place) = pull.out.iter().position(|out| out.post.read == read) else {
            return;
        };
        let out = pull.out.swap_remove(place);
        if let Some(credit) = out.credit {
            self.credits.give_back(self.turned_at, credit, true);
        }
        if let Some((work, link)) = out.posted
            && self.fabric.borrow().is_under_way(link, work)
        {
            let what = format!("read {read} is done, the card still has it (P3)");
            context.broke(Invariant::I5, what);
        }
    }

    /// Cancels all reads: those that wait for a credit, and those that are out.
    pub(super) fn stop_reads(&mut self, pull: &mut Pull, key: Key) {
        self.credits.retain(key.0, |(of, _)| *of != key);
        // Dropping the completions cancels their slots; the guards stay with those.
        pull.out.iter_mut().for_each(|out| out.wait = None);
    }

    /// The attempt is over: what its reads still hold of the credits comes back.
    pub(super) fn forget_reads(&mut self, pull: &mut Pull) {
        for out in pull.out.drain(..) {
            if let Some(credit) = out.credit {
                self.credits.give_back(self.turned_at, credit, false);
            }
        }
    }

    /// What the machine is to be told once nothing that was posted can touch a target any more,
    /// or its page is quarantined.
    pub(super) fn quiet_event(&self, pull: &Pull) -> Option<PullEvent> {
        self.keeper.ledger.with(|ledger| {
            let mut pages = pull.out.iter().flat_map(|out| &out.into);
            let given_up = |page: &PageId| ledger.state(*page) == PageState::Quarantined;
            let mut stuck = false;
            let quiet = pages.all(|page| {
                stuck |= given_up(page);
                ledger.named(*page) == 0 || given_up(page)
            });
            quiet.then_some(match stuck {
                true => PullEvent::Stuck,
                false => PullEvent::Quiet,
            })
        })
    }

    /// I4: the credits in use are those of reads that are out.
    pub(super) fn check_credits(&self, context: &mut Context) {
        let out = self.pulls.values().flat_map(|pull| &pull.out);
        let held = out.filter(|out| out.credit.is_some()).count();
        let in_use = self.credits.in_flight().0 as usize;
        if held != in_use {
            let what = format!(
                "{}: {in_use} credits in use, reads hold {held}",
                self.plan.name
            );
            context.broke(Invariant::I4, what);
        }
        let most = |peer: &PeerSession| self.credits.peer(*peer).reads;
        if (self.sessions.keys()).any(|peer| most(peer) > CREDITS.peer.reads) {
            context.broke(Invariant::I7, "a peer has more reads out than its credits");
        }
    }
}
