//! A request on the node that took it, from its arrival to exactly one end. What is decided
//! about attempts, withheld tokens and facts is `node/attempts.rs`, the product's own.

use super::engine::Owner;
use super::pull::Pull;
use super::wait::Wait;
use super::{Key, Node, Outgoing, PULLS, Session};
use crate::engine::{FinishReason, GenerateRequest, SequenceEvent};
use crate::node::attempts::{AfterFailure, AttemptFailure, Attempts, Facts, Told, Withheld};
use crate::node::payload;
use crate::scheduler::{PagesFrom, SequenceId, SequenceSpec};
use crate::sim::context::{Context, OutOfTurn, Outcome};
use crate::sim::model::{self, PAGE_TOKENS, VOCAB};
use kvserve_kv::PageId;
use kvserve_kv::lease::PeerSession;
use kvserve_kv::ledger::AllocateAs;
use kvserve_kv::pull::{Attempt, PullNews, READ_BYTES_MAX};
use kvserve_kv::session::{AttemptId, Frame, RequestId, Role};
use kvserve_model::Sampled;
use kvserve_runtime::{Deadline, Nanos};
use std::time::Duration;

/// So many of a hundred requests whose node holds a part of the prompt compute the rest there.
const REST_HERE_PERCENT: u64 = 25;

/// How often the head of the queue looks whether pages have come back.
const HEAD_TICK: Duration = Duration::from_millis(2);

/// One request.
pub struct Request {
    id: RequestId,
    pub client: usize,
    request: GenerateRequest,
    facts: Facts,
    attempts: Attempts,
    phase: Phase,
    admitted: bool,
    pub(super) wait: Wait,
}

enum Phase {
    Queued,
    Choosing(Nanos),
    Attempt {
        key: Key,
        peer: String,
        pages: Vec<PageId>,
        withheld: Withheld,
        sequence: Option<SequenceId>,
        /// Cached pages that it holds; the first of `pages`.
        held: Vec<PageId>,
    },
    /// Decodes with proven or own pages.
    Following(SequenceId),
}

impl Node {
    pub(super) fn accept(&mut self, context: &mut Context, client: usize, left_ns: u64) {
        let now = self.turned_at;
        let deadline = Deadline::after(now, Duration::from_nanos(left_ns));
        let Ok(completion) = self.hub.begin("request", deadline, None) else {
            let outcome = Outcome::Failed("overloaded");
            return self.out.push(Outgoing::Ended { client, outcome });
        };
        if self.queue.len() >= self.plan.queued_max {
            let outcome = Outcome::Failed("overloaded");
            return self.out.push(Outgoing::Ended { client, outcome });
        }
        let of = &context.clients[client];
        let tokens = of.prompt.len() + of.max_tokens as usize;
        let usable = self.keeper.ledger.with(|ledger| ledger.usable_pages());
        if tokens > usable * PAGE_TOKENS {
            let outcome = Outcome::Failed("too_large");
            return self.out.push(Outgoing::Ended { client, outcome });
        }
        self.request_last += 1;
        let number = self.request_last;
        let request = Request {
            id: RequestId {
                incarnation: self.incarnation,
                counter: number,
            },
            client,
            request: model::request(of.prompt.clone(), of.max_tokens, deadline),
            facts: Facts::default(),
            attempts: Attempts::default(),
            phase: Phase::Queued,
            admitted: false,
            wait: Wait::new(completion),
        };
        self.requests.insert(number, request);
        self.queue.push_back(number);
    }

    /// By when a client's request ends here.
    pub fn deadline_of(&self, client: usize) -> Option<Deadline> {
        let mut requests = self.requests.values();
        let of = requests.find(|request| request.client == client);
        of.map(|request| request.request.deadline)
    }

    pub(super) fn cancel_client(&mut self, context: &mut Context, client: usize) {
        let of = |(_, request): &(&u64, &Request)| request.client == client;
        let number = self.requests.iter().find(of).map(|(number, _)| *number);
        if let Some(number) = number {
            self.end_request(context, number, Outcome::Left);
        }
    }

    /// Exactly one end: the sequence goes first, then the migration, then the place.
    fn end_request(&mut self, context: &mut Context, number: u64, outcome: Outcome) {
        let Some(request) = self.requests.remove(&number) else {
            return;
        };
        self.queue.retain(|queued| *queued != number);
        match request.phase {
            Phase::Queued | Phase::Choosing(_) => {}
            Phase::Attempt {
                key,
                sequence,
                held,
                ..
            } => {
                if let Some(sequence) = sequence {
                    self.engine.remove(&self.keeper, sequence);
                }
                self.drop_migration(context, key);
                self.keeper.ledger.with(|ledger| ledger.free(&held));
            }
            Phase::Following(sequence) => self.engine.remove(&self.keeper, sequence),
        }
        if request.admitted {
            self.running -= 1;
        }
        let client = request.client;
        self.out.push(Outgoing::Ended { client, outcome });
    }

