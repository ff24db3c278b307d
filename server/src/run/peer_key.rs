//! The cluster's secret key: 32 bytes as 64 hex digits in a file.

use kvserve_kv::session::PeerKey;
use std::io::Read;
use std::path::Path;

/// A longer file is not a key.
const FILE_BYTES_MAX: usize = 4096;

/// Reads a key file.
///
/// # Errors
/// A sentence that names the file and what it should hold.
pub fn read(path: &Path) -> Result<PeerKey, String> {
    let wrong = |why: &str| {
        format!(
            "{}: {why}; a peer key file holds 64 hex digits, made e.g. by \
             `head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > peer.key`",
            path.display()
        )
    };
    let mut text = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX as u64 + 1).read_to_end(&mut text))
        .map_err(|error| wrong(&error.to_string()))?;
    if text.len() > FILE_BYTES_MAX {
        return Err(wrong("the file is too long"));
    }
    parse(&text)
        .map(PeerKey::new)
        .ok_or_else(|| wrong("not 64 hex digits"))
}

/// A key for a node without a cluster: nobody knows it.
///
/// # Errors
/// When there is no randomness to be had.
pub fn random() -> Result<PeerKey, String> {
    let mut bytes = [0u8; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| format!("cannot read /dev/urandom: {error}"))?;
    Ok(PeerKey::new(bytes))
}

fn parse(text: &[u8]) -> Option<[u8; 32]> {
    let digits: Vec<u8> = text
        .iter()
        .copied()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|byte| (byte as char).to_digit(16).map(|digit| digit as u8))
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect();
    (digits.len() == 64).then_some(())?;
    bytes.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_64_hex_digits_and_nothing_else() {
        let text = "00ff".repeat(16);
        let key = parse(format!(" {text}\n").as_bytes()).unwrap();
        assert_eq!((key[0], key[1], key[31]), (0, 255, 255));
        for wrong in ["", "00", &"0".repeat(63), &"0".repeat(65), &"zz".repeat(32)] {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(parse(&[0xC3; 64]), None);
    }
}
