//! A naive KV cache that keeps every token in a plain list and attends densely in f64, beside the
//! real one, fed with the same rows.

#![allow(dead_code, reason = "each test binary uses a part of this")]

pub mod container;
pub mod operations;
pub mod world;

use std::sync::Arc;

use sekv::cache::{BatchToken, Context};
use sekv::error::Result;
use sekv::kernels::RowCodec;
use sekv::model::{LayerGeometry, Model, ModelParams, RopeKind};
use sekv::params::{BasisCodec, DenseLayers, Params, SketchProfile};
use sekv::tensor::{Dtype, View};

/// A small generator of repeatable numbers (splitmix64).
#[derive(Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub fn normal(&mut self) -> f32 {
        let (u, v) = (self.uniform().max(1e-7), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

#[derive(Clone, Debug)]
pub struct Shape {
    pub layers: Vec<LayerGeometry>,
    pub key_dim: usize,
    pub value_dim: usize,
    pub rope: RopeKind,
}

impl Shape {
    pub fn uniform(n_layers: usize, n_heads: usize, n_kv_heads: usize, dim: usize) -> Self {
        Self {
            layers: vec![LayerGeometry { n_heads, n_kv_heads }; n_layers],
            key_dim: dim,
            value_dim: dim,
            rope: RopeKind::Neox,
        }
    }

    pub fn model(&self) -> Arc<Model> {
        let first = self.layers[0];
        let params = ModelParams {
            n_layer: self.layers.len(),
            n_head: first.n_heads,
            n_head_kv: first.n_kv_heads,
            head_dim_k: self.key_dim,
            head_dim_v: self.value_dim,
            rope: self.rope,
            n_head_per_layer: Some(self.layers.iter().map(|l| l.n_heads).collect()),
            n_head_kv_per_layer: Some(self.layers.iter().map(|l| l.n_kv_heads).collect()),
            ..ModelParams::default()
        };
        Arc::new(Model::from_params(&params).unwrap())
    }
}

/// Everything raw f32: what is left is rounding.
pub fn raw_params() -> Params {
    Params {
        n_threads: 2,
        sketch: SketchProfile::Raw,
        value_sketch: false,
        resident_codec: RowCodec::F32,
        basis_codec: BasisCodec::Rows(RowCodec::F32),
        mean_codec: RowCodec::F32,
        dense: DenseLayers::None,
        share_threshold: 0.0,
        ..Params::default()
    }
}

/// Everything sealed as soon as a block is full, every token read.
pub fn sealed_params(block_tokens: usize) -> Params {
    Params { n_sinks: 0, window: 0, block_tokens, layout_tokens: block_tokens, ..raw_params() }
}

/// The plain list of one sequence's tokens: `[layer][token][KV head][dim]`.
#[derive(Clone, Default)]
pub struct Naive {
    pub keys: Vec<Vec<Vec<f32>>>,
    pub values: Vec<Vec<Vec<f32>>>,
}

/// A view of `[token][head][elem]` f32 rows.
pub fn view(data: &mut [f32], elem: usize, head: usize, tok: usize) -> View {
    assert_eq!(data.len(), elem * head * tok);
    // SAFETY: the rows are within `data`, which the callers keep alive over the call.
    unsafe {
        View::new(
            data.as_mut_ptr().cast(),
            Dtype::F32,
            [elem, head, tok],
            [elem * 4, elem * head * 4],
        )
    }
}

pub struct Harness {
    pub shape: Shape,
    pub context: Context,
    pub naive: Vec<Naive>,
    pub random: Random,
    pub positions: Vec<i32>,
    /// Multiplies keys, so that softmaxes are neither flat nor single spikes.
    pub key_scale: f32,
    /// Added to every key.
    pub key_bias: Vec<f32>,
    /// Changes a layer's random rows before they are used.
    pub adjust: Option<Adjust>,
    /// Commits give each token a surprisal of exponential distribution, not none.
    pub surprisal: bool,
    /// Largest difference from the naive output, relative to its largest magnitude.
    pub worst: f32,
    /// The same relative to the largest magnitude of any value: the measure where outputs nearly
    /// cancel.
    pub worst_of_values: f32,
}

/// Gets one layer's keys, values and queries, `[token][head][dim]`, and the dimensions of a key
/// and a value.
pub type Adjust = fn(&mut [f32], &mut [f32], &mut [f32], usize, usize);

impl Harness {
    pub fn new(shape: Shape, params: Params, seed: u64) -> Self {
        let n_sequences = params.n_seq_max;
        let layers = shape.layers.len();
        Self {
            context: Context::new(shape.model(), params).unwrap(),
            naive: vec![
                Naive { keys: vec![Vec::new(); layers], values: vec![Vec::new(); layers] };
                n_sequences
            ],
            random: Random(seed),
            positions: vec![0; n_sequences],
            key_scale: 1.0,
            key_bias: vec![0.0; shape.key_dim],
            adjust: None,
            surprisal: false,
            worst: 0.0,
            worst_of_values: 0.0,
            shape,
        }
    }

    /// A pass of `n` tokens of sequence 0; returns the largest relative difference of its outputs.
    pub fn pass(&mut self, n: usize) -> f32 {
        self.pass_of(&vec![vec![0]; n]).unwrap()
    }

    /// A pass of tokens with their sequences, at the next positions.
    pub fn pass_of(&mut self, members: &[Vec<i32>]) -> Result<f32> {
        let n = members.len();
        let mut tokens = Vec::new();
        for sequences in members {
            let position = sequences.iter().map(|&s| self.positions[s as usize]).max().unwrap();
            for &s in sequences {
                self.positions[s as usize] = position + 1;
            }
            tokens.push(BatchToken { position, sequences });
        }
        self.context.begin(&tokens)?;
        let mut worst = 0.0f32;
        for il in 0..self.shape.layers.len() {
            let layer = self.shape.layers[il];
            let (dk, dv) = (self.shape.key_dim, self.shape.value_dim);
            let mut k = self.random.normals(n * layer.n_kv_heads * dk);
            for (i, x) in k.iter_mut().enumerate() {
                *x = *x * self.key_scale + self.key_bias[i % dk];
            }
            let mut v = self.random.normals(n * layer.n_kv_heads * dv);
            let mut q = self.random.normals(n * layer.n_heads * dk);
            if let Some(adjust) = self.adjust {
                adjust(&mut k, &mut v, &mut q, dk, dv);
            }
            let mut out = vec![f32::NAN; n * layer.n_heads * dv];
            self.context.ingest(
                il,
                &view(&mut k, dk, layer.n_kv_heads, n),
                &view(&mut v, dv, layer.n_kv_heads, n),
            )?;
            let out_view = view(&mut out, dv, layer.n_heads, n);
            self.context.attend(il, &view(&mut q, dk, layer.n_heads, n), None, &out_view)?;
            for (t, sequences) in members.iter().enumerate() {
                for &s in sequences {
                    let naive = &mut self.naive[s as usize];
                    naive.keys[il]
                        .push(k[t * layer.n_kv_heads * dk..][..layer.n_kv_heads * dk].to_vec());
                    naive.values[il]
                        .push(v[t * layer.n_kv_heads * dv..][..layer.n_kv_heads * dv].to_vec());
                }
                let naive = &self.naive[sequences[0] as usize];
                for h in 0..layer.n_heads {
                    let query = &q[(t * layer.n_heads + h) * dk..][..dk];
                    let want =
                        dense(query, h / layer.group(), &naive.keys[il], &naive.values[il], dk, dv);
                    let got = &out[(t * layer.n_heads + h) * dv..][..dv];
                    worst = worst.max(difference(got, &want));
                    let largest = v.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
                    let wanted = want.iter().fold(0.0f64, |m, x| m.max(x.abs())) as f32;
                    let of_values = difference(got, &want) * wanted / largest;
                    self.worst_of_values = self.worst_of_values.max(of_values);
                }
            }
        }
        let surprisal: Vec<f32> = match self.surprisal {
            true => (0..n).map(|_| -self.random.uniform().max(1e-7).ln()).collect(),
            false => Vec::new(),
        };
        self.context.commit(self.surprisal.then_some(&surprisal))?;
        self.worst = self.worst.max(worst);
        Ok(worst)
    }

    /// Forgets tokens from index `n_keep` of sequence `s` on, on the naive side.
    pub fn truncate_naive(&mut self, s: usize, n_keep: usize) {
        for il in 0..self.shape.layers.len() {
            self.naive[s].keys[il].truncate(n_keep);
            self.naive[s].values[il].truncate(n_keep);
        }
    }
}

/// Dense attention of one query head in f64.
pub fn dense(
    q: &[f32],
    kv_head: usize,
    keys: &[Vec<f32>],
    values: &[Vec<f32>],
    dk: usize,
    dv: usize,
) -> Vec<f64> {
    let scale = 1.0 / (dk as f64).sqrt();
    let scores: Vec<f64> = keys
        .iter()
        .map(|k| {
            let k = &k[kv_head * dk..][..dk];
            k.iter().zip(q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * scale
        })
        .collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; dv];
    for (w, v) in weights.iter().zip(values) {
        for (o, &x) in out.iter_mut().zip(&v[kv_head * dv..][..dv]) {
            *o += w / sum * f64::from(x);
        }
    }
    out
}

/// Largest difference, relative to the largest magnitude that is wanted.
pub fn difference(got: &[f32], want: &[f64]) -> f32 {
    let largest = want.iter().fold(1e-30f64, |m, x| m.max(x.abs()));
    let mut worst = 0.0f64;
    for (&g, w) in got.iter().zip(want) {
        let d = (f64::from(g) - w).abs() / largest;
        worst = if d.is_nan() { f64::INFINITY } else { worst.max(d) };
    }
    worst as f32
}
