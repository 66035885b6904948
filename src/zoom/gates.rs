//! Rank gates g_phi: how much each direction of a span's basis counts when it is rebuilt.

use crate::error::{Result, fail};
use crate::model::{GateMlp, Linear};
use crate::summary::{dot, sigmoid};

/// The gates of a span, one for each direction of its basis, from the singular values of its key
/// (falling) and its weighted mean key. Without an MLP every gate is 1.
///
/// Input of the MLP: singular values over the first, padded with zeros to r_max, then the mean key
/// made unit. r_max + d -> 64 -> 64 -> r_max, exact GELU between the layers, a sigmoid at the end.
pub fn rank_gates(mlp: Option<&GateMlp>, singular: &[f32], mean_key: &[f32]) -> Result<Vec<f32>> {
    let Some(mlp) = mlp else { return Ok(vec![1.0; singular.len()]) };
    if mlp.input_dim != mlp.r_max + mean_key.len() || singular.len() > mlp.r_max {
        fail!(
            Shape,
            "the rank gates take {} numbers and {} ranks, expected {} + {} and at least {}",
            mlp.input_dim,
            mlp.r_max,
            mlp.r_max,
            mean_key.len(),
            singular.len()
        );
    }
    let mut x = vec![0f32; mlp.input_dim];
    let (spectrum, direction) = x.split_at_mut(mlp.r_max);
    let first = singular.first().copied().unwrap_or(0.0);
    if first > 0.0 {
        spectrum.iter_mut().zip(singular).for_each(|(x, &s)| *x = s / first);
    }
    let norm = mean_key.iter().map(|&k| f64::from(k).powi(2)).sum::<f64>().sqrt() as f32;
    if norm > 0.0 {
        direction.iter_mut().zip(mean_key).for_each(|(x, &k)| *x = k / norm);
    }
    let [first_layer, second_layer, last_layer] = &mlp.layers;
    let hidden = forward(first_layer, &x, gelu)?;
    let hidden = forward(second_layer, &hidden, gelu)?;
    let mut gates = forward(last_layer, &hidden, sigmoid)?;
    gates.truncate(singular.len());
    Ok(gates)
}

fn forward(layer: &Linear, x: &[f32], activation: fn(f32) -> f32) -> Result<Vec<f32>> {
    let Linear { rows, cols, weight, bias } = layer;
    if *cols != x.len() || weight.len() != rows * cols || bias.len() != *rows {
        fail!(
            Shape,
            "a layer of the rank gates is {rows} x {cols} with {} weights and {} biases, expected \
             {} columns",
            weight.len(),
            bias.len(),
            x.len()
        );
    }
    Ok(weight.chunks_exact(*cols).zip(bias).map(|(row, b)| activation(dot(row, x) + b)).collect())
}

/// x Phi(x) by the error function, not by the tanh fit: the reference trains with the exact form.
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linear(rows: usize, cols: usize, weight: f32, bias: f32) -> Linear {
        Linear { rows, cols, weight: vec![weight; rows * cols], bias: vec![bias; rows] }
    }

    #[test]
    fn without_an_mlp_every_direction_counts() {
        assert_eq!(rank_gates(None, &[2.0, 1.0], &[1.0]).unwrap(), [1.0, 1.0]);
    }

    #[test]
    fn gelu_is_exact() {
        // x Phi(x), Phi from tables of the normal distribution.
        for (x, expected) in [(1.0, 0.841_344_7), (-1.0, -0.158_655_25), (2.0, 1.954_499_7)] {
            assert!((gelu(x) - expected).abs() < 1e-6);
        }
        assert_eq!((gelu(0.0), gelu(-100.0), gelu(100.0)), (0.0, 0.0, 100.0));
    }

    #[test]
    fn input_is_scaled_so_that_size_does_not_matter() {
        let mlp = GateMlp {
            r_max: 4,
            input_dim: 6,
            layers: [linear(3, 6, 0.5, 0.1), linear(3, 3, -0.2, 0.0), linear(4, 3, 1.0, 0.0)],
        };
        let gates = rank_gates(Some(&mlp), &[4.0, 2.0], &[3.0, 4.0]).unwrap();
        assert_eq!(gates.len(), 2);
        assert_eq!(gates, rank_gates(Some(&mlp), &[8.0, 4.0], &[0.3, 0.4]).unwrap());
        let zero = rank_gates(Some(&mlp), &[0.0, 0.0], &[0.0, 0.0]).unwrap();
        assert!(zero.iter().all(|gate| gate.is_finite()));
    }

    #[test]
    fn refuses_shapes_that_do_not_fit() {
        let mlp = GateMlp {
            r_max: 1,
            input_dim: 3,
            layers: [linear(3, 3, 0.5, 0.1), linear(3, 3, -0.2, 0.0), linear(1, 3, 1.0, 0.0)],
        };
        assert!(rank_gates(Some(&mlp), &[1.0, 0.5], &[1.0, 1.0]).is_err());
        assert!(rank_gates(Some(&mlp), &[1.0], &[1.0]).is_err());
    }
}
