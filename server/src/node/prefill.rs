//! Prefill for peers: a lease of pages, chunks computed into them, watermarks, the first token.

use super::NodeContext;
use super::payload;
use crate::engine::SequenceEvent;
use crate::scheduler::{PagesFrom, SequenceSpec};
use futures_lite::future;
use kvserve_kv::ledger::AllocateAs;
use kvserve_kv::peer::{IncomingPrefill, PrefillService, Publisher};
use kvserve_kv::session::{AbortReason, ServiceRefusal};
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Code of a refusal: the prompt is empty, too long, or names unknown tokens.
pub const REFUSED_PROMPT: u16 = 1;
/// Code of a refusal: the sampling parameters could not be read.
pub const REFUSED_PAYLOAD: u16 = 2;
/// Code of a refusal: the prompt can never fit into this node's pool.
pub const REFUSED_SIZE: u16 = 3;

/// When a busy node asks a peer to come again.
const BUSY_RETRY_MS: u32 = 20;

/// How often a waiting prefill tells that it still lives; a tenth of the peer's 3 s limit.
const QUEUE_HEARTBEAT: Duration = Duration::from_millis(300);

/// Answers `Prefill` frames of decode nodes.
pub struct PeerPrefills {
    node: Weak<NodeContext>,
}

impl PeerPrefills {
    /// For a node that is still being put together.
    pub fn new(node: Weak<NodeContext>) -> Self {
        PeerPrefills { node }
    }
}

impl PrefillService for PeerPrefills {
    fn prefill(&self, ask: IncomingPrefill, publisher: Publisher) -> Result<(), ServiceRefusal> {
        let Some(node) = self.node.upgrade() else {
            return Err(ServiceRefusal::Draining);
        };
        if node.readiness.draining() {
            return Err(ServiceRefusal::Draining);
        }
        let vocab = node.core.vocab_size();
        let known = ask.prompt.iter().all(|id| (*id as usize) < vocab);
        if ask.prompt.is_empty() || !known || ask.prompt.len() >= node.context_max {
            return Err(ServiceRefusal::Invalid(REFUSED_PROMPT));
        }
        let Ok((sampling, generated)) = payload::decode_sampling(&ask.payload) else {
            return Err(ServiceRefusal::Invalid(REFUSED_PAYLOAD));
        };
        let wanted = node.limits.pages_for(ask.prompt.len());
        let usable = node.ledger.with(|ledger| ledger.usable_pages());
        if wanted > usable {
            return Err(ServiceRefusal::Invalid(REFUSED_SIZE));
        }
        let busy = ServiceRefusal::Busy {
            retry_ms: BUSY_RETRY_MS,
        };
        let mut pages = Vec::with_capacity(wanted);
        let reserved = node
            .ledger
            .with(|ledger| ledger.allocate(wanted, AllocateAs::Building, &mut pages));
        if reserved.is_err() {
            node.metrics.peer_prefills_busy.fetch_add(1, Relaxed);
            return Err(busy);
        }
        let spec = SequenceSpec {
            tokens: ask.prompt,
            generated: generated as usize,
            new_tokens_max: 1,
            stop_token_ids: Vec::new(),
            sampling,
            deadline: ask.deadline,
            pages: PagesFrom::Lease(pages.clone()),
        };
        let Ok(sequence) = node.core.submit(spec) else {
            node.ledger.with(|ledger| ledger.free(&pages));
            node.metrics.peer_prefills_busy.fetch_add(1, Relaxed);
            return Err(busy);
        };
        if let Err(refused) = publisher.granted(pages) {
            drop(sequence);
            node.ledger.with(|ledger| ledger.free(&refused.pages));
            return Err(busy);
        }
        node.metrics.peer_prefills.fetch_add(1, Relaxed);
        let shard = node.shard.clone();
        shard.spawn(serve(node, sequence, publisher)).detach();
        Ok(())
    }
}

/// Publishes one prefill as its chunks are computed; ends with it, or when the peer cancels.
async fn serve(node: Rc<NodeContext>, mut sequence: crate::engine::Sequence, publisher: Publisher) {
    node.peer_prefills_live
        .set(node.peer_prefills_live.get() + 1);
    let page_tokens = node.limits.page_tokens;
    let prompt = sequence.view().map_or(0, |view| view.tokens);
    let pages = node.limits.pages_for(prompt);
    enum Heard {
        Event(SequenceEvent),
        Cancelled,
        Tick,
    }
    loop {
        let heard = future::or(
            async {
                publisher.cancelled().await;
                Heard::Cancelled
            },
            future::or(async { Heard::Event(sequence.next().await) }, async {
                node.shard.sleep(QUEUE_HEARTBEAT).await;
                Heard::Tick
            }),
        )
        .await;
        match heard {
            Heard::Event(SequenceEvent::Computed(tokens)) => {
                // The tail counts only at Complete (PROTOCOL L4).
                publisher.watermark(tokens / page_tokens);
            }
            Heard::Event(SequenceEvent::Token(sampled, _)) => {
                publisher.first_token(payload::encode_token(&sampled));
                let tail = prompt - (pages - 1) * page_tokens;
                publisher.complete(pages, tail);
                break;
            }
            Heard::Event(SequenceEvent::Failed(error)) => {
                publisher.abort(match error.reason {
                    "deadline_exceeded" => AbortReason::Deadline,
                    _ => AbortReason::Engine,
                });
                break;
            }
            Heard::Cancelled => break,
            Heard::Tick => publisher.queued(node.core.load().queued as u32),
        }
    }
    node.peer_prefills_live
        .set(node.peer_prefills_live.get() - 1);
}
