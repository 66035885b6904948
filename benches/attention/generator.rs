//! Keys, values and queries of one layer of Llama-3-8B's geometry, made from a seed.
//!
//! Gaussian keys have no structure: every token matters as much as any other, and nothing that
//! chooses tokens can be judged by them. `Kind::Realistic` has what recorded keys have, each part
//! stated here once:
//!
//! - **RoPE** (base 500,000, pairs (i, i + d/2)) over keys and queries made without positions.
//! - **Unequal pairs**: each RoPE pair has a scale of its own, log-normal, so that some dimensions
//!   carry most of a score.
//! - **Channel means**: every key and query has a component along a direction of its head. Rotated,
//!   these give a score that falls about as the logarithm of the distance (weights about as
//!   1 / distance): locality at every scale. Two channels of the slowest pairs carry a mean many
//!   times their spread.
//! - **Low rank**: a latent of 24 numbers, shared by all heads, is the sum of the topic's and the
//!   token's own. Topics last some hundred tokens and come back, the more often the longer they
//!   have been spoken of. Keys and queries meet in it.
//! - **Sinks**: token 0 draws the queries of every head strongly, the next three weakly; every
//!   40th token or so draws them a little (punctuation, line ends).
//! - **Values**: a mean a head, 32 directions of falling weight, noise.
//!
//! `Kind::Gaussian` has standard normal numbers everywhere.

use half::f16;

pub const N_HEADS: usize = 32;
pub const N_KV_HEADS: usize = 8;
pub const DIM: usize = 128;
const GROUP: usize = N_HEADS / N_KV_HEADS;
const PAIRS: usize = DIM / 2;
const ROPE_BASE: f64 = 500_000.0;

const LATENT: usize = 24;
const VALUE_RANK: usize = 32;
/// Tokens of a topic, mean.
const TOPIC_TOKENS: f32 = 300.0;
/// The first pair that carries content: faster ones turn within a sentence.
const FIRST_CONTENT_PAIR: usize = 16;
const FIRST_SINK_PAIR: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Realistic,
    Gaussian,
}

/// splitmix64.
#[derive(Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        let mut random = Self(seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95));
        random.bits();
        random
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Normal enough, and cheap: four uniforms of 16 bits, variance 1.
    fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum = (0..4).map(|i| (bits >> (16 * i)) as u16 as f32).sum::<f32>();
        (sum / 65_536.0 - 2.0) * 1.732_050_8
    }

    fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// What one KV head's keys, values and queries have in common.
struct Head {
    /// Scale of each dimension (equal within a pair).
    scale: Vec<f32>,
    key_mean: Vec<f32>,
    query_mean: Vec<f32>,
    /// `[LATENT][DIM]`
    key_basis: Vec<f32>,
    /// Drawn by every query.
    sink: Vec<f32>,
    value_mean: Vec<f32>,
    /// `[VALUE_RANK][DIM]`
    value_basis: Vec<f32>,
    /// How strongly each query head of the group looks for content.
    content: [f32; GROUP],
}

