//! Frequencies of RoPE: how far each rotated pair turns from one position to the next.
//!
//! The library never rotates a key that comes in (it comes in rotated). It needs the frequencies
//! where positions shift: a rotation by `shift * frequency` moves a pair by `shift` positions,
//! whatever the scaling, since every scaling below is linear in the position. What YaRN does to
//! the length of keys is in the keys already.

use std::f64::consts::PI;

use crate::error::{Result, fail};

/// How a model was stretched beyond the context it was first trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RopeScaling {
    /// Every frequency times `scale`: 1 where there is none, 1 / factor for linear scaling.
    Uniform {
        scale: f64,
    },
    Yarn(Yarn),
}

/// YaRN (Peng et al. 2023, section 3.3, as ggml's `rope_yarn` computes it): pairs that turn often
/// within the original context keep their frequency, pairs that turn seldom are scaled, and a ramp
/// lies between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Yarn {
    /// 1 / factor.
    pub scale: f64,
    pub original_context: usize,
    /// Turns within the original context above which a pair keeps its frequency.
    pub beta_fast: f64,
    /// Turns below which a pair is scaled entirely.
    pub beta_slow: f64,
    /// How much of the ramp is applied: 1 is YaRN, 0 plain linear scaling.
    pub extrapolation: f64,
}

/// Radians per position of each of `n_rot / 2` pairs, at `base^(-2 i / n_rot)` before scaling.
/// `factors` divide the frequency of each pair (`rope_freqs.weight` of Llama 3).
pub(crate) fn frequencies(
    n_rot: usize,
    base: f64,
    scaling: RopeScaling,
    factors: Option<&[f32]>,
) -> Result<Vec<f32>> {
    if !base.is_finite() || base <= 1.0 {
        fail!(Format, "the RoPE base frequency is {base}, expected a number above 1");
    }
    let scale = match scaling {
        RopeScaling::Uniform { scale } | RopeScaling::Yarn(Yarn { scale, .. }) => scale,
    };
    if !scale.is_finite() || scale <= 0.0 {
        fail!(Format, "the RoPE frequency scale is {scale}, expected a positive number");
    }
    if let RopeScaling::Yarn(yarn) = scaling {
        for (name, beta) in [("beta_fast", yarn.beta_fast), ("beta_slow", yarn.beta_slow)] {
            if !beta.is_finite() || beta <= 0.0 {
                fail!(Format, "YaRN's {name} is {beta}, expected a positive number");
            }
        }
    }
    let n_pairs = n_rot / 2;
    if let Some(factors) = factors {
        if factors.len() != n_pairs {
            fail!(Format, "there are {} RoPE factors, expected {n_pairs}", factors.len());
        }
        if let Some(factor) = factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
            fail!(Format, "a RoPE factor is {factor}, expected positive numbers");
        }
    }
    // Not in the loop: the compiler would take logarithms out of it, also of a Yarn that isn't there.
    let ramp = match scaling {
        RopeScaling::Uniform { .. } => None,
        RopeScaling::Yarn(yarn) => Some(yarn.ramp(n_rot, base)),
    };
    let mut result = Vec::new();
    result.try_reserve_exact(n_pairs)?;
    for pair in 0..n_pairs {
        let factor = factors.map_or(1.0, |factors| f64::from(factors[pair]));
        let unscaled = base.powf(-2.0 * pair as f64 / n_rot as f64) / factor;
        let kept = ramp.as_ref().map_or(0.0, |ramp| ramp.kept_share(pair));
        result.push((unscaled * (scale * (1.0 - kept) + kept)) as f32);
    }
    Ok(result)
}

impl Yarn {
    fn ramp(&self, n_rot: usize, base: f64) -> Ramp {
        // The pair that turns `turns` times within the original context.
        let pair_at = |turns: f64| {
            let context = self.original_context as f64;
            n_rot as f64 * (context / (turns * 2.0 * PI)).ln() / (2.0 * base.ln())
        };
        Ramp {
            low: pair_at(self.beta_fast).floor().max(0.0),
            high: pair_at(self.beta_slow).ceil().min(n_rot as f64 - 1.0),
            extrapolation: self.extrapolation,
        }
    }
}

/// YaRN's ramp between the pairs `low` and `high`.
struct Ramp {
    low: f64,
    high: f64,
    extrapolation: f64,
}

impl Ramp {
    /// The share of a pair's own frequency in what it turns by; the rest is the scaled one.
    fn kept_share(&self, pair: usize) -> f64 {
        let ramp = (pair as f64 - self.low) / (self.high - self.low).max(0.001);
        (1.0 - ramp.clamp(0.0, 1.0)) * self.extrapolation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: RopeScaling = RopeScaling::Uniform { scale: 1.0 };

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() <= 1e-6 * e.abs(), "{found:?}, expected {expected:?}");
        }
    }

    #[test]
    fn unscaled_frequencies_fall_geometrically() {
        let found = frequencies(8, 10_000.0, PLAIN, None).unwrap();
        assert_close(&found, &[1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn linear_scaling_divides_all_of_them() {
        let scaling = RopeScaling::Uniform { scale: 0.25 };
        let found = frequencies(4, 100.0, scaling, None).unwrap();
        assert_close(&found, &[0.25, 0.025]);
    }

    #[test]
    fn factors_divide_each_pair() {
        let found = frequencies(6, 1000.0, PLAIN, Some(&[1.0, 2.0, 8.0])).unwrap();
        assert_close(&found, &[1.0, 0.1 / 2.0, 0.01 / 8.0]);
        assert!(frequencies(6, 1000.0, PLAIN, Some(&[1.0, 2.0])).is_err());
        assert!(frequencies(6, 1000.0, PLAIN, Some(&[1.0, 2.0, 0.0])).is_err());
    }

    /// Values from ggml's formula, evaluated apart: n_rot 128, base 1e6, original context 32,768,
    /// factor 4. The ramp runs from pair 23 (32 turns) to pair 40 (1 turn).
    #[test]
    fn yarn_keeps_fast_pairs_and_scales_slow_ones() {
        let yarn = Yarn {
            scale: 0.25,
            original_context: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            extrapolation: 1.0,
        };
        let plain = frequencies(128, 1e6, PLAIN, None).unwrap();
        let found = frequencies(128, 1e6, RopeScaling::Yarn(yarn), None).unwrap();
        assert_close(&found[..24], &plain[..24]);
        let quarter: Vec<f32> = plain.iter().map(|f| f / 4.0).collect();
        assert_close(&found[40..], &quarter[40..]);
        let kept = 1.0 - (30.0 - 23.0) / (40.0 - 23.0);
        assert_close(&found[30..31], &[plain[30] * (0.25 * (1.0 - kept) + kept)]);
    }
}
