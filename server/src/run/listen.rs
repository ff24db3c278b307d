//! Which addresses may be bound, and why not.

use kvserve_runtime::http::Listener;
use kvserve_runtime::net::{TcpListener, UnixListener};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a port may still be held by the last life of this node. The kernel takes an io_uring
/// down after its process is gone, and only with it the listeners: 14 ms were seen.
const PORT_PATIENCE: Duration = Duration::from_secs(2);

/// How often a held port is looked at.
const PORT_LOOK: Duration = Duration::from_millis(2);

/// A port of the kernel's choice on loopback.
pub const ANY_LOOPBACK_PORT: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// Where `/debug` is served (DESIGN 6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminListen {
    /// On the API port, which is loopback.
    OnApi,
    /// On a port of its own.
    Tcp(SocketAddr),
    /// On a Unix socket of mode 0600, since the API port is reachable by others.
    Unix(PathBuf),
}

impl AdminListen {
    /// By the user's flag, else by where the API listens.
    pub fn choose(asked: Option<SocketAddr>, api: SocketAddr, name: &str) -> Self {
        match asked {
            Some(address) => AdminListen::Tcp(address),
            None if api.ip().is_loopback() => AdminListen::OnApi,
            None => {
                let folder = std::env::var_os("XDG_RUNTIME_DIR")
                    .map_or_else(std::env::temp_dir, PathBuf::from);
                let name: String = name
                    .chars()
                    .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
                    .collect();
                AdminListen::Unix(folder.join(format!("kvserve-{name}-{}.sock", api.port())))
            }
        }
    }

    /// Binds it.
    ///
    /// # Errors
    /// A sentence with the address.
    pub fn bind(&self) -> Result<Listener, String> {
        match self {
            AdminListen::OnApi => Err("/debug is served on the API port".into()),
            AdminListen::Tcp(address) => TcpListener::bind(*address, false)
                .map(Listener::from)
                .map_err(|error| format!("cannot listen on --admin-listen {address}: {error}")),
            AdminListen::Unix(path) => UnixListener::bind(path)
                .map(Listener::from)
                .map_err(|error| format!("cannot listen on {}: {error}", path.display())),
        }
    }
}

impl fmt::Display for AdminListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdminListen::OnApi => f.write_str("the API port"),
            AdminListen::Tcp(address) => write!(f, "http://{address}"),
            AdminListen::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Waits until a port is free, so that a node can be started again where it has just died. Also
/// finds a second server on an API port, which the kernel would let share it.
///
/// # Errors
/// A sentence with the address when it stays in use.
pub fn await_free(what: &str, address: SocketAddr) -> Result<(), String> {
    let until = Instant::now() + PORT_PATIENCE;
    loop {
        match std::net::TcpListener::bind(address) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
                if Instant::now() >= until {
                    return Err(format!(
                        "{what} {address} is in use by another process; end that, or choose \
                         another port"
                    ));
                }
                std::thread::sleep(PORT_LOOK);
            }
            // Other errors are told by whoever binds it for good.
            Ok(_) | Err(_) => return Ok(()),
        }
    }
}

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
    fn debug_pages_leave_an_api_port_that_others_reach() {
        let local: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let wide: SocketAddr = "0.0.0.0:7".parse().unwrap();
        assert_eq!(AdminListen::choose(None, local, "m"), AdminListen::OnApi);
        assert_eq!(
            AdminListen::choose(Some(local), wide, "m"),
            AdminListen::Tcp(local)
        );
        let AdminListen::Unix(path) = AdminListen::choose(None, wide, "a/b") else {
            panic!("not a Unix socket");
        };
        assert_eq!(path.file_name().unwrap(), "kvserve-a-b-7.sock");
    }

    #[test]
    fn a_port_is_waited_for_and_one_that_stays_taken_is_named() {
        let holder = std::net::TcpListener::bind(ANY_LOOPBACK_PORT).unwrap();
        let address = holder.local_addr().unwrap();
        let refused = await_free("--listen", address);
        assert!(refused.is_err_and(|text| text.contains(&address.to_string())));
        let letting_go = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            drop(holder);
        });
        assert_eq!(await_free("--listen", address), Ok(()));
        letting_go.join().unwrap();
    }

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
