//! What one layer keeps of sealed tokens: slabs of blocks.

use std::ops::Range;

use half::f16;

use crate::error::Result;
use crate::kernels::{RowCodec, SketchShape};
use crate::routing::{RowBytes, copy_row};
use crate::store::{AlignedBytes, Reserved, Segment, SlowStore, Stored};

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

/// Sizes of one block, from which everything in a slab has its place.
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
    /// Sketch codes of one head.
    fn code_bytes(&self) -> usize {
        match self.sketch {
            Sketch::Packed { .. } => self.sketch.shape().code_bytes(self.n_tokens),
            Sketch::Raw => self.n_tokens * RowCodec::F32.row_bytes(self.key_dim),
        }
    }

    /// Minimum and scale of every channel of one head.
    fn channel_bytes(&self) -> usize {
        self.sketch.shape().channels() * 4
    }

    /// Minimum and scale of every coefficient of one head.
    fn scale_bytes(&self) -> usize {
        4 * self.value_rank
    }

    fn coefficient_bytes(&self) -> usize {
        self.n_tokens * self.value_rank.div_ceil(4)
    }

    fn mean_bytes(&self) -> [usize; 2] {
        [self.mean_codec.row_bytes(self.key_dim), self.mean_codec.row_bytes(self.value_dim)]
    }

    /// Bytes of each of a slab's streams, for one head and block.
    fn streams(&self) -> [usize; N_STREAMS] {
        let [mean_key, mean_value] = self.mean_bytes();
        let codes = self.code_bytes();
        let coefficients = self.coefficient_bytes();
        [codes, self.channel_bytes(), self.scale_bytes(), coefficients, mean_key, mean_value]
    }

    /// The same as a slab keeps it: a head's share of a block is far below 4 GiB.
    fn stream_sizes(&self) -> [u32; N_STREAMS] {
        self.streams().map(|size| size as u32)
    }

    /// Bytes of a sealed block on the fast tier.
    pub fn fast_bytes(&self) -> usize {
        self.n_kv_heads * self.streams().iter().sum::<usize>()
    }

    pub fn sketch_bytes(&self) -> usize {
        self.n_kv_heads * (self.code_bytes() + self.channel_bytes())
    }

    pub fn value_sketch_bytes(&self) -> usize {
        self.n_kv_heads * (self.coefficient_bytes() + self.scale_bytes())
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

    /// Bytes of one token's key and value.
    pub fn row_pair(&self) -> usize {
        let (key, value) = self.row_bytes();
        key + value
    }

    /// Bytes of the tokens' rows: for every head and token the key, then the value.
    pub fn rows_bytes(&self) -> usize {
        self.n_kv_heads * self.n_tokens * self.row_pair()
    }
}

/// What a slab holds of each head and block. The order keeps f16 at even addresses.
#[derive(Clone, Copy)]
pub enum Stream {
    /// Sketch codes, whole cache lines.
    Codes,
    /// Minimum and scale of the sketch's channels, f16.
    Channels,
    /// Minimum and scale of the value sketch's coefficients, f16.
    CoefficientScales,
    Coefficients,
    /// Encoded rows.
    MeanKey,
    MeanValue,
}

const N_STREAMS: usize = 6;

/// Where a slab's rows lie.
pub enum Rows {
    /// Sealed blocks: `fast` holds the streams, each of these one block's rows.
    Slow(Vec<Segment>),
    /// A dense layer's block: `fast` holds the rows, and nothing else is kept.
    Fast,
}

/// Consecutive blocks of one layer that lie together; immutable once made.
///
/// On the fast tier each stream has all that is its kind: head by head, and for a head block by
/// block, so that a scan of one head reads from front to back.
pub struct Slab {
    pub shape: BlockShape,
    pub n_blocks: usize,
    /// Bytes of each stream, of one head and block.
    sizes: [u32; N_STREAMS],
    fast: AlignedBytes,
    rows: Rows,
}

