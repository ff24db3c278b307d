//! The C face: the functions of `libibverbs` that the transport calls.
//!
//! Every pointer that comes in was given out here and not taken back yet: that is the verbs' own
//! contract, which the SAFETY notes below call "the verbs' rule".

#![allow(clippy::missing_safety_doc)] // the verbs' manual pages say it
#![allow(missing_docs)] // the verbs' own names

use crate::card::{Card, Memory, Pair, Request};
use crate::device::{
    Entries, EventQueue, FakeChannel, FakeContext, FakeDevice, FakeDomain, FakePair, FakeQueue,
    FakeRegion, QueueCore, event_fd, locked, take,
};
use crate::wire::devices;
use rdma_core_sys::{self as sys, Verbs, *};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Numbers of queue pairs and keys: never used twice in a process, so that stale ones are noticed.
static LAST_NUMBER: AtomicU32 = AtomicU32::new(16);

fn next_number() -> u32 {
    LAST_NUMBER.fetch_add(1, Ordering::Relaxed) & 0x00FF_FFFF
}

fn set_errno(errno: c_int) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = errno };
}

fn fail<T>(errno: c_int) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

/// Gives an object to the caller.
fn give<T, A>(object: T) -> *mut A {
    Box::into_raw(Box::new(object)).cast()
}

macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)? $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) $(-> $ret)? $body
        )*

        /// The functions, for a test in the same process.
        pub fn verbs() -> Verbs {
            // SAFETY: each function below has the signature of its name in the verbs ABI (the
            // declarations are checked by the calls that tests make through them).
            let found = unsafe {
                Verbs::from_symbols(|symbol| {
                    match symbol.to_bytes() {
                        $(name if name == stringify!($name).as_bytes() => $name as *mut c_void,)*
                        _ => std::ptr::null_mut(),
                    }
                })
            };
            match found {
                Ok(verbs) => verbs,
                Err(symbol) => unreachable!("{symbol:?} is not faked"),
            }
        }
    };
}

