//! How queries find their tokens, and what a token leaves behind when it is sealed.
//!
//! The cache keeps sinks and window, runs passes and hands out memory; a routing answers three
//! questions: what to write when tokens are sealed, what to score for a query, and which rows to
//! attend at which weight. Nothing outside this module knows which routing runs.

mod ladder;
mod paper;

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::attend::SoftmaxState;
use crate::error::Result;
use crate::kernels::RowCodec;
use crate::model::Model;
use crate::params::{Params, RoutingKind};
use crate::pool::Team;
use crate::store::{Image, ImageReader, SlowStore};

pub use ladder::LadderTokens;
pub use paper::PaperTokens;

/// Room for one encoded key and value.
pub type RowBytes<'a> = (&'a mut [u8], &'a mut [u8]);

/// Copies an encoded key and value to where they are wanted.
pub fn copy_row(from: (&[u8], &[u8]), to: RowBytes) {
    to.0.copy_from_slice(from.0);
    to.1.copy_from_slice(from.1);
}

/// Tokens that the cache still holds whole, by their index in the sequence. Keys are centred
/// wherever the sequence has a centre.
pub trait OpenRows: Sync {
    /// One token's key and value of one KV head.
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]);

    /// Copies the same as stored, where it is stored, centred, in `codec`; says whether it is.
    fn copy_encoded(
        &self,
        _codec: RowCodec,
        _layer: usize,
        _head: usize,
        _token: usize,
        _out: RowBytes,
    ) -> bool {
        false
    }
}

/// The last queries of a sequence, before scaling.
pub trait RecentQueries: Sync {
    /// Queries held.
    fn count(&self) -> usize;

    /// Index in the sequence of the token whose query is number `i`.
    fn token(&self, i: usize) -> usize;

    /// Query `i` of one layer: `[n_heads][key_dim]`.
    fn query(&self, layer: usize, i: usize) -> &[f32];
}

/// The queries of one layer in one pass over one sequence. A unit is one token's query heads that
/// share a KV head: unit = token * n_kv_heads + KV head.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    pub layer: usize,
    pub n_kv_heads: usize,
    pub n_group: usize,
    /// `[units][n_group][key_dim]`, multiplied by the attention scale.
    pub q: &'a [f32],
    pub n_units: usize,
    /// Tokens in the sequence, the pass's own included.
    pub n_tokens: usize,
}

impl<'a> Queries<'a> {
    /// The heads of one unit: `[n_group][key_dim]`.
    pub fn unit(&self, unit: usize) -> &'a [f32] {
        let len = self.q.len() / self.n_units;
        &self.q[unit * len..][..len]
    }
}

/// Limits of a route that a host may change while the context runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct RouteLimits {
    /// Tokens read a unit at the most.
    pub fetch_budget: Option<usize>,
}

/// What a route decided for each unit, and the scores it decided by.
pub trait Plan: Send {
    /// Tokens of `unit` that attend reads from the slow tier.
    fn fetched(&self, unit: usize) -> usize;

    /// Tokens of `unit` seen at a resolution between coarse and exact.
    fn middle(&self, unit: usize) -> usize;

    /// Bytes of what grows with the number of sealed tokens.
    fn bytes(&self) -> u64;

    fn as_any(&mut self) -> &mut dyn Any;
}

/// Bytes that sealed tokens take, by tier and kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealedBytes {
    /// Rows kept whole on the fast tier: dense layers, anchors.
    pub resident: u64,
    /// Packed partial keys and their scales.
    pub sketch: u64,
    pub value_sketch: u64,
    /// Coarse rows.
    pub mean: u64,
    /// Centres, channel orders, value bases.
    pub layout: u64,
    /// Bookkeeping: block headers and lists.
    pub metadata: u64,
    /// Slow tier.
    pub slow: u64,
}

impl SealedBytes {
    pub fn plus(self, other: Self) -> Self {
        self.combine(other, |a, b| a + b)
    }

    pub fn minus(self, other: Self) -> Self {
        self.combine(other, u64::saturating_sub)
    }

    fn combine(self, other: Self, op: fn(u64, u64) -> u64) -> Self {
        Self {
            resident: op(self.resident, other.resident),
            sketch: op(self.sketch, other.sketch),
            value_sketch: op(self.value_sketch, other.value_sketch),
            mean: op(self.mean, other.mean),
            layout: op(self.layout, other.layout),
            metadata: op(self.metadata, other.metadata),
            slow: op(self.slow, other.slow),
        }
    }

