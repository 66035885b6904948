//! Random operations on sequences against plain lists of tokens and dense attention in f64.

mod common;

use common::Random;
use common::operations::operate;

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
                    let sums = seeds.map(|seed| operate(&mut Random(seed ^ 0x5eed), seed, 12));
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
