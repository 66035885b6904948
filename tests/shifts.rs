//! Shifts and positions of sequences against plain lists of tokens and dense attention in f64.

mod common;

use common::world::*;
use common::{Random, Shape, difference, sealed_params, view};
use sekv::cache::{BatchToken, Context};
use sekv::error::Status;
use sekv::kernels::RowCodec;
use sekv::model::RopeKind;
use sekv::params::{BasisCodec, DenseLayers, Params, RoutingKind};

#[test]
fn shifted_tokens_turn_their_keys_wherever_they_are_kept() {
    let dense = Params { dense: DenseLayers::List(vec![1]), ..small(4) };
    let open = Params { layout_tokens: 1000, ..small(4) };
    let rows = Params { basis_codec: BasisCodec::Rows(RowCodec::F32), ..small_paper() };
    for params in [
        small(4),
        sealed_params(1),
        sealed_params(4),
        dense,
        open,
        small_paper(),
        Params { layout_tokens: 1000, ..small_paper() },
        rows,
    ] {
        let bound = if params.routing == RoutingKind::Paper { ZOOMED } else { ROUNDING };
        for (first, end, delta) in [
            (0, -1, 7),     // all
            (30, -1, 1000), // a tail that begins inside a block
            (30, -1, 2),
            (22, -1, 5),   // at a block's edge
            (59, 60, 100), // the last
            (0, 1, 0),     // by nothing
            (9, 9, 5),     // nothing
        ] {
            let mut world = World::new(params.clone(), 21);
            world.extend(0, 60);
            world.copy(0, 1, -1, -1);
            let what = format!("{:?} {first}..{end} by {delta}", params.routing);
            world.shift(0, first, end, delta);
            world.check(bound, &what);
            for s in [0, 1, 0] {
                world.extend(s, 9);
                world.check(bound, &what);
            }
            // More than 16 queries: tiles.
            world.extend(0, 20);
            world.check(bound, &what);
            // Sealed tokens that have moved become residents again.
            world.remove(0, 45, -1);
            world.check(bound, &what);
            world.extend(0, 30);
            world.check(bound, &what);
        }
    }
}

/// What llama.cpp's hosts do when a context is full.
#[test]
fn the_oldest_tokens_make_room_for_new_ones_for_ever() {
    let discards = [1, 5, 16].into_iter().flat_map(|n| both_routings().map(|(p, b)| (n, p, b)));
    for (n_discard, params, bound) in discards {
        let mut world = World::new(params, 22);
        world.extend(0, 40);
        for round in 0..40 {
            let next = world.last(0) + 1;
            world.remove(0, 3, 3 + n_discard);
            world.shift(0, 3 + n_discard, -1, -n_discard);
            assert_eq!(world.last(0), next - n_discard - 1);
            world.extend(0, n_discard as usize);
            world.check(bound, &format!("{n_discard} round {round}"));
        }
    }
}

#[test]
fn a_thousand_shifts_by_1_equal_one_by_1000() {
    for params in [
        small(4),
        Params { n_sinks: 2, window: 3, block_tokens: 4, layout_tokens: 4, ..Params::default() },
    ] {
        let shifted = |delta: i32, times: usize| {
            let mut world = World::new(params.clone(), 23);
            world.extend(0, 50);
            for _ in 0..times {
                world.context.shift(0, 13, -1, delta).unwrap();
            }
            let (context, mut random) = (&mut world.context, Random(5));
            let position = context.position_max(0).unwrap() + 1;
            assert_eq!(position, 50 + delta * times as i32);
            context.begin(&[BatchToken { position, sequences: &[0] }]).unwrap();
            let mut k = random.normals(KV_HEADS * DIM);
            let mut v = random.normals(KV_HEADS * DIM);
            let mut q = random.normals(HEADS * DIM);
            let mut out = vec![0.0; HEADS * DIM];
            let (k, v) = (view(&mut k, DIM, KV_HEADS, 1), view(&mut v, DIM, KV_HEADS, 1));
            context.ingest(0, &k, &v).unwrap();
            let out_view = view(&mut out, DIM, HEADS, 1);
            context.attend(0, &view(&mut q, DIM, HEADS, 1), None, &out_view).unwrap();
            out
        };
        assert_eq!(shifted(1, 1000), shifted(1000, 1));
        assert_ne!(shifted(1, 1000), shifted(999, 1));
    }
}

#[test]
fn shifts_that_would_break_the_order_of_positions_change_nothing() {
    let mut world = World::new(small(4), 24);
    world.extend(0, 30);
    world.pass(&[vec![0]], 10, true);
    world.extend(1, 5);
    let max = i32::MAX;
    for (first, end, delta) in [
        (0, -1, -1),   // below 0
        (10, -1, -11), // below 0 and past others
        (10, 20, -1),  // onto the one before
        (10, 20, 1),   // onto the one after
        (10, 20, 100), // past all
        (10, 30, 11),  // onto the last, behind the gap
        (40, -1, max), // beyond what an int holds
        (0, -1, max),
        (0, -1, -max - 1),
    ] {
        let error = world.context.shift(0, first, end, delta).unwrap_err();
        assert_eq!(error.status, Status::Position, "{first}..{end} by {delta}: {error}");
        assert!(error.message.contains(&format!("a shift by {delta}")), "{error}");
        world.check(ROUNDING, "as before");
    }
    for s in [-1, SEQUENCES as i32] {
        assert_eq!(world.context.shift(s, 0, -1, 1).unwrap_err().status, Status::Sequence);
    }
    // An empty sequence, and as far as the gap and the range of positions go.
    world.shift(3, 0, -1, -1);
    world.shift(0, 10, 30, 10);
    world.shift(0, 40, -1, max - 100);
    world.check(ROUNDING, "moved");
}

