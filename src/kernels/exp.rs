//! The exponentials of a softmax.

/// The largest value; -infinity when empty.
pub fn max(values: &[f32]) -> f32 {
    values.iter().fold(f32::NEG_INFINITY, |largest, value| largest.max(*value))
}

/// `values[i] = exp(values[i] - max)`; returns their sum.
///
/// What is below exp(-87) is 0, and so is anything that -infinity takes part in, -infinity less
/// -infinity included: a masked score weighs nothing, even where all are masked.
pub fn exp_minus(values: &mut [f32], max: f32) -> f32 {
    let mut sum = 0.0f64;
    for value in values {
        let below = *value - max;
        *value = if below >= -87.0 { below.exp() } else { 0.0 };
        sum += f64::from(*value);
    }
    sum as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minus_infinity_weighs_nothing_even_against_itself() {
        assert_eq!(max(&[]), f32::NEG_INFINITY);
        let none = f32::NEG_INFINITY;
        let mut values = vec![none; 37];
        assert_eq!(exp_minus(&mut values, none), 0.0);
        assert!(values.iter().all(|value| *value == 0.0));
        let mut values = vec![none, 0.0, -1e30, none];
        assert_eq!(exp_minus(&mut values, 0.0), 1.0);
        assert_eq!(values, [0.0, 1.0, 0.0, 0.0]);
    }
}
