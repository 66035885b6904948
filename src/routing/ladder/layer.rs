//! The sealed blocks of one layer: slabs that grow with the sequence.

use std::ops::Range;
use std::sync::Arc;

use super::Slab;
use crate::error::Result;
use crate::model::Rotation;
use crate::routing::{Counted, Remade};

/// Blocks of the largest slab: what a scan reads from front to back. More would gain nothing, and
/// a slab is copied whole when it is made or cut.
const MOST_BLOCKS: usize = 256;

/// So many slabs of like size become one. Every block is copied as often as the logarithm of
/// [`MOST_BLOCKS`] to this base at the most, and a layer has few slabs at any length.
const MERGED: usize = 4;

/// What an `Arc` adds to its value.
const ARC_COUNTS: usize = 2 * size_of::<usize>();

/// How far a block's tokens have moved since they were stored; None: not at all.
pub type Turn = Option<Arc<Rotation>>;

/// Blocks of a slab that belong to the sequence, one after the other: all, or what was left of
/// them where some were removed.
#[derive(Clone)]
struct Stretch {
    slab: Arc<Slab>,
    /// The first of them, by its number in the slab.
    start: usize,
    n_blocks: usize,
    /// Its number in the layer, and that of its first token.
    first: usize,
    first_token: usize,
    turn: Turn,
}

impl Stretch {
    fn is_cut(&self) -> bool {
        self.n_blocks < self.slab.n_blocks
    }

    fn end(&self) -> usize {
        self.first + self.n_blocks
    }

    fn end_token(&self) -> usize {
        self.first_token + self.n_blocks * self.slab.shape.n_tokens
    }

    fn shift(&self) -> i32 {
        self.turn.as_ref().map_or(0, |turn| turn.shift)
    }

    /// Where blocks of the layer are in the slab.
    fn in_slab(&self, blocks: &Range<usize>) -> Range<usize> {
        let at = |block: usize| block - self.first + self.start;
        at(blocks.start)..at(blocks.end)
    }

    fn name(&self) -> [usize; 4] {
        [Arc::as_ptr(&self.slab).addr(), self.start, self.n_blocks, self.shift() as usize]
    }

