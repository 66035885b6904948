//! Routing `ladder` against its own definition, computed plainly in f64: which tokens are read,
//! and what the coarse rows add.

mod common;

use std::sync::Arc;

use common::{Random, Shape, difference, raw_params, view};
use sekv::cache::{BatchToken, Context};
use sekv::params::Params;

const DIM: usize = 32;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const BLOCK: usize = 16;

struct Rows {
    keys: Vec<f32>,
    values: Vec<f32>,
    n: usize,
}

/// Keys that give some tokens most of the attention.
fn rows(n: usize, random: &mut Random) -> Rows {
    let mut keys = random.normals(n * KV_HEADS * DIM);
    for (i, row) in keys.chunks_mut(DIM).enumerate() {
        let scale = if i % 23 == 0 { 2.5 } else { 0.7 };
        row.iter_mut().for_each(|x| *x *= scale);
    }
    Rows { keys, values: random.normals(n * KV_HEADS * DIM), n }
}

fn context(params: Params, rows: &mut Rows) -> Context {
    let shape = Shape::uniform(1, HEADS, KV_HEADS, DIM);
    let mut context = Context::new(shape.model(), params).unwrap();
    let tokens: Vec<BatchToken> =
        (0..rows.n as i32).map(|position| BatchToken { position, sequences: &[0] }).collect();
    context.begin(&tokens).unwrap();
    let (n, d) = (rows.n, DIM);
    let (k, v) = (view(&mut rows.keys, d, KV_HEADS, n), view(&mut rows.values, d, KV_HEADS, n));
    context.ingest(0, &k, &v).unwrap();
    context.commit(None).unwrap();
    context
}

/// One decode step with the given rows of its own; aborted, so that it can be repeated.
fn step(context: &mut Context, own: &mut Rows, q: &mut [f32], position: i32) -> Vec<f32> {
    context.begin(&[BatchToken { position, sequences: &[0] }]).unwrap();
    let (k, v) = (view(&mut own.keys, DIM, KV_HEADS, 1), view(&mut own.values, DIM, KV_HEADS, 1));
    context.ingest(0, &k, &v).unwrap();
    let mut out = vec![f32::NAN; HEADS * DIM];
    context.attend(0, &view(q, DIM, HEADS, 1), None, &view(&mut out, DIM, HEADS, 1)).unwrap();
    context.abort().unwrap();
    out
}

/// Ladder attention from its definition: sinks, window and the step's own row exactly; tokens
/// whose mean share over the group exceeds `epsilon` exactly; the others at their block's mean
/// value.
fn reference(
    rows: &Rows,
    own: &Rows,
    q: &[f32],
    params: &Params,
    epsilon: f64,
) -> (Vec<f64>, usize) {
    let (n, group) = (rows.n, HEADS / KV_HEADS);
    let first_open = n - (n - params.n_sinks - params.window) % BLOCK - params.window;
    let row = |data: &Rows, values: bool, head: usize, t: usize| {
        let (source, t) = if t < n { (data, t) } else { (own, t - n) };
        let list = if values { &source.values } else { &source.keys };
        list[(t * KV_HEADS + head) * DIM..][..DIM].to_vec()
    };
    let mut out = Vec::new();
    let mut n_fetched = 0;
    for head in 0..KV_HEADS {
        let scores: Vec<Vec<f64>> = (0..group)
            .map(|g| {
                let q = &q[(head * group + g) * DIM..][..DIM];
                let dot = |k: &[f32]| -> f64 {
                    k.iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
                };
                (0..=n).map(|t| dot(&row(rows, false, head, t)) / (DIM as f64).sqrt()).collect()
            })
            .collect();
        let z: Vec<f64> = scores.iter().map(|s| s.iter().map(|x| x.exp()).sum()).collect();
        let sealed = params.n_sinks..first_open;
        let exact = |t: usize| {
            let share: f64 =
                (0..group).map(|g| scores[g][t].exp() / z[g]).sum::<f64>() / group as f64;
            !sealed.contains(&t) || share > epsilon
        };
        n_fetched += sealed.clone().filter(|&t| exact(t)).count();
        for g in 0..group {
            let mut sum = vec![0.0; DIM];
            for (t, score) in scores[g].iter().enumerate() {
                let value = if exact(t) {
                    row(rows, true, head, t).iter().map(|&x| f64::from(x)).collect()
                } else {
                    let block = (t - params.n_sinks) / BLOCK * BLOCK + params.n_sinks;
                    let mut mean = vec![0.0f64; DIM];
                    for u in block..block + BLOCK {
                        for (m, x) in mean.iter_mut().zip(row(rows, true, head, u)) {
                            *m += f64::from(x) / BLOCK as f64;
                        }
                    }
                    mean
                };
                for (s, x) in sum.iter_mut().zip(value) {
                    *s += score.exp() / z[g] * x;
                }
            }
            out.extend(sum);
        }
    }
    (out, n_fetched)
}

fn params(epsilon: f32) -> Params {
    Params {
        n_sinks: 3,
        window: 20,
        block_tokens: BLOCK,
        layout_tokens: 64,
        share_threshold: epsilon,
        share_reference: 0,
        ..raw_params()
    }
}

#[test]
fn reads_the_tokens_whose_mean_share_exceeds_epsilon_and_sees_the_others_as_block_means() {
    let mut random = Random(31);
    for (n, epsilon) in [(200, 1.0), (500, 0.003), (500, 0.001), (777, 0.0005)] {
        let mut rows = rows(n, &mut random);
        let params = params(epsilon);
        let mut context = context(params.clone(), &mut rows);
        let mut own = self::rows(1, &mut random);
        let mut q = random.normals(HEADS * DIM);
        let got = step(&mut context, &mut own, &mut q, n as i32);
        let (want, n_fetched) = reference(&rows, &own, &q, &params, f64::from(epsilon));
        let worst = difference(&got, &want);
        assert!(worst < 1e-4, "n {n} epsilon {epsilon}: {worst}");
        let fetched = context.statistics().counters.fetched;
        assert_eq!((fetched.mean() * KV_HEADS as f64).round() as usize, n_fetched);
        assert!(
            epsilon == 1.0 || (1..KV_HEADS * n).contains(&n_fetched),
            "{n_fetched} of {n} tokens"
        );
    }
}

