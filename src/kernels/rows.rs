//! Exact rows: one token's key or value of one KV head, as it is kept in full.
//!
//! | codec | bytes of a row of d elements | error |
//! |---|---|---|
//! | `F32` | 4 d | none |
//! | `F16` | 2 d | 2^-11 relative |
//! | `Int8` | d codes, then an f16 scale for each 16 of them | half a scale, scale = largest magnitude of the 16 / 127 |
//!
//! Numbers are little-endian and rows need no alignment.

use super::convert::f16_at_least;
use super::level::{Level, Tier};
use half::f16;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
mod x86;

/// Neighbouring elements of an int8 row that share a scale. Keys have channels many times larger
/// than the others: with one scale a row, their rounding is everybody's.
pub const SCALE_GROUP: usize = 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum RowCodec {
    F32,
    F16,
    Int8,
}

impl RowCodec {
    /// Bytes of a row of `dim` elements.
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self {
            RowCodec::F32 => 4 * dim,
            RowCodec::F16 => 2 * dim,
            RowCodec::Int8 => dim + 2 * dim.div_ceil(SCALE_GROUP),
        }
    }

    /// Writes `row` into `out`, which is `row_bytes(row.len())` long. Values are finite and at
    /// most twice 65,504 (keys are stored less their mean) for `Int8`, 65,504 for `F16`.
    pub fn encode(self, row: &[f32], out: &mut [u8]) {
        self.encode_at(Level::best(), row, out);
    }

    /// [`RowCodec::encode`] at a given level, for tests and benches: all give the same bytes.
    #[doc(hidden)]
    pub fn encode_at(self, level: Level, row: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), self.row_bytes(row.len()));
        match (self, level.tier()) {
            (RowCodec::F32, _) => {
                for (bytes, value) in out.chunks_exact_mut(4).zip(row) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
            (RowCodec::F16, Tier::Scalar) => {
                for (bytes, value) in out.chunks_exact_mut(2).zip(row) {
                    bytes.copy_from_slice(&f16::from_f32(*value).to_le_bytes());
                }
            }
            (RowCodec::Int8, Tier::Scalar) => encode_int8(row, out),
            // SAFETY: the level proves that the machine has the instructions.
            #[cfg(target_arch = "x86_64")]
            (RowCodec::F16, _) => unsafe { x86::encode_f16_avx2(row, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            (RowCodec::Int8, _) => unsafe { x86::encode_int8_avx2(row, out) },
        }
    }

    /// The values that the bytes of `row` stand for.
    pub fn decode(self, row: &[u8], out: &mut [f32]) {
        self.decode_at(Level::best(), row, out);
    }

    /// [`RowCodec::decode`] at a given level, for tests and benches: all give the same values.
    #[doc(hidden)]
    pub fn decode_at(self, level: Level, row: &[u8], out: &mut [f32]) {
        assert_eq!(row.len(), self.row_bytes(out.len()));
        match level.tier() {
            Tier::Scalar => decode_scalar(self, row, out),
            // SAFETY: the level proves that the machine has the instructions, and the row is whole.
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => unsafe { x86::decode_avx2(self, row, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 => unsafe { x86::decode_avx512(self, row, out) },
        }
    }
}

fn decode_scalar(codec: RowCodec, row: &[u8], out: &mut [f32]) {
    match codec {
        RowCodec::F32 => {
            for (value, bytes) in out.iter_mut().zip(row.chunks_exact(4)) {
                *value = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        RowCodec::F16 => {
            for (value, bytes) in out.iter_mut().zip(row.chunks_exact(2)) {
                *value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            }
        }
        RowCodec::Int8 => {
            let dim = out.len();
            let (codes, scales) = row.split_at(dim);
            let groups = out.chunks_mut(SCALE_GROUP).zip(codes.chunks(SCALE_GROUP));
            for ((values, codes), scale) in groups.zip(scales.chunks_exact(2)) {
                let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f32();
                for (value, code) in values.iter_mut().zip(codes) {
                    *value = f32::from(*code as i8) * scale;
                }
            }
        }
    }
}

/// The scale is rounded up, so that the largest magnitude never needs a code beyond 127. It is 0
/// for zeros only: the least f16 stands in for anything smaller. What no scale reaches, which only a
/// forged state brings, is read back as no number.
fn encode_int8(row: &[f32], out: &mut [u8]) {
    let (codes, scales) = out.split_at_mut(row.len());
    let groups = row.chunks(SCALE_GROUP).zip(codes.chunks_mut(SCALE_GROUP));
    for ((values, codes), scale_bytes) in groups.zip(scales.chunks_exact_mut(2)) {
        let scale = f16_at_least(largest_magnitude(values) / 127.0);
        write_codes(values, scale.to_f32(), codes);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
    }
}

/// Written with integers, since the order of f32 operations would keep the compiler from making
/// vectors of it: magnitudes order as their bit patterns do.
#[inline(always)]
fn largest_magnitude(row: &[f32]) -> f32 {
    f32::from_bits(row.iter().fold(0, |largest, value| largest.max(value.abs().to_bits())))
}

#[inline(always)]
fn write_codes(values: &[f32], scale: f32, codes: &mut [u8]) {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    for (code, value) in codes.iter_mut().zip(values) {
        // 1.5 * 2^23 leaves the whole number, rounded to even, in the lowest bits.
        *code = (value * inverse + 12_582_912.0).to_bits() as u8;
    }
}

/// Some encoded rows, and those that come next: they are asked for meanwhile, one with each row,
/// since they may lie anywhere in memory.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub rows: &'a [&'a [u8]],
    pub next: &'a [&'a [u8]],
}

impl<'a> Rows<'a> {
    /// Some of the rows; those that come next come after the last ones.
    pub fn part(&self, range: Range<usize>) -> Self {
        let is_last = range.end == self.rows.len();
        Self { rows: &self.rows[range], next: if is_last { self.next } else { &[] } }
    }
}

impl<'a> From<&'a [&'a [u8]]> for Rows<'a> {
    fn from(rows: &'a [&'a [u8]]) -> Self {
        Self { rows, next: &[] }
    }
}

impl<'a> From<&'a Vec<&'a [u8]>> for Rows<'a> {
    fn from(rows: &'a Vec<&'a [u8]>) -> Self {
        Self::from(&rows[..])
    }
}

impl<'a, const N: usize> From<&'a [&'a [u8]; N]> for Rows<'a> {
    fn from(rows: &'a [&'a [u8]; N]) -> Self {
        Self::from(&rows[..])
    }
}

/// `out[g * stride + t] = q[g] . rows[t]`, q: `[n_group][dim]`, rows as encoded (a longer slice
/// is read up to its row's end).
pub fn row_scores<'a>(
    codec: RowCodec,
    dim: usize,
    q: &[f32],
    n_group: usize,
    rows: impl Into<Rows<'a>>,
    out: &mut [f32],
    stride: usize,
) {
    row_scores_at(Level::best(), codec, dim, q, n_group, rows, out, stride);
}

/// [`row_scores`] at a given level, for tests and benches.
#[doc(hidden)]
#[allow(clippy::too_many_arguments)]
pub fn row_scores_at<'a>(
    level: Level,
    codec: RowCodec,
    dim: usize,
    q: &[f32],
    n_group: usize,
    rows: impl Into<Rows<'a>>,
    out: &mut [f32],
    stride: usize,
) {
    let rows = rows.into();
    check_rows(codec, dim, rows.rows, n_group, out.len(), stride);
    assert_eq!(q.len(), n_group * dim);
    match level.tier() {
        Tier::Scalar => scores_scalar(codec, dim, q, rows.rows, out, stride),
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::scores_avx2(codec, dim, q, n_group, rows, out, stride) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::scores_avx512(codec, dim, q, n_group, rows, out, stride) },
    }
}

