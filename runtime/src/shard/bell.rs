//! Waking a shard's tasks from other threads: seats, notices and the doorbell.
//!
//! A [`Seat`] is a place on a shard where one task at a time waits. Its [`Notice`] is the half
//! that other threads hold. `ring` pushes the notice on the doorbell's lock-free stack (once,
//! however often it is rung) and signals the doorbell's eventfd (once until the shard has
//! looked). The doorbell task waits for that descriptor like for any other I/O, marks the seats
//! as rung and wakes whoever waits there, all on the shard's own thread.
//!
//! Why not the executor's own cross-thread wakes: they queue a waker, then write to an eventfd
//! that preempts. If the executor takes the waker before that write lands, the write is taken
//! for the end of its time slice before anything ran, "nothing ran" for "nothing to run", and
//! it parks with the woken task runnable (so its source reads; not measured apart). A descriptor
//! that is polled like a socket does not preempt. Only [`Doorbell::wake_hard`] goes the other way,
//! for a shard that does not answer its doorbell: its doorbell task may be the one that is
//! runnable and not run.
//!
//! Invariant (no lost wake): a ringer first publishes what it has to say, then swaps `queued`
//! to true; the doorbell task swaps `queued` back to false *before* it marks the seat as rung,
//! and the waiter looks for news *after* it has seen the mark. Whichever swap comes second
//! sees the other, so news is either seen by this look or rings again. The same holds between
//! the stack and `rung`: pushed first, then swapped; swapped back first, then taken.

use super::event_fd::EventFd;
use super::face::Shard;
use super::nudge::Nudge;
use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The half of a seat that any thread may hold and ring.
#[derive(Debug)]
pub struct Notice {
    bell: Arc<Doorbell>,
    place: u32,
    /// On the doorbell's stack, or about to be.
    queued: AtomicBool,
    /// The seat was dropped; the doorbell task frees its place once.
    retired: AtomicBool,
    freed: AtomicBool,
    /// The next notice of the stack, owned by whoever owns the stack.
    next: AtomicPtr<Notice>,
}

impl Notice {
    /// Wakes the task that sits on this notice's seat. From any thread, never blocking. Rings
    /// that come before the shard has looked are one ring.
    pub fn ring(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        self.bell.push(self.clone());
    }
}

/// A shard's door for other threads.
#[derive(Debug)]
pub(crate) struct Doorbell {
    head: AtomicPtr<Notice>,
    /// The descriptor has been signalled and the doorbell task has not looked yet.
    rung: AtomicBool,
    /// The shard is gone: nothing is pushed any more.
    closed: AtomicBool,
    event: EventFd,
    /// The hard-wake task's waker: the only waker of an executor task that other threads see.
    /// It is cloned once and woken by reference, so nothing of a task's reference count is
    /// left to them.
    hard: OnceLock<Waker>,
    /// For the time before there is one.
    pub(crate) nudge: Nudge,
}

impl Doorbell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Doorbell {
            head: AtomicPtr::new(ptr::null_mut()),
            rung: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            event: EventFd::new()?,
            hard: OnceLock::new(),
            nudge: Nudge::default(),
        })
    }

    fn push(&self, notice: Arc<Notice>) {
        let node = Arc::into_raw(notice).cast_mut();
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: `node` came from `Arc::into_raw` and stays alive: the stack owns that
            // count until `take` turns it back. Only one pusher has it (`queued` was false).
            unsafe { (*node).next.store(head, Ordering::Relaxed) };
            match self
                .head
                .compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        fence(Ordering::SeqCst);
        if self.closed.load(Ordering::Relaxed) {
            // The shard ended in between: nobody will take what was pushed.
            drop(self.take());
            return;
        }
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Makes the doorbell task look, whether or not it was rung before.
    pub(crate) fn wake(&self) {
        self.event.signal();
    }

    /// Makes the executor turn by its own cross-thread wake (see the module's text). Each call
    /// that is not answered leaves an entry in its wake queue.
    pub(crate) fn wake_hard(&self) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        match self.hard.get() {
            Some(waker) => waker.wake_by_ref(),
            // No task has run yet: the executor has parked before its first one.
            None => self.nudge.nudge(),
        }
    }

    /// Takes all notices that were rung, in no particular order.
    fn take(&self) -> Vec<Arc<Notice>> {
        let mut node = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        let mut taken = Vec::new();
        while !node.is_null() {
            // SAFETY: every node of the stack came from `Arc::into_raw` in `push`, and the swap
            // above made this call the only owner of the whole list.
            let notice = unsafe { Arc::from_raw(node.cast_const()) };
            node = notice.next.load(Ordering::Relaxed);
            taken.push(notice);
        }
        taken
    }

    /// The shard is gone: lets go of what was rung and refuses more.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        drop(self.take());
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        drop(self.take());
    }
}

/// The shard's side: who sits where.
#[derive(Default)]
pub(crate) struct Desk {
    places: RefCell<Places>,
}

#[derive(Default)]
struct Places {
    all: Vec<Place>,
    free: Vec<u32>,
}

#[derive(Default)]
struct Place {
    waker: Option<Waker>,
    rung: bool,
}

