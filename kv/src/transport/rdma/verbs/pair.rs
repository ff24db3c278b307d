//! A queue pair on a reliable connection.

use super::{CompletionQueue, Device, Region, VerbError, WorkBatch};
use rdma_core_sys::{
    self as sys, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp, ibv_qp_attr, ibv_qp_cap,
    ibv_qp_init_attr, ibv_send_wr,
};
use std::rc::Rc;

/// Hops a packet may take: the customary value; a fabric has a handful.
const HOP_LIMIT: u8 = 64;

/// How large a queue pair's own queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairLimits {
    /// Work requests.
    pub requests: u32,
    /// Scatter entries of one.
    pub scatter: u32,
}

/// How one end reaches the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairPath {
    /// Our port.
    pub port: u8,
    /// Our place in the GID table.
    pub gid_index: u8,
    /// Whether packets carry a global header: always on Ethernet.
    pub global: bool,
    /// The other end's GID.
    pub gid: [u8; 16],
    /// The other end's local id, on InfiniBand.
    pub lid: u16,
    /// The other end's queue pair.
    pub pair: u32,
    /// The other end's first packet number.
    pub psn: u32,
    /// `ibv_mtu`, agreed.
    pub mtu: u32,
    /// Traffic class of the global header (the network's priority for RoCE).
    pub traffic_class: u8,
}

/// How the end that answers behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Responder {
    /// READs it answers at once.
    pub reads_max: u8,
    /// What it asks of a sender when it is not ready.
    pub min_rnr_timer: u8,
}

/// A post that was taken in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PostFailed {
    /// Requests from the front that were taken; they complete like any other.
    pub posted: usize,
    /// Why the next one was not.
    pub errno: i32,
}

/// One queue pair. Dropping it destroys it; what cannot be destroyed leaks with its region (V2).
pub struct QueuePair {
    device: Rc<Device>,
    queue: Rc<CompletionQueue>,
    region: Rc<Region>,
    pair: *mut ibv_qp,
}