    pub(super) fn turn_requests(&mut self, context: &mut Context) {
        let due: Vec<u64> = (self.requests.iter())
            .filter(|(_, request)| request.wait.is_due())
            .map(|(number, _)| *number)
            .collect();
        for number in due {
            let request = self.requests.get_mut(&number);
            if request.and_then(|request| request.wait.poll()).is_some() {
                self.end_request(context, number, Outcome::Failed("deadline_exceeded"));
            }
        }
        self.admit_requests();
        while let Some((number, id, news, pages)) = self.news.pop_front() {
            self.on_news(context, number, id, news, pages);
        }
        let now = self.turned_at;
        let numbers: Vec<u64> = self.requests.keys().copied().collect();
        for number in numbers {
            let phase = self.requests.get(&number).map(|request| &request.phase);
            if let Some(Phase::Choosing(at)) = phase
                && now >= *at
            {
                self.choose(context, number);
            }
        }
    }

    pub(super) fn next_request(&self, now: Nanos) -> Nanos {
        let look = |request: &Request| match request.phase {
            Phase::Choosing(at) => at,
            Phase::Queued => now.after(HEAD_TICK),
            Phase::Attempt { .. } | Phase::Following(_) => Nanos(u64::MAX),
        };
        let looks = self.requests.values().map(look);
        looks.min().unwrap_or(Nanos(u64::MAX))
    }

    fn admit_requests(&mut self) {
        while let Some(number) = self.queue.front().copied() {
            let Some(request) = self.requests.get_mut(&number) else {
                self.queue.pop_front();
                continue;
            };
            let wanted = (request.request.prompt.len() + 1).div_ceil(PAGE_TOKENS);
            let prompt = &request.request.prompt;
            let fits = (self.keeper.ledger).with(|ledger| ledger.prefix_fits(b"", prompt, wanted));
            if self.running >= self.plan.running_max || !fits {
                return;
            }
            self.queue.pop_front();
            self.running += 1;
            request.admitted = true;
            request.phase = Phase::Choosing(self.turned_at);
        }
    }

    // ---- attempts -----------------------------------------------------------------------------

    fn choose(&mut self, context: &mut Context, number: u64) {
        let Some(request) = self.requests.get(&number) else {
            return;
        };
        let next = match self.plan.role {
            Role::Decode => request.attempts.next_number(),
            Role::Hybrid | Role::Prefill | Role::Proxy => None,
        };
        let peer = self.choose_prefill(request.attempts.tried());
        match (next, peer) {
            (Some(attempt), Some(peer)) => self.begin_attempt(context, number, attempt, peer),
            (None, _) | (_, None) => self.compute_here(context, number),
        }
    }

    fn choose_prefill(&self, tried: &[String]) -> Option<PeerSession> {
        let fits = |session: &&Session| {
            session.can_pull()
                && session.identity.role.serves()
                && !tried.contains(&session.identity.node_id)
        };
        let pulls = |number: PeerSession| self.pulls.keys().filter(|key| key.0 == number).count();
        (self.sessions.values().filter(fits))
            .min_by_key(|session| pulls(session.number))
            .map(|session| session.number)
    }

