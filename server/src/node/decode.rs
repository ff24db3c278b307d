//! A request on a decode node: attempts of prefill and migration, then local recompute, then
//! decode steps (PROTOCOL 4, 5).
//!
//! ```text
//!  enter ─▶ attempt 1 (peer A) ─▶ attempt 2 (peer B, else A) ─▶ recompute here
//!              │ Placed: decode steps start, tokens withheld
//!              │ Committed: tokens released          every failure: pages back, withheld
//!              ▼                                     tokens discarded, next attempt
//!           decode steps ─▶ finished
//! ```
//! Tokens told to the client are facts: every attempt starts from prompt + told tokens, so
//! nothing is sampled or sent twice (PROTOCOL R2).

use super::NodeContext;
use super::admission::{self, Admitted};
use super::attempts::{AfterFailure, AttemptFailure, Attempts, Withheld, rest_stays_here};
use super::payload;
use super::request::RequestOut;
use crate::engine::{FinishReason, RetryClass, Sequence, SequenceEvent, ServeError, Stage};
use crate::perf::{ASKED, ATTEMPT_FAILED, COMMITTED, FIRST_TOKEN, GRANTED, PLACED, Span};
use crate::scheduler::{PagesFrom, SequenceSpec};
use futures_lite::future;
use kvserve_kv::PageId;
use kvserve_kv::ledger::LedgerCell;
use kvserve_kv::peer::{Migration, MigrationEvent, PrefillAsk};
use kvserve_runtime::Nanos;
use kvserve_runtime::trace::TraceKind;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

/// How an attempt ended.
enum Attempt {
    /// The text is complete.
    Finished(FinishReason),
    /// Migrated and proven; decode goes on with this sequence.
    Decoding(Sequence),
    /// Nothing of it remains but what the client was told.
    Failed(AttemptFailure),
}

/// Runs a request to its end. Dropping the future cancels it at any stage.
pub(super) async fn drive(
    node: &NodeContext,
    out: &RequestOut,
) -> Result<FinishReason, ServeError> {
    let _place = enter(node, out).await?;
    node.perf
        .record(Span::Queue, node.shard.now().since(out.arrived));
    let mut attempts = Attempts::default();
    let mut rest_only = false;
    while let Some(number) = attempts.next_number() {
        out.stage.set(Stage::Pair);
        if holds_nearly_all(node, out) {
            rest_only = true;
            break;
        }
        let Some(peer) = node.choose_prefill(attempts.tried()) else {
            break;
        };
        if attempts.any_failed() {
            covers(node, out)?;
        }
        node.metrics.migrations_started.fetch_add(1, Relaxed);
        let failure = match attempt_on(node, out, &peer, number).await? {
            Attempt::Finished(reason) => return Ok(reason),
            Attempt::Decoding(sequence) => return follow(out, sequence).await,
            Attempt::Failed(failure) => failure,
        };
        node.metrics.migrations_failed.fetch_add(1, Relaxed);
        node.shard
            .trace()
            .record(&ATTEMPT_FAILED, out.id.counter, number.into(), 0);
        node.log.info(
            "attempt failed",
            &[
                ("request", &out.request.label),
                ("peer", &peer),
                ("attempt", &number),
                ("reason", &failure.label),
                ("message", &failure.message),
            ],
        );
        match attempts.failed(&peer, &failure) {
            AfterFailure::Again => {}
            AfterFailure::Pause(pause) => node.shard.sleep(pause).await,
            AfterFailure::Recompute => break,
        }
    }
    match rest_only {
        true => node.metrics.rests_here.fetch_add(1, Relaxed),
        false => node.metrics.recomputes.fetch_add(1, Relaxed),
    };
    out.stage.set(Stage::Prefill);
    if attempts.any_failed() {
        covers(node, out)?;
    }
    let sequence = compute_here(node, out)?;
    follow(out, sequence).await
}

/// Whether so much of the prompt is cached here that the rest is not worth a migration.
fn holds_nearly_all(node: &NodeContext, out: &RequestOut) -> bool {
    let tokens = out.tokens();
    let salt = out.request.cache_salt.as_bytes();
    let fit = (node.ledger).with(|ledger| ledger.prefix_fit(salt, &tokens));
    rest_stays_here(fit.pages * node.limits.page_tokens, tokens.len())
}

