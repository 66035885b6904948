//! Sizes and what happened.

use super::boundary::{call, required};
use super::context::{in_context, sekv_context};
use super::model::sekv_model;
use super::params::{read_params, sekv_params};
use super::sized::{self, SizedStruct};
use super::status::sekv_status;
use crate::cache::{self, Memory, Statistics, Times};
use crate::error::fail;

/// Bytes by tier and kind. What copies of a sequence share counts once.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct sekv_memory {
    /// sizeof(sekv_memory).
    pub struct_size: usize,
    /// Everything held on the fast tier between passes: the sum of the fast_*_bytes below.
    pub fast_bytes: u64,
    pub slow_bytes: u64,
    /// Buffers of the library's own, on neither tier.
    pub scratch_bytes: u64,
    /// Rows kept whole: sinks, window, dense layers, anchors.
    pub fast_resident_bytes: u64,
    /// Partial keys that sealed tokens are scored by.
    pub fast_sketch_bytes: u64,
    /// Partial values.
    pub fast_value_sketch_bytes: u64,
    /// Coarse rows.
    pub fast_mean_bytes: u64,
    /// Centres, channel orders, value bases.
    pub fast_layout_bytes: u64,
    /// Positions, surprisal, block headers and lists.
    pub fast_metadata_bytes: u64,
    /// What a full f16 cache of the same tokens would take, each sequence's by itself.
    pub full_f16_bytes: u64,
    /// What of slow_bytes lies in basis files. Contexts that have loaded the same state count its
    /// bytes each.
    pub slow_file_bytes: u64,
    /// 0. The struct is part of sekv_statistics, so its size never changes.
    pub reserved: [u64; 4],
}

// SAFETY: `struct_size` first, then numbers of eight bytes.
unsafe impl SizedStruct for sekv_memory {
    const NAME: &'static str = "sekv_memory";

    fn defaults() -> Self {
        Self { struct_size: size_of::<Self>(), ..Self::default() }
    }
}

impl From<Memory> for sekv_memory {
    fn from(memory: Memory) -> Self {
        Self {
            fast_bytes: memory.fast,
            slow_bytes: memory.slow,
            scratch_bytes: memory.scratch,
            fast_resident_bytes: memory.fast_resident,
            fast_sketch_bytes: memory.fast_sketch,
            fast_value_sketch_bytes: memory.fast_value_sketch,
            fast_mean_bytes: memory.fast_mean,
            fast_layout_bytes: memory.fast_layout,
            fast_metadata_bytes: memory.fast_metadata,
            full_f16_bytes: memory.full_f16,
            slow_file_bytes: memory.slow_file,
            ..Self::defaults()
        }
    }
}

/// Times of one kind of work, in seconds.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct sekv_times {
    /// Times measured.
    pub count: u64,
    /// Median. Above 102 microseconds, quantiles are exact to 19 %.
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

impl From<&Times> for sekv_times {
    fn from(times: &Times) -> Self {
        let [p50, p99, max] = times.summary();
        Self { count: times.count(), p50, p99, max }
    }
}

/// Where a context's surprisal came from.
#[repr(C)]
#[derive(Clone, Copy)]
pub enum sekv_surprisal_source {
    /// No token has any.
    SEKV_SURPRISAL_NONE = 0,
    /// The host gave it, for n_surprisal_tokens tokens.
    SEKV_SURPRISAL_HOST = 1,
}

/// What a context takes and did since sekv_init. All of it is counted or measured. A step is one
/// query token, one KV head and one layer that went through the routing.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct sekv_statistics {
    /// sizeof(sekv_statistics).
    pub struct_size: usize,
    /// Now; its struct_size is filled in too.
    pub memory: sekv_memory,
    /// Most that scratch_bytes has been at the end of a pass.
    pub scratch_peak_bytes: u64,
    /// Tokens of all sequences: resident ones are held whole, sealed ones at three resolutions.
    pub n_tokens: i64,
    pub n_resident_tokens: i64,
    pub n_sealed_tokens: i64,
    pub n_steps: u64,
    /// Tokens read exactly from the slow tier, a step.
    pub fetched_mean: f64,
    pub fetched_p99: f64,
    pub fetched_max: f64,
    /// Tokens seen through their value sketch, a step.
    pub middle_mean: f64,
    /// Layers that keep all their tokens resident, of the first sequence that has tokens.
    pub n_dense_layers: i32,
    /// 1: a sketch's layout was chosen without having seen a query.
    pub layout_without_queries: i32,
    /// Bytes moved from the slow tier.
    pub fetched_bytes: u64,
    /// Committed passes.
    pub n_passes: u64,
    /// Plans that attend used as they were, and those it scored anew for.
    pub n_plans_used: u64,
    pub n_plans_ignored: u64,
    /// Sealings that failed; their tokens stayed resident.
    pub n_seal_failures: u64,
    /// Blocks whose sketch a short budget made smaller.
    pub n_repacked_blocks: u64,
    /// Anchors that a short budget turned into ordinary tokens.
    pub n_demoted_anchors: u64,
    /// Sealed tokens in spans of fixed length for lack of surprisal (routing PAPER).
    pub n_tokens_without_surprisal: u64,
    /// enum sekv_surprisal_source.
    pub surprisal_source: i32,
    /// 0.
    pub reserved0: i32,
    /// Tokens whose surprisal is known.
    pub n_surprisal_tokens: i64,
    /// Sealed spans, or blocks.
    pub n_spans: u64,
    /// Their lengths: element i counts those of 2^i to 2^(i+1) - 1 tokens.
    pub span_lengths: [u64; 20],
    /// Scoring and selecting, a layer of a pass.
    pub route: sekv_times,
    /// Starting to bring what was selected.
    pub zoom: sekv_times,
    /// Attending, a layer of a pass, its routing included.
    pub attend: sekv_times,
    /// Sealing, a pass that sealed.
    pub seal: sekv_times,
    /// Blocks that were made while their tokens were in the window, before the commit that sealed
    /// them.
    pub n_sealed_ahead: u64,
}

