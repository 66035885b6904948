//! Random operations on sequences against plain lists of tokens and dense attention in f64: passes,
//! removals, copies, shifts, saved states.

mod common;

use common::world::*;
use common::{Random, sealed_params};
use sekv::error::Status;
use sekv::params::{DenseLayers, Params, Prefill};

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
    let params = on(&media()[random.below(6).min(3) % 3], &params);
    let described = format!(
        "{:?}, {} sinks, window {}, blocks of {}, {:?}, {:?}, {:?} {:?}",
        params.routing,
        params.n_sinks,
        params.window,
        params.block_tokens,
        params.dense,
        params.prefill,
        params.basis_folder,
        params.basis_io
    );
    let mut world = World::new(params, seed);
    let first = 20 + random.below(40);
    world.extend(0, first);
    // That pass has seen its own rows alone.
    (world.attended, world.sealed) = (0.0, 0.0);
    let mut saved: Vec<Saved> = Vec::new();
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
        match random.below(15) {
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
            11 => {
                let s = if random.below(3) == 0 { -1 } else { s as i32 };
                what = format!("save {s}");
                saved.push(world.save(s));
            }
            12 if !saved.is_empty() => {
                let state = &saved[random.below(saved.len())];
                what = format!("load {} into {s}", state.s);
                world.load(state, s);
            }
            13 if random.below(2) == 0 => {
                what = "move to a new context".to_owned();
                world.move_to_a_new_context();
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
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut attended, mut sealed) = (0.0, 0.0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads)
            .map(|thread| {
                scope.spawn(move || {
                    let seeds = (0..n).skip(thread).step_by(n_threads);
                    let sums = seeds.map(|seed| random_operations(seed, 12));
                    sums.fold((0.0, 0.0), |(a, b), (rows, of_them)| (a + rows, b + of_them))
                })
            })
            .collect();
        for thread in threads {
            let (rows, of_them) = thread.join().unwrap();
            (attended, sealed) = (attended + rows, sealed + of_them);
        }
    });
    let share = sealed / attended;
    println!(
        "{n} sequences of operations, {attended} rows attended over, {:.0} % of them sealed",
        100.0 * share
    );
    assert!(share >= 0.5, "{share}");
}
