//! The trained parameters of routing `paper`: routing projections, zoom thresholds and the rank
//! gates' network. Numbers only; what is done with them is the routing's business.

use super::geometry::Geometry;
use crate::error::{Result, fail};

/// Dimensions of a routing summary, d', where nobody says otherwise (the paper's).
pub const DEFAULT_SUMMARY_DIM: usize = 32;

/// Threshold of an untrained model. A span is zoomed where its gate, sigmoid(q'.K_S / sqrt(d') +
/// log|S|), exceeds it; 0.5 is the sigmoid's midpoint, so that the sign of the score decides and
/// no constant has to be fitted.
pub const UNTRAINED_THRESHOLD: f32 = 0.5;

/// Routing projections and thresholds of every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingWeights {
    /// d'.
    pub summary_dim: usize,
    pub layers: Vec<LayerRouting>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct LayerRouting {
    /// W: `[query head][d'][d_k]`, row-major.
    pub projection: Vec<f32>,
    /// tau: [query head], each in 0..=1.
    pub threshold: Vec<f32>,
}

/// The network of the rank gates, one for the whole model: r_max + d_k -> hidden -> hidden ->
/// r_max, exact GELU between the layers and a sigmoid at the end.
#[derive(Clone, Debug, PartialEq)]
pub struct GateMlp {
    pub r_max: usize,
    /// r_max + d_k.
    pub input_dim: usize,
    pub layers: [Linear; 3],
}

/// y = weight x + bias.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `[rows][cols]`, row-major.
    pub weight: Vec<f32>,
    /// `[rows]`.
    pub bias: Vec<f32>,
}

impl RoutingWeights {
    /// Projections for a model that nobody trained: `min(summary_dim, d_k)` orthonormal rows for
    /// each layer and query head, drawn from the seed, the same on every machine.
    ///
    /// Orthonormal rows keep a key's direction as well as rows that know nothing can: W k is a
    /// random subspace's view of k, and no row says what another has said.
    pub fn untrained(geometry: &Geometry, summary_dim: usize, seed: u64) -> Result<Self> {
        let key_dim = geometry.key_dim;
        let summary_dim = summary_dim.min(key_dim);
        if summary_dim == 0 {
            fail!(Argument, "the routing summary has 0 dimensions, expected at least 1");
        }
        let mut layers = Vec::new();
        layers.try_reserve_exact(geometry.layers.len())?;
        for (layer_index, layer) in geometry.layers.iter().enumerate() {
            let mut projection = Vec::new();
            projection.try_reserve_exact(layer.n_heads * summary_dim * key_dim)?;
            for head in 0..layer.n_heads {
                let mut generator = Generator::new(seed, layer_index as u64, head as u64);
                push_orthonormal_rows(&mut projection, summary_dim, key_dim, &mut generator);
            }
            let threshold = vec![UNTRAINED_THRESHOLD; layer.n_heads];
            layers.push(LayerRouting { projection, threshold });
        }
        Ok(Self { summary_dim, layers })
    }

    /// Checks that these are weights for that model.
    pub fn validate(&self, geometry: &Geometry) -> Result<()> {
        if self.layers.len() != geometry.layers.len() {
            fail!(
                Argument,
                "there are routing weights for {} layers, expected {}",
                self.layers.len(),
                geometry.layers.len()
            );
        }
        if self.summary_dim == 0 || self.summary_dim > geometry.key_dim {
            fail!(
                Argument,
                "the routing summary has {} dimensions, expected 1 to the key's {}",
                self.summary_dim,
                geometry.key_dim
            );
        }
        for (index, (routing, layer)) in self.layers.iter().zip(&geometry.layers).enumerate() {
            let expected = layer.n_heads * self.summary_dim * geometry.key_dim;
            if routing.projection.len() != expected || routing.threshold.len() != layer.n_heads {
                fail!(
                    Argument,
                    "layer {index} has {} routing weights and {} thresholds, expected {expected} \
                     and {}",
                    routing.projection.len(),
                    routing.threshold.len(),
                    layer.n_heads
                );
            }
            check_finite(&routing.projection, || format!("routing weight of layer {index}"))?;
            if let Some(tau) = routing.threshold.iter().find(|tau| !(0.0..=1.0).contains(*tau)) {
                fail!(Argument, "a threshold of layer {index} is {tau}, expected 0 to 1");
            }
        }
        Ok(())
    }
}

