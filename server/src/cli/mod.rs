//! The command line: what the user says, checked, as plain values.

mod args;
mod parse;

pub use args::{
    Cli, Command, CoreList, DoctorArgs, Dtype, FetchArgs, JoinArgs, LogFormat, ModelArg, NodeArgs,
    NodeCommand, OnOff, ProxyArgs, TransportArg, UpArgs,
};
pub use parse::{parse_cores, parse_duration, parse_size};
