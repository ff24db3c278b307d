//! What `up` starts: names, ports, key and flags of every child.

use super::child::ChildSpec;
use crate::cli::UpArgs;
use crate::placement::allowed_cpus;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The children and what they share.
pub struct Plan {
    /// The proxy's API.
    pub api: SocketAddr,
    /// Every child, the proxy first.
    pub children: Vec<ChildSpec>,
    key_file: PathBuf,
    model: String,
    health: Vec<(String, SocketAddr)>,
}

impl Plan {
    /// Chooses ports, makes the key, writes every child's flags.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn make(args: &UpArgs, model_path: &Path) -> Result<Plan, String> {
        for (flag, given) in [
            ("--listen", args.node.listen),
            ("--admin-listen", args.node.admin_listen),
            ("--health-listen", args.node.health_listen),
        ] {
            if given.is_some() {
                return Err(format!(
                    "{flag} is for a single node; `up` chooses its nodes' ports and takes --port \
                     for the API"
                ));
            }
        }
        let api = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
        // Told at once, not after the model has been loaded by every child.
        TcpListener::bind(api)
            .map_err(|error| format!("cannot listen on {api}: {error}; choose another --port"))?;
        let key_file = make_key()?;
        let key = key_file.to_string_lossy().into_owned();
        let cpus = allowed_cpus();
        let peer = free_port()?;
        let mut health = Vec::new();
        let mut children = Vec::new();

        let mut proxy = vec!["proxy".to_string(), "--quiet".to_string()];
        flag(&mut proxy, "--listen", api);
        flag(&mut proxy, "--peer-listen", peer);
        flag(&mut proxy, "--peer-key-file", &key);
        flag(&mut proxy, "--cores", cpus[cpus.len() - 1]);
        let proxy_health = free_port()?;
        flag(&mut proxy, "--health-listen", proxy_health);
        flag(
            &mut proxy,
            "--request-timeout",
            format!("{}ms", args.node.request_timeout.as_millis().max(1)),
        );
        if args.node.log_format == crate::cli::LogFormat::Json {
            flag(&mut proxy, "--log-format", "json");
        }
        health.push(("proxy".to_string(), proxy_health));
        children.push(ChildSpec {
            name: "proxy".into(),
            args: proxy,
        });

