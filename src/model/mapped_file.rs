//! A file mapped for reading.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result, Status, fail};

/// A model file is tens of gigabytes of which a few megabytes are read: a mapping reads only
/// those, and shares its pages with the host that runs the model.
pub(crate) struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file. Whoever cuts it short while it is mapped makes the next read of the
    /// lost pages a SIGBUS; a host that maps the same model runs the same risk.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |e: std::io::Error| Error::new(Status::Io, format!("cannot read the file: {e}"));
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            fail!(Io, "this is not a regular file");
        }
        if metadata.len() == 0 {
            fail!(Format, "the file is empty");
        }
        // SAFETY: the mapping is read-only and private to this value. Its bytes are only read as
        // plain bytes whose every value is valid, so that another process that writes to the file
        // can change what is found, never break memory safety; truncation is the caller's risk as
        // documented above.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { map })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Tells the system that only scattered pages follow, so that it reads no further than asked.
    pub fn expect_scattered_reads(&self) {
        // Advice only: a system that refuses it is a little slower.
        #[cfg(unix)]
        let _ = self.map.advise(memmap2::Advice::Random);
    }
}

/// Puts the file's name before an error's message. The name is quoted, so that it stays one line.
pub(crate) fn in_file(path: &Path, error: Error) -> Error {
    Error::new(error.status, format!("{path:?}: {}", error.message))
}