impl Head {
    fn new(random: &mut Random) -> Self {
        let pair_scale: Vec<f32> = (0..PAIRS).map(|_| (0.6 * random.normal()).exp()).collect();
        let root_mean = (pair_scale.iter().map(|s| s * s).sum::<f32>() / PAIRS as f32).sqrt();
        let scale: Vec<f32> = (0..DIM).map(|i| pair_scale[i % PAIRS] / root_mean).collect();
        let direction: Vec<f32> =
            (0..PAIRS).map(|_| random.uniform() * std::f32::consts::TAU).collect();
        let slope = 0.8 + 0.6 * random.uniform();
        let along = |size: f32| -> Vec<f32> {
            (0..DIM)
                .map(|i| {
                    let angle = direction[i % PAIRS];
                    let (sin, cos) = angle.sin_cos();
                    size * scale[i] * if i < PAIRS { cos } else { sin }
                })
                .collect()
        };
        let (mut key_mean, query_mean) = (along(1.5), along(1.5 * slope));
        for i in 0..2 {
            key_mean[FIRST_SINK_PAIR + 3 + 5 * i + PAIRS * i] += 15.0;
        }
        let mut key_basis = random.normals(LATENT * DIM);
        for row in key_basis.chunks_mut(DIM) {
            for (i, x) in row.iter_mut().enumerate() {
                let carries = i % PAIRS >= FIRST_CONTENT_PAIR;
                *x *= if carries { scale[i] / (LATENT as f32).sqrt() } else { 0.0 };
            }
        }
        let slow = |i: usize| i % PAIRS >= FIRST_SINK_PAIR;
        let mut sink: Vec<f32> =
            query_mean.iter().enumerate().map(|(i, &x)| if slow(i) { x } else { 0.0 }).collect();
        // Of a length that adds 1 to the score of a query at its mean.
        let norm2 = sink.iter().map(|x| x * x).sum::<f32>() / (DIM as f32).sqrt();
        sink.iter_mut().for_each(|x| *x /= norm2);
        let mut value_basis = random.normals(VALUE_RANK * DIM);
        for (r, row) in value_basis.chunks_mut(DIM).enumerate() {
            let weight = 1.0 / (1.0 + r as f32 / 4.0);
            row.iter_mut().for_each(|x| *x *= weight);
        }
        Self {
            scale,
            key_mean,
            query_mean,
            key_basis,
            sink,
            value_mean: random.normals(DIM),
            value_basis,
            content: std::array::from_fn(|_| 0.5 + 0.5 * random.uniform()),
        }
    }
}

/// Rows of any token, whatever was made before.
pub struct Generator {
    kind: Kind,
    seed: u64,
    heads: Vec<Head>,
    /// Each token's topic, as a latent.
    topic_of: Vec<u32>,
    topics: Vec<[f32; LATENT]>,
    inverse_frequencies: Vec<f64>,
}

impl Generator {
    pub fn new(kind: Kind, seed: u64, n_tokens: usize) -> Self {
        let mut random = Random::new(seed, u64::MAX);
        let heads = (0..N_KV_HEADS).map(|_| Head::new(&mut random)).collect();
        let (mut topics, mut topic_of) = (Vec::new(), Vec::with_capacity(n_tokens));
        let mut runs: Vec<u32> = Vec::new();
        while topic_of.len() < n_tokens {
            let topic = if runs.is_empty() || random.uniform() < 0.5 {
                topics.push(std::array::from_fn(|_| random.normal()));
                topics.len() as u32 - 1
            } else {
                runs[random.bits() as usize % runs.len()]
            };
            runs.push(topic);
            let length = (-TOPIC_TOKENS * random.uniform().max(1e-6).ln()) as usize + 1;
            topic_of.extend(std::iter::repeat_n(topic, length.min(n_tokens - topic_of.len())));
        }
        let frequency = |i: usize| ROPE_BASE.powf(-(i as f64) / PAIRS as f64);
        let inverse_frequencies = (0..PAIRS).map(frequency).collect();
        Self { kind, seed, heads, topic_of, topics, inverse_frequencies }
    }

    /// A token's latent: its topic's and its own.
    fn latent(&self, token: usize) -> [f32; LATENT] {
        let mut random = Random::new(self.seed ^ 0x5eed, token as u64);
        let topic = &self.topics[self.topic_of[token] as usize];
        std::array::from_fn(|i| 0.7 * topic[i] + 0.7 * random.normal())
    }