        let nodes = (args.prefill + args.decode) as usize;
        let roles = (0..args.prefill)
            .map(|i| ("prefill", i))
            .chain((0..args.decode).map(|i| ("decode", i)));
        for (number, (role, index)) in roles.enumerate() {
            let name = format!("{role}-{index}");
            let mut child = vec![role.to_string(), model_path.to_string_lossy().into_owned()];
            let node_health = free_port()?;
            flag(&mut child, "--listen", free_port()?);
            flag(&mut child, "--health-listen", node_health);
            flag(&mut child, "--peer-listen", free_port()?);
            flag(&mut child, "--join", peer);
            flag(&mut child, "--node-id", &name);
            flag(&mut child, "--peer-key-file", &key);
            node_flags(&mut child, args, nodes, cpus[number % cpus.len()]);
            health.push((name.clone(), node_health));
            children.push(ChildSpec { name, args: child });
        }
        Ok(Plan {
            api,
            children,
            key_file,
            model: args.model.model.clone(),
            health,
        })
    }

    /// Tells the user that the cluster serves.
    pub fn announce(&self, took: Duration) {
        println!(
            "kvserve is ready after {:.1} s: {} at http://{}",
            took.as_secs_f64(),
            self.model,
            self.api
        );
        let health: Vec<_> = self
            .health
            .iter()
            .map(|(name, address)| format!("{name} http://{address}/health"))
            .collect();
        println!("health: {}", health.join(", "));
        println!(
            "try: curl http://{}/v1/chat/completions -H 'content-type: application/json' -d \
             '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What is the capital of France?\"}}],\
             \"max_tokens\":16,\"temperature\":0}}'",
            self.api
        );
        // A closed standard output must not end the cluster.
        let _ = std::io::stdout().flush();
    }

    /// Removes the key.
    pub fn clean_up(&self) {
        // Nothing to do about a failure at exit: the folder is private and temporary.
        if let Some(folder) = self.key_file.parent() {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

fn flag(args: &mut Vec<String>, name: &str, value: impl std::fmt::Display) {
    args.push(name.into());
    args.push(value.to_string());
}

/// Hands the user's flags on to a child.
fn node_flags(child: &mut Vec<String>, args: &UpArgs, nodes: usize, cpu: usize) {
    let node = &args.node;
    flag(child, "--dtype", node.dtype.label());
    if node.deterministic {
        child.push("--deterministic".into());
    }
    if let Some(bytes) = node.kv_cache {
        flag(child, "--kv-cache", bytes);
    }
    if node.kv_populate {
        child.push("--kv-populate".into());
    }
    flag(child, "--share-memory-with", nodes);
    let name = match &node.model_name {
        Some(name) => name.clone(),
        None => crate::run::served_name(&args.model.model),
    };
    flag(child, "--model-name", name);
    if let Some(tokens) = node.max_model_len {
        flag(child, "--max-model-len", tokens);
    }
    flag(child, "--max-running", node.max_running);
    flag(child, "--max-queued", node.max_queued);
    let timeout = node.request_timeout.as_millis().max(1);
    flag(child, "--request-timeout", format!("{timeout}ms"));
    let cores = match &node.cores {
        Some(list) => join(&list.0),
        None => cpu.to_string(),
    };
    flag(child, "--cores", cores);
    if let Some(list) = &node.engine_cores {
        flag(child, "--engine-cores", join(&list.0));
    }
    flag(child, "--transport", node.transport.choice().label());
    if let Some(device) = &node.rdma_device {
        flag(child, "--rdma-device", device);
    }
    flag(child, "--checksums", node.checksums);
    flag(child, "--prefix-cache", node.prefix_cache.label());
    if node.spin {
        child.push("--spin".into());
    }
    if node.log_format == crate::cli::LogFormat::Json {
        flag(child, "--log-format", "json");
    }
    if let Some(chaos) = &node.chaos {
        flag(child, "--chaos", chaos);
    }
}

fn join(cores: &[usize]) -> String {
    let texts: Vec<_> = cores.iter().map(usize::to_string).collect();
    texts.join(",")
}

/// Ports tried before giving up.
const PORT_TRIES_MAX: usize = 1000;
/// Below it lie the ports of well-known services.
const PORT_MIN: u16 = 10_000;

/// A loopback port that is free now, below the range from which the kernel takes the ports of
/// outgoing connections: a node that is started again must find its port free, and must not have
/// it taken (or be connected to itself) by a peer that dials it meanwhile.
///
/// # Errors
/// A sentence for the user.
pub fn free_port() -> Result<SocketAddr, String> {
    let end = outgoing_ports_begin().max(PORT_MIN + 1);
    let random = RandomState::new();
    for number in 0..PORT_TRIES_MAX {
        let span = u64::from(end - PORT_MIN);
        let port = PORT_MIN + (random.hash_one(number) % span) as u16;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return Ok(address);
        }
    }
    Err(format!(
        "no free loopback port found from {PORT_MIN} to {end} in {PORT_TRIES_MAX} tries"
    ))
}

/// The first port that the kernel gives to outgoing connections (32768 unless set otherwise).
fn outgoing_ports_begin() -> u16 {
    fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or(32_768)
}

/// Makes a random cluster key in a private folder.
fn make_key() -> Result<PathBuf, String> {
    let mut key = [0u8; 48];
    fs::File::open("/dev/urandom")
        .and_then(|mut random| random.read_exact(&mut key))
        .map_err(|error| format!("cannot read /dev/urandom: {error}"))?;
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let folder = std::env::temp_dir().join(format!("kvserve-up-{}", hex(&key[32..])));
    let failed = |error: std::io::Error| {
        format!(
            "cannot write the cluster's key in {}: {error}",
            folder.display()
        )
    };
    std::os::unix::fs::DirBuilderExt::mode(&mut fs::DirBuilder::new(), 0o700)
        .create(&folder)
        .map_err(failed)?;
    let path = folder.join("peer.key");
    let mut file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    file.write_all(hex(&key[..32]).as_bytes()).map_err(failed)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_lie_below_those_of_outgoing_connections() {
        for _ in 0..20 {
            let port = free_port().unwrap().port();
            assert!(port >= PORT_MIN && port < outgoing_ports_begin());
        }
    }
}
