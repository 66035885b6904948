//! Params of a context.

use std::ffi::c_char;
use std::ptr;

use super::boundary::{array, call, count};
use super::model::path;
use super::sized::{self, SizedStruct};
use super::status::sekv_status;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::model::MAX_LAYERS;
use crate::params::{
    BasisCodec, DenseLayers, FastBudget, Params, Prefill, RoutingKind, SketchProfile,
};
use crate::store::BasisIo;

/// How queries find their tokens.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_routing {
    /// Every token is scored from a sketch; those that matter are read exactly.
    SEKV_ROUTING_LADDER = 0,
    /// The published method: spans cut by surprisal, gates, low-rank bases.
    SEKV_ROUTING_PAPER = 1,
}

/// How a pass of more than 16 tokens of a sequence attends.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_prefill {
    /// Over every token, read back from the slow tier.
    SEKV_PREFILL_EXACT = 0,
    /// Each query through the routing, as in decoding.
    SEKV_PREFILL_LADDER = 1,
}

/// How much of a key the sketch keeps, of d dimensions.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_sketch {
    /// STANDARD below 96 dimensions, else COMPACT.
    SEKV_SKETCH_AUTO = 0,
    /// d/8 at 4 bits, d/4 at 2.
    SEKV_SKETCH_COMPACT = 1,
    /// d/4 at 4 bits, d/4 at 2.
    SEKV_SKETCH_STANDARD = 2,
    /// d/2 at 4 bits.
    SEKV_SKETCH_HIGH = 3,
    /// All as f32, for tests.
    SEKV_SKETCH_RAW = 4,
}

/// How rows are stored.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_codec {
    SEKV_CODEC_F32 = 0,
    SEKV_CODEC_F16 = 1,
    /// 8 bits an element and an f16 scale for each 16 of a row.
    SEKV_CODEC_INT8 = 2,
    /// A span's truncated SVD, its factors as f16. For codec_basis, routing PAPER only.
    SEKV_CODEC_LOW_RANK_F16 = 3,
    /// The same, its factors as int8.
    SEKV_CODEC_LOW_RANK_INT8 = 4,
    /// The same, its factors as f32.
    SEKV_CODEC_LOW_RANK_F32 = 5,
}

/// Which layers keep all their tokens on the fast tier.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_dense {
    /// Those whose attention is diffuse, at most one in 16.
    SEKV_DENSE_RULE = 0,
    /// Those in dense_layers.
    SEKV_DENSE_LIST = 1,
    SEKV_DENSE_NONE = 2,
}

/// How basis files are read and written.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_basis_io {
    /// Through memory maps. A medium that fails while a row is fetched is the system's SIGBUS.
    SEKV_BASIS_MMAP = 0,
    /// By reads and writes: slower, and such a failure is SEKV_ERR_IO.
    SEKV_BASIS_PREAD = 1,
}

