//! The plain rival: exact attention of one token over f16 keys and values, written as well as
//! this machine allows. Keys and values lie head by head, `[n_kv_heads][capacity][dim]`, so that
//! every thread reads one stream.

use std::ops::Range;

use half::f16;
use sekv::attend::SoftmaxState;
use sekv::kernels::{RowCodec, exp_minus, max, row_accumulate, row_scores};
use sekv::pool::Pool;

use crate::memory::Buffer;

/// Tokens whose weights are computed before they are summed.
const TOKENS: usize = 64;
/// Work items a KV head is cut into.
const PIECES: usize = 4;
/// Query heads that share a KV head.
pub const GROUP: usize = 4;
const DIM: usize = 128;

pub struct Dense {
    n_kv_heads: usize,
    capacity: usize,
    keys: Buffer<f16>,
    values: Buffer<f16>,
}

/// One state for each KV head and piece.
#[derive(Default)]
pub struct DenseScratch(Vec<SoftmaxState>);

impl Dense {
    pub fn new(n_kv_heads: usize, capacity: usize) -> Self {
        let len = n_kv_heads * capacity * DIM;
        Self { n_kv_heads, capacity, keys: Buffer::new(len), values: Buffer::new(len) }
    }

    /// Writes tokens from `first` on; rows are `[token][n_kv_heads][dim]`.
    pub fn write(&mut self, first: usize, keys: &[f16], values: &[f16]) {
        for (cache, rows) in [(&mut self.keys, keys), (&mut self.values, values)] {
            for (i, row) in rows.chunks(DIM).enumerate() {
                let (token, head) = (first + i / self.n_kv_heads, i % self.n_kv_heads);
                let at = (head * self.capacity + token) * DIM;
                cache.as_mut_slice()[at..at + DIM].copy_from_slice(row);
            }
        }
    }

    /// `q`, `out`: `[n_kv_heads * GROUP][dim]`, q not yet scaled.
    pub fn attend(
        &self,
        pool: &mut Pool,
        scratch: &mut DenseScratch,
        q: &[f32],
        n_tokens: usize,
        out: &mut [f32],
    ) {
        let states = &mut scratch.0;
        states.resize_with(self.n_kv_heads * PIECES, SoftmaxState::default);
        let scale = (DIM as f32).sqrt().recip();
        let q: Vec<f32> = q.iter().map(|x| x * scale).collect();
        let (keys, values) = (self.keys.as_slice(), self.values.as_slice());
        let capacity = self.capacity;
        pool.team(|team| {
            team.for_each_mut(states, |i, state| {
                let (head, piece) = (i / PIECES, i % PIECES);
                let first = piece * n_tokens / PIECES;
                let rows = first..(piece + 1) * n_tokens / PIECES;
                let rows = (head * capacity + rows.start) * DIM..(head * capacity + rows.end) * DIM;
                let q = &q[head * GROUP * DIM..][..GROUP * DIM];
                state.reset(GROUP, DIM);
                attend_rows(q, &keys[rows.clone()], &values[rows], state);
            });
        });
        for (head, pieces) in states.chunks_mut(PIECES).enumerate() {
            let (state, others) = pieces.split_first_mut().expect("PIECES is not 0");
            others.iter().for_each(|other| state.merge(other));
            for g in 0..GROUP {
                state.finish(g, &mut out[(head * GROUP + g) * DIM..][..DIM]);
            }
        }
    }

    /// All keys and values, `[n_kv_heads][capacity][dim]`.
    pub fn rows(&self) -> (&[f16], &[f16]) {
        (self.keys.as_slice(), self.values.as_slice())
    }

    /// Keys of one head as f32.
    pub fn keys(&self, head: usize, tokens: Range<usize>) -> Vec<f32> {
        let at = head * self.capacity;
        let keys = &self.keys.as_slice()[(at + tokens.start) * DIM..(at + tokens.end) * DIM];
        keys.iter().map(|key| key.to_f32()).collect()
    }

    /// Exact scores of one query head, scaled.
    pub fn scores(&self, head: usize, q: &[f32], n_tokens: usize) -> Vec<f32> {
        let keys = &self.keys.as_slice()[head * self.capacity * DIM..][..n_tokens * DIM];
        let scale = (DIM as f32).sqrt().recip();
        let dot = |key: &[f16]| key.iter().zip(q).map(|(k, q)| k.to_f32() * q).sum::<f32>();
        keys.chunks(DIM).map(|key| dot(key) * scale).collect()
    }
}

fn attend_rows(q: &[f32], keys: &[f16], values: &[f16], state: &mut SoftmaxState) {
    let mut weights = [0.0f32; GROUP * TOKENS];
    for (keys, values) in keys.chunks(TOKENS * DIM).zip(values.chunks(TOKENS * DIM)) {
        let n = keys.len() / DIM;
        scores(q, keys, &mut weights);
        for g in 0..GROUP {
            let weights = &mut weights[g * TOKENS..][..n];
            state.raise(g, max(weights));
            state.l[g] += exp_minus(weights, state.m[g]);
        }
        accumulate(&weights, values, &mut state.o);
    }
}

fn scores(q: &[f32], keys: &[f16], out: &mut [f32; GROUP * TOKENS]) {
    #[cfg(target_arch = "x86_64")]
    if keys.len().is_multiple_of(4 * DIM) && wide::available() {
        // SAFETY: the instructions are there; lengths are multiples of four rows.
        unsafe { wide::scores(q, keys, out) };
        return;
    }
    let rows: Vec<&[u8]> = keys.chunks(DIM).map(bytes).collect();
    row_scores(RowCodec::F16, DIM, q, GROUP, &rows, out, TOKENS);
}