impl GateMlp {
    /// Checks that the layers fit each other and keys of that many dimensions.
    pub fn validate(&self, key_dim: usize) -> Result<()> {
        if self.r_max == 0 || self.input_dim != self.r_max + key_dim {
            fail!(
                Argument,
                "the rank gates have {} inputs for rank {}, expected the rank plus the key's \
                 {key_dim} dimensions",
                self.input_dim,
                self.r_max
            );
        }
        let mut inputs = self.input_dim;
        for (index, layer) in self.layers.iter().enumerate() {
            let shape = layer.weight.len() == layer.rows.saturating_mul(layer.cols)
                && layer.bias.len() == layer.rows;
            if !shape || layer.cols != inputs || layer.rows == 0 {
                fail!(
                    Argument,
                    "layer {index} of the rank gates is {} x {} with {} weights and {} biases, \
                     expected {inputs} inputs",
                    layer.rows,
                    layer.cols,
                    layer.weight.len(),
                    layer.bias.len()
                );
            }
            check_finite(&layer.weight, || format!("weight of gate layer {index}"))?;
            check_finite(&layer.bias, || format!("bias of gate layer {index}"))?;
            inputs = layer.rows;
        }
        if inputs != self.r_max {
            fail!(Argument, "the rank gates have {inputs} outputs, expected {}", self.r_max);
        }
        Ok(())
    }
}

fn check_finite(values: &[f32], what: impl FnOnce() -> String) -> Result<()> {
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => fail!(Value, "a {} is {value}, expected finite numbers", what()),
        None => Ok(()),
    }
}

/// Gram-Schmidt over drawn rows, in f64. Each row is orthogonalised twice: once loses digits where
/// a draw lies close to the rows before it ("twice is enough", Giraud et al. 2005).
fn push_orthonormal_rows(out: &mut Vec<f32>, rows: usize, cols: usize, generator: &mut Generator) {
    let mut basis: Vec<Vec<f64>> = Vec::with_capacity(rows);
    while basis.len() < rows {
        let mut row: Vec<f64> = (0..cols).map(|_| generator.bell()).collect();
        for _ in 0..2 {
            for earlier in &basis {
                let share = dot(&row, earlier);
                row.iter_mut().zip(earlier).for_each(|(x, e)| *x -= share * e);
            }
        }
        let norm = dot(&row, &row).sqrt();
        // A draw inside the span of the earlier rows is drawn anew; with rows <= cols it hardly
        // ever happens.
        if norm > 1e-6 {
            row.iter_mut().for_each(|x| *x /= norm);
            basis.push(row);
        }
    }
    out.extend(basis.iter().flatten().map(|&x| x as f32));
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Generator(u64);

impl Generator {
    /// A stream of its own for each layer and head.
    fn new(seed: u64, layer: u64, head: u64) -> Self {
        let mut generator = Self(seed);
        for part in [layer, head] {
            generator.0 = generator.next() ^ part;
        }
        generator
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Close to a normal deviate, so that no direction is favoured: twelve uniform numbers added
    /// (Irwin-Hall). Additions are exact to the bit on every machine; a logarithm is not.
    fn bell(&mut self) -> f64 {
        let uniform = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
        (0..12).map(|_| uniform(self.next())).sum::<f64>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_geometry;

    #[test]
    fn untrained_rows_are_orthonormal() {
        let geometry = small_geometry();
        let weights = RoutingWeights::untrained(&geometry, 6, 1).unwrap();
        weights.validate(&geometry).unwrap();
        for routing in &weights.layers {
            for head in routing.projection.chunks(6 * geometry.key_dim) {
                let rows: Vec<&[f32]> = head.chunks(geometry.key_dim).collect();
                for (i, a) in rows.iter().enumerate() {
                    for (j, b) in rows.iter().enumerate() {
                        let dot: f64 =
                            a.iter().zip(*b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum();
                        let expected = f64::from(u8::from(i == j));
                        assert!((dot - expected).abs() < 1e-6, "rows {i} and {j}: {dot}");
                    }
                }
            }
        }
    }

    #[test]
    fn untrained_rows_depend_on_seed_layer_and_head_alone() {
        let geometry = small_geometry();
        let weights = |seed| RoutingWeights::untrained(&geometry, 4, seed).unwrap();
        assert_eq!(weights(7), weights(7));
        assert_ne!(weights(7).layers[0].projection, weights(8).layers[0].projection);
        assert_ne!(weights(7).layers[0].projection, weights(7).layers[1].projection);
        let heads: Vec<_> = weights(7).layers[0].projection.chunks(4 * 8).map(Vec::from).collect();
        assert_ne!(heads[0], heads[1]);
    }

    #[test]
    fn a_summary_is_never_longer_than_a_key() {
        let geometry = small_geometry();
        let weights = RoutingWeights::untrained(&geometry, 32, 0).unwrap();
        assert_eq!(weights.summary_dim, geometry.key_dim);
    }
}
