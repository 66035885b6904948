//! Bytes at a cache line's boundary, for kernels that load whole lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use memmap2::MmapMut;

use crate::error::{Result, fail};

/// Alignment in bytes.
const ALIGN: usize = 64;

/// A page of the larger kind. A scan of many megabytes meets a new page of 4 KiB with nearly every
/// block, and looking up where each lies takes as long as reading it.
const HUGE_PAGE: usize = 2 << 20;

/// A fixed number of zeroed bytes at a multiple of 64; long ones at a multiple of 2 MiB, in huge
/// pages where the system has them.
pub struct AlignedBytes {
    data: NonNull<u8>,
    len: usize,
    /// What holds long ones.
    mapping: Option<MmapMut>,
}

// SAFETY: the bytes are owned, as a Vec's.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    pub fn zeroed(len: usize) -> Result<Self> {
        if len == 0 {
            return Ok(Self { data: NonNull::dangling(), len, mapping: None });
        }
        if len >= HUGE_PAGE {
            return Self::mapped(len);
        }
        let data = Layout::from_size_align(len, ALIGN).ok().and_then(|layout| {
            // SAFETY: the layout's size is not zero.
            NonNull::new(unsafe { alloc_zeroed(layout) })
        });
        match data {
            Some(data) => Ok(Self { data, len, mapping: None }),
            None => fail!(Memory, "an allocation of {len} bytes failed"),
        }
    }

    fn mapped(len: usize) -> Result<Self> {
        // Addresses are plentiful; only what is touched takes memory.
        let Ok(mut mapping) = MmapMut::map_anon(len.saturating_add(HUGE_PAGE)) else {
            fail!(Memory, "an allocation of {len} bytes failed");
        };
        let start = mapping.as_ptr().align_offset(HUGE_PAGE);
        #[cfg(target_os = "linux")]
        {
            // The last page is left small: the rest of a huge one would be unused. No matter if
            // the system declines.
            let whole = len / HUGE_PAGE * HUGE_PAGE;
            let _ = mapping.advise_range(memmap2::Advice::HugePage, start, whole);
        }
        match mapping.get_mut(start..).and_then(|bytes| NonNull::new(bytes.as_mut_ptr())) {
            Some(data) => Ok(Self { data, len, mapping: Some(mapping) }),
            None => fail!(Internal, "a mapping has no aligned address"),
        }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.len > 0 && self.mapping.is_none() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_any_length_are_zero_and_aligned() {
        for len in [0, 1, 63, 4096, HUGE_PAGE - 1, HUGE_PAGE, 2 * HUGE_PAGE + 12_345] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            assert!(bytes.iter().all(|byte| *byte == 0));
            assert!(len == 0 || bytes.as_ptr().addr().is_multiple_of(ALIGN));
            assert_eq!(bytes.len(), len);
            bytes.fill(7);
        }
        assert!(AlignedBytes::zeroed(usize::MAX / 4).is_err());
    }
}