impl QueuePair {
    /// A queue pair whose requests complete on `queue` and land in `region`.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(
        device: &Rc<Device>,
        queue: &Rc<CompletionQueue>,
        region: &Rc<Region>,
        limits: PairLimits,
    ) -> Result<Self, VerbError> {
        let mut attr = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: queue.raw(),
            recv_cq: queue.raw(),
            srq: std::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: limits.requests,
                // Nothing is ever received; some providers take no empty queue.
                max_recv_wr: 1,
                max_send_sge: limits.scatter,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a live protection domain and completion queue of the same context.
        let pair = unsafe { (device.verbs.create_qp)(device.domain, &mut attr) };
        if pair.is_null() {
            return Err(VerbError::last("ibv_create_qp"));
        }
        Ok(QueuePair {
            device: device.clone(),
            queue: queue.clone(),
            region: region.clone(),
            pair,
        })
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { (*self.pair).qp_num }
    }

    fn modify(&mut self, mut attr: ibv_qp_attr, mask: i32) -> Result<(), VerbError> {
        // SAFETY: a live queue pair and a valid struct.
        let answer = unsafe { (self.device.verbs.modify_qp)(self.pair, &mut attr, mask) };
        VerbError::check("ibv_modify_qp", answer)
    }

    /// RESET to INIT: what the other end may do is read, or nothing.
    ///
    /// # Errors
    /// What the library says.
    pub fn init(&mut self, port: u8, serves: bool) -> Result<(), VerbError> {
        let attr = ibv_qp_attr {
            qp_state: sys::IBV_QPS_INIT,
            port_num: port,
            qp_access_flags: match serves {
                true => sys::IBV_ACCESS_REMOTE_READ as u32,
                false => 0,
            },
            ..ibv_qp_attr::default()
        };
        self.modify(
            attr,
            sys::IBV_QP_STATE
                | sys::IBV_QP_PKEY_INDEX
                | sys::IBV_QP_PORT
                | sys::IBV_QP_ACCESS_FLAGS,
        )
    }

    /// INIT to RTR: the other end is known.
    ///
    /// # Errors
    /// What the library says: `EINVAL` or `ENETUNREACH` when no route leads there.
    pub fn ready_to_receive(
        &mut self,
        path: &PairPath,
        responder: Responder,
    ) -> Result<(), VerbError> {
        let attr = ibv_qp_attr {
            qp_state: sys::IBV_QPS_RTR,
            path_mtu: path.mtu,
            dest_qp_num: path.pair,
            rq_psn: path.psn,
            max_dest_rd_atomic: responder.reads_max,
            min_rnr_timer: responder.min_rnr_timer,
            ah_attr: ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: ibv_gid { raw: path.gid },
                    flow_label: 0,
                    sgid_index: path.gid_index,
                    hop_limit: HOP_LIMIT,
                    traffic_class: path.traffic_class,
                },
                dlid: path.lid,
                is_global: u8::from(path.global),
                port_num: path.port,
                ..ibv_ah_attr::default()
            },
            ..ibv_qp_attr::default()
        };
        self.modify(
            attr,
            sys::IBV_QP_STATE
                | sys::IBV_QP_AV
                | sys::IBV_QP_PATH_MTU
                | sys::IBV_QP_DEST_QPN
                | sys::IBV_QP_RQ_PSN
                | sys::IBV_QP_MAX_DEST_RD_ATOMIC
                | sys::IBV_QP_MIN_RNR_TIMER,
        )
    }

    /// RTR to RTS: reads may be posted.
    ///
    /// # Errors
    /// What the library says.
    pub fn ready_to_send(
        &mut self,
        psn: u32,
        reads_max: u8,
        retries: (u8, u8, u8),
    ) -> Result<(), VerbError> {
        let (timeout, retry_cnt, rnr_retry) = retries;
        let attr = ibv_qp_attr {
            qp_state: sys::IBV_QPS_RTS,
            sq_psn: psn,
            max_rd_atomic: reads_max,
            timeout,
            retry_cnt,
            rnr_retry,
            ..ibv_qp_attr::default()
        };
        self.modify(
            attr,
            sys::IBV_QP_STATE
                | sys::IBV_QP_SQ_PSN
                | sys::IBV_QP_MAX_QP_RD_ATOMIC
                | sys::IBV_QP_TIMEOUT
                | sys::IBV_QP_RETRY_CNT
                | sys::IBV_QP_RNR_RETRY,
        )
    }

    /// Any state to ERR: what is outstanding is flushed. Never RESET (PROTOCOL E4).
    ///
    /// # Errors
    /// What the library says.
    pub fn to_error(&mut self) -> Result<(), VerbError> {
        let attr = ibv_qp_attr {
            qp_state: sys::IBV_QPS_ERR,
            ..ibv_qp_attr::default()
        };
        self.modify(attr, sys::IBV_QP_STATE)
    }

    /// Posts a list. The pages that it names are the caller's until the requests have ended (V3).
    ///
    /// # Errors
    /// [`PostFailed`]: those before it were taken.
    pub fn post(&mut self, batch: &mut WorkBatch) -> Result<(), PostFailed> {
        assert!(
            batch.lands_in(&self.region),
            "a batch of another region's pages"
        );
        let requests = batch.linked();
        if requests.is_empty() {
            return Ok(());
        }
        let first = requests.as_mut_ptr();
        let mut refused: *mut ibv_send_wr = std::ptr::null_mut();
        // SAFETY: a live queue pair; the list and its entries are live for the call, and the
        // memory that they name lies in the region's pool, which this queue pair holds (V2).
        let answer = unsafe { sys::ibv_post_send(self.pair, first, &mut refused) };
        match VerbError::check("ibv_post_send", answer) {
            Ok(()) => Ok(()),
            Err(error) => {
                let taken = (refused as usize).saturating_sub(first as usize);
                let posted = (taken / size_of::<ibv_send_wr>()).min(requests.len());
                Err(PostFailed {
                    posted,
                    errno: error.errno,
                })
            }
        }
    }

    /// Destroys it.
    ///
    /// # Errors
    /// The library's refusal: the card may still use the region, which therefore stays
    /// registered and mapped for the life of the process (V2).
    pub fn destroy(self) -> Result<(), VerbError> {
        let mut this = std::mem::ManuallyDrop::new(self);
        let done = this.destroy_now();
        if done.is_ok() {
            // SAFETY: each is moved out of `this` once, which is not dropped.
            unsafe {
                drop(std::ptr::read(&this.region));
                drop(std::ptr::read(&this.queue));
                drop(std::ptr::read(&this.device));
            }
        }
        done
    }

    fn destroy_now(&mut self) -> Result<(), VerbError> {
        // SAFETY: a live queue pair; it is not used after a success.
        let answer = unsafe { (self.device.verbs.destroy_qp)(self.pair) };
        VerbError::check("ibv_destroy_qp", answer)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if self.destroy_now().is_err() {
            std::mem::forget(self.region.clone());
            std::mem::forget(self.queue.clone());
            std::mem::forget(self.device.clone());
        }
    }
}
