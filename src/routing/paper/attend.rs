//! Attend: whole tokens, a coarse row for each span, and the tokens of the spans that were zoomed,
//! in one softmax.

use super::Placed;
use super::plan::UnitPlan;
use crate::attend::{ROWS_AT_ONCE, attend_rows};
use crate::kernels::RowCodec;
use crate::zoom::rows::{coarse_bias, rebuilt_bias};

/// The sealed tokens of one KV head.
#[derive(Clone, Copy)]
pub struct HeadPieces<'a> {
    pub pieces: &'a [Placed],
    /// Those that have a span.
    pub spans: &'a [usize],
    pub head: usize,
}

/// The sealed tokens' part of a unit's attention, into the unit's own state.
pub fn attend_unit(unit: &mut UnitPlan, sealed: HeadPieces, q: &[f32], n_group: usize) {
    let Some(piece) = sealed.pieces.first() else { return };
    unit.scratch.state.reset(n_group, piece.shape.value_dim);
    whole(unit, sealed, q);
    // Before the first route there are no zoomed spans to speak of.
    if unit.zoomed.len() == n_group {
        coarse(unit, sealed, q, n_group);
        for index in 0..unit.rebuilt.len() {
            rebuilt(unit, sealed, unit.rebuilt[index], q, n_group);
        }
    }
}

fn whole(unit: &mut UnitPlan, sealed: HeadPieces, q: &[f32]) {
    let scratch = &mut unit.scratch;
    let shape = sealed.pieces[0].shape;
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for alike in sealed.pieces.chunk_by(|a, b| a.shift() == b.shift()) {
        let q = turned(&alike[0], q, &mut scratch.turned);
        let mut tokens =
            alike.iter().flat_map(|piece| (0..piece.shape.n_whole).map(move |t| (piece, t)));
        loop {
            keys.clear();
            values.clear();
            for (piece, token) in tokens.by_ref().take(ROWS_AT_ONCE) {
                keys.push(piece.whole_key(sealed.head, token));
                values.push(piece.whole_value(sealed.head, token));
            }
            if keys.is_empty() {
                break;
            }
            let (state, rows) = (&mut scratch.state, &mut scratch.rows);
            attend_rows(shape.whole_codec, shape.key_dim, q, &keys, &values, None, state, rows);
        }
    }
}

/// The group's queries as the piece's rows see them. Keys are not centred, so nothing is added.
fn turned<'a>(piece: &Placed, q: &'a [f32], room: &'a mut Vec<f32>) -> &'a [f32] {
    let Some(rotation) = piece.rotation() else { return q };
    room.clear();
    room.extend_from_slice(q);
    room.chunks_exact_mut(piece.shape.key_dim).for_each(|q| rotation.undo(q));
    room
}

fn coarse(unit: &mut UnitPlan, sealed: HeadPieces, q: &[f32], n_group: usize) {
    let scratch = &mut unit.scratch;
    let shape = sealed.pieces[0].shape;
    let shift = |span: &usize| sealed.pieces[*span].shift();
    let alike = sealed.spans.chunk_by(|a, b| shift(a) == shift(b));
    let mut first = 0;
    for spans in alike.flat_map(|spans| spans.chunks(ROWS_AT_ONCE)) {
        let pieces = || spans.iter().map(|&i| &sealed.pieces[i]);
        let keys: Vec<&[u8]> = pieces().map(|piece| piece.mean_key(sealed.head)).collect();
        let values: Vec<&[u8]> = pieces().map(|piece| piece.mean_value(sealed.head)).collect();
        scratch.bias.clear();
        for zoomed in &unit.zoomed[..n_group] {
            scratch.bias.extend(pieces().enumerate().map(|(i, piece)| {
                let zooms = zoomed.binary_search(&(first + i)).is_ok();
                coarse_bias(piece.shape.n_span, zooms)
            }));
        }
        let q = turned(&sealed.pieces[spans[0]], q, &mut scratch.turned);
        let (state, rows, bias) = (&mut scratch.state, &mut scratch.rows, Some(&scratch.bias[..]));
        attend_rows(shape.mean_codec, shape.key_dim, q, &keys, &values, bias, state, rows);
        first += spans.len();
    }
}

/// The tokens of one zoomed span, for every head of the group: closed, not absent, in those that
/// did not zoom it.
fn rebuilt(unit: &mut UnitPlan, sealed: HeadPieces, span: usize, q: &[f32], n_group: usize) {
    let scratch = &mut unit.scratch;
    let piece = &sealed.pieces[sealed.spans[span]];
    let (n, head, shape) = (piece.shape.n_span, sealed.head, piece.shape);
    scratch.bias.clear();
    for zoomed in &unit.zoomed[..n_group] {
        let bias = rebuilt_bias(zoomed.binary_search(&span).is_ok());
        scratch.bias.resize(scratch.bias.len() + n, bias);
    }
    let (mut keys, mut values) = (Vec::with_capacity(n), Vec::with_capacity(n));
    let mut codec = RowCodec::F32;
    for token in 0..n {
        let Some((row_codec, key, value)) = piece.span_row(head, token) else { break };
        codec = row_codec;
        keys.push(key);
        values.push(value);
    }
    if keys.is_empty() {
        scratch.keys.resize(n * shape.key_dim, 0.0);
        scratch.values.resize(n * shape.value_dim, 0.0);
        piece.read_span(head, 0..n, true, &mut scratch.keys, &mut scratch.values);
        encode_rows(&scratch.keys, &mut scratch.key_bytes);
        encode_rows(&scratch.values, &mut scratch.value_bytes);
        keys.extend(scratch.key_bytes.chunks_exact(codec.row_bytes(shape.key_dim)));
        values.extend(scratch.value_bytes.chunks_exact(codec.row_bytes(shape.value_dim)));
    }
    let q = turned(piece, q, &mut scratch.turned);
    let (state, rows, bias) = (&mut scratch.state, &mut scratch.rows, Some(&scratch.bias[..]));
    attend_rows(codec, shape.key_dim, q, &keys, &values, bias, state, rows);
}

/// Rows of f32 are their numbers, one after the other, whatever their length.
fn encode_rows(rows: &[f32], out: &mut Vec<u8>) {
    out.resize(RowCodec::F32.row_bytes(rows.len()), 0);
    RowCodec::F32.encode(rows, out);
}
