//! Moving sealed tokens to other positions.
//!
//! A run that moves whole keeps its piece, with its distance beside it. One that does not is divided
//! first: both parts are sealed anew where they were, from what is kept of their tokens. Rank gates
//! stay as they were when the span was sealed.

use std::collections::HashMap;
use std::sync::Arc;

use super::{PaperTokens, Placed, Run};
use crate::error::Result;
use crate::kernels::RowCodec;
use crate::model::Rotation;
use crate::pool::Team;
use crate::routing::{OpenRows, RowBytes, copy_row};

/// The tokens with `first..first + n` moved by `delta` positions.
pub fn shifted(
    tokens: &PaperTokens,
    team: &Team,
    first: usize,
    n: usize,
    delta: i32,
) -> Result<PaperTokens> {
    let mut changed = tokens.clone();
    divide(&mut changed, team, first)?;
    divide(&mut changed, team, first + n)?;
    let moved = changed.run_of(first)..changed.run_of(first + n);
    let geometry = &tokens.model.geometry;
    let mut rotations: HashMap<i32, Option<Arc<Rotation>>> = HashMap::new();
    for (layer, pieces) in changed.layers.iter_mut().enumerate() {
        let recipe = tokens.recipe(layer)?;
        for piece in &mut pieces[moved.clone()] {
            let shift = piece.shift() + delta;
            let new = || (shift != 0).then(|| Arc::new(Rotation::new(geometry, shift)));
            let rotation = rotations.entry(shift).or_insert_with(new).clone();
            *piece = piece.at(rotation, &recipe.projection);
        }
    }
    Ok(changed)
}

/// Sees to it that a run begins at a token.
fn divide(tokens: &mut PaperTokens, team: &Team, at: usize) -> Result<()> {
    let index = tokens.run_of(at);
    let Some(&run) = tokens.runs.get(index).filter(|run| run.first < at) else { return Ok(()) };
    let span_min = tokens.params.span_min;
    let parts = [(run.first, at), (at, run.end())].map(|(from, to)| {
        let n_span = to.saturating_sub(from.max(run.span_first()));
        // Too few for a span stay whole.
        let n_span = if n_span >= span_min.min(run.n_span) { n_span } else { 0 };
        Run { first: from, n_whole: to - from - n_span, n_span }
    });
    let surprisal = |token: usize| tokens.surprisal[token];
    let rows = StoredRows { tokens, run: index };
    let made = tokens.make_pieces(team, &rows, 0, &parts, surprisal)?;
    let n_layers = tokens.layers.len();
    for layer in 0..n_layers {
        let recipe = tokens.recipe(layer)?;
        let rotation = tokens.layers[layer][index].rotation_shared();
        let new = made.iter().skip(layer).step_by(n_layers);
        let new: Vec<Placed> =
            new.map(|piece| piece.at(rotation.clone(), &recipe.projection)).collect();
        tokens.layers[layer].splice(index..=index, new);
    }
    tokens.runs.splice(index..=index, parts);
    Ok(())
}

/// The tokens of one run as they are stored, wherever they have moved since.
struct StoredRows<'a> {
    tokens: &'a PaperTokens,
    run: usize,
}

impl StoredRows<'_> {
    fn place(&self, layer: usize, token: usize) -> (&Placed, usize) {
        (&self.tokens.layers[layer][self.run], token - self.tokens.runs[self.run].first)
    }
}

impl OpenRows for StoredRows<'_> {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        let (piece, offset) = self.place(layer, token);
        let (n_whole, codec) = (piece.shape.n_whole, piece.shape.whole_codec);
        if offset < n_whole {
            codec.decode(piece.whole_key(head, offset), key);
            codec.decode(piece.whole_value(head, offset), value);
        } else {
            let token = offset - n_whole;
            piece.read_span(head, token..token + 1, false, key, value);
        }
    }

    fn copy_encoded(
        &self,
        codec: RowCodec,
        layer: usize,
        head: usize,
        token: usize,
        out: RowBytes,
    ) -> bool {
        let (piece, offset) = self.place(layer, token);
        let is_same = offset < piece.shape.n_whole && codec == piece.shape.whole_codec;
        if is_same {
            copy_row((piece.whole_key(head, offset), piece.whole_value(head, offset)), out);
        }
        is_same
    }
}
