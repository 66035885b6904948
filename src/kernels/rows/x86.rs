//! Rows at AVX2 and AVX-512: scores are made for 4 rows x up to 4 queries at a time, sums for up
//! to 4 queries and as many dimensions as the registers hold, so that a row is converted to f32
//! once for all of them.

use super::super::prefetch::prefetch;
use super::super::simd::{F32x8, F32x16, Vector, four};
use super::{RowCodec, Rows, SCALE_GROUP};
use crate::model::MAX_HEAD_DIM;
use std::arch::x86_64::*;

/// [`RowCodec`] as constants, so that a codec's loop has no choice left in it.
const F32: u8 = 0;
const F16: u8 = 1;
const INT8: u8 = 2;

/// Scales that a row may have.
const MOST_GROUPS: usize = MAX_HEAD_DIM / SCALE_GROUP;

/// Scales that are converted together.
const FEW: usize = 4;

const _: () = assert!(SCALE_GROUP.is_multiple_of(F32x16::LANES) && 64 / SCALE_GROUP <= FEW);

/// Rows whose scores are made together: with four queries their sums, the rows' values and a query
/// fill the registers.
const ROWS: usize = 2;

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
            rows: Rows,
            out: &mut [f32],
            stride: usize,
        ) {
            let job = Job { dim, n_group, rows: rows.rows, next: rows.next, stride };
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
            rows: Rows,
            acc: &mut [f32],
        ) {
            let job = Job { dim, n_group, rows: rows.rows, next: rows.next, stride };
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
    let (codes, scales) = out.split_at_mut(row.len());
    let (groups, rest) = row.as_chunks::<SCALE_GROUP>();
    let (code_groups, code_rest) = codes.as_chunks_mut::<SCALE_GROUP>();
    let mut scales = scales.chunks_exact_mut(2);
    for ((values, codes), scale) in groups.iter().zip(code_groups).zip(&mut scales) {
        encode_group(values, codes, scale);
    }
    for scale in scales {
        encode_group(rest, code_rest, scale);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn encode_group(values: &[f32], codes: &mut [u8], scale_bytes: &mut [u8]) {
    let scale = super::largest_magnitude(values) / 127.0;
    let half = _mm_cvtps_ph::<_MM_FROUND_TO_POS_INF>(_mm_set_ss(scale));
    super::write_codes(values, _mm_cvtss_f32(_mm_cvtph_ps(half)), codes);
    scale_bytes.copy_from_slice(&(_mm_cvtsi128_si32(half) as u16).to_le_bytes());
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

/// The scales of an int8 row as f32, one for each SCALE_GROUP; other codecs have none.
///
/// # Safety
/// F16C is there and the row is whole.
#[inline(always)]
unsafe fn scales<const CODEC: u8>(row: *const u8, dim: usize, out: &mut [f32; MOST_GROUPS]) {
    if CODEC != INT8 {
        return;
    }
    let n = dim.div_ceil(SCALE_GROUP);
    // SAFETY: n halves follow the codes; `out` has room for whole vectors of them.
    unsafe {
        let (from, to) = (row.add(dim).cast::<u16>(), out.as_mut_ptr());
        let mut i = 0;
        while i + 4 <= n {
            let halves = _mm_loadl_epi64(from.add(i).cast());
            _mm_storeu_ps(to.add(i), _mm_cvtph_ps(halves));
            i += 4;
        }
        while i < n {
            let bits = from.add(i).read_unaligned();
            *to.add(i) = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));
            i += 1;
        }
    }
}

/// The scales of an int8 row's elements c..c + n, n at most FEW groups.
///
/// # Safety
/// F16C is there and the row has these elements.
#[inline(always)]
unsafe fn few_scales<const CODEC: u8>(
    row: *const u8,
    dim: usize,
    c: usize,
    n: usize,
) -> [f32; FEW] {
    let mut out = [0.0; FEW];
    if CODEC == INT8 {
        let n = n.div_ceil(SCALE_GROUP);
        // SAFETY: n halves follow those of the groups before c.
        unsafe {
            let from = row.add(dim).cast::<u16>().add(c / SCALE_GROUP);
            if n == FEW {
                let halves = _mm_loadl_epi64(from.cast());
                _mm_storeu_ps(out.as_mut_ptr(), _mm_cvtph_ps(halves));
            } else {
                for (i, out) in out.iter_mut().enumerate().take(n) {
                    let bits = from.add(i).read_unaligned();
                    *out = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))));
                }
            }
        }
    }
    out
}

