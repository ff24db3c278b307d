//! The decode side: asks, waits, and tells how long it took.

use super::Args;
use super::node::Node;
use kvserve_kv::copy::{Kernel, PageCopy, Stores, store_fence};
use kvserve_kv::ledger::AllocateAs;
use kvserve_kv::peer::{MigrationEvent, PrefillAsk, Role};
use kvserve_kv::{PageId, PoolMemory};
use kvserve_runtime::{Deadline, Nanos, Shard, ShardConfig};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Migrations before the first that counts.
const WARM_UP: usize = 50;

/// From one migration to the next ask.
const PAUSE: Duration = Duration::from_micros(300);

/// Nothing here may take longer.
const LIMIT: Duration = Duration::from_secs(20);

/// Kills the child, however this side ends.
struct Prefill(Child);

impl Drop for Prefill {
    fn drop(&mut self) {
        let ended = self.0.kill().and_then(|()| self.0.wait());
        ended.expect("a child that can be ended");
    }
}

pub fn run(args: Args, words: Vec<String>) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .arg("prefill")
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child process");
    let out = child.stdout.take().expect("piped");
    let child = Prefill(child);
    let mut line = String::new();
    BufReader::new(out)
        .read_line(&mut line)
        .expect("the child's address");
    let address: SocketAddr = line.trim().parse().expect("an address");
    let config = ShardConfig {
        name: "decode".into(),
        core: args.cores.map(|(decode, _)| decode),
    };
    let told = args.clone();
    let shard = kvserve_runtime::testing::launch(config, move |shard| async move {
        measure(&shard, &args, address).await
    });
    let samples = shard.expect("a shard").join().expect("the measurement");
    drop(child);
    samples.print(&told);
}

struct Samples {
    /// From `complete` to all pages in place and compared.
    placed: Vec<u64>,
    /// From `complete` to COMMIT's answer.
    committed: Vec<u64>,
    /// The same pages copied.
    floor: Vec<u64>,
}

async fn measure(shard: &Shard, args: &Args, address: SocketAddr) -> Samples {
    let node = Node::start(shard, args, Role::Decode, |_, _| None);
    node.peers.dial(address);
    let began = Nanos::now();
    while !node.peers.peers().iter().any(|peer| peer.can_pull) {
        assert!(
            Nanos::now().since(began) < LIMIT,
            "the pair does not come up"
        );
        shard.sleep(Duration::from_millis(1)).await;
    }
    let mut samples = Samples {
        placed: Vec::new(),
        committed: Vec::new(),
        floor: Vec::new(),
    };
    for round in 0..WARM_UP + args.rounds {
        let (placed, committed) = migrate(&node, args).await;
        let floor = copy(&node.pool, args);
        if round >= WARM_UP {
            samples.placed.push(placed);
            samples.committed.push(committed);
            samples.floor.push(floor);
        }
        shard.sleep(PAUSE).await;
    }
    samples
}

/// One migration; nanoseconds from `complete` to `Placed` and to `Committed`.
async fn migrate(node: &Node, args: &Args) -> (u64, u64) {
    let ask = PrefillAsk {
        request: node.peers.next_request_id(),
        attempt: 1,
        prompt: vec![1; args.pages * 16],
        payload: Vec::new(),
        held_pages: 0,
        into: node.pages(args.pages, AllocateAs::Pulling),
        deadline: Deadline::after(Nanos::now(), LIMIT),
    };
    let mut migration = match node.peers.prefill("p", ask) {
        Ok(migration) => migration,
        Err(error) => panic!("{}", error.error),
    };
    let (mut completed, mut placed) = (0, 0);
    loop {
        match migration.next().await {
            MigrationEvent::Granted => {}
            MigrationEvent::FirstToken(bytes) => {
                completed = u64::from_le_bytes(bytes.try_into().expect("a time"));
            }
            MigrationEvent::Placed => placed = Nanos::now().0,
            MigrationEvent::Committed { pages } => {
                let now = Nanos::now().0;
                node.ledger.with(|ledger| {
                    ledger.commit(&pages).expect("pulled pages");
                    ledger.free(&pages);
                });
                return (placed - completed, now - completed);
            }
            MigrationEvent::Failed(error) => panic!("{error}"),
        }
    }
}

/// As many pages copied from one half of the pool to the other: no protocol, no checksum.
fn copy(pool: &PoolMemory, args: &Args) -> u64 {
    let kernel = Kernel::detect(Stores::Streaming);
    let far = pool.pages() as u32 / 2;
    let began = Nanos::now();
    for page in 0..args.pages as u32 {
        let (from, into) = (pool.page(PageId(page + far)), pool.page(PageId(page)));
        let mut copy = PageCopy::new(args.page_bytes, false);
        while !copy.is_whole() {
            // SAFETY: no migration is under way, so the pages are nobody's; they are two.
            unsafe { copy.step(kernel, from, into, args.page_bytes) };
        }
    }
    store_fence();
    Nanos::now().since(began).as_nanos() as u64
}

impl Samples {
    fn print(&self, args: &Args) {
        let micros = |values: &[u64], of: f64| {
            let mut sorted = values.to_vec();
            sorted.sort_unstable();
            sorted[((sorted.len() - 1) as f64 * of) as usize] as f64 / 1000.0
        };
        println!(
            "{} pages of {} KiB, {}, checksums {}, {} migrations, two processes, adaptive polling",
            args.pages,
            args.page_bytes >> 10,
            args.path.label(),
            args.checksums,
            args.rounds
        );
        println!("{:<46} {:>9} {:>9} {:>9}", "", "p10 us", "p50 us", "p99 us");
        let row = |what: &str, values: &[u64]| {
            let [low, mid, high] = [0.1, 0.5, 0.99].map(|of| micros(values, of));
            println!("{what:<46} {low:>9.1} {mid:>9.1} {high:>9.1}");
        };
        row("Complete -> all pages in place and checked", &self.placed);
        row(
            "Complete -> first migrated token may leave",
            &self.committed,
        );
        row("the same bytes at the floor", &self.floor);
        let fixed: Vec<u64> = self
            .committed
            .iter()
            .zip(&self.floor)
            .map(|(committed, floor)| committed.saturating_sub(*floor))
            .collect();
        row("fixed cost (goal: p50 below 100)", &fixed);
    }
}