exports! {
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
        let mut list: Vec<*mut ibv_device> = devices()
            .into_iter()
            .map(|device| Arc::into_raw(device).cast_mut().cast())
            .collect();
        // SAFETY: null or valid by the verbs' rule.
        if let Some(count) = unsafe { count.as_mut() } {
            *count = list.len() as c_int;
        }
        list.push(std::ptr::null_mut());
        Box::into_raw(list.into_boxed_slice()).cast()
    }

    fn ibv_free_device_list(list: *mut *mut ibv_device) {
        let mut count = 0;
        // SAFETY: a list of `ibv_get_device_list`, which ends in a null; each entry was made by
        // `Arc::into_raw`.
        unsafe {
            while !(*list.add(count)).is_null() {
                drop(Arc::from_raw((*list.add(count)).cast::<FakeDevice>()));
                count += 1;
            }
            drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, count + 1)));
        }
    }

    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
        // SAFETY: the verbs' rule.
        unsafe { (*device.cast::<FakeDevice>()).name.as_ptr() }
    }

    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
        // SAFETY: the verbs' rule.
        let device = unsafe { &*device.cast::<FakeDevice>() };
        let events = EventQueue::new();
        // SAFETY: zeros are valid for the struct: null pointers, empty slots, numbers.
        let mut abi: ibv_context = unsafe { std::mem::zeroed() };
        abi.async_fd = events.fd;
        abi.num_comp_vectors = 1;
        abi.ops.poll_cq = Some(poll_cq);
        abi.ops.req_notify_cq = Some(req_notify_cq);
        abi.ops.post_send = Some(post_send);
        let (shared, side) = (device.shared.clone(), device.side);
        let context: *mut ibv_context = give(FakeContext { abi, shared: shared.clone(), side, events });
        shared.with(|cards| cards.side(side).contexts.push(context as usize));
        context
    }

    fn ibv_close_device(context: *mut ibv_context) -> c_int {
        // SAFETY: the verbs' rule; nobody uses it after.
        let context = unsafe { Box::from_raw(context.cast::<FakeContext>()) };
        let name = (&raw const *context) as usize;
        context.shared.with(|cards| {
            cards.side(context.side).contexts.retain(|known| *known != name);
        });
        0
    }

    fn ibv_query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
        // SAFETY: the verbs' rule; zeros are valid for the struct.
        let attr = unsafe { attr.write(std::mem::zeroed()); &mut *attr };
        attr.max_qp_wr = 16_384;
        attr.max_cqe = 32_767;
        attr.max_sge = 32;
        attr.max_sge_rd = 30;
        attr.max_qp_rd_atom = 128;
        attr.max_qp_init_rd_atom = 128;
        attr.phys_port_cnt = 1;
        0
    }

    fn ibv_query_port(context: *mut ibv_context, _port: u8, attr: *mut ibv_port_attr) -> c_int {
        // SAFETY: the verbs' rule.
        let (context, attr) = unsafe { (&*context.cast::<FakeContext>(), &mut *attr) };
        let down = context.shared.with(|cards| cards.side(context.side).link_down);
        *attr = ibv_port_attr {
            state: if down { IBV_PORT_DOWN } else { IBV_PORT_ACTIVE },
            max_mtu: IBV_MTU_4096,
            active_mtu: IBV_MTU_4096,
            gid_tbl_len: 4,
            max_msg_sz: 1 << 31,
            link_layer: IBV_LINK_LAYER_ETHERNET,
            ..ibv_port_attr::default()
        };
        0
    }

    fn ibv_query_gid(context: *mut ibv_context, _port: u8, index: c_int, gid: *mut ibv_gid) -> c_int {
        // SAFETY: the verbs' rule.
        unsafe { *gid = gid_at(context, index as u32).gid };
        0
    }

    fn _ibv_query_gid_ex(
        context: *mut ibv_context, _port: u32, index: u32, entry: *mut ibv_gid_entry,
        _flags: u32, _size: usize
    ) -> c_int {
        // SAFETY: the verbs' rule.
        unsafe { *entry = gid_at(context, index) };
        0
    }

    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
        give(FakeDomain { abi: ibv_pd { context, handle: 0 } })
    }

    fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
        // SAFETY: the verbs' rule.
        drop(unsafe { Box::from_raw(domain.cast::<FakeDomain>()) });
        0
    }

    fn ibv_reg_mr(domain: *mut ibv_pd, address: *mut c_void, length: usize, flags: c_int) -> *mut ibv_mr {
        if flags & IBV_ACCESS_RELAXED_ORDERING != 0 {
            return fail(libc::EINVAL);
        }
        // SAFETY: the verbs' rule.
        unsafe { register(domain, address, length, flags) }
    }

    fn ibv_reg_mr_iova2(
        domain: *mut ibv_pd, address: *mut c_void, length: usize, _iova: u64, flags: c_uint
    ) -> *mut ibv_mr {
        // SAFETY: the verbs' rule.
        unsafe { register(domain, address, length, flags as c_int) }
    }

    fn ibv_dereg_mr(region: *mut ibv_mr) -> c_int {
        // SAFETY: the verbs' rule.
        let region = unsafe { Box::from_raw(region.cast::<FakeRegion>()) };
        let key = region.abi.rkey;
        region.shared.with(|cards| cards.side(region.side).memory.remove(&key));
        0
    }

    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
        let abi = ibv_comp_channel { context, fd: event_fd(), refcnt: 0 };
        give(FakeChannel { abi, waiting: Mutex::default() })
    }

    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
        // SAFETY: the verbs' rule; its descriptor was made with it.
        unsafe {
            let channel = Box::from_raw(channel.cast::<FakeChannel>());
            libc::close(channel.abi.fd);
        }
        0
    }

    fn ibv_create_cq(
        context: *mut ibv_context, entries: c_int, cq_context: *mut c_void,
        channel: *mut ibv_comp_channel, _vector: c_int
    ) -> *mut ibv_cq {
        let abi = ibv_cq { context, channel, cq_context, handle: 0, cqe: entries };
        let core = Arc::new(QueueCore {
            entries: Mutex::new(Entries { capacity: entries as usize, ..Entries::default() }),
            channel: channel as usize,
            itself: AtomicUsize::new(0),
        });
        let queue: *mut ibv_cq = give(FakeQueue { abi, core: core.clone() });
        core.itself.store(queue as usize, Ordering::Release);
        queue
    }

    fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int {
        // SAFETY: the verbs' rule.
        drop(unsafe { Box::from_raw(queue.cast::<FakeQueue>()) });
        0
    }

    fn ibv_get_cq_event(
        channel: *mut ibv_comp_channel, queue: *mut *mut ibv_cq, cq_context: *mut *mut c_void
    ) -> c_int {
        // SAFETY: the verbs' rule.
        unsafe {
            let channel = &*channel.cast::<FakeChannel>();
            if !take(channel.abi.fd) {
                return -1;
            }
            let Some(named) = locked(&channel.waiting).pop_front() else {
                return -1;
            };
            *queue = named as *mut ibv_cq;
            *cq_context = (*(named as *mut ibv_cq)).cq_context;
        }
        0
    }

    fn ibv_ack_cq_events(_queue: *mut ibv_cq, _count: c_uint) {}

    fn ibv_create_qp(domain: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
        // SAFETY: the verbs' rule.
        let (init, context, queue) = unsafe {
            let init = &*init;
            let context = (*domain).context;
            let queue = (*init.send_cq.cast::<FakeQueue>()).core.clone();
            (init, context, queue)
        };
        // SAFETY: the verbs' rule.
        let device = unsafe { &*context.cast::<FakeContext>() };
        let number = next_number();
        let abi = ibv_qp {
            context,
            qp_context: init.qp_context,
            pd: domain,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: std::ptr::null_mut(),
            handle: 0,
            qp_num: number,
            state: IBV_QPS_RESET,
            qp_type: init.qp_type,
        };
        let (shared, side) = (device.shared.clone(), device.side);
        let pair: *mut ibv_qp = give(FakePair { abi, shared: shared.clone(), side });
        let known = Pair {
            state: IBV_QPS_RESET,
            peer: 0,
            timeout: 0,
            retry_cnt: 0,
            remote_read: false,
            depth: init.cap.max_send_wr as usize,
            queue,
            requests: Default::default(),
            unanswered: None,
            name: pair as usize,
        };
        shared.with(|cards| {
            let card = cards.side(side);
            card.order.push(number);
            card.pairs.insert(number, known);
        });
        pair
    }

    fn ibv_modify_qp(pair: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
        // SAFETY: the verbs' rule.
        let (pair, attr) = unsafe { (&*pair.cast::<FakePair>(), &*attr) };
        let number = pair.abi.qp_num;
        pair.shared.with(|cards| {
            let Some(known) = cards.side(pair.side).pairs.get_mut(&number) else {
                return libc::EINVAL;
            };
            let errno = modify(known, attr, mask);
            if errno == 0 && known.state == IBV_QPS_ERR {
                cards.flush(pair.side, number);
            }
            errno
        })
    }

    fn ibv_destroy_qp(pair: *mut ibv_qp) -> c_int {
        // SAFETY: the verbs' rule.
        let known = unsafe { &*pair.cast::<FakePair>() };
        let (shared, number) = (known.shared.clone(), known.abi.qp_num);
        let done = shared.with(|cards| {
            let card = cards.side(known.side);
            if card.destroy_fails {
                return false;
            }
            // What was outstanding vanishes: its completions never come.
            card.pairs.remove(&number);
            card.order.retain(|other| *other != number);
            true
        });
        if !done {
            return libc::EBUSY;
        }
        // SAFETY: the verbs' rule; it is not used after.
        drop(unsafe { Box::from_raw(pair.cast::<FakePair>()) });
        0
    }

    fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
        // SAFETY: the verbs' rule.
        let (context, event) = unsafe { (&*context.cast::<FakeContext>(), event) };
        match context.events.pop() {
            Some(told) => {
                // SAFETY: valid by the verbs' rule.
                unsafe { event.write(told) };
                0
            }
            None => -1,
        }
    }

    fn ibv_ack_async_event(_event: *mut ibv_async_event) {}

    fn ibv_wc_status_str(_status: ibv_wc_status) -> *const c_char {
        c"fake status".as_ptr()
    }
}