fn scores_scalar(
    codec: RowCodec,
    dim: usize,
    q: &[f32],
    rows: &[&[u8]],
    out: &mut [f32],
    stride: usize,
) {
    let mut values = vec![0.0; dim];
    for (t, row) in rows.iter().enumerate() {
        decode_scalar(codec, &row[..codec.row_bytes(dim)], &mut values);
        for (g, q) in q.chunks_exact(dim).enumerate() {
            out[g * stride + t] = q.iter().zip(&values).map(|(q, value)| q * value).sum();
        }
    }
}

/// `acc[g][..] += sum over t of w[g * stride + t] * rows[t]`, acc: `[n_group][dim]`.
pub fn row_accumulate<'a>(
    codec: RowCodec,
    dim: usize,
    w: &[f32],
    stride: usize,
    n_group: usize,
    rows: impl Into<Rows<'a>>,
    acc: &mut [f32],
) {
    row_accumulate_at(Level::best(), codec, dim, w, stride, n_group, rows, acc);
}

/// [`row_accumulate`] at a given level, for tests and benches.
#[doc(hidden)]
#[allow(clippy::too_many_arguments)]
pub fn row_accumulate_at<'a>(
    level: Level,
    codec: RowCodec,
    dim: usize,
    w: &[f32],
    stride: usize,
    n_group: usize,
    rows: impl Into<Rows<'a>>,
    acc: &mut [f32],
) {
    let rows = rows.into();
    check_rows(codec, dim, rows.rows, n_group, w.len(), stride);
    assert_eq!(acc.len(), n_group * dim);
    match level.tier() {
        Tier::Scalar => accumulate_scalar(codec, dim, w, stride, rows.rows, acc),
        // SAFETY: the level proves that the machine has the instructions; lengths are checked.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::accumulate_avx2(codec, dim, w, stride, n_group, rows, acc) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe {
            x86::accumulate_avx512(codec, dim, w, stride, n_group, rows, acc)
        },
    }
}

