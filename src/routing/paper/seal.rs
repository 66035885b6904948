//! Sealing: a run of tokens becomes whole rows and a span's summary on the fast tier, and the
//! span's basis on the slow one.

use super::piece::{Piece, PieceShape, SpanForm, SpanHead, form_bytes};
use crate::basis::{Basis, decompose, encode};
use crate::error::Result;
use crate::kernels::RowCodec;
use crate::model::GateMlp;
use crate::params::{BasisCodec, Params};
use crate::routing::OpenRows;
use crate::span::weighted_mean;
use crate::store::{AlignedBytes, SlowStore};
use crate::summary::Projection;
use crate::zoom::gates::rank_gates;

/// Where a run's tokens come from: a layer and the first token's index in the sequence.
pub struct Source<'a> {
    pub rows: &'a dyn OpenRows,
    pub layer: usize,
    pub first: usize,
}

/// What decides a span's form, the same for every run of one layer.
pub struct Recipe<'a> {
    pub params: &'a Params,
    pub projection: Projection<'a>,
    pub gate: Option<&'a GateMlp>,
    pub store: &'a SlowStore,
}

impl Recipe<'_> {
    fn rank_max(&self) -> usize {
        self.gate.map_or(self.params.rank_max, |gate| gate.r_max.min(self.params.rank_max))
    }
}

/// The codec of a span that is kept a token at a time.
fn rows_codec(params: &Params) -> RowCodec {
    match params.basis_codec {
        BasisCodec::Rows(codec) => codec,
        BasisCodec::LowRank(_) => RowCodec::Int8,
    }
}

/// The form of a span of `n_span` tokens whose bases have this rank: low-rank where the host asked
/// for it and it is smaller than int8 rows; f32 factors, which are for tests, always.
pub fn form_of(params: &Params, n_span: usize, rank: usize, dims: [usize; 2]) -> SpanForm {
    let rows = SpanForm::Rows(rows_codec(params));
    let BasisCodec::LowRank(codec) = params.basis_codec else { return rows };
    let low_rank = SpanForm::LowRank { codec, rank };
    let bytes = |form| form_bytes(form, n_span, dims[0], dims[1]);
    if codec == RowCodec::F32 || bytes(low_rank) < bytes(rows) { low_rank } else { rows }
}

/// Seals a run for all KV heads of one layer. `weights` are those of the span's tokens.
pub fn seal_piece(
    shape: PieceShape,
    weights: &[f32],
    source: &Source,
    recipe: &Recipe,
) -> Result<Piece> {
    let mut fast = AlignedBytes::zeroed(shape.fast_bytes())?;
    for head in 0..shape.n_kv_heads {
        write_whole(&shape, source, head, &mut fast);
    }
    let mut piece = Piece { shape, fast, span_heads: Vec::new(), slow: None };
    if shape.n_span == 0 {
        return Ok(piece);
    }
    let mut slow = Vec::new();
    for head in 0..shape.n_kv_heads {
        let rows = SpanRows::read(&shape, source, head);
        let mean_key = weighted_mean(&rows.keys, shape.key_dim, weights);
        let mean_value = weighted_mean(&rows.values, shape.value_dim, weights);
        write_summary(&mut piece, head, &mean_key, &mean_value, &recipe.projection);
        let start = slow.len();
        let form = write_span(&shape, source, head, &rows, &mean_key, recipe, &mut slow)?;
        piece.span_heads.push(SpanHead { form, start });
    }
    let segment = recipe.store.append(slow.len(), |bytes| bytes.copy_from_slice(&slow))?;
    piece.slow = Some(segment);
    Ok(piece)
}

