//! A decode step like the one before it makes no allocation, on any thread.

mod cpu_support;

use cpu_support::{RandomModel, greedy, push};
use kvserve_kv::{KvDtype, PageId};
use kvserve_model::cpu::Isa;
use kvserve_model::{RopeLayout, Step};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: the system's allocator, with a count.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn steady_decode() {
    let model = RandomModel::new(true, false, 1);
    let isa = *Isa::available().last().unwrap();
    let mut engine = model.engine(isa, KvDtype::F32, 2, RopeLayout::Halves);
    let mut step = Step::default();
    let plan = |step: &mut Step, position: usize| {
        step.clear();
        for sequence in 0..16u32 {
            let pages: [PageId; 4] = std::array::from_fn(|page| PageId(sequence * 4 + page as u32));
            let mut spec = greedy(position + 1, None);
            spec.temperature = if sequence % 2 == 0 { 0.0 } else { 0.7 };
            push(step, &[5], position, &pages, Some(spec));
        }
    };
    // The first steps grow the vectors, on both threads.
    for position in 0..20 {
        plan(&mut step, position);
        engine.run(&mut step).unwrap();
    }
    let mut worst = 0;
    for position in 20..60 {
        plan(&mut step, position);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        engine.run(&mut step).unwrap();
        worst = worst.max(ALLOCATIONS.load(Ordering::Relaxed) - before);
    }
    assert_eq!(worst, 0, "allocations in a decode step");
}
