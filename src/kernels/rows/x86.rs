//! Rows at AVX2 and AVX-512: scores are made for 4 rows x up to 4 queries at a time, sums for up
//! to 4 queries and as many dimensions as the registers hold, so that a row is converted to f32
//! once for all of them.

use super::super::simd::{F32x8, F32x16, Vector, four};
use super::RowCodec;
use std::arch::x86_64::*;

/// [`RowCodec`] as constants, so that a codec's loop has no choice left in it.
const F32: u8 = 0;
const F16: u8 = 1;
const INT8: u8 = 2;

/// Rows whose scores are made together; their sums are transposed four by four.
const ROWS: usize = 4;

/// The two entries of one vector width: the doors have checked all lengths.
macro_rules! entries {
    ($vector:ty, $features:literal, $chunks:literal, $scores:ident, $accumulate:ident,
     $decode:ident) => {
        #[target_feature(enable = $features)]
        pub fn $scores(
            codec: RowCodec,
            dim: usize,
            q: &[f32],
            n_group: usize,
            rows: &[&[u8]],
            out: &mut [f32],
            stride: usize,
        ) {
            let job = Job { dim, n_group, rows, stride };
            // SAFETY: this function has the features of the vector; the door checked the lengths.
            unsafe {
                match codec {
                    RowCodec::F32 => job.scores::<$vector, F32>(q, out),
                    RowCodec::F16 => job.scores::<$vector, F16>(q, out),
                    RowCodec::Int8 => job.scores::<$vector, INT8>(q, out),
                }
            }
        }

        #[target_feature(enable = $features)]
        pub fn $accumulate(
            codec: RowCodec,
            dim: usize,
            w: &[f32],
            stride: usize,
            n_group: usize,
            rows: &[&[u8]],
            acc: &mut [f32],
        ) {
            let job = Job { dim, n_group, rows, stride };
            // SAFETY: this function has the features of the vector; the door checked the lengths.
            unsafe {
                match codec {
                    RowCodec::F32 => job.accumulate::<$vector, F32, $chunks>(w, acc),
                    RowCodec::F16 => job.accumulate::<$vector, F16, $chunks>(w, acc),
                    RowCodec::Int8 => job.accumulate::<$vector, INT8, $chunks>(w, acc),
                }
            }
        }

        #[target_feature(enable = $features)]
        pub fn $decode(codec: RowCodec, row: &[u8], out: &mut [f32]) {
            // SAFETY: this function has the features of the vector; the door checked the lengths.
            unsafe {
                match codec {
                    RowCodec::F32 => decode::<$vector, F32>(row, out),
                    RowCodec::F16 => decode::<$vector, F16>(row, out),
                    RowCodec::Int8 => decode::<$vector, INT8>(row, out),
                }
            }
        }
    };
}

entries!(F32x8, "avx2,fma,f16c", 2, scores_avx2, accumulate_avx2, decode_avx2);
entries!(
    F32x16,
    "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c",
    4,
    scores_avx512,
    accumulate_avx512,
    decode_avx512
);

/// As the scalar version: plain code that the compiler makes vectors of, here with more
/// instructions to choose from, one of which rounds a scale up by itself.
#[target_feature(enable = "avx2,fma,f16c")]
pub fn encode_int8_avx2(row: &[f32], out: &mut [u8]) {
    let scale = super::largest_magnitude(row) / 127.0;
    let half = _mm_cvtps_ph::<_MM_FROUND_TO_POS_INF>(_mm_set_ss(scale));
    let bits = half::f16::from_bits(_mm_cvtsi128_si32(half) as u16);
    super::write_int8(row, bits, _mm_cvtss_f32(_mm_cvtph_ps(half)), out);
}

#[target_feature(enable = "avx2,fma,f16c")]
pub fn encode_f16_avx2(row: &[f32], out: &mut [u8]) {
    let whole = row.len() / F32x8::LANES * F32x8::LANES;
    for c in (0..whole).step_by(F32x8::LANES) {
        // SAFETY: this function has the features of the vector; c + LANES <= whole, and the door
        // checked that `out` has two bytes for each value.
        unsafe { F32x8::load(row.as_ptr().add(c)).store_f16(out.as_mut_ptr().add(2 * c)) };
    }
    for (bytes, value) in out[2 * whole..].chunks_exact_mut(2).zip(&row[whole..]) {
        bytes.copy_from_slice(&half::f16::from_f32(*value).to_le_bytes());
    }
}

