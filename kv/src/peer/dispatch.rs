//! Frames of a proven peer, each to where it belongs. Nothing here waits.

use super::hub::Inner;
use super::session::Session;
use crate::lease::LeaseEffect;
use crate::pull::PullEvent;
use crate::session::{AttemptId, Frame, RefuseReason};
use kvserve_runtime::Nanos;
use std::rc::Rc;
use std::time::Duration;

/// A shard that was away this long first ends what has expired (PROTOCOL S4).
const AWAY_LONG: Duration = Duration::from_secs(1);

impl Inner {
    pub(super) fn on_frame(&self, session: &Rc<Session>, frame: Frame) {
        let now = self.hub.now();
        match frame {
            Frame::Heartbeat => {}
            Frame::Prefill {
                id,
                left_ns,
                held_pages,
                prompt,
                payload,
            } => self.on_prefill(session, id, left_ns, held_pages, prompt, payload),
            Frame::Granted {
                id,
                lease,
                epoch,
                pages,
            } => {
                session
                    .grant_highest
                    .set(session.grant_highest.get().max(lease));
                let event = PullEvent::Granted {
                    lease,
                    epoch,
                    pages,
                };
                if !self.to_attempt(session, id, event) {
                    // Its attempt has ended here, so nothing names this lease.
                    session.send(self, &Frame::Release { id, lease, epoch });
                }
            }
            Frame::Places {
                id,
                lease,
                first,
                places,
            } => self.on_places(session, id, lease, first, &places),
            Frame::RdmaAsk {
                pair,
                serial,
                endpoint,
            } => self.on_rdma_ask(session, pair, serial, &endpoint),
            Frame::RdmaAnswer {
                pair: _,
                serial,
                endpoint,
                text,
            } => self.on_rdma_answer(session, serial, &endpoint, text),
            Frame::Busy { id, retry_ms } => {
                self.to_attempt(session, id, PullEvent::Busy { retry_ms });
            }
            Frame::PrefillRefused { id, refusal, code } => {
                self.to_attempt(session, id, PullEvent::Refused { refusal, code });
            }
            Frame::Queued { id, ahead: _ } => {
                self.to_attempt(session, id, PullEvent::Queued);
            }
            Frame::Watermark {
                id,
                lease,
                first,
                checksums,
            } => {
                let event = PullEvent::Watermark {
                    lease,
                    first,
                    checksums,
                };
                self.to_attempt(session, id, event);
            }
            Frame::FirstToken { id, payload } => {
                self.to_attempt(session, id, PullEvent::FirstToken(payload));
            }
            Frame::Complete {
                id,
                lease,
                pages,
                tail_tokens: _,
                first,
                checksums,
            } => {
                let event = PullEvent::Complete {
                    lease,
                    pages,
                    first,
                    checksums,
                };
                self.to_attempt(session, id, event);
            }
            Frame::Aborted { id, reason } => {
                self.to_attempt(session, id, PullEvent::Aborted(reason));
            }
            Frame::CommitAnswer { id, lease, outcome } => {
                self.to_attempt(session, id, PullEvent::CommitAnswer { lease, outcome });
            }
            Frame::ReleaseAnswer { .. } => {}
            Frame::FenceQuery { id, lease } => {
                if !self.to_attempt(session, id, PullEvent::FenceQuery { lease }) {
                    // Attempts leave the table only when no post names their lease.
                    session.send(self, &Frame::FenceAnswer { id, lease });
                }
            }
            Frame::Commit {
                id,
                grantor,
                lease,
                epoch,
                pages,
            } => self.with_leases(|leases, out| {
                leases.commit(now, session.number, id, grantor, lease, epoch, pages, out);
            }),
            Frame::Release {
                id,
                lease,
                epoch: _,
            } => self.with_leases(|leases, out| {
                leases.release(now, session.number, id, lease, out);
            }),
            Frame::Cancel { id } => self.with_leases(|leases, out| {
                leases.cancel(now, session.number, id, out);
            }),
            Frame::Renew {
                grant_highest,
                live,
            } => self.with_leases(|leases, out| {
                leases.renew(now, session.number, grant_highest, &live, out);
            }),
            Frame::FenceAnswer { id, lease } => self.with_leases(|leases, out| {
                leases.fence_answer(now, session.number, id, lease, out);
            }),
            Frame::App { kind, bytes } => self.events.app(&session.peer.node_id, kind, &bytes),
            Frame::Bye { reason } | Frame::Refused { reason, text: _ } => {
                session.request_end(reason, true);
            }
            Frame::Challenge(_)
            | Frame::Proof(_)
            | Frame::Hello(_)
            | Frame::Welcome
            | Frame::DataOpen(_)
            | Frame::DataAccepted(_) => session.request_end(RefuseReason::Violation, false),
        }
    }

    /// Hands an event to a live attempt of this session; `false` when there is none.
    fn to_attempt(&self, session: &Session, id: AttemptId, event: PullEvent) -> bool {
        let attempt = session.attempts.borrow().get(&id).cloned();
        match attempt {
            Some(attempt) => {
                attempt.feed(self, event);
                true
            }
            None => {
                self.count(|counters| counters.frames_stale += 1);
                false
            }
        }
    }

    /// One step of the lease table, then what it asks for.
    pub(super) fn with_leases<T>(
        &self,
        step: impl FnOnce(&mut crate::lease::LeaseTable, &mut Vec<LeaseEffect>) -> T,
    ) -> T {
        let mut effects = Vec::new();
        let result = step(&mut self.leases.borrow_mut(), &mut effects);
        self.perform(effects);
        result
    }

    /// Carries out what the lease table asks for. Nothing may be borrowed.
    pub(super) fn perform(&self, effects: Vec<LeaseEffect>) {
        for effect in effects {
            match effect {
                LeaseEffect::Send(number, frame) => {
                    if let Some(session) = self.session_numbered(number) {
                        session.send(self, &frame);
                    }
                }
                LeaseEffect::CancelProducer(number, id) => self.cancel_producer(number, id),
                LeaseEffect::Free(freed) => {
                    if let Some(pages) = &self.pages {
                        pages.ledger.with(|ledger| ledger.end_lease(&freed));
                    }
                }
                LeaseEffect::EndSession(number, reason) => {
                    if let Some(session) = self.session_numbered(number) {
                        session.request_end(reason, false);
                    }
                }
            }
        }
    }

    /// After a long absence: expired leases and attempts end before any frame is read.
    pub(super) fn catch_up(&self) {
        let now = self.hub.now();
        if now.since(self.turned_at.replace(now)) >= AWAY_LONG {
            self.expire(now);
        }
    }

    /// Ends what has expired on either side.
    pub(super) fn expire(&self, now: Nanos) {
        self.with_leases(|leases, out| leases.tick(now, out));
        let sessions: Vec<_> = self.sessions.borrow().values().cloned().collect();
        for session in sessions {
            let attempts: Vec<_> = session.attempts.borrow().values().cloned().collect();
            for attempt in attempts {
                attempt.feed(self, PullEvent::Tick);
            }
        }
    }
}
