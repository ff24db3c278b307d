//! Trace rings: what a shard did lately, at the cost of a few stores per event.
//!
//! One ring a shard, written by that shard only, read by any thread at any time (also when the
//! shard stands still, which is when one wants to read it). An event is four words: a time
//! stamp (TSC), kind and subject, and two arguments whose meaning the kind's name tells. Old
//! events are overwritten. A reader leaves out what may have been overwritten under its eyes.

use crate::time::Nanos;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// What an event marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracePhase {
    /// A point in time.
    Instant,
    /// The subject enters a state; the end with the same name and subject closes it.
    Begin,
    /// The subject leaves it.
    End,
}

/// One kind of event. Kinds are constants of the code that records them; a dump is given the
/// list of those it should name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceKind {
    /// Number in the ring; unique in the list given to a dump.
    pub id: u16,
    /// Name in the dump.
    pub name: &'static str,
    /// What it marks.
    pub phase: TracePhase,
    /// Names of the two arguments.
    pub arguments: [&'static str; 2],
}

/// One event as it was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// When, on the process's monotonic clock.
    pub at: Nanos,
    /// [`TraceKind::id`].
    pub kind: u16,
    /// The slot, request or connection it is about (48 bits are kept).
    pub subject: u64,
    /// The kind's arguments.
    pub arguments: [u64; 2],
}

const WORDS: usize = 4;
const SUBJECT_MASK: u64 = (1 << 48) - 1;

/// A ring of the latest events of one shard.
#[derive(Debug)]
pub struct TraceRing {
    name: String,
    words: Box<[AtomicU64]>,
    mask: u64,
    /// Events begun so far; the next one goes to `begun & mask`.
    begun: AtomicU64,
    /// Events that are whole. One less than `begun` while one is being written.
    whole: AtomicU64,
    /// A moment on both clocks, for turning ticks into nanoseconds.
    origin: (u64, Nanos),
}

impl TraceRing {
    /// Events a shard keeps by default: 4,096 of 32 bytes are 128 KiB, some milliseconds of a
    /// busy shard, touched only as they are written.
    pub const EVENTS_DEFAULT: usize = 4096;

    /// A ring of at least `events` events (rounded up to a power of two, at least 2).
    pub fn new(name: &str, events: usize) -> Self {
        let events = events.clamp(2, 1 << 24).next_power_of_two();
        TraceRing {
            name: name.to_owned(),
            words: (0..events * WORDS).map(|_| AtomicU64::new(0)).collect(),
            mask: events as u64 - 1,
            begun: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            origin: (ticks(), Nanos::now()),
        }
    }

