//! Which CPUs this process may use, and where shards and engine threads go by default.

/// The CPUs the kernel lets this process run on, in order; never empty.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: `set` is a plain bit set that the call fills; all-zero is a valid value of it.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = std::mem::size_of::<libc::cpu_set_t>();
        if libc::sched_getaffinity(0, size, &mut set) != 0 {
            return vec![0];
        }
        set
    };
    let cpus: Vec<usize> = (0..libc::CPU_SETSIZE as usize)
        // SAFETY: the index is below CPU_SETSIZE.
        .filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) })
        .collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// Bytes of memory the kernel calls available; `None` when it does not say.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_cpu_and_memory() {
        assert!(!allowed_cpus().is_empty());
        assert!(available_memory().is_some_and(|bytes| bytes > 1 << 20));
    }
}
