//! Functions that the header defines inline: calls through the context's own table, so that the fast path
//! of a provider is one indirect call.

#![allow(clippy::missing_safety_doc)] // each says where its conditions stand

use crate::abi::*;
use std::ffi::c_int;

/// `ENOSYS` where a provider left the slot empty: the functions below answer as the verb would.
const NOT_THERE: c_int = libc::ENOSYS;

/// Takes up to `num_entries` completions; how many, or negative for a queue in error.
///
/// # Safety
/// As `ibv_poll_cq(3)`: a live queue, and room for `num_entries` at `wc`.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        match (*(*cq).context).ops.poll_cq {
            Some(poll_cq) => poll_cq(cq, num_entries, wc),
            None => -NOT_THERE,
        }
    }
}

/// Asks for one event at the next completion; zero or an errno.
///
/// # Safety
/// As `ibv_req_notify_cq(3)`: a live queue that was made with a completion channel.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        match (*(*cq).context).ops.req_notify_cq {
            Some(req_notify_cq) => req_notify_cq(cq, solicited_only),
            None => NOT_THERE,
        }
    }
}

/// Posts the list that starts at `wr`; zero or an errno, then with the first request not posted in `bad_wr`.
///
/// # Safety
/// As `ibv_post_send(3)`: a live queue pair, and a list whose nodes and scatter lists are live for
/// the call; the memory they name until their completions.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        match (*(*qp).context).ops.post_send {
            Some(post_send) => post_send(qp, wr, bad_wr),
            None => {
                *bad_wr = wr;
                NOT_THERE
            }
        }
    }
}

/// Posts receives; zero or an errno, then with the first request not posted in `bad_wr`.
///
/// # Safety
/// As `ibv_post_recv(3)`, like [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe {
        match (*(*qp).context).ops.post_recv {
            Some(post_recv) => post_recv(qp, wr, bad_wr),
            None => {
                *bad_wr = wr;
                NOT_THERE
            }
        }
    }
}
