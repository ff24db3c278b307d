//! What a run is made of: drawn from its seed.

use super::clock::{NodeClock, ms};
use super::context::{Client, Context};
use super::expected::FAULTS;
use super::model::{self, PAGE_TOKENS, STOP_IDS, VOCAB};
use super::node::{NodePlan, TTLS};
use super::world::{Event, World};
use kvserve_kv::ChecksumMode;
use kvserve_kv::session::Role;
use kvserve_kv::transport::sim::LinkKind;

/// Faults of one run at most.
const FAULTS_MAX: u64 = 9;

/// Requests of a run that begin with a page of others'.
const SHARING: u64 = 8;

/// The faults stop here in every second run.
const CALM_AT: (u64, u64) = (ms(3500), ms(6000));

impl World {
    /// The cluster, the clients and the faults of a seed.
    pub fn from_seed(seed: u64, traced: bool) -> World {
        let mut world = World::new(Context::new(seed, traced));
        let calms = seed.is_multiple_of(2);
        world.may_refuse = !calms;
        let rng = &mut world.context.rng;
        // One cluster in five lies far apart, one in five has slow cards.
        // One in four is on one host, by shared memory.
        world.one_host = rng.percent(25);
        world.far = rng.pick(&[1, 1, 1, 1, 1, 1, 1, 1, 6, 25]);
        world.slow = rng.pick(&[1, 1, 1, 1, 1, 1, 1, 1, 10, 60]);
        let prefills = rng.range(2, 4) as usize;
        let decodes = if rng.percent(80) { 2 } else { 3 };
        let checksums = match rng.percent(35) {
            true => ChecksumMode::Off,
            false => ChecksumMode::Full,
        };
        for index in 0..prefills + decodes {
            world.settle_one(index, prefills, checksums);
        }
        let requests = world.context.rng.range(8, 15);
        for number in 0..requests {
            // The first eight share whole pages, four each of two beginnings.
            let shared = (number < SHARING).then_some(number as u32 % 2);
            let client = world.add_client(false, shared);
            let at = world.context.rng.range(ms(20), ms(2600));
            world.at(at, Event::Arrive(client));
        }
        let faults = world.context.rng.range(4, FAULTS_MAX + 1);
        for _ in 0..faults {
            // Without checksums bent pages cannot be told from good ones.
            let kind = loop {
                let kind = world.context.rng.below(FAULTS.len() as u64) as usize;
                let bends = matches!(
                    FAULTS[kind],
                    "fault: page corrupted" | "fault: page truncated"
                );
                if !(bends && checksums == ChecksumMode::Off) {
                    break kind;
                }
            };
            let at = world.context.rng.range(ms(10), ms(3000));
            world.at(at, Event::Fault { kind, tries: 0 });
        }
        world.at(ms(1800), Event::AtLeast);
        if calms {
            let at = world.context.rng.range(CALM_AT.0, CALM_AT.1);
            world.at(at, Event::Calm);
            world.expects_later = true;
        }
        world.at(ms(100), Event::Report);
        world.at(ms(3000), Event::Rest);
        world
    }

    fn settle_one(&mut self, index: usize, prefills: usize, checksums: ChecksumMode) {
        let rng = &mut self.context.rng;
        let decodes = index >= prefills;
        let role = match (decodes, rng.percent(35)) {
            (true, _) => Role::Decode,
            (false, true) => Role::Hybrid,
            (false, false) => Role::Prefill,
        };
        // Where every later request must be answered, every request fits.
        let pages = if self.may_refuse && rng.percent(20) {
            rng.range(5, 10)
        } else if rng.percent(60) {
            rng.range(10, 20)
        } else {
            rng.range(20, 48)
        };
        let drift = if rng.percent(60) {
            rng.below(21) as i64 - 10
        } else {
            0
        };
        let plan = NodePlan {
            index,
            name: format!("{role}-{index}"),
            role,
            pages: pages as usize,
            dials: if decodes {
                (0..prefills).collect()
            } else {
                Vec::new()
            },
            checksums,
            reads: match self.one_host {
                true => LinkKind::Mapped,
                false => rng.pick(&[LinkKind::Served, LinkKind::OneSided]),
            },
            is_mapped: self.one_host && !decodes,
            ttl: rng.pick(&TTLS),
            read_pages: rng.pick(&[1, 2, 3, 16]),
            running_max: rng.pick(&[6, 6, 6, 2]),
            queued_max: if self.may_refuse {
                rng.pick(&[16, 1])
            } else {
                16
            },
        };
        let clock = NodeClock {
            offset: rng.range(1_000_000_000, 90_000_000_000),
            drift_permille: drift,
        };
        if drift != 0 {
            self.context.coverage.hit("fault: clock drifts");
        }
        self.settle(plan, clock);
    }

    /// A client with a prompt that shares its beginning with others.
    pub fn add_client(&mut self, later: bool, shared: Option<u32>) -> usize {
        let rng = &mut self.context.rng;
        let prefix = match shared {
            Some(_) => rng.range(PAGE_TOKENS as u64, 13) as u32,
            None => rng.range(0, 13) as u32,
        };
        let shared = shared.unwrap_or_else(|| rng.below(3) as u32);
        let own = rng.range(1, 13);
        let id = |place: u32, base: u32| STOP_IDS + (base * 97 + place * 31) % (VOCAB - STOP_IDS);
        let mut prompt: Vec<u32> = (0..prefix).map(|place| id(place, shared)).collect();
        for _ in 0..own {
            prompt.push(STOP_IDS + rng.below(u64::from(VOCAB - STOP_IDS)) as u32);
        }
        let max_tokens = rng.range(1, 13) as u32;
        let timeout_ns = if later {
            ms(5000)
        } else {
            rng.range(ms(1500), ms(4500))
        };
        let (expected, _finish) = model::oracle(&prompt, max_tokens);
        self.context.clients.push(Client {
            prompt,
            max_tokens,
            timeout_ns,
            until: 0,
            expected,
            told: 0,
            outcome: None,
            later,
        });
        self.context.clients.len() - 1
    }
}
