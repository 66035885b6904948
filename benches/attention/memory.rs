//! Large buffers that cost nothing until they are written, aligned for every rival.

use std::ptr::NonNull;

/// `len` zeros in anonymous memory, aligned to a page.
pub struct Buffer<T: Copy> {
    data: NonNull<T>,
    len: usize,
}

// SAFETY: plain owned memory of plain numbers.
unsafe impl<T: Copy + Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Copy + Sync> Sync for Buffer<T> {}

impl<T: Copy> Buffer<T> {
    pub fn new(len: usize) -> Self {
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: a fresh anonymous mapping; huge pages are a wish.
        let data = unsafe {
            let data = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            assert_ne!(data, libc::MAP_FAILED, "no memory for {bytes} bytes");
            libc::madvise(data, bytes, libc::MADV_HUGEPAGE);
            data
        };
        Self { data: NonNull::new(data.cast()).expect("mmap never returns 0"), len }
    }

    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `len` elements of zeroed or written memory of plain numbers.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T: Copy> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made.
        unsafe { libc::munmap(self.data.as_ptr().cast(), (self.len * size_of::<T>()).max(1)) };
    }
}
