//! Values of flags: sizes, durations, lists of cores.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

/// Reads `512MiB`, `2G`, `1073741824`: bytes, with binary units.
///
/// # Errors
/// A sentence that names the text and the accepted forms.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(format!("`{text}` is not a size; write e.g. 512MiB or 2GiB")),
    };
    let value: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` is not a size; write e.g. 512MiB or 2GiB"))?;
    let bytes = value * (1u64 << shift) as f64;
    if bytes >= 1.0 && bytes < (1u64 << 62) as f64 {
        Ok(bytes as u64)
    } else {
        Err(format!(
            "`{text}` is out of range: a size is at least one byte and below 4 EiB"
        ))
    }
}

/// Reads `300ms`, `5s`, `2m`, `1.5s`; a bare number is seconds. At most one day.
///
/// # Errors
/// A sentence that names the text and the accepted forms.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let scale = match unit.trim() {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => {
            return Err(format!(
                "`{text}` is not a duration; write e.g. 300ms, 5s or 2m"
            ));
        }
    };
    let value: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` is not a duration; write e.g. 300ms, 5s or 2m"))?;
    let seconds = value * scale;
    if seconds > 0.0 && seconds <= 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(format!(
            "`{text}` is out of range: a duration is above 0 and at most 24h"
        ))
    }
}

/// Reads `127.0.0.1:8000`, `[::1]:8000` or `localhost:8000`. A name is looked up once; of several
/// addresses the first of IPv4 is taken, else the first.
///
/// # Errors
/// A sentence that names the text and the accepted forms.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let found: Vec<SocketAddr> = text
        .to_socket_addrs()
        .map_err(|error| {
            format!("`{text}` is no address ({error}); write HOST:PORT, e.g. 127.0.0.1:8000")
        })?
        .collect();
    let of_ipv4 = found.iter().find(|address| address.is_ipv4());
    of_ipv4
        .or(found.first())
        .copied()
        .ok_or_else(|| format!("the name in `{text}` has no address"))
}

/// Reads `0,2-3`: a list of CPU numbers, in the order given.
///
/// # Errors
/// A sentence that names the text and the accepted forms.
pub fn parse_cores(text: &str) -> Result<Vec<usize>, String> {
    /// More cores than any machine of today has.
    const CORE_MAX: usize = 4096;
    let wrong = || format!("`{text}` is not a list of CPUs; write e.g. 0,2-3");
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.trim().parse().map_err(|_| wrong())?;
        let last: usize = last.trim().parse().map_err(|_| wrong())?;
        if first > last || last >= CORE_MAX {
            return Err(wrong());
        }
        cores.extend(first..=last);
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_durations_and_cores_are_read_and_nonsense_is_named() {
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("1.5k"), Ok(1536));
        assert_eq!(parse_size("77"), Ok(77));
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("7"), Ok(Duration::from_secs(7)));
        assert_eq!(parse_cores("0,2-3"), Ok(vec![0, 2, 3]));
        for text in ["", "x", "-1", "0", "1e99GiB", "GiB", "9999999999999T"] {
            assert!(parse_size(text).is_err_and(|e| e.contains(text)), "{text}");
        }
        let local = "127.0.0.1:80".parse::<SocketAddr>();
        assert_eq!(parse_address("127.0.0.1:80").ok(), local.ok());
        assert!(parse_address("localhost:80").is_ok_and(|found| found.ip().is_loopback()));
        for text in ["", "localhost", "127.0.0.1", "1.2.3.4:99999", ":"] {
            assert!(
                parse_address(text).is_err_and(|e| e.contains(text)),
                "{text}"
            );
        }
        for text in ["", "0s", "25h", "5parsecs", "nans"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for text in ["", "a", "3-1", "1,,2", "99999"] {
            assert!(parse_cores(text).is_err(), "{text}");
        }
    }
}