/// Leading pages of a prompt from this node's prefix cache, owned (pinned) by an attempt until
/// it has ended; then given back, or taken over by the sequence that decodes on them. They come
/// from the cache alone, never from an earlier attempt (PROTOCOL C2, R3).
struct Held {
    ledger: Rc<LedgerCell>,
    pages: Vec<PageId>,
}

impl Held {
    fn take(node: &NodeContext, cache_salt: &str, tokens: &[u32]) -> Self {
        let mut pages = Vec::new();
        (node.ledger).with(|ledger| ledger.take_prefix(cache_salt.as_bytes(), tokens, &mut pages));
        Held {
            ledger: node.ledger.clone(),
            pages,
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ledger.with(|ledger| ledger.free(&self.pages));
    }
}

/// Another try is only begun if the time left covers what it will take (PROTOCOL R4). The first
/// one always is: an estimate learned under load must not keep itself alive by refusing all.
fn covers(node: &NodeContext, out: &RequestOut) -> Result<(), ServeError> {
    let tokens = out.request.prompt.len() + out.told();
    let estimate = node.estimate(tokens);
    let left = out.request.deadline.left(node.shard.now());
    if estimate <= left {
        return Ok(());
    }
    let mut error = out.deadline_error();
    error.message = format!(
        "{} ms of the request's time are left and {tokens} tokens of prompt take about {} ms; \
         raise the request's timeout or lower the load",
        left.as_millis(),
        estimate.as_millis()
    );
    Err(error)
}

/// Waits for a place among the running and for room for the prompt.
async fn enter(node: &NodeContext, out: &RequestOut) -> Result<Admitted, ServeError> {
    let pages = node.limits.pages_for(out.request.prompt.len() + 1);
    let salt = out.request.cache_salt.as_bytes();
    let room = || (node.ledger).with(|ledger| ledger.prefix_fits(salt, &out.request.prompt, pages));
    node.admission
        .enter(&node.shard, room)
        .await
        .map_err(|full| overloaded(full.queued, full.queued_max))
}

/// One attempt on one prefill node.
async fn attempt_on(
    node: &NodeContext,
    out: &RequestOut,
    peer: &str,
    attempt: u32,
) -> Result<Attempt, ServeError> {
    let Some(peers) = node.peers.get() else {
        return Ok(Attempt::Failed(AttemptFailure::no_room(
            "this node has no peers".into(),
        )));
    };
    let prompt = out.tokens();
    let computed = prompt.len();
    let held = Held::take(node, &out.request.cache_salt, &prompt);
    let wanted = node.limits.pages_for(computed) - held.pages.len();
    let Some(into) = admission::reserve(&node.ledger, wanted) else {
        let free = node.ledger.with(|ledger| ledger.free_pages());
        return Ok(Attempt::Failed(AttemptFailure::no_room(format!(
            "the prompt needs {wanted} pages here and {free} are free"
        ))));
    };
    let mut pages = held.pages.clone();
    pages.extend_from_slice(&into);
    let ask = PrefillAsk {
        request: out.id,
        attempt,
        held_pages: held.pages.len() as u32,
        prompt,
        payload: payload::encode_ask(
            &out.request.sampling,
            out.told() as u32,
            &out.request.cache_salt,
        ),
        into,
        deadline: out.request.deadline,
    };
    let migration = match peers.prefill(peer, ask) {
        Ok(migration) => migration,
        Err(error) => {
            node.ledger.with(|ledger| ledger.free(&error.into));
            return Ok(Attempt::Failed(error.error.into()));
        }
    };
    let now = node.shard.now();
    let trace = node.shard.trace();
    trace.record(&ASKED, out.id.counter, attempt.into(), wanted as u64);
    Running {
        node,
        out,
        attempt,
        asked_at: now,
        since: now,
        pages,
        sequence: None,
        withheld: Withheld::new(computed),
        cached: 0,
        migration,
        held,
    }
    .run()
    .await
}

/// An attempt under way. Fields are dropped in order: the sequence gives its growth back before
/// the migration lets its pages go.
struct Running<'a> {
    node: &'a NodeContext,
    out: &'a RequestOut,
    attempt: u32,
    asked_at: Nanos,
    /// When the present stage began.
    since: Nanos,
    /// Held, then pulled.
    pages: Vec<PageId>,
    sequence: Option<Sequence>,
    withheld: Withheld,
    /// Tokens that the prefill node found in its cache.
    cached: usize,
    migration: Migration,
    held: Held,
}

