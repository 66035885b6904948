//! Values that break KV caches: a right answer, or one error that names what was wrong.
//!
//! "Right" is the dense softmax in f64 over the same tokens. With raw f32 codecs what is left is
//! rounding; with int8 rows it is the codec's bound: a key's element is off by at most half a step
//! of its row, so a score by at most |q|_1 / sqrt(d) times that. Where that bound exceeds the gap
//! between the largest scores, what is left is that the output is finite and a mean of values: at
//! most twice the largest away (`ANY_MEAN`).

mod common;

use common::{Adjust, Harness, Shape, raw_params, sealed_params, view};
use sekv::cache::BatchToken;
use sekv::error::Status;
use sekv::params::{DenseLayers, Params};

const ANY_MEAN: f32 = 2.1;

/// int8 rows, small blocks, every sealed token read.
fn int8_params() -> Params {
    Params {
        n_threads: 2,
        n_sinks: 2,
        window: 8,
        block_tokens: 16,
        layout_tokens: 32,
        share_threshold: 0.0,
        dense: DenseLayers::None,
        ..Params::default()
    }
}

/// Runs passes over adjusted rows; returns the largest difference, relative to the output's and to
/// the values' largest magnitude.
fn worst(params: Params, adjust: Adjust) -> [f32; 2] {
    let mut harness = Harness::new(Shape::uniform(2, 4, 2, 64), params, 11);
    harness.adjust = Some(adjust);
    for n in [70, 1, 40, 1, 1, 20, 3] {
        harness.pass(n);
    }
    [harness.worst, harness.worst_of_values]
}

fn check(adjust: Adjust, raw_bound: f32, int8_bound: f32) {
    for params in [raw_params(), sealed_params(16)] {
        let [worst, _] = worst(params, adjust);
        assert!(worst < raw_bound, "raw: {worst}");
    }
    let [_, int8] = worst(int8_params(), adjust);
    assert!(int8 < int8_bound, "int8: {int8}");
    // With most tokens unread the answer is coarse, and still finite and a mean of values.
    let coarse = Params { share_threshold: 0.05, share_reference: 0, ..int8_params() };
    let [_, coarse] = worst(coarse, adjust);
    assert!(coarse < ANY_MEAN, "coarse: {coarse}");
}

#[test]
fn all_zero_keys() {
    check(|k, _, _, _, _| k.fill(0.0), 2e-5, 0.02);
}

#[test]
fn all_zero_values() {
    // Zero is exact in every codec.
    check(|_, v, _, _, _| v.fill(0.0), 1e-6, 1e-6);
}

#[test]
fn rank_one_spans() {
    let adjust: Adjust = |k, v, _, dk, dv| {
        for (rows, dim) in [(k, dk), (v, dv)] {
            for row in rows.chunks_mut(dim) {
                let scale = row[0];
                row.iter_mut().enumerate().for_each(|(i, x)| *x = scale * (i as f32 * 0.3).sin());
            }
        }
    };
    // The outputs nearly cancel, so rounding is large beside them.
    check(adjust, 1e-3, 0.05);
}

#[test]
fn duplicated_keys() {
    let adjust: Adjust = |k, _, _, dk, _| {
        let first = k[..dk].to_vec();
        k.chunks_mut(dk).for_each(|row| row.copy_from_slice(&first));
    };
    check(adjust, 2e-5, 0.02);
}

#[test]
fn one_channel_ten_thousand_times_the_others() {
    // Scores of +-10,000 and more: the softmax picks one token, in f64 as here.
    let adjust: Adjust = |k, _, _, dk, _| k.chunks_mut(dk).for_each(|row| row[5] *= 10_000.0);
    check(adjust, 2e-3, ANY_MEAN);
}

#[test]
fn channels_whose_mean_is_300_times_their_spread() {
    let adjust: Adjust = |k, _, _, dk, _| {
        for row in k.chunks_mut(dk) {
            row[3] += 300.0;
            row[40] -= 300.0;
        }
    };
    // q . centre is about 300 |q_3|: f32 rounds scores before the centre is known, not after.
    check(adjust, 2e-3, 0.05);
}

#[test]
fn scores_of_plus_and_minus_ten_thousand() {
    let adjust: Adjust = |k, _, q, _, _| {
        k.iter_mut().for_each(|x| *x *= 100.0);
        q.iter_mut().for_each(|x| *x *= 100.0);
    };
    check(adjust, 2e-2, ANY_MEAN);
}

#[test]
fn values_near_the_largest_f16() {
    // Scores overflow in f16, sums of values do too.
    let adjust: Adjust = |k, v, _, _, _| {
        k.iter_mut().for_each(|x| *x = x.signum() * 65_504.0);
        v.iter_mut().for_each(|x| *x = x.signum() * 65_504.0);
    };
    check(adjust, 2e-2, ANY_MEAN);
}

#[test]
fn denormals() {
    let adjust: Adjust = |k, v, _, _, _| {
        k.iter_mut().for_each(|x| *x *= 1e-41);
        v.iter_mut().for_each(|x| *x *= 1e-41);
    };
    // Values this small may vanish in a codec; they must not become NaN or large.
    for params in [sealed_params(16), int8_params()] {
        let mut harness = Harness::new(Shape::uniform(1, 4, 2, 64), params, 12);
        harness.adjust = Some(adjust);
        for n in [70, 1, 40, 1] {
            let worst = harness.pass(n);
            assert!(worst <= 1.5, "{worst}");
        }
    }
}

#[test]
fn refuses_what_is_not_finite_or_too_large_and_stays_as_it_was() {
    let mut harness = Harness::new(Shape::uniform(2, 4, 2, 32), int8_params(), 13);
    harness.pass(60);
    let held = |harness: &Harness| {
        let statistics = harness.context.statistics();
        let memory = sekv::cache::Memory { scratch: 0, ..statistics.memory };
        (statistics.n_tokens, statistics.n_sealed, memory)
    };
    let before = held(&harness);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65_505.0, -1e30] {
        for target in ["K", "V", "Q"] {
            let tokens = [60, 61].map(|position| BatchToken { position, sequences: &[0] });
            harness.context.begin(&tokens).unwrap();
            let (mut k, mut v) = (vec![1.0; 2 * 2 * 32], vec![1.0; 2 * 2 * 32]);
            let (mut q, mut out) = (vec![1.0; 2 * 4 * 32], vec![0.0; 2 * 4 * 32]);
            match target {
                "K" => k[(2 + 1) * 32 + 7] = bad,
                "V" => v[(2 + 1) * 32 + 7] = bad,
                _ => q[(4 + 1) * 32 + 7] = bad,
            }
            let ingest =
                harness.context.ingest(0, &view(&mut k, 32, 2, 2), &view(&mut v, 32, 2, 2));
            let error = ingest
                .and_then(|()| {
                    let out = view(&mut out, 32, 4, 2);
                    harness.context.attend(0, &view(&mut q, 32, 4, 2), None, &out)
                })
                .unwrap_err();
            assert_eq!(error.status, Status::Value);
            for part in [target, "layer 0", "head 1", "token 1"] {
                assert!(error.message.contains(part), "{part} is not in '{}'", error.message);
            }
            harness.context.abort().unwrap();
        }
    }
    assert_eq!(before, held(&harness));
    assert!(harness.pass(1) < 0.05);
}
