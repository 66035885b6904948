//! Strided views of a host's rows, and their conversion to f32.

use half::{bf16, f16};

use crate::error::{Result, fail};
use crate::kernels::{bf16_to_f32, f16_to_f32, f32_to_f16};

/// Element types a host may hand over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Rows of `n_elem` contiguous elements, one for each head and token, at byte strides. The memory
/// is the host's.
#[derive(Clone, Copy, Debug)]
pub struct View {
    data: *mut u8,
    dtype: Dtype,
    n_elem: usize,
    n_head: usize,
    n_tok: usize,
    stride_head: usize,
    stride_tok: usize,
}

// SAFETY: a view is a description of memory that its maker promised to be readable (and, for an
// output, writable) from any thread while the call lasts.
unsafe impl Send for View {}
// SAFETY: as above; writes through a shared view go to rows that the caller keeps apart.
unsafe impl Sync for View {}

impl View {
    /// Describes host memory.
    ///
    /// # Safety
    /// Each row `data + head * stride_head + tok * stride_tok`, for every head and token, must be
    /// valid for `n_elem` elements for as long as the view is used, and writable where the view is
    /// an output.
    pub unsafe fn new(
        data: *mut u8,
        dtype: Dtype,
        [n_elem, n_head, n_tok]: [usize; 3],
        [stride_head, stride_tok]: [usize; 2],
    ) -> Self {
        Self { data, dtype, n_elem, n_head, n_tok, stride_head, stride_tok }
    }

    /// Refuses a view that is not `n_elem` x `n_head` x `n_tok`, whose rows overlap, or whose
    /// extent overflows. `name` is what the message calls it.
    pub fn check(&self, name: &str, n_elem: usize, n_head: usize, n_tok: usize) -> Result<()> {
        if (self.n_elem, self.n_head, self.n_tok) != (n_elem, n_head, n_tok) {
            fail!(
                Shape,
                "{name} is {} x {} x {}, expected {n_elem} x {n_head} x {n_tok} (elements, heads, \
                 tokens)",
                self.n_elem,
                self.n_head,
                self.n_tok
            );
        }
        if self.data.is_null() {
            fail!(Argument, "the data of {name} is NULL");
        }
        let row = self.n_elem * self.dtype.size();
        for (axis, n, stride) in
            [("head", self.n_head, self.stride_head), ("tok", self.n_tok, self.stride_tok)]
        {
            if n > 1 && stride < row {
                fail!(Shape, "stride_{axis} of {name} is {stride} bytes, a row takes {row}");
            }
        }
        let extent = (self.n_head - 1)
            .checked_mul(self.stride_head)
            .zip((self.n_tok - 1).checked_mul(self.stride_tok))
            .and_then(|(h, t)| h.checked_add(t))
            .and_then(|last| last.checked_add(row));
        if extent.is_none_or(|bytes| bytes > isize::MAX as usize) {
            fail!(Shape, "the strides of {name} reach beyond the address space");
        }
        Ok(())
    }

    fn row(&self, head: usize, tok: usize) -> *mut u8 {
        debug_assert!(head < self.n_head && tok < self.n_tok);
        // SAFETY: in bounds of what `new` was promised, and `check` saw no overflow.
        unsafe { self.data.add(head * self.stride_head + tok * self.stride_tok) }
    }

    /// Reads a row as f32. `out` holds `n_elem` values.
    pub fn load(&self, head: usize, tok: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.n_elem);
        let row = self.row(head, tok);
        // Rows are copied bytewise first: a host's rows need no alignment.
        match self.dtype {
            Dtype::F32 => copy_from(row, out),
            Dtype::F16 => load_wide::<f16>(row, out, f16_to_f32),
            Dtype::Bf16 => load_wide::<bf16>(row, out, bf16_to_f32),
        }
    }

    /// Writes a row of f32 in the view's type.
    pub fn store(&self, head: usize, tok: usize, values: &[f32]) {
        assert_eq!(values.len(), self.n_elem);
        let row = self.row(head, tok);
        match self.dtype {
            Dtype::F32 => copy_to(values, row),
            Dtype::F16 => store_narrow::<f16>(values, row, f32_to_f16),
            Dtype::Bf16 => store_narrow::<bf16>(values, row, |src, dst| {
                for (d, &s) in dst.iter_mut().zip(src) {
                    *d = bf16::from_f32(s);
                }
            }),
        }
    }
}

