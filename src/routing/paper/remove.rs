//! Removing sealed tokens.
//!
//! Runs that go whole are left out. A run of which some tokens stay is sealed anew from what is
//! kept of those: its span, where it is still long enough for one, else whole tokens.

use super::{PaperTokens, Placed, Run};
use crate::error::Result;
use crate::kernels::RowCodec;
use crate::pool::Team;
use crate::routing::{OpenRows, RowBytes, SealedTokens, copy_row};

/// The tokens without `first..first + n`.
pub fn without(tokens: &PaperTokens, team: &Team, first: usize, n: usize) -> Result<PaperTokens> {
    let end = first + n;
    let left = |from: usize, to: usize| {
        let gone = to.min(end).saturating_sub(from.max(first));
        to - from - gone
    };
    // Every run that is left, and its number before where it is as it was.
    let mut runs: Vec<(Run, Option<usize>)> = Vec::new();
    for (index, run) in tokens.runs.iter().enumerate() {
        let at = runs.last().map_or(0, |(last, _)| last.end());
        let n_whole = left(run.first, run.span_first());
        let n_span = left(run.span_first(), run.end());
        let is_span = n_span >= tokens.params.span_min || n_span == run.n_span;
        let new = match is_span {
            true => Run { first: at, n_whole, n_span },
            false => Run { first: at, n_whole: n_whole + n_span, n_span: 0 },
        };
        if n_whole + n_span > 0 {
            let is_same = n_whole == run.n_whole && n_span == run.n_span;
            runs.push((new, is_same.then_some(index)));
        }
    }
    let changed = runs.iter().filter(|(_, old)| old.is_none());
    let changed: Vec<Run> = changed.map(|(run, _)| *run).collect();
    let old_token = |token: usize| if token < first { token } else { token + n };
    let surprisal = |token: usize| tokens.surprisal[old_token(token)];
    let rows = RowsWithout { tokens, first, n };
    let made = tokens.make_pieces(team, &rows, 0, &changed, surprisal)?;
    let n_layers = tokens.layers.len();
    let layers = tokens.layers.iter().enumerate().map(|(layer, old)| {
        let mut new = made.iter().skip(layer).step_by(n_layers);
        let pieces = runs.iter().map(|(_, index)| match index {
            Some(index) => Some(old[*index].clone()),
            None => new.next().cloned(),
        });
        pieces.flatten().collect::<Vec<Placed>>()
    });
    let layers = layers.collect();
    let mut changed = tokens.clone();
    changed.layers = layers;
    changed.runs = runs.into_iter().map(|(run, _)| run).collect();
    changed.surprisal.drain(first..end);
    changed.anchors.retain(|&anchor| !(first..end).contains(&(anchor as usize)));
    for anchor in &mut changed.anchors {
        *anchor -= if *anchor as usize >= end { n as u32 } else { 0 };
    }
    Ok(changed)
}

/// Sealed tokens as they are numbered when some are gone, read back so that they can be sealed
/// again.
struct RowsWithout<'a> {
    tokens: &'a PaperTokens,
    first: usize,
    n: usize,
}

impl RowsWithout<'_> {
    fn old_token(&self, token: usize) -> usize {
        if token < self.first { token } else { token + self.n }
    }
}

impl OpenRows for RowsWithout<'_> {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        self.tokens.read(layer, head, self.old_token(token), 1, key, value);
    }

    fn copy_encoded(
        &self,
        codec: RowCodec,
        layer: usize,
        head: usize,
        token: usize,
        out: RowBytes,
    ) -> bool {
        let token = self.old_token(token);
        let is_same = codec == self.tokens.params.resident_codec;
        let row = is_same.then(|| self.tokens.whole_row(layer, head, token)).flatten();
        row.map(|row| copy_row(row, out)).is_some()
    }
}
