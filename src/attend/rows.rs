//! Exact attention of a group of query heads over encoded rows.

use super::SoftmaxState;
use crate::kernels::{RowCodec, Rows, exp_minus, max, row_accumulate, row_scores};

/// Rows whose weights are computed before they are summed: enough to amortise a rescaling of the
/// output, few enough to stay in the first-level cache.
pub const ROWS_AT_ONCE: usize = 64;

/// Buffers of [`attend_rows`], kept by the caller.
#[derive(Default)]
pub struct RowScratch {
    weights: Vec<f32>,
}

/// Adds rows to a state: scores are `q . key` (`q`: `[n_group][key_dim]`, already multiplied by the
/// attention scale), plus `bias[g * rows + t]` where there is one.
#[allow(clippy::too_many_arguments, reason = "one row is a key and a value, each with its shape")]
pub fn attend_rows<'a>(
    codec: RowCodec,
    key_dim: usize,
    q: &[f32],
    keys: impl Into<Rows<'a>>,
    values: impl Into<Rows<'a>>,
    bias: Option<&[f32]>,
    state: &mut SoftmaxState,
    scratch: &mut RowScratch,
) {
    let (n_group, value_dim) = (state.n_group(), state.value_dim());
    scratch.weights.resize(n_group * ROWS_AT_ONCE, 0.0);
    let weights = &mut scratch.weights[..];
    let (keys, values) = (keys.into(), values.into());
    let n_rows = keys.rows.len();
    let mut start = 0;
    while start < n_rows {
        let n = (n_rows - start).min(ROWS_AT_ONCE);
        let keys = keys.part(start..start + n);
        row_scores(codec, key_dim, q, n_group, keys, weights, ROWS_AT_ONCE);
        for g in 0..n_group {
            let weights = &mut weights[g * ROWS_AT_ONCE..][..n];
            if let Some(bias) = bias {
                for (w, b) in weights.iter_mut().zip(&bias[g * n_rows + start..]) {
                    *w += b;
                }
            }
            let m = max(weights);
            state.raise(g, m);
            state.l[g] += exp_minus(weights, state.m[g]);
        }
        let values = values.part(start..start + n);
        row_accumulate(codec, value_dim, weights, ROWS_AT_ONCE, n_group, values, &mut state.o);
        start += n;
    }
}