/// Elements c..c + LANES of a row, before its scale.
///
/// # Safety
/// The features of `V` are there and the row has these elements.
#[inline(always)]
unsafe fn load<V: Vector, const CODEC: u8>(row: *const u8, c: usize) -> V {
    // SAFETY: as the caller's.
    unsafe {
        match CODEC {
            F32 => V::load(row.add(4 * c).cast()),
            F16 => V::load_f16(row.add(2 * c)),
            _ => V::load_i8(row.add(c)),
        }
    }
}

/// Elements c..c + n of a row, before its scale, then zeros.
///
/// # Safety
/// The features of `V` are there and the row has these elements.
#[inline(always)]
unsafe fn load_part<V: Vector, const CODEC: u8>(row: *const u8, c: usize, n: usize) -> V {
    // SAFETY: as the caller's.
    unsafe {
        match CODEC {
            F32 => V::load_part(row.add(4 * c).cast(), n),
            F16 => V::load_f16_part(row.add(2 * c), n),
            _ => V::load_i8_part(row.add(c), n),
        }
    }
}

/// A row's scale; 1 for what has none.
///
/// # Safety
/// F16C is there and the row is whole.
#[inline(always)]
unsafe fn scale<const CODEC: u8>(row: *const u8, dim: usize) -> f32 {
    // SAFETY: as the caller's.
    if CODEC == INT8 { unsafe { scale_of(row, dim) } } else { 1.0 }
}

/// The scale of an int8 row, its last two bytes.
///
/// # Safety
/// F16C is there and the row is whole.
#[inline(always)]
unsafe fn scale_of(row: *const u8, dim: usize) -> f32 {
    // SAFETY: as the caller's.
    unsafe {
        let bits = row.add(dim).cast::<u16>().read_unaligned();
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// # Safety
/// The features of `V` are there and `row` is `row_bytes(out.len())` long.
#[inline(always)]
unsafe fn decode<V: Vector, const CODEC: u8>(row: &[u8], out: &mut [f32]) {
    let (dim, row, out) = (out.len(), row.as_ptr(), out.as_mut_ptr());
    // SAFETY: c + LANES <= dim in the loop, the part takes what is left.
    unsafe {
        let scale = V::splat(scale::<CODEC>(row, dim));
        let mut c = 0;
        while c + V::LANES <= dim {
            load::<V, CODEC>(row, c).mul(scale).store(out.add(c));
            c += V::LANES;
        }
        if c < dim {
            load_part::<V, CODEC>(row, c, dim - c).mul(scale).store_part(out.add(c), dim - c);
        }
    }
}

/// What the two kernels share.
struct Job<'a> {
    dim: usize,
    n_group: usize,
    rows: &'a [&'a [u8]],
    stride: usize,
}

