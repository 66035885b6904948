//! The exponentials of a softmax.

use super::level::{Level, Tier};

/// The largest value; -infinity when empty.
pub fn max(values: &[f32]) -> f32 {
    max_at(Level::best(), values)
}

/// [`max`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn max_at(level: Level, values: &[f32]) -> f32 {
    match level.tier() {
        Tier::Scalar => values.iter().fold(f32::NEG_INFINITY, |largest, value| largest.max(*value)),
        // SAFETY: the level proves that the machine has the instructions.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::max_avx2(values) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::max_avx512(values) },
    }
}

/// `values[i] = exp(values[i] - max)`; returns their sum. No value is above `max` by more than 88.
///
/// What is below exp(-87) is 0, and so is anything that -infinity takes part in, -infinity less
/// -infinity included: a masked score weighs nothing, even where all are masked. The relative
/// error is below 1.5e-7.
pub fn exp_minus(values: &mut [f32], max: f32) -> f32 {
    exp_minus_at(Level::best(), values, max)
}

/// [`exp_minus`] at a given level, for tests and benches.
#[doc(hidden)]
pub fn exp_minus_at(level: Level, values: &mut [f32], max: f32) -> f32 {
    match level.tier() {
        Tier::Scalar => {
            let mut sum = 0.0f64;
            for value in values {
                let below = *value - max;
                *value = if below >= LEAST { below.exp() } else { 0.0 };
                sum += f64::from(*value);
            }
            sum as f32
        }
        // SAFETY: the level proves that the machine has the instructions.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx2 => unsafe { x86::exp_minus_avx2(values, max) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512 => unsafe { x86::exp_minus_avx512(values, max) },
    }
}

/// exp is 0 below this: its result would leave the normal numbers.
const LEAST: f32 = -87.0;

/// Powers of 2 that sketches' scores are turned into are no less than 2 to this.
pub(super) const LEAST_POWER: f32 = -126.0;

