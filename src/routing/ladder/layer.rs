//! The sealed blocks of one layer: slabs that grow with the sequence.

use std::ops::Range;
use std::sync::Arc;

use super::Slab;
use crate::error::Result;
use crate::routing::Remade;

/// Blocks of the largest slab: what a scan reads from front to back. More would gain nothing, and
/// a slab is copied whole when it is made or cut.
const MOST_BLOCKS: usize = 256;

/// So many slabs of like size become one. Every block is copied as often as the logarithm of
/// [`MOST_BLOCKS`] to this base at the most, and a layer has few slabs at any length.
const MERGED: usize = 4;

/// What an `Arc` adds to its value.
const ARC_COUNTS: usize = 2 * size_of::<usize>();

/// The blocks of a slab that belong to the sequence: all, or the first ones where it was cut.
#[derive(Clone)]
struct Stretch {
    slab: Arc<Slab>,
    first: usize,
    n_blocks: usize,
}

impl Stretch {
    fn is_cut(&self) -> bool {
        self.n_blocks < self.slab.n_blocks
    }

    fn name(&self) -> [usize; 2] {
        [Arc::as_ptr(&self.slab).addr(), self.n_blocks]
    }

    /// Blocks of the layer as a slab of their own.
    fn part(&self, blocks: Range<usize>) -> Result<Arc<Slab>> {
        let range = blocks.start - self.first..blocks.end - self.first;
        if range.len() == self.slab.n_blocks {
            Ok(Arc::clone(&self.slab))
        } else {
            Slab::concat(&[(&*self.slab, range)]).map(Arc::new)
        }
    }

    /// The stretch's slabs with another in the place of the blocks `inside`; None: `make` has no
    /// other.
    fn replaced(
        &self,
        inside: Range<usize>,
        make: impl Fn(&Slab) -> Result<Option<Slab>>,
    ) -> Result<Option<Vec<Arc<Slab>>>> {
        let end = self.first + self.n_blocks;
        let Some(new) = make(&*self.part(inside.clone())?)? else { return Ok(None) };
        let mut parts = Vec::with_capacity(3);
        if self.first < inside.start {
            parts.push(self.part(self.first..inside.start)?);
        }
        parts.push(Arc::new(new));
        if inside.end < end {
            parts.push(self.part(inside.end..end)?);
        }
        Ok(Some(parts))
    }
}

/// Slabs in order.
#[derive(Clone, Default)]
pub struct Layer {
    stretches: Vec<Stretch>,
}

impl Layer {
    /// Bytes that a slab takes besides what it holds.
    pub const SLAB_METADATA: usize = size_of::<Stretch>() + size_of::<Slab>() + ARC_COUNTS;

    /// Slabs of `n_blocks` blocks that came one by one, at the most: of each size there are fewer than
    /// MERGED.
    pub fn most_slabs(n_blocks: usize) -> usize {
        let sizes = n_blocks.clamp(1, MOST_BLOCKS).ilog(MERGED) as usize + 1;
        n_blocks / MOST_BLOCKS + n_blocks.min((MERGED - 1) * sizes)
    }

    pub fn n_blocks(&self) -> usize {
        self.stretches.last().map_or(0, |last| last.first + last.n_blocks)
    }

    pub fn slabs(&self) -> impl Iterator<Item = &Arc<Slab>> {
        self.stretches.iter().map(|stretch| &stretch.slab)
    }

    /// Says which blocks of which slabs these are; two layers of one name are the same.
    pub fn name(&self) -> Vec<usize> {
        self.stretches.iter().flat_map(Stretch::name).collect()
    }

    /// Appends slabs, and lays small ones together.
    pub fn append(&mut self, slabs: Vec<Slab>) -> Result<()> {
        let before = self.stretches.len();
        for slab in slabs {
            self.push(Arc::new(slab));
        }
        let result = self.settle();
        if result.is_err() {
            self.stretches.truncate(before);
        }
        result
    }

    fn push(&mut self, slab: Arc<Slab>) {
        let (first, n_blocks) = (self.n_blocks(), slab.n_blocks);
        self.stretches.push(Stretch { slab, first, n_blocks });
    }

