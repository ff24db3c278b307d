//! Launching shards: threads, placement, executors, and the two tasks each shard has.

#![allow(
    clippy::disallowed_types,
    reason = "the one place where threads meet: bounded, and every wait above it has a deadline"
)]

use super::bell::{answer_hard_wakes, answer_the_door};
use super::face::{Shard, guarded};
use super::guard::abort_on_unwind;
use super::pulse::ShardRemote;
use super::timers::keep_time;
use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::time::Duration;

/// How often a running task is asked to give way (`yield_if_needed`) and I/O is looked at. The
/// executor's default of 100 ms keeps sockets waiting for 100 ms behind a busy task.
const PREEMPT_TIMER: Duration = Duration::from_millis(1);

/// The least the executor takes. We read and write no files through it, so this memory only
/// counts against the locked-memory limit (8 MiB for many users: 128 shards fit).
const IO_MEMORY_BYTES: usize = 64 << 10;

/// Submission entries a turn can hold before it must enter the kernel: 256 readiness polls.
const RING_DEPTH: usize = 256;

/// How one shard is placed and named.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Thread name, also the metric label.
    pub name: String,
    /// CPU to pin to; `None` leaves the thread where the kernel puts it. Several shards and
    /// engine lanes may name the same CPU.
    pub core: Option<usize>,
}

/// A running shard, seen from outside.
#[derive(Debug)]
pub struct ShardHandle<T> {
    thread: std::thread::JoinHandle<Option<T>>,
    remote: ShardRemote,
}

impl<T> ShardHandle<T> {
    /// Waits for the shard's body to end and gives its result.
    ///
    /// # Errors
    /// Never while panics abort, as they do on a shard; the type is that of a thread's join.
    pub fn join(self) -> std::thread::Result<T> {
        match self.thread.join() {
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(Box::new("the shard was told not to start")),
            Err(payload) => Err(payload),
        }
    }

    /// Whether the body has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// The handle to watch, ping and name it by.
    pub fn remote(&self) -> &ShardRemote {
        &self.remote
    }
}

impl Shard {
    /// Starts a shard on its own pinned thread and runs `body` on it to its end.
    ///
    /// # Errors
    /// When the executor cannot be made: io_uring missing, locked-memory limit, no such core.
    pub fn launch<F, T>(
        config: ShardConfig,
        body: impl FnOnce(Shard) -> F + Send + 'static,
    ) -> io::Result<ShardHandle<T>>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let starting = Starting::spawn(config, 0, body)?;
        starting.wait_ready()?;
        Ok(starting.go())
    }

    /// Starts one shard per entry of `configs`, all or none: no body runs before every
    /// executor has been made. Each shard gets its own clone of `body`; see [`Shard::index`].
    ///
    /// # Errors
    /// As [`Shard::launch`], naming the shard that failed.
    pub fn launch_all<F, T>(
        configs: &[ShardConfig],
        body: impl FnOnce(Shard) -> F + Clone + Send + 'static,
    ) -> io::Result<Vec<ShardHandle<T>>>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let mut starting = Vec::with_capacity(configs.len());
        for (index, config) in configs.iter().enumerate() {
            starting.push(Starting::spawn(config.clone(), index, body.clone())?);
        }
        for shard in &starting {
            shard.wait_ready()?;
        }
        Ok(starting.into_iter().map(Starting::go).collect())
    }
}

/// A shard whose thread makes its executor and waits for the word to go on. Dropping it
/// without the word ends the thread before its body ran.
struct Starting<T> {
    name: String,
    ready: mpsc::Receiver<io::Result<()>>,
    go: mpsc::Sender<()>,
    handle: ShardHandle<T>,
}

impl<T: Send + 'static> Starting<T> {
    fn spawn<F>(
        config: ShardConfig,
        index: usize,
        body: impl FnOnce(Shard) -> F + Send + 'static,
    ) -> io::Result<Self>
    where
        F: Future<Output = T> + 'static,
    {
        let (ready_tx, ready) = mpsc::channel();
        let (go, go_rx) = mpsc::channel();
        let remote = ShardRemote::new(&config.name)?;
        let name = config.name.clone();
        let own = remote.clone();
        let thread = std::thread::Builder::new()
            .name(thread_name(&config.name))
            .spawn(move || shard_main(config, index, own, ready_tx, go_rx, body))?;
        let handle = ShardHandle { thread, remote };
        Ok(Starting {
            name,
            ready,
            go,
            handle,
        })
    }

    fn wait_ready(&self) -> io::Result<()> {
        match self.ready.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(error),
            Err(mpsc::RecvError) => Err(io::Error::other(format!(
                "shard `{}`: its thread ended before its executor was made",
                self.name
            ))),
        }
    }

    fn go(self) -> ShardHandle<T> {
        // A send fails only if the thread is gone, which `join` then tells.
        let _gone = self.go.send(());
        self.handle
    }
}

/// Thread names hold 15 bytes; longer ones would be refused by the kernel.
pub(crate) fn thread_name(name: &str) -> String {
    let mut end = name.len().min(15);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name[..end].to_owned()
}

fn shard_main<F, T>(
    config: ShardConfig,
    index: usize,
    remote: ShardRemote,
    ready: mpsc::Sender<io::Result<()>>,
    go: mpsc::Receiver<()>,
    body: impl FnOnce(Shard) -> F,
) -> Option<T>
where
    F: Future<Output = T> + 'static,
    T: 'static,
{
    let executor = match make_executor(&config) {
        Ok(executor) => {
            let _launcher_gone = ready.send(Ok(()));
            executor
        }
        Err(error) => {
            let _launcher_gone = ready.send(Err(error));
            return None;
        }
    };
    go.recv().ok()?;
    let shard = Shard::new(remote.clone(), index);
    remote.pulse.adopt_this_thread();
    remote.bell.nudge.adopt_this_thread();
    Shard::set_current(Some(shard.clone()));
    let value = abort_on_unwind(&config.name, || {
        executor.run(async move {
            start_own_tasks(&shard);
            guarded(shard.clone(), body(shard)).await
        })
    });
    remote.pulse.set_ended();
    remote.bell.nudge.forget();
    remote.bell.close();
    // The executor goes first, while seats that its tasks hold can still find their shard.
    drop(executor);
    Shard::set_current(None);
    Some(value)
}

fn start_own_tasks(shard: &Shard) {
    shard.spawn(answer_the_door(shard.clone())).detach();
    shard.spawn(answer_hard_wakes(shard.clone())).detach();
    shard.spawn(keep_time(shard.clone())).detach();
}

fn make_executor(config: &ShardConfig) -> io::Result<glommio::LocalExecutor> {
    let placement = match config.core {
        Some(core) => glommio::Placement::Fixed(core),
        None => glommio::Placement::Unbound,
    };
    glommio::LocalExecutorBuilder::new(placement)
        .name(&config.name)
        .preempt_timer(PREEMPT_TIMER)
        .io_memory(IO_MEMORY_BYTES)
        .ring_depth(RING_DEPTH)
        .make()
        .map_err(|error| {
            io::Error::other(format!(
                "shard `{}`: no executor on CPU {:?}: {error} (io_uring allowed? enough locked memory, `ulimit -l`? does the CPU exist and may this process use it?)",
                config.name, config.core
            ))
        })
}