/// GID 0 is a link-local one, 1 RoCE v1, 2 RoCE v2 over IPv4; 3 is not set: so that a fixed index
/// fails.
///
/// # Safety
/// The verbs' rule.
unsafe fn gid_at(context: *mut ibv_context, index: u32) -> ibv_gid_entry {
    // SAFETY: the caller's.
    let side = unsafe { (*context.cast::<FakeContext>()).side };
    let mut raw = [0; 16];
    let last = match side {
        crate::card::Side::Near => 1,
        crate::card::Side::Far => 2,
    };
    match index {
        0 => raw[..2].copy_from_slice(&[0xFE, 0x80]),
        1 | 2 => raw[10..].copy_from_slice(&[0xFF, 0xFF, 10, 88, 0, last]),
        _ => {}
    }
    ibv_gid_entry {
        gid: ibv_gid { raw },
        gid_index: index,
        port_num: 1,
        gid_type: match index {
            1 => IBV_GID_TYPE_ROCE_V1,
            _ => IBV_GID_TYPE_ROCE_V2,
        },
        ndev_ifindex: 0,
    }
}

/// # Safety
/// The verbs' rule.
unsafe fn register(
    domain: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    flags: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's.
    let (context, device) = unsafe {
        let context = (*domain).context;
        (context, &*context.cast::<FakeContext>())
    };
    let key = next_number();
    let memory = Memory {
        start: address as u64,
        bytes: length as u64,
        flags,
    };
    let (shared, side) = (device.shared.clone(), device.side);
    shared.with(|cards| cards.side(side).memory.insert(key, memory));
    let abi = ibv_mr {
        context,
        pd: domain,
        addr: address,
        length,
        handle: 0,
        lkey: key,
        rkey: key,
    };
    give(FakeRegion { abi, shared, side })
}

