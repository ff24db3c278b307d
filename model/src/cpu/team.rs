//! A team of threads that runs one function together and meets at barriers.
//!
//! ```text
//! leader (the caller)   run(f) ── f(0) ── barrier ── ... ── last barrier ── return
//! worker 1..n           sleep ─── f(1) ── barrier ── ... ── last barrier ── sleep
//! ```
//! Between barriers work is claimed from one counter in shrinking portions; who claims what never
//! changes a result. Waits spin at most [`SPIN`] and then sleep on a futex, since other processes
//! share the cores. A panic in any member ends the process: the others would wait for ever.

use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest spin of a wait. A phase of a decode step takes 5 to 50 us per thread and a futex wake
/// about as long, so shorter spins would sleep at every barrier; longer ones would take a core
/// from another process.
const SPIN: Duration = Duration::from_micros(20);
/// Spin rounds between two looks at the clock (a round is a `pause`, 10 to 40 ns).
const SPINS_PER_LOOK: u32 = 16;
/// More threads than any host has cores for; bounds a mistyped option.
pub(crate) const THREADS_MAX: usize = 1024;

/// A function that all members run, each with its own [`Member`].
type Job<'a> = &'a (dyn Fn(&Member<'_>) + Sync);

/// A word that changes, and those who sleep until it does.
#[derive(Default)]
struct Gate {
    word: AtomicU32,
    sleepers: AtomicU32,
}

impl Gate {
    fn open(&self) {
        // SeqCst on word and sleepers: either we see the sleeper, or it sees the new word.
        self.word.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // SAFETY: a private futex on a word that lives as long as `self`.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.word.as_ptr(),
                    libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                    i32::MAX,
                )
            };
        }
    }

    /// Returns once the word is no longer `seen`.
    fn pass(&self, seen: u32, spin: bool) {
        if spin {
            let start = Instant::now();
            loop {
                for _ in 0..SPINS_PER_LOOK {
                    if self.word.load(Ordering::Acquire) != seen {
                        return;
                    }
                    std::hint::spin_loop();
                }
                if start.elapsed() >= SPIN {
                    break;
                }
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while self.word.load(Ordering::SeqCst) == seen {
            // SAFETY: as in `open`; the kernel sleeps only while the word is still `seen`.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.word.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    seen,
                    std::ptr::null::<libc::timespec>(),
                )
            };
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Shared {
    members: usize,
    spin: bool,
    /// Opened by the leader when there is a job.
    start: Gate,
    /// Opened by the last member that arrives.
    meet: Gate,
    arrived: AtomicUsize,
    /// First unit of the present phase that nobody has claimed.
    claimed: AtomicUsize,
    stop: AtomicBool,
    job: UnsafeCell<Option<Job<'static>>>,
}

// SAFETY: `job` is written by the leader only while no worker runs (before `start` opens, after
// the last barrier), and read by workers only in between.
unsafe impl Sync for Shared {}
// SAFETY: as above; the job itself is `Sync`.
unsafe impl Send for Shared {}

/// One thread's part in a run.
pub(crate) struct Member<'a> {
    /// 0 is the leader.
    pub index: usize,
    shared: &'a Shared,
}

impl Member<'_> {
    /// Waits for all members; what they wrote before is visible after. Ends the phase: claims
    /// start again at zero.
    pub fn barrier(&self) {
        let shared = self.shared;
        let seen = shared.meet.word.load(Ordering::Acquire);
        if shared.arrived.fetch_add(1, Ordering::AcqRel) + 1 == shared.members {
            shared.arrived.store(0, Ordering::Relaxed);
            shared.claimed.store(0, Ordering::Relaxed);
            shared.meet.open();
        } else {
            shared.meet.pass(seen, shared.spin);
        }
    }

    /// Takes some of `total` units of this phase, about `unit` or a multiple of it; `None` when
    /// all are taken. Portions shrink towards the end, so that members finish together.
    pub fn claim(&self, total: usize, unit: usize) -> Option<Range<usize>> {
        let claimed = &self.shared.claimed;
        let mut first = claimed.load(Ordering::Relaxed);
        loop {
            if first >= total {
                return None;
            }
            let share = (total - first) / (2 * self.shared.members);
            let take = (share / unit * unit).max(unit);
            let end = (first + take).min(total);
            match claimed.compare_exchange_weak(first, end, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(first..end),
                Err(now) => first = now,
            }
        }
    }
}

/// Ends the process if dropped by a panic.
struct AbortOnUnwind(&'static str);

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "kvserve: {} panicked; ending the process, since its team would wait for ever",
                self.0
            );
            std::process::abort();
        }
    }
}

