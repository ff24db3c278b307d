//! Which device, port and GID (never a fixed index): facts in, a choice or its reason out.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// A device as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFound {
    /// Its name.
    pub name: String,
    /// Its NUMA node, if it has one.
    pub numa: Option<u32>,
    /// Its ports.
    pub ports: Vec<PortFound>,
}

/// A port as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortFound {
    /// Its number.
    pub number: u8,
    /// Whether it is ACTIVE.
    pub active: bool,
    /// Whether it is Ethernet.
    pub ethernet: bool,
    /// Local id, on InfiniBand.
    pub lid: u16,
    /// Its GIDs: index, bytes, type (`IBV_GID_TYPE_*`).
    pub gids: Vec<(u8, [u8; 16], u32)>,
}

/// What is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// This device only.
    pub device: Option<String>,
    /// This port only.
    pub port: Option<u8>,
    /// The NUMA node of the shard and its pool.
    pub numa: Option<u32>,
    /// The address by which peers reach this node: its GID is taken if there is one.
    pub address: Option<IpAddr>,
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The device.
    pub device: String,
    /// The port.
    pub port: u8,
    /// Place in the port's GID table.
    pub gid_index: u8,
    /// The GID itself.
    pub gid: [u8; 16],
    /// Whether it is Ethernet.
    pub ethernet: bool,
    /// Local id, on InfiniBand.
    pub lid: u16,
}

/// Why there is no choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoDevice {
    /// The host has none.
    None,
    /// It has others: wanted, there are.
    NotThere(String, Vec<String>),
    /// No port is ACTIVE: device and port, each.
    PortsDown(Vec<String>),
    /// No ACTIVE port has a usable GID: device and port, each.
    NoGid(Vec<String>),
}

impl fmt::Display for NoDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoDevice::None => f.write_str(
                "this host has no RDMA device: no card, or its kernel modules and \
                 /dev/infiniband are missing",
            ),
            NoDevice::NotThere(name, there) => write!(
                f,
                "there is no RDMA device {name}; there are: {}",
                there.join(", ")
            ),
            NoDevice::PortsDown(ports) => write!(
                f,
                "no port is ACTIVE ({}): look at the link (ip link, ibstat), and on InfiniBand \
                 at the subnet manager",
                ports.join(", ")
            ),
            NoDevice::NoGid(ports) => write!(
                f,
                "no GID of RoCE v2 over IPv4 on {}: give the interface an IPv4 address",
                ports.join(", ")
            ),
        }
    }
}

impl std::error::Error for NoDevice {}

/// The IPv4 address of a GID, if it is one.
fn ipv4_of(gid: &[u8; 16]) -> Option<IpAddr> {
    Ipv6Addr::from(*gid).to_ipv4_mapped().map(IpAddr::V4)
}

/// The best GID of a port: on Ethernet RoCE v2 over IPv4, the wished address first; on InfiniBand
/// the first one.
fn gid_of(port: &PortFound, wish: &Wish) -> Option<(u8, [u8; 16])> {
    if !port.ethernet {
        let first = port.gids.first();
        return first.map(|(index, gid, _)| (*index, *gid));
    }
    let usable = |entry: &&(u8, [u8; 16], u32)| {
        entry.2 == rdma_core_sys::IBV_GID_TYPE_ROCE_V2 && ipv4_of(&entry.1).is_some()
    };
    let mut candidates = port.gids.iter().filter(usable);
    let wished = candidates
        .clone()
        .find(|(_, gid, _)| wish.address.is_some() && ipv4_of(gid) == wish.address);
    let best = wished.or_else(|| candidates.next())?;
    Some((best.0, best.1))
}

