//! Spans: runs of tokens that are stored as one, and what stands for one in full attention.
//!
//! A span is seen at two resolutions. Coarse, it is its weighted mean key and mean value, one row
//! for all its tokens (paper, "coarse summary"); zoomed, its tokens are rebuilt from the basis.
//! The weights follow surprisal, so that the tokens a reader could not foresee shape the mean.

/// A run of tokens, by index into the tokens that were segmented together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    pub start: usize,
    /// Exclusive.
    pub end: usize,
    /// Too short to be worth compressing: its tokens stay whole, like anchors.
    pub full_resolution: bool,
}

impl Span {
    pub fn len(&self) -> usize {
        self.end - self.start
    }

    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }

    pub fn tokens(&self) -> std::ops::Range<usize> {
        self.start..self.end
    }
}

/// The weights of a span's tokens in its means: w_t = H_t / sum_S H, uniform where the sum is 0.
///
/// A token of unknown surprisal (NaN) counts as the mean of the known ones, so that it neither
/// vanishes from the mean nor rules it.
pub fn weights(surprisal: &[f32]) -> Vec<f32> {
    let known = surprisal.iter().filter(|h| !h.is_nan());
    let (sum, count) = known.fold((0f64, 0usize), |(s, n), &h| (s + f64::from(h), n + 1));
    if sum <= 0.0 {
        let share = 1.0 / surprisal.len().max(1) as f32;
        return vec![share; surprisal.len()];
    }
    let mean = sum / count as f64;
    let total = sum + mean * (surprisal.len() - count) as f64;
    surprisal
        .iter()
        .map(|&h| ((if h.is_nan() { mean } else { f64::from(h) }) / total) as f32)
        .collect()
}

/// The weighted mean of rows of `dim` numbers, one row a weight: k_S or v_S.
///
/// Summed in f64: it is done once a span, and a span may hold a whole prompt.
pub fn weighted_mean(rows: &[f32], dim: usize, weights: &[f32]) -> Vec<f32> {
    debug_assert_eq!(rows.len(), dim * weights.len());
    let mut sum = vec![0f64; dim];
    for (row, &w) in rows.chunks_exact(dim).zip(weights) {
        for (s, &x) in sum.iter_mut().zip(row) {
            *s += f64::from(w) * f64::from(x);
        }
    }
    sum.into_iter().map(|s| s as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_follow_surprisal_and_sum_to_one() {
        assert_eq!(weights(&[1.0, 3.0, 0.0, 4.0]), [0.125, 0.375, 0.0, 0.5]);
    }

    #[test]
    fn weights_are_uniform_where_nothing_surprises() {
        assert_eq!(weights(&[0.0; 4]), [0.25; 4]);
        assert_eq!(weights(&[f32::NAN; 2]), [0.5; 2]);
        assert!(weights(&[]).is_empty());
    }

    #[test]
    fn an_unknown_token_weighs_as_the_mean_of_the_known() {
        assert_eq!(weights(&[1.0, f32::NAN, 3.0]), [1.0 / 6.0, 2.0 / 6.0, 3.0 / 6.0]);
    }

    #[test]
    fn huge_surprisal_does_not_overflow_the_sum() {
        assert_eq!(weights(&[f32::MAX, f32::MAX]), [0.5, 0.5]);
    }

    #[test]
    fn mean_is_the_weighted_sum_of_rows() {
        assert_eq!(weighted_mean(&[1.0, 2.0, 3.0, 6.0], 2, &[0.25, 0.75]), [2.5, 5.0]);
    }
}
