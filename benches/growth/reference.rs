//! Dense attention of some queries over rows that pass by once, in f64.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::generator::{DIM, N_HEADS, N_KV_HEADS};

const GROUP: usize = N_HEADS / N_KV_HEADS;

/// One query head's running softmax.
struct State {
    query: Vec<f32>,
    kv_head: usize,
    largest: f64,
    sum: f64,
    out: Vec<f64>,
}

pub struct Reference {
    states: Vec<State>,
    n_queries: usize,
    n_threads: usize,
}

impl Reference {
    /// Queries are `[n_heads][dim]`.
    pub fn new(queries: Vec<Vec<f32>>, n_threads: usize) -> Self {
        let heads = queries.iter().flat_map(|query| query.chunks(DIM).enumerate());
        let state = |(head, query): (usize, &[f32])| State {
            query: query.to_vec(),
            kv_head: head / GROUP,
            largest: f64::NEG_INFINITY,
            sum: 0.0,
            out: vec![0.0; DIM],
        };
        Self { states: heads.map(state).collect(), n_queries: queries.len(), n_threads }
    }

    /// Adds tokens, `[token][n_kv_heads][dim]`.
    pub fn add(&mut self, keys: &[f16], values: &[f16]) {
        let (mut k, mut v) = (vec![0.0f32; keys.len()], vec![0.0f32; values.len()]);
        keys.convert_to_f32_slice(&mut k);
        values.convert_to_f32_slice(&mut v);
        let share = self.states.len().div_ceil(self.n_threads);
        std::thread::scope(|scope| {
            for states in self.states.chunks_mut(share) {
                let (k, v) = (&k, &v);
                scope.spawn(move || states.iter_mut().for_each(|state| state.add(k, v)));
            }
        });
    }

    /// Of every query, `[n_heads][dim]`.
    pub fn outputs(&self) -> Vec<Vec<f64>> {
        let queries = self.states.chunks(self.states.len() / self.n_queries);
        let out = |state: &State| state.out.iter().map(|x| x / state.sum).collect::<Vec<f64>>();
        queries.map(|heads| heads.iter().flat_map(out).collect()).collect()
    }
}

impl State {
    fn add(&mut self, keys: &[f32], values: &[f32]) {
        let scale = 1.0 / (DIM as f64).sqrt();
        let row = N_KV_HEADS * DIM;
        for (key, value) in keys.chunks(row).zip(values.chunks(row)) {
            let at = self.kv_head * DIM;
            let (key, value) = (&key[at..at + DIM], &value[at..at + DIM]);
            let score = scale * dot(&self.query, key);
            if score > self.largest {
                let factor = (self.largest - score).exp();
                self.largest = score;
                self.sum *= factor;
                self.out.iter_mut().for_each(|x| *x *= factor);
            }
            let weight = (score - self.largest).exp();
            self.sum += weight;
            self.out.iter_mut().zip(value).for_each(|(x, v)| *x += weight * f64::from(*v));
        }
    }
}

/// In eight partial sums, which a compiler keeps side by side.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sums = [0.0f64; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for ((sum, x), y) in sums.iter_mut().zip(a).zip(b) {
            *sum += f64::from(*x) * f64::from(*y);
        }
    }
    sums.iter().sum()
}
