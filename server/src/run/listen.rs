//! Which addresses may be bound, and why not.

use std::net::SocketAddr;

/// Refuses an API bind beyond loopback unless the user insists.
///
/// # Errors
/// A sentence with the address and the flag.
pub fn check_api(what: &str, address: SocketAddr, insecure: bool) -> Result<(), String> {
    if address.ip().is_loopback() || insecure {
        Ok(())
    } else {
        Err(format!(
            "{what} {address} is reachable from other machines and would have no authentication; \
             bind loopback, or pass --insecure-no-auth if the network itself is trusted"
        ))
    }
}

/// Refuses a peer bind beyond loopback without a key.
///
/// # Errors
/// A sentence with the address and the flag.
pub fn check_peer(address: SocketAddr, has_key: bool) -> Result<(), String> {
    if address.ip().is_loopback() || has_key {
        Ok(())
    } else {
        Err(format!(
            "--peer-listen {address} is reachable from other machines: pass --peer-key-file, \
             the same file on every node"
        ))
    }
}

/// Refuses fault injection where others could reach it.
///
/// # Errors
/// A sentence with the address.
pub fn check_chaos(chaos: bool, addresses: &[SocketAddr]) -> Result<(), String> {
    match addresses.iter().find(|address| !address.ip().is_loopback()) {
        Some(address) if chaos => Err(format!(
            "--chaos injects faults and is refused together with the non-loopback address {address}"
        )),
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_goes_without_saying() {
        let local: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let wide: SocketAddr = "0.0.0.0:1".parse().unwrap();
        assert!(check_api("--listen", local, false).is_ok());
        assert!(check_api("--listen", wide, false).is_err_and(|e| e.contains("0.0.0.0:1")));
        assert!(check_api("--listen", wide, true).is_ok());
        assert!(check_peer(wide, false).is_err());
        assert!(check_peer(wide, true).is_ok());
        assert!(check_chaos(true, &[local, wide]).is_err());
        assert!(check_chaos(false, &[local, wide]).is_ok());
        assert!(check_chaos(true, &[local]).is_ok());
    }
}
