//! A node's side of the fabric, as the transport its completion hub polls.

use super::fabric::Fabric;
use crate::transport::{Posted, Read, Transport, code};
use kvserve_runtime::Reap;
use kvserve_runtime::source::COMPLETIONS_PER_POLL_MAX;
use kvserve_runtime::{ChannelId, Completed, CompletionSource, Nanos, WorkId};
use std::cell::RefCell;
use std::os::fd::RawFd;
use std::rc::Rc;

/// One endpoint's transport.
pub struct SimTransport {
    fabric: Rc<RefCell<Fabric>>,
    endpoint: usize,
    tag: u64,
    posts_until_failure: Option<u32>,
}

impl SimTransport {
    /// The transport of an endpoint.
    pub fn new(fabric: Rc<RefCell<Fabric>>, endpoint: usize) -> Self {
        SimTransport {
            fabric,
            endpoint,
            tag: 0,
            posts_until_failure: None,
        }
    }

    /// The tag of the next posts, which the witness gets at each touch.
    pub fn set_tag(&mut self, tag: u64) {
        self.tag = tag;
    }

    /// After so many more posts one fails.
    pub fn fail_post_after(&mut self, posts: Option<u32>) {
        self.posts_until_failure = posts;
    }

    /// Bytes moved on a channel.
    pub fn bytes_received(&self, channel: ChannelId) -> u64 {
        self.fabric.borrow().moved(self.endpoint, channel)
    }
}

impl CompletionSource for SimTransport {
    fn poll(&mut self, now: Nanos, out: &mut Vec<Completed>) -> usize {
        (self.fabric.borrow_mut()).poll(self.endpoint, now, COMPLETIONS_PER_POLL_MAX, out)
    }

    fn arm(&mut self) -> Option<RawFd> {
        None
    }

    fn in_flight(&self) -> usize {
        self.fabric.borrow().posts_under_way(self.endpoint)
    }

    fn kill(&mut self, channel: ChannelId) {
        self.fabric.borrow_mut().kill(self.endpoint, channel);
    }

    fn reap(&mut self, channel: ChannelId) -> Reap {
        self.fabric.borrow().reap(self.endpoint, channel)
    }

    fn moved(&self, channel: ChannelId) -> u64 {
        self.bytes_received(channel)
    }

    fn take_back(&mut self, work: WorkId) -> bool {
        self.fabric.borrow_mut().abandon(self.endpoint, work)
    }
}

impl Transport for SimTransport {
    fn post(&mut self, channel: ChannelId, first: WorkId, reads: Vec<Read>) -> Result<(), Posted> {
        match &mut self.posts_until_failure {
            Some(0) => {
                self.posts_until_failure = None;
                return Err(Posted {
                    posted: 0,
                    code: code::BUSY,
                });
            }
            Some(posts) => *posts -= 1,
            None => {}
        }
        let mut fabric = self.fabric.borrow_mut();
        fabric.post(self.endpoint, channel, first, reads, self.tag)
    }

    fn moved_at(&self, channel: ChannelId) -> Nanos {
        self.fabric.borrow().moved_at(self.endpoint, channel)
    }
}