impl Slab {
    /// One block whose rows are `write`n to the fast tier.
    pub fn dense(shape: BlockShape, write: impl FnOnce(&mut [u8])) -> Result<Self> {
        let mut fast = AlignedBytes::zeroed(shape.rows_bytes())?;
        write(&mut fast);
        Ok(Self { shape, n_blocks: 1, sizes: shape.stream_sizes(), fast, rows: Rows::Fast })
    }

    /// One block, of which `write` fills streams (through [`Slab::stream_mut`]) and rows; `room` is
    /// for [`BlockShape::rows_bytes`].
    pub fn sealed(
        shape: BlockShape,
        store: &SlowStore,
        room: Reserved,
        write: impl FnOnce(&mut Self, &mut [u8]),
    ) -> Result<Self> {
        let fast = AlignedBytes::zeroed(shape.fast_bytes())?;
        let mut slab =
            Self { shape, n_blocks: 1, sizes: shape.stream_sizes(), fast, rows: Rows::Fast };
        let rows = store.fill(room, |rows| write(&mut slab, rows))?;
        slab.rows = Rows::Slow(vec![rows]);
        Ok(slab)
    }

    /// The blocks of all parts, which are of one shape and not dense, in order.
    pub fn concat(parts: &[(&Self, Range<usize>)]) -> Result<Self> {
        let shape = parts[0].0.shape;
        let n_blocks = parts.iter().map(|(_, range)| range.len()).sum();
        let mut fast = AlignedBytes::zeroed(n_blocks * shape.fast_bytes())?;
        let (mut segments, mut at) = (Vec::with_capacity(n_blocks), 0);
        // A stream's part of one head is one run in each slab.
        for (stream, len) in shape.streams().into_iter().enumerate() {
            for head in 0..shape.n_kv_heads {
                for (slab, range) in parts {
                    let start = slab.place(stream, head, range.start).start;
                    let n = range.len() * len;
                    fast[at..at + n].copy_from_slice(&slab.fast[start..start + n]);
                    at += n;
                }
            }
        }
        for (slab, range) in parts {
            if let Rows::Slow(rows) = &slab.rows {
                segments.extend_from_slice(&rows[range.clone()]);
            }
        }
        Ok(Self { shape, n_blocks, sizes: shape.stream_sizes(), fast, rows: Rows::Slow(segments) })
    }

    pub fn is_dense(&self) -> bool {
        matches!(self.rows, Rows::Fast)
    }

    fn place(&self, stream: usize, head: usize, block: usize) -> Range<usize> {
        let before: usize = self.sizes[..stream].iter().map(|&size| size as usize).sum();
        let (n_heads, n, size) =
            (self.shape.n_kv_heads, self.n_blocks, self.sizes[stream] as usize);
        let start = before * n_heads * n + (head * n + block) * size;
        start..start + size
    }

    /// One head's share of a stream, from block `first` on: block by block.
    pub fn stream(&self, stream: Stream, head: usize, first: usize) -> &[u8] {
        let start = self.place(stream as usize, head, first).start;
        let end = self.place(stream as usize, head, self.n_blocks).start;
        &self.fast[start..end]
    }

    pub fn block(&self, stream: Stream, head: usize, block: usize) -> &[u8] {
        &self.fast[self.place(stream as usize, head, block)]
    }

    /// Two streams of the only block, for writing; `first` comes before `second`.
    pub fn streams_mut(
        &mut self,
        first: Stream,
        second: Stream,
        head: usize,
    ) -> (&mut [u8], &mut [u8]) {
        let (first, second) =
            (self.place(first as usize, head, 0), self.place(second as usize, head, 0));
        let (before, after) = self.fast.split_at_mut(second.start);
        (&mut before[first], &mut after[..second.len()])
    }

    /// A stream of the only block, for writing.
    pub fn stream_mut(&mut self, stream: Stream, head: usize) -> &mut [u8] {
        let place = self.place(stream as usize, head, 0);
        &mut self.fast[place]
    }

