//! Copies and removals of sequences against plain lists of tokens and dense attention in f64.

mod common;

use common::world::*;
use common::{difference, sealed_params};
use sekv::error::Status;
use sekv::params::{DenseLayers, Params, Prefill};

#[test]
fn a_copy_and_its_source_go_their_own_ways() {
    for (params, bound) in both_routings() {
        for n in [1, 7, 40, 90] {
            let mut world = World::new(params.clone(), n as u64);
            world.extend(0, n);
            world.copy(0, 1, -1, -1);
            world.copy(1, 2, -1, n as i32 / 2);
            world.check(bound, "copied");
            for round in 0..6 {
                for s in 0..3 {
                    world.extend(s, 1 + world.random.clone().below(9));
                }
                world.check(bound, &format!("round {round}"));
            }
            let keep = n as i32 / 3;
            world.remove(0, keep, -1);
            world.check(bound, "one side cut");
            world.extend(1, 20);
            world.check(bound, "the other grown");
        }
    }
}

#[test]
fn a_copy_onto_itself_changes_nothing_and_onto_a_live_sequence_is_refused() {
    let mut world = World::new(small(4), 1);
    world.extend(0, 30);
    world.extend(1, 20);
    world.copy(0, 0, -1, -1);
    world.copy(0, 0, 3, 7);
    let error = world.context.copy(0, 1, -1, -1).unwrap_err();
    assert_eq!(error.status, Status::Unsupported, "{error}");
    assert!(error.message.contains("up to position 19"), "{error}");
    // Nothing to copy is no error.
    world.context.copy(2, 1, -1, -1).unwrap();
    world.context.copy(0, 1, 5, 5).unwrap();
    world.context.copy(0, 1, 100, -1).unwrap();
    for (from, to) in [(0, SEQUENCES as i32), (-1, 0), (0, -1), (99, 0)] {
        assert_eq!(world.context.copy(from, to, -1, -1).unwrap_err().status, Status::Sequence);
    }
    world.check(ROUNDING, "as before");
}

#[test]
fn keeping_one_sequence_removes_the_others() {
    let mut world = World::new(small(4), 2);
    for s in 0..SEQUENCES {
        world.extend(s, 10 + 5 * s);
    }
    assert_eq!(world.context.keep(-1).unwrap_err().status, Status::Sequence);
    assert_eq!(world.context.keep(SEQUENCES as i32).unwrap_err().status, Status::Sequence);
    world.check(ROUNDING, "refused");
    world.context.keep(2).unwrap();
    for s in [0, 1, 3] {
        world.lists[s].clear();
    }
    world.check(ROUNDING, "kept");
    world.context.keep(0).unwrap();
    world.lists[2].clear();
    world.check(ROUNDING, "an empty one kept");
}

#[test]
fn what_copies_share_counts_once() {
    for (params, _) in both_routings() {
        let mut world = World::new(params, 3);
        world.extend(0, 120);
        let one = world.context.statistics();
        for s in 1..SEQUENCES {
            world.copy(0, s, -1, -1);
        }
        let all = world.context.statistics();
        let (one_bytes, all_bytes) = (one.memory, all.memory);
        assert_eq!(all_bytes.slow, one_bytes.slow);
        assert_eq!(all_bytes.fast_sketch, one_bytes.fast_sketch);
        assert_eq!(all_bytes.fast_mean, one_bytes.fast_mean);
        assert_eq!(all_bytes.fast_layout, one_bytes.fast_layout);
        assert!(all_bytes.fast < 2 * one_bytes.fast, "{all_bytes:?} {one_bytes:?}");
        assert_eq!(all.n_sealed, 4 * one.n_sealed);
        // The last owner frees it.
        world.context.remove(0, -1, -1).unwrap();
        assert_eq!(world.context.statistics().memory.slow, one_bytes.slow);
        world.context.clear().unwrap();
        let none = world.context.statistics().memory;
        assert_eq!((none.slow, none.fast), (0, 0));
    }
}

#[test]
fn a_dense_layer_and_a_layout_are_settled_once_for_all_copies() {
    let params = Params { dense: DenseLayers::List(vec![1]), ..small(4) };
    let mut world = World::new(params, 4);
    world.extend(0, 60);
    world.copy(0, 1, -1, -1);
    for s in [0, 1] {
        world.extend(s, 13);
    }
    world.check(ROUNDING, "dense");
    // Before there is a layout, everything is copied.
    let params = Params { layout_tokens: 50, ..small(4) };
    let mut world = World::new(params, 5);
    world.extend(0, 30);
    world.copy(0, 1, -1, -1);
    for s in [0, 1] {
        world.extend(s, 40);
    }
    world.check(ROUNDING, "laid out apart");
}

