//! For tests and examples, of this crate and of others.

use crate::sentinel::{Sentinel, SentinelConfig};
use crate::shard::{Shard, ShardConfig, ShardHandle};
use std::future::Future;
use std::io;
use std::sync::OnceLock;

/// [`Shard::launch`] under one sentinel for the whole process, as every server has one: an
/// executor that sleeps with runnable tasks is woken within milliseconds instead of never.
///
/// # Errors
/// Those of [`Shard::launch`], or of starting the sentinel's thread.
pub fn launch<F, T>(
    config: ShardConfig,
    body: impl FnOnce(Shard) -> F + Send + 'static,
) -> io::Result<ShardHandle<T>>
where
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    static SENTINEL: OnceLock<Sentinel> = OnceLock::new();
    let sentinel = match SENTINEL.get() {
        Some(sentinel) => sentinel,
        None => {
            let started = Sentinel::start(SentinelConfig::default())?;
            SENTINEL.get_or_init(|| started)
        }
    };
    let handle = Shard::launch(config, body)?;
    sentinel.watch_shard(handle.remote());
    Ok(handle)
}