/// What an attempt hears next.
enum Heard {
    Migration(MigrationEvent),
    Sequence(SequenceEvent),
}

impl Running<'_> {
    async fn run(mut self) -> Result<Attempt, ServeError> {
        loop {
            match self.hear().await {
                Heard::Migration(MigrationEvent::Granted) => {
                    self.passed(Span::Pair, &GRANTED, 0);
                    self.out.stage.set(Stage::Prefill);
                }
                Heard::Migration(MigrationEvent::FirstToken(bytes)) => {
                    self.passed(Span::Prefill, &FIRST_TOKEN, 0);
                    if let Some(ended) = self.first_token(&bytes) {
                        return Ok(ended);
                    }
                }
                Heard::Migration(MigrationEvent::Placed) => {
                    self.passed(Span::Pull, &PLACED, self.pages.len());
                    self.out.stage.set(Stage::Commit);
                    if let Err(error) = self.start_decoding() {
                        return Ok(Attempt::Failed(error));
                    }
                }
                Heard::Migration(MigrationEvent::Committed { pages }) => {
                    self.passed(Span::Commit, &COMMITTED, self.withheld.len());
                    let took = self.node.shard.now().since(self.asked_at);
                    let computed = self.withheld.computed() - self.cached;
                    self.node.learn_prompt_pace(computed, took);
                    return Ok(self.release_withheld(&pages));
                }
                Heard::Migration(MigrationEvent::Failed(error)) => {
                    return Ok(Attempt::Failed(error.into()));
                }
                Heard::Sequence(SequenceEvent::Cached(_) | SequenceEvent::Computed(_)) => {}
                Heard::Sequence(SequenceEvent::Token(sampled, finish)) => {
                    self.withheld.push(sampled, finish);
                }
                Heard::Sequence(SequenceEvent::Failed(error)) => return Err(error),
            }
        }
    }

    /// A stage has ended: its span, its event.
    fn passed(&mut self, span: Span, kind: &TraceKind, argument: usize) {
        let now = self.node.shard.now();
        self.node.perf.record(span, now.since(self.since));
        self.since = now;
        let number = self.out.id.counter;
        self.node
            .shard
            .trace()
            .record(kind, number, self.attempt.into(), argument as u64);
    }

    async fn hear(&mut self) -> Heard {
        let migration = &mut self.migration;
        match &mut self.sequence {
            Some(sequence) if self.withheld.finish().is_none() => {
                future::or(async { Heard::Migration(migration.next().await) }, async {
                    Heard::Sequence(sequence.next().await)
                })
                .await
            }
            Some(_) | None => Heard::Migration(migration.next().await),
        }
    }

    /// The prefill node's token goes to the client at once.
    fn first_token(&mut self, bytes: &[u8]) -> Option<Attempt> {
        let sampled = match payload::decode_first(bytes, self.node.core.vocab_size()) {
            Ok((sampled, cached)) => {
                self.cached = (cached as usize).min(self.withheld.computed());
                self.out.found_cached(self.cached);
                sampled
            }
            Err(error) => {
                return Some(Attempt::Failed(AttemptFailure::protocol(error.to_string())));
            }
        };
        self.out.stage.set(Stage::Pull);
        self.out.token(sampled).map(Attempt::Finished)
    }

    /// All bytes are in and checked: decode steps start while COMMIT is under way.
    fn start_decoding(&mut self) -> Result<(), AttemptFailure> {
        let tokens = self.out.tokens();
        self.withheld.may_decode(tokens.len())?;
        let spec = SequenceSpec {
            tokens,
            generated: self.out.told(),
            new_tokens_max: self.out.left(),
            stop_token_ids: self.out.request.stop_token_ids.clone(),
            sampling: self.out.request.sampling.clone(),
            cache_salt: self.out.request.cache_salt.clone().into_bytes(),
            deadline: self.out.request.deadline,
            pages: PagesFrom::Migration {
                pages: self.pages.clone(),
                held: self.held.pages.len(),
                computed: self.withheld.computed(),
            },
        };
        let sequence = self.node.core.submit(spec).map_err(|full| {
            AttemptFailure::no_room(format!(
                "{} of {} sequences wait already",
                full.queued, full.queued_max
            ))
        })?;
        self.sequence = Some(sequence);
        Ok(())
    }

    /// The text was complete before COMMIT's OK: the prompt's whole pages, proven now, stay for
    /// the next request; nobody decodes on them any more.
    fn keep_what_is_proven(&mut self, pulled: &[PageId]) {
        let tokens = self.out.tokens();
        let page_tokens = self.node.limits.page_tokens;
        let whole = self.withheld.computed() / page_tokens;
        let known = self.held.pages.len();
        let salt = self.out.request.cache_salt.as_bytes();
        self.node.ledger.with(|ledger| {
            let adopted = ledger.adopt(pulled);
            debug_assert!(adopted.is_ok(), "{adopted:?}");
            self.held.pages.extend_from_slice(pulled);
            let tokens = &tokens[..whole * page_tokens];
            let pages = &mut self.held.pages[..whole];
            ledger.cache_pages(salt, tokens, pages, known, true);
        });
    }

    /// COMMIT's answer was OK: the pages are ours, and tokens computed from them are true.
    fn release_withheld(mut self, pulled: &[PageId]) -> Attempt {
        self.node.metrics.migrations_committed.fetch_add(1, Relaxed);
        self.out.stage.set(Stage::Decode);
        let sequence = self.sequence.take();
        let taken_over = (sequence.as_ref()).is_some_and(|sequence| sequence.prove(pulled));
        match taken_over {
            // The sequence owns them now.
            true => self.held.pages.clear(),
            false => self.keep_what_is_proven(pulled),
        }
        let (withheld, finish) = self.withheld.release();
        let mut last = None;
        for sampled in withheld {
            last = self.out.token(sampled);
        }
        match (finish.or(last), sequence) {
            (Some(reason), _) => Attempt::Finished(reason),
            (None, Some(sequence)) => Attempt::Decoding(sequence),
            (None, None) => Attempt::Failed(AttemptFailure::protocol(
                "the migration was committed before its pages were placed",
            )),
        }
    }
}

