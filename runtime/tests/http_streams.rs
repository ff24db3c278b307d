//! Many streams at a time on one shard.

mod http_support;

use http_support::*;
use kvserve_runtime::http::HttpLimits;

#[test]
fn two_hundred_streams_at_once_are_all_whole() {
    let served = serve_app(HttpLimits::default());
    let address = served.address;
    let streams: Vec<_> = (0..200)
        .map(|_| stream(address, "GET", "/events?n=50&ms=10", &[], b"", PATIENCE).unwrap())
        .collect();
    // All are open before any is read to its end.
    assert_eq!(Seen::get(&served.seen.finished), 0);
    for streaming in streams {
        let events: Vec<String> = streaming.events().map(Result::unwrap).collect();
        assert_eq!(events.len(), 51);
        assert_eq!(events[49], "49");
    }
    assert_eq!(Seen::get(&served.seen.dropped), 0);
}
