//! The slow tier: immutable segments, written once at seal and read by rows.
//!
//! The segments lie in anonymous memory. What the rest of the library may rely on is what a
//! memory-mapped file can give as well: a segment is appended whole, is read as bytes, never
//! changes, and is gone when its last owner drops it.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::AlignedBytes;
use crate::error::Result;

/// All slow-tier memory of one context.
#[derive(Clone, Default)]
pub struct SlowStore {
    bytes: Arc<AtomicU64>,
}

impl SlowStore {
    /// A segment of `len` bytes, filled by `write`.
    pub fn append(&self, len: usize, write: impl FnOnce(&mut [u8])) -> Result<Segment> {
        let mut data = AlignedBytes::zeroed(len)?;
        write(&mut data);
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Segment(Arc::new(Run { data, bytes: Arc::clone(&self.bytes) })))
    }

    /// Bytes of all segments that are alive.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// One appended run of bytes, shared by its owners.
#[derive(Clone)]
pub struct Segment(Arc<Run>);

struct Run {
    data: AlignedBytes,
    bytes: Arc<AtomicU64>,
}

impl Deref for Segment {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0.data
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.data.len() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_is_alive() {
        let store = SlowStore::default();
        let segment = store.append(100, |bytes| bytes.fill(7)).unwrap();
        assert_eq!((store.bytes(), segment[99]), (100, 7));
        assert_eq!(segment.as_ptr() as usize % 64, 0);
        drop(segment);
        assert_eq!(store.bytes(), 0);
    }
}