/// The same numbers whatever the number of threads: pieces merge.
#[test]
fn threads_and_pieces_do_not_change_the_answer() {
    let mut random = Random(32);
    let mut rows = rows(3000, &mut random);
    let mut own = self::rows(1, &mut random);
    let mut q = random.normals(HEADS * DIM);
    let mut answers = Vec::new();
    for n_threads in [1, 2, 7] {
        let params =
            Params { n_threads, share_threshold: 2e-4, n_batch_max: 3000, ..Params::default() };
        let mut context = context(params, &mut rows);
        answers.push(step(&mut context, &mut own, &mut q, 3000));
    }
    for answer in &answers[1..] {
        let want: Vec<f64> = answers[0].iter().map(|&x| f64::from(x)).collect();
        assert!(difference(answer, &want) < 1e-5);
    }
}

/// Values whose residuals lie in few directions: the value sketch restores most of what the block
/// means leave out.
#[test]
fn the_value_sketch_brings_unread_tokens_closer() {
    let mut random = Random(33);
    let n = 1500;
    let mut rows = rows(n, &mut random);
    let directions = random.normals(4 * DIM);
    for value in rows.values.chunks_mut(DIM) {
        let weights = random.normals(4);
        for (i, x) in value.iter_mut().enumerate() {
            *x = (0..4).map(|k| weights[k] * directions[k * DIM + i]).sum();
        }
    }
    let mut own = self::rows(1, &mut random);
    let mut q = random.normals(HEADS * DIM);
    let exact = Params { share_threshold: 0.0, ..params(0.0) };
    let want: Vec<f64> = {
        let mut context = context(exact, &mut rows);
        step(&mut context, &mut own, &mut q, n as i32).iter().map(|&x| f64::from(x)).collect()
    };
    let mut error = |value_sketch| {
        let params = Params { value_sketch, middle_fraction: 0.01, ..params(0.004) };
        let mut context = context(params, &mut rows);
        difference(&step(&mut context, &mut own, &mut q, n as i32), &want)
    };
    let (with, without) = (error(true), error(false));
    assert!(with < 0.6 * without, "with {with}, without {without}");
}

#[test]
fn a_plan_from_the_same_queries_is_used_and_any_other_is_ignored() {
    let mut random = Random(34);
    let n = 600;
    let mut rows = rows(n, &mut random);
    let mut context = context(params(0.001), &mut rows);
    let mut own = self::rows(1, &mut random);
    let mut q = random.normals(HEADS * DIM);
    let want = step(&mut context, &mut own, &mut q, n as i32);
    for (same, before_ingest) in [(true, false), (false, false), (true, true)] {
        context.begin(&[BatchToken { position: n as i32, sequences: &[0] }]).unwrap();
        let mut asked = if same { q.clone() } else { random.normals(HEADS * DIM) };
        let q_view = view(&mut asked, DIM, HEADS, 1);
        let early = before_ingest.then(|| context.route(0, &q_view).unwrap());
        let k = view(&mut own.keys, DIM, KV_HEADS, 1);
        context.ingest(0, &k, &view(&mut own.values, DIM, KV_HEADS, 1)).unwrap();
        let plan = early.unwrap_or_else(|| context.route(0, &q_view).unwrap());
        context.zoom(plan).unwrap();
        let before = context.statistics().counters;
        let mut out = vec![f32::NAN; HEADS * DIM];
        let out_view = view(&mut out, DIM, HEADS, 1);
        context.attend(0, &view(&mut q, DIM, HEADS, 1), Some(plan), &out_view).unwrap();
        let after = context.statistics().counters;
        let used = same && !before_ingest;
        assert_eq!(after.plans_used - before.plans_used, u64::from(used));
        assert_eq!(after.plans_ignored - before.plans_ignored, u64::from(!used));
        assert_eq!(out, want);
        context.abort().unwrap();
        assert!(context.zoom(plan).is_err(), "a plan outlived its pass");
    }
}

#[test]
fn a_diffuse_layer_becomes_dense_and_a_peaked_one_does_not() {
    let mut random = Random(35);
    let shape = Shape::uniform(2, 4, 2, DIM);
    let n = 300;
    let params = Params {
        layout_tokens: 128,
        block_tokens: 16,
        window: 32,
        n_threads: 1,
        ..Params::default()
    };
    let mut context = Context::new(Arc::clone(&shape.model()), params).unwrap();
    let tokens: Vec<BatchToken> =
        (0..n).map(|position| BatchToken { position, sequences: &[0] }).collect();
    context.begin(&tokens).unwrap();
    for (layer, sharpness) in [(0, 0.05), (1, 8.0)] {
        let n = n as usize;
        let mut k = random.normals(n * 2 * DIM);
        k.iter_mut().for_each(|x| *x *= sharpness);
        let (mut v, mut q) = (random.normals(n * 2 * DIM), random.normals(n * 4 * DIM));
        context.ingest(layer, &view(&mut k, DIM, 2, n), &view(&mut v, DIM, 2, n)).unwrap();
        context.observe(layer, &view(&mut q, DIM, 4, n)).unwrap();
    }
    context.commit(None).unwrap();
    assert_eq!(context.statistics().report.dense_layers, [0]);
}