impl Desk {
    fn take_place(&self) -> u32 {
        let mut places = self.places.borrow_mut();
        if let Some(index) = places.free.pop() {
            return index;
        }
        places.all.push(Place::default());
        (places.all.len() - 1) as u32
    }

    fn free_place(&self, index: u32) {
        let mut places = self.places.borrow_mut();
        let waker = std::mem::take(&mut places.all[index as usize]).waker;
        places.free.push(index);
        drop(places);
        // Outside the borrow: dropping a waker may drop a task, which may drop seats.
        drop(waker);
    }

    fn mark_rung(&self, index: u32) {
        let waker = {
            let mut places = self.places.borrow_mut();
            let place = &mut places.all[index as usize];
            place.rung = true;
            place.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn poll_place(&self, index: u32, cx: &mut Context<'_>) -> Poll<()> {
        let mut places = self.places.borrow_mut();
        let place = &mut places.all[index as usize];
        if std::mem::take(&mut place.rung) {
            return Poll::Ready(());
        }
        let stale = match &place.waker {
            Some(waker) if waker.will_wake(cx.waker()) => None,
            Some(_) | None => place.waker.replace(cx.waker().clone()),
        };
        drop(places);
        drop(stale);
        Poll::Pending
    }
}

/// The doorbell's descriptor, kept open as long as the executor may watch it.
struct Door(Arc<Doorbell>);

impl AsRawFd for Door {
    fn as_raw_fd(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }
}

/// After an executor that could not watch the doorbell (its ring is full).
const WATCH_AGAIN: Duration = Duration::from_millis(1);

/// The doorbell task of a shard: counts a turn for each wake and delivers what was rung.
pub(crate) async fn answer_the_door(shard: Shard) {
    let bell = &shard.remote().bell;
    loop {
        let watched = match glommio::io::PollableFd::new(Door(bell.clone())) {
            Ok(door) => door.readable().await.is_ok(),
            Err(_) => false,
        };
        if !watched {
            shard.sleep(WATCH_AGAIN).await;
        }
        bell.event.drain();
        look_at_the_door(&shard);
    }
}

/// The task that [`Doorbell::wake_hard`] wakes.
pub(crate) async fn answer_hard_wakes(shard: Shard) {
    poll_fn(|cx| {
        // The task's waker never changes, so the first one is the one.
        shard.remote().bell.hard.get_or_init(|| cx.waker().clone());
        look_at_the_door(&shard);
        Poll::<()>::Pending
    })
    .await
}

fn look_at_the_door(shard: &Shard) {
    let bell = &shard.remote().bell;
    shard.pulse().turn();
    bell.rung.swap(false, Ordering::AcqRel);
    for notice in bell.take() {
        deliver(shard.desk(), &notice);
    }
}

fn deliver(desk: &Desk, notice: &Notice) {
    notice.queued.swap(false, Ordering::AcqRel);
    if notice.freed.load(Ordering::Relaxed) {
        return;
    }
    if notice.retired.load(Ordering::Acquire) {
        notice.freed.store(true, Ordering::Relaxed);
        desk.free_place(notice.place);
    } else {
        desk.mark_rung(notice.place);
    }
}

/// A place on a shard where one task at a time waits to be rung by any thread.
///
/// It is made on a shard and waited on there; it may be dropped anywhere.
#[derive(Debug)]
pub struct Seat {
    notice: Arc<Notice>,
}

impl Seat {
    /// Takes a place on `shard`.
    pub fn on(shard: &Shard) -> Self {
        let place = shard.desk().take_place();
        let notice = Arc::new(Notice {
            bell: shard.remote().bell.clone(),
            place,
            queued: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            freed: AtomicBool::new(false),
            next: AtomicPtr::new(ptr::null_mut()),
        });
        Seat { notice }
    }

    /// The half for other threads.
    pub fn notice(&self) -> &Arc<Notice> {
        &self.notice
    }

    /// Whether this seat is on `shard`.
    pub fn is_on(&self, shard: &Shard) -> bool {
        Arc::ptr_eq(&self.notice.bell, &shard.remote().bell)
    }

    /// Waits until the notice has been rung since the last wait. Spurious rings are possible:
    /// callers look for what they wait for, then wait, in a loop. Nobody rings for ever by
    /// itself: the caller owns the bound on the wait.
    pub async fn rung(&mut self) {
        poll_fn(|cx| self.poll_rung(cx)).await;
    }

    /// The poll form of [`Seat::rung`].
    ///
    /// # Panics
    /// On any thread but the seat's shard.
    pub fn poll_rung(&self, cx: &mut Context<'_>) -> Poll<()> {
        let shard = Shard::current().expect("a seat is waited on from a shard");
        assert!(
            self.is_on(&shard),
            "a seat is waited on from its own shard, not from `{}`",
            shard.name()
        );
        shard.desk().poll_place(self.notice.place, cx)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(shard) = Shard::current()
            && self.is_on(&shard)
        {
            self.notice.freed.store(true, Ordering::Relaxed);
            shard.desk().free_place(self.notice.place);
            return;
        }
        self.notice.retired.store(true, Ordering::Release);
        self.notice.ring();
    }
}
