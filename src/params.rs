//! What a host can choose for a context. Every default is the measured best; where it was
//! measured stands beside it (docs/evaluation.md has the tables).

use std::path::PathBuf;

use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::store::BasisIo;

/// How queries find their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RoutingKind {
    /// Every token is scored from a sketch; those that matter are read exactly.
    Ladder,
    /// The published method: spans cut by surprisal, gates, low-rank bases.
    Paper,
}

/// How a pass of many queries attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Prefill {
    /// Over every token, read back from the slow tier.
    Exact,
    /// Each query through the routing, as in decoding.
    Routed,
}

/// How much of a key the sketch keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SketchProfile {
    /// `Standard` below 96 dimensions, else `Compact`.
    Auto,
    /// d/8 dimensions at 4 bits, d/4 at 2.
    Compact,
    /// d/4 dimensions at 4 bits, d/4 at 2.
    Standard,
    /// d/2 dimensions at 4 bits.
    High,
    /// All of it as f32: the sketch's score is the exact one. For tests.
    Raw,
}

/// What rebuilds a sealed token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BasisCodec {
    /// Each token's key and value by itself.
    Rows(RowCodec),
    /// A truncated SVD of a span's keys and of its values, factors stored as the inner codec,
    /// where that is smaller than int8 rows (`F32`: always). Routing `paper` only.
    LowRank(RowCodec),
}

/// Which layers keep all their tokens resident.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DenseLayers {
    /// Those whose attention is diffuse, at most one in 16.
    Rule,
    List(Vec<usize>),
    None,
}

/// A limit on the fast tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FastBudget {
    Unlimited,
    Bytes(u64),
    /// Of what a full f16 cache of the same tokens would take.
    FractionOfF16(f32),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    pub n_seq_max: usize,
    pub n_batch_max: usize,
    /// The calling thread counts as one. 0: one for each core.
    pub n_threads: usize,
    pub routing: RoutingKind,
    pub prefill: Prefill,
    /// The first tokens of a sequence stay resident: they are the attention sinks.
    pub n_sinks: usize,
    /// The last tokens stay resident.
    pub window: usize,
    /// Tokens that are sealed and quantised together.
    pub block_tokens: usize,
    /// The sketch's layout is chosen when a sequence has this many tokens; before, every token is
    /// resident and raw.
    pub layout_tokens: usize,
    pub sketch: SketchProfile,
    pub value_sketch: bool,
    pub resident_codec: RowCodec,
    pub basis_codec: BasisCodec,
    pub mean_codec: RowCodec,
    pub dense: DenseLayers,
    /// Attention mass on tokens of small share above which a layer is diffuse.
    pub dense_threshold: f32,
    /// A token is read exactly where its share of the attention, mean over the heads that share
    /// a KV head, exceeds this (epsilon).
    pub share_threshold: f32,
    /// Sequence length at which `share_threshold` holds as it is; it scales as the square root of this
    /// over N: by 1 / N a long sequence would read ever more tokens, and a constant would miss ever
    /// more of the attention (docs/evaluation.md).
    /// 0: it holds at every length.
    pub share_reference: usize,
    /// Tokens with a share above this fraction of epsilon add their value sketch; beyond twice
    /// `share_reference` tokens, of epsilon at that length.
    pub middle_fraction: f32,
    /// Tokens read a step and KV head at the most, largest shares first.
    pub fetch_budget: Option<usize>,
    pub fast_budget: FastBudget,
    /// Anchors are tokens whose surprisal exceeds mean + alpha * deviation.
    pub surprisal_alpha: f32,
    /// Spans shorter than this stay whole (l_min).
    pub span_min: usize,
    /// Longer spans are split (l_max).
    pub span_max: usize,
    /// Largest rank of a low-rank basis.
    pub rank_max: usize,
    /// Relative error at which a basis may stop below `rank_max`; 0: never.
    pub low_rank_error: f32,
    /// Tokens that a sequence is expected to reach; only reserves memory.
    pub n_tokens_hint: usize,
    pub seed: u64,
    /// Folder of the basis files, which the slow tier lies in; None: in anonymous memory.
    pub basis_folder: Option<PathBuf>,
    /// Bytes that they may take together; what does not fit goes to anonymous memory.
    pub basis_limit: u64,
    pub basis_io: BasisIo,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            n_seq_max: 16,
            n_batch_max: 2048,
            n_threads: 0,
            routing: RoutingKind::Ladder,
            prefill: Prefill::Exact,
            n_sinks: 4,
            window: 128,
            block_tokens: 64,
            layout_tokens: 1024,
            sketch: SketchProfile::Auto,
            value_sketch: true,
            resident_codec: RowCodec::Int8,
            basis_codec: BasisCodec::Rows(RowCodec::Int8),
            mean_codec: RowCodec::Int8,
            dense: DenseLayers::Rule,
            dense_threshold: 0.5,
            share_threshold: 1.6e-4,
            share_reference: 4096,
            middle_fraction: 0.1,
            fetch_budget: None,
            fast_budget: FastBudget::Unlimited,
            surprisal_alpha: 1.0,
            span_min: 16,
            span_max: 512,
            rank_max: 32,
            low_rank_error: 0.0,
            n_tokens_hint: 0,
            seed: 0,
            basis_folder: None,
            basis_limit: u64::MAX,
            basis_io: BasisIo::Mmap,
        }
    }
}

