//! Data connections: opened by the side that pulls, proven by the session's keys.

use super::Session;
use super::{HANDSHAKE, Node, Outgoing, ordinary_flush};
use crate::sim::context::Context;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::session::frame::DataOpen;
use kvserve_kv::session::seal::{open_plain, plain};
use kvserve_kv::session::{Frame, Role};
use kvserve_kv::transport::sim::{LinkId, LinkKind};
use kvserve_runtime::{ChannelId, ChannelKind, Nanos};
use std::time::Duration;

/// Posts a pull channel's ring holds.
const RING_POSTS: usize = 128;

/// Pause before a data connection is tried again.
const DATA_PAUSE: Duration = Duration::from_millis(20);
/// The data connection over which this node pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PullPath {
    /// None; to be opened at this time.
    None(Nanos),
    /// Asked for; tried again at this time.
    Opening(Nanos),
    /// There.
    Open(ChannelId, LinkId),
}

impl Node {
    pub(super) fn check_path(&mut self, number: PeerSession) {
        let Some(session) = self.sessions.get(&number) else {
            return;
        };
        if let PullPath::Open(channel, link) = session.path {
            let stands = self.fabric.borrow().stands(link);
            if !(self.hub.channel_is_open(channel) && stands) {
                self.close_path(number);
            }
        }
    }

    /// Takes the pull connection down the ladder.
    pub(super) fn close_path(&mut self, number: PeerSession) {
        let again = self.turned_at.after(DATA_PAUSE);
        if let Some(session) = self.sessions.get_mut(&number) {
            let path = std::mem::replace(&mut session.path, PullPath::None(again));
            if let PullPath::Open(channel, _) = path {
                self.hub.close_channel(channel);
            }
        }
    }

    pub(super) fn open_data(&mut self, number: PeerSession) {
        self.check_path(number);
        let now = self.turned_at;
        let Some(session) = self.sessions.get_mut(&number).filter(|s| !s.ended) else {
            return;
        };
        let wanted = self.plan.role == Role::Decode && session.identity.role.serves();
        let Some(peer) = session.peer.filter(|_| wanted) else {
            return;
        };
        match session.path {
            PullPath::None(at) | PullPath::Opening(at) if now >= at => {}
            PullPath::None(_) | PullPath::Opening(_) | PullPath::Open(..) => return,
        }
        session.data_count += 1;
        session.path = PullPath::Opening(now.after(HANDSHAKE / 4));
        let open = (session.channel).data_open(session.identity.incarnation, 0, session.data_count);
        let bytes = plain(&Frame::DataOpen(open.clone()));
        self.out.push(Outgoing::DataOpen { peer, open, bytes });
    }

    pub(super) fn take_data(&mut self, from: usize, bytes: &[u8]) {
        let Ok(Frame::DataOpen(open)) = open_plain(&bytes[4..]) else {
            return;
        };
        let incarnation = self.incarnation;
        let fits = |session: &&mut Session| {
            !session.ended
                && session.identity.incarnation == open.opener
                && open.target == incarnation
                && session.channel.data_open_is_genuine(&open)
        };
        let Some(session) = self.sessions.values_mut().find(fits) else {
            return;
        };
        if open.count <= session.data_count {
            return;
        }
        session.data_count = open.count;
        let (number, answer) = (session.number, session.channel.data_accept(&open));
        (self.fabric.borrow_mut()).destroy_session(self.endpoint, number.0, false);
        self.out.push(Outgoing::DataAccept {
            to: from,
            bytes: plain(&Frame::DataAccepted(answer)),
            session: number.0,
        });
    }

    pub(super) fn attach_data(
        &mut self,
        context: &mut Context,
        open: &DataOpen,
        bytes: &[u8],
        server: usize,
        server_session: u64,
    ) {
        let Ok(Frame::DataAccepted(proof)) = open_plain(&bytes[4..]) else {
            return;
        };
        let fits = |session: &&Session| {
            !session.ended
                && session.identity.incarnation == open.target
                && open.count == session.data_count
                && session.channel.data_accept_is_genuine(open, &proof)
        };
        let Some(number) = self.sessions.values().find(fits).map(|s| s.number) else {
            return;
        };
        self.close_path(number);
        let kind = match self.plan.reads {
            LinkKind::Served => ChannelKind::Simulated,
            LinkKind::OneSided => ChannelKind::Rdma,
            LinkKind::Mapped => ChannelKind::SharedMemory,
        };
        let channel = self
            .hub
            .open_channel(kind, self.transport_source, RING_POSTS);
        let (Some(session), Ok(channel)) = (self.sessions.get_mut(&number), channel) else {
            return;
        };
        let link = self.fabric.borrow_mut().connect(
            self.endpoint,
            channel,
            server,
            session.identity.incarnation,
            server_session,
            self.plan.reads,
            ordinary_flush(context),
        );
        session.path = PullPath::Open(channel, link);
        self.pump(context);
    }
}
