//! Queries for rows whose positions have moved since they were stored.

use super::{ROWS_AT_ONCE, RowScratch, SoftmaxState, attend_rows};
use crate::kernels::RowCodec;
use crate::model::Rotation;

/// A group's queries turned back by a rotation R, and what the centre mu then adds to each score.
/// Rows are stored as k - mu, and every score leaves out the same q . mu, so that of a moved row is
///
/// ```text
/// q . R k - q . mu = (R^-1 q) . (k - mu) + (R^-1 q - q) . mu
/// ```
#[derive(Default)]
pub struct TurnedQuery {
    /// R^-1 q, `[n_group][key_dim]`.
    pub q: Vec<f32>,
    /// (R^-1 q - q) . mu, `[n_group]`.
    pub bias: Vec<f32>,
    row_bias: Vec<f32>,
}

impl TurnedQuery {
    /// `q`: `[n_group][key_dim]`. `centre` is empty where there is none.
    pub fn turn(&mut self, rotation: &Rotation, centre: &[f32], q: &[f32], n_group: usize) {
        self.q.clear();
        self.q.extend_from_slice(q);
        self.bias.clear();
        let dim = q.len() / n_group;
        for (turned, q) in self.q.chunks_exact_mut(dim).zip(q.chunks_exact(dim)) {
            rotation.undo(turned);
            let terms = turned.iter().zip(q).zip(centre);
            let bias: f64 =
                terms.map(|((t, q), c)| (f64::from(*t) - f64::from(*q)) * f64::from(*c)).sum();
            self.bias.push(bias as f32);
        }
    }

    /// [`attend_rows`] for rows that have moved.
    pub fn attend_rows(
        &mut self,
        codec: RowCodec,
        key_dim: usize,
        keys: &[&[u8]],
        values: &[&[u8]],
        state: &mut SoftmaxState,
        scratch: &mut RowScratch,
    ) {
        let rows = keys.chunks(ROWS_AT_ONCE).zip(values.chunks(ROWS_AT_ONCE));
        for (keys, values) in rows {
            self.row_bias.clear();
            for &bias in &self.bias {
                self.row_bias.resize(self.row_bias.len() + keys.len(), bias);
            }
            let (q, bias) = (&self.q, Some(&self.row_bias[..]));
            attend_rows(codec, key_dim, q, keys, values, bias, state, scratch);
        }
    }
}
