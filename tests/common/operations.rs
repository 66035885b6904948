//! Operations on sequences, each done to a context and to plain lists of tokens: passes, removals,
//! copies, shifts, saved states. Who chooses them is another matter.

use super::world::*;
use super::{Random, sealed_params};
use sekv::error::Status;
use sekv::params::{DenseLayers, Params, Prefill};

/// Where choices come from: random numbers, or the bytes of a fuzzer.
pub trait Choices {
    /// A number below `n`.
    fn below(&mut self, n: usize) -> usize;

    fn are_used_up(&self) -> bool;
}

impl Choices for Random {
    fn below(&mut self, n: usize) -> usize {
        Random::below(self, n)
    }

    fn are_used_up(&self) -> bool {
        false
    }
}

/// A context of chosen params, and operations on it until nothing is left to choose by, up to a
/// number. Gives back the rows that were attended, and those of them that were sealed.
pub fn operate(choices: &mut impl Choices, seed: u64, n_operations: usize) -> (f64, f64) {
    let paper = choices.below(4) == 0;
    let bound = if paper { ZOOMED } else { ROUNDING };
    let params = if paper {
        let (n_sinks, window) = (choices.below(3), choices.below(4));
        Params { n_sinks, window, ..small_paper() }
    } else {
        let block_tokens = [1, 2, 3, 4, 4, 7, 16][choices.below(7)];
        let dense = match choices.below(4) {
            0 => DenseLayers::List(vec![1]),
            _ => DenseLayers::None,
        };
        let n_sinks = choices.below(3);
        let prefill = if choices.below(2) == 0 { Prefill::Exact } else { Prefill::Routed };
        Params { n_sinks, dense, prefill, ..sealed_params(block_tokens) }
    };
    let params = on(&media()[choices.below(6).min(3) % 3], &params);
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
    let first = 20 + choices.below(40);
    world.extend(0, first);
    // That pass has seen its own rows alone.
    (world.attended, world.sealed) = (0.0, 0.0);
    let mut saved: Vec<Saved> = Vec::new();
    for operation in 0..n_operations {
        if choices.are_used_up() {
            break;
        }
        let s = choices.below(SEQUENCES);
        let list = &world.lists[s];
        let end = world.last(s) + 1;
        // Positions of a range; now and then open at one side.
        let low = choices.below(end as usize + 2) as i32 - 1;
        let high = match choices.below(8) {
            0 => -1,
            _ => low.max(0) + choices.below(12) as i32,
        };
        let what;
        match choices.below(15) {
            0..4 => {
                let most = if choices.below(8) == 0 { 20 } else { 4 };
                let n = 1 + choices.below(most);
                let members: Vec<Vec<i32>> = (0..n)
                    .map(|_| match choices.below(6) {
                        0 => vec![s as i32, ((s + 1) % SEQUENCES) as i32],
                        1 => vec![((s + 2) % SEQUENCES) as i32],
                        _ => vec![s as i32],
                    })
                    .collect();
                let gap = if choices.below(4) == 0 { choices.below(20) as i32 } else { 0 };
                let commit = choices.below(4) > 0;
                what = format!("pass {members:?} gap {gap} commit {commit}");
                world.pass(&members, gap, commit);
            }
            4 | 5 => {
                let s = if choices.below(8) == 0 { -1 } else { s as i32 };
                what = format!("remove {s} {low}..{high}");
                world.remove(s, low, high);
            }
            6 => {
                // A rejected draft.
                let first = end - (choices.below(6) as i32).min(end);
                what = format!("roll back {s} to {first}");
                world.remove(s as i32, first, -1);
            }
            7 | 8 => {
                let to = choices.below(SEQUENCES);
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
                let delta = choices.below(61) as i32 - 30;
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
                let s = if choices.below(3) == 0 { -1 } else { s as i32 };
                what = format!("save {s}");
                saved.push(world.save(s));
            }
            12 if !saved.is_empty() => {
                let state = &saved[choices.below(saved.len())];
                what = format!("load {} into {s}", state.s);
                world.load(state, s);
            }
            13 if choices.below(2) == 0 => {
                what = "move to a new context".to_owned();
                world.move_to_a_new_context();
            }
            _ if choices.below(6) == 0 => {
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