#[test]
fn a_budget_that_a_copy_would_exceed_refuses_it() {
    let mut world = World::new(small(4), 6);
    world.extend(0, 100);
    let held = world.context.statistics().memory.fast;
    world.context.set_fast_budget(sekv::params::FastBudget::Bytes(held + 64));
    let mut refused = 0;
    for s in 1..SEQUENCES {
        if let Err(error) = world.context.copy(0, s as i32, -1, -1) {
            assert_eq!(error.status, Status::Budget, "{error}");
            refused += 1;
        } else {
            world.lists[s] = world.lists[0].clone();
        }
    }
    assert!(world.context.statistics().memory.fast <= held + 64);
    println!("{refused} copies refused");
    world.context.set_fast_budget(sekv::params::FastBudget::Unlimited);
    world.check(ROUNDING, "after the refusals");
}

#[test]
fn a_short_budget_shrinks_what_copies_share_once() {
    let params = Params {
        n_sinks: 2,
        window: 8,
        block_tokens: 16,
        layout_tokens: 64,
        share_threshold: 0.0,
        sketch: sekv::params::SketchProfile::High,
        dense: DenseLayers::List(vec![0]),
        ..Params::default()
    };
    let mut world = World::new(params, 7);
    world.extend(0, 400);
    for s in 1..SEQUENCES {
        world.copy(0, s, -1, -1);
    }
    let before = world.context.statistics().memory;
    let budget = before.fast * 17 / 20;
    world.context.set_fast_budget(sekv::params::FastBudget::Bytes(budget));
    world.pass(&[vec![0], vec![1], vec![2], vec![3]], 0, true);
    let after = world.context.statistics();
    assert!(after.memory.fast <= budget, "{:?} of {before:?}", after.memory);
    assert_eq!(after.n_sealed, 4 * (after.n_sealed / 4));
    assert!(world.worst < 0.05, "{}", world.worst);
    // Were the blocks shrunk once for each copy, three quarters of them would go with the copies.
    for s in 1..SEQUENCES {
        world.context.remove(s as i32, -1, -1).unwrap();
    }
    assert_eq!(world.context.statistics().memory.slow, after.memory.slow);
}

#[test]
fn routed_prefill_of_copies_equals_dense() {
    let mut world = World::new(Params { prefill: Prefill::Routed, ..small(4) }, 8);
    world.extend(0, 50);
    world.copy(0, 3, -1, 41);
    world.extend(3, 40);
    world.check(ROUNDING, "routed");
}

/// Sinks are 0 and 1, blocks of four from 2 on, the last ones open.
#[test]
fn any_range_can_be_removed() {
    for (params, bound) in both_routings() {
        for (first, end) in [
            (0, 1),    // the first
            (-1, 2),   // all sinks
            (1, 9),    // across a sink and blocks
            (20, 21),  // one inside a block
            (19, 21),  // some inside a block
            (18, 22),  // a block
            (19, 31),  // across blocks
            (18, 34),  // blocks
            (2, 38),   // everything sealed but a block
            (30, 58),  // up to the window
            (55, 59),  // of the window
            (59, 60),  // the last
            (37, -1),  // a tail
            (-1, -1),  // the whole
            (0, 1000), // beyond
            (7, 7),    // nothing
            (9, 3),    // less than nothing
            (60, -1),  // behind the last
        ] {
            let mut world = World::new(params.clone(), 11);
            world.extend(0, 60);
            world.copy(0, 1, -1, -1);
            let what = format!("{:?} {first}..{end}", params.routing);
            world.remove(0, first, end);
            world.check(bound, &what);
            for s in [0, 1, 0] {
                world.extend(s, 9);
                world.check(bound, &what);
            }
            world.remove(0, 10, 40);
            world.check(bound, &what);
            world.remove(-1, 5, 12);
            world.check(bound, &what);
        }
    }
}

#[test]
fn removal_from_a_sequence_that_does_not_exist_is_an_error_and_from_an_empty_one_none() {
    let mut world = World::new(small(4), 12);
    world.extend(0, 20);
    for s in [SEQUENCES as i32, i32::MAX] {
        let error = world.context.remove(s, 0, 5).unwrap_err();
        assert_eq!(error.status, Status::Sequence);
        assert!(error.message.contains(&format!("sequence {s}")), "{error}");
    }
    world.remove(1, -1, -1);
    world.remove(1, 3, 5);
    world.check(ROUNDING, "nothing gone");
}