/// What a host chooses for a context. The defaults are the measured best; small extremes (one
/// token a block, no window, no sinks) are legal.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct sekv_params {
    /// sizeof(sekv_params).
    pub struct_size: usize,
    /// Sequences, 1 to 4,096. Default 16.
    pub n_seq_max: i32,
    /// Tokens of a batch at the most, 1 to 1,048,576. Default 2048.
    pub n_batch_max: i32,
    /// Threads, the calling one included; 0: one for each core. Default 0.
    pub n_threads: i32,
    /// enum sekv_routing. Default SEKV_ROUTING_LADDER.
    pub routing: i32,
    /// enum sekv_prefill. Default SEKV_PREFILL_EXACT.
    pub prefill: i32,
    /// The first tokens of a sequence that stay resident. Default 4.
    pub n_sinks: i32,
    /// The last tokens that stay resident. Default 128.
    pub window: i32,
    /// Tokens that are sealed together, 1 to 1,024. Default 64.
    pub block_tokens: i32,
    /// Tokens of a sequence at which its sketch's layout is chosen; before, nothing is sealed.
    /// Default 1024.
    pub layout_tokens: i32,
    /// enum sekv_sketch. Default SEKV_SKETCH_AUTO.
    pub sketch: i32,
    /// 1: values have a sketch too; 0: not. Default 1.
    pub value_sketch: i32,
    /// enum sekv_codec of sinks, window and dense layers. Default SEKV_CODEC_INT8.
    pub codec_resident: i32,
    /// enum sekv_codec of sealed tokens. Default SEKV_CODEC_INT8.
    pub codec_basis: i32,
    /// enum sekv_codec of coarse rows. Default SEKV_CODEC_INT8.
    pub codec_mean: i32,
    /// enum sekv_dense. Default SEKV_DENSE_RULE.
    pub dense: i32,
    /// Length of dense_layers. Default 0.
    pub n_dense_layers: i32,
    /// [n_dense_layers] for SEKV_DENSE_LIST; else not read. Read during the call only.
    pub dense_layers: *const i32,
    /// Attention mass on tokens of small share above which a layer is diffuse. Default 0.5.
    pub dense_threshold: f32,
    /// A token is read exactly where its share of the attention exceeds this (epsilon).
    pub share_threshold: f32,
    /// Tokens of a sequence at which share_threshold holds as it is; it scales as the square root
    /// of this over their number. 0: it always holds as it is. Default 4096.
    pub share_reference: i32,
    /// Tokens whose share exceeds this fraction of epsilon add their value sketch; beyond twice
    /// share_reference tokens, of epsilon at that length. Default 0.1.
    pub middle_fraction: f32,
    /// Tokens that a step and KV head may read exactly; 0: none; negative: no limit. Default -1.
    pub fetch_budget: i64,
    /// Bytes that the fast tier may take; UINT64_MAX: no limit. Default UINT64_MAX.
    pub fast_budget_bytes: u64,
    /// The same as a fraction of a full f16 cache of the same tokens; negative: no limit.
    /// Default -1. At most one of both may be a limit.
    pub fast_budget_fraction: f32,
    /// Anchors are tokens whose surprisal exceeds mean + alpha * deviation. Default 1.
    pub surprisal_alpha: f32,
    /// Spans shorter than this stay whole (l_min). Default 16.
    pub span_min: i32,
    /// Longer spans are split (l_max). Default 512.
    pub span_max: i32,
    /// Largest rank of a low-rank basis, 1 to 1,024. Default 32.
    pub r_max: i32,
    /// Relative error at which a basis may stop below r_max; 0: never. Default 0.
    pub low_rank_error: f32,
    /// Tokens that a sequence is expected to reach; 0: unknown. It only reserves memory.
    pub n_tokens_hint: i64,
    pub seed: u64,
    /// Folder for the basis files, in which the slow tier then lies: unnamed files that end with
    /// the context. Read during the call only. NULL: the slow tier lies in anonymous memory.
    /// Default NULL.
    pub basis_folder: *const c_char,
    /// Bytes that the basis files may take together; UINT64_MAX: no limit. Beyond it, or when the
    /// disk is full, the slow tier goes on in anonymous memory, and a log line says so. Default
    /// UINT64_MAX.
    pub basis_limit_bytes: u64,
    /// enum sekv_basis_io. Default SEKV_BASIS_MMAP.
    pub basis_io: i32,
    /// 0.
    pub reserved0: i32,
}

// SAFETY: `struct_size` first, numbers and a pointer, ends with eight bytes of number.
unsafe impl SizedStruct for sekv_params {
    const NAME: &'static str = "sekv_params";

