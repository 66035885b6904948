//! A projection for models that come without trained routing weights.

/// d' of the paper; smaller where a head has fewer dimensions.
pub const UNTRAINED_SUMMARY_DIM: usize = 32;

/// Orthonormal rows from a seed, [n_heads][summary_dim][key_dim], `summary_dim <= key_dim`.
///
/// Gaussian rows made orthonormal are a uniformly random subspace, the choice that favours no
/// direction: (W q).(W k) is then q.k up to scale and noise.
pub fn untrained_projection(
    seed: u64,
    n_heads: usize,
    summary_dim: usize,
    key_dim: usize,
) -> Vec<f32> {
    debug_assert!(summary_dim <= key_dim);
    let mut random = Gaussian { state: seed };
    let mut weights = Vec::with_capacity(n_heads * summary_dim * key_dim);
    for _ in 0..n_heads {
        let mut rows: Vec<Vec<f64>> = Vec::with_capacity(summary_dim);
        while rows.len() < summary_dim {
            let mut row: Vec<f64> = (0..key_dim).map(|_| random.next()).collect();
            // Twice: one Gram-Schmidt pass alone leaves rounding behind.
            for _ in 0..2 {
                for other in &rows {
                    let along: f64 = row.iter().zip(other).map(|(a, b)| a * b).sum();
                    row.iter_mut().zip(other).for_each(|(a, b)| *a -= along * b);
                }
            }
            let norm = row.iter().map(|a| a * a).sum::<f64>().sqrt();
            // A row that lies in the span of the others by chance is drawn again.
            if norm > 1e-6 {
                row.iter_mut().for_each(|a| *a /= norm);
                rows.push(row);
            }
        }
        weights.extend(rows.into_iter().flatten().map(|a| a as f32));
    }
    weights
}

/// Normal numbers from SplitMix64 by Box-Muller: the same on every machine for one seed.
struct Gaussian {
    state: u64,
}

impl Gaussian {
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        // In (0, 1]: its logarithm is taken.
        (((z ^ (z >> 31)) >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_orthonormal_and_follow_the_seed() {
        let (summary_dim, key_dim) = (32, 64);
        let weights = untrained_projection(3, 2, summary_dim, key_dim);
        for head in weights.chunks_exact(summary_dim * key_dim) {
            let rows: Vec<&[f32]> = head.chunks_exact(key_dim).collect();
            for i in 0..summary_dim {
                for j in 0..=i {
                    let product: f64 =
                        rows[i].iter().zip(rows[j]).map(|(a, b)| f64::from(a * b)).sum();
                    assert!((product - f64::from(u8::from(i == j))).abs() < 1e-6);
                }
            }
        }
        assert_eq!(weights, untrained_projection(3, 2, summary_dim, key_dim));
        assert_ne!(weights, untrained_projection(4, 2, summary_dim, key_dim));
    }

    #[test]
    fn as_many_rows_as_dimensions_are_possible() {
        assert_eq!(untrained_projection(0, 1, 8, 8).len(), 64);
    }
}
