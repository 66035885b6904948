//! Random operations on sequences against a naive cache that keeps every token in a plain list and
//! attends densely in f64.

mod common;

use common::{Random, Shape, dense, difference, raw_params, sealed_params, view};
use sekv::cache::{BatchToken, Context};
use sekv::error::Status;
use sekv::kernels::RowCodec;
use sekv::model::RopeKind;
use sekv::params::{BasisCodec, DenseLayers, Params, Prefill, RoutingKind};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;
const SEQUENCES: usize = 4;

/// f32 sums of some hundred terms.
const ROUNDING: f32 = 2e-5;
/// Routing paper: coarse rows of zoomed spans, at a weight of 1e-6, and f32 factors.
const ZOOMED: f32 = 2e-4;

/// One token as it came in: `[layer]`, then all KV heads.
#[derive(Clone)]
struct Token {
    position: i32,
    /// Positions that it has moved by since.
    shift: i32,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Token {
    /// A layer's keys where the token is now: RoPE of half-split pairs, base 10,000, in f64. Hosts
    /// keep frequencies as f32.
    fn keys(&self, layer: usize) -> Vec<f32> {
        let mut keys = self.keys[layer].clone();
        for key in keys.chunks_mut(DIM) {
            for i in 0..DIM / 2 {
                let frequency = 1e4f64.powf(-2.0 * i as f64 / DIM as f64) as f32;
                let (sin, cos) = (f64::from(self.shift) * f64::from(frequency)).sin_cos();
                let (x, y) = (f64::from(key[i]), f64::from(key[i + DIM / 2]));
                key[i] = (x * cos - y * sin) as f32;
                key[i + DIM / 2] = (x * sin + y * cos) as f32;
            }
        }
        keys
    }
}

struct World {
    context: Context,
    lists: Vec<Vec<Token>>,
    random: Random,
    /// Commits give surprisal.
    surprisal: bool,
    worst: f32,
    /// Rows that queries attended over, and how many of them were sealed: those of earlier passes
    /// by the share that is sealed of all that the context holds.
    attended: f64,
    sealed: f64,
}

impl World {
    fn new(params: Params, seed: u64) -> Self {
        let params = Params { n_seq_max: SEQUENCES, n_threads: 1, ..params };
        let surprisal = params.routing == RoutingKind::Paper;
        let shape = Shape::uniform(LAYERS, HEADS, KV_HEADS, DIM);
        Self {
            context: Context::new(shape.model(), params).unwrap(),
            lists: vec![Vec::new(); SEQUENCES],
            random: Random(seed),
            surprisal,
            worst: 0.0,
            attended: 0.0,
            sealed: 0.0,
        }
    }

    fn last(&self, s: usize) -> i32 {
        self.lists[s].last().map_or(-1, |token| token.position)
    }

