//! What one layer keeps of a block of sealed tokens.

use std::ops::Range;

use half::f16;

use crate::error::Result;
use crate::kernels::{RowCodec, SketchShape, prefetch};
use crate::store::{AlignedBytes, Segment};

/// What a block keeps of each key for scoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sketch {
    /// The first channels of the layout's order at 4 bits, the next at 2; none of either: the
    /// block's mean key stands for all its tokens.
    Packed { n4: usize, n2: usize },
    /// The key itself as f32.
    Raw,
}

impl Sketch {
    pub fn shape(self) -> SketchShape {
        match self {
            Self::Packed { n4, n2 } => SketchShape { n4, n2 },
            Self::Raw => SketchShape { n4: 0, n2: 0 },
        }
    }
}

/// Sizes from which the place of everything in a block follows.
///
/// Fast tier, one run of bytes: sketch codes of every KV head (whole cache lines each), then for
/// every head minimum and scale of its channels (f16), then coefficient codes, then minimum and
/// scale of the coefficients (f16), then mean key and mean value (encoded rows). A dense block has
/// only encoded rows. Rows, in either tier: for every head and token the key, then the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    pub n_tokens: usize,
    pub n_kv_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub sketch: Sketch,
    /// Coefficients of a value sketch, r_v; 0: none.
    pub value_rank: usize,
    pub mean_codec: RowCodec,
    pub row_codec: RowCodec,
}

impl BlockShape {
    fn code_bytes(&self) -> usize {
        match self.sketch {
            Sketch::Packed { .. } => self.sketch.shape().code_bytes(self.n_tokens),
            Sketch::Raw => self.n_tokens * RowCodec::F32.row_bytes(self.key_dim),
        }
    }

    pub fn codes(&self, head: usize) -> Range<usize> {
        let len = self.code_bytes();
        head * len..(head + 1) * len
    }

    /// Minimum and scale of every channel.
    fn channel_bytes(&self) -> usize {
        self.sketch.shape().channels() * 4
    }

    pub fn channels(&self, head: usize) -> Range<usize> {
        let start = self.n_kv_heads * self.code_bytes();
        let len = self.channel_bytes();
        start + head * len..start + (head + 1) * len
    }

    fn coefficient_bytes(&self) -> usize {
        self.n_tokens * self.value_rank.div_ceil(4)
    }

    pub fn coefficients(&self, head: usize) -> Range<usize> {
        // After the parameters of both kinds, which hold f16 and want even addresses.
        let start =
            self.n_kv_heads * (self.code_bytes() + self.channel_bytes() + 4 * self.value_rank);
        let len = self.coefficient_bytes();
        start + head * len..start + (head + 1) * len
    }

    pub fn coefficient_scales(&self, head: usize) -> Range<usize> {
        let start = self.n_kv_heads * (self.code_bytes() + self.channel_bytes());
        let len = 4 * self.value_rank;
        start + head * len..start + (head + 1) * len
    }

    pub fn mean_key(&self, head: usize) -> Range<usize> {
        let (key, value) = self.mean_bytes();
        let start = self.means_start() + head * (key + value);
        start..start + key
    }

    pub fn mean_value(&self, head: usize) -> Range<usize> {
        let (key, value) = self.mean_bytes();
        let start = self.means_start() + head * (key + value) + key;
        start..start + value
    }

    fn means_start(&self) -> usize {
        self.coefficients(self.n_kv_heads).start
    }

    fn mean_bytes(&self) -> (usize, usize) {
        (self.mean_codec.row_bytes(self.key_dim), self.mean_codec.row_bytes(self.value_dim))
    }

    /// Bytes of a sealed block on the fast tier.
    pub fn fast_bytes(&self) -> usize {
        let (key, value) = self.mean_bytes();
        self.means_start() + self.n_kv_heads * (key + value)
    }

    pub fn sketch_bytes(&self) -> usize {
        self.n_kv_heads * (self.code_bytes() + self.channel_bytes())
    }

    pub fn value_sketch_bytes(&self) -> usize {
        self.n_kv_heads * (self.coefficient_bytes() + 4 * self.value_rank)
    }

