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
