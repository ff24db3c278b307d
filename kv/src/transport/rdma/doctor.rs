//! What stands in the way of RDMA on this host, in words: `kvserve doctor`.

use super::address::{Wish, choose};
use super::transport::devices_found;
use super::verbs::Library;
use crate::transport::sys::locked_memory_limit;
use std::fmt;

/// Memory that a node locks at the least: below it a pool cannot be registered.
const LOCKED_BYTES_MIN: u64 = 64 << 20;

/// How a finding weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// As it should be.
    Good,
    /// It may matter.
    Note,
    /// RDMA cannot be used for this.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How it weighs.
    pub weight: Weight,
    /// What was found, and what to do about it.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.weight {
            Weight::Good => "ok  ",
            Weight::Note => "note",
            Weight::Bad => "BAD ",
        };
        write!(f, "{mark} {}", self.text)
    }
}

/// Looks at everything that RDMA needs, in the order in which it would fail. `library`: the
/// system's, or why there is none.
pub fn look(library: Result<Library, String>, wish: &Wish) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |weight, text: String| findings.push(Finding { weight, text });
    let library = match library {
        Ok(library) => library,
        Err(reason) => {
            find(Weight::Bad, reason);
            return findings;
        }
    };
    find(Weight::Good, "libibverbs was found".into());
    match locked_memory_limit() {
        None => find(Weight::Good, "locked memory is not limited".into()),
        Some(bytes) if bytes >= LOCKED_BYTES_MIN => find(
            Weight::Note,
            format!(
                "locked memory is limited to {} MiB: a pool beyond that cannot be registered \
                 (ulimit -l, or LimitMEMLOCK= of the service)",
                bytes >> 20
            ),
        ),
        Some(bytes) => find(
            Weight::Bad,
            format!(
                "locked memory is limited to {} KiB: no pool can be registered; raise it \
                 (ulimit -l unlimited, or LimitMEMLOCK=infinity of the service)",
                bytes >> 10
            ),
        ),
    }
    let names = match library.devices() {
        Ok(names) => names,
        Err(error) => {
            find(Weight::Bad, format!("devices cannot be listed: {error}"));
            return findings;
        }
    };
    for name in &names {
        if let Err(error) = library.open(name) {
            find(Weight::Bad, format!("{name} cannot be opened: {error}"));
        }
    }
    let found = match devices_found(&library) {
        Ok(found) => found,
        Err(error) => {
            find(Weight::Bad, error.to_string());
            return findings;
        }
    };
    for device in &found {
        let numa = match device.numa {
            Some(node) => format!("NUMA node {node}"),
            None => "no NUMA node".into(),
        };
        for port in &device.ports {
            let kind = match port.ethernet {
                true => "RoCE",
                false => "InfiniBand",
            };
            let (weight, state) = match port.active {
                true => (Weight::Good, "ACTIVE"),
                false => (Weight::Note, "not ACTIVE: look at the link"),
            };
            let text = format!(
                "{} port {}: {kind}, {state}, {} GIDs, {numa}",
                device.name,
                port.number,
                port.gids.len()
            );
            find(weight, text);
        }
    }
    match choose(&found, wish) {
        Ok(choice) => {
            find(
                Weight::Good,
                format!(
                    "nodes would use {} port {} with GID {} ({})",
                    choice.device,
                    choice.port,
                    choice.gid_index,
                    std::net::Ipv6Addr::from(choice.gid)
                ),
            );
            if choice.ethernet {
                find(
                    Weight::Note,
                    "RoCE v2 goes over UDP port 4791: a firewall must let it pass, and both ends \
                     must have the same MTU; a probe at connect shows whether it does"
                        .into(),
                );
            }
        }
        Err(none) => find(Weight::Bad, none.to_string()),
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_all_that_is_said() {
        let findings = look(Err("cannot open it".into()), &Wish::default());
        assert_eq!(
            findings,
            [Finding {
                weight: Weight::Bad,
                text: "cannot open it".into(),
            }]
        );
        assert_eq!(findings[0].to_string(), "BAD  cannot open it");
    }
}