    fn begin_attempt(
        &mut self,
        context: &mut Context,
        number: u64,
        attempt: u32,
        session: PeerSession,
    ) {
        let Some(request) = self.requests.get_mut(&number) else {
            return;
        };
        if attempt > 1 {
            context.coverage.hit("request: retried");
        }
        let prompt = request.facts.tokens(&request.request);
        let ledger = self.keeper.ledger.clone();
        // A rest of a few tokens would stay here (`rest_stays_here`): these prompts are too short
        // for that rule, so the seed says it.
        let found = ledger.with(|ledger| ledger.prefix_fit(b"", &prompt)).pages;
        if found > 0 && context.rng.percent(REST_HERE_PERCENT) {
            return self.compute_here(context, number);
        }
        let Some((peer, grantor)) = (self.sessions.get(&session)).map(|session| {
            (
                session.identity.node_id.clone(),
                session.identity.incarnation,
            )
        }) else {
            return;
        };
        let mut held = Vec::new();
        ledger.with(|ledger| ledger.take_prefix(b"", &prompt, &mut held));
        let wanted = prompt.len().div_ceil(PAGE_TOKENS) - held.len();
        let Some(into) = self.keeper.reserve(wanted, AllocateAs::Pulling) else {
            ledger.with(|ledger| ledger.free(&held));
            let failure = AttemptFailure::no_room(String::new());
            return self.attempt_failed(context, number, &peer, &failure);
        };
        let id = AttemptId {
            request: request.id,
            attempt,
        };
        let key = (session, id);
        let (deadline, now) = (request.request.deadline, self.turned_at);
        let machine = Attempt::new(
            now,
            id,
            grantor,
            wanted as u32,
            // As if pages were as large as that: runs are cut by bytes.
            READ_BYTES_MAX / self.plan.read_pages,
            deadline.at(),
            PULLS,
        );
        let frame = Frame::Prefill {
            id,
            left_ns: deadline.left(now).as_nanos() as u64,
            held_pages: held.len() as u32,
            prompt: prompt.clone(),
            payload: payload::encode_sampling(
                &request.request.sampling,
                request.facts.told() as u32,
            ),
        };
        if !held.is_empty() {
            context.coverage.hit("request: held a prefix");
        }
        let held_pages = held.len();
        request.phase = Phase::Attempt {
            key,
            peer,
            pages: held.iter().chain(&into).copied().collect(),
            withheld: Withheld::new(prompt.len()),
            sequence: None,
            held,
        };
        // Starting attempt k+1 cancels k (PROTOCOL R1).
        let earlier: Vec<Key> = (self.pulls.keys())
            .filter(|(_, of)| of.request == id.request)
            .copied()
            .collect();
        for earlier in earlier {
            self.feed(context, earlier, kvserve_kv::pull::PullEvent::Cancel);
        }
        let pull = Pull::new(machine, deadline, into, prompt, held_pages, number);
        self.pulls.insert(key, pull);
        self.send(context, session, &frame);
        self.moment_of(context, key, "attempt asked");
        self.commit_out_of_turn(context, key, OutOfTurn::Asked, 1);
    }

    fn attempt_failed(
        &mut self,
        context: &mut Context,
        number: u64,
        peer: &str,
        failure: &AttemptFailure,
    ) {
        let now = self.turned_at;
        let Some(request) = self.requests.get_mut(&number) else {
            return;
        };
        let phase = std::mem::replace(&mut request.phase, Phase::Choosing(now));
        let after = request.attempts.failed(peer, failure);
        if let AfterFailure::Pause(pause) = after {
            request.phase = Phase::Choosing(now.after(pause));
        }
        if let Phase::Attempt {
            key,
            sequence,
            held,
            ..
        } = phase
        {
            if let Some(sequence) = sequence {
                self.engine.remove(&self.keeper, sequence);
            }
            self.drop_migration(context, key);
            self.keeper.ledger.with(|ledger| ledger.free(&held));
        }
        if after == AfterFailure::Recompute {
            self.compute_here(context, number);
        }
    }

    fn on_news(
        &mut self,
        context: &mut Context,
        number: u64,
        id: AttemptId,
        news: PullNews,
        pages: Vec<PageId>,
    ) {
        let request = self.requests.get(&number);
        let Some(Phase::Attempt { key, peer, .. }) = request.map(|request| &request.phase) else {
            return self.keeper.ledger.with(|ledger| ledger.free(&pages));
        };
        if key.1 != id {
            return self.keeper.ledger.with(|ledger| ledger.free(&pages));
        }
        let peer = peer.clone();
        match news {
            PullNews::Granted => {}
            PullNews::FirstToken(bytes) => match payload::decode_token(&bytes, VOCAB as usize) {
                Ok(sampled) => {
                    if let Some(_reason) = self.told(context, number, sampled) {
                        context.coverage.hit("request: ended with its first token");
                        self.end_request(context, number, Outcome::Finished);
                    }
                }
                Err(error) => {
                    let failure = AttemptFailure::protocol(error.to_string());
                    self.attempt_failed(context, number, &peer, &failure);
                }
            },
            PullNews::Placed => {
                if let Err(failure) = self.start_decoding(number) {
                    self.attempt_failed(context, number, &peer, &failure);
                }
            }
            PullNews::Committed => self.release_withheld(context, number, &peer, &pages),
            PullNews::Failed(error) => {
                let failure = AttemptFailure::from(error);
                self.attempt_failed(context, number, &peer, &failure);
            }
        }
    }

