//! Conversions between the element types a host may hand in, and the check that they are usable.

use half::{bf16, f16};

/// `dst[i] = src[i]`, exactly.
pub fn f16_to_f32(src: &[f16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    for (to, from) in dst.iter_mut().zip(src) {
        *to = from.to_f32();
    }
}

/// `dst[i] = src[i]`, exactly.
pub fn bf16_to_f32(src: &[bf16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    for (to, from) in dst.iter_mut().zip(src) {
        *to = from.to_f32();
    }
}

/// `dst[i] = src[i]`, to the nearest f16, ties to even; beyond 65,519 it is infinite.
pub fn f32_to_f16(src: &[f32], dst: &mut [f16]) {
    assert_eq!(src.len(), dst.len());
    for (to, from) in dst.iter_mut().zip(src) {
        *to = f16::from_f32(*from);
    }
}

/// Index of the first value that is not finite or whose magnitude exceeds `limit`.
pub fn first_outside(values: &[f32], limit: f32) -> Option<usize> {
    let limit = limit.min(f32::MAX);
    // A comparison with NaN is false, so the test asks for what is right, not for what is wrong.
    values.iter().position(|value| !inside(*value, limit))
}

#[inline(always)]
fn inside(value: f32, limit: f32) -> bool {
    value.abs() <= limit
}

/// The least f16 that is not below `value`; infinite where there is none.
pub(super) fn f16_at_least(value: f32) -> f16 {
    let nearest = f16::from_f32(value);
    if nearest.to_f32() >= value {
        return nearest;
    }
    // One step towards +infinity, through the order of the bit patterns.
    match nearest.to_bits() {
        0x8000 | 0x0000 => f16::from_bits(0x0001),
        bits if bits & 0x8000 != 0 => f16::from_bits(bits - 1),
        bits => f16::from_bits(bits + 1),
    }
}

/// The greatest f16 that is not above `value`; -infinite where there is none.
pub(super) fn f16_at_most(value: f32) -> f16 {
    -f16_at_least(-value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_outwards_to_the_neighbour_and_keeps_what_is_exact() {
        for bits in (0..=u16::MAX).filter(|bits| f16::from_bits(*bits).is_finite()) {
            let exact = f16::from_bits(bits);
            assert_eq!(f16_at_least(exact.to_f32()).to_f32(), exact.to_f32());
            assert_eq!(f16_at_most(exact.to_f32()).to_f32(), exact.to_f32());
        }
        let mut state = 1u32;
        for _ in 0..100_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state);
            if value.is_nan() || value.abs() > 65_504.0 {
                continue;
            }
            let (low, high) = (f16_at_most(value).to_f32(), f16_at_least(value).to_f32());
            assert!(low <= value && value <= high, "{low} {value} {high}");
            let nearest = f16::from_f32(value).to_f32();
            assert!(low == nearest || high == nearest);
        }
    }

    #[test]
    fn finds_the_first_value_that_is_not_usable() {
        assert_eq!(first_outside(&[], 1.0), None);
        let mut values = vec![65_504.0f32; 77];
        assert_eq!(first_outside(&values, 65_504.0), None);
        assert_eq!(first_outside(&values, f32::INFINITY), None);
        for at in [0, 5, 15, 16, 31, 63, 64, 76] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -65_505.0] {
                values[at] = bad;
                values[76] = f32::NAN;
                assert_eq!(first_outside(&values, 65_504.0), Some(at));
                values[at] = 0.0;
                values[76] = 0.0;
            }
        }
        values[3] = f32::INFINITY;
        assert_eq!(first_outside(&values, f32::INFINITY), Some(3));
    }
}