    fn defaults() -> Self {
        let params = Params::default();
        // Defaults are far below what an i32 holds.
        let number = |n: usize| n as i32;
        Self {
            struct_size: size_of::<Self>(),
            n_seq_max: number(params.n_seq_max),
            n_batch_max: number(params.n_batch_max),
            n_threads: number(params.n_threads),
            routing: match params.routing {
                RoutingKind::Ladder => sekv_routing::SEKV_ROUTING_LADDER,
                RoutingKind::Paper => sekv_routing::SEKV_ROUTING_PAPER,
            } as i32,
            prefill: match params.prefill {
                Prefill::Exact => sekv_prefill::SEKV_PREFILL_EXACT,
                Prefill::Routed => sekv_prefill::SEKV_PREFILL_LADDER,
            } as i32,
            n_sinks: number(params.n_sinks),
            window: number(params.window),
            block_tokens: number(params.block_tokens),
            layout_tokens: number(params.layout_tokens),
            sketch: match params.sketch {
                SketchProfile::Auto => sekv_sketch::SEKV_SKETCH_AUTO,
                SketchProfile::Compact => sekv_sketch::SEKV_SKETCH_COMPACT,
                SketchProfile::Standard => sekv_sketch::SEKV_SKETCH_STANDARD,
                SketchProfile::High => sekv_sketch::SEKV_SKETCH_HIGH,
                SketchProfile::Raw => sekv_sketch::SEKV_SKETCH_RAW,
            } as i32,
            value_sketch: i32::from(params.value_sketch),
            codec_resident: codec_number(BasisCodec::Rows(params.resident_codec)),
            codec_basis: codec_number(params.basis_codec),
            codec_mean: codec_number(BasisCodec::Rows(params.mean_codec)),
            dense: match params.dense {
                DenseLayers::Rule => sekv_dense::SEKV_DENSE_RULE,
                DenseLayers::List(_) => sekv_dense::SEKV_DENSE_LIST,
                DenseLayers::None => sekv_dense::SEKV_DENSE_NONE,
            } as i32,
            n_dense_layers: 0,
            dense_layers: ptr::null(),
            dense_threshold: params.dense_threshold,
            share_threshold: params.share_threshold,
            share_reference: number(params.share_reference),
            middle_fraction: params.middle_fraction,
            fetch_budget: params.fetch_budget.map_or(-1, |n| n as i64),
            fast_budget_bytes: match params.fast_budget {
                FastBudget::Bytes(bytes) => bytes,
                _ => u64::MAX,
            },
            fast_budget_fraction: match params.fast_budget {
                FastBudget::FractionOfF16(fraction) => fraction,
                _ => -1.0,
            },
            surprisal_alpha: params.surprisal_alpha,
            span_min: number(params.span_min),
            span_max: number(params.span_max),
            r_max: number(params.rank_max),
            low_rank_error: params.low_rank_error,
            n_tokens_hint: params.n_tokens_hint as i64,
            seed: params.seed,
            basis_folder: ptr::null(),
            basis_limit_bytes: params.basis_limit,
            basis_io: match params.basis_io {
                BasisIo::Mmap => sekv_basis_io::SEKV_BASIS_MMAP,
                BasisIo::Pread => sekv_basis_io::SEKV_BASIS_PREAD,
            } as i32,
            reserved0: 0,
        }
    }
}

fn codec_number(codec: BasisCodec) -> i32 {
    let codec = match codec {
        BasisCodec::Rows(RowCodec::F32) => sekv_codec::SEKV_CODEC_F32,
        BasisCodec::Rows(RowCodec::F16) => sekv_codec::SEKV_CODEC_F16,
        BasisCodec::Rows(RowCodec::Int8) => sekv_codec::SEKV_CODEC_INT8,
        BasisCodec::LowRank(RowCodec::F32) => sekv_codec::SEKV_CODEC_LOW_RANK_F32,
        BasisCodec::LowRank(RowCodec::F16) => sekv_codec::SEKV_CODEC_LOW_RANK_F16,
        BasisCodec::LowRank(RowCodec::Int8) => sekv_codec::SEKV_CODEC_LOW_RANK_INT8,
    };
    codec as i32
}

/// The choice that a number names.
fn choice<T: Copy>(name: &str, number: i32, choices: &[(&str, T)]) -> Result<T> {
    match usize::try_from(number).ok().and_then(|i| choices.get(i)) {
        Some(&(_, choice)) => Ok(choice),
        None => {
            let list: Vec<String> =
                choices.iter().enumerate().map(|(i, (name, _))| format!("{name} ({i})")).collect();
            fail!(Argument, "{name} is {number}, expected one of {}", list.join(", "))
        }
    }
}