    pub fn fast(&self) -> u64 {
        self.resident + self.sketch + self.value_sketch + self.mean + self.layout + self.metadata
    }
}

/// Allocations that were counted already: what several sequences share counts once.
#[derive(Default)]
pub struct Counted(HashSet<usize>);

impl Counted {
    /// Whether this is the first time that the allocation is asked about.
    pub fn is_new<T>(&mut self, shared: &Arc<T>) -> bool {
        self.0.insert(Arc::as_ptr(shared).addr())
    }
}

/// What sequences have made in the place of something that they shared, so that the next one takes
/// the same: by the addresses of what was replaced, and how. The values keep what was replaced
/// alive, so that no address comes twice.
#[derive(Default)]
pub struct Remade(HashMap<Vec<usize>, Box<dyn Any + Send>>);

impl Remade {
    /// What was made under `key`, or what `make` makes of it now.
    pub fn get_or_make<T: Clone + Send + 'static>(
        &mut self,
        key: Vec<usize>,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if let Some(made) = self.0.get(&key).and_then(|made| made.downcast_ref::<T>()) {
            return Ok(made.clone());
        }
        let made = make()?;
        self.0.insert(key, Box::new(made.clone()));
        Ok(made)
    }
}

/// What a routing did that a host should know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingReport {
    pub dense_layers: Vec<usize>,
    /// The layout was chosen without having seen a query.
    pub layout_without_queries: bool,
    /// Compressed spans, and tokens in spans of fixed length for lack of surprisal.
    pub spans: u64,
    pub tokens_without_surprisal: u64,
    /// Anchors that a short budget turned into ordinary tokens of their span.
    pub demoted_anchors: u64,
    /// Blocks whose sketch a short budget made smaller.
    pub repacked_blocks: u64,
    /// Lengths of compressed spans or blocks: bucket i counts lengths of 2^i to 2^(i+1) - 1.
    pub span_lengths: [u64; 20],
}

/// The making of a block from its rows, on any thread.
pub trait SealWork: Send {
    /// What [`SealedTokens::take_sealed`] takes.
    fn run(self: Box<Self>, rows: &dyn OpenRows) -> Result<Box<dyn Any + Send>>;
}

/// The sealed tokens of one sequence, all layers: those after the sinks and before the window.
pub trait SealedTokens: Send + Sync {
    /// Whether the sequence-wide choices have been made; before, nothing can be sealed.
    fn has_layout(&self) -> bool;

    /// Makes them, from tokens `0..n_tokens` and the last queries.
    fn lay_out(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        n_tokens: usize,
        queries: &dyn RecentQueries,
    ) -> Result<()>;

    /// What was subtracted from every key of this KV head; None: nothing.
    fn centre(&self, layer: usize, head: usize) -> Option<&[f32]>;

    /// Sealed tokens.
    fn n_tokens(&self) -> usize;

    /// How many of `n_open` tokens that have left the window can be sealed now. `surprisal` is
    /// theirs, NaN where unknown; with `force`, unknown surprisal is no reason to wait.
    fn sealable(&self, n_open: usize, surprisal: &[f32], force: bool) -> usize;

    /// Seals tokens `first..first + n` of the sequence. `surprisal` belongs to tokens
    /// `0..first + n`. On an error nothing is sealed.
    fn seal(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        first: usize,
        n: usize,
        surprisal: &[f32],
    ) -> Result<()>;

    /// The work that seals tokens `first..first + n` of the sequence, to be done ahead of time; None
    /// where this routing has none.
    fn seal_work(&self, _first: usize, _n: usize) -> Option<Box<dyn SealWork>> {
        None
    }

    /// Seals tokens from what their work has made, the same as [`Self::seal`] would have; says
    /// whether it did: it does not where other choices hold by now.
    fn take_sealed(&mut self, _made: Box<dyn Any + Send>) -> Result<bool> {
        Ok(false)
    }

    /// The same tokens for a copy of the sequence. What is sealed is shared, not copied; what one
    /// side does later the other does not see.
    fn share(&self) -> Box<dyn SealedTokens>;

    /// The same without sealed tokens `first..first + n`, which may be any.
    fn without(&self, team: &Team, first: usize, n: usize) -> Result<Box<dyn SealedTokens>>;

