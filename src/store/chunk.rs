//! Chunks: what segments lie in.

use std::sync::Arc;

use memmap2::MmapRaw;

use super::AlignedBytes;
use super::basis_file::{BasisFile, BasisIo};
use crate::error::{Result, fail};

/// Bytes that are handed out in parts that don't overlap.
pub struct Chunk {
    len: usize,
    /// The first byte, where they can be addressed.
    data: Option<*mut u8>,
    medium: Medium,
}

enum Medium {
    Memory { _owner: AlignedBytes },
    File { file: Arc<BasisFile>, start: u64, mapping: Option<MmapRaw> },
}

// SAFETY: each part is written by the one that took it, before anybody else knows of it, and read
// only from then on.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    pub fn in_memory(len: usize) -> Result<Self> {
        let mut owner = AlignedBytes::zeroed(len)?;
        Ok(Self { len, data: Some(owner.as_mut_ptr()), medium: Medium::Memory { _owner: owner } })
    }

    pub fn in_file(file: Arc<BasisFile>, len: usize) -> Result<Self> {
        let start = file.reserve(len)?;
        let mapping = match file.io() {
            BasisIo::Pread => None,
            BasisIo::Mmap => match file.map(start, len) {
                Ok(mapping) => {
                    // Rows are read here and there; advice only.
                    let _ = mapping.advise(memmap2::Advice::Random);
                    Some(mapping)
                }
                Err(error) => {
                    file.release(start, len);
                    return Err(error);
                }
            },
        };
        let data = mapping.as_ref().map(MmapRaw::as_mut_ptr);
        Ok(Self { len, data, medium: Medium::File { file, start, mapping } })
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_file(&self) -> bool {
        matches!(self.medium, Medium::File { .. })
    }

    /// The first byte, where the bytes can be addressed.
    pub fn memory(&self) -> Option<*mut u8> {
        self.data
    }

    /// The chunk is full, and its pages are needed where a row is fetched only: they may leave the
    /// process, and stay in the system's cache as long as it has room.
    pub fn expect_few_reads(&self) {
        #[cfg(target_os = "linux")]
        if let Medium::File { mapping: Some(mapping), .. } = &self.medium {
            // SAFETY: a mapping of a file that is shared: what was written stays in the file, and
            // the next access finds it there.
            let _ = unsafe { mapping.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }

    /// Reads bytes that cannot be addressed.
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<()> {
        match &self.medium {
            Medium::File { file, start, .. } => file.read(start + at as u64, out),
            Medium::Memory { .. } => fail!(Internal, "a chunk of memory was read as a file"),
        }
    }

    /// Writes a part.
    ///
    /// # Safety
    /// The part is the caller's own, and nobody else knows of it yet.
    pub unsafe fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at <= self.len && bytes.len() <= self.len - at, "a write beyond a chunk");
        match (&self.medium, self.data) {
            (Medium::File { file, start, .. }, _) => file.write(start + at as u64, bytes),
            (Medium::Memory { .. }, Some(data)) => {
                // SAFETY: within the chunk, by the assertion; unshared, by the caller's promise.
                unsafe { data.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
                Ok(())
            }
            (Medium::Memory { .. }, None) => {
                fail!(Internal, "a chunk of memory has no address")
            }
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if let Medium::File { file, start, mapping } = &mut self.medium {
            drop(mapping.take());
            file.release(*start, self.len);
        }
    }
}