// SAFETY: `struct_size` first, numbers, ends with eight bytes of number.
unsafe impl SizedStruct for sekv_statistics {
    const NAME: &'static str = "sekv_statistics";

    fn defaults() -> Self {
        Self { struct_size: size_of::<Self>(), memory: sekv_memory::defaults(), ..Self::default() }
    }
}

impl From<Statistics> for sekv_statistics {
    fn from(all: Statistics) -> Self {
        let Statistics { memory, counters, report, .. } = all;
        let source = if all.n_surprisal > 0 {
            sekv_surprisal_source::SEKV_SURPRISAL_HOST
        } else {
            sekv_surprisal_source::SEKV_SURPRISAL_NONE
        };
        Self {
            memory: memory.into(),
            scratch_peak_bytes: counters.scratch_peak,
            n_tokens: all.n_tokens as i64,
            n_resident_tokens: all.n_resident as i64,
            n_sealed_tokens: all.n_sealed as i64,
            n_steps: counters.fetched.count(),
            fetched_mean: counters.fetched.mean(),
            fetched_p99: counters.fetched.quantile(0.99),
            fetched_max: counters.fetched.max() as f64,
            middle_mean: counters.middle.mean(),
            n_dense_layers: report.dense_layers.len() as i32,
            layout_without_queries: i32::from(report.layout_without_queries),
            fetched_bytes: counters.fetched_bytes,
            n_passes: counters.passes,
            n_plans_used: counters.plans_used,
            n_plans_ignored: counters.plans_ignored,
            n_seal_failures: counters.seal_failures,
            n_repacked_blocks: report.repacked_blocks,
            n_demoted_anchors: report.demoted_anchors,
            n_tokens_without_surprisal: report.tokens_without_surprisal,
            surprisal_source: source as i32,
            n_surprisal_tokens: all.n_surprisal as i64,
            n_spans: report.spans,
            span_lengths: report.span_lengths,
            route: (&counters.route).into(),
            zoom: (&counters.zoom).into(),
            attend: (&counters.attend).into(),
            seal: (&counters.seal).into(),
            n_sealed_ahead: counters.sealed_ahead,
            ..Self::defaults()
        }
    }
}

/// Tells what a context of one sequence of n_tokens would take, before one is made. A dense layer
/// that a rule would choose is not in it.
///
/// @param params    filled by sekv_params_init, then by the host; read during the call only
/// @param n_tokens  0 to 2^31 - 1: positions are no larger
/// @param out       its struct_size is set by the host; the rest is filled
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_UNSUPPORTED, SEKV_ERR_MEMORY, SEKV_ERR_INTERNAL
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_estimate(
    model: Option<&sekv_model>,
    params: *const sekv_params,
    n_tokens: i64,
    out: *mut sekv_memory,
) -> sekv_status {
    call(|| {
        let model = required(model, "model")?;
        // SAFETY: as the header says of `params` and `out`.
        let (params, size) = unsafe { (read_params(params)?, sized::size_of_output(out, "out")?) };
        let n_tokens = match i32::try_from(n_tokens) {
            Ok(n @ 0..) => n as usize,
            _ => fail!(Argument, "n_tokens is {n_tokens}, expected 0 to {}", i32::MAX),
        };
        let memory = cache::estimate(&model.model, &params, n_tokens)?;
        // SAFETY: as the header says of `out`.
        unsafe { sized::write(out, "out", size, sekv_memory::from(memory)) }
    })
}

/// Tells what a context takes and did.
///
/// @param out  its struct_size is set by the host; the rest is filled
/// @return SEKV_OK, SEKV_ERR_ARGUMENT, SEKV_ERR_BUSY, SEKV_ERR_INTERNAL
///
/// Threads: the one that uses the context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sekv_stats(
    context: Option<&sekv_context>,
    out: *mut sekv_statistics,
) -> sekv_status {
    in_context(context, |state| {
        // SAFETY: as the header says of `out`.
        let size = unsafe { sized::size_of_output(out, "out")? };
        let statistics = state.cache.statistics().into();
        // SAFETY: as above.
        unsafe { sized::write::<sekv_statistics>(out, "out", size, statistics) }
    })
}