/// A row as the library's kernels take it.
fn bytes(row: &[f16]) -> &[u8] {
    // SAFETY: f16 has no padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(row.as_ptr().cast(), size_of_val(row)) }
}

fn accumulate(weights: &[f32; GROUP * TOKENS], values: &[f16], acc: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if wide::available() {
        // SAFETY: the instructions are there; acc is [GROUP][DIM].
        unsafe { wide::accumulate(weights, values, acc) };
        return;
    }
    let rows: Vec<&[u8]> = values.chunks(DIM).map(bytes).collect();
    row_accumulate(RowCodec::F16, DIM, weights, TOKENS, GROUP, &rows, acc);
}

/// AVX-512.
#[cfg(target_arch = "x86_64")]
mod wide {
    use super::{DIM, GROUP, TOKENS};
    use half::f16;
    use std::arch::x86_64::*;

    /// Elements of a register.
    const WIDE: usize = 16;
    /// How far ahead a row is asked for: about a page.
    const AHEAD: usize = 16 * DIM;

    pub fn available() -> bool {
        sekv::kernels::Level::best().name() == "avx512"
    }

    /// 16 elements at `row + at`, as f32.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(row: *const f16, at: usize) -> __m512 {
        // SAFETY: the caller has 16 elements there.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(row.add(at).cast())) }
    }

    /// Four rows against four heads at a time: 16 sums, then one transposed addition.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub unsafe fn scores(q: &[f32], keys: &[f16], out: &mut [f32; GROUP * TOKENS]) {
        for t in (0..keys.len() / DIM).step_by(4) {
            // SAFETY: rows t to t + 4 are within `keys`; q is [GROUP][DIM]; a prefetch may point
            // anywhere; t + 4 <= TOKENS.
            unsafe {
                let rows = keys.as_ptr().add(t * DIM);
                for line in 0..4 * DIM / 32 {
                    _mm_prefetch::<_MM_HINT_T0>(rows.wrapping_add(AHEAD + line * 32).cast());
                }
                let mut sums = [_mm512_setzero_ps(); 16];
                for c in (0..DIM).step_by(WIDE) {
                    let key = [
                        load(rows, c),
                        load(rows, DIM + c),
                        load(rows, 2 * DIM + c),
                        load(rows, 3 * DIM + c),
                    ];
                    for g in 0..GROUP {
                        let q = _mm512_loadu_ps(q.as_ptr().add(g * DIM + c));
                        for row in 0..4 {
                            sums[g * 4 + row] = _mm512_fmadd_ps(q, key[row], sums[g * 4 + row]);
                        }
                    }
                }
                let sums = add_across(sums);
                let out = out.as_mut_ptr();
                _mm_storeu_ps(out.add(t), _mm512_extractf32x4_ps::<0>(sums));
                _mm_storeu_ps(out.add(TOKENS + t), _mm512_extractf32x4_ps::<1>(sums));
                _mm_storeu_ps(out.add(2 * TOKENS + t), _mm512_extractf32x4_ps::<2>(sums));
                _mm_storeu_ps(out.add(3 * TOKENS + t), _mm512_extractf32x4_ps::<3>(sums));
            }
        }
    }

    /// Element i of the result is the sum of vector i.
    #[target_feature(enable = "avx512f,avx512dq")]
    fn add_across(v: [__m512; 16]) -> __m512 {
        let mut pairs = [_mm512_setzero_ps(); 8];
        for (i, pair) in pairs.iter_mut().enumerate() {
            let (a, b) = (v[2 * i], v[2 * i + 1]);
            *pair = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        }
        let mut fours = [_mm512_setzero_ps(); 4];
        for (i, four) in fours.iter_mut().enumerate() {
            let (a, b) = (_mm512_castps_pd(pairs[2 * i]), _mm512_castps_pd(pairs[2 * i + 1]));
            *four = _mm512_add_ps(
                _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)),
            );
        }
        halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]))
    }

    /// The quarters of a and b, added two by two.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn halves(a: __m512, b: __m512) -> __m512 {
        let even = _mm512_shuffle_f32x4::<0x88>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b))
    }

    /// Half of the dimensions at a time: 4 heads x 4 registers of sums.
    #[target_feature(enable = "avx512f,avx512dq")]
    pub unsafe fn accumulate(w: &[f32; GROUP * TOKENS], values: &[f16], acc: &mut [f32]) {
        assert_eq!(acc.len(), GROUP * DIM);
        for half in [0, DIM / 2] {
            // SAFETY: every row is whole and acc is [GROUP][DIM]; a prefetch may point anywhere.
            unsafe {
                let place = |g: usize, c: usize| g * DIM + half + c * WIDE;
                let mut sums = [[_mm512_setzero_ps(); 4]; GROUP];
                for (g, sums) in sums.iter_mut().enumerate() {
                    for (c, sum) in sums.iter_mut().enumerate() {
                        *sum = _mm512_loadu_ps(acc.as_ptr().add(place(g, c)));
                    }
                }
                for t in 0..values.len() / DIM {
                    let row = values.as_ptr().add(t * DIM + half);
                    _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(AHEAD).cast());
                    _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(AHEAD + 32).cast());
                    let value =
                        [load(row, 0), load(row, WIDE), load(row, 2 * WIDE), load(row, 3 * WIDE)];
                    for (g, sums) in sums.iter_mut().enumerate() {
                        let weight = _mm512_set1_ps(w[g * TOKENS + t]);
                        for (sum, value) in sums.iter_mut().zip(value) {
                            *sum = _mm512_fmadd_ps(weight, value, *sum);
                        }
                    }
                }
                for (g, sums) in sums.iter().enumerate() {
                    for (c, sum) in sums.iter().enumerate() {
                        _mm512_storeu_ps(acc.as_mut_ptr().add(place(g, c)), *sum);
                    }
                }
            }
        }
    }
}