/// Elements converted at a time, so that no row needs a heap buffer.
const CHUNK: usize = 64;

fn copy_from<T: Copy>(row: *const u8, out: &mut [T]) {
    // SAFETY: the view's maker promised `n_elem` readable elements; bytes carry no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(row, out.as_mut_ptr().cast(), std::mem::size_of_val(out));
    }
}

fn copy_to<T: Copy>(values: &[T], row: *mut u8) {
    // SAFETY: the view's maker promised `n_elem` writable elements; bytes carry no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(values.as_ptr().cast(), row, std::mem::size_of_val(values));
    }
}

fn load_wide<T: Copy + Default>(row: *const u8, out: &mut [f32], widen: fn(&[T], &mut [f32])) {
    let mut narrow = [T::default(); CHUNK];
    for (i, chunk) in out.chunks_mut(CHUNK).enumerate() {
        let part = &mut narrow[..chunk.len()];
        copy_from(row.wrapping_add(i * CHUNK * size_of::<T>()), part);
        widen(part, chunk);
    }
}

fn store_narrow<T: Copy + Default>(values: &[f32], row: *mut u8, narrow: fn(&[f32], &mut [T])) {
    let mut buffer = [T::default(); CHUNK];
    for (i, chunk) in values.chunks(CHUNK).enumerate() {
        let part = &mut buffer[..chunk.len()];
        narrow(chunk, part);
        copy_to(part, row.wrapping_add(i * CHUNK * size_of::<T>()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_strides_larger_than_the_row() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let (n_elem, n_head, n_tok) = (72, 2, 3);
            let stride_head = n_elem * dtype.size() + 2;
            let stride_tok = stride_head * n_head + 10;
            let mut memory = vec![0xffu8; stride_tok * n_tok];
            // SAFETY: `memory` covers the strided extent and outlives the view.
            let view = unsafe {
                let strides = [stride_head, stride_tok];
                View::new(memory.as_mut_ptr(), dtype, [n_elem, n_head, n_tok], strides)
            };
            view.check("k", n_elem, n_head, n_tok).unwrap();
            let row: Vec<f32> = (0..n_elem).map(|i| i as f32 - 30.0).collect();
            view.store(1, 2, &row);
            let mut back = vec![0.0; n_elem];
            view.load(1, 2, &mut back);
            assert_eq!(back, row, "{dtype:?}");
        }
    }

    #[test]
    fn refuses_rows_that_overlap_and_extents_that_overflow() {
        let mut byte = 0u8;
        let mut view = |strides| unsafe {
            // SAFETY: only checked, never read.
            View::new(&raw mut byte, Dtype::F32, [8, 2, 2], strides)
        };
        assert!(view([31, 64]).check("q", 8, 2, 2).is_err());
        assert!(view([32, usize::MAX / 2]).check("q", 8, 2, 2).is_err());
        assert!(view([32, 64]).check("q", 8, 2, 2).is_ok());
    }

    #[test]
    fn counts_elements_beyond_32_bits() {
        let n_tok = i32::MAX as usize;
        let mut byte = 0u8;
        // SAFETY: only checked, never read.
        let mut view = |stride| unsafe {
            View::new(&raw mut byte, Dtype::F16, [128, 8, n_tok], [256, stride])
        };
        assert!(view(2048).check("k", 128, 8, n_tok).is_ok());
        assert!(view(1 << 33).check("k", 128, 8, n_tok).is_err());
    }
}