    /// The same with sealed tokens `first..first + n` moved by `delta` positions.
    fn shifted(
        &self,
        team: &Team,
        first: usize,
        n: usize,
        delta: i32,
    ) -> Result<Box<dyn SealedTokens>>;

    /// The largest number of sealed tokens up to `n_keep` at which the sequence can be cut.
    fn cut_below(&self, n_keep: usize) -> usize;

    /// Forgets all but the first `n_keep` sealed tokens; `n_keep` comes from `cut_below`.
    fn truncate(&mut self, n_keep: usize);

    /// Rebuilds sealed tokens `first..first + n` of one KV head: `keys` `[n][key_dim]`, centred,
    /// and `values` `[n][value_dim]`.
    fn read(
        &self,
        layer: usize,
        head: usize,
        first: usize,
        n: usize,
        keys: &mut [f32],
        values: &mut [f32],
    );

    fn new_plan(&self) -> Box<dyn Plan>;

    /// Scores the sealed tokens and chooses what to attend. `states` have seen all other rows.
    fn route(
        &self,
        team: &Team,
        queries: &Queries,
        states: &[SoftmaxState],
        limits: RouteLimits,
        plan: &mut dyn Plan,
    );

    /// Adds the sealed tokens to the states as the plan says.
    fn attend(
        &self,
        team: &Team,
        queries: &Queries,
        plan: &mut dyn Plan,
        states: &mut [SoftmaxState],
    );

    /// The end of a prompt: a last look at choices that the first tokens could not settle.
    /// `rows` has the `n_sinks` first tokens and those after the sealed ones, up to `n_tokens`.
    fn review(
        &mut self,
        team: &Team,
        rows: &dyn OpenRows,
        n_sinks: usize,
        n_tokens: usize,
        queries: &dyn RecentQueries,
    ) -> Result<()>;

    /// Bytes of what was not counted before.
    fn bytes(&self, counted: &mut Counted) -> SealedBytes;

    /// Bytes of `n` sealed tokens of a sequence like this one, from its first token on.
    fn estimate(&self, n: usize) -> SealedBytes;

    /// Fast-tier bytes that `n` more sealed tokens take: in full resolution, and at the least.
    fn bytes_to_seal(&self, n: usize) -> [u64; 2];

    /// Fast-tier bytes that what was not counted before needs at the least.
    fn minimum_bytes(&self, counted: &mut Counted) -> u64;

    /// Frees fast-tier bytes, oldest tokens first, until at least `excess` are free or nothing is
    /// left to free; returns what was freed, if no other sequence shares it.
    fn shrink(&mut self, team: &Team, excess: u64, remade: &mut Remade) -> Result<u64>;

    fn report(&self) -> RoutingReport;

    /// Writes all of it into an image, from which [`restore`] makes the same.
    fn save(&self, image: &mut Image) -> Result<()>;
}

/// The sealed tokens of a new sequence.
pub fn new_sequence(
    model: &Arc<Model>,
    params: &Arc<Params>,
    store: &SlowStore,
) -> Box<dyn SealedTokens> {
    match params.routing {
        RoutingKind::Ladder => Box::new(LadderTokens::new(model, params, store)),
        RoutingKind::Paper => Box::new(PaperTokens::new(model, params, store)),
    }
}

/// The sealed tokens that an image holds. Nothing in it is trusted.
pub fn restore(
    model: &Arc<Model>,
    params: &Arc<Params>,
    store: &SlowStore,
    image: &mut ImageReader,
) -> Result<Box<dyn SealedTokens>> {
    Ok(match params.routing {
        RoutingKind::Ladder => Box::new(LadderTokens::restore(model, params, store, image)?),
        RoutingKind::Paper => Box::new(PaperTokens::restore(model, params, store, image)?),
    })
}

/// Sealed bytes, resident tokens and slow-tier bytes of one sequence of `n_tokens`.
pub fn estimate(
    model: &Arc<Model>,
    params: &Arc<Params>,
    store: &SlowStore,
    n_tokens: usize,
) -> (SealedBytes, usize, u64) {
    if n_tokens < params.layout_tokens {
        return (SealedBytes::default(), n_tokens, 0);
    }
    let open = n_tokens - params.n_sinks.min(n_tokens);
    let n_seal = open.saturating_sub(params.window) / params.block_tokens * params.block_tokens;
    let sealed = new_sequence(model, params, store).estimate(n_seal);
    (sealed, n_tokens - n_seal, sealed.slow)
}
