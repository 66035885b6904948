//! What the sealed tokens take, would take, and take at the least.

use super::piece::{Piece, PieceShape, form_bytes};
use super::seal::form_of;
use super::{PaperTokens, Run, demote};
use crate::routing::{Counted, SealedBytes};

/// Resident rows that the cache may hold beyond those it needs, because it reserves in steps.
const RESERVED_ROWS: usize = 16;

impl PaperTokens {
    /// What all of it takes, shared or not.
    pub(super) fn bytes_held(&self) -> SealedBytes {
        self.bytes_beside(&mut Counted::default())
    }

    pub(super) fn bytes_beside(&self, counted: &mut Counted) -> SealedBytes {
        let mut bytes = SealedBytes { metadata: self.token_metadata(), ..Default::default() };
        for piece in self.layers.iter().flatten().filter(|placed| counted.is_new(&placed.piece)) {
            add(&mut bytes, piece_bytes(&piece.shape, piece.slow_bytes()), 1);
        }
        bytes
    }

    /// What surprisal of an exponential distribution gives, whose mean is its sigma: a token is an
    /// anchor with p = e^-(1 + alpha), gaps between anchors are geometric, so a share
    /// (1 - p)^l_min (p l_min + 1 - p) of all tokens lies in compressed spans, of mean length
    /// l_min + (1 - p) / p.
    pub(super) fn bytes_expected(&self, n: usize) -> SealedBytes {
        let p = f64::exp(-1.0 - f64::from(self.params.surprisal_alpha)).max(1e-6);
        let span_min = self.params.span_min as f64;
        let share = (1.0 - p).powf(span_min) * (p * span_min + 1.0 - p);
        let length = (span_min + (1.0 - p) / p).min(self.params.span_max as f64).ceil();
        let n_span_tokens = (n as f64 * share) as usize;
        let n_spans = n_span_tokens.div_ceil(length as usize);
        let mut bytes = SealedBytes { metadata: 4 * n as u64, ..Default::default() };
        let whole = Run { first: 0, n_whole: n - n_span_tokens, n_span: 0 };
        let span = Run { first: 0, n_whole: 0, n_span: length as usize };
        let dims = [self.model.geometry.key_dim, self.model.geometry.value_dim];
        let rank = span.n_span.min(self.params.rank_max).min(dims[0]).min(dims[1]);
        let form = form_of(&self.params, span.n_span, rank, dims);
        let slow_head = form_bytes(form, span.n_span, dims[0], dims[1]);
        for layer in 0..self.layers.len() {
            let whole = self.shape(layer, &whole);
            bytes.resident += whole.whole_bytes() as u64;
            let span = self.shape(layer, &span);
            add(&mut bytes, piece_bytes(&span, slow_head * span.n_kv_heads), n_spans as u64);
        }
        bytes
    }

    /// Of `n` more tokens, as things are and at the least. Nobody knows their surprisal yet. As
    /// things are: the last ones may stay open or whole, the others are as [`Self::bytes_expected`]
    /// has them. At the least: no anchors, so that all but too few for a span are in the longest
    /// spans there are.
    pub(super) fn bytes_of_new(&self, n: usize) -> [u64; 2] {
        if n == 0 {
            return [0; 2];
        }
        let n_open = n.min(self.params.span_min + self.params.block_tokens);
        let whole = |n: usize| {
            let run = Run { first: 0, n_whole: n + RESERVED_ROWS, n_span: 0 };
            let piece = |layer| piece_bytes(&self.shape(layer, &run), 0).fast();
            // Twice what each list needs: they grow by doubling.
            2 * (size_of::<Run>() + 8) as u64 * n as u64
                + (0..self.layers.len()).map(piece).sum::<u64>()
        };
        let full = whole(n_open) + self.bytes_expected(n - n_open).fast();
        let n_spans = n / self.params.span_max.div_ceil(2).max(1) + 1;
        let span = Run { first: 0, n_whole: 0, n_span: 1 };
        let spans = vec![span; n_spans];
        let least = whole(n.min(self.params.span_min)) + self.fast_bytes_of(&spans);
        [full.max(least), least]
    }

    /// Without anchors, but no more than what was not counted before: shared pieces cost nothing
    /// as they are.
    pub(super) fn least_fast_bytes(&self, counted: &mut Counted) -> u64 {
        let held = self.bytes_beside(counted).fast();
        let runs = demote::runs_without(self, self.anchors.len());
        held.min(self.token_metadata() + self.fast_bytes_of(&runs))
    }

    /// Fast-tier bytes of runs, by their sizes alone; without the lists' own.
    pub(super) fn fast_bytes_of(&self, runs: &[Run]) -> u64 {
        let mut bytes = 0;
        for run in runs {
            for layer in 0..self.layers.len() {
                bytes += piece_bytes(&self.shape(layer, run), 0).fast();
            }
        }
        bytes
    }

    /// Bytes of what is kept for every token, besides the pieces.
    pub(super) fn token_metadata(&self) -> u64 {
        let runs = self.runs.capacity() * size_of::<Run>();
        (runs + 4 * (self.surprisal.capacity() + self.anchors.capacity())) as u64
    }
}

/// Bytes of one piece.
fn piece_bytes(shape: &PieceShape, slow: usize) -> SealedBytes {
    SealedBytes {
        resident: shape.whole_bytes() as u64,
        mean: (shape.mean_bytes() + shape.norm_bytes()) as u64,
        metadata: Piece::metadata_bytes(shape.n_kv_heads) as u64,
        slow: slow as u64,
        ..Default::default()
    }
}

fn add(sum: &mut SealedBytes, part: SealedBytes, times: u64) {
    sum.resident += part.resident * times;
    sum.mean += part.mean * times;
    sum.metadata += part.metadata * times;
    sum.slow += part.slow * times;
}
