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

/// Code of a refusal: the peer holds as many pages as the prompt has, or more.
pub const REFUSED_HELD: u16 = 4;

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
        let Ok((sampling, generated, cache_salt)) = payload::decode_ask(&ask.payload) else {
            return Err(ServiceRefusal::Invalid(REFUSED_PAYLOAD));
        };
        let wanted = node.limits.pages_for(ask.prompt.len());
        // The page with the last token is always computed here: its token is the first sampled.
        let held = ask.held_pages as usize;
        if held >= wanted {
            return Err(ServiceRefusal::Invalid(REFUSED_HELD));
        }
        let usable = node.ledger.with(|ledger| ledger.usable_pages());
        if wanted > usable {
            return Err(ServiceRefusal::Invalid(REFUSED_SIZE));
        }
        let busy = ServiceRefusal::Busy {
            retry_ms: BUSY_RETRY_MS,
        };
        let mut pages = Vec::with_capacity(wanted);
        // What is here already, then room for all of the rest (PROTOCOL L1). All of the prompt is
        // needed here to compute it, also what the peer holds.
        let reserved = node.ledger.with(|ledger| {
            let found = match ledger.prefix_fits(&cache_salt, &ask.prompt, wanted) {
                true => ledger.take_prefix(&cache_salt, &ask.prompt, &mut pages),
                false => return None,
            };
            let missing = wanted - found;
            match ledger.allocate(missing, AllocateAs::Building, &mut pages) {
                Ok(()) => Some(found),
                Err(_) => {
                    ledger.free(&pages);
                    None
                }
            }
        });
        let Some(found) = reserved else {
            node.metrics.peer_prefills_busy.fetch_add(1, Relaxed);
            return Err(busy);
        };
        let computed = found * node.limits.page_tokens;
        let spec = SequenceSpec {
            tokens: ask.prompt,
            generated: generated as usize,
            new_tokens_max: 1,
            stop_token_ids: Vec::new(),
            sampling,
            cache_salt,
            deadline: ask.deadline,
            pages: PagesFrom::Lease {
                pages: pages.clone(),
                held,
                computed,
            },
        };
        let Ok(sequence) = node.core.submit(spec) else {
            node.ledger.with(|ledger| ledger.free(&pages));
            node.metrics.peer_prefills_busy.fetch_add(1, Relaxed);
            return Err(busy);
        };
        // The lease is over what the peer does not hold; the rest stays the scheduler's.
        if let Err(refused) = publisher.granted(pages.split_off(held)) {
            drop(sequence);
            node.ledger.with(|ledger| ledger.free(&refused.pages));
            return Err(busy);
        }
        node.metrics.peer_prefills.fetch_add(1, Relaxed);
        let shard = node.shard.clone();
        let ready = Ready { held, computed };
        shard
            .spawn(serve(node, sequence, publisher, ready))
            .detach();
        Ok(())
    }
}

/// What of a prompt is there before its first chunk.
struct Ready {
    /// Leading pages that the peer holds.
    held: usize,
    /// Tokens that were in this node's cache.
    computed: usize,
}

/// Publishes one prefill as its chunks are computed; ends with it, or when the peer cancels.
async fn serve(
    node: Rc<NodeContext>,
    mut sequence: crate::engine::Sequence,
    publisher: Publisher,
    ready: Ready,
) {
    node.peer_prefills_live
        .set(node.peer_prefills_live.get() + 1);
    let page_tokens = node.limits.page_tokens;
    let prompt = sequence.view().map_or(0, |view| view.tokens);
    let pages = node.limits.pages_for(prompt);
    let Ready { held, computed } = ready;
    if computed / page_tokens > held {
        publisher.watermark(computed / page_tokens - held);
    }
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
            Heard::Event(SequenceEvent::Cached(_)) => {}
            Heard::Event(SequenceEvent::Computed(tokens)) => {
                // The tail counts only at Complete (PROTOCOL L4).
                publisher.watermark((tokens / page_tokens).saturating_sub(held));
            }
            Heard::Event(SequenceEvent::Token(sampled, _)) => {
                publisher.first_token(payload::encode_first(&sampled, computed as u32));
                let tail = prompt - (pages - 1) * page_tokens;
                publisher.complete(pages - held, tail);
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
