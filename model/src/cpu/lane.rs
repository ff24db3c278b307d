//! The engine on its own lane: what the scheduler's shard holds.

use super::engine::CpuEngine;
use super::plan::Checker;
use crate::backend::{Backend, Step, SubmitError, SubmitReason};
use kvserve_kv::{KvLayout, PoolMemory};
use kvserve_runtime::lane::{Lane, LaneConfig, LanePulse, LaneRefusal};
use kvserve_runtime::{
    ChannelId, Completed, CompletionSource, CompletionStatus, Nanos, Reap, WorkId,
};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// A [`CpuEngine`] led by a lane's thread. Steps run one after the other, in order.
pub struct CpuBackend {
    lane: Lane<Box<Step>>,
    checker: Checker,
    pool: Arc<PoolMemory>,
    layout: KvLayout,
    vocab: usize,
    context: usize,
}

impl CpuBackend {
    /// Moves the engine to a new lane. Name the engine's first core in `config.core`, and its
    /// niceness in `config.nice`.
    ///
    /// # Errors
    /// When the lane's thread cannot be started or placed.
    pub fn start(mut engine: CpuEngine, config: LaneConfig) -> io::Result<Self> {
        engine.set_pulse(Arc::clone(&config.pulse));
        let checker = engine.new_checker();
        let (pool, layout) = (engine.pool(), engine.layout().clone());
        let (vocab, context) = (engine.config().vocab, engine.config().context);
        let lane = Lane::spawn(config, move |step: &mut Box<Step>| match engine.run(step) {
            Ok(()) => CompletionStatus::Success,
            // `submit` has checked it: only a caller that changed the step could come here.
            Err(_) => CompletionStatus::Error(libc::EINVAL as u32),
        })?;
        Ok(CpuBackend {
            lane,
            checker,
            pool,
            layout,
            vocab,
            context,
        })
    }

    /// The lane's signs of life, for the sentinel.
    pub fn pulse(&self) -> &Arc<LanePulse> {
        self.lane.pulse()
    }

    /// Ends the lane after the running step and gives its thread, to be joined off the shard.
    pub fn shut_down(self) -> std::thread::JoinHandle<()> {
        self.lane.shut_down()
    }
}

impl Backend for CpuBackend {
    fn submit(&mut self, work: WorkId, step: Box<Step>) -> Result<(), SubmitError> {
        if let Err(invalid) = self.checker.check(&step) {
            let reason = SubmitReason::Invalid(invalid);
            return Err(SubmitError { step, reason });
        }
        self.lane.submit(work, step).map_err(|(step, refusal)| {
            let reason = match refusal {
                LaneRefusal::Full { .. } => SubmitReason::Busy,
                LaneRefusal::Killed | LaneRefusal::Gone => SubmitReason::Gone,
            };
            SubmitError { step, reason }
        })
    }

    fn collect(&mut self) -> Option<Box<Step>> {
        self.lane.collect()
    }

    fn pool(&self) -> Arc<PoolMemory> {
        Arc::clone(&self.pool)
    }

    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn vocab_size(&self) -> usize {
        self.vocab
    }

    fn context_length(&self) -> usize {
        self.context
    }
}

impl CompletionSource for CpuBackend {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        self.lane.poll(now, out)
    }

    fn arm(&mut self) -> Option<RawFd> {
        self.lane.arm()
    }

    fn in_flight(&self) -> usize {
        self.lane.in_flight()
    }

    fn kill(&mut self, channel: ChannelId) {
        self.lane.kill(channel);
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        self.lane.reap(channel)
    }
}
