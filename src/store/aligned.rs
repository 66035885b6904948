//! Bytes at a cache line's boundary, for kernels that load whole lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::{Result, fail};

/// Alignment in bytes.
const ALIGN: usize = 64;

/// A fixed number of zeroed bytes at a multiple of 64.
pub struct AlignedBytes {
    data: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are owned, as a Vec's.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    pub fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self { data: NonNull::dangling(), len });
        }
        let data = Layout::from_size_align(len, ALIGN).ok().and_then(|layout| {
            // SAFETY: the layout's size is not zero.
            NonNull::new(unsafe { alloc_zeroed(layout) })
        });
        match data {
            Some(data) => Ok(Self { data, len }),
            None => fail!(Memory, "an allocation of {len} bytes failed"),
        }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated with this size and alignment in `zeroed`.
            unsafe {
                let layout = Layout::from_size_align_unchecked(self.len, ALIGN);
                dealloc(self.data.as_ptr(), layout);
            }
        }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, owned; dangling only where len is 0.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes it the only access.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}
