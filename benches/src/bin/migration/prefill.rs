//! The child: a prefill node whose pages are there at once.

use super::Args;
use super::node::Node;
use kvserve_kv::ledger::{AllocateAs, LedgerCell};
use kvserve_kv::peer::{IncomingPrefill, PrefillService, Publisher, Refusal, Role};
use kvserve_runtime::{Nanos, Shard, ShardConfig};
use std::io::Read;
use std::rc::Rc;
use std::time::Duration;

/// Serves until its input ends.
pub fn run(args: Args) {
    let config = ShardConfig {
        name: "prefill".into(),
        core: args.cores.map(|(_, prefill)| prefill),
    };
    let shard = kvserve_runtime::testing::launch(config, move |shard| async move {
        let service = shard.clone();
        let gap = args.gap;
        let pages = args.pages;
        let node = Node::start(&shard, &args, Role::Prefill, move |_pool, ledger| {
            let service = Ready {
                shard: service,
                ledger: ledger.clone(),
                pages,
                gap,
            };
            Some(Rc::new(service))
        });
        println!("{}", node.peers.local_addr().expect("it listens"));
        loop {
            shard.sleep(Duration::from_secs(60)).await;
        }
    });
    let _serving = shard.expect("a shard");
    // Ends with the parent.
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).expect("an end");
    std::process::exit(0);
}

/// Grants at once, waits, then completes.
struct Ready {
    shard: Shard,
    ledger: Rc<LedgerCell>,
    pages: usize,
    gap: Duration,
}

impl PrefillService for Ready {
    fn prefill(&self, _ask: IncomingPrefill, publisher: Publisher) -> Result<(), Refusal> {
        let mut pages = Vec::new();
        let reserved = self
            .ledger
            .with(|ledger| ledger.allocate(self.pages, AllocateAs::Building, &mut pages));
        if reserved.is_err() {
            return Err(Refusal::Busy { retry_ms: 1 });
        }
        publisher.granted(pages).expect("just asked");
        let (shard, gap, count) = (self.shard.clone(), self.gap, self.pages);
        self.shard
            .spawn(async move {
                shard.sleep(gap).await;
                publisher.first_token(Nanos::now().0.to_le_bytes().to_vec());
                publisher.complete(count, 1);
            })
            .detach();
        Ok(())
    }
}
