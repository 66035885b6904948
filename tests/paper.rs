//! Routing `paper` as a cache: what streaming, removal, budgets and missing surprisal do to it.
//!
//! Untrained, every span here is zoomed, and with bases of full rank in f32 the result is the dense
//! one but for the coarse rows of zoomed spans, which stay at a weight of 1e-6.

mod common;

use common::{Adjust, Harness, Shape, raw_params};
use sekv::cache::estimate;
use sekv::kernels::RowCodec;
use sekv::model::{LayerGeometry, RopeKind};
use sekv::params::{BasisCodec, FastBudget, Params, Prefill, RoutingKind};

/// Coarse rows of zoomed spans and f32 factors.
const ZOOMED: f32 = 2e-4;

fn paper_params() -> Params {
    Params {
        routing: RoutingKind::Paper,
        n_sinks: 0,
        window: 0,
        block_tokens: 1,
        layout_tokens: 1,
        span_min: 4,
        rank_max: 512,
        basis_codec: BasisCodec::LowRank(RowCodec::F32),
        ..raw_params()
    }
}

fn harness(params: Params, seed: u64) -> Harness {
    let mut harness = Harness::new(Shape::uniform(2, 6, 2, 32), params, seed);
    harness.surprisal = true;
    harness
}

#[test]
fn a_stream_of_prompts_and_tokens_stays_close_to_dense() {
    for (n_sinks, window, block_tokens) in [(0, 0, 1), (4, 10, 16), (1, 0, 64)] {
        let params = Params { n_sinks, window, block_tokens, layout_tokens: 32, ..paper_params() };
        let mut harness = harness(params, 1);
        for n in [40, 1, 200, 1, 1, 17, 3, 1, 90, 1, 1, 1] {
            assert!(harness.pass(n) < ZOOMED, "{n}: {}", harness.worst);
        }
        let statistics = harness.context.statistics();
        assert!(statistics.report.spans > 10, "{:?}", statistics.report);
        assert_eq!(statistics.report.tokens_without_surprisal, 0);
        assert!(statistics.n_resident < (n_sinks + window + block_tokens + 4) as u64);
        assert!(harness.context.take_events().is_empty());
    }
}

#[test]
fn routed_prefill_attends_each_query_by_spans() {
    let mut harness = harness(Params { prefill: Prefill::Routed, ..paper_params() }, 2);
    for n in [100, 60, 1] {
        assert!(harness.pass(n) < ZOOMED, "{n}: {}", harness.worst);
    }
}

#[test]
fn spans_kept_as_rows_need_no_basis() {
    for codec in [BasisCodec::Rows(RowCodec::F32), BasisCodec::LowRank(RowCodec::Int8)] {
        let mut harness = harness(Params { basis_codec: codec, ..paper_params() }, 3);
        let bound = if codec == BasisCodec::Rows(RowCodec::F32) { ZOOMED } else { 0.05 };
        for n in [150, 1, 1] {
            assert!(harness.pass(n) < bound, "{codec:?} {n}: {}", harness.worst);
        }
    }
}

#[test]
fn without_surprisal_spans_are_fixed_and_said_to_be() {
    let mut harness = harness(Params { span_min: 16, ..paper_params() }, 4);
    harness.surprisal = false;
    harness.pass(200);
    // The host may still send them until the next pass begins.
    assert_eq!(harness.context.statistics().n_sealed, 0);
    assert!(harness.pass(1) < ZOOMED);
    let report = harness.context.statistics().report;
    // Token 0 as an anchor, then 64, 64, 64 and 7 tokens that wait for more.
    assert_eq!(report.spans, 3);
    assert_eq!(report.span_lengths[6], 3);
    assert_eq!(report.tokens_without_surprisal, 193 - 1);
}

#[test]
fn surprisal_that_comes_late_cuts_the_spans_all_the_same() {
    let spans = |late: bool| {
        let mut harness = harness(paper_params(), 5);
        harness.surprisal = !late;
        let values: Vec<f32> = {
            let mut random = harness.random.clone();
            (0..120).map(|_| -random.uniform().max(1e-7).ln()).collect()
        };
        harness.surprisal = false;
        harness.pass(120);
        if late {
            harness.context.set_surprisal(0, 0, &values[..50]).unwrap();
            harness.context.set_surprisal(0, 50, &values[50..]).unwrap();
        }
        harness.pass(1);
        harness.context.statistics().report
    };
    assert_eq!(spans(true).tokens_without_surprisal, 0);
    assert!(spans(true).spans > spans(false).spans);
}

