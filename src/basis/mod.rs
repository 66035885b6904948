//! The basis of a span: a truncated SVD of its keys or values (paper, "low-rank span basis").
//!
//! Rows A (tokens x dim) become U diag(s) V^T of rank min(tokens, dim, r_max). Zooming rebuilds the
//! tokens as U diag(g s) V^T, g the rank gates of [`crate::zoom`].

mod codec;

pub use codec::{BasisShape, encode, rebuild, token_bytes};

use crate::error::{Result, fail};
use nalgebra::{DMatrix, SymmetricEigen};

/// U diag(s) V^T. Columns of U and rows of V^T are of length 1, or 0 where their singular value is.
#[derive(Clone, Debug, PartialEq)]
pub struct Basis {
    pub tokens: usize,
    pub dim: usize,
    pub rank: usize,
    /// U, `[tokens][rank]`.
    pub left: Vec<f32>,
    /// s, `[rank]`, falling.
    pub singular: Vec<f32>,
    /// V^T, `[rank][dim]`.
    pub right: Vec<f32>,
    /// |A - U diag(s) V^T| / |A| in the Frobenius norm at ranks 1 to `rank`, before any codec; 0
    /// for A = 0.
    pub errors: Vec<f32>,
}

impl Basis {
    /// The least rank whose error is at most `bound`; the whole rank where none is, or where
    /// `bound` is 0.
    pub fn rank_within(&self, bound: f32) -> usize {
        let reached = self.errors.iter().position(|&error| bound > 0.0 && error <= bound);
        reached.map_or(self.rank, |index| index + 1)
    }

    /// Keeps the first `rank` directions.
    pub fn truncate(&mut self, rank: usize) {
        if rank >= self.rank {
            return;
        }
        let old = self.rank;
        self.left = self.left.chunks_exact(old).flat_map(|row| &row[..rank]).copied().collect();
        self.right.truncate(rank * self.dim);
        self.singular.truncate(rank);
        self.errors.truncate(rank);
        self.rank = rank;
    }
}

/// Decomposes `rows` (`[tokens][dim]`) to rank min(tokens, dim, r_max).
///
/// By the Gram matrix of the smaller side and its symmetric eigen-decomposition, in f64: squaring
/// costs half of the digits, and half of f64's is still f32's.
pub fn decompose(rows: &[f32], dim: usize, r_max: usize) -> Result<Basis> {
    if dim == 0 || rows.is_empty() || !rows.len().is_multiple_of(dim) || r_max == 0 {
        fail!(
            Shape,
            "a basis of {} numbers in rows of {dim} at rank {r_max} was asked for, expected at least \
             one whole row and rank 1",
            rows.len()
        );
    }
    let tokens = rows.len() / dim;
    let values: Vec<f64> = rows.iter().map(|&x| f64::from(x)).collect();
    let by_token = tokens <= dim;
    let side = tokens.min(dim);
    let gram = if by_token { gram_of_rows(&values, dim) } else { gram_of_columns(&values, dim) };
    let energy = gram.trace();
    // The iteration converges in a few steps an eigenvalue; the limit is for what is not a number.
    let Some(eigen) = SymmetricEigen::try_new(gram, f64::EPSILON, 200 * side) else {
        fail!(
            Internal,
            "the eigen-decomposition of a span of {tokens} tokens x {dim} did not converge"
        );
    };
    let mut order: Vec<usize> = (0..side).collect();
    order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));

    let most = side.min(r_max);
    let mut basis = Basis {
        tokens,
        dim,
        rank: most,
        left: Vec::new(),
        singular: Vec::with_capacity(most),
        right: Vec::with_capacity(most * dim),
        errors: Vec::with_capacity(most),
    };
    let mut left_columns: Vec<Vec<f64>> = Vec::with_capacity(most);
    let mut kept = 0f64;
    for &index in &order[..most] {
        let known: Vec<f64> = eigen.eigenvectors.column(index).iter().copied().collect();
        // The other side is A^T u or A v, of length s: more exact than the root of an eigenvalue,
        // which near 0 is all rounding.
        let mut other =
            if by_token { combine_rows(&values, dim, &known) } else { times(&values, dim, &known) };
        let s = other.iter().map(|x| x * x).sum::<f64>().sqrt();
        let inverse = if s > 0.0 { 1.0 / s } else { 0.0 };
        other.iter_mut().for_each(|x| *x *= inverse);
        let (left, right) = if by_token { (known, other) } else { (other, known) };
        left_columns.push(left);
        basis.right.extend(right.iter().map(|&x| x as f32));
        basis.singular.push(s as f32);
        kept += s * s;
        let rest = if energy > 0.0 { (energy - kept).max(0.0) / energy } else { 0.0 };
        basis.errors.push(rest.sqrt() as f32);
    }
    basis.left = (0..tokens)
        .flat_map(|token| left_columns.iter().map(move |column| column[token] as f32))
        .collect();
    Ok(basis)
}

/// A A^T.
fn gram_of_rows(values: &[f64], dim: usize) -> DMatrix<f64> {
    let rows: Vec<&[f64]> = values.chunks_exact(dim).collect();
    let mut gram = DMatrix::zeros(rows.len(), rows.len());
    for i in 0..rows.len() {
        for j in 0..=i {
            let product = dot(rows[i], rows[j]);
            gram[(i, j)] = product;
            gram[(j, i)] = product;
        }
    }
    gram
}

/// A^T A.
fn gram_of_columns(values: &[f64], dim: usize) -> DMatrix<f64> {
    let mut columns = vec![0f64; dim * dim];
    for row in values.chunks_exact(dim) {
        for (j, (column, &b)) in columns.chunks_exact_mut(dim).zip(row).enumerate() {
            column[..=j].iter_mut().zip(row).for_each(|(sum, &a)| *sum += a * b);
        }
    }
    DMatrix::from_fn(dim, dim, |i, j| columns[i.max(j) * dim + i.min(j)])
}

/// Eight sums side by side: one alone waits for each addition.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0f64; 8];
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    for (x, y) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum::<f64>()
}

/// A^T u.
fn combine_rows(values: &[f64], dim: usize, weights: &[f64]) -> Vec<f64> {
    let mut sum = vec![0f64; dim];
    for (row, &w) in values.chunks_exact(dim).zip(weights) {
        sum.iter_mut().zip(row).for_each(|(s, &x)| *s += w * x);
    }
    sum
}

/// A v.
fn times(values: &[f64], dim: usize, vector: &[f64]) -> Vec<f64> {
    values.chunks_exact(dim).map(|row| dot(row, vector)).collect()
}

#[cfg(test)]
mod tests;
