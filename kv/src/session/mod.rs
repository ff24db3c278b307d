//! The session between two nodes, without sockets (PROTOCOL 3).
//!
//! Owns: the frames' layouts and caps ([`frame`], `codec`), the keys and the seal on each frame
//! ([`seal`]), the mutual handshake ([`handshake`]), and who counts as alive ([`liveness`]).
//! Never does: I/O, clocks, random numbers; the shell in [`crate::peer`] hands those in.
//! Keeps: no frame is acted on before both sides have proven the key; garbage costs at most
//! its own length in memory and ends the connection, never the process.
//!
//! ```text
//! dialler                         acceptor
//!   Challenge(nonce, identity) ->
//!                              <- Challenge(nonce, identity)
//!   Proof                      ->                        (acceptor proves only to who has proven)
//!                              <- Proof, [Hello]         (from here on every frame is sealed)
//!   [Hello]                    ->
//!   [Welcome]                 <->  [Welcome]             or [Refused] with a reason both log
//! ```

mod codec;
pub mod frame;
pub mod handshake;
pub mod liveness;
pub mod seal;

pub use codec::Malformed;
pub use frame::{
    AbortReason, AttemptId, CommitOutcome, Frame, RefuseReason, RequestId, Role, ServiceRefusal,
    ShmOffer,
};
pub use handshake::{Handshake, LocalNode, PeerIdentity, Step};
pub use liveness::{Liveness, LivenessLimits, Pulse};
pub use seal::{FrameStream, PeerKey, SealedChannel, WireError};

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod handshake_tests;
