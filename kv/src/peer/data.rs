//! Data connections: opened by the session's dialler for whichever side pulls, proven by a token
//! of the session that serves once, then handed to the transport.

use super::config::TransportChoice;
use super::connect::{io_refusal, jitter, violation, wire_refusal};
use super::hub::Inner;
use super::session::{PullPath, Session};
use super::wait::{Woken, within};
use crate::session::frame::{DataOpen, Frame, RefuseReason};
use crate::session::handshake::Refusal;
use crate::session::seal::{open_plain, plain};
use crate::transport::tcp::READS_IN_FLIGHT_MAX;
use kvserve_runtime::ChannelKind;
use kvserve_runtime::net::TcpStream;
use std::time::Duration;

/// The session's dialler pulls over this lane.
const LANE_DIALLER_PULLS: u16 = 0;

/// The session's acceptor pulls over this lane.
const LANE_ACCEPTOR_PULLS: u16 = 1;

/// Bytes of a `DataAccepted` frame: length, kind, proof. Read exactly, since reads may follow.
const DATA_ACCEPTED_BYTES: usize = 4 + 1 + 32;

/// Posts a pull channel's ring holds: twice what the transport takes, so that posts whose
/// waiters have ended do not shut new ones out.
const RING_POSTS: usize = 2 * READS_IN_FLIGHT_MAX;

/// Pauses between tries to open a data connection.
const DATA_PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// How often a session with all its data connections looks whether they still stand.
const DATA_LOOK: Duration = Duration::from_millis(200);

impl Inner {
    /// On the session's dialler: keeps its data connections up. Never ends by itself.
    pub(super) async fn data_loop(&self, session: &Session) {
        let (we, they) = (self.config.role, session.peer.role);
        let tcp = !matches!(
            self.config.transport,
            TransportChoice::Shm | TransportChoice::Rdma
        );
        let lanes = [
            (LANE_DIALLER_PULLS, tcp && we.pulls() && they.serves()),
            (LANE_ACCEPTOR_PULLS, tcp && we.serves() && they.pulls()),
        ];
        let mut pause = DATA_PAUSE.0;
        loop {
            let mut missing = false;
            for (lane, wanted) in lanes {
                if !wanted || !session.we_dialled || self.lane_stands(session, lane) {
                    continue;
                }
                let limit = self.config.limits.handshake;
                let opened = within(&self.shard, limit, self.open_data(session, lane)).await;
                match opened {
                    Some(Ok(())) => pause = DATA_PAUSE.0,
                    Some(Err(_)) | None => missing = true,
                }
            }
            let wait = if missing {
                pause = (pause * 2).min(DATA_PAUSE.1);
                jitter(pause)
            } else {
                DATA_LOOK
            };
            match session.data_bell.wait(self.hub.now().after(wait)).await {
                // A channel that broke may still be on the ladder: a short pause, then anew.
                Woken::Rung => self.shard.sleep(DATA_PAUSE.0).await,
                Woken::Deadline => {}
                Woken::NoSlot => self.shard.sleep(wait).await,
            }
        }
    }

    fn lane_stands(&self, session: &Session, lane: u16) -> bool {
        if lane == LANE_DIALLER_PULLS {
            self.check_pull_path(session);
            return matches!(session.tcp_path.get(), PullPath::Open(_));
        }
        let mut served = session.served.borrow_mut();
        if let Some(pages) = &self.pages {
            served.retain(|connection| pages.authority.borrow().knows(*connection));
        }
        !served.is_empty()
    }

