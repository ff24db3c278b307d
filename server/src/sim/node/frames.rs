//! Frames of a session: opened, handed to whom they are for, sealed and sent.

use super::{Node, Outgoing};
use crate::sim::check::Invariant;
use crate::sim::context::{Context, FrameFault};
use kvserve_kv::lease::PeerSession;
use kvserve_kv::pull::PullEvent;
use kvserve_kv::session::{Frame, FrameStream, RefuseReason};

impl Node {
    /// Takes one frame; whether there may be more.
    pub(super) fn read_frame(
        &mut self,
        context: &mut Context,
        number: PeerSession,
        frames: &mut FrameStream,
        tampered: bool,
    ) -> bool {
        let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
            return false;
        };
        let opened = match frames.next_frame() {
            Ok(None) => return false,
            Ok(Some(bytes)) => session.channel.open(bytes),
            Err(error) => Err(error),
        };
        match opened {
            Ok(opened) => {
                session.liveness.heard();
                // What is bent stands behind everything that was whole, or in its place.
                if tampered && frames.rest().is_empty() {
                    context.broke(Invariant::I5, "bent bytes were taken for a frame (S1)");
                }
                if opened.incarnation == session.identity.incarnation {
                    self.on_frame(context, number, opened.frame);
                }
            }
            Err(_) => self.end_session(number, RefuseReason::Violation, false),
        }
        true
    }

    pub(super) fn on_frame(&mut self, context: &mut Context, number: PeerSession, frame: Frame) {
        if !matches!(frame, Frame::Heartbeat) {
            context.note(|| format!("{} hears {}", self.plan.name, brief(&frame)));
        }
        match frame {
            // Places and queue pairs are of peers with such a path, which these have not.
            Frame::Heartbeat
            | Frame::ReleaseAnswer { .. }
            | Frame::App { .. }
            | Frame::Places { .. }
            | Frame::RdmaAsk { .. }
            | Frame::RdmaAnswer { .. } => {}
            Frame::Prefill {
                id,
                left_ns,
                held_pages,
                prompt,
                payload,
            } => self.on_prefill(context, number, id, left_ns, held_pages, prompt, &payload),
            Frame::Granted {
                id,
                lease,
                epoch,
                pages,
            } => {
                if let Some(session) = self.sessions.get_mut(&number) {
                    session.grant_highest = session.grant_highest.max(lease);
                }
                let event = PullEvent::Granted {
                    lease,
                    epoch,
                    pages,
                };
                if !self.feed(context, (number, id), event) {
                    self.send(context, number, &Frame::Release { id, lease, epoch });
                }
            }
            Frame::Busy { id, retry_ms } => {
                self.feed(context, (number, id), PullEvent::Busy { retry_ms });
            }
            Frame::PrefillRefused { id, refusal, code } => {
                self.feed(context, (number, id), PullEvent::Refused { refusal, code });
            }
            Frame::Queued { id, ahead: _ } => {
                self.feed(context, (number, id), PullEvent::Queued);
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
                self.feed(context, (number, id), event);
            }
            Frame::FirstToken { id, payload } => {
                self.feed(context, (number, id), PullEvent::FirstToken(payload));
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
                self.feed(context, (number, id), event);
            }
            Frame::Aborted { id, reason } => {
                self.feed(context, (number, id), PullEvent::Aborted(reason));
            }
            Frame::CommitAnswer { id, lease, outcome } => {
                self.feed(
                    context,
                    (number, id),
                    PullEvent::CommitAnswer { lease, outcome },
                );
            }
            Frame::FenceQuery { id, lease } => {
                if !self.feed(context, (number, id), PullEvent::FenceQuery { lease }) {
                    self.send(context, number, &Frame::FenceAnswer { id, lease });
                }
            }
            Frame::Bye { reason } | Frame::Refused { reason, text: _ } => {
                if reason == RefuseReason::Superseded {
                    self.superseded = true;
                }
                self.end_session(number, reason, true);
            }
            Frame::Commit { .. }
            | Frame::Release { .. }
            | Frame::Cancel { .. }
            | Frame::Renew { .. }
            | Frame::FenceAnswer { .. } => self.on_lease_frame(context, number, frame),
            Frame::Challenge(_)
            | Frame::Proof(_)
            | Frame::Hello(_)
            | Frame::Welcome
            | Frame::DataOpen(_)
            | Frame::DataAccepted(_) => {
                self.end_session(number, RefuseReason::Violation, false);
            }
        }
    }

    /// Seals and sends a frame, if nothing strikes it before.
    pub(super) fn send(&mut self, context: &mut Context, number: PeerSession, frame: &Frame) {
        let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
            return;
        };
        let time = context.time;
        let strike = (context.armed).strikes(time, self.plan.index, frame, &mut context.rng);
        let idle = matches!(frame, Frame::Heartbeat);
        let mut times = 1;
        let mut other = None;
        match strike {
            None => {}
            Some(FrameFault::Lose | FrameFault::LoseLastWord) => {
                context.note(|| format!("{}: lost {}", self.plan.name, brief(frame)));
                return context.fault("fault: frame lost");
            }
            Some(FrameFault::Double) => {
                context.fault("fault: frame doubled");
                times = 2;
            }
            Some(FrameFault::StaleCommit(part)) => {
                context.fault("fault: stale commit");
                other = Some(stale(frame, part));
            }
            // Never drawn for a frame: it makes one.
            Some(FrameFault::OutOfTurn(_)) => {}
            Some(FrameFault::WatermarkBack) => {
                context.fault("fault: watermark goes back");
                if let Frame::Watermark { id, lease, .. } = frame {
                    other = Some(Frame::Watermark {
                        id: *id,
                        lease: *lease,
                        first: 0,
                        checksums: Vec::new(),
                    });
                }
                // The right one follows, so that only the regression is new.
                let bytes = session.channel.seal(other.as_ref().unwrap_or(frame));
                let conn = session.conn;
                self.out.push(Outgoing::Bytes { conn, bytes, idle });
                other = None;
            }
        }
        for _ in 0..times {
            let bytes = session.channel.seal(other.as_ref().unwrap_or(frame));
            let conn = session.conn;
            self.out.push(Outgoing::Bytes { conn, bytes, idle });
        }
    }
}

/// A COMMIT that names an older grant.
fn stale(frame: &Frame, part: u8) -> Frame {
    let mut frame = frame.clone();
    if let Frame::Commit {
        grantor,
        lease,
        epoch,
        ..
    } = &mut frame
    {
        match part % 3 {
            0 => *grantor = grantor.wrapping_sub(1),
            1 => *lease = lease.wrapping_sub(1),
            _ => *epoch = epoch.wrapping_sub(1),
        }
    }
    frame
}

fn brief(frame: &Frame) -> String {
    let mut text = format!("{frame:?}");
    text.truncate(150);
    text
}
