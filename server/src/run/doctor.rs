//! `kvserve doctor`: what this machine has for RDMA, one line a finding.

use crate::cli::DoctorArgs;
use kvserve_kv::transport::rdma::address::Wish;
use kvserve_kv::transport::rdma::doctor::{Weight, look};
use kvserve_kv::transport::rdma::verbs::Library;

/// Prints the findings.
///
/// # Errors
/// How many of them make RDMA impossible here.
pub fn doctor(args: &DoctorArgs) -> Result<(), String> {
    let wish = Wish {
        device: args.rdma_device.clone(),
        ..Wish::default()
    };
    let library = Library::system().map_err(|error| error.to_string());
    let findings = look(library, &wish);
    println!("rdma");
    for finding in &findings {
        println!("  {finding}");
    }
    let bad = findings
        .iter()
        .filter(|finding| finding.weight == Weight::Bad)
        .count();
    match bad {
        0 => {
            println!("RDMA can be used here (--transport auto takes it between hosts)");
            Ok(())
        }
        bad => Err(format!(
            "RDMA cannot be used here: {bad} of {} findings stand in its way; pages go by shared \
             memory and TCP",
            findings.len()
        )),
    }
}
