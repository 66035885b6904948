//! Running mean and spread of surprisal, for prompts that arrive in pieces.

/// Mean and sum of squared deviations of all values so far, by Welford's update.
///
/// Sums of squares would do in f64 too, but leave a spread of 1e-9 where all values are equal, and
/// with alpha = 0 that turns every token into an anchor. Here equal values give exactly 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    count: u64,
    mean: f64,
    squares: f64,
}

impl Moments {
    pub fn new() -> Self {
        Self::default()
    }

    /// Values of the known tokens among `surprisal`; NaN is an unknown one.
    pub fn extend(&mut self, surprisal: &[f32]) {
        for &h in surprisal.iter().filter(|h| !h.is_nan()) {
            self.push(h);
        }
    }

    pub fn push(&mut self, value: f32) {
        let value = f64::from(value);
        self.count += 1;
        let delta = value - self.mean;
        self.mean += delta / self.count as f64;
        self.squares += delta * (value - self.mean);
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Population sigma: the divisor is the count, as in the reference.
    pub fn sigma(&self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.squares / self.count as f64).sqrt() }
    }

    /// mu + alpha * sigma. Tokens strictly above it are anchors.
    pub fn threshold(&self, alpha: f32) -> f64 {
        self.mean + f64::from(alpha) * self.sigma()
    }

    /// The three numbers that a saved state has to carry.
    pub fn parts(&self) -> (u64, f64, f64) {
        (self.count, self.mean, self.squares)
    }

    pub fn from_parts((count, mean, squares): (u64, f64, f64)) -> Self {
        Self { count, mean, squares }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_have_no_spread() {
        let mut moments = Moments::new();
        moments.extend(&[0.1; 1000]);
        assert_eq!(moments.threshold(2.0), f64::from(0.1f32));
    }

    #[test]
    fn pieces_agree_with_the_closed_form() {
        let values: Vec<f32> = (0..100).map(|i| i as f32).collect();
        let mut moments = Moments::new();
        for piece in values.chunks(7) {
            moments.extend(piece);
        }
        // 0 .. n - 1: mean (n - 1) / 2, variance (n^2 - 1) / 12.
        assert!((moments.mean() - 49.5).abs() < 1e-12);
        assert!((moments.sigma() - (9999f64 / 12.0).sqrt()).abs() < 1e-12);
        assert_eq!(Moments::from_parts(moments.parts()), moments);
    }

    #[test]
    fn unknown_values_do_not_count() {
        let mut moments = Moments::new();
        moments.extend(&[f32::NAN, 2.0, f32::NAN, 4.0]);
        assert_eq!((moments.count(), moments.mean(), moments.sigma()), (2, 3.0, 1.0));
    }
}
