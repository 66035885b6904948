//! Route: the gate of every span for every query head, and the spans that each head zooms.

use super::Placed;
use super::plan::UnitPlan;
use crate::kernels::row_scores;
use crate::summary::{Projection, relevance};
use crate::zoom::budget::{Candidate, select, union};

/// What all units of one layer route by.
pub struct Router<'a> {
    pub pieces: &'a [Placed],
    /// Those that have a span.
    pub spans: &'a [usize],
    pub projection: Projection<'a>,
    /// tau, `[n_heads]`.
    pub threshold: &'a [f32],
    pub attention_scale: f32,
    pub fetch_budget: Option<usize>,
}

impl Router<'_> {
    /// Routes the heads of one unit, `q` `[n_group][key_dim]` multiplied by the attention scale.
    pub fn route(&self, unit: &mut UnitPlan, kv_head: usize, q: &[f32], n_group: usize) {
        let Some(&first_span) = self.spans.first() else { return };
        let shape = self.pieces[first_span].shape;
        let (n_spans, key_dim) = (self.spans.len(), shape.key_dim);
        let scratch = &mut unit.scratch;
        scratch.folded.clear();
        for (g, q) in q.chunks_exact(key_dim).enumerate() {
            let raw: Vec<f32> = q.iter().map(|x| x / self.attention_scale).collect();
            scratch.folded.extend(self.projection.fold_query(kv_head * n_group + g, &raw));
        }
        scratch.products.resize(n_group * n_spans, 0.0);
        let means: Vec<&[u8]> =
            self.spans.iter().map(|&i| self.pieces[i].mean_key(kv_head)).collect();
        let (codec, folded) = (shape.mean_codec, &scratch.folded);
        row_scores(codec, key_dim, folded, n_group, &means, &mut scratch.products, n_spans);
        for (span, &piece) in self.spans.iter().enumerate() {
            // folded . R k = (R^-1 folded) . k
            let Some(rotation) = self.pieces[piece].rotation() else { continue };
            scratch.turned.clear();
            scratch.turned.extend_from_slice(&scratch.folded);
            scratch.turned.chunks_exact_mut(key_dim).for_each(|folded| rotation.undo(folded));
            let (folded, out) = (&scratch.turned, &mut scratch.products[span..]);
            row_scores(codec, key_dim, folded, n_group, &means[span..=span], out, n_spans);
        }

        // The rows that a head attends even if it zooms nothing are not counted against the fetch
        // budget: it is the paper's budget less residents and compressed spans. So a budget holds
        // however long the sequence grows, and 0 means coarse rows only.
        let budget = self.fetch_budget.map(|extra| n_spans.saturating_add(extra));
        for (g, products) in scratch.products.chunks_exact(n_spans).enumerate() {
            let query_head = kv_head * n_group + g;
            let candidate = |(&piece, &product): (&usize, &f32)| {
                let piece = &self.pieces[piece];
                let tokens = piece.shape.n_span;
                let gate = relevance(product, piece.routing_norm(query_head), tokens);
                Candidate { gate, tokens }
            };
            let candidates: Vec<Candidate> =
                self.spans.iter().zip(products).map(candidate).collect();
            unit.zoomed.push(select(&candidates, self.threshold[query_head], 0, budget));
        }
        unit.rebuilt = union(unit.zoomed.iter().map(Vec::as_slice));
        unit.fetched = unit.rebuilt.iter().map(|&s| self.pieces[self.spans[s]].shape.n_span).sum();
    }
}