const ROW_CODECS: [(&str, RowCodec); 3] = [
    ("SEKV_CODEC_F32", RowCodec::F32),
    ("SEKV_CODEC_F16", RowCodec::F16),
    ("SEKV_CODEC_INT8", RowCodec::Int8),
];

const BASIS_CODECS: [(&str, BasisCodec); 6] = [
    ("SEKV_CODEC_F32", BasisCodec::Rows(RowCodec::F32)),
    ("SEKV_CODEC_F16", BasisCodec::Rows(RowCodec::F16)),
    ("SEKV_CODEC_INT8", BasisCodec::Rows(RowCodec::Int8)),
    ("SEKV_CODEC_LOW_RANK_F16", BasisCodec::LowRank(RowCodec::F16)),
    ("SEKV_CODEC_LOW_RANK_INT8", BasisCodec::LowRank(RowCodec::Int8)),
    ("SEKV_CODEC_LOW_RANK_F32", BasisCodec::LowRank(RowCodec::F32)),
];

/// Reads a host's params. Ranges are checked by `Params::validate`.
///
/// # Safety
/// `from` is NULL or params as their type describes.
pub(super) unsafe fn read_params(from: *const sekv_params) -> Result<Params> {
    // SAFETY: the caller's promise.
    let from = unsafe { sized::read(from, "params")? };
    let routings =
        [("SEKV_ROUTING_LADDER", RoutingKind::Ladder), ("SEKV_ROUTING_PAPER", RoutingKind::Paper)];
    let prefills =
        [("SEKV_PREFILL_EXACT", Prefill::Exact), ("SEKV_PREFILL_LADDER", Prefill::Routed)];
    let sketches = [
        ("SEKV_SKETCH_AUTO", SketchProfile::Auto),
        ("SEKV_SKETCH_COMPACT", SketchProfile::Compact),
        ("SEKV_SKETCH_STANDARD", SketchProfile::Standard),
        ("SEKV_SKETCH_HIGH", SketchProfile::High),
        ("SEKV_SKETCH_RAW", SketchProfile::Raw),
    ];
    let switch = [("off", false), ("on", true)];
    let basis_ios = [("SEKV_BASIS_MMAP", BasisIo::Mmap), ("SEKV_BASIS_PREAD", BasisIo::Pread)];
    if from.reserved0 != 0 {
        fail!(Argument, "reserved0 of the params is {}, expected 0", from.reserved0);
    }
    Ok(Params {
        n_seq_max: count("n_seq_max", from.n_seq_max)?,
        n_batch_max: count("n_batch_max", from.n_batch_max)?,
        n_threads: count("n_threads", from.n_threads)?,
        routing: choice("routing", from.routing, &routings)?,
        prefill: choice("prefill", from.prefill, &prefills)?,
        n_sinks: count("n_sinks", from.n_sinks)?,
        window: count("window", from.window)?,
        block_tokens: count("block_tokens", from.block_tokens)?,
        layout_tokens: count("layout_tokens", from.layout_tokens)?,
        sketch: choice("sketch", from.sketch, &sketches)?,
        value_sketch: choice("value_sketch", from.value_sketch, &switch)?,
        resident_codec: choice("codec_resident", from.codec_resident, &ROW_CODECS)?,
        basis_codec: choice("codec_basis", from.codec_basis, &BASIS_CODECS)?,
        mean_codec: choice("codec_mean", from.codec_mean, &ROW_CODECS)?,
        // SAFETY: the caller's promise.
        dense: unsafe { dense_layers(&from)? },
        dense_threshold: from.dense_threshold,
        share_threshold: from.share_threshold,
        share_reference: count("share_reference", from.share_reference)?,
        middle_fraction: from.middle_fraction,
        fetch_budget: fetch_budget(from.fetch_budget),
        fast_budget: fast_budget(&from)?,
        surprisal_alpha: from.surprisal_alpha,
        span_min: count("span_min", from.span_min)?,
        span_max: count("span_max", from.span_max)?,
        rank_max: count("r_max", from.r_max)?,
        low_rank_error: from.low_rank_error,
        n_tokens_hint: match usize::try_from(from.n_tokens_hint) {
            Ok(n) => n,
            Err(_) => {
                fail!(Argument, "n_tokens_hint is {}, expected 0 or more", from.n_tokens_hint)
            }
        },
        seed: from.seed,
        // SAFETY: the caller's promise.
        basis_folder: unsafe { path(from.basis_folder, "basis_folder")? },
        basis_limit: from.basis_limit_bytes,
        basis_io: choice("basis_io", from.basis_io, &basis_ios)?,
    })
}

