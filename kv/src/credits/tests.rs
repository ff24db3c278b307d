//! The rules, one a test, then random events against a model.

use super::*;
use kvserve_runtime::{ChannelId, ChannelKind, Nanos};
use std::collections::BTreeMap;

const MIB: u64 = 1 << 20;

fn ms(value: u64) -> Nanos {
    Nanos(value * 1_000_000)
}

fn channel(index: u16) -> ChannelId {
    ChannelId {
        kind: ChannelKind::Tcp,
        index,
    }
}

/// Peer k has channel k.
fn open(peer: u64) -> Option<ChannelId> {
    Some(channel(peer as u16))
}

fn want(bytes: u64, deadline_ms: u64) -> Want {
    Want {
        bytes,
        deadline: ms(deadline_ms),
    }
}

fn allow(reads: u32, bytes: u64) -> Allowance {
    Allowance { reads, bytes }
}

/// Two reads a peer, three on the shard.
fn small() -> Credits<u64, &'static str> {
    Credits::new(CreditLimits {
        channel: allow(2, 8 * MIB),
        peer: allow(2, 8 * MIB),
        shard: allow(3, 12 * MIB),
        waiting_max: 6,
    })
}

fn names(credits: &mut Credits<u64, &'static str>) -> Vec<(Credit<u64>, &'static str)> {
    std::iter::from_fn(|| credits.next(ms(0), open)).collect()
}

#[test]
fn the_earliest_deadline_goes_first_and_equal_ones_in_their_order() {
    let mut credits = small();
    for (name, deadline) in [("late", 90), ("early", 10), ("mid", 50), ("mid too", 50)] {
        credits.queue(ms(0), 1, want(MIB, deadline), name).unwrap();
    }
    let posted = names(&mut credits);
    let order: Vec<_> = posted.iter().map(|(_, name)| *name).collect();
    assert_eq!(order, ["early", "mid"], "two at once");
    assert_eq!(credits.peer(1).waiting, 2);
    for (credit, _) in posted {
        credits.give_back(ms(1), credit, true);
    }
    let order: Vec<_> = names(&mut credits).iter().map(|(_, name)| *name).collect();
    assert_eq!(order, ["mid too", "late"]);
}

#[test]
fn a_frozen_peer_takes_no_more_than_its_credits_and_others_pass_by() {
    let mut credits = small();
    for name in ["a", "b", "c"] {
        credits.queue(ms(0), 1, want(MIB, 10), name).unwrap();
    }
    credits.queue(ms(0), 2, want(MIB, 99), "other").unwrap();
    let order: Vec<_> = names(&mut credits)
        .into_iter()
        .map(|(_, name)| name)
        .collect();
    assert_eq!(order, ["a", "b", "other"]);
    assert_eq!(credits.short_of_peer(1, open(1)), Some(Short::Shard));
    assert_eq!((credits.peer(1).reads, credits.peer(1).waiting), (2, 1));
}

#[test]
fn a_peer_without_a_channel_waits_and_says_for_what() {
    let mut credits = small();
    credits.queue(ms(0), 1, want(MIB, 10), "a").unwrap();
    assert!(credits.next(ms(0), |_| None).is_none());
    assert_eq!(credits.short_of_peer(1, None), Some(Short::Channel));
    assert!(credits.next(ms(0), open).is_some());
    assert_eq!(credits.short_of_peer(1, None), None);
}

#[test]
fn a_read_longer_than_the_allowance_goes_alone() {
    let mut credits = small();
    credits.queue(ms(0), 1, want(20 * MIB, 10), "long").unwrap();
    credits.queue(ms(0), 1, want(MIB, 20), "short").unwrap();
    let posted = names(&mut credits);
    assert_eq!(posted.len(), 1);
    assert_eq!(posted[0].1, "long");
}

