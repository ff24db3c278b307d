//! Whether a node may be asked for a prefill now, and what an ask replaces.

use super::config::PrefillAsk;
use super::hub::Inner;
use super::session::{PullPath, Session};
use crate::pull::{FailReason, NotBegun, PullEvent};
use crate::session::frame::{LEASE_PAGES_MAX, PAYLOAD_BYTES_MAX, PROMPT_TOKENS_MAX};
use crate::session::{AttemptId, Pulse};
use std::rc::Rc;

impl Inner {
    pub(super) fn may_ask(
        &self,
        node_id: &str,
        ask: &PrefillAsk,
    ) -> Result<(Rc<Session>, AttemptId), FailReason> {
        let missing = |what| Err(FailReason::NotBegun(what));
        if !self.config.role.pulls() || self.pages.is_none() {
            return missing(NotBegun::NotADecodeNode);
        }
        if ask.prompt.len() > PROMPT_TOKENS_MAX
            || ask.payload.len() > PAYLOAD_BYTES_MAX
            || ask.into.len() > LEASE_PAGES_MAX
        {
            return missing(NotBegun::TooLong);
        }
        if ask.deadline.passed(self.hub.now()) {
            return Err(FailReason::RequestDeadline);
        }
        let id = AttemptId {
            request: ask.request,
            attempt: ask.attempt,
        };
        if ask.request.incarnation != self.config.incarnation {
            return missing(NotBegun::OldAttempt);
        }
        for session in self.live_sessions() {
            let attempts = session.attempts.borrow();
            let newest = attempts
                .keys()
                .filter(|known| known.request == id.request)
                .map(|known| known.attempt)
                .max();
            if newest.is_some_and(|newest| newest >= id.attempt) {
                return missing(NotBegun::OldAttempt);
            }
        }
        let Some(session) = self.session_of(node_id) else {
            return missing(NotBegun::NoSession);
        };
        if !session.peer.role.serves() {
            return missing(NotBegun::NotAPrefillNode);
        }
        match session.pulse() {
            Pulse::Alive => {}
            Pulse::Suspect | Pulse::Dead => return missing(NotBegun::Suspect),
        }
        self.check_pull_path(&session);
        match session.pull_path() {
            PullPath::Open(_) => Ok((session, id)),
            PullPath::None => missing(NotBegun::NoDataConnection),
        }
    }

    /// Starting attempt k+1 cancels k (PROTOCOL R1).
    pub(super) fn cancel_earlier(&self, id: AttemptId) {
        for session in self.live_sessions() {
            let earlier: Vec<_> = session
                .attempts
                .borrow()
                .values()
                .filter(|cell| cell.id().request == id.request)
                .cloned()
                .collect();
            for cell in earlier {
                cell.feed(self, PullEvent::Cancel);
            }
        }
    }
}