/// Tokens a step; None: no limit.
pub(super) fn fetch_budget(tokens: i64) -> Option<usize> {
    usize::try_from(tokens).ok()
}

/// Bytes of the fast tier, UINT64_MAX for no limit.
pub(super) fn fast_budget_bytes(bytes: u64) -> FastBudget {
    if bytes == u64::MAX { FastBudget::Unlimited } else { FastBudget::Bytes(bytes) }
}

fn fast_budget(from: &sekv_params) -> Result<FastBudget> {
    // NaN is no negative number: it goes on and is refused as a fraction.
    if from.fast_budget_fraction < 0.0 {
        return Ok(fast_budget_bytes(from.fast_budget_bytes));
    }
    if from.fast_budget_bytes != u64::MAX {
        fail!(
            Argument,
            "fast_budget_bytes is {} and fast_budget_fraction {}, expected at most one limit \
             (none is UINT64_MAX and -1)",
            from.fast_budget_bytes,
            from.fast_budget_fraction
        );
    }
    Ok(FastBudget::FractionOfF16(from.fast_budget_fraction))
}

/// # Safety
/// `dense_layers` of the params has `n_dense_layers` values.
unsafe fn dense_layers(from: &sekv_params) -> Result<DenseLayers> {
    let kinds = [
        ("SEKV_DENSE_RULE", DenseKind::Rule),
        ("SEKV_DENSE_LIST", DenseKind::List),
        ("SEKV_DENSE_NONE", DenseKind::None),
    ];
    let n = count("n_dense_layers", from.n_dense_layers)?;
    if n > MAX_LAYERS {
        fail!(Argument, "n_dense_layers is {n}, expected at most {MAX_LAYERS}");
    }
    match choice("dense", from.dense, &kinds)? {
        DenseKind::Rule => Ok(DenseLayers::Rule),
        DenseKind::None => Ok(DenseLayers::None),
        DenseKind::List if n == 0 => Ok(DenseLayers::List(Vec::new())),
        DenseKind::List => {
            // SAFETY: the caller's promise.
            let list = unsafe { array(from.dense_layers, n, "dense_layers")? };
            let list = list.iter().map(|&layer| count("a dense layer", layer));
            Ok(DenseLayers::List(list.collect::<Result<_>>()?))
        }
    }
}

#[derive(Clone, Copy)]
enum DenseKind {
    Rule,
    List,
    None,
}

/// Fills a sekv_params with the defaults.
///
/// @param params       the host's; its first struct_size bytes are written
/// @param struct_size  sizeof(sekv_params) as the host was compiled
/// @return SEKV_OK, SEKV_ERR_ARGUMENT (NULL, an impossible size)
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_params_init(
    params: *mut sekv_params,
    struct_size: usize,
) -> sekv_status {
    // SAFETY: as the header says of `params`.
    call(|| unsafe { sized::write(params, "params", struct_size, SizedStruct::defaults()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_survive_the_way_through_c() {
        let defaults = sekv_params::defaults();
        // SAFETY: a whole struct.
        let read = unsafe { read_params(&raw const defaults) }.unwrap();
        assert_eq!(read, Params::default());
    }
}