    /// Blocks of the layer as a slab of their own.
    fn part(&self, blocks: Range<usize>) -> Result<Arc<Slab>> {
        let range = self.in_slab(&blocks);
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
        let Some(new) = make(&*self.part(inside.clone())?)? else { return Ok(None) };
        let mut parts = Vec::with_capacity(3);
        if self.first < inside.start {
            parts.push(self.part(self.first..inside.start)?);
        }
        parts.push(Arc::new(new));
        if inside.end < self.end() {
            parts.push(self.part(inside.end..self.end())?);
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
        self.stretches.last().map_or(0, Stretch::end)
    }

    pub fn n_tokens(&self) -> usize {
        self.stretches.last().map_or(0, Stretch::end_token)
    }

    pub fn slabs(&self) -> impl Iterator<Item = &Arc<Slab>> {
        self.stretches.iter().map(|stretch| &stretch.slab)
    }

    /// Says which blocks of which slabs these are, and how far they have moved; two layers of one
    /// name are the same.
    pub fn name(&self) -> Vec<usize> {
        self.stretches.iter().flat_map(Stretch::name).collect()
    }

    /// Whether any token has moved since it was stored.
    pub fn is_turned(&self) -> bool {
        self.stretches.iter().any(|stretch| stretch.turn.is_some())
    }

    /// The block of a token, and the token's number in it; behind the last token, the block that
    /// would come next.
    pub fn place(&self, token: usize) -> (usize, usize) {
        let index = self.stretches.partition_point(|s| s.end_token() <= token);
        let Some(stretch) = self.stretches.get(index) else { return (self.n_blocks(), 0) };
        let (inside, n_tokens) = (token - stretch.first_token, stretch.slab.shape.n_tokens);
        (stretch.first + inside / n_tokens, inside % n_tokens)
    }

    /// Appends slabs of tokens that have moved so far, and lays small ones together.
    pub fn append(&mut self, slabs: Vec<(Slab, Turn)>) -> Result<()> {
        let before = self.stretches.len();
        for (slab, turn) in slabs {
            self.push(Arc::new(slab), turn);
        }
        let result = self.settle();
        if result.is_err() {
            self.stretches.truncate(before);
        }
        result
    }

    /// Slabs that hold these blocks and no others, in order, with how far they have moved.
    pub fn parts(&self) -> Result<Vec<(Arc<Slab>, Turn)>> {
        let part = |stretch: &Stretch| {
            Ok((stretch.part(stretch.first..stretch.end())?, stretch.turn.clone()))
        };
        self.stretches.iter().map(part).collect()
    }

    /// How the tokens are cut: blocks in a row that are alike, by tokens a block and how far they
    /// have moved.
    pub fn cut(&self) -> Vec<(usize, i32, usize)> {
        let mut cut: Vec<(usize, i32, usize)> = Vec::new();
        for stretch in &self.stretches {
            let (n_tokens, shift) = (stretch.slab.shape.n_tokens, stretch.shift());
            match cut.last_mut().filter(|last| (last.0, last.1) == (n_tokens, shift)) {
                Some(last) => last.2 += stretch.n_blocks,
                None => cut.push((n_tokens, shift, stretch.n_blocks)),
            }
        }
        cut
    }

    /// Appends a slab as it is.
    pub fn push(&mut self, slab: Arc<Slab>, turn: Turn) {
        let blocks = 0..slab.n_blocks;
        self.push_some(slab, blocks, turn);
    }

    /// Appends some blocks of a slab; those that follow on the last ones join them.
    fn push_some(&mut self, slab: Arc<Slab>, blocks: Range<usize>, turn: Turn) {
        let (start, n_blocks) = (blocks.start, blocks.len());
        let (first, first_token) = (self.n_blocks(), self.n_tokens());
        let new = Stretch { slab, start, n_blocks, first, first_token, turn };
        match self.stretches.last_mut() {
            Some(last)
                if Arc::ptr_eq(&last.slab, &new.slab)
                    && last.start + last.n_blocks == start
                    && last.shift() == new.shift() =>
            {
                last.n_blocks += n_blocks;
            }
            _ if n_blocks > 0 => self.stretches.push(new),
            _ => {}
        }
    }

    /// Makes one slab of the last ones where that is due.
    fn settle(&mut self) -> Result<()> {
        let Some(last) = self.stretches.last() else { return Ok(()) };
        let (shape, shift, turn) = (last.slab.shape, last.shift(), last.turn.clone());
        let (mut from, mut n_blocks) = (None, 0);
        for (i, stretch) in self.stretches.iter().enumerate().rev() {
            let fits = n_blocks + stretch.n_blocks <= MOST_BLOCKS;
            let alike = stretch.slab.shape == shape && stretch.shift() == shift;
            if stretch.slab.is_dense() || !alike || !fits {
                break;
            }
            let due = n_blocks > 0 && stretch.n_blocks * (MERGED - 1) <= n_blocks;
            if due || stretch.is_cut() {
                from = Some(i);
            }
            n_blocks += stretch.n_blocks;
        }
        let Some(from) = from else { return Ok(()) };
        let parts: Vec<(&Slab, Range<usize>)> = self.stretches[from..]
            .iter()
            .map(|s| (&*s.slab, s.start..s.start + s.n_blocks))
            .collect();
        let merged = Slab::concat(&parts)?;
        self.stretches.truncate(from);
        self.push(Arc::new(merged), turn);
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

    /// The layer with other blocks in the place of `blocks`.
    pub fn exchanged(&self, blocks: Range<usize>, with: Vec<(Slab, Turn)>) -> Self {
        let mut made = Self::default();
        made.push_range(self, 0..blocks.start);
        with.into_iter().for_each(|(slab, turn)| made.push(Arc::new(slab), turn));
        made.push_range(self, blocks.end..self.n_blocks());
        made
    }

    /// Appends blocks of another layer.
    fn push_range(&mut self, other: &Self, blocks: Range<usize>) {
        for stretch in &other.stretches {
            let start = blocks.start.clamp(stretch.first, stretch.end());
            let end = blocks.end.clamp(start, stretch.end());
            let range = stretch.in_slab(&(start..end));
            self.push_some(Arc::clone(&stretch.slab), range, stretch.turn.clone());
        }
    }

    /// Lets go of slabs that nobody else holds, but the layer that this one replaces, and of which
    /// less than half is left, by copying what is left. Where there is no memory to copy to, they
    /// stay.
    pub fn compact(&mut self, before: &Self) {
        let is_waste = |stretch: &Stretch| {
            let (n_holders, left) = self.held(&stretch.slab);
            let is_own =
                Arc::strong_count(&stretch.slab) == n_holders + before.held(&stretch.slab).0;
            is_own && 2 * left < stretch.slab.n_blocks
        };
        let waste: Vec<bool> = self.stretches.iter().map(is_waste).collect();
        for (stretch, _) in self.stretches.iter_mut().zip(waste).filter(|(_, waste)| *waste) {
            if let Ok(part) = stretch.part(stretch.first..stretch.end()) {
                (stretch.slab, stretch.start) = (part, 0);
            }
        }
    }

    /// Stretches of a slab, and their blocks in all.
    fn held(&self, slab: &Arc<Slab>) -> (usize, usize) {
        let of_slab = self.stretches.iter().filter(|stretch| Arc::ptr_eq(&stretch.slab, slab));
        of_slab.fold((0, 0), |(n, blocks), stretch| (n + 1, blocks + stretch.n_blocks))
    }

    /// Blocks whose slabs were not counted before.
    pub fn blocks_beside(&self, counted: &mut Counted) -> usize {
        let new = self.slabs().filter(|slab| counted.is_new(slab));
        new.map(|slab| self.held(slab).1).sum()
    }

    /// The layer with some blocks moved: `turn` says what becomes of how far they had moved
    /// before.
    pub fn turned(&self, blocks: Range<usize>, mut turn: impl FnMut(i32) -> Turn) -> Self {
        let mut made = Self::default();
        for stretch in &self.stretches {
            let start = blocks.start.clamp(stretch.first, stretch.end());
            let end = blocks.end.clamp(start, stretch.end());
            let moved = turn(stretch.shift());
            for (part, turn) in [
                (stretch.first..start, stretch.turn.clone()),
                (start..end, moved),
                (end..stretch.end(), stretch.turn.clone()),
            ] {
                let range = stretch.in_slab(&part);
                made.push_some(Arc::clone(&stretch.slab), range, turn);
            }
        }
        made
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
            let end = stretch.end();
            let inside =
                blocks.start.clamp(stretch.first, end)..blocks.end.clamp(stretch.first, end);
            if inside.is_empty() {
                made.stretches.push(stretch.clone());
                continue;
            }
            let mut key = stretch.name().to_vec();
            key.extend([inside.start - stretch.first, inside.len(), how]);
            let (_, parts) = remade.get_or_make(key, || {
                Ok((Arc::clone(&stretch.slab), stretch.replaced(inside, &make)?))
            })?;
            let Some(parts) = parts else {
                made.stretches.push(stretch.clone());
                continue;
            };
            replaced = true;
            parts.into_iter().for_each(|slab| made.push(slab, stretch.turn.clone()));
        }
        *self = made;
        Ok(replaced)
    }

    /// Runs of blocks that cover `blocks`, in order: the slab, and the range of its blocks.
    pub fn runs(&self, blocks: Range<usize>) -> impl Iterator<Item = (&Slab, Range<usize>)> {
        self.turned_runs(blocks).map(|(slab, range, _)| (slab, range))
    }

    /// As [`Self::runs`], with how far each run has moved.
    pub fn turned_runs(
        &self,
        blocks: Range<usize>,
    ) -> impl Iterator<Item = (&Slab, Range<usize>, Option<&Rotation>)> {
        let start = self.stretches.partition_point(|s| s.end() <= blocks.start);
        let (first, end) = (blocks.start, blocks.end);
        self.stretches[start..].iter().take_while(move |s| s.first < end).map(move |s| {
            let inside = first.max(s.first)..end.min(s.end());
            (&*s.slab, s.in_slab(&inside), s.turn.as_deref())
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
        let ends_after = |s: &Stretch| block < s.end();
        let here = &self.stretches[self.at];
        if block < here.first || !ends_after(here) {
            self.at = self.stretches.partition_point(|s| !ends_after(s));
        }
        let stretch = &self.stretches[self.at];
        (&stretch.slab, block - stretch.first + stretch.start)
    }

    /// How far the tokens of the block that was found last have moved.
    pub fn turn(&self) -> &'a Turn {
        &self.stretches[self.at].turn
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
        let room = store.reserve(shape.rows_bytes()).unwrap();
        Slab::sealed(shape, store, room, |slab, rows| {
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
                    let (key, value) = slab.row(head, block, token, &mut []);
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
                        .replace(start..end, 0, &mut Remade::default(), |slab| {
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
                    let slabs = new.iter().map(|n| (block(&store, shape(8), *n), None)).collect();
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
            layer.append(vec![(block(&store, shape(8), (n % 200) as u8), None)]).unwrap();
            assert!(layer.slabs().count() <= Layer::most_slabs(n), "{n}");
        }
        layer.truncate(650);
        layer.append(vec![(block(&store, shape(8), 9), None)]).unwrap();
        // The slab that was cut is gone, and what it held beyond the cut with it.
        let held: usize = layer.slabs().map(|slab| slab.n_blocks).sum();
        assert_eq!(held, 651);
    }
}