    /// A pass of tokens with their sequences, at positions `gap` beyond the last ones; aborted or
    /// committed.
    fn pass(&mut self, members: &[Vec<i32>], gap: i32, commit: bool) {
        let n = members.len();
        let mut lists = self.lists.clone();
        let mut tokens = Vec::new();
        for sequences in members {
            let last = |&s: &i32| lists[s as usize].last().map_or(-1, |t| t.position);
            let position = sequences.iter().map(last).max().unwrap() + 1 + gap;
            let token = Token { position, shift: 0, keys: Vec::new(), values: Vec::new() };
            sequences.iter().for_each(|&s| lists[s as usize].push(token.clone()));
            tokens.push(BatchToken { position, sequences });
        }
        self.context.begin(&tokens).unwrap();
        let statistics = self.context.statistics();
        let share_sealed = statistics.n_sealed as f64 / statistics.n_tokens.max(1) as f64;
        let mut seen = vec![0; members.len()];
        for (i, sequences) in members.iter().enumerate() {
            let s = sequences[0];
            let before = members[..=i].iter().filter(|m| m.contains(&s)).count();
            seen[i] = self.lists[s as usize].len() + before;
        }
        for il in 0..LAYERS {
            let mut k = self.random.normals(n * KV_HEADS * DIM);
            // A centre worth the name.
            k.iter_mut().enumerate().for_each(|(i, x)| *x += (i % DIM) as f32 * 0.1);
            let mut v = self.random.normals(n * KV_HEADS * DIM);
            let mut q = self.random.normals(n * HEADS * DIM);
            let mut out = vec![f32::NAN; n * HEADS * DIM];
            let (k_view, v_view) = (view(&mut k, DIM, KV_HEADS, n), view(&mut v, DIM, KV_HEADS, n));
            self.context.ingest(il, &k_view, &v_view).unwrap();
            let (q_view, out_view) = (view(&mut q, DIM, HEADS, n), view(&mut out, DIM, HEADS, n));
            self.context.attend(il, &q_view, None, &out_view).unwrap();
            let mut next: Vec<usize> = self.lists.iter().map(Vec::len).collect();
            for (t, sequences) in members.iter().enumerate() {
                for &s in sequences {
                    let token = &mut lists[s as usize][next[s as usize]];
                    token.keys.push(k[t * KV_HEADS * DIM..][..KV_HEADS * DIM].to_vec());
                    token.values.push(v[t * KV_HEADS * DIM..][..KV_HEADS * DIM].to_vec());
                    next[s as usize] += 1;
                }
            }
            for (t, sequences) in members.iter().enumerate() {
                let list = &lists[sequences[0] as usize][..seen[t]];
                let keys: Vec<Vec<f32>> = list.iter().map(|token| token.keys(il)).collect();
                let values: Vec<Vec<f32>> =
                    list.iter().map(|token| token.values[il].clone()).collect();
                for h in 0..HEADS {
                    let row = (t * HEADS + h) * DIM..(t * HEADS + h + 1) * DIM;
                    let want = dense(&q[row.clone()], h / 2, &keys, &values, DIM, DIM);
                    self.worst = self.worst.max(difference(&out[row], &want));
                }
                let n_before = self.lists[sequences[0] as usize].len();
                self.attended += list.len() as f64;
                self.sealed += n_before as f64 * share_sealed;
            }
        }
        if commit {
            let surprisal: Vec<f32> =
                (0..n).map(|_| -self.random.uniform().max(1e-7).ln()).collect();
            self.context.commit(self.surprisal.then_some(&surprisal)).unwrap();
            self.lists = lists;
        } else {
            self.context.abort().unwrap();
        }
    }

    /// A pass of `n` tokens of one sequence.
    fn extend(&mut self, s: usize, n: usize) {
        self.pass(&vec![vec![s as i32]; n], 0, true);
    }

    fn copy(&mut self, from: usize, to: usize, first: i32, end: i32) {
        self.context.copy(from as i32, to as i32, first, end).unwrap();
        if from != to {
            let tokens = self.lists[from].iter().filter(|t| within(t, first, end));
            self.lists[to] = tokens.cloned().collect();
        }
    }

    /// Removes positions `first..end` of a sequence, or of all.
    fn remove(&mut self, s: i32, first: i32, end: i32) {
        self.context.remove(s, first, end).unwrap();
        for (i, list) in self.lists.iter_mut().enumerate() {
            if s < 0 || s == i as i32 {
                list.retain(|token| !within(token, first, end));
            }
        }
    }

    /// Moves positions `first..end` of a sequence.
    fn shift(&mut self, s: usize, first: i32, end: i32, delta: i32) {
        self.context.shift(s as i32, first, end, delta).unwrap();
        for token in self.lists[s].iter_mut().filter(|token| within(token, first, end)) {
            token.position += delta;
            token.shift += delta;
        }
    }