impl Job<'_> {
    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn scores<V: Vector, const CODEC: u8>(&self, q: &[f32], out: &mut [f32]) {
        let (q, out) = (q.as_ptr(), out.as_mut_ptr());
        let mut g = 0;
        while g < self.n_group {
            // SAFETY: queries g..g + G and their lines of `out` exist.
            unsafe {
                let (q, out) = (q.add(g * self.dim), out.add(g * self.stride));
                match self.n_group - g {
                    1 => self.scores_of::<V, CODEC, 1>(q, out),
                    2 => self.scores_of::<V, CODEC, 2>(q, out),
                    3 => self.scores_of::<V, CODEC, 3>(q, out),
                    _ => self.scores_of::<V, CODEC, 4>(q, out),
                }
            }
            g += 4;
        }
    }

    /// # Safety
    /// As `scores`, for G queries from `q` on and their lines from `out` on.
    #[inline(always)]
    unsafe fn scores_of<V: Vector, const CODEC: u8, const G: usize>(
        &self,
        q: *const f32,
        out: *mut f32,
    ) {
        let dim = self.dim;
        let n_rows = self.rows.len();
        let mut t = 0;
        while t < n_rows {
            // The last block repeats its last row; what it scores is not written.
            let mut rows = [std::ptr::null(); ROWS];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = self.rows[(t + i).min(n_rows - 1)].as_ptr();
            }
            // SAFETY: c + LANES <= dim in the loop, the part takes what is left of each row and
            // query; scores t..t + n are in each line.
            unsafe {
                let mut sums = [[V::splat(0.0); ROWS]; G];
                let mut c = 0;
                while c + V::LANES <= dim {
                    // Loops instead of closures throughout: a closure would be a function without
                    // the vectors' features, and not be inlined.
                    let mut values = [V::splat(0.0); ROWS];
                    for (value, row) in values.iter_mut().zip(rows) {
                        *value = load::<V, CODEC>(row, c);
                    }
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let q = V::load(q.add(g * dim + c));
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = q.fma(value, *sum);
                        }
                    }
                    c += V::LANES;
                }
                if c < dim {
                    let mut values = [V::splat(0.0); ROWS];
                    for (value, row) in values.iter_mut().zip(rows) {
                        *value = load_part::<V, CODEC>(row, c, dim - c);
                    }
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let q = V::load_part(q.add(g * dim + c), dim - c);
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = q.fma(value, *sum);
                        }
                    }
                }
                let mut scales = [1.0; ROWS];
                for (one, row) in scales.iter_mut().zip(rows) {
                    *one = scale::<CODEC>(row, dim);
                }
                let n = (n_rows - t).min(ROWS);
                for (g, sums) in sums.into_iter().enumerate() {
                    let line = out.add(g * self.stride + t);
                    let scores = four(V::sum4(sums));
                    if n == ROWS {
                        for row in 0..ROWS {
                            *line.add(row) = scores[row] * scales[row];
                        }
                    } else {
                        for row in 0..n {
                            *line.add(row) = scores[row] * scales[row];
                        }
                    }
                }
            }
            t += ROWS;
        }
    }

    /// # Safety
    /// The features of `V` are there; lengths are as the door checked them.
    #[inline(always)]
    unsafe fn accumulate<V: Vector, const CODEC: u8, const CHUNKS: usize>(
        &self,
        w: &[f32],
        acc: &mut [f32],
    ) {
        let (w, acc) = (w.as_ptr(), acc.as_mut_ptr());
        let mut g = 0;
        while g < self.n_group {
            // SAFETY: lines g..g + G of both tables exist.
            unsafe {
                let (w, acc) = (w.add(g * self.stride), acc.add(g * self.dim));
                match self.n_group - g {
                    1 => self.accumulate_for::<V, CODEC, CHUNKS, 1>(w, acc),
                    2 => self.accumulate_for::<V, CODEC, CHUNKS, 2>(w, acc),
                    3 => self.accumulate_for::<V, CODEC, CHUNKS, 3>(w, acc),
                    _ => self.accumulate_for::<V, CODEC, CHUNKS, 4>(w, acc),
                }
            }
            g += 4;
        }
    }

    /// # Safety
    /// As `accumulate`, for G lines from `w` and `acc` on.
    #[inline(always)]
    unsafe fn accumulate_for<V: Vector, const CODEC: u8, const CHUNKS: usize, const G: usize>(
        &self,
        w: *const f32,
        acc: *mut f32,
    ) {
        if CODEC != INT8 {
            let weights = Weights { at: w, stride: self.stride };
            // SAFETY: by the contract.
            return unsafe { self.accumulate_all::<V, CODEC, CHUNKS, G>(self.rows, weights, acc) };
        }
        // Scales go into the weights first: a weight is then one broadcast from memory, where it
        // would be a conversion, a product and a broadcast for each row and query.
        let mut scales = [0.0f32; BLOCK];
        let mut scaled = [[0.0f32; BLOCK]; G];
        for (block, rows) in self.rows.chunks(BLOCK).enumerate() {
            // SAFETY: a block's rows have their weights in each of the G lines.
            unsafe {
                for (scale, row) in scales.iter_mut().zip(rows) {
                    *scale = scale_of(row.as_ptr(), self.dim);
                }
                for (g, scaled) in scaled.iter_mut().enumerate() {
                    let w = std::slice::from_raw_parts(
                        w.add(g * self.stride + block * BLOCK),
                        rows.len(),
                    );
                    for ((scaled, w), scale) in scaled.iter_mut().zip(w).zip(&scales) {
                        *scaled = w * scale;
                    }
                }
                let weights = Weights { at: scaled.as_ptr().cast(), stride: BLOCK };
                self.accumulate_all::<V, CODEC, CHUNKS, G>(rows, weights, acc);
            }
        }
    }

    /// # Safety
    /// The features of `V` are there; each of `rows` has its G weights, and `acc` G lines.
    #[inline(always)]
    unsafe fn accumulate_all<V: Vector, const CODEC: u8, const CHUNKS: usize, const G: usize>(
        &self,
        rows: &[&[u8]],
        weights: Weights,
        acc: *mut f32,
    ) {
        let dim = self.dim;
        // SAFETY: each block's elements c..c + n are within the rows and lines of `acc`.
        unsafe {
            let mut c = 0;
            while c + CHUNKS * V::LANES <= dim {
                self.accumulate_block::<V, CODEC, CHUNKS, G>(rows, weights, acc, c);
                c += CHUNKS * V::LANES;
            }
            while c + V::LANES <= dim {
                self.accumulate_block::<V, CODEC, 1, G>(rows, weights, acc, c);
                c += V::LANES;
            }
            if c < dim {
                let n = dim - c;
                let mut sums = [V::splat(0.0); G];
                for (t, row) in rows.iter().enumerate() {
                    let value = load_part::<V, CODEC>(row.as_ptr(), c, n);
                    for (g, sum) in sums.iter_mut().enumerate() {
                        *sum = value.fma(weights.splat(g, t), *sum);
                    }
                }
                for (g, sum) in sums.into_iter().enumerate() {
                    let at = acc.add(g * dim + c);
                    V::load_part(at, n).add(sum).store_part(at, n);
                }
            }
        }
    }

    /// # Safety
    /// As `accumulate_all`, and the rows have elements c..c + CHUNKS * LANES.
    #[inline(always)]
    unsafe fn accumulate_block<V: Vector, const CODEC: u8, const CHUNKS: usize, const G: usize>(
        &self,
        rows: &[&[u8]],
        weights: Weights,
        acc: *mut f32,
        c: usize,
    ) {
        let dim = self.dim;
        // SAFETY: by the contract.
        unsafe {
            let mut sums = [[V::splat(0.0); CHUNKS]; G];
            for (t, row) in rows.iter().enumerate() {
                let mut values = [V::splat(0.0); CHUNKS];
                for (chunk, value) in values.iter_mut().enumerate() {
                    *value = load::<V, CODEC>(row.as_ptr(), c + chunk * V::LANES);
                }
                for (g, sums) in sums.iter_mut().enumerate() {
                    let weight = weights.splat(g, t);
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = value.fma(weight, *sum);
                    }
                }
            }
            for (g, sums) in sums.into_iter().enumerate() {
                for (chunk, sum) in sums.into_iter().enumerate() {
                    let at = acc.add(g * dim + c + chunk * V::LANES);
                    V::load(at).add(sum).store(at);
                }
            }
        }
    }
}

/// Rows whose scaled weights are made at a time.
const BLOCK: usize = 64;

/// A table of weights, one line for each query.
#[derive(Clone, Copy)]
struct Weights {
    at: *const f32,
    stride: usize,
}

impl Weights {
    /// # Safety
    /// The features of `V` are there and the table has this place.
    #[inline(always)]
    unsafe fn splat<V: Vector>(&self, g: usize, t: usize) -> V {
        // SAFETY: by the contract.
        unsafe { V::splat(*self.at.add(g * self.stride + t)) }
    }
}