/// Limits that keep sizes inside what one host can mean.
pub const MAX_SEQUENCES: usize = 4096;
pub const MAX_BATCH: usize = 1 << 20;
pub const MAX_THREADS: usize = 1024;
pub const MAX_BLOCK_TOKENS: usize = 1024;

impl Params {
    /// Refuses what cannot be meant. Small extremes are legal: one token a block, no window, no
    /// sinks.
    pub fn validate(&self, n_layers: usize) -> Result<()> {
        let counts = [
            ("n_seq_max", self.n_seq_max, 1, MAX_SEQUENCES),
            ("n_batch_max", self.n_batch_max, 1, MAX_BATCH),
            ("n_threads", self.n_threads, 0, MAX_THREADS),
            ("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS),
            ("layout_tokens", self.layout_tokens, 1, MAX_BATCH),
            ("span_min", self.span_min, 1, MAX_BATCH),
            ("span_max", self.span_max, self.span_min, i32::MAX as usize),
            ("r_max", self.rank_max, 1, 1024),
        ];
        for (name, value, low, high) in counts {
            if value < low || value > high {
                fail!(Argument, "{name} is {value}, expected {low} to {high}");
            }
        }
        let fractions = [
            ("dense_threshold", self.dense_threshold, 1.0),
            ("share_threshold", self.share_threshold, 1.0),
            ("middle_fraction", self.middle_fraction, 1.0),
            ("low_rank_error", self.low_rank_error, 1.0),
            ("surprisal_alpha", self.surprisal_alpha, 1e6),
        ];
        for (name, value, high) in fractions {
            if !(0.0..=high).contains(&value) {
                fail!(Argument, "{name} is {value}, expected 0 to {high}");
            }
        }
        if let FastBudget::FractionOfF16(f) = self.fast_budget
            && !f.is_finite()
        {
            fail!(Argument, "fast_budget_fraction is {f}, expected a number");
        }
        if let DenseLayers::List(list) = &self.dense
            && let Some(&layer) = list.iter().find(|&&il| il >= n_layers)
        {
            fail!(Argument, "dense layer {layer} does not exist, the model has {n_layers}");
        }
        if self.routing == RoutingKind::Ladder && matches!(self.basis_codec, BasisCodec::LowRank(_))
        {
            fail!(
                Unsupported,
                "a low-rank basis needs routing 'paper', found 'ladder': choose a codec of rows"
            );
        }
        Ok(())
    }

    /// The profile in force for keys of `key_dim` dimensions.
    pub fn sketch_profile(&self, key_dim: usize) -> SketchProfile {
        match self.sketch {
            SketchProfile::Auto if key_dim < 96 => SketchProfile::Standard,
            SketchProfile::Auto => SketchProfile::Compact,
            chosen => chosen,
        }
    }
}