#[test]
fn keys_without_rope_do_not_turn() {
    let mut shape = Shape::uniform(1, 2, 1, DIM);
    shape.rope = RopeKind::None;
    for routing in [RoutingKind::Ladder, RoutingKind::Paper] {
        let mut context = Context::new(shape.model(), Params { routing, ..small(4) }).unwrap();
        assert!(context.can_shift());
        let step = |context: &mut Context, position: i32, commit: bool| {
            let mut random = Random(position as u64 % 50);
            context.begin(&[BatchToken { position, sequences: &[0] }]).unwrap();
            let (mut k, mut v) = (random.normals(DIM), random.normals(DIM));
            context.ingest(0, &view(&mut k, DIM, 1, 1), &view(&mut v, DIM, 1, 1)).unwrap();
            let (mut q, mut out) = (random.normals(2 * DIM), vec![0.0; 2 * DIM]);
            let (q, out_view) = (view(&mut q, DIM, 2, 1), view(&mut out, DIM, 2, 1));
            context.attend(0, &q, None, &out_view).unwrap();
            if commit {
                context.commit(None).unwrap()
            } else {
                context.abort().unwrap()
            }
            out
        };
        for position in 0..30 {
            step(&mut context, position, true);
        }
        let before = step(&mut context, 100, false);
        context.shift(0, 5, -1, 20).unwrap();
        assert_eq!(context.position_max(0).unwrap(), 49);
        assert_eq!(step(&mut context, 100, false), before);
    }
}

#[test]
fn positions_are_never_divided_by_half() {
    let mut world = World::new(small(4), 27);
    world.extend(0, 30);
    let context = &mut world.context;
    assert_eq!(context.divide(0, 0, -1, 2).unwrap_err().status, Status::Unsupported);
    assert_eq!(context.divide(0, 0, -1, 0).unwrap_err().status, Status::Argument);
    assert_eq!(context.divide(0, 0, -1, -3).unwrap_err().status, Status::Argument);
    assert_eq!(context.divide(-1, 0, -1, 1).unwrap_err().status, Status::Sequence);
    context.divide(0, 0, -1, 1).unwrap();
    context.divide(0, 7, 7, 4).unwrap();
    context.divide(2, 0, -1, 4).unwrap();
    world.check(ROUNDING, "as before");
}

#[test]
fn shifts_keep_the_default_codecs_within_their_bound() {
    let params = Params {
        n_sinks: 2,
        window: 16,
        block_tokens: 16,
        layout_tokens: 64,
        share_threshold: 0.0,
        ..Params::default()
    };
    for dense in [DenseLayers::None, DenseLayers::List(vec![1])] {
        let mut world = World::new(Params { dense, ..params.clone() }, 28);
        world.extend(0, 300);
        for round in 0..12 {
            world.remove(0, 40, 45);
            world.shift(0, 45, -1, -5);
            world.extend(0, 5);
            world.check(0.05, &format!("round {round}"));
        }
        println!("worst {}", world.worst);
    }
}

#[test]
fn positions_may_leave_gaps_and_must_rise() {
    let mut world = World::new(small(4), 29);
    world.pass(&[vec![0], vec![0, 1], vec![1]], 7, true);
    world.pass(&vec![vec![0]; 20], 100, true);
    world.check(ROUNDING, "gaps");
    let last = world.last(0);
    for positions in [
        vec![-1],
        vec![last],
        vec![last - 1],
        vec![0],
        vec![last + 1, last + 1],
        vec![last + 2, last + 1],
    ] {
        let token = |&position: &i32| BatchToken { position, sequences: &[0] };
        let batch: Vec<BatchToken> = positions.iter().map(token).collect();
        let error = world.context.begin(&batch).unwrap_err();
        assert_eq!(error.status, Status::Position, "{positions:?}: {error}");
    }
    world.check(ROUNDING, "refused");
    // A gap that a removal has left is not filled: positions rise.
    world.remove(0, 50, last);
    let batch = [BatchToken { position: last - 3, sequences: &[0] }];
    assert_eq!(world.context.begin(&batch).unwrap_err().status, Status::Position);
    world.check(ROUNDING, "a gap inside");
}

/// RoPE knows distances only, so this holds for any codec and any choice of tokens: it is what the
/// sketches of moved blocks, their means and the centre's constant are held against.
#[test]
fn a_shift_of_every_token_and_of_the_query_changes_nothing() {
    let params = Params {
        n_sinks: 2,
        window: 16,
        block_tokens: 16,
        layout_tokens: 64,
        share_reference: 0,
        ..Params::default()
    };
    for (share_threshold, fetch_budget) in [(1.0, None), (0.01, None), (0.002, Some(3))] {
        for dense in [DenseLayers::None, DenseLayers::List(vec![1])] {
            let params = Params { share_threshold, fetch_budget, dense, ..params.clone() };
            let mut world = World::new(params, 31);
            world.extend(0, 300);
            world.remove(0, 100, 150);
            for delta in [1, 77, 1000, -500] {
                let step = Step::new(&mut world.random);
                let before = step.attend(&mut world.context);
                world.context.shift(0, -1, -1, delta).unwrap();
                let after = step.moved_by(delta).attend(&mut world.context);
                let before: Vec<f64> = before.iter().map(|&x| f64::from(x)).collect();
                let worst = difference(&after, &before);
                assert!(worst < 2e-4, "threshold {share_threshold}, by {delta}: {worst}");
            }
        }
    }
}