    /// A block's rows, where they can be addressed.
    fn rows_of(&self, block: usize) -> Option<&[u8]> {
        match &self.rows {
            Rows::Slow(segments) => segments[block].memory(),
            Rows::Fast => Some(&self.fast),
        }
    }

    /// A token's key and value, as encoded: where they lie, or read into `room`, which has
    /// [`BlockShape::row_pair`] bytes.
    pub fn row<'a>(
        &'a self,
        head: usize,
        block: usize,
        token: usize,
        room: &'a mut [u8],
    ) -> (&'a [u8], &'a [u8]) {
        let (key, value) = (self.shape.key_row(head, token), self.shape.value_row(head, token));
        let both = match &self.rows {
            Rows::Slow(segments) => segments[block].read(key.start..value.end, room),
            Rows::Fast => &self.fast[key.start..value.end],
        };
        both.split_at(key.len())
    }

    /// One token's key and value, of a KV head, block and token, as f32.
    pub fn decode_row(
        &self,
        (head, block, token): (usize, usize, usize),
        room: &mut Vec<u8>,
        key: &mut [f32],
        value: &mut [f32],
    ) {
        self.make_room(room, 1);
        let (key_row, value_row) = self.row(head, block, token, room);
        self.shape.row_codec.decode(key_row, key);
        self.shape.row_codec.decode(value_row, value);
    }

    /// Copies the same as it is encoded, if it is in this codec.
    pub fn copy_row(
        &self,
        codec: RowCodec,
        (head, block, token): (usize, usize, usize),
        out: RowBytes,
    ) -> bool {
        let is_same = codec == self.shape.row_codec;
        if is_same {
            let mut room = Vec::new();
            self.make_room(&mut room, 1);
            copy_row(self.row(head, block, token, &mut room), out);
        }
        is_same
    }

    /// Makes `room` large enough for `n` rows to be read into, where they must be.
    pub fn make_room(&self, room: &mut Vec<u8>, n: usize) {
        let is_addressable = self.n_blocks == 0 || self.rows_of(0).is_some();
        let len = if is_addressable { 0 } else { n * self.shape.row_pair() };
        room.resize(len, 0);
    }

    /// The rows' segments, one a block; none of a dense layer's block.
    pub fn segments(&self) -> &[Segment] {
        match &self.rows {
            Rows::Slow(segments) => segments,
            Rows::Fast => &[],
        }
    }

    /// A slab as it was saved: `fast` and, but for a dense layer's block, `segments` are of the
    /// sizes that `shape` says.
    pub fn restored(
        shape: BlockShape,
        n_blocks: usize,
        fast: AlignedBytes,
        segments: Option<Vec<Segment>>,
    ) -> Self {
        let rows = segments.map_or(Rows::Fast, Rows::Slow);
        Self { shape, n_blocks, sizes: shape.stream_sizes(), fast, rows }
    }

    /// Minimum and scale of the value sketch's coefficients.
    pub fn coefficient_scales(&self, head: usize, block: usize) -> (&[f16], &[f16]) {
        let both = halves(self.block(Stream::CoefficientScales, head, block));
        both.split_at(both.len() / 2)
    }

    /// The same where it lies, if it can be addressed.
    pub fn addressed_row(&self, head: usize, block: usize, token: usize) -> Option<(&[u8], &[u8])> {
        let (key, value) = (self.shape.key_row(head, token), self.shape.value_row(head, token));
        Some(self.rows_of(block)?[key.start..value.end].split_at(key.len()))
    }

    pub fn fast_bytes(&self) -> usize {
        self.fast.len()
    }

    /// Slow-tier bytes of the rows.
    pub fn slow_bytes(&self) -> usize {
        self.segments().iter().map(Segment::len).sum()
    }
}

impl Stored for Slab {
    fn stored(&self) -> &[u8] {
        &self.fast
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
