//! What the kernels' tests share.

/// A seeded generator (xorshift64*), so that a failure repeats.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// In [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Roughly normal, variance 1.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (0..3).map(|_| self.uniform()).sum()).collect()
    }
}

/// Bytes that end where memory that may not be touched begins: a read past them is a fault.
pub struct Guarded {
    map: *mut u8,
    mapped: usize,
    len: usize,
}

impl Guarded {
    pub fn new(len: usize) -> Guarded {
        // SAFETY: a fresh mapping of our own; its last page is made inaccessible before any use.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let mapped = len.next_multiple_of(page) + page;
            let (rights, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let map = libc::mmap(std::ptr::null_mut(), mapped, rights, kind, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let map = map.cast::<u8>();
            assert_eq!(libc::mprotect(map.add(mapped - page).cast(), page, libc::PROT_NONE), 0);
            Guarded { map: map.add(mapped - page - len), mapped, len }
        }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `len` bytes before the inaccessible page, alive as long as this.
        unsafe { std::slice::from_raw_parts(self.map, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map, self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping begins at the page that holds the first byte, and nothing else
        // refers to it.
        unsafe {
            let page = libc::sysconf(libc::_SC_PAGESIZE) as usize;
            let end = self.map as usize + self.len + page;
            libc::munmap((end - self.mapped) as *mut libc::c_void, self.mapped);
        }
    }
}