    pub fn key_row(&self, head: usize, token: usize) -> Range<usize> {
        let (key, value) = self.row_bytes();
        let start = (head * self.n_tokens + token) * (key + value);
        start..start + key
    }

    pub fn value_row(&self, head: usize, token: usize) -> Range<usize> {
        let (key, value) = self.row_bytes();
        let start = (head * self.n_tokens + token) * (key + value) + key;
        start..start + value
    }

    fn row_bytes(&self) -> (usize, usize) {
        (self.row_codec.row_bytes(self.key_dim), self.row_codec.row_bytes(self.value_dim))
    }

    /// Bytes of the tokens' rows.
    pub fn rows_bytes(&self) -> usize {
        let (key, value) = self.row_bytes();
        self.n_kv_heads * self.n_tokens * (key + value)
    }
}

/// Where a block's rows lie.
pub enum Rows {
    /// A sealed block: `fast` holds sketches and means, this the rows.
    Slow(Segment),
    /// A dense layer's block: `fast` holds the rows, and nothing else is kept.
    Fast,
}

/// One layer's share of a block of tokens; immutable once made.
pub struct Block {
    pub shape: BlockShape,
    pub fast: AlignedBytes,
    pub rows: Rows,
}

impl Block {
    pub fn dense(shape: BlockShape) -> Result<Self> {
        Ok(Self { shape, fast: AlignedBytes::zeroed(shape.rows_bytes())?, rows: Rows::Fast })
    }

    pub fn is_dense(&self) -> bool {
        matches!(self.rows, Rows::Fast)
    }

    fn row_bytes(&self) -> &[u8] {
        match &self.rows {
            Rows::Slow(segment) => segment,
            Rows::Fast => &self.fast,
        }
    }

    pub fn key(&self, head: usize, token: usize) -> &[u8] {
        &self.row_bytes()[self.shape.key_row(head, token)]
    }

    pub fn value(&self, head: usize, token: usize) -> &[u8] {
        &self.row_bytes()[self.shape.value_row(head, token)]
    }

    /// Minimum and scale of the sketch's channels.
    pub fn channels(&self, head: usize) -> (&[f16], &[f16]) {
        let both = halves(&self.fast[self.shape.channels(head)]);
        both.split_at(both.len() / 2)
    }

    /// Minimum and scale of the value sketch's coefficients.
    pub fn coefficient_scales(&self, head: usize) -> (&[f16], &[f16]) {
        let both = halves(&self.fast[self.shape.coefficient_scales(head)]);
        both.split_at(both.len() / 2)
    }

    /// Asks for what scoring reads.
    pub fn prefetch_sketch(&self, head: usize) {
        prefetch(&self.fast[self.shape.codes(head)]);
        prefetch(&self.fast[self.shape.channels(head)]);
        prefetch(&self.fast[self.shape.mean_key(head)]);
    }

    /// Asks for one token's key and value, which lie side by side.
    pub fn prefetch_rows(&self, head: usize, token: usize) {
        let (key, value) = (self.shape.key_row(head, token), self.shape.value_row(head, token));
        prefetch(&self.row_bytes()[key.start..value.end]);
    }

    pub fn slow_bytes(&self) -> usize {
        match &self.rows {
            Rows::Slow(segment) => segment.len(),
            Rows::Fast => 0,
        }
    }
}

/// Bytes at an even address as f16.
pub fn halves(bytes: &[u8]) -> &[f16] {
    // SAFETY: f16 is two bytes of any value; `align_to` puts misaligned ends into the outer parts.
    let (before, middle, after) = unsafe { bytes.align_to::<f16>() };
    debug_assert!(before.is_empty() && after.is_empty(), "an f16 at an odd address");
    middle
}

/// As [`halves`], for writing.
pub fn halves_mut(bytes: &mut [u8]) -> &mut [f16] {
    // SAFETY: as in `halves`.
    let (before, middle, after) = unsafe { bytes.align_to_mut::<f16>() };
    debug_assert!(before.is_empty() && after.is_empty(), "an f16 at an odd address");
    middle
}