/// Elements c..c + LANES of a row. A vector's elements share a scale: SCALE_GROUP is a multiple
/// of LANES, as is c.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn load_scaled<V: Vector, const CODEC: u8>(
    row: *const u8,
    c: usize,
    scales: &[f32; MOST_GROUPS],
) -> V {
    // SAFETY: as the caller's.
    unsafe {
        let value = load::<V, CODEC>(row, c);
        if CODEC == INT8 {
            value.mul(V::splat(scales[c / SCALE_GROUP % MOST_GROUPS]))
        } else {
            value
        }
    }
}

/// Elements c..c + n of a row, then zeros.
///
/// # Safety
/// As [`load_part`].
#[inline(always)]
unsafe fn load_scaled_part<V: Vector, const CODEC: u8>(
    row: *const u8,
    c: usize,
    n: usize,
    scales: &[f32; MOST_GROUPS],
) -> V {
    // SAFETY: as the caller's.
    unsafe {
        let value = load_part::<V, CODEC>(row, c, n);
        if CODEC == INT8 {
            value.mul(V::splat(scales[c / SCALE_GROUP % MOST_GROUPS]))
        } else {
            value
        }
    }
}

/// # Safety
/// The features of `V` are there and `row` is `row_bytes(out.len())` long.
#[inline(always)]
unsafe fn decode<V: Vector, const CODEC: u8>(row: &[u8], out: &mut [f32]) {
    let (dim, row, out) = (out.len(), row.as_ptr(), out.as_mut_ptr());
    let mut of_row = [0.0; MOST_GROUPS];
    // SAFETY: c + LANES <= dim in the loop, the part takes what is left.
    unsafe {
        scales::<CODEC>(row, dim, &mut of_row);
        let mut c = 0;
        while c + V::LANES <= dim {
            load_scaled::<V, CODEC>(row, c, &of_row).store(out.add(c));
            c += V::LANES;
        }
        if c < dim {
            load_scaled_part::<V, CODEC>(row, c, dim - c, &of_row).store_part(out.add(c), dim - c);
        }
    }
}

