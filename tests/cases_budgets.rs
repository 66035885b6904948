//! Budgets of every size: a right answer, or an error with the bytes needed and given.

mod common;

use common::{Harness, Shape, raw_params, sealed_params};
use sekv::error::Status;
use sekv::params::{DenseLayers, FastBudget, Params, SketchProfile};

fn params() -> Params {
    Params {
        n_threads: 1,
        n_sinks: 2,
        window: 16,
        block_tokens: 16,
        layout_tokens: 32,
        share_threshold: 0.0,
        sketch: SketchProfile::High,
        dense: DenseLayers::List(vec![0]),
        ..Params::default()
    }
}

fn harness(params: Params) -> Harness {
    Harness::new(Shape::uniform(3, 4, 2, 64), params, 21)
}

fn members(n: usize) -> Vec<Vec<i32>> {
    vec![vec![0]; n]
}

#[test]
fn a_budget_of_zero_is_refused_with_both_numbers() {
    let mut harness = harness(Params { fast_budget: FastBudget::Bytes(0), ..params() });
    let error = harness.pass_of(&members(20)).unwrap_err();
    assert_eq!(error.status, Status::Budget);
    assert!(error.message.contains("budget is 0"), "{}", error.message);
    assert_eq!(harness.context.statistics().n_tokens, 0);
}

#[test]
fn a_budget_below_what_must_stay_resident_changes_nothing() {
    let mut harness = harness(params());
    harness.pass(200);
    let before = harness.context.statistics().memory;
    harness.context.set_fast_budget(FastBudget::Bytes(10_000));
    let error = harness.pass_of(&members(1)).unwrap_err();
    assert_eq!(error.status, Status::Budget);
    assert_eq!(harness.context.statistics().memory, before);
    harness.context.set_fast_budget(FastBudget::Unlimited);
    // The refused pass has used a position, and nothing else.
    assert!(harness.pass(1) < 0.05);
}

#[test]
fn a_budget_that_holds_everything_raw_equals_dense() {
    let budget = FastBudget::Bytes(64 << 20);
    let mut harness = harness(Params { fast_budget: budget, ..raw_params() });
    for n in [100, 1, 30, 1] {
        assert!(harness.pass(n) < 2e-5, "{}", harness.worst);
    }
}

/// The answers stay right while dense layers are sealed and sketches shrink to means: every token
/// is still read from the slow tier.
#[test]
fn a_shrinking_budget_gives_up_resolution_in_order_and_stays_right() {
    let mut harness = harness(params());
    harness.pass(400);
    let full = harness.context.statistics();
    assert_eq!(full.report.dense_layers, [0]);
    let (mut shrunk_dense, mut repacked) = (false, 0);
    let mut budget = full.memory.fast;
    loop {
        budget -= budget / 20;
        harness.context.set_fast_budget(FastBudget::Bytes(budget));
        match harness.pass_of(&members(1)) {
            Ok(worst) => assert!(worst < 0.05, "budget {budget}: {worst}"),
            Err(error) => {
                assert_eq!(error.status, Status::Budget);
                break;
            }
        }
        let now = harness.context.statistics();
        assert!(now.memory.fast <= budget, "{} > {budget}", now.memory.fast);
        if now.report.repacked_blocks > 0 {
            assert!(now.report.dense_layers.is_empty(), "sketches shrank before dense layers");
        }
        shrunk_dense |= now.report.dense_layers.is_empty();
        repacked = now.report.repacked_blocks;
    }
    assert!(shrunk_dense && repacked > 0);
    let last = harness.context.statistics().memory;
    assert!(last.fast < full.memory.fast / 2, "{} of {}", last.fast, full.memory.fast);
}

#[test]
fn a_budget_that_a_new_token_crosses_is_kept() {
    let mut harness = harness(params());
    harness.pass(200);
    let budget = harness.context.statistics().memory.fast + 500;
    harness.context.set_fast_budget(FastBudget::Bytes(budget));
    for _ in 0..60 {
        assert!(harness.pass(1) < 0.05);
        assert!(harness.context.statistics().memory.fast <= budget);
    }
    assert!(harness.context.statistics().report.dense_layers.is_empty());
}

#[test]
fn a_fraction_of_f16_grows_with_the_sequence() {
    let budget = FastBudget::FractionOfF16(0.6);
    let mut harness = harness(Params { fast_budget: budget, layout_tokens: 16, ..params() });
    // Before the layout everything is raw f32, twice an f16 cache: a first pass must not fit.
    assert_eq!(harness.pass_of(&members(10)).unwrap_err().status, Status::Budget);
    harness.pass(300);
    for _ in 0..20 {
        harness.pass(1);
        let memory = harness.context.statistics().memory;
        assert!(memory.fast as f64 <= 0.6 * memory.full_f16 as f64 + 1.0);
    }
}

#[test]
fn a_fetch_budget_of_zero_reads_nothing_and_one_of_everything_equals_none() {
    let mut coarse = harness(Params { dense: DenseLayers::None, ..sealed_params(16) });
    coarse.context.set_fetch_budget(Some(0));
    coarse.pass(200);
    // Values average out, so the coarse answer is far from dense, and finite.
    let worst = coarse.pass(1);
    assert!(worst.is_finite() && worst > 0.01, "{worst}");
    assert_eq!(coarse.context.statistics().counters.fetched.max(), 0);
    coarse.context.set_fetch_budget(Some(50));
    coarse.pass(1);
    assert_eq!(coarse.context.statistics().counters.fetched.max(), 50);
    coarse.context.set_fetch_budget(Some(usize::MAX));
    assert!(coarse.pass(1) < 2e-5);
    coarse.context.set_fetch_budget(None);
    assert!(coarse.pass(1) < 2e-5);
}

#[test]
fn the_estimate_is_what_a_context_takes() {
    for (n_tokens, dense) in
        [(20, DenseLayers::None), (300, DenseLayers::None), (300, DenseLayers::List(vec![1]))]
    {
        let params = Params { dense, ..params() };
        let mut harness = harness(params.clone());
        harness.pass(n_tokens);
        let taken = harness.context.statistics().memory;
        let estimate = sekv::cache::estimate(harness.context.model(), &params, n_tokens).unwrap();
        // Residents are reserved in steps, dense layers by list are counted as sealed.
        let tolerance = 0.05 * taken.fast as f64;
        if params.dense == DenseLayers::None {
            assert!(
                (taken.fast as f64 - estimate.fast as f64).abs() < tolerance,
                "{taken:?} {estimate:?}"
            );
            assert_eq!(taken.slow, estimate.slow);
        }
        assert_eq!(taken.full_f16, estimate.full_f16);
    }
}