    /// All bytes are in and checked: decode steps start while COMMIT is under way.
    fn start_decoding(&mut self, number: u64) -> Result<(), AttemptFailure> {
        let Some(request) = self.requests.get_mut(&number) else {
            return Ok(());
        };
        let tokens = request.facts.tokens(&request.request);
        let left = request.facts.left(&request.request);
        let Phase::Attempt {
            pages,
            withheld,
            sequence,
            held,
            ..
        } = &mut request.phase
        else {
            return Ok(());
        };
        withheld.may_decode(tokens.len())?;
        let spec = SequenceSpec {
            tokens,
            generated: request.facts.told(),
            new_tokens_max: left,
            stop_token_ids: request.request.stop_token_ids.clone(),
            sampling: request.request.sampling.clone(),
            cache_salt: Vec::new(),
            deadline: request.request.deadline,
            pages: PagesFrom::Migration {
                pages: pages.clone(),
                held: held.len(),
                computed: withheld.computed(),
            },
        };
        let submitted = self.engine.submit(spec, Owner::Request(number));
        *sequence = Some(submitted.ok_or_else(|| AttemptFailure::no_room(String::new()))?);
        Ok(())
    }

    /// COMMIT's answer was OK: the pages are ours, and tokens computed from them are true.
    fn release_withheld(
        &mut self,
        context: &mut Context,
        number: u64,
        peer: &str,
        pages: &[PageId],
    ) {
        let now = self.turned_at;
        let Some(request) = self.requests.get_mut(&number) else {
            return;
        };
        let phase = std::mem::replace(&mut request.phase, Phase::Choosing(now));
        let Phase::Attempt {
            withheld,
            sequence,
            held,
            ..
        } = phase
        else {
            return;
        };
        context.coverage.hit("request: migrated");
        let taken_over =
            sequence.is_some_and(|sequence| self.engine.prove(&self.keeper, sequence, pages));
        if !taken_over {
            self.keeper.ledger.with(|ledger| {
                ledger.free(pages);
                ledger.free(&held);
            });
        }
        let (tokens, finish) = withheld.release();
        let mut last = None;
        for sampled in tokens {
            last = self.told(context, number, sampled);
        }
        match (finish.or(last), sequence) {
            (Some(_), sequence) => {
                if let Some(sequence) = sequence {
                    self.engine.remove(&self.keeper, sequence);
                }
                self.end_request(context, number, Outcome::Finished);
            }
            (None, Some(sequence)) => {
                if let Some(request) = self.requests.get_mut(&number) {
                    request.phase = Phase::Following(sequence);
                }
            }
            (None, None) => {
                let failure = AttemptFailure::protocol("committed before it was placed");
                self.attempt_failed(context, number, peer, &failure);
            }
        }
    }

    fn compute_here(&mut self, context: &mut Context, number: u64) {
        let Some(request) = self.requests.get(&number) else {
            return;
        };
        context.coverage.hit("request: computed here");
        let spec = SequenceSpec {
            tokens: request.facts.tokens(&request.request),
            generated: request.facts.told(),
            new_tokens_max: request.facts.left(&request.request),
            stop_token_ids: request.request.stop_token_ids.clone(),
            sampling: request.request.sampling.clone(),
            cache_salt: Vec::new(),
            deadline: request.request.deadline,
            pages: PagesFrom::Scheduler,
        };
        match self.engine.submit(spec, Owner::Request(number)) {
            Some(sequence) => {
                if let Some(request) = self.requests.get_mut(&number) {
                    request.phase = Phase::Following(sequence);
                }
            }
            None => self.end_request(context, number, Outcome::Failed("overloaded")),
        }
    }

    pub(super) fn on_request_event(
        &mut self,
        context: &mut Context,
        number: u64,
        id: SequenceId,
        event: SequenceEvent,
    ) {
        let Some(request) = self.requests.get_mut(&number) else {
            return;
        };
        match event {
            SequenceEvent::Cached(_) | SequenceEvent::Computed(_) => {}
            SequenceEvent::Token(sampled, finish) => match &mut request.phase {
                Phase::Attempt {
                    withheld, sequence, ..
                } if *sequence == Some(id) => withheld.push(sampled, finish),
                Phase::Following(sequence) if *sequence == id => {
                    if self.told(context, number, sampled).is_some() {
                        self.end_request(context, number, Outcome::Finished);
                    }
                }
                Phase::Queued
                | Phase::Choosing(_)
                | Phase::Attempt { .. }
                | Phase::Following(_) => {}
            },
            SequenceEvent::Failed(error) => {
                self.end_request(context, number, Outcome::Failed(error.reason));
            }
        }
    }

    /// Tells the client a token, unless it is a stop token. Gives the reason if it was the last.
    fn told(
        &mut self,
        context: &mut Context,
        number: u64,
        sampled: Sampled,
    ) -> Option<FinishReason> {
        let request = self.requests.get_mut(&number)?;
        match request.facts.take(&request.request, sampled.token) {
            Told::Stop => Some(FinishReason::Stop),
            Told::Text(end) => {
                context.told(request.client, sampled.token);
                end
            }
        }
    }
}