/// The transitions that the transport makes, with the attributes that each needs; others are
/// refused as a driver does.
fn modify(pair: &mut Pair, attr: &ibv_qp_attr, mask: c_int) -> c_int {
    let needs = |wanted: c_int| mask & wanted == wanted;
    let allowed = match (pair.state, attr.qp_state) {
        (_, IBV_QPS_ERR) => true,
        (IBV_QPS_RESET, IBV_QPS_INIT) => {
            needs(IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
        }
        (IBV_QPS_INIT, IBV_QPS_RTR) => needs(
            IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
        ),
        (IBV_QPS_RTR, IBV_QPS_RTS) => needs(
            IBV_QP_SQ_PSN
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC,
        ),
        (_, _) => false,
    };
    if !allowed || !needs(IBV_QP_STATE) {
        return libc::EINVAL;
    }
    if needs(IBV_QP_ACCESS_FLAGS) {
        pair.remote_read = attr.qp_access_flags & IBV_ACCESS_REMOTE_READ as c_uint != 0;
    }
    if needs(IBV_QP_AV) {
        // The place of the GID in the table: only 2 is RoCE v2 over IPv4.
        if attr.ah_attr.is_global == 0 || attr.ah_attr.grh.sgid_index != 2 {
            return libc::EINVAL;
        }
        pair.peer = attr.dest_qp_num;
    }
    if needs(IBV_QP_TIMEOUT) {
        pair.timeout = attr.timeout;
        pair.retry_cnt = attr.retry_cnt;
    }
    pair.state = attr.qp_state;
    0
}

unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, room: c_int, out: *mut ibv_wc) -> c_int {
    // SAFETY: the verbs' rule.
    let core = unsafe { &(*queue.cast::<FakeQueue>()).core };
    let mut entries = locked(&core.entries);
    let count = entries.list.len().min(room.max(0) as usize);
    for (at, wc) in entries.list.drain(..count).enumerate() {
        // SAFETY: room for `room` entries by the verbs' rule.
        unsafe { out.add(at).write(wc) };
    }
    count as c_int
}

unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _solicited: c_int) -> c_int {
    // SAFETY: the verbs' rule.
    let core = unsafe { &(*queue.cast::<FakeQueue>()).core };
    locked(&core.entries).armed = true;
    0
}

unsafe extern "C" fn post_send(
    pair: *mut ibv_qp,
    first: *mut ibv_send_wr,
    refused: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the verbs' rule.
    let pair = unsafe { &*pair.cast::<FakePair>() };
    pair.shared.with(|cards| {
        let mut next = first;
        // SAFETY: a list that ends in a null, and valid entries, by the verbs' rule.
        while let Some(request) = unsafe { next.as_ref() } {
            // SAFETY: as above.
            let read = unsafe { request_of(request) };
            let card = cards.side(pair.side);
            let errno = accept(card, pair.abi.qp_num, request.opcode, read);
            if errno != 0 {
                // SAFETY: valid by the verbs' rule.
                unsafe { *refused = next };
                return errno;
            }
            cards.counters.posted += 1;
            next = request.next;
        }
        0
    })
}

/// # Safety
/// A valid request of a READ.
unsafe fn request_of(request: &ibv_send_wr) -> Request {
    let count = request.num_sge.max(0) as usize;
    let scatter = (0..count).map(|at| {
        // SAFETY: the list has `num_sge` entries.
        let entry = unsafe { &*request.sg_list.add(at) };
        (entry.addr, entry.length, entry.lkey)
    });
    // SAFETY: a READ's arm is `rdma`.
    let remote = unsafe { request.wr.rdma };
    Request {
        wr_id: request.wr_id,
        signalled: request.send_flags & IBV_SEND_SIGNALED != 0,
        remote_address: remote.remote_addr,
        remote_key: remote.rkey,
        scatter: scatter.collect(),
        fate: None,
    }
}

fn accept(card: &mut Card, number: u32, opcode: u32, mut request: Request) -> c_int {
    let Some(pair) = card.pairs.get_mut(&number) else {
        return libc::EINVAL;
    };
    // In ERR a post succeeds and is flushed: never trust the answer alone.
    if opcode != sys::IBV_WR_RDMA_READ || !matches!(pair.state, IBV_QPS_RTS | IBV_QPS_ERR) {
        return libc::EINVAL;
    }
    let marker = pair.state == IBV_QPS_ERR;
    if pair.requests.len() >= pair.depth {
        return libc::ENOMEM;
    }
    if let Some(left) = &mut card.enomem_after
        && !marker
    {
        if *left == 0 {
            return libc::ENOMEM;
        }
        *left -= 1;
    }
    if !marker {
        let at = card.posted;
        card.posted += 1;
        let place = card.rules.iter().position(|(nth, _)| *nth == at);
        request.fate = place.map(|place| card.rules.remove(place).1);
    }
    pair.requests.push_back(request);
    0
}