#[test]
fn a_hopeless_read_is_refused_at_once_with_the_numbers() {
    let mut credits = small();
    credits.queue(ms(0), 1, want(MIB, 1000), "first").unwrap();
    let (credit, _) = credits.next(ms(0), open).unwrap();
    // 1 MiB in 100 ms: about 10 MiB/s.
    credits.give_back(ms(100), credit, true);
    credits
        .queue(ms(100), 1, want(4 * MIB, 200), "tight")
        .unwrap();
    let (_credit, name) = credits.next(ms(100), open).unwrap();
    assert_eq!(name, "tight", "with nothing ahead of it a read is tried");
    let (error, item) = credits
        .queue(ms(100), 1, want(MIB, 301), "hopeless")
        .expect_err("5 MiB take half a second, 201 ms are left");
    assert_eq!(item, "hopeless");
    let expected = CreditError::Hopeless {
        ahead_bytes: 4 * MIB,
        bytes: MIB,
        bytes_per_s: 10 * MIB,
        left: Duration::from_millis(201),
    };
    assert_eq!(error, expected);
    // What has a later deadline is not ahead of it.
    credits
        .queue(ms(100), 1, want(3 * MIB, 5000), "later")
        .unwrap();
    credits
        .queue(ms(100), 1, want(MIB, 700), "in time")
        .unwrap();
    assert_eq!(credits.counters().hopeless, 1);
}

#[test]
fn waiting_reads_are_bounded() {
    let mut credits = small();
    for _ in 0..6 {
        credits.queue(ms(0), 1, want(1, 10), "").unwrap();
    }
    let (error, _) = credits.queue(ms(0), 2, want(1, 10), "").unwrap_err();
    let full = CreditError::QueueFull {
        waiting: 6,
        waiting_max: 6,
    };
    assert_eq!(error, full);
    credits.retain(1, |_| false);
    assert_eq!(credits.waiting(), 0);
    credits.queue(ms(0), 2, want(1, 10), "").unwrap();
}

#[test]
fn a_gone_peers_credits_still_come_back() {
    let mut credits = small();
    credits.queue(ms(0), 1, want(MIB, 10), "a").unwrap();
    credits.queue(ms(0), 1, want(MIB, 10), "b").unwrap();
    let (credit, _) = credits.next(ms(0), open).unwrap();
    credits.forget(1);
    assert_eq!((credits.waiting(), credits.in_flight()), (0, (1, MIB)));
    credits.give_back(ms(5), credit, false);
    assert_eq!(credits.in_flight(), (0, 0));
    assert_eq!(credits.peer(1), PeerCredits::default());
}

/// I4 and I7 at every step, whatever comes.
#[test]
fn accounts_hold_under_random_events() {
    for seed in 0..400u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let limits = CreditLimits {
            channel: allow(3, 6 * MIB),
            peer: allow(4, 7 * MIB),
            shard: allow(6, 10 * MIB),
            waiting_max: 20,
        };
        let mut credits: Credits<u64, u64> = Credits::new(limits);
        let mut out: Vec<Credit<u64>> = Vec::new();
        let mut now = 0;
        for item in 0..300 {
            now += random(5);
            match random(6) {
                0..=2 => {
                    let asked = want(1 + random(2 * MIB), now + random(200));
                    // A refusal changes nothing.
                    let _refused = credits.queue(ms(now), random(4), asked, item);
                }
                3 => {
                    let closed = random(4);
                    let mut channels = |peer| (peer != closed).then(|| channel(peer as u16 * 2));
                    while let Some((credit, _)) = credits.next(ms(now), &mut channels) {
                        out.push(credit);
                    }
                }
                4 if !out.is_empty() => {
                    let at = random(out.len() as u64) as usize;
                    let credit = out.swap_remove(at);
                    credits.give_back(ms(now), credit, random(2) == 0);
                }
                _ => match random(10) {
                    0 => credits.forget(random(4)),
                    other => credits.retain(random(4), |item| item % 10 != other),
                },
            }
            let mut by_peer: BTreeMap<u64, (u32, u64)> = BTreeMap::new();
            for credit in &out {
                let used = by_peer.entry(credit.peer()).or_default();
                used.0 += 1;
                used.1 += credit.bytes();
            }
            let mut shard = (0, 0);
            for (peer, used) in &by_peer {
                let view = credits.peer(*peer);
                assert_eq!((view.reads, view.bytes), *used, "I4");
                let within = used.0 <= limits.channel.reads && used.1 <= limits.channel.bytes;
                assert!(within || used.0 == 1, "I7");
                shard = (shard.0 + used.0, shard.1 + used.1);
            }
            assert_eq!(credits.in_flight(), shard, "I4");
            assert!(shard.0 <= limits.shard.reads);
            let counters = credits.counters();
            assert_eq!(counters.taken - counters.given_back, out.len() as u64, "I4");
            assert!(credits.waiting() <= limits.waiting_max);
        }
    }
}
