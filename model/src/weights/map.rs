//! A file of weights in memory without reading it.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A mapped, read-only file.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file whole.
    ///
    /// # Errors
    /// Those of opening and mapping; a path that is no regular file is `InvalidInput`.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Before opening: opening a named pipe would wait for a writer.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        let file = File::open(path)?;
        // SAFETY: the map is private and read-only, and is only ever read as plain bytes. That
        // nobody cuts or rewrites the file while it is mapped is asked of the user (module docs
        // of `weights`); `kvserve fetch` replaces files by rename.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self {
            path: path.to_owned(),
            map,
        })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}