    /// Makes one slab of the last ones where that is due.
    fn settle(&mut self) -> Result<()> {
        let Some(last) = self.stretches.last() else { return Ok(()) };
        let shape = last.slab.shape;
        let (mut from, mut n_blocks) = (None, 0);
        for (i, stretch) in self.stretches.iter().enumerate().rev() {
            let fits = n_blocks + stretch.n_blocks <= MOST_BLOCKS;
            if stretch.slab.is_dense() || stretch.slab.shape != shape || !fits {
                break;
            }
            let due = n_blocks > 0 && stretch.n_blocks * (MERGED - 1) <= n_blocks;
            if due || stretch.is_cut() {
                from = Some(i);
            }
            n_blocks += stretch.n_blocks;
        }
        let Some(from) = from else { return Ok(()) };
        let parts: Vec<(&Slab, Range<usize>)> =
            self.stretches[from..].iter().map(|s| (&*s.slab, 0..s.n_blocks)).collect();
        let merged = Slab::concat(&parts)?;
        self.stretches.truncate(from);
        self.push(Arc::new(merged));
        Ok(())
    }

    /// Keeps the first `n_blocks`. Nothing is copied: a slab that is cut keeps its memory until
    /// blocks are appended to it.
    pub fn truncate(&mut self, n_blocks: usize) {
        self.stretches.retain(|stretch| stretch.first < n_blocks);
        if let Some(last) = self.stretches.last_mut() {
            last.n_blocks = last.n_blocks.min(n_blocks - last.first);
        }
    }

    /// Puts what `make` says in the place of each slab in `blocks`, where it says anything. Slabs
    /// that reach beyond are divided first. Returns whether anything was replaced. `how` names what
    /// `make` does: where another sequence had the same replaced, its slabs serve both.
    pub fn replace(
        &mut self,
        blocks: Range<usize>,
        how: usize,
        remade: &mut Remade,
        make: impl Fn(&Slab) -> Result<Option<Slab>>,
    ) -> Result<bool> {
        let mut made = Self::default();
        let mut replaced = false;
        for stretch in &self.stretches {
            let end = stretch.first + stretch.n_blocks;
            let inside =
                blocks.start.clamp(stretch.first, end)..blocks.end.clamp(stretch.first, end);
            if inside.is_empty() {
                made.stretches.push(stretch.clone());
                continue;
            }
            let [slab, n_blocks] = stretch.name();
            let key = vec![slab, n_blocks, inside.start - stretch.first, inside.len(), how];
            let (_, parts) = remade.get_or_make(key, || {
                Ok((Arc::clone(&stretch.slab), stretch.replaced(inside, &make)?))
            })?;
            let Some(parts) = parts else {
                made.stretches.push(stretch.clone());
                continue;
            };
            replaced = true;
            parts.into_iter().for_each(|slab| made.push(slab));
        }
        *self = made;
        Ok(replaced)
    }

    /// Runs of blocks that cover `blocks`, in order: the slab, and the range of its blocks.
    pub fn runs(&self, blocks: Range<usize>) -> impl Iterator<Item = (&Slab, Range<usize>)> {
        let start = self.stretches.partition_point(|s| s.first + s.n_blocks <= blocks.start);
        let (first, end) = (blocks.start, blocks.end);
        self.stretches[start..].iter().take_while(move |s| s.first < end).map(move |s| {
            let to = (end - s.first).min(s.n_blocks);
            (&*s.slab, first.saturating_sub(s.first)..to)
        })
    }

    /// A reader of single blocks, quick where their numbers rise.
    pub fn walk(&self) -> Walk<'_> {
        Walk { stretches: &self.stretches, at: 0 }
    }
}

/// Finds blocks by number.
pub struct Walk<'a> {
    stretches: &'a [Stretch],
    at: usize,
}

impl<'a> Walk<'a> {
    /// The slab of a block, and the block's number in it.
    pub fn find(&mut self, block: usize) -> (&'a Slab, usize) {
        let ends_after = |s: &Stretch| block < s.first + s.n_blocks;
        let here = &self.stretches[self.at];
        if block < here.first || !ends_after(here) {
            self.at = self.stretches.partition_point(|s| !ends_after(s));
        }
        let stretch = &self.stretches[self.at];
        (&stretch.slab, block - stretch.first)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BlockShape, Sketch};
    use super::*;
    use crate::kernels::RowCodec;
    use crate::routing::ladder::slab::Stream;
    use crate::store::SlowStore;

    fn shape(value_rank: usize) -> BlockShape {
        BlockShape {
            n_tokens: 4,
            n_kv_heads: 2,
            key_dim: 8,
            value_dim: 8,
            sketch: Sketch::Packed { n4: 8, n2: 0 },
            value_rank,
            mean_codec: RowCodec::F32,
            row_codec: RowCodec::Int8,
        }
    }