/// One KV head's tokens of a span as f32.
struct SpanRows {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl SpanRows {
    fn read(shape: &PieceShape, source: &Source, head: usize) -> Self {
        let mut keys = vec![0.0; shape.n_span * shape.key_dim];
        let mut values = vec![0.0; shape.n_span * shape.value_dim];
        let first = source.first + shape.n_whole;
        let rows = keys.chunks_mut(shape.key_dim).zip(values.chunks_mut(shape.value_dim));
        for (t, (key, value)) in rows.enumerate() {
            source.rows.read(source.layer, head, first + t, key, value);
        }
        Self { keys, values }
    }
}

/// Writes one token's key and value. Bytes that already stand in the right codec are copied:
/// encoding them again would round twice.
fn write_row(
    source: &Source,
    codec: RowCodec,
    head: usize,
    token: usize,
    dims: [usize; 2],
    out: (&mut [u8], &mut [u8]),
) {
    let bytes = (&mut *out.0, &mut *out.1);
    if source.rows.copy_encoded(codec, source.layer, head, token, bytes) {
        return;
    }
    let (mut key, mut value) = (vec![0.0; dims[0]], vec![0.0; dims[1]]);
    source.rows.read(source.layer, head, token, &mut key, &mut value);
    codec.encode(&key, out.0);
    codec.encode(&value, out.1);
}

fn write_whole(shape: &PieceShape, source: &Source, head: usize, fast: &mut [u8]) {
    let dims = [shape.key_dim, shape.value_dim];
    for token in 0..shape.n_whole {
        let (key, value) = shape.whole(head, token);
        let (key, value) = fast[key.start..value.end].split_at_mut(key.len());
        write_row(source, shape.whole_codec, head, source.first + token, dims, (key, value));
    }
}

/// Means in their codec, and the norms of the mean key as it is stored: the routing reads that.
fn write_summary(
    piece: &mut Piece,
    head: usize,
    mean_key: &[f32],
    mean_value: &[f32],
    projection: &Projection,
) {
    let shape = piece.shape;
    let (key_at, value_at) = shape.mean(head);
    shape.mean_codec.encode(mean_key, &mut piece.fast[key_at.clone()]);
    shape.mean_codec.encode(mean_value, &mut piece.fast[value_at]);
    let mut stored = vec![0.0; shape.key_dim];
    shape.mean_codec.decode(&piece.fast[key_at], &mut stored);
    let group = shape.n_heads / shape.n_kv_heads;
    for query_head in head * group..(head + 1) * group {
        let norm = projection.norm(query_head, &stored);
        piece.fast[shape.norm(query_head)].copy_from_slice(&norm.to_le_bytes());
    }
}

fn write_span(
    shape: &PieceShape,
    source: &Source,
    head: usize,
    rows: &SpanRows,
    mean_key: &[f32],
    recipe: &Recipe,
    slow: &mut Vec<u8>,
) -> Result<SpanForm> {
    let dims = [shape.key_dim, shape.value_dim];
    if let BasisCodec::LowRank(codec) = recipe.params.basis_codec {
        let [keys, values] = bases(rows, dims, recipe)?;
        let form = form_of(recipe.params, shape.n_span, keys.rank, dims);
        if matches!(form, SpanForm::LowRank { .. }) {
            let gates = rank_gates(recipe.gate, &keys.singular, mean_key)?;
            slow.extend(gates.iter().flat_map(|gate| gate.to_le_bytes()));
            encode(&keys, codec, slow);
            encode(&values, codec, slow);
            return Ok(form);
        }
    }
    let codec = rows_codec(recipe.params);
    let (key_bytes, value_bytes) = (codec.row_bytes(dims[0]), codec.row_bytes(dims[1]));
    for token in 0..shape.n_span {
        let start = slow.len();
        slow.resize(start + key_bytes + value_bytes, 0);
        let out = slow[start..].split_at_mut(key_bytes);
        write_row(source, codec, head, source.first + shape.n_whole + token, dims, out);
    }
    Ok(SpanForm::Rows(codec))
}

/// Bases of keys and values, of one rank: they share their gates.
fn bases(rows: &SpanRows, dims: [usize; 2], recipe: &Recipe) -> Result<[Basis; 2]> {
    let mut keys = decompose(&rows.keys, dims[0], recipe.rank_max())?;
    let mut values = decompose(&rows.values, dims[1], recipe.rank_max())?;
    let bound = recipe.params.low_rank_error;
    let rank = keys.rank_within(bound).max(values.rank_within(bound));
    let rank = rank.min(keys.rank).min(values.rank);
    keys.truncate(rank);
    values.truncate(rank);
    Ok([keys, values])
}
