//! What only RDMA can show. `faults` runs on the fake wire and on soft-RoCE; `fake` needs faults
//! that only a fake library makes.

pub mod bed;
mod fake;
mod faults;
mod pairs;
mod poller;
