//! Blocks that a thread of their own makes while a sequence decodes are those that the commit would
//! have made, whenever it is done with them and whatever happens to the sequence meanwhile.

mod common;

use common::Random;
use common::world::*;
use sekv::params::{DenseLayers, FastBudget, Params};

fn params(block_tokens: usize) -> Params {
    Params {
        n_sinks: 2,
        window: 2 * block_tokens,
        block_tokens,
        layout_tokens: 4 * block_tokens,
        share_threshold: 0.002,
        ..Params::default()
    }
}

/// The same steps on a context of one thread, which makes every block in a commit, and on one of
/// several. All that both hold is equal; answers may differ by the order of their sums.
fn assert_alike(params: &Params, seed: u64, steps: impl Fn(&mut World, &mut Random)) {
    let mut worlds = [1, 3].map(|n_threads| {
        let mut world = World::new(params.clone(), seed);
        world.params.n_threads = n_threads;
        world.context = new_context(&world.params);
        world
    });
    for round in 0..40 {
        let mut seen = Vec::new();
        for world in &mut worlds {
            steps(world, &mut Random(seed << 8 | round));
            seen.push((world.save(-1).bytes, world.context.statistics().memory.fast));
        }
        assert!(seen[0] == seen[1], "round {round}, seed {seed}");
    }
    let ahead = worlds.map(|world| world.context.statistics().counters.sealed_ahead);
    println!("{ahead:?} blocks were made ahead");
    assert!(ahead[0] == 0 && ahead[1] > 2, "{ahead:?}");
}

#[test]
fn a_sequence_that_decodes_gets_the_same_blocks() {
    for block_tokens in [1, 4, 16] {
        assert_alike(&params(block_tokens), 1, |world, random| {
            if world.lists[0].is_empty() {
                world.extend(0, 5 * block_tokens);
            }
            for _ in 0..1 + random.below(9) {
                world.extend(0, 1 + random.below(3));
            }
        });
    }
}

#[test]
fn what_happens_to_the_sequence_meanwhile_is_seen() {
    let dense = Params { dense: DenseLayers::List(vec![1]), ..params(4) };
    for (seed, params) in [(2, params(4)), (3, dense), (4, params(8))] {
        assert_alike(&params, seed, |world, random| {
            let end = world.last(0) + 1;
            match random.below(16) {
                0 => world.remove(0, (end - random.below(12) as i32).max(0), -1),
                1 if end > 9 => world.remove(0, end - 9, end - 4),
                2 => world.shift(0, -1, -1, 3),
                3 => {
                    world.remove(1, -1, -1);
                    world.copy(0, 1, -1, -1);
                }
                4 => world.extend(0, 40),
                5 => {
                    let saved = world.save(0);
                    world.load(&saved, 0);
                }
                _ => {}
            }
            for _ in 0..random.below(30) {
                world.extend(random.below(2), 1);
            }
        });
    }
}

#[test]
fn a_budget_that_seals_a_dense_layer_meanwhile_is_seen() {
    let params = Params { dense: DenseLayers::List(vec![0]), ..params(8) };
    assert_alike(&params, 5, |world, random| {
        if world.lists[0].is_empty() {
            world.extend(0, 300);
        }
        world.context.set_fast_budget(FastBudget::Unlimited);
        if random.below(10) == 0 {
            let held = world.context.statistics().memory.fast;
            world.context.set_fast_budget(FastBudget::Bytes(held));
        }
        (0..1 + random.below(4)).for_each(|_| world.extend(0, 1));
    });
}
