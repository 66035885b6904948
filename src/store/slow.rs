//! The slow tier: immutable segments, written once at seal and read by rows.
//!
//! The segments lie in anonymous memory. What the rest of the library may rely on is what a
//! memory-mapped file can give as well: a segment is appended whole, is read as bytes, never
//! changes, and is gone when its last owner drops it.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::AlignedBytes;
use crate::error::Result;

/// Segments begin at a multiple of this.
const ALIGN: usize = 64;

/// Bytes of a sequence's first chunk, and of its largest. Each is twice the one before.
const FIRST_CHUNK: usize = 256 << 10;
const LARGEST_CHUNK: usize = 16 << 20;

/// Slow-tier memory of one sequence, and the count of that of all of one context.
///
/// Segments of one sequence share chunks: a row that is fetched lies anywhere among them, and few
/// large chunks are found faster than many small allocations. A chunk is given back with its last
/// segment.
#[derive(Default)]
pub struct SlowStore {
    bytes: Arc<AtomicU64>,
    chunk: Mutex<Option<Chunk>>,
}

/// The chunk that is being filled.
struct Chunk {
    data: Arc<SharedBytes>,
    used: usize,
}

/// Bytes that are handed out in parts that don't overlap.
struct SharedBytes {
    data: *mut u8,
    len: usize,
    /// Owns what `data` points to.
    _owner: AlignedBytes,
}

// SAFETY: each part is written by the one that took it, before anybody else knows of it, and
// read only from then on.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

impl SlowStore {
    /// A store for another sequence of the same context.
    pub fn for_sequence(&self) -> Self {
        Self { bytes: Arc::clone(&self.bytes), chunk: Mutex::default() }
    }

    /// A segment of `len` bytes, zero at first, filled by `write`.
    pub fn append(&self, len: usize, write: impl FnOnce(&mut [u8])) -> Result<Segment> {
        let (chunk, start) = self.take(len)?;
        // SAFETY: `take` hands out this part once; it lies within the chunk.
        write(unsafe { std::slice::from_raw_parts_mut(chunk.data.add(start), len) });
        self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Segment(Arc::new(Run { chunk, start, len, bytes: Arc::clone(&self.bytes) })))
    }

    /// A part of a chunk that nobody has had.
    fn take(&self, len: usize) -> Result<(Arc<SharedBytes>, usize)> {
        let mut chunk = self.chunk.lock().unwrap_or_else(PoisonError::into_inner);
        let room = len.next_multiple_of(ALIGN);
        if let Some(chunk) = &mut *chunk
            && chunk.data.len - chunk.used >= room
        {
            let start = chunk.used;
            chunk.used += room;
            return Ok((Arc::clone(&chunk.data), start));
        }
        let size = chunk.as_ref().map_or(FIRST_CHUNK, |last| 2 * last.data.len);
        let size = size.min(LARGEST_CHUNK).max(room);
        let mut owner = AlignedBytes::zeroed(size)?;
        let data = owner.as_mut_ptr();
        let data = Arc::new(SharedBytes { data, len: size, _owner: owner });
        *chunk = Some(Chunk { data: Arc::clone(&data), used: room });
        Ok((data, 0))
    }

    /// Bytes of all segments of the context that are alive.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// One appended run of bytes, shared by its owners.
#[derive(Clone)]
pub struct Segment(Arc<Run>);

struct Run {
    chunk: Arc<SharedBytes>,
    start: usize,
    len: usize,
    bytes: Arc<AtomicU64>,
}

impl Segment {
    /// Bytes that a segment takes besides what it holds.
    pub const METADATA: usize = size_of::<Self>() + size_of::<Run>() + 2 * size_of::<usize>();
}

impl Deref for Segment {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Run { chunk, start, len, .. } = &*self.0;
        // SAFETY: this part was written before the segment was made, and is only read since.
        unsafe { std::slice::from_raw_parts(chunk.data.add(*start), *len) }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.bytes.fetch_sub(self.len as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_is_alive() {
        let store = SlowStore::default();
        let segment = store.for_sequence().append(100, |bytes| bytes.fill(7)).unwrap();
        assert_eq!((store.bytes(), segment[99]), (100, 7));
        assert_eq!(segment.as_ptr() as usize % 64, 0);
        drop(segment);
        assert_eq!(store.bytes(), 0);
    }

    #[test]
    fn segments_of_any_size_keep_to_themselves() {
        let store = SlowStore::default();
        let sizes = [1, 64, 100_000, 200_000, 3 << 20, 5, 20 << 20, 65];
        let segments: Vec<Segment> = sizes
            .iter()
            .enumerate()
            .map(|(i, &len)| {
                let fill = |bytes: &mut [u8]| {
                    assert!(bytes.iter().all(|byte| *byte == 0));
                    bytes.fill(i as u8 + 1);
                };
                store.append(len, fill).unwrap()
            })
            .collect();
        for (i, (segment, &len)) in segments.iter().zip(&sizes).enumerate() {
            assert_eq!(segment.len(), len);
            assert!(segment.iter().all(|byte| *byte == i as u8 + 1));
        }
        assert_eq!(store.bytes(), sizes.iter().sum::<usize>() as u64);
    }

    #[test]
    fn threads_append_side_by_side() {
        let store = SlowStore::default();
        std::thread::scope(|scope| {
            for number in 0..4u8 {
                let store = &store;
                scope.spawn(move || {
                    for i in 0..200 {
                        let segment = store.append(1000 + i, |bytes| bytes.fill(number)).unwrap();
                        assert!(segment.iter().all(|byte| *byte == number));
                    }
                });
            }
        });
        assert_eq!(store.bytes(), 0);
    }
}