#[test]
fn a_removed_tail_is_gone_and_a_new_one_takes_its_place() {
    let params = Params { n_sinks: 2, window: 6, block_tokens: 8, ..paper_params() };
    let mut harness = harness(params, 6);
    harness.pass(80);
    for round in 0..30 {
        let held = harness.naive[0].keys[0].len();
        let keep = held - harness.random.below(held.min(40) + 1);
        harness.context.remove(0, keep as i32, -1).unwrap();
        harness.truncate_naive(0, keep);
        harness.positions[0] = keep as i32;
        let n = 1 + harness.random.below(30);
        // Reopened tokens are rebuilt, then sealed again.
        let worst = harness.pass(n);
        assert!(worst < ZOOMED, "round {round} keep {keep} n {n}: {worst}");
    }
}

#[test]
fn anchors_are_demoted_where_the_fast_tier_is_short() {
    let mut harness = harness(Params { window: 8, ..paper_params() }, 7);
    harness.pass(400);
    assert!(harness.pass(1) < ZOOMED);
    let before = harness.context.statistics();
    assert_eq!(before.report.demoted_anchors, 0);

    let budget = before.memory.fast * 6 / 10;
    harness.context.set_fast_budget(FastBudget::Bytes(budget));
    let worst = harness.pass(1);
    let after = harness.context.statistics();
    assert!(after.report.demoted_anchors > 0);
    assert!(after.memory.fast <= budget, "{} {budget}", after.memory.fast);
    assert!(after.memory.fast_resident < before.memory.fast_resident);
    assert_eq!(after.n_tokens, before.n_tokens + 1);
    // Nothing was lost: the demoted tokens are rebuilt from their new spans.
    assert!(worst < ZOOMED, "{worst}");
    for n in [1, 40, 1] {
        assert!(harness.pass(n) < ZOOMED, "{n}: {}", harness.worst);
        assert!(harness.context.statistics().memory.fast <= budget);
    }

    // With every anchor demoted there is nothing left to give.
    harness.context.set_fast_budget(FastBudget::Bytes(1000));
    let error = harness.pass_of(&[vec![0]]).unwrap_err();
    assert_eq!(error.status, sekv::error::Status::Budget);
}

#[test]
fn a_fetch_budget_of_0_is_coarse_only_and_a_large_one_zooms_all() {
    let mut harness = harness(paper_params(), 8);
    harness.pass(300);
    harness.context.set_fetch_budget(Some(0));
    let coarse = harness.pass(1);
    assert_eq!(harness.context.statistics().counters.fetched.max(), 0);
    harness.context.set_fetch_budget(Some(100_000));
    assert!(harness.pass(1) < ZOOMED);
    let zoomed = harness.context.statistics().counters.fetched.max();
    harness.context.set_fetch_budget(Some(50));
    let some = harness.pass(1);
    assert!(coarse > 100.0 * ZOOMED && some > 100.0 * ZOOMED, "{coarse} {some}");
    assert!(zoomed > 100);
}

#[test]
fn an_estimate_is_near_what_exponential_surprisal_takes() {
    let params = Params { span_min: 16, window: 128, n_sinks: 4, ..paper_params() };
    let mut harness = Harness::new(Shape::uniform(1, 1, 1, 16), params.clone(), 9);
    harness.surprisal = true;
    for _ in 0..4 {
        harness.pass(1024);
    }
    let found = harness.context.statistics().memory;
    let expected = estimate(harness.context.model(), &params, 4096).unwrap();
    for (what, found, expected) in
        [("fast", found.fast, expected.fast), ("slow", found.slow, expected.slow)]
    {
        let ratio = found as f64 / expected as f64;
        assert!((0.8..1.25).contains(&ratio), "{what}: {found} {expected}");
    }
}