#[cfg(target_arch = "x86_64")]
pub(super) use x86::exp2;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::simd::{F32x8, F32x16, Vector, four};
    use super::{LEAST, LEAST_POWER};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn max_avx2(values: &[f32]) -> f32 {
        // SAFETY: this function has the features of the vector.
        unsafe { largest::<F32x8>(values) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub fn max_avx512(values: &[f32]) -> f32 {
        // SAFETY: this function has the features of the vector.
        unsafe { largest::<F32x16>(values) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn exp_minus_avx2(values: &mut [f32], max: f32) -> f32 {
        // SAFETY: this function has the features of the vector.
        unsafe { exponentials::<F32x8>(values, max) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
    pub fn exp_minus_avx512(values: &mut [f32], max: f32) -> f32 {
        // SAFETY: this function has the features of the vector.
        unsafe { exponentials::<F32x16>(values, max) }
    }

    /// # Safety
    /// The features of `V` are there.
    #[inline(always)]
    unsafe fn largest<V: Vector>(values: &[f32]) -> f32 {
        let (n, from) = (values.len(), values.as_ptr());
        let whole = n / V::LANES * V::LANES;
        // SAFETY: vectors end at `whole <= n`; the rest is indexed.
        unsafe {
            // Four chains, so that the latency of one maximum doesn't set the pace.
            let mut largest = [V::splat(f32::NEG_INFINITY); 4];
            let mut i = 0;
            while i + 4 * V::LANES <= n {
                for (lane, largest) in largest.iter_mut().enumerate() {
                    *largest = largest.max(V::load(from.add(i + lane * V::LANES)));
                }
                i += 4 * V::LANES;
            }
            while i < whole {
                largest[0] = largest[0].max(V::load(from.add(i)));
                i += V::LANES;
            }
            let largest = four(V::max4(largest)).into_iter().fold(f32::NEG_INFINITY, f32::max);
            values[whole..].iter().fold(largest, |largest, value| largest.max(*value))
        }
    }

    /// # Safety
    /// The features of `V` are there.
    #[inline(always)]
    unsafe fn exponentials<V: Vector>(values: &mut [f32], max: f32) -> f32 {
        let (n, at) = (values.len(), values.as_mut_ptr());
        // SAFETY: whole vectors end at or before n, the part takes what is left.
        unsafe {
            let max = V::splat(max);
            let mut sums = [V::splat(0.0); 4];
            let mut i = 0;
            while i + 4 * V::LANES <= n {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let at = at.add(i + lane * V::LANES);
                    let value = exp(V::load(at).sub(max));
                    value.store(at);
                    *sum = sum.add(value);
                }
                i += 4 * V::LANES;
            }
            while i + V::LANES <= n {
                let value = exp(V::load(at.add(i)).sub(max));
                value.store(at.add(i));
                sums[0] = sums[0].add(value);
                i += V::LANES;
            }
            if i < n {
                // A vector's missing lanes must not enter the sum: they go through memory, as 0.
                let mut rest = [0.0f32; 16];
                exp(V::load_part(at.add(i), n - i).sub(max)).store_part(rest.as_mut_ptr(), n - i);
                std::ptr::copy_nonoverlapping(rest.as_ptr(), at.add(i), n - i);
                sums[1] = sums[1].add(V::load(rest.as_ptr()));
            }
            let [a, b, c, d] = four(V::sum4(sums));
            (a + b) + (c + d)
        }
    }

    /// 2^x = 2^n 2^f, |f| <= 1/2, for x up to 127; below LEAST_POWER stands that one's. The
    /// polynomial is the minimax one of degree 4, relative error 3e-6: for scores that are sketches
    /// of the true ones, off by far more.
    ///
    /// # Safety
    /// The features of `V` are there.
    #[inline(always)]
    pub unsafe fn exp2<V: Vector>(x: V) -> V {
        // SAFETY: as the caller's.
        unsafe {
            let x = x.max(V::splat(LEAST_POWER));
            // Leaves n, rounded to even, in the lowest bits.
            let magic = V::splat(12_582_912.0);
            let n = x.add(magic);
            let f = x.sub(n.sub(magic));
            let mut p = V::splat(9.570_102e-3);
            for coefficient in [5.591_786e-2, 0.240_247_44, 0.693_121_8, 0.999_999_3] {
                p = p.fma(f, V::splat(coefficient));
            }
            p.scale_by_low_bits(n)
        }
    }

    /// exp(x) = 2^n exp(r), |r| <= ln 2 / 2; ln 2 in two parts (355 / 512 and the rest) keeps r
    /// exact; the polynomial is that of Cephes' expf.
    ///
    /// # Safety
    /// The features of `V` are there.
    #[inline(always)]
    unsafe fn exp<V: Vector>(x: V) -> V {
        // SAFETY: as the caller's.
        unsafe {
            // Keeps n where `scale` can work; what it cuts off is masked away or beyond contract.
            let bounded = x.max(V::splat(LEAST)).min(V::splat(88.72));
            let n = bounded.mul(V::splat(std::f32::consts::LOG2_E)).round();
            let r = n.fma(V::splat(-0.693_359_4), bounded);
            let r = n.fma(V::splat(2.121_944_4e-4), r);
            let mut p = V::splat(1.987_569_1e-4);
            for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.fma(r, V::splat(coefficient));
            }
            let p = p.fma(r.mul(r), r).add(V::splat(1.0));
            p.scale(n).where_at_least(x, V::splat(LEAST))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Random;
    use super::*;

    #[test]
    fn every_level_is_within_the_stated_error() {
        let mut random = Random::new(5);
        for level in Level::available() {
            let mut worst = 0.0f64;
            for n in (0..70).chain([127, 1000, 4096]) {
                for span in [1e-3, 1.0, 20.0, 100.0] {
                    let max = random.uniform() * 10.0;
                    let values: Vec<f32> =
                        (0..n).map(|_| max - (random.uniform() + 1.0) * span).collect();
                    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    assert_eq!(max_at(level, &values), largest);
                    let mut found = values.clone();
                    let sum = f64::from(exp_minus_at(level, &mut found, max));
                    let mut right_sum = 0.0;
                    for (value, found) in values.iter().zip(&found) {
                        let right = f64::from(value - max).exp();
                        right_sum += right;
                        if value - max < LEAST {
                            assert_eq!(*found, 0.0);
                        } else {
                            worst = worst.max((f64::from(*found) / right - 1.0).abs());
                        }
                    }
                    assert!((sum - right_sum).abs() <= 1e-6 * right_sum + 1e-37 * n as f64);
                }
            }
            assert!(worst < 1.5e-7, "{level:?}: {worst:e}");
        }
    }

    #[test]
    fn minus_infinity_weighs_nothing_even_against_itself() {
        assert_eq!(max(&[]), f32::NEG_INFINITY);
        let none = f32::NEG_INFINITY;
        for level in Level::available() {
            let mut values = vec![none; 37];
            assert_eq!(max_at(level, &values), none);
            assert_eq!(exp_minus_at(level, &mut values, none), 0.0);
            assert!(values.iter().all(|value| *value == 0.0));
            let mut values = [none, 0.0, -1e30, none, -87.1].repeat(9);
            assert_eq!(exp_minus_at(level, &mut values, 0.0), 9.0);
            assert_eq!(values, [0.0, 1.0, 0.0, 0.0, 0.0].repeat(9));
        }
    }
}
