//! A folder for one test.

use std::path::{Path, PathBuf};

/// A folder that goes away with its owner.
pub struct TempFolder(PathBuf);

impl TempFolder {
    pub fn new(label: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvserve-{}-{label}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        // A leftover in the temporary folder harms nobody, and a panic here would hide the test's.
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("{} stays: {error}", self.0.display());
        }
    }
}