    /// Records an event. For the ring's own shard only: a second writer would mix events (it
    /// could do no worse).
    pub fn record(&self, kind: &TraceKind, subject: u64, first: u64, second: u64) {
        let number = self.begun.load(Ordering::Relaxed);
        let place = (number & self.mask) as usize * WORDS;
        let head = (kind.id as u64) << 48 | (subject & SUBJECT_MASK);
        // A reader that sees one of the words of this event also sees, after its acquire
        // fence, that its number was begun.
        self.begun.store(number + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.words[place].store(ticks(), Ordering::Relaxed);
        self.words[place + 1].store(head, Ordering::Relaxed);
        self.words[place + 2].store(first, Ordering::Relaxed);
        self.words[place + 3].store(second, Ordering::Relaxed);
        self.whole.store(number + 1, Ordering::Release);
    }

    /// The events still in the ring, oldest first, without those that were overwritten while
    /// they were copied.
    pub fn events(&self) -> Vec<TraceEvent> {
        let clock = Clock::since(self.origin);
        let capacity = self.mask + 1;
        let end = self.whole.load(Ordering::Acquire);
        let begin = end.saturating_sub(capacity);
        let mut copied = Vec::with_capacity((end - begin) as usize);
        for number in begin..end {
            let place = (number & self.mask) as usize * WORDS;
            let word = |i: usize| self.words[place + i].load(Ordering::Relaxed);
            copied.push((number, [word(0), word(1), word(2), word(3)]));
        }
        fence(Ordering::Acquire);
        let begun = self.begun.load(Ordering::Relaxed);
        copied
            .into_iter()
            // Event `number + capacity` overwrites `number` once it has begun.
            .filter(|(number, _)| number + capacity >= begun)
            .map(|(_, [stamp, head, first, second])| TraceEvent {
                at: clock.nanos(stamp),
                kind: (head >> 48) as u16,
                subject: head & SUBJECT_MASK,
                arguments: [first, second],
            })
            .collect()
    }

    /// The ring's name (its shard's).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Events recorded since the start, also those no longer kept.
    pub fn recorded(&self) -> u64 {
        self.whole.load(Ordering::Relaxed)
    }
}

/// Writes the events of `rings` in the Chrome trace format (open it in Perfetto): one process,
/// one thread per ring. Kinds missing from `kinds` are named by their number.
pub fn chrome_trace(rings: &[&TraceRing], kinds: &[TraceKind]) -> String {
    let mut json = String::from("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[");
    let mut first = true;
    for (thread, ring) in rings.iter().enumerate() {
        comma(&mut json, &mut first);
        json.push_str("{\"ph\":\"M\",\"pid\":1,\"name\":\"thread_name\",\"tid\":");
        push(&mut json, format_args!("{thread},\"args\":{{\"name\":"));
        push_string(&mut json, ring.name());
        json.push_str("}}");
        for event in ring.events() {
            comma(&mut json, &mut first);
            push_event(&mut json, thread, &event, kinds);
        }
    }
    json.push_str("]}");
    json
}

fn push_event(json: &mut String, thread: usize, event: &TraceEvent, kinds: &[TraceKind]) {
    let unnamed = TraceKind {
        id: event.kind,
        name: "",
        phase: TracePhase::Instant,
        arguments: ["a", "b"],
    };
    let kind = kinds
        .iter()
        .find(|kind| kind.id == event.kind)
        .unwrap_or(&unnamed);
    let phase = match kind.phase {
        TracePhase::Instant => "i\",\"s\":\"t",
        TracePhase::Begin => "b",
        TracePhase::End => "e",
    };
    push(json, format_args!("{{\"ph\":\"{phase}\",\"name\":"));
    if kind.name.is_empty() {
        push(json, format_args!("\"kind {}\"", kind.id));
    } else {
        push_string(json, kind.name);
    }
    let (us, ns) = (event.at.0 / 1000, event.at.0 % 1000);
    push(
        json,
        format_args!(
            ",\"cat\":\"shard\",\"pid\":1,\"tid\":{thread},\"id\":{},\"ts\":{us}.{ns:03},\"args\":{{\"subject\":{}",
            event.subject, event.subject
        ),
    );
    for (name, value) in kind.arguments.iter().zip(event.arguments) {
        if !name.is_empty() {
            json.push(',');
            push_string(json, name);
            push(json, format_args!(":{value}"));
        }
    }
    json.push_str("}}");
}

fn push(json: &mut String, arguments: std::fmt::Arguments<'_>) {
    json.write_fmt(arguments)
        .expect("writing into a string does not fail");
}

fn comma(json: &mut String, first: &mut bool) {
    if !std::mem::take(first) {
        json.push(',');
    }
}

/// Appends `text` as a JSON string.
pub(crate) fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for letter in text.chars() {
        match letter {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            control if (control as u32) < 0x20 => {
                push(json, format_args!("\\u{:04x}", control as u32));
            }
            plain => json.push(plain),
        }
    }
    json.push('"');
}

/// Turns ticks into nanoseconds by two moments seen on both clocks.
struct Clock {
    from: (u64, Nanos),
    nanos_per_tick: f64,
}