/// Computes prompt and told tokens on this node.
pub(super) fn compute_here(node: &NodeContext, out: &RequestOut) -> Result<Sequence, ServeError> {
    let spec = SequenceSpec {
        tokens: out.tokens(),
        generated: out.told(),
        new_tokens_max: out.left(),
        stop_token_ids: out.request.stop_token_ids.clone(),
        sampling: out.request.sampling.clone(),
        cache_salt: out.request.cache_salt.clone().into_bytes(),
        deadline: out.request.deadline,
        pages: PagesFrom::Scheduler,
    };
    node.core
        .submit(spec)
        .map_err(|full| overloaded(full.queued, full.queued_max))
}

/// Tells a sequence's tokens to the client until it ends.
pub(super) async fn follow(
    out: &RequestOut,
    mut sequence: Sequence,
) -> Result<FinishReason, ServeError> {
    loop {
        match sequence.next().await {
            SequenceEvent::Cached(tokens) => out.found_cached(tokens),
            SequenceEvent::Computed(_) => {}
            SequenceEvent::Token(sampled, _) => {
                out.stage.set(Stage::Decode);
                if let Some(reason) = out.token(sampled) {
                    return Ok(reason);
                }
            }
            SequenceEvent::Failed(error) => return Err(error),
        }
    }
}

fn overloaded(queued: usize, queued_max: usize) -> ServeError {
    ServeError {
        stage: Stage::Queue,
        reason: "overloaded",
        retry: RetryClass::SamePair,
        message: format!(
            "the queue is full ({queued} of {queued_max} requests wait); try again later"
        ),
    }
}