/// The threads of one engine. The leader is whoever calls [`Team::run`].
pub(crate) struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Team {
    /// Starts `threads - 1` workers; worker i runs on `cores[i % cores.len()]` if any are named
    /// (the leader is member 0, its owner pins it), `nice` nicer than the calling thread.
    ///
    /// # Errors
    /// When a thread cannot be started or pinned, or the number is out of range.
    pub fn start(threads: usize, cores: &[usize], nice: u8) -> io::Result<Team> {
        if threads == 0 || threads > THREADS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{threads} engine threads; it must be 1 to {THREADS_MAX}"),
            ));
        }
        let places = if cores.is_empty() {
            std::thread::available_parallelism().map_or(1, usize::from)
        } else {
            let mut distinct = cores.to_vec();
            distinct.sort_unstable();
            distinct.dedup();
            distinct.len()
        };
        let shared = Arc::new(Shared {
            members: threads,
            // Members that share a core must not wait for each other by spinning.
            spin: threads <= places,
            start: Gate::default(),
            meet: Gate::default(),
            arrived: AtomicUsize::new(0),
            claimed: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
        });
        let mut team = Team {
            shared,
            workers: Vec::with_capacity(threads - 1),
        };
        for index in 1..threads {
            let shared = Arc::clone(&team.shared);
            let core = (!cores.is_empty()).then(|| cores[index % cores.len()]);
            let (pinned, result) = std::sync::mpsc::sync_channel(1);
            let worker = std::thread::Builder::new()
                .name(format!("engine-{index}"))
                .spawn(move || {
                    let outcome = core.map_or(Ok(()), pin_to).and_then(|()| be_nicer(nice));
                    let usable = outcome.is_ok();
                    if pinned.send(outcome).is_ok() && usable {
                        work(index, &shared);
                    }
                })?;
            let outcome = result
                .recv()
                .map_err(|_| io::Error::other(format!("engine thread {index} ended at its start")));
            match outcome.and_then(|outcome| outcome) {
                Ok(()) => team.workers.push(worker),
                Err(error) => return Err(error), // dropping the team ends the others
            }
        }
        Ok(team)
    }

    /// Members, the leader counted.
    pub fn threads(&self) -> usize {
        self.shared.members
    }

    /// Runs `job` on all members and returns when all have ended it.
    pub fn run(&mut self, job: Job<'_>) {
        let shared = &*self.shared;
        let guard = AbortOnUnwind("the leading engine thread");
        // SAFETY: the job outlives its use: workers call it only between `start` and the barrier
        // below, which this function does not leave before (a panic aborts).
        let job_static = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: no worker reads `job` now: `&mut self`, and the last run's barrier has passed.
        unsafe { *shared.job.get() = Some(job_static) };
        if shared.members > 1 {
            shared.start.open();
        }
        let member = Member { index: 0, shared };
        job(&member);
        member.barrier();
        drop(guard);
    }
}

fn work(index: usize, shared: &Shared) {
    let _guard = AbortOnUnwind("an engine thread");
    let mut seen = 0;
    loop {
        shared.start.pass(seen, shared.spin);
        // One more than seen: the leader opens again only after we have met it.
        seen = seen.wrapping_add(1);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the leader wrote it before opening `start` and leaves it until we have met.
        let job = unsafe { *shared.job.get() };
        let member = Member { index, shared };
        if let Some(job) = job {
            job(&member);
        }
        member.barrier();
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.start.open();
        for worker in self.workers.drain(..) {
            // A worker that panicked has ended the process already.
            let ended = worker.join();
            debug_assert!(ended.is_ok());
        }
    }
}

/// Raises the calling thread's niceness.
fn be_nicer(nice: u8) -> io::Result<()> {
    if nice == 0 {
        return Ok(());
    }
    // SAFETY: plain calls; on Linux id 0 names the calling thread. -1 may be a valid niceness,
    // which is why it is not looked at: a wrong reading only gives another niceness.
    let status = unsafe {
        let now = libc::getpriority(libc::PRIO_PROCESS, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, now + i32::from(nice))
    };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Binds the calling thread to one core.
///
/// # Errors
/// When the core does not exist or is not allowed.
pub(crate) fn pin_to(core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "core {core}: the largest that can be named is {}",
                libc::CPU_SETSIZE - 1
            ),
        ));
    }
    // SAFETY: a zeroed set is empty; the core is within the set's size.
    let status = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if status != 0 {
        let error = io::Error::last_os_error();
        return Err(io::Error::new(
            error.kind(),
            format!("an engine thread cannot run on core {core}: {error}"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_of_every_phase_is_done_once_and_seen_after_the_barrier() {
        for threads in [1, 2, 3, 5] {
            let mut team = Team::start(threads, &[], 0).unwrap();
            let counts: Vec<AtomicUsize> = (0..97).map(|_| AtomicUsize::new(0)).collect();
            let rounds = 200;
            for _ in 0..rounds {
                team.run(&|member| {
                    for phase in 0..3 {
                        while let Some(units) = member.claim(counts.len(), 2) {
                            for unit in units {
                                counts[unit].fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        member.barrier();
                        let first = counts[0].load(Ordering::Relaxed) / 3 * 3;
                        for count in &counts {
                            let done = count.load(Ordering::Relaxed);
                            assert!(done >= first, "phase {phase}: {done} of {first}");
                        }
                        member.barrier();
                    }
                });
            }
            for count in &counts {
                assert_eq!(count.load(Ordering::Relaxed), rounds * 3);
            }
        }
    }

    #[test]
    fn a_team_that_cannot_be_pinned_is_an_error() {
        let error = Team::start(2, &[1 << 20], 0).err().unwrap();
        assert!(error.to_string().contains("core"), "{error}");
        assert!(Team::start(0, &[], 0).is_err());
    }

    #[test]
    fn workers_sleep_and_wake_again() {
        let mut team = Team::start(2, &[], 0).unwrap();
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(3));
            let runs = AtomicUsize::new(0);
            team.run(&|_| {
                runs.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(runs.into_inner(), 2);
        }
    }
}