impl Clock {
    fn since(from: (u64, Nanos)) -> Self {
        let to = (ticks(), Nanos::now());
        let elapsed = to.1.0.saturating_sub(from.1.0) as f64;
        let ticked = to.0.saturating_sub(from.0).max(1) as f64;
        Clock {
            from,
            nanos_per_tick: elapsed / ticked,
        }
    }

    fn nanos(&self, stamp: u64) -> Nanos {
        let past = stamp.saturating_sub(self.from.0) as f64 * self.nanos_per_tick;
        Nanos(self.from.1.0 + past as u64)
    }
}

/// The time stamp counter: about 10 ns, no call into the kernel.
#[cfg(target_arch = "x86_64")]
fn ticks() -> u64 {
    // SAFETY: every x86-64 CPU has RDTSC, and it reads nothing but the counter.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// The monotonic clock where there is no time stamp counter that we know of.
#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> u64 {
    Nanos::now().0
}

#[cfg(test)]
mod tests {
    use super::*;

    const POSTED: TraceKind = TraceKind {
        id: 1,
        name: "read \"posted\"",
        phase: TracePhase::Begin,
        arguments: ["bytes", ""],
    };

    #[test]
    fn keeps_the_latest_events_in_order() {
        let ring = TraceRing::new("shard0", 8);
        for i in 0..20 {
            ring.record(&POSTED, i, i * 10, 0);
        }
        let events = ring.events();
        let subjects: Vec<u64> = events.iter().map(|event| event.subject).collect();
        assert_eq!(subjects, (12..20).collect::<Vec<_>>());
        assert!(events.windows(2).all(|pair| pair[0].at <= pair[1].at));
        assert_eq!(events[0].arguments, [120, 0]);
        assert_eq!(ring.recorded(), 20);
    }

    #[test]
    fn stamps_lie_between_the_clock_readings_around_them() {
        let ring = TraceRing::new("shard0", 8);
        std::thread::sleep(std::time::Duration::from_millis(5));
        let before = Nanos::now();
        ring.record(&POSTED, 1, 0, 0);
        let after = Nanos::now();
        std::thread::sleep(std::time::Duration::from_millis(5));
        let at = ring.events()[0].at.0;
        // The calibration stretches over 10 ms: an error of 1 % of it is a coarse bound.
        assert!(at + 1_000_000 > before.0 && at < after.0 + 1_000_000);
    }

    #[test]
    fn dumps_json_that_names_kinds_and_escapes_them() {
        let ring = TraceRing::new("shard\n0", 8);
        ring.record(&POSTED, 7, 4096, 0);
        let other = TraceKind { id: 9, ..POSTED };
        ring.record(&other, 8, 1, 2);
        let json = chrome_trace(&[&ring], &[POSTED]);
        assert!(json.contains(r#""name":"read \"posted\"""#), "{json}");
        assert!(json.contains(r#""bytes":4096"#), "{json}");
        assert!(json.contains(r#""kind 9""#), "{json}");
        assert!(json.contains(r#"shard\u000a0"#), "{json}");
        assert_eq!(json.matches('{').count(), json.matches('}').count());
    }

    #[test]
    fn a_reader_beside_the_writer_sees_only_whole_events() {
        let ring = std::sync::Arc::new(TraceRing::new("shard0", 64));
        let writer = {
            let ring = ring.clone();
            std::thread::spawn(move || {
                for i in 0..200_000u64 {
                    ring.record(&POSTED, i, i.wrapping_mul(3), i.wrapping_mul(7));
                }
            })
        };
        let mut seen = 0;
        while !writer.is_finished() {
            for event in ring.events() {
                assert_eq!(event.arguments[0], event.subject.wrapping_mul(3));
                assert_eq!(event.arguments[1], event.subject.wrapping_mul(7));
                seen += 1;
            }
        }
        writer.join().unwrap();
        assert!(seen > 0 || ring.recorded() == 200_000);
    }
}