    /// Positions, and a step of every sequence that has tokens.
    fn check(&mut self, bound: f32, what: &str) {
        let mut members = Vec::new();
        for s in 0..SEQUENCES {
            let min = self.lists[s].first().map_or(-1, |token| token.position);
            assert_eq!(self.context.position_min(s as i32).unwrap(), min, "{what}");
            assert_eq!(self.context.position_max(s as i32).unwrap(), self.last(s), "{what}");
            if min >= 0 {
                members.push(vec![s as i32]);
            }
        }
        let n_tokens: usize = self.lists.iter().map(Vec::len).sum();
        assert_eq!(self.context.statistics().n_tokens, n_tokens as u64, "{what}");
        if !members.is_empty() {
            self.pass(&members, 0, false);
        }
        assert!(self.worst < bound, "{what}: {}", self.worst);
        assert_eq!(self.context.take_events(), [], "{what}");
    }
}

fn within(token: &Token, first: i32, end: i32) -> bool {
    token.position >= first && (end < 0 || token.position < end)
}

fn small(block_tokens: usize) -> Params {
    Params { n_sinks: 2, window: 3, ..sealed_params(block_tokens) }
}

fn small_paper() -> Params {
    Params {
        routing: RoutingKind::Paper,
        n_sinks: 2,
        window: 3,
        block_tokens: 1,
        layout_tokens: 4,
        // Untrained, the gate of a span of so many tokens is above the threshold for any query here.
        span_min: 4,
        rank_max: 512,
        basis_codec: BasisCodec::LowRank(RowCodec::F32),
        ..raw_params()
    }
}

fn both_routings() -> [(Params, f32); 2] {
    [(small(4), ROUNDING), (small_paper(), ZOOMED)]
}

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

/// One sequence of random operations; the rows that were attended, and those of them that were
/// sealed.
fn random_operations(seed: u64, n_operations: usize) -> (f64, f64) {
    let mut random = Random(seed ^ 0x5eed);
    let paper = random.below(4) == 0;
    let bound = if paper { ZOOMED } else { ROUNDING };
    let params = if paper {
        let (n_sinks, window) = (random.below(3), random.below(4));
        Params { n_sinks, window, ..small_paper() }
    } else {
        let block_tokens = [1, 2, 3, 4, 4, 7, 16][random.below(7)];
        let dense = match random.below(4) {
            0 => DenseLayers::List(vec![1]),
            _ => DenseLayers::None,
        };
        let n_sinks = random.below(3);
        let prefill = if random.below(2) == 0 { Prefill::Exact } else { Prefill::Routed };
        Params { n_sinks, dense, prefill, ..sealed_params(block_tokens) }
    };
    let described = format!(
        "{:?}, {} sinks, window {}, blocks of {}, {:?}, {:?}",
        params.routing,
        params.n_sinks,
        params.window,
        params.block_tokens,
        params.dense,
        params.prefill
    );
    let mut world = World::new(params, seed);
    let first = 20 + random.below(40);
    world.extend(0, first);
    // That pass has seen its own rows alone.
    (world.attended, world.sealed) = (0.0, 0.0);
    for operation in 0..n_operations {
        let s = random.below(SEQUENCES);
        let list = &world.lists[s];
        let end = world.last(s) + 1;
        // Positions of a range; now and then open at one side.
        let low = random.below(end as usize + 2) as i32 - 1;
        let high = match random.below(8) {
            0 => -1,
            _ => low.max(0) + random.below(12) as i32,
        };
        let what;
        match random.below(12) {
            0..4 => {
                let most = if random.below(8) == 0 { 20 } else { 4 };
                let n = 1 + random.below(most);
                let members: Vec<Vec<i32>> = (0..n)
                    .map(|_| match random.below(6) {
                        0 => vec![s as i32, ((s + 1) % SEQUENCES) as i32],
                        1 => vec![((s + 2) % SEQUENCES) as i32],
                        _ => vec![s as i32],
                    })
                    .collect();
                let gap = if random.below(4) == 0 { random.below(20) as i32 } else { 0 };
                let commit = random.below(4) > 0;
                what = format!("pass {members:?} gap {gap} commit {commit}");
                world.pass(&members, gap, commit);
            }
            4 | 5 => {
                let s = if random.below(8) == 0 { -1 } else { s as i32 };
                what = format!("remove {s} {low}..{high}");
                world.remove(s, low, high);
            }
            6 => {
                // A rejected draft.
                let first = end - (random.below(6) as i32).min(end);
                what = format!("roll back {s} to {first}");
                world.remove(s as i32, first, -1);
            }
            7 | 8 => {
                let to = random.below(SEQUENCES);
                what = format!("copy {s} to {to} {low}..{high}");
                if to == s || world.lists[to].is_empty() {
                    world.copy(s, to, low, high);
                } else {
                    let anything = list.iter().any(|token| within(token, low, high));
                    let result = world.context.copy(s as i32, to as i32, low, high);
                    let status = result.err().map(|error| error.status);
                    assert_eq!(status, anything.then_some(Status::Unsupported), "{what}");
                }
            }
            9 | 10 => {
                let delta = random.below(61) as i32 - 30;
                what = format!("shift {s} {low}..{high} by {delta}");
                let moved: Vec<i32> = list
                    .iter()
                    .map(|t| t.position + if within(t, low, high) { delta } else { 0 })
                    .collect();
                let in_order = moved.first().is_none_or(|&p| p >= 0)
                    && moved.windows(2).all(|pair| pair[0] < pair[1]);
                let positions_before: Vec<i32> = list.iter().map(|t| t.position).collect();
                match world.context.shift(s as i32, low, high, delta) {
                    Ok(()) => {
                        assert!(in_order, "{what}");
                        for t in world.lists[s].iter_mut().filter(|t| within(t, low, high)) {
                            t.position += delta;
                            t.shift += delta;
                        }
                    }
                    Err(error) => {
                        assert_eq!(error.status, Status::Position, "{what}: {error}");
                        assert!(!in_order, "{what}: {positions_before:?}");
                    }
                }
            }
            _ if random.below(6) == 0 => {
                what = format!("keep {s}");
                world.context.keep(s as i32).unwrap();
                (0..SEQUENCES).filter(|&i| i != s).for_each(|i| world.lists[i].clear());
            }
            _ => {
                what = format!("extend {s}");
                world.extend(s, 12);
            }
        }
        world.check(bound, &format!("{described}; seed {seed}, operation {operation}: {what}"));
    }
    (world.attended, world.sealed)
}

/// SEKV_OPERATIONS sets how many sequences of operations are run.
#[test]
fn random_operations_equal_a_plain_list() {
    let n = std::env::var("SEKV_OPERATIONS").map_or(2000, |n| n.parse().unwrap());
    let (mut attended, mut sealed) = (0.0, 0.0);
    for seed in 0..n {
        let (rows, of_them) = random_operations(seed, 12);
        attended += rows;
        sealed += of_them;
    }
    let share = sealed / attended;
    println!("{attended} rows attended over, {:.0} % of them sealed", 100.0 * share);
    assert!(share >= 0.5, "{share}");
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

/// One token's rows of every layer, and its queries: `[layer]`.
struct Step {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    queries: Vec<Vec<f32>>,
}

impl Step {
    fn new(random: &mut Random) -> Self {
        let mut rows = |n: usize| (0..LAYERS).map(|_| random.normals(n * DIM)).collect();
        Self { keys: rows(KV_HEADS), values: rows(KV_HEADS), queries: rows(HEADS) }
    }

    fn moved_by(&self, shift: i32) -> Self {
        let values = self.values.clone();
        let turned = |keys: &Vec<Vec<f32>>| {
            let token = Token { position: 0, shift, keys: keys.clone(), values: Vec::new() };
            (0..LAYERS).map(|il| token.keys(il)).collect()
        };
        Self { keys: turned(&self.keys), values, queries: turned(&self.queries) }
    }

    /// The outputs of a pass of this token in sequence 0, which is aborted.
    fn attend(&self, context: &mut Context) -> Vec<f32> {
        let position = context.position_max(0).unwrap() + 1;
        context.begin(&[BatchToken { position, sequences: &[0] }]).unwrap();
        let mut outputs = Vec::new();
        for il in 0..LAYERS {
            let (mut k, mut v) = (self.keys[il].clone(), self.values[il].clone());
            let (mut q, mut out) = (self.queries[il].clone(), vec![f32::NAN; HEADS * DIM]);
            let (k, v) = (view(&mut k, DIM, KV_HEADS, 1), view(&mut v, DIM, KV_HEADS, 1));
            context.ingest(il, &k, &v).unwrap();
            let (q, out_view) = (view(&mut q, DIM, HEADS, 1), view(&mut out, DIM, HEADS, 1));
            context.attend(il, &q, None, &out_view).unwrap();
            outputs.extend(out);
        }
        context.abort().unwrap();
        outputs
    }
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