    fn rotate(&self, token: usize, row: &mut [f32]) {
        let (first, second) = row.split_at_mut(PAIRS);
        for ((a, b), frequency) in first.iter_mut().zip(second).zip(&self.inverse_frequencies) {
            let (sin, cos) = (token as f64 * frequency).sin_cos();
            let (sin, cos) = (sin as f32, cos as f32);
            (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        }
    }

    /// One token's keys and values, `[n_kv_heads][dim]`.
    fn token(&self, token: usize, keys: &mut [f16], values: &mut [f16]) {
        let mut random = Random::new(self.seed, token as u64);
        if self.kind == Kind::Gaussian {
            for out in keys.iter_mut().chain(values) {
                *out = f16::from_f32(random.normal());
            }
            return;
        }
        let latent = self.latent(token);
        let drawn = match token {
            0 => 13.0,
            1..=3 => 4.0,
            _ if random.uniform() < 1.0 / 40.0 => 2.0,
            _ => 0.0,
        };
        let rows = keys.chunks_mut(DIM).zip(values.chunks_mut(DIM));
        for (head, (key_out, value_out)) in self.heads.iter().zip(rows) {
            let mut key = head.key_mean.clone();
            for (i, x) in key.iter_mut().enumerate() {
                *x += 0.4 * head.scale[i] * random.normal() + drawn * head.sink[i];
            }
            for (z, row) in latent.iter().zip(head.key_basis.chunks(DIM)) {
                key.iter_mut().zip(row).for_each(|(x, b)| *x += z * b);
            }
            self.rotate(token, &mut key);
            let mut value = head.value_mean.clone();
            value.iter_mut().for_each(|x| *x += 0.3 * random.normal());
            for (r, row) in head.value_basis.chunks(DIM).enumerate() {
                let z = 0.3 * (random.normal() + latent[r % LATENT]);
                value.iter_mut().zip(row).for_each(|(x, b)| *x += z * b);
            }
            key_out.iter_mut().zip(&key).for_each(|(out, x)| *out = f16::from_f32(*x));
            value_out.iter_mut().zip(&value).for_each(|(out, x)| *out = f16::from_f32(*x));
        }
    }

    /// Keys and values of tokens `first..`, `[token][n_kv_heads][dim]`, on `n_threads` threads.
    pub fn rows(&self, first: usize, keys: &mut [f16], values: &mut [f16], n_threads: usize) {
        let row = N_KV_HEADS * DIM;
        let share = (keys.len() / row).div_ceil(n_threads).max(1);
        std::thread::scope(|scope| {
            let parts = keys.chunks_mut(share * row).zip(values.chunks_mut(share * row));
            for (part, (keys, values)) in parts.enumerate() {
                scope.spawn(move || {
                    let rows = keys.chunks_mut(row).zip(values.chunks_mut(row));
                    for (t, (keys, values)) in rows.enumerate() {
                        self.token(first + part * share + t, keys, values);
                    }
                });
            }
        });
    }

    /// Query number `number` at a token's place, `[n_heads][dim]`: the first is about what the
    /// token is about, the others about what some token before it is.
    pub fn query(&self, token: usize, number: usize) -> Vec<f32> {
        let mut random = Random::new(self.seed ^ 0x9e4, (token * 1000 + number) as u64);
        let mut out = random.normals(N_HEADS * DIM);
        if self.kind == Kind::Gaussian {
            return out;
        }
        let about = if number == 0 { token } else { random.bits() as usize % (token + 1) };
        let topic = &self.topics[self.topic_of[about] as usize];
        let wanted: Vec<f32> = topic.iter().map(|z| 0.7 * z + 0.7 * random.normal()).collect();
        for (h, q) in out.chunks_mut(DIM).enumerate() {
            let head = &self.heads[h / GROUP];
            let strength = head.content[h % GROUP];
            for (i, x) in q.iter_mut().enumerate() {
                *x = head.query_mean[i] + 0.4 * head.scale[i] * *x;
            }
            for (z, row) in wanted.iter().zip(head.key_basis.chunks(DIM)) {
                let z = strength * (z + 0.5 * random.normal());
                q.iter_mut().zip(row).for_each(|(x, b)| *x += z * b);
            }
            self.rotate(token, q);
        }
        out
    }
}
