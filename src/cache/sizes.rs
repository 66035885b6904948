//! What a context takes and did, and what one would take.

use std::sync::Arc;

use super::context::Context;
use super::residents::Residents;
use super::sequence::Sequence;
use super::statistics::Counters;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::model::Model;
use crate::params::Params;
use crate::routing::{self, Counted, RoutingReport, SealedBytes};
use crate::store::SlowStore;

/// Bytes by tier and kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Everything held on the fast tier between passes: the sum of the kinds.
    pub fast: u64,
    /// A block that is being made ahead of time is among it.
    pub slow: u64,
    /// What of it lies in basis files.
    pub slow_file: u64,
    /// Buffers of the library's own, neither tier.
    pub scratch: u64,
    /// Rows kept whole: sinks, window, dense layers, anchors.
    pub fast_resident: u64,
    pub fast_sketch: u64,
    pub fast_value_sketch: u64,
    pub fast_mean: u64,
    pub fast_layout: u64,
    pub fast_metadata: u64,
    /// A full f16 cache of the same tokens.
    pub full_f16: u64,
}

impl Memory {
    fn add(&mut self, sealed: SealedBytes, residents: u64, metadata: u64) {
        self.fast_resident += sealed.resident + residents;
        self.fast_sketch += sealed.sketch;
        self.fast_value_sketch += sealed.value_sketch;
        self.fast_mean += sealed.mean;
        self.fast_layout += sealed.layout;
        self.fast_metadata += sealed.metadata + metadata;
        self.fast += sealed.fast() + residents + metadata;
    }
}

/// A snapshot of a context.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    pub memory: Memory,
    pub counters: Counters,
    pub n_tokens: u64,
    pub n_resident: u64,
    pub n_sealed: u64,
    /// Tokens whose surprisal is known.
    pub n_surprisal: u64,
    /// Summed over sequences; `dense_layers` of the first sequence that has tokens.
    pub report: RoutingReport,
}

impl Context {
    pub fn statistics(&self) -> Statistics {
        let mut all = Statistics { counters: self.counters.clone(), ..Default::default() };
        let mut counted = Counted::default();
        for sequence in self.sequences.iter().flatten() {
            let sealed = sequence.sealed.bytes(&mut counted);
            all.memory.add(sealed, sequence.residents.bytes(), sequence.metadata_bytes());
            all.n_tokens += sequence.n_tokens() as u64;
            all.n_sealed += sequence.sealed.n_tokens() as u64;
            all.n_surprisal += sequence.surprisal.iter().filter(|s| !s.is_nan()).count() as u64;
        }
        all.report = self.report();
        all.n_resident = all.n_tokens - all.n_sealed;
        all.memory.slow = self.store.bytes();
        all.memory.slow_file = self.store.file_bytes();
        all.memory.scratch = self.scratch_bytes();
        let token = Residents::bytes_a_token(&self.model.geometry, RowCodec::F16);
        all.memory.full_f16 = all.n_tokens * token;
        all
    }

    /// What the routing did, summed over sequences.
    pub fn report(&self) -> RoutingReport {
        let mut all = RoutingReport::default();
        for sequence in self.sequences.iter().flatten() {
            let report = sequence.sealed.report();
            if all.dense_layers.is_empty() {
                all.dense_layers = report.dense_layers;
            }
            all.layout_without_queries |= report.layout_without_queries;
            all.spans += report.spans;
            all.tokens_without_surprisal += report.tokens_without_surprisal;
            all.demoted_anchors += report.demoted_anchors;
            all.repacked_blocks += report.repacked_blocks;
            for (sum, n) in all.span_lengths.iter_mut().zip(report.span_lengths) {
                *sum += n;
            }
        }
        all
    }
}

/// What a context of one sequence of `n_tokens` would take, without a dense layer chosen by rule.
pub fn estimate(model: &Arc<Model>, params: &Params, n_tokens: usize) -> Result<Memory> {
    params.validate(model.geometry.layers.len())?;
    // Both tiers together take less than two times raw rows.
    let raw = Residents::bytes_a_token(&model.geometry, RowCodec::F32);
    if (n_tokens as u64).checked_mul(2 * raw).is_none() {
        fail!(Argument, "{n_tokens} tokens of {raw} bytes each are more than 64 bits can count");
    }
    let params = Arc::new(params.clone());
    let mut memory = Memory::default();
    let (sealed, n_resident, slow) =
        routing::estimate(model, &params, &SlowStore::default(), n_tokens);
    let codec = if n_tokens < params.layout_tokens { RowCodec::F32 } else { params.resident_codec };
    let rows = Sequence::rows_to_reserve(n_resident);
    let residents = rows as u64 * Residents::bytes_a_token(&model.geometry, codec);
    memory.add(sealed, residents, Sequence::metadata_bytes_of(n_tokens));
    memory.slow = slow;
    memory.slow_file = if params.basis_folder.is_some() { slow.min(params.basis_limit) } else { 0 };
    memory.full_f16 = n_tokens as u64 * Residents::bytes_a_token(&model.geometry, RowCodec::F16);
    Ok(memory)
}
