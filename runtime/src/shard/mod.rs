//! A shard: one pinned executor. The only door to glommio.

pub mod poll_loop;

use crate::time::Nanos;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

/// How one shard is placed and named.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Thread name, also the metric label.
    pub name: String,
    /// CPU to pin to; `None` leaves the thread where the kernel puts it.
    pub core: Option<usize>,
}

/// Handle to the shard the caller runs on. Cheap to clone, never leaves its thread.
#[derive(Clone)]
pub struct Shard {
    inner: Rc<ShardInner>,
}

struct ShardInner {
    name: String,
}

/// A task of this shard; dropping it cancels the task.
pub struct Task<T>(glommio::Task<T>);

impl<T: 'static> Task<T> {
    /// Lets the task run on without a handle.
    pub fn detach(self) {
        drop(self.0.detach());
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<T> {
        std::pin::Pin::new(&mut self.0).poll(cx)
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
    ) -> std::io::Result<std::thread::JoinHandle<T>>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (ready_tx, ready_rx) = std::sync::mpsc::channel();
        let name = config.name.clone();
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let placement = match config.core {
                Some(core) => glommio::Placement::Fixed(core),
                None => glommio::Placement::Unbound,
            };
            let executor = match glommio::LocalExecutorBuilder::new(placement)
                .name(&config.name)
                .preempt_timer(Duration::from_millis(1))
                .io_memory(1 << 20)
                .make()
            {
                Ok(executor) => {
                    let _ = ready_tx.send(None);
                    executor
                }
                Err(error) => {
                    let _ = ready_tx.send(Some(std::io::Error::other(error.to_string())));
                    return None;
                }
            };
            let shard = Shard {
                inner: Rc::new(ShardInner { name: config.name }),
            };
            Some(executor.run(async move { body(shard).await }))
        })?;
        match ready_rx.recv() {
            Ok(None) => Ok(std::thread::spawn(move || {
                thread.join().ok().flatten().expect("shard body ended")
            })),
            Ok(Some(error)) => Err(error),
            Err(_) => Err(std::io::Error::other(
                "shard thread ended before it started",
            )),
        }
    }

    /// The shard's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The monotonic clock.
    pub fn now(&self) -> Nanos {
        Nanos::now()
    }

    /// Starts a task on this shard; dropping the handle cancels it.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        Task(glommio::spawn_local(future))
    }

    /// Waits for `span`.
    pub async fn sleep(&self, span: Duration) {
        glommio::timer::sleep(span).await;
    }

    /// Lets other tasks of the shard run.
    pub async fn yield_now(&self) {
        glommio::yield_if_needed().await;
    }
}
