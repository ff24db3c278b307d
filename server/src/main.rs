//! The `kvserve` binary.

use clap::Parser;

fn main() {
    std::process::exit(kvserve::run::run(kvserve::cli::Cli::parse()));
}