/// Chooses by, in this order: the wished address, the NUMA node, the order in which they were
/// found.
///
/// # Errors
/// Why nothing can be chosen, with what to do.
pub fn choose(devices: &[DeviceFound], wish: &Wish) -> Result<Choice, NoDevice> {
    if devices.is_empty() {
        return Err(NoDevice::None);
    }
    let wanted =
        |device: &&DeviceFound| wish.device.as_ref().is_none_or(|name| *name == device.name);
    let named: Vec<_> = devices.iter().filter(wanted).collect();
    if let (true, Some(name)) = (named.is_empty(), &wish.device) {
        let there = devices.iter().map(|device| device.name.clone()).collect();
        return Err(NoDevice::NotThere(name.clone(), there));
    }
    let (mut down, mut without_gid) = (Vec::new(), Vec::new());
    let mut best: Option<((bool, bool), Choice)> = None;
    for device in named {
        for port in &device.ports {
            let label = format!("{} port {}", device.name, port.number);
            if wish.port.is_some_and(|wished| wished != port.number) {
                continue;
            }
            if !port.active {
                down.push(label);
                continue;
            }
            let Some((gid_index, gid)) = gid_of(port, wish) else {
                without_gid.push(label);
                continue;
            };
            let rank = (
                wish.address.is_some() && ipv4_of(&gid) == wish.address,
                wish.numa.is_some() && device.numa == wish.numa,
            );
            if best.as_ref().is_none_or(|(so_far, _)| rank > *so_far) {
                let choice = Choice {
                    device: device.name.clone(),
                    port: port.number,
                    gid_index,
                    gid,
                    ethernet: port.ethernet,
                    lid: port.lid,
                };
                best = Some((rank, choice));
            }
        }
    }
    match best {
        Some((_, choice)) => Ok(choice),
        None if without_gid.is_empty() => Err(NoDevice::PortsDown(down)),
        None => Err(NoDevice::NoGid(without_gid)),
    }
}

/// The NUMA node of a device, from sysfs.
pub fn numa_of(device: &str) -> Option<u32> {
    let path = format!("/sys/class/infiniband/{device}/device/numa_node");
    // -1 stands for "none", which is no `u32`.
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma_core_sys::{IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};

    fn v4(last: u8) -> [u8; 16] {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, last]);
        gid
    }

    fn device(name: &str, numa: u32, last: u8) -> DeviceFound {
        DeviceFound {
            name: name.into(),
            numa: Some(numa),
            ports: vec![PortFound {
                number: 1,
                active: true,
                ethernet: true,
                lid: 0,
                gids: vec![
                    (0, [0xFE; 16], IBV_GID_TYPE_ROCE_V2),
                    (1, v4(last), IBV_GID_TYPE_ROCE_V1),
                    (5, v4(last), IBV_GID_TYPE_ROCE_V2),
                    (6, v4(last + 100), IBV_GID_TYPE_ROCE_V2),
                ],
            }],
        }
    }

    #[test]
    fn the_gid_is_found_by_what_it_is_and_never_by_its_place() {
        let found = choose(&[device("a", 0, 1)], &Wish::default()).unwrap();
        assert_eq!((found.gid_index, found.gid), (5, v4(1)));
        let wish = Wish {
            address: Some("10.0.0.101".parse().unwrap()),
            ..Wish::default()
        };
        assert_eq!(choose(&[device("a", 0, 1)], &wish).unwrap().gid_index, 6);
    }

    #[test]
    fn near_devices_come_first_and_a_wished_address_before_them() {
        let both = [device("a", 0, 1), device("b", 1, 2)];
        let near = Wish {
            numa: Some(1),
            ..Wish::default()
        };
        assert_eq!(choose(&both, &near).unwrap().device, "b");
        assert_eq!(choose(&both, &Wish::default()).unwrap().device, "a");
        let by_address = Wish {
            numa: Some(1),
            address: Some("10.0.0.1".parse().unwrap()),
            ..Wish::default()
        };
        assert_eq!(choose(&both, &by_address).unwrap().device, "a");
    }

    #[test]
    fn infiniband_takes_its_own_gid() {
        let mut ib = device("ib", 0, 1);
        ib.ports[0].ethernet = false;
        ib.ports[0].lid = 7;
        ib.ports[0].gids = vec![(0, [3; 16], IBV_GID_TYPE_IB)];
        let found = choose(&[ib], &Wish::default()).unwrap();
        assert_eq!((found.lid, found.gid_index, found.ethernet), (7, 0, false));
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        assert_eq!(choose(&[], &Wish::default()), Err(NoDevice::None));
        let other = Wish {
            device: Some("x".into()),
            ..Wish::default()
        };
        let refusal = choose(&[device("a", 0, 1)], &other).unwrap_err();
        assert_eq!(refusal, NoDevice::NotThere("x".into(), vec!["a".into()]));
        let mut down = device("a", 0, 1);
        down.ports[0].active = false;
        let refusal = choose(&[down], &Wish::default()).unwrap_err();
        assert!(refusal.to_string().contains("a port 1"), "{refusal}");
        let mut bare = device("a", 0, 1);
        bare.ports[0].gids.truncate(2);
        let refusal = choose(&[bare], &Wish::default()).unwrap_err();
        assert_eq!(refusal, NoDevice::NoGid(vec!["a port 1".into()]));
    }
}