/// Keys and values in a plane: what a basis of rank 2 holds.
fn in_a_plane(k: &mut [f32], v: &mut [f32], _: &mut [f32], key_dim: usize, value_dim: usize) {
    for (rows, dim) in [(k, key_dim), (v, value_dim)] {
        for row in rows.chunks_mut(dim) {
            let (a, b) = (row[0], row[1]);
            for (i, x) in row.iter_mut().enumerate() {
                *x = a * (i as f32).sin() + b * (i as f32 * 0.7).cos();
            }
        }
    }
}

#[test]
fn low_rank_spans_take_less_than_rows_and_rebuild_their_tokens() {
    let mut slow = Vec::new();
    for (basis_codec, low_rank_error) in [
        (BasisCodec::Rows(RowCodec::Int8), 0.0),
        (BasisCodec::LowRank(RowCodec::F16), 0.0),
        (BasisCodec::LowRank(RowCodec::Int8), 0.0),
        (BasisCodec::LowRank(RowCodec::Int8), 1e-3),
    ] {
        let params = Params { basis_codec, low_rank_error, rank_max: 8, ..paper_params() };
        let mut harness = Harness::new(Shape::uniform(2, 6, 2, 64), params, 10);
        harness.adjust = Some(in_a_plane);
        // Without surprisal: spans of 64.
        for n in [513, 1] {
            harness.pass(n);
        }
        assert!(harness.worst_of_values < 0.01, "{basis_codec:?}: {}", harness.worst_of_values);
        slow.push(harness.context.statistics().memory.slow);
    }
    assert!(slow.windows(2).all(|pair| pair[1] < pair[0]), "{slow:?}");
}

#[test]
fn shapes_of_every_kind() {
    for (i, dim) in [64, 72, 80, 88, 96, 100, 112, 128, 192, 256].into_iter().enumerate() {
        let group = [1, 2, 3, 5, 6, 7, 8, 16][i % 8];
        let shape = Shape {
            layers: vec![
                LayerGeometry { n_heads: 2 * group, n_kv_heads: 2 },
                LayerGeometry { n_heads: group, n_kv_heads: 1 },
            ],
            key_dim: dim,
            value_dim: if i % 2 == 0 { dim } else { dim / 2 + 3 },
            rope: RopeKind::Neox,
        };
        let mut harness = Harness::new(shape, paper_params(), i as u64);
        harness.surprisal = true;
        for n in [33, 1, 18, 1] {
            assert!(harness.pass(n) < ZOOMED, "dim {dim} group {group}: {}", harness.worst);
        }
    }
}

#[test]
fn degenerate_rows_stay_finite() {
    let zero: Adjust = |k, v, _, _, _| {
        k.fill(0.0);
        v.fill(0.0);
    };
    let same: Adjust = |k, v, _, key_dim, value_dim| {
        k.chunks_mut(key_dim).for_each(|row| row.fill(1.5));
        v.chunks_mut(value_dim).for_each(|row| row.fill(-2.5));
    };
    let large: Adjust = |k, _, _, key_dim, _| {
        k.chunks_mut(key_dim).for_each(|row| row[3] *= 10_000.0);
    };
    let tiny: Adjust = |k, v, _, _, _| {
        k.iter_mut().chain(v).for_each(|x| *x *= 1e-39);
    };
    for (adjust, bound) in [(zero, 0.0), (same, ZOOMED), (large, 0.02), (tiny, 0.01)] {
        let mut harness = harness(paper_params(), 11);
        harness.adjust = Some(adjust);
        for n in [120, 1, 1] {
            let worst = harness.pass(n);
            assert!(worst <= bound, "{n}: {worst}");
        }
        assert!(harness.context.take_events().is_empty());
    }
}

#[test]
fn several_sequences_keep_their_own_spans() {
    let mut harness = harness(paper_params(), 12);
    for round in 0..20 {
        let n = 1 + harness.random.below(30);
        let members: Vec<Vec<i32>> = (0..n).map(|_| vec![harness.random.below(3) as i32]).collect();
        let worst = harness.pass_of(&members).unwrap();
        assert!(worst < ZOOMED, "round {round}: {worst}");
    }
}
