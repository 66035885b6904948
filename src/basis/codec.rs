//! How a basis is stored: f32, f16, or int8 with scales.
//!
//! Bytes, little-endian, without a header; the [`BasisShape`] says how to read them:
//!
//! ```text
//! s       f32 [rank]
//! scale   f32 [rank]            int8 only: scale of U's column times scale of V's row
//! U       number [tokens][rank]
//! V^T     number [rank][dim]
//! ```
//!
//! In int8 each column of U and each row of V^T has its own symmetric scale, max|x| / 127. Only
//! their product is ever needed.

use super::Basis;
use crate::kernels::RowCodec;
use half::f16;
use std::ops::Range;

/// Bytes of one number. The scales of int8 stand apart, not after each row as in a row of its own.
fn number_bytes(codec: RowCodec) -> usize {
    match codec {
        RowCodec::F32 => 4,
        RowCodec::F16 => 2,
        RowCodec::Int8 => 1,
    }
}

/// What the bytes of a stored basis hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BasisShape {
    pub codec: RowCodec,
    pub tokens: usize,
    pub dim: usize,
    pub rank: usize,
}

impl BasisShape {
    pub fn of(basis: &Basis, codec: RowCodec) -> Self {
        Self { codec, tokens: basis.tokens, dim: basis.dim, rank: basis.rank }
    }

    /// Bytes of the stored form.
    pub fn bytes(&self) -> usize {
        let scales = if self.codec == RowCodec::Int8 { 2 } else { 1 };
        self.rank * (4 * scales + number_bytes(self.codec) * (self.tokens + self.dim))
    }

    /// Where the singular values end, U begins and V^T begins.
    fn offsets(&self) -> (usize, usize, usize) {
        let singular = 4 * self.rank;
        let left = if self.codec == RowCodec::Int8 { 2 * singular } else { singular };
        (singular, left, left + number_bytes(self.codec) * self.tokens * self.rank)
    }
}

/// Bytes of a span's K and V stored a token at a time in int8, one f16 scale a row: what a basis
/// has to undercut. 2d + 4 a token where keys and values have the same dimension.
pub fn token_bytes(tokens: usize, key_dim: usize, value_dim: usize) -> usize {
    tokens * (key_dim + value_dim + 4)
}

/// Appends the stored form of `basis` to `out`; [`BasisShape::bytes`] of them.
pub fn encode(basis: &Basis, codec: RowCodec, out: &mut Vec<u8>) {
    let put_f32 = |out: &mut Vec<u8>, values: &[f32]| {
        out.extend(values.iter().flat_map(|x| x.to_le_bytes()));
    };
    put_f32(out, &basis.singular);
    match codec {
        RowCodec::F32 => {
            put_f32(out, &basis.left);
            put_f32(out, &basis.right);
        }
        RowCodec::F16 => {
            for values in [&basis.left, &basis.right] {
                out.extend(values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()));
            }
        }
        RowCodec::Int8 => {
            let scale = |largest: f32| if largest > 0.0 { largest / 127.0 } else { 1.0 };
            let mut left_scale = vec![0f32; basis.rank];
            for row in basis.left.chunks_exact(basis.rank) {
                left_scale.iter_mut().zip(row).for_each(|(s, x)| *s = s.max(x.abs()));
            }
            left_scale.iter_mut().for_each(|s| *s = scale(*s));
            let right_scale: Vec<f32> = basis
                .right
                .chunks_exact(basis.dim)
                .map(|row| scale(row.iter().fold(0f32, |m, x| m.max(x.abs()))))
                .collect();
            let product: Vec<f32> =
                left_scale.iter().zip(&right_scale).map(|(l, r)| l * r).collect();
            put_f32(out, &product);
            let quantise = |x: f32, scale: f32| (x / scale).round() as i8 as u8;
            for row in basis.left.chunks_exact(basis.rank) {
                out.extend(row.iter().zip(&left_scale).map(|(&x, &s)| quantise(x, s)));
            }
            for (row, &s) in basis.right.chunks_exact(basis.dim).zip(&right_scale) {
                out.extend(row.iter().map(|&x| quantise(x, s)));
            }
        }
    }
}

/// Rebuilds some tokens of a stored basis, U diag(gate s) V^T, into `out` (`[tokens][dim]`); one gate
/// a direction.
pub fn rebuild(
    shape: &BasisShape,
    bytes: &[u8],
    gates: &[f32],
    tokens: Range<usize>,
    out: &mut [f32],
) {
    assert_eq!(bytes.len(), shape.bytes());
    assert_eq!(gates.len(), shape.rank);
    assert!(tokens.start <= tokens.end && tokens.end <= shape.tokens);
    assert_eq!(out.len(), tokens.len() * shape.dim);
    let (singular_end, left_at, right_at) = shape.offsets();
    let mut factors: Vec<f32> =
        read_f32(&bytes[..singular_end]).zip(gates).map(|(s, g)| s * g).collect();
    if shape.codec == RowCodec::Int8 {
        let scales = read_f32(&bytes[singular_end..left_at]);
        factors.iter_mut().zip(scales).for_each(|(f, scale)| *f *= scale);
    }
    let left_row = number_bytes(shape.codec) * shape.rank;
    let left = &bytes[left_at + tokens.start * left_row..left_at + tokens.end * left_row];
    let left = read_numbers(shape.codec, left);
    let right = read_numbers(shape.codec, &bytes[right_at..]);
    // A stored basis has at least one direction.
    let rows = out.chunks_exact_mut(shape.dim).zip(left.chunks_exact(shape.rank.max(1)));
    for (row, coefficients) in rows {
        row.fill(0.0);
        let directions = right.chunks_exact(shape.dim);
        for ((&u, &factor), direction) in coefficients.iter().zip(&factors).zip(directions) {
            let along = u * factor;
            row.iter_mut().zip(direction).for_each(|(x, v)| *x += along * v);
        }
    }
}

fn read_f32(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b))
}

/// Numbers as stored, int8 without its scales.
fn read_numbers(codec: RowCodec, bytes: &[u8]) -> Vec<f32> {
    match codec {
        RowCodec::F32 => read_f32(bytes).collect(),
        RowCodec::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect()
        }
        RowCodec::Int8 => bytes.iter().map(|&b| f32::from(b as i8)).collect(),
    }
}