    async fn open_data(&self, session: &Session, lane: u16) -> Result<(), Refusal> {
        let stream = TcpStream::connect(session.address)
            .await
            .map_err(io_refusal)?;
        let count = session.next_count(lane);
        let open = session
            .channel
            .borrow()
            .data_open(session.peer.incarnation, lane, count);
        let first = plain(&Frame::DataOpen(open.clone()));
        stream.write_all(&first).await.map_err(io_refusal)?;
        let mut answer = [0; DATA_ACCEPTED_BYTES];
        let mut filled = 0;
        while filled < answer.len() {
            match stream
                .read(&mut answer[filled..])
                .await
                .map_err(io_refusal)?
            {
                0 => return Err(violation("the data connection was closed")),
                count => filled += count,
            }
        }
        let genuine = match open_plain(&answer[4..]).map_err(wire_refusal)? {
            Frame::DataAccepted(proof) => session
                .channel
                .borrow()
                .data_accept_is_genuine(&open, &proof),
            _ => false,
        };
        if !genuine {
            return Err(violation("the data connection was not accepted"));
        }
        self.attach_data(session, stream, lane == LANE_DIALLER_PULLS)
    }

    /// On the session's acceptor: a data connection came in.
    pub(super) async fn take_data(
        &self,
        stream: TcpStream,
        open: &DataOpen,
    ) -> Result<(), Refusal> {
        let session = self.live_sessions().into_iter().find(|session| {
            session.is_live()
                && !session.we_dialled
                && session.peer.incarnation == open.opener
                && self.config.incarnation == open.target
                && session.channel.borrow().data_open_is_genuine(open)
        });
        let session = session.ok_or_else(|| violation("a data connection of no session"))?;
        let (we, they) = (self.config.role, session.peer.role);
        let we_pull = match open.lane {
            LANE_DIALLER_PULLS if they.pulls() && we.serves() => false,
            LANE_ACCEPTOR_PULLS if we.pulls() && they.serves() => true,
            _ => return Err(violation("a data connection of no use")),
        };
        let lane = open.lane as usize;
        let mut counts = session.data_count.get();
        if open.count <= counts[lane] {
            return Err(violation("a data connection's token came twice"));
        }
        counts[lane] = open.count;
        session.data_count.set(counts);
        let answer = session.channel.borrow().data_accept(open);
        let answer = plain(&Frame::DataAccepted(answer));
        stream.write_all(&answer).await.map_err(io_refusal)?;
        if !session.is_live() {
            return Err(violation("the session of a data connection has ended"));
        }
        self.attach_data(&session, stream, we_pull)
    }

    /// Hands a proven data connection to the transport, in place of an older one.
    fn attach_data(
        &self,
        session: &Session,
        stream: TcpStream,
        we_pull: bool,
    ) -> Result<(), Refusal> {
        let Some(pages) = &self.pages else {
            return Err(violation("this node has no pages"));
        };
        let stream = stream.into_std();
        if we_pull {
            self.close_tcp_path(session);
            let channel = self
                .hub
                .open_channel(ChannelKind::Tcp, pages.transport_source, RING_POSTS)
                .map_err(|error| Refusal::ours(RefuseReason::Full, error.to_string()))?;
            let added = pages.transport.borrow_mut().inner_mut().add_channel(
                channel,
                stream,
                session.peer.incarnation,
            );
            if let Err(error) = added {
                self.hub.close_channel(channel);
                return Err(io_refusal(error));
            }
            session.tcp_path.set(PullPath::Open(channel));
            session.pump(self);
        } else {
            let older = session.served.take();
            for connection in older {
                pages.server.borrow_mut().close_connection(connection);
                pages.authority.borrow_mut().forget(connection);
            }
            let added = pages.server.borrow_mut().add_connection(stream);
            let connection = added.map_err(io_refusal)?;
            pages
                .authority
                .borrow_mut()
                .learn(connection, session.number);
            session.served.borrow_mut().push(connection);
        }
        // The poll loop may be parked on what it knew before.
        self.hub.ring();
        self.count(|counters| counters.data_connections += 1);
        Ok(())
    }
}

impl Session {
    /// Number of the next token of a lane.
    pub(super) fn next_count(&self, lane: u16) -> u64 {
        let mut counts = self.data_count.get();
        counts[lane as usize] += 1;
        self.data_count.set(counts);
        counts[lane as usize]
    }
}