    /// A block that says its number in every stream and row, plus its head's in the means.
    fn block(store: &SlowStore, shape: BlockShape, number: u8) -> Slab {
        Slab::sealed(shape, store, |slab, rows| {
            rows.fill(number);
            for head in 0..shape.n_kv_heads {
                for stream in [Stream::Codes, Stream::Channels, Stream::Coefficients] {
                    slab.stream_mut(stream, head).fill(number);
                }
                slab.stream_mut(Stream::MeanKey, head).fill(number + head as u8);
                slab.stream_mut(Stream::MeanValue, head).fill(number + head as u8);
            }
        })
        .unwrap()
    }

    /// Every block of the layer is the one that `numbers` says.
    fn check(layer: &Layer, numbers: &[u8]) {
        assert_eq!(layer.n_blocks(), numbers.len());
        let all = |bytes: &[u8], number: u8| bytes.iter().all(|byte| *byte == number);
        let mut walk = layer.walk();
        let in_order = (0..numbers.len()).chain((0..numbers.len()).rev());
        for (b, number) in in_order.map(|b| (b, numbers[b])) {
            let (slab, block) = walk.find(b);
            for head in 0..2 {
                for stream in [Stream::Codes, Stream::Channels, Stream::Coefficients] {
                    assert!(all(slab.block(stream, head, block), number), "{b}");
                }
                let mean = number + head as u8;
                assert!(all(slab.block(Stream::MeanKey, head, block), mean), "{b}");
                assert!(all(slab.block(Stream::MeanValue, head, block), mean), "{b}");
                for token in 0..4 {
                    let (key, value) = slab.row(head, block, token);
                    assert!(all(key, number) && all(value, number), "{b}");
                }
            }
        }
        for range in [0..numbers.len(), numbers.len() / 3..numbers.len() / 2] {
            let mut next = range.start;
            for (slab, blocks) in layer.runs(range.clone()) {
                for block in blocks {
                    assert!(all(slab.block(Stream::Codes, 1, block), numbers[next]));
                    next += 1;
                }
            }
            assert_eq!(next, range.end.max(range.start));
        }
    }

    #[test]
    fn blocks_stay_what_and_where_they_are_however_they_came() {
        let store = SlowStore::default();
        let (mut layer, mut numbers, mut state) = (Layer::default(), Vec::new(), 1u64);
        let mut below = |n: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        for round in 0..120 {
            match below(4) {
                0 if !numbers.is_empty() => {
                    let keep = below(numbers.len() as u64 + 1) as usize;
                    layer.truncate(keep);
                    numbers.truncate(keep);
                }
                1 if !numbers.is_empty() => {
                    // A range in another shape, which no longer merges with its neighbours.
                    let start = below(numbers.len() as u64) as usize;
                    let end = (start + below(40) as usize).min(numbers.len());
                    let poorer = BlockShape { value_rank: 4, ..shape(8) };
                    let replaced = layer
                        .replace(start..end, |slab| {
                            if slab.shape == poorer {
                                return Ok(None);
                            }
                            let tag = |b| slab.block(Stream::Codes, 0, b)[0];
                            let made: Vec<Slab> =
                                (0..slab.n_blocks).map(|b| block(&store, poorer, tag(b))).collect();
                            let parts: Vec<_> = made.iter().map(|slab| (slab, 0..1)).collect();
                            Slab::concat(&parts).map(Some)
                        })
                        .unwrap();
                    assert!(!replaced || start < end);
                }
                _ => {
                    let n = 1 + below(if round % 10 == 0 { 300 } else { 6 });
                    let new: Vec<u8> = (0..n).map(|_| below(200) as u8).collect();
                    let slabs = new.iter().map(|n| block(&store, shape(8), *n)).collect();
                    layer.append(slabs).unwrap();
                    numbers.extend(new);
                }
            }
            check(&layer, &numbers);
        }
    }

    #[test]
    fn blocks_that_come_one_by_one_end_up_in_few_slabs() {
        let store = SlowStore::default();
        let mut layer = Layer::default();
        for n in 1..=700usize {
            layer.append(vec![block(&store, shape(8), (n % 200) as u8)]).unwrap();
            assert!(layer.slabs().count() <= Layer::most_slabs(n), "{n}");
        }
        layer.truncate(650);
        layer.append(vec![block(&store, shape(8), 9)]).unwrap();
        // The slab that was cut is gone, and what it held beyond the cut with it.
        let held: usize = layer.slabs().map(|slab| slab.n_blocks).sum();
        assert_eq!(held, 651);
    }
}
