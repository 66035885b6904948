//! How much of the scan over sketches bounds of scores could save: blocks that need not be read
//! since no token of theirs can reach epsilon.

use sekv::params::Params;

use crate::dense::{Dense, GROUP};
use crate::generator::{DIM, N_KV_HEADS};

const BLOCK_TOKENS: usize = 64;

/// Shares of all blocks, heads and queries.
pub struct Bounds {
    /// No token reaches epsilon: what a perfect bound would tell.
    pub below: f64,
    /// Told by each channel's smallest and largest key.
    pub by_channels: f64,
    /// Told by the block's mean key and the largest distance from it.
    pub by_radius: f64,
}

struct Block {
    low: Vec<f32>,
    high: Vec<f32>,
    mean: Vec<f32>,
    radius: f32,
}

impl Block {
    fn new(keys: &[f32]) -> Self {
        let (mut low, mut high) = (vec![f32::INFINITY; DIM], vec![f32::NEG_INFINITY; DIM]);
        let mut mean = vec![0.0; DIM];
        for key in keys.chunks(DIM) {
            for c in 0..DIM {
                low[c] = low[c].min(key[c]);
                high[c] = high[c].max(key[c]);
                mean[c] += key[c] * DIM as f32 / keys.len() as f32;
            }
        }
        let square = |key: &[f32]| key.iter().zip(&mean).map(|(k, m)| (k - m).powi(2)).sum::<f32>();
        let radius = keys.chunks(DIM).map(square).fold(0.0, f32::max).sqrt();
        Self { low, high, mean, radius }
    }

    fn by_channels(&self, q: &[f32]) -> f32 {
        let ranges = self.low.iter().zip(&self.high);
        q.iter().zip(ranges).map(|(q, (low, high))| (q * low).max(q * high)).sum()
    }

    fn by_radius(&self, q: &[f32]) -> f32 {
        let length = q.iter().map(|q| q * q).sum::<f32>().sqrt();
        q.iter().zip(&self.mean).map(|(q, m)| q * m).sum::<f32>() + length * self.radius
    }
}

/// Looks at whole blocks between the sinks and the window.
pub fn bounds(dense: &Dense, queries: &[Vec<f32>], n_tokens: usize) -> Bounds {
    let params = Params::default();
    let epsilon = params.share_threshold * (params.share_reference as f32 / n_tokens as f32).sqrt();
    let first = params.n_sinks;
    let n_blocks = (n_tokens - params.window - first) / BLOCK_TOKENS;
    let scale = (DIM as f32).sqrt().recip();
    let mut counts = [0usize; 3];
    for head in 0..N_KV_HEADS {
        let keys = dense.keys(head, first..first + n_blocks * BLOCK_TOKENS);
        let blocks: Vec<Block> = keys.chunks(BLOCK_TOKENS * DIM).map(Block::new).collect();
        for q in queries {
            // Means over the group of shares, none of which is more than 1.
            let mut shares = vec![[0.0f32; 3]; n_blocks];
            for q in q[head * GROUP * DIM..][..GROUP * DIM].chunks(DIM) {
                let scores = dense.scores(head, q, n_tokens);
                let top = scores.iter().copied().fold(f32::MIN, f32::max);
                let sum: f64 = scores.iter().map(|s| f64::from(s - top).exp()).sum();
                let log_sum = top + sum.ln() as f32;
                let share = |score: f32| (score - log_sum).min(0.0).exp() / GROUP as f32;
                let of_blocks = scores[first..].chunks_exact(BLOCK_TOKENS);
                for ((shares, block), scores) in shares.iter_mut().zip(&blocks).zip(of_blocks) {
                    shares[0] += share(scores.iter().copied().fold(f32::MIN, f32::max));
                    shares[1] += share(scale * block.by_channels(q));
                    shares[2] += share(scale * block.by_radius(q));
                }
            }
            for shares in &shares {
                for (count, share) in counts.iter_mut().zip(shares) {
                    *count += usize::from(*share < epsilon);
                }
            }
        }
    }
    let of_all = |count| count as f64 / (N_KV_HEADS * queries.len() * n_blocks) as f64;
    let [below, by_channels, by_radius] = counts.map(of_all);
    Bounds { below, by_channels, by_radius }
}
