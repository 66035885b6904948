//! Asking for memory before it is needed.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Starts to bring `bytes` into the caches. Rows and blocks lie anywhere in memory, and no
/// processor guesses where the next one is: without this a scan waits for each line in turn.
#[inline]
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = bytes.as_ptr().addr() % LINE;
        for line in (0..start + bytes.len()).step_by(LINE) {
            // SAFETY: a prefetch reads nothing that the program could see, from any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(line).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// The same for a value, not for what it points to.
#[inline]
pub fn prefetch_value<T>(value: &T) {
    // SAFETY: the value's own bytes, which `prefetch` only takes the address of.
    prefetch(unsafe { std::slice::from_raw_parts((&raw const *value).cast(), size_of::<T>()) });
}
