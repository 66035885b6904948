//! What one layer keeps of a run of sealed tokens.

use std::ops::Range;

use crate::basis::{BasisShape, rebuild};
use crate::kernels::RowCodec;
use crate::store::{AlignedBytes, Segment, Stored};

/// Sizes from which the place of everything on the fast tier follows.
///
/// One run of bytes: for every KV head and whole token the key, then the value (encoded rows);
/// then, where there is a span, for every KV head its mean key and mean value (encoded rows); then
/// for every query head its routing norm |W k_S| (f32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceShape {
    pub n_whole: usize,
    pub n_span: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub whole_codec: RowCodec,
    pub mean_codec: RowCodec,
}

impl PieceShape {
    fn row(&self, codec: RowCodec, start: usize, index: usize) -> (Range<usize>, Range<usize>) {
        let (key, value) = (codec.row_bytes(self.key_dim), codec.row_bytes(self.value_dim));
        let start = start + index * (key + value);
        (start..start + key, start + key..start + key + value)
    }

    /// Where key and value of a whole token are.
    pub fn whole(&self, head: usize, token: usize) -> (Range<usize>, Range<usize>) {
        self.row(self.whole_codec, 0, head * self.n_whole + token)
    }

    /// Where the span's mean key and mean value are.
    pub fn mean(&self, head: usize) -> (Range<usize>, Range<usize>) {
        self.row(self.mean_codec, self.whole_bytes(), head)
    }

    pub fn norm(&self, query_head: usize) -> Range<usize> {
        let start = self.whole_bytes() + self.mean_bytes() + 4 * query_head;
        start..start + 4
    }

    pub fn whole_bytes(&self) -> usize {
        self.whole(self.n_kv_heads, 0).0.start
    }

    pub fn mean_bytes(&self) -> usize {
        let rows = if self.n_span > 0 { self.n_kv_heads } else { 0 };
        self.row(self.mean_codec, 0, rows).0.start
    }

    pub fn norm_bytes(&self) -> usize {
        if self.n_span > 0 { 4 * self.n_heads } else { 0 }
    }

    pub fn fast_bytes(&self) -> usize {
        self.whole_bytes() + self.mean_bytes() + self.norm_bytes()
    }
}

/// How the slow tier keeps one KV head's tokens of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanForm {
    /// For every token the key, then the value.
    Rows(RowCodec),
    /// Rank gates (f32), then the basis of the keys, then that of the values.
    LowRank { codec: RowCodec, rank: usize },
}

/// One KV head's part of a piece's slow bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanHead {
    pub form: SpanForm,
    pub start: usize,
}

/// One layer's share of a run; immutable once made.
pub struct Piece {
    pub shape: PieceShape,
    pub fast: AlignedBytes,
    /// `[KV head]`, none without a span.
    pub span_heads: Vec<SpanHead>,
    pub slow: Option<Segment>,
}

impl Piece {
    pub fn whole_key(&self, head: usize, token: usize) -> &[u8] {
        &self.fast[self.shape.whole(head, token).0]
    }

    pub fn whole_value(&self, head: usize, token: usize) -> &[u8] {
        &self.fast[self.shape.whole(head, token).1]
    }

    pub fn mean_key(&self, head: usize) -> &[u8] {
        &self.fast[self.shape.mean(head).0]
    }

    pub fn mean_value(&self, head: usize) -> &[u8] {
        &self.fast[self.shape.mean(head).1]
    }

    pub fn norm(&self, query_head: usize) -> f32 {
        let bytes = &self.fast[self.shape.norm(query_head)];
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    pub fn slow_bytes(&self) -> usize {
        self.slow.as_ref().map_or(0, |segment| segment.len())
    }

    /// Bookkeeping, beyond the two tiers' bytes.
    pub fn metadata_bytes(n_kv_heads: usize) -> usize {
        size_of::<Self>() + size_of::<std::sync::Arc<Self>>() + n_kv_heads * size_of::<SpanHead>()
    }

    /// Encoded key and value of a span's token where they are kept as rows.
    pub fn span_row(&self, head: usize, token: usize) -> Option<(RowCodec, &[u8], &[u8])> {
        let span_head = self.span_heads.get(head)?;
        let SpanForm::Rows(codec) = span_head.form else { return None };
        let (key, value) = self.shape.row(codec, span_head.start, token);
        let slow = self.slow.as_ref()?.memory()?;
        Some((codec, &slow[key], &slow[value]))
    }

    /// Reads some tokens of the span: `keys` `[tokens][key_dim]`, `values` `[tokens][value_dim]`.
    /// With `gated`, as zooming shows them, weighed by the rank gates; else as close to the
    /// tokens as was kept.
    pub fn read_span(
        &self,
        head: usize,
        tokens: Range<usize>,
        gated: bool,
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        let Some((span_head, slow)) = self.span_heads.get(head).zip(self.slow.as_ref()) else {
            return;
        };
        let (dk, dv) = (self.shape.key_dim, self.shape.value_dim);
        let len = form_bytes(span_head.form, self.shape.n_span, dk, dv);
        let mut room = vec![0; if slow.memory().is_some() { 0 } else { len }];
        let slow = slow.read(span_head.start..span_head.start + len, &mut room);
        match span_head.form {
            SpanForm::Rows(codec) => {
                let rows = keys.chunks_exact_mut(dk).zip(values.chunks_exact_mut(dv));
                for (token, (key, value)) in tokens.zip(rows) {
                    let (key_at, value_at) = self.shape.row(codec, 0, token);
                    codec.decode(&slow[key_at], key);
                    codec.decode(&slow[value_at], value);
                }
            }
            SpanForm::LowRank { codec, rank } => {
                let shape = |dim| BasisShape { codec, tokens: self.shape.n_span, dim, rank };
                let (key_shape, value_shape) = (shape(dk), shape(dv));
                let (gate_bytes, bases) = slow.split_at(4 * rank);
                let (key_basis, rest) = bases.split_at(key_shape.bytes());
                let value_basis = &rest[..value_shape.bytes()];
                let mut gates = vec![1.0; rank];
                if gated {
                    RowCodec::F32.decode(gate_bytes, &mut gates);
                }
                rebuild(&key_shape, key_basis, &gates, tokens.clone(), keys);
                rebuild(&value_shape, value_basis, &gates, tokens, values);
            }
        }
    }
}

impl Stored for Piece {
    fn stored(&self) -> &[u8] {
        &self.fast
    }
}

/// Slow bytes of one KV head's span.
pub fn form_bytes(form: SpanForm, n_span: usize, key_dim: usize, value_dim: usize) -> usize {
    match form {
        SpanForm::Rows(codec) => n_span * (codec.row_bytes(key_dim) + codec.row_bytes(value_dim)),
        SpanForm::LowRank { codec, rank } => {
            let basis = |dim| BasisShape { codec, tokens: n_span, dim, rank }.bytes();
            4 * rank + basis(key_dim) + basis(value_dim)
        }
    }
}