#[test]
fn one_token_after_the_other_can_be_removed() {
    for (params, bound) in both_routings() {
        let mut world = World::new(params, 13);
        world.extend(0, 50);
        while !world.lists[0].is_empty() {
            let i = world.random.below(world.lists[0].len());
            let position = world.lists[0][i].position;
            world.remove(0, position, position + 1);
            world.check(bound, &format!("{} left", world.lists[0].len()));
        }
        assert_eq!(world.context.statistics().memory.fast, 0);
    }
}

#[test]
fn removed_blocks_give_their_memory_back() {
    let mut world = World::new(sealed_params(4), 14);
    for _ in 0..8 {
        world.extend(0, 100);
    }
    let before = world.context.statistics().memory;
    world.remove(0, 50, 750);
    let after = world.context.statistics().memory;
    assert!(after.slow < before.slow / 6, "{after:?} {before:?}");
    assert!(after.fast < before.fast / 4, "{after:?} {before:?}");
    world.check(ROUNDING, "the rest");
}

#[test]
fn removal_keeps_the_default_codecs_within_their_bound() {
    let params = Params {
        n_sinks: 2,
        window: 16,
        block_tokens: 16,
        layout_tokens: 64,
        share_threshold: 0.0,
        ..Params::default()
    };
    for dense in [DenseLayers::None, DenseLayers::List(vec![1])] {
        let mut world = World::new(Params { dense, ..params.clone() }, 15);
        world.extend(0, 300);
        for (first, end) in [(40, 45), (100, 171), (0, 1), (210, 230), (260, 290)] {
            world.remove(0, first, end);
            world.check(0.05, &format!("{first}..{end}"));
            world.extend(0, 3);
        }
        println!("worst {}", world.worst);
    }
}

/// With nothing read exactly, each block is one row: the mean value of the tokens that are left,
/// weighed by the sum of their exponentials.
#[test]
fn coarse_rows_know_nothing_of_removed_tokens() {
    let params = Params { share_threshold: 1.0, ..sealed_params(4) };
    type Case<'a> = (&'a [(i32, i32)], &'a [&'a [usize]]);
    let cases: [Case; 3] = [
        (&[(5, 7)], &[&[0, 1, 2, 3], &[4, 7], &[8, 9, 10, 11], &[12, 13, 14, 15]]),
        (&[(1, 10)], &[&[0, 10, 11], &[12, 13, 14, 15]]),
        (&[(5, 7), (3, 9)], &[&[0, 1, 2], &[9, 10, 11], &[12, 13, 14, 15]]),
    ];
    for (removals, blocks) in cases {
        let mut world = World::new(params.clone(), 32);
        world.extend(0, 16);
        let tokens = world.lists[0].clone();
        for &(first, end) in removals {
            world.context.remove(0, first, end).unwrap();
        }
        let step = Step::new(&mut world.random);
        let found = step.attend(&mut world.context);
        for il in 0..LAYERS {
            for h in 0..HEADS {
                let part = |rows: &[f32], head: usize| rows[head * DIM..][..DIM].to_vec();
                let kv_head = h / (HEADS / KV_HEADS);
                let q = part(&step.queries[il], h);
                let weight = |keys: &[f32]| {
                    let key = part(keys, kv_head);
                    let score: f64 =
                        q.iter().zip(&key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    (score / (DIM as f64).sqrt()).exp()
                };
                let own = weight(&step.keys[il]);
                let mut sum = own;
                let mut want: Vec<f64> =
                    part(&step.values[il], kv_head).iter().map(|&x| own * f64::from(x)).collect();
                for block in blocks {
                    let of_block: f64 = block.iter().map(|&t| weight(&tokens[t].keys[il])).sum();
                    sum += of_block;
                    for &t in *block {
                        let value = part(&tokens[t].values[il], kv_head);
                        for (w, &x) in want.iter_mut().zip(&value) {
                            *w += of_block * f64::from(x) / block.len() as f64;
                        }
                    }
                }
                want.iter_mut().for_each(|w| *w /= sum);
                let found = &found[(il * HEADS + h) * DIM..][..DIM];
                let worst = difference(found, &want);
                assert!(worst < ROUNDING, "{removals:?}, layer {il}, head {h}: {worst}");
            }
        }
    }
}
