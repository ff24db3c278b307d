//! Starting a process: checks of the command line, shards, listeners, drain, exit code.

mod doctor;
mod listen;
mod model;
mod node;
mod pages;
mod peer_key;
mod proxy;

pub use model::{resolve_model, served_name};
pub use node::run_node;
pub use proxy::run_proxy;

use crate::cli::{Cli, Command, LogFormat};
use crate::log::Log;
use kvserve_kv::session::Role;
use kvserve_runtime::limits;

/// The word for a role, as on the command line.
fn role_name(role: Role) -> &'static str {
    match role {
        Role::Hybrid => "serve",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Proxy => "proxy",
    }
}

/// Runs a command to its end; gives the exit code.
pub fn run(cli: Cli) -> i32 {
    // Children inherit it. A refused raise leaves the soft limit, which is told by whoever
    // runs out of descriptors.
    let _ = limits::raise_open_files();
    let result = match cli.command {
        Command::Up(args) => {
            let log = Log::new(args.node.log_format == LogFormat::Json);
            resolve_model(&args.model.model).map(|path| crate::up::run(&args, path, log))
        }
        Command::Serve(command) => run_node(Role::Hybrid, command),
        Command::Prefill(command) => run_node(Role::Prefill, command),
        Command::Decode(command) => run_node(Role::Decode, command),
        Command::Proxy(args) => run_proxy(args),
        Command::Fetch(args) => model::fetch(&args).map(|path| {
            println!("{}", path.display());
            0
        }),
        Command::Doctor(args) => doctor::doctor(&args).map(|()| 0),
    };
    result.unwrap_or_else(|message| {
        eprintln!("kvserve: {message}");
        1
    })
}