fn accumulate_scalar(
    codec: RowCodec,
    dim: usize,
    w: &[f32],
    stride: usize,
    rows: &[&[u8]],
    acc: &mut [f32],
) {
    let mut values = vec![0.0; dim];
    for (t, row) in rows.iter().enumerate() {
        decode_scalar(codec, &row[..codec.row_bytes(dim)], &mut values);
        for (g, acc) in acc.chunks_exact_mut(dim).enumerate() {
            let weight = w[g * stride + t];
            for (acc, value) in acc.iter_mut().zip(&values) {
                *acc += weight * value;
            }
        }
    }
}

/// What the fast paths take for granted: every row whole, and a table of `n_group` lines,
/// `stride` apart, that has a place for each row.
fn check_rows(
    codec: RowCodec,
    dim: usize,
    rows: &[&[u8]],
    n_group: usize,
    table: usize,
    stride: usize,
) {
    assert!(dim > 0);
    assert!(rows.iter().all(|row| row.len() >= codec.row_bytes(dim)), "a row is cut short");
    assert!(n_group == 0 || (n_group - 1) * stride + rows.len() <= table);
    assert!(n_group <= 1 || stride >= rows.len());
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Guarded, Random};
    use super::*;

    const CODECS: [RowCodec; 3] = [RowCodec::F32, RowCodec::F16, RowCodec::Int8];

    /// Every level gives the same bytes and the same values back.
    fn round_trip(codec: RowCodec, row: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0xAA; codec.row_bytes(row.len())];
        codec.encode_at(Level::SCALAR, row, &mut bytes);
        let mut back = vec![f32::NAN; row.len()];
        codec.decode_at(Level::SCALAR, &bytes, &mut back);
        for level in Level::available() {
            let mut again = vec![0x55; bytes.len()];
            codec.encode_at(level, row, &mut again);
            assert_eq!(again, bytes, "{level:?}");
            let mut values = vec![f32::NAN; row.len()];
            codec.decode_at(level, &bytes, &mut values);
            assert_eq!(values, back, "{level:?}");
        }
        back
    }

    #[test]
    fn a_decoded_row_is_within_the_stated_error() {
        let mut random = Random::new(1);
        for dim in [1, 7, 64, 100, 256] {
            for magnitude in [1e-9, 1e-6, 1e-3, 1.0, 300.0, 65_504.0] {
                let row: Vec<f32> = (0..dim).map(|_| random.uniform() * magnitude).collect();
                let largest = row.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                assert_eq!(round_trip(RowCodec::F32, &row), row);
                for (value, back) in row.iter().zip(round_trip(RowCodec::F16, &row)) {
                    assert!((value - back).abs() <= (value.abs() / 2048.0).max(3.0e-8));
                }
                // The scale's own rounding adds 2^-10 of itself, or half the least f16.
                let half = (largest / 254.0 * 1.001).max(3.0e-8);
                for (value, back) in row.iter().zip(round_trip(RowCodec::Int8, &row)) {
                    assert!((value - back).abs() <= half, "{value} {back} of {largest}");
                }
            }
        }
    }

    #[test]
    fn zero_tiny_and_huge_rows_survive_int8() {
        assert_eq!(round_trip(RowCodec::Int8, &[0.0, -0.0, 0.0]), [0.0; 3]);
        assert_eq!(round_trip(RowCodec::Int8, &[1e-40, -1e-40]), [0.0; 2]);
        let scale = f16::from_bits(1).to_f32();
        assert_eq!(round_trip(RowCodec::Int8, &[scale, 127.0 * scale]), [scale, 127.0 * scale]);
        let huge = round_trip(RowCodec::Int8, &[131_008.0, -131_008.0]);
        assert!((huge[0] - 131_008.0).abs() < 600.0 && huge[1] == -huge[0]);
    }

    fn check_scores_and_sums(
        random: &mut Random,
        codec: RowCodec,
        dim: usize,
        n_group: usize,
        n_rows: usize,
    ) {
        let guarded: Vec<Guarded> = (0..n_rows)
            .map(|_| {
                let mut row = Guarded::new(codec.row_bytes(dim));
                codec.encode(&random.values(dim), row.bytes_mut());
                row
            })
            .collect();
        let rows: Vec<&[u8]> = guarded.iter().map(Guarded::bytes).collect();
        // More of them, or fewer, than there are rows.
        let with_next = Rows { rows: &rows, next: &rows[n_rows % 3..] };
        let stride = n_rows + 3;
        let (q, w) = (random.values(n_group * dim), random.values(n_group * stride));
        let before = random.values(n_group * dim);
        let mut right_scores = vec![0.0; n_group * stride];
        let mut right_sums: Vec<f64> = before.iter().map(|value| f64::from(*value)).collect();
        for (t, row) in rows.iter().enumerate() {
            let mut values = vec![0.0; dim];
            codec.decode(row, &mut values);
            for g in 0..n_group {
                for c in 0..dim {
                    let value = f64::from(values[c]);
                    right_scores[g * stride + t] += f64::from(q[g * dim + c]) * value;
                    right_sums[g * dim + c] += f64::from(w[g * stride + t]) * value;
                }
            }
        }
        for level in Level::available() {
            let what = format!("{level:?} {codec:?} {dim} {n_group} {n_rows}");
            let mut scores = vec![7.0; n_group * stride];
            row_scores_at(level, codec, dim, &q, n_group, with_next, &mut scores, stride);
            for (line, right) in scores.chunks(stride).zip(right_scores.chunks(stride)) {
                for (score, right) in line[..n_rows].iter().zip(right) {
                    assert!((f64::from(*score) - right).abs() < 1e-4, "{what}: {score} {right}");
                }
                assert_eq!(line[n_rows..], [7.0; 3], "{what}: written past the rows");
            }
            let mut acc = before.clone();
            row_accumulate_at(level, codec, dim, &w, stride, n_group, with_next, &mut acc);
            for (acc, right) in acc.iter().zip(&right_sums) {
                assert!((f64::from(*acc) - right).abs() < 1e-4, "{what}: {acc} {right}");
            }
        }
    }

    #[test]
    fn scores_and_sums_are_those_of_the_decoded_rows_at_every_level() {
        let mut random = Random::new(2);
        for codec in CODECS {
            for dim in [1, 7, 64, 72, 80, 88, 96, 100, 112, 128, 192, 256] {
                for n_group in [1, 2, 3, 5, 6, 7, 8, 16] {
                    let n_rows = random.bits() as usize % 20;
                    check_scores_and_sums(&mut random, codec, dim, n_group, n_rows);
                }
            }
        }
    }
}