/// What the two kernels share.
struct Job<'a> {
    dim: usize,
    n_group: usize,
    rows: &'a [&'a [u8]],
    next: &'a [&'a [u8]],
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
                let next = if g == 0 { self.next } else { &[] };
                match self.n_group - g {
                    1 => self.scores_of::<V, CODEC, 1>(q, out, next),
                    2 => self.scores_of::<V, CODEC, 2>(q, out, next),
                    3 => self.scores_of::<V, CODEC, 3>(q, out, next),
                    _ => self.scores_of::<V, CODEC, 4>(q, out, next),
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
        next: &[&[u8]],
    ) {
        let dim = self.dim;
        let n_rows = self.rows.len();
        let mut of_rows = [[0.0; MOST_GROUPS]; ROWS];
        let mut t = 0;
        while t < n_rows {
            // The last block repeats its last row; what it scores is not written.
            let mut rows = [std::ptr::null(); ROWS];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = self.rows[(t + i).min(n_rows - 1)].as_ptr();
                if let Some(next) = next.get(t + i) {
                    prefetch(next);
                }
            }
            // SAFETY: c + LANES <= dim in the loop, the part takes what is left of each row and
            // query; scores t..t + n are in each line.
            unsafe {
                for (of_row, row) in of_rows.iter_mut().zip(rows) {
                    scales::<CODEC>(row, dim, of_row);
                }
                let mut sums = [[V::splat(0.0); ROWS]; G];
                let mut c = 0;
                while c + V::LANES <= dim {
                    // Loops instead of closures throughout: a closure would be a function without
                    // the vectors' features, and not be inlined.
                    let mut values = [V::splat(0.0); ROWS];
                    for ((value, row), of_row) in values.iter_mut().zip(rows).zip(&of_rows) {
                        *value = load_scaled::<V, CODEC>(row, c, of_row);
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
                    for ((value, row), of_row) in values.iter_mut().zip(rows).zip(&of_rows) {
                        *value = load_scaled_part::<V, CODEC>(row, c, dim - c, of_row);
                    }
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let q = V::load_part(q.add(g * dim + c), dim - c);
                        for (sum, value) in sums.iter_mut().zip(values) {
                            *sum = q.fma(value, *sum);
                        }
                    }
                }
                // Transposed four by four: two queries at a time.
                let n = (n_rows - t).min(ROWS);
                let none = [V::splat(0.0); ROWS];
                for g in (0..G).step_by(2) {
                    let next = if g + 1 < G { sums[(g + 1) % G] } else { none };
                    let [a, b] = sums[g];
                    let scores = four(V::sum4([a, b, next[0], next[1]]));
                    for (i, scores) in scores.chunks_exact(ROWS).enumerate().take(G - g) {
                        for (row, score) in scores.iter().enumerate().take(n) {
                            *out.add((g + i) * self.stride + t + row) = *score;
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
                let next = if g == 0 { self.next } else { &[] };
                match self.n_group - g {
                    1 => self.accumulate_for::<V, CODEC, CHUNKS, 1>(w, acc, next),
                    2 => self.accumulate_for::<V, CODEC, CHUNKS, 2>(w, acc, next),
                    3 => self.accumulate_for::<V, CODEC, CHUNKS, 3>(w, acc, next),
                    _ => self.accumulate_for::<V, CODEC, CHUNKS, 4>(w, acc, next),
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
        next: &[&[u8]],
    ) {
        let dim = self.dim;
        let weights = Weights { at: w, stride: self.stride };
        // SAFETY: each block's elements c..c + n are within the rows and lines of `acc`.
        unsafe {
            let mut c = 0;
            if !next.is_empty() && CHUNKS * V::LANES <= dim {
                self.accumulate_block::<V, CODEC, CHUNKS, G, true>(next, weights, acc, c);
                c += CHUNKS * V::LANES;
            }
            while c + CHUNKS * V::LANES <= dim {
                self.accumulate_block::<V, CODEC, CHUNKS, G, false>(&[], weights, acc, c);
                c += CHUNKS * V::LANES;
            }
            while c + V::LANES <= dim {
                self.accumulate_block::<V, CODEC, 1, G, false>(&[], weights, acc, c);
                c += V::LANES;
            }
            if c < dim {
                let n = dim - c;
                let mut sums = [V::splat(0.0); G];
                for (t, row) in self.rows.iter().enumerate() {
                    let [scale, ..] = few_scales::<CODEC>(row.as_ptr(), dim, c, n);
                    let mut value = load_part::<V, CODEC>(row.as_ptr(), c, n);
                    if CODEC == INT8 {
                        value = value.mul(V::splat(scale));
                    }
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
    /// As `accumulate_for`, and the rows have elements c..c + CHUNKS * LANES.
    #[inline(always)]
    unsafe fn accumulate_block<
        V: Vector,
        const CODEC: u8,
        const CHUNKS: usize,
        const G: usize,
        const NEXT: bool,
    >(
        &self,
        next: &[&[u8]],
        weights: Weights,
        acc: *mut f32,
        c: usize,
    ) {
        let dim = self.dim;
        // SAFETY: by the contract.
        unsafe {
            let mut sums = [[V::splat(0.0); CHUNKS]; G];
            for (t, row) in self.rows.iter().enumerate() {
                if NEXT && t < next.len() {
                    prefetch(next[t]);
                }
                let mut values = [V::splat(0.0); CHUNKS];
                let scales = few_scales::<CODEC>(row.as_ptr(), dim, c, CHUNKS * V::LANES);
                for (chunk, value) in values.iter_mut().enumerate() {
                    *value = load::<V, CODEC>(row.as_ptr(), c + chunk * V::LANES);
                    if CODEC == INT8 {
                        let group = (c % SCALE_GROUP + chunk * V::LANES) / SCALE_GROUP;
                        *value = value.mul(V::splat(scales[group]));
                    }
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
