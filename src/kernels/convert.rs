//! Conversions between the element types a host may hand in, and the check that they are usable.

use super::level::{Level, Tier};
use half::{bf16, f16};

/// The bytes of f16, as a row of [`RowCodec::F16`](super::RowCodec::F16) has them.
pub fn half_bytes(halves: &[f16]) -> &[u8] {
    // SAFETY: two bytes each, of any value.
    unsafe { std::slice::from_raw_parts(halves.as_ptr().cast(), size_of_val(halves)) }
}

/// `dst[i] = src[i]`, exactly.
pub fn f16_to_f32(src: &[f16], dst: &mut [f32]) {
    f16_to_f32_at(Level::best(), src, dst);
}

/// `dst[i] = src[i]`, to the nearest f16, ties to even; beyond 65,519 it is infinite.
pub fn f32_to_f16(src: &[f32], dst: &mut [f16]) {
    f32_to_f16_at(Level::best(), src, dst);
}

/// [`f16_to_f32`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn f16_to_f32_at(level: Level, src: &[f16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    match level.tier() {
        Tier::Scalar => {
            for (to, from) in dst.iter_mut().zip(src) {
                *to = from.to_f32();
            }
        }
        // SAFETY: the level proves that the machine has the instructions.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 | Tier::Avx512 => unsafe { x86::f16_to_f32(src, dst) },
    }
}

/// [`f32_to_f16`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn f32_to_f16_at(level: Level, src: &[f32], dst: &mut [f16]) {
    assert_eq!(src.len(), dst.len());
    match level.tier() {
        Tier::Scalar => {
            for (to, from) in dst.iter_mut().zip(src) {
                *to = f16::from_f32(*from);
            }
        }
        // SAFETY: the level proves that the machine has the instructions.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 | Tier::Avx512 => unsafe { x86::f32_to_f16(src, dst) },
    }
}

/// `dst[i] = src[i]`, exactly.
pub fn bf16_to_f32(src: &[bf16], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    for (to, from) in dst.iter_mut().zip(src) {
        // A bf16 is the upper half of an f32; a shift is what the compiler makes vectors of.
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// Index of the first value that is not finite or whose magnitude exceeds `limit`.
pub fn first_outside(values: &[f32], limit: f32) -> Option<usize> {
    let limit = limit.min(f32::MAX);
    // A comparison with NaN is false, so the test asks for what is right, not for what is wrong.
    let inside = |value: &f32| value.abs() <= limit;
    // Whole chunks first, without a branch for each value: nearly all input is right.
    const CHUNK: usize = 64;
    let wrong = values
        .chunks(CHUNK)
        .position(|chunk| !chunk.iter().fold(true, |all, value| all & inside(value)))?;
    let rest = values[wrong * CHUNK..].iter().position(|value| !inside(value))?;
    Some(wrong * CHUNK + rest)
}

/// AVX2 only: conversions wait for memory, not for the width of a vector.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, Vector};
    use half::f16;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn f16_to_f32(src: &[f16], dst: &mut [f32]) {
        let n = src.len().min(dst.len());
        let (from, to) = (src.as_ptr().cast::<u8>(), dst.as_mut_ptr());
        // SAFETY: this function has the features of the vector; vectors end at or before n, the
        // part takes what is left.
        unsafe {
            let mut i = 0;
            while i + F32x8::LANES <= n {
                F32x8::load_f16(from.add(2 * i)).store(to.add(i));
                i += F32x8::LANES;
            }
            F32x8::load_f16_part(from.add(2 * i), n - i).store_part(to.add(i), n - i);
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn f32_to_f16(src: &[f32], dst: &mut [f16]) {
        let n = src.len().min(dst.len());
        let (from, to) = (src.as_ptr(), dst.as_mut_ptr().cast::<u8>());
        // SAFETY: this function has the features of the vector; vectors end at or before n, the
        // part takes what is left.
        unsafe {
            let mut i = 0;
            while i + F32x8::LANES <= n {
                F32x8::load(from.add(i)).store_f16(to.add(2 * i));
                i += F32x8::LANES;
            }
            let mut rest = [0u8; 16];
            F32x8::load_part(from.add(i), n - i).store_f16(rest.as_mut_ptr());
            std::ptr::copy_nonoverlapping(rest.as_ptr(), to.add(2 * i), 2 * (n - i));
        }
    }
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
    use super::super::testing::Random;
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
    fn every_level_converts_every_f16_and_rounds_to_even() {
        let finite = (0..=u16::MAX).map(f16::from_bits).filter(|half| half.is_finite());
        let halves: Vec<f16> = finite.collect();
        // Right values: f16 is exact in f64, and f64 to f32 is exact there.
        let right: Vec<f32> = halves.iter().map(|half| half.to_f64() as f32).collect();
        let mut random = Random::new(9);
        let mut values: Vec<f32> = (0..1003).map(|_| f32::from_bits(random.bits())).collect();
        values.retain(|value| !value.is_nan());
        // Ties, overflow and what is too small.
        values.extend([1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65_519.9, 65_520.0, 1e-9, -1e-40]);
        for level in Level::available() {
            for n in (0..20).chain([halves.len()]) {
                let mut found = vec![f32::NAN; n];
                f16_to_f32_at(level, &halves[..n], &mut found);
                assert_eq!(found, right[..n], "{level:?}");
                let mut back = vec![f16::NAN; n];
                f32_to_f16_at(level, &found, &mut back);
                assert_eq!(back, halves[..n], "{level:?}");
            }
            let mut found = vec![f16::NAN; values.len()];
            f32_to_f16_at(level, &values, &mut found);
            for (value, found) in values.iter().zip(&found) {
                assert_eq!(*found, f16::from_f32_const(*value), "{level:?} {value:e}");
            }
        }
    }

    #[test]
    fn a_bf16_is_the_upper_half_of_an_f32() {
        let halves: Vec<bf16> = [1.0, -3.5, 1e38, 1e-40].map(bf16::from_f32).to_vec();
        let mut found = vec![0.0; 4];
        bf16_to_f32(&halves, &mut found);
        let right: Vec<f32> = halves.iter().map(|half| half.to_f64() as f32).collect();
        assert_eq!(found, right);
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
