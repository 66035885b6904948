//! The whole machine against dense attention in f64, on random rows.

mod common;

use common::{Harness, Shape, raw_params, sealed_params};
use sekv::model::{LayerGeometry, RopeKind};
use sekv::params::{DenseLayers, Params, Prefill};

/// f32 sums of some hundred terms.
const ROUNDING: f32 = 2e-5;

#[test]
fn everything_resident_and_raw_equals_dense() {
    let mut harness = Harness::new(Shape::uniform(2, 6, 2, 64), raw_params(), 1);
    for n in [1, 17, 64, 1, 1, 200, 1] {
        assert!(harness.pass(n) < ROUNDING, "{n}: {}", harness.worst);
    }
}

#[test]
fn everything_sealed_and_raw_equals_dense() {
    for block_tokens in [1, 5, 64] {
        let mut harness = Harness::new(Shape::uniform(2, 6, 2, 64), sealed_params(block_tokens), 2);
        for n in [1, 17, 64, 1, 1, 200, 1, 3] {
            assert!(harness.pass(n) < ROUNDING, "{block_tokens} {n}: {}", harness.worst);
        }
        let statistics = harness.context.statistics();
        assert!(statistics.n_resident < block_tokens as u64);
        assert!(statistics.n_sealed >= 256);
    }
}

#[test]
fn routed_prefill_equals_dense_when_every_token_is_read() {
    let params = Params { prefill: Prefill::Routed, ..sealed_params(16) };
    let mut harness = Harness::new(Shape::uniform(1, 4, 2, 32), params, 3);
    for n in [40, 100, 1] {
        assert!(harness.pass(n) < ROUNDING, "{n}: {}", harness.worst);
    }
}

#[test]
fn dense_layers_equal_dense() {
    let params = Params { dense: DenseLayers::List(vec![1]), ..sealed_params(16) };
    let mut harness = Harness::new(Shape::uniform(2, 4, 2, 32), params, 4);
    for n in [40, 100, 1, 1] {
        assert!(harness.pass(n) < ROUNDING, "{n}: {}", harness.worst);
    }
    assert!(harness.context.statistics().memory.fast_resident > 0);
}

#[test]
fn head_dims_and_group_sizes_of_every_kind() {
    for (i, dim) in [64, 72, 80, 88, 96, 100, 112, 128, 192, 256].into_iter().enumerate() {
        let group = [1, 2, 3, 5, 6, 7, 8, 16][i % 8];
        let shape = Shape {
            layers: vec![
                LayerGeometry { n_heads: 2 * group, n_kv_heads: 2 },
                LayerGeometry { n_heads: group, n_kv_heads: 1 },
            ],
            key_dim: dim,
            value_dim: if i % 2 == 0 { dim } else { dim / 2 + 3 },
            rope: if i % 3 == 0 { RopeKind::Norm } else { RopeKind::Neox },
        };
        for params in [
            raw_params(),
            sealed_params(8),
            Params {
                layout_tokens: 16,
                window: 8,
                block_tokens: 8,
                share_threshold: 0.0,
                n_threads: 2,
                ..Params::default()
            },
        ] {
            let bound = if params.value_sketch { 0.03 } else { ROUNDING };
            let mut harness = Harness::new(shape.clone(), params, i as u64);
            for n in [33, 1, 18, 1] {
                assert!(
                    harness.pass(n) < bound,
                    "dim {dim} group {group} n {n}: {}",
                    harness.worst
                );
            }
        }
    }
}

#[test]
fn several_sequences_in_one_batch_do_not_see_each_other() {
    let mut harness = Harness::new(Shape::uniform(2, 4, 2, 32), sealed_params(4), 5);
    for round in 0..30 {
        let n = 1 + harness.random.below(12);
        let members: Vec<Vec<i32>> = (0..n)
            .map(|_| match harness.random.below(8) {
                0 => vec![0, 2],
                1 => vec![3, 1, 0],
                s => vec![(s % 4) as i32],
            })
            .collect();
        let worst = harness.pass_of(&members).unwrap();
        assert!(worst < ROUNDING, "round {round}: {worst}");
    }
}

#[test]
fn a_removed_tail_is_gone_and_a_new_one_takes_its_place() {
    for block_tokens in [1, 4, 16] {
        let params = Params { n_sinks: 2, window: 6, ..sealed_params(block_tokens) };
        let mut harness = Harness::new(Shape::uniform(2, 4, 2, 32), params, 6);
        harness.pass(50);
        for round in 0..40 {
            let held = harness.naive[0].keys[0].len();
            let keep = held - harness.random.below(held.min(30) + 1);
            harness.context.remove(0, keep as i32, -1).unwrap();
            harness.truncate_naive(0, keep);
            harness.positions[0] = keep as i32;
            assert_eq!(harness.context.position_max(0).unwrap(), keep as i32 - 1);
            let n = 1 + harness.random.below(24);
            let worst = harness.pass(n);
            assert!(worst < ROUNDING, "block {block_tokens} round {round} keep {keep}: {worst}");
        }
    }
}

#[test]
fn batches_of_1_2_31_and_512_tokens() {
    let small = Params { n_sinks: 4, window: 40, ..sealed_params(16) };
    for params in [raw_params(), sealed_params(64), small] {
        let mut harness = Harness::new(Shape::uniform(1, 3, 1, 64), params, 7);
        for n in [2, 31, 512, 1, 512, 31, 2, 1] {
            assert!(harness.pass(n) < ROUNDING, "{n}: {}", harness.worst);
        }
    }
}
