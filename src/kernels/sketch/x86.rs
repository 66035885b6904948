//! Sketch scores by dot products of bytes.
//!
//! With s = q * scale of a channel, a score is offset + sum q * minimum + sum s * code. The last
//! sum is made from q8 = round(s / step), step = max |s| / 127 over the block and the query: codes
//! are unsigned and q8 signed, which is what `vpdpbusd` (AVX-512 VNNI) and `vpmaddubsw` (AVX2)
//! multiply. The rounding s - step * q8 is known, so its product with the middle code (7.5 or
//! 1.5) is added exactly, and what is left is its product with code - middle:
//!
//! |error| <= step / 2 * sum of |code - middle|.
//!
//! One step serves both widths: per channel the rounding's variance is step^2 / 12 times the
//! codes' own, (15^2 - 1 + 32) / 12 = 21 or 1.25, against s^2 / 12 that the sketch itself is off
//! by. In all that is 21 n4 + 1.25 n2 over 127^2 times max s^2 / sum s^2: about 1 % where
//! max |s| is three times the mean square's root.

use super::super::exp::exp2;
use super::super::shares;
use super::super::simd::{F32x8, F32x16, Vector, four};
use super::run::{Block, BlockSums, Candidates, Few, GROUP, Kernel, SketchRun, Weighed};
use super::{GROUP_TOKENS, MAX_CHANNELS, SketchShape, UNIT_BYTES};
use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Dwords of a query's bytes, and a vector's worth to write past them.
const QUADS: usize = MAX_CHANNELS / 4 + 4;

/// Queries as bytes, four channels a dword, and what turns the integer sums into scores.
pub(super) struct Quantised {
    quads: [[MaybeUninit<i32>; QUADS]; GROUP],
    step: [f32; GROUP],
    base: [f32; GROUP],
}

impl Quantised {
    fn room() -> Self {
        Self {
            quads: [const { [MaybeUninit::uninit(); QUADS] }; GROUP],
            step: [0.0; GROUP],
            base: [0.0; GROUP],
        }
    }

    /// # Safety
    /// Query `g` has been written as far as dword `i`.
    #[inline(always)]
    unsafe fn quad(&self, g: usize, i: usize) -> i32 {
        // SAFETY: by the contract.
        unsafe { self.quads.get_unchecked(g).get_unchecked(i).assume_init() }
    }
}

/// The entry of one vector width, given its dot product.
macro_rules! entry {
    ($level:ident, $run:ident, $vector:ty, $dot:ident, $features:literal) => {
        #[target_feature(enable = $features)]
        pub fn $run(run: &SketchRun, sums: &mut BlockSums, found: &mut Candidates) -> usize {
            // SAFETY: this function has the features of the vector; the door checked the lengths.
            unsafe { run.weigh::<$level>(sums, found) }
        }

        struct $level;

        impl Kernel for $level {
            type Ready = Quantised;

            fn room() -> Quantised {
                Quantised::room()
            }

            #[inline(always)]
            unsafe fn prepare(block: &Block, few: Few, ready: &mut Quantised) {
                // SAFETY: the same contract; these queries exist.
                unsafe {
                    match few.n {
                        1 => quantise::<$vector, 1>(block, few.first, ready),
                        2 => quantise::<$vector, 2>(block, few.first, ready),
                        3 => quantise::<$vector, 3>(block, few.first, ready),
                        _ => quantise::<$vector, 4>(block, few.first, ready),
                    }
                }
            }

            #[inline(always)]
            unsafe fn weigh(
                block: &Block,
                few: Few,
                reference: &[f32; GROUP],
                ready: &Quantised,
                lines: &mut [f32],
            ) -> Weighed {
                // SAFETY: the same contract; a few queries are ready, and their lines exist.
                unsafe {
                    match few.n {
                        1 => $dot::<1>(block, ready, reference, lines.as_mut_ptr()),
                        2 => $dot::<2>(block, ready, reference, lines.as_mut_ptr()),
                        3 => $dot::<3>(block, ready, reference, lines.as_mut_ptr()),
                        _ => $dot::<4>(block, ready, reference, lines.as_mut_ptr()),
                    }
                }
            }

            #[inline(always)]
            unsafe fn tokens_above(
                weights: &shares::Weighed,
                limit: f32,
                tokens: &mut [u32],
                lines: &mut [f32],
            ) -> usize {
                // SAFETY: the same contract.
                unsafe { shares::above::<$vector>(weights, limit, tokens, lines) }
            }
        }
    };
}

entry!(Avx2, run_avx2, F32x8, dot_avx2, "avx2,fma,f16c,popcnt");
entry!(
    Avx512,
    run_avx512,
    F32x16,
    dot_avx512,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,popcnt"
);

/// Turns the integer sums of a few queries into weights.
struct Weighing<V, const G: usize> {
    step: [V; G],
    base: [V; G],
    tops: [V; GROUP],
    sums: [V; GROUP],
}

/// Zeros and then what leaves no weight, to be read from a place between.
const BEYOND: [f32; 2 * GROUP_TOKENS] = {
    let mut beyond = [0.0; 2 * GROUP_TOKENS];
    let mut i = GROUP_TOKENS;
    while i < beyond.len() {
        beyond[i] = f32::NEG_INFINITY;
        i += 1;
    }
    beyond
};

impl<V: Vector, const G: usize> Weighing<V, G> {
    /// # Safety
    /// The features of `V` are there.
    #[inline(always)]
    unsafe fn new(query: &Quantised, reference: &[f32; GROUP]) -> Self {
        // SAFETY: by the contract.
        unsafe {
            let to_powers = _mm_set1_ps(LOG2_E);
            let base = _mm_loadu_ps(query.base.as_ptr());
            let base = _mm_sub_ps(base, _mm_loadu_ps(reference.as_ptr()));
            let base = four(_mm_mul_ps(base, to_powers));
            let step = four(_mm_mul_ps(_mm_loadu_ps(query.step.as_ptr()), to_powers));
            let mut new = Self {
                step: [V::splat(0.0); G],
                base: [V::splat(0.0); G],
                tops: [V::splat(f32::NEG_INFINITY); GROUP],
                sums: [V::splat(0.0); GROUP],
            };
            for g in 0..G {
                (new.step[g], new.base[g]) = (V::splat(step[g]), V::splat(base[g]));
            }
            new
        }
    }

    /// Query g's weights of T times LANES tokens, of which the block has `n_left`.
    ///
    /// # Safety
    /// The features of `V` are there, and `to` has room for them.
    #[inline(always)]
    unsafe fn take<const T: usize>(
        &mut self,
        g: usize,
        sums: [V::Sums; T],
        n_left: usize,
        to: *mut f32,
    ) {
        // SAFETY: by the contract.
        unsafe {
            let mut powers = [V::splat(0.0); T];
            for (power, sum) in powers.iter_mut().zip(sums) {
                *power = V::from_sums(sum).fma(self.step[g], self.base[g]);
            }
            if n_left < T * V::LANES {
                for (t, power) in powers.iter_mut().enumerate() {
                    let n = n_left.saturating_sub(t * V::LANES).min(GROUP_TOKENS);
                    *power = power.add(V::load(BEYOND.as_ptr().add(GROUP_TOKENS - n)));
                }
            }
            for (t, power) in powers.into_iter().enumerate() {
                let weight = exp2(power);
                weight.store(to.add(t * V::LANES));
                self.tops[g] = self.tops[g].max(power);
                self.sums[g] = self.sums[g].add(weight);
            }
        }
    }

    /// # Safety
    /// The features of `V` are there.
    #[inline(always)]
    unsafe fn done(self) -> Weighed {
        // SAFETY: by the contract.
        unsafe { Weighed { top: four(V::max4(self.tops)), sum: four(V::sum4(self.sums)) } }
    }
}

/// Queries first..first + G as bytes.
///
/// # Safety
/// The features of `V` are there, these queries exist, and lengths are as the door checked them.
#[inline(always)]
unsafe fn quantise<V: Vector, const G: usize>(block: &Block, first: usize, to: &mut Quantised) {
    let (SketchShape { n4, n2 }, g) = (block.shape, first);
    let channels = n4 + n2;
    // SAFETY: q has these G lines, and c..c + n are channels of theirs and of the other tables.
    unsafe {
        let lines = Lines::<V, G> {
            q: block.q.as_ptr().add(g * channels),
            channels,
            minimum: block.minimum.as_ptr().cast(),
            scale: block.scale.as_ptr().cast(),
            vector: PhantomData,
        };
        let mut largest = [V::splat(0.0); GROUP];
        let mut c = 0;
        while c + V::LANES <= channels {
            lines.magnitudes::<true>(c, V::LANES, &mut largest);
            c += V::LANES;
        }
        if c < channels {
            lines.magnitudes::<false>(c, channels - c, &mut largest);
        }
        // Below 1e-30 a reciprocal could overflow; with step 0 the middle codes stand for all.
        let largest = V::max4(largest);
        let usable = _mm_cmpgt_ps(largest, _mm_set1_ps(1e-30));
        let inverse = _mm_and_ps(usable, _mm_div_ps(_mm_set1_ps(127.0), largest));
        let step = _mm_and_ps(usable, _mm_mul_ps(largest, _mm_set1_ps(1.0 / 127.0)));
        let (inverse, step) = (four(inverse), four(step));
        to.step = step;
        let mut sums = Sums {
            inverse: [V::splat(0.0); G],
            middles: [V::splat(0.0); G],
            rounded: [V::splat(0.0); G],
        };
        for (vector, inverse) in sums.inverse.iter_mut().zip(inverse) {
            *vector = V::splat(inverse);
        }
        for (start, end, middle) in [(0, n4, 7.5), (n4, channels, 1.5)] {
            let middle = V::splat(middle);
            let mut c = start;
            while c + V::LANES <= end {
                lines.round::<true>(c, V::LANES, middle, &mut sums, to);
                c += V::LANES;
            }
            if c < end {
                lines.round::<false>(c, end - c, middle, &mut sums, to);
            }
        }
        let mut base = [V::splat(0.0); GROUP];
        for (g, base) in base.iter_mut().take(G).enumerate() {
            *base = sums.middles[g].sub(sums.rounded[g].mul(V::splat(step[g])));
        }
        let offset = block.offset.as_ptr().add(g * block.offset_stride);
        let mut offsets = [0.0; GROUP];
        for (i, to) in offsets.iter_mut().enumerate().take(G) {
            *to = *offset.add(i * block.offset_stride);
        }
        to.base = four(_mm_add_ps(V::sum4(base), _mm_loadu_ps(offsets.as_ptr())));
    }
}

/// The G queries being quantised, and the block's tables as bytes.
struct Lines<V, const G: usize> {
    q: *const f32,
    channels: usize,
    minimum: *const u8,
    scale: *const u8,
    vector: PhantomData<V>,
}

/// Each query's base is sum q * minimum + middle * (s - step * q8), s = q * scale: one sum of
/// products by minimum + middle * scale, less step times one of middle * q8.
struct Sums<V, const G: usize> {
    inverse: [V; G],
    middles: [V; G],
    rounded: [V; G],
}

impl<V: Vector, const G: usize> Lines<V, G> {
    /// Takes |q * scale| of channels c..c + n into `largest`; WHOLE: n is LANES.
    ///
    /// # Safety
    /// The features of `V` are there and the channels exist.
    #[inline(always)]
    unsafe fn magnitudes<const WHOLE: bool>(&self, c: usize, n: usize, largest: &mut [V; GROUP]) {
        // SAFETY: by the contract.
        unsafe {
            let scale = half::<V, WHOLE>(self.scale, c, n);
            for (g, largest) in largest.iter_mut().take(G).enumerate() {
                let q = single::<V, WHOLE>(self.q.add(g * self.channels + c), n);
                *largest = q.mul(scale).max_abs(*largest);
            }
        }
    }

    /// Writes the bytes of channels c..c + n, and what they leave to the base. A vector of bytes
    /// that is used in part is written over by the next, or ends in the slack.
    ///
    /// # Safety
    /// The features of `V` are there and the channels exist.
    #[inline(always)]
    unsafe fn round<const WHOLE: bool>(
        &self,
        c: usize,
        n: usize,
        middle: V,
        sums: &mut Sums<V, G>,
        to: &mut Quantised,
    ) {
        // SAFETY: by the contract; each line of bytes has MAX_CHANNELS and a vector's worth.
        unsafe {
            let scale = half::<V, WHOLE>(self.scale, c, n);
            let at_middle = middle.fma(scale, half::<V, WHOLE>(self.minimum, c, n));
            // 1.5 * 2^23 leaves a whole number, rounded to even, in the lowest bits.
            let whole = V::splat(12_582_912.0);
            for g in 0..G {
                let q = single::<V, WHOLE>(self.q.add(g * self.channels + c), n);
                let q8 = q.mul(scale).fma(sums.inverse[g], whole);
                q8.store_low_bytes(to.quads.as_mut_ptr().add(g).cast::<u8>().add(c));
                sums.middles[g] = q.fma(at_middle, sums.middles[g]);
                sums.rounded[g] = q8.sub(whole).fma(middle, sums.rounded[g]);
            }
        }
    }
}

/// n values of a table of f16, from `c` on.
///
/// # Safety
/// The features of `V` are there and the values exist.
#[inline(always)]
unsafe fn half<V: Vector, const WHOLE: bool>(table: *const u8, c: usize, n: usize) -> V {
    // SAFETY: by the contract.
    unsafe {
        let at = table.add(2 * c);
        if WHOLE { V::load_f16(at) } else { V::load_f16_part(at, n) }
    }
}

/// n values of f32.
///
/// # Safety
/// The features of `V` are there and the values exist.
#[inline(always)]
unsafe fn single<V: Vector, const WHOLE: bool>(at: *const f32, n: usize) -> V {
    // SAFETY: by the contract.
    unsafe { if WHOLE { V::load(at) } else { V::load_part(at, n) } }
}

/// Groups of tokens whose sums are made together: with four queries these are sixteen, each a chain
/// of its own, and a query's bytes are brought once for all of them.
const GROUPS: usize = 4;

/// # Safety
/// AVX-512 VNNI is there, G queries are quantised, lengths are as the door checked them and `out`
/// is the first query's line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_avx512<const G: usize>(
    block: &Block,
    query: &Quantised,
    reference: &[f32; GROUP],
    out: *mut f32,
) -> Weighed {
    // SAFETY: this function has the features; groups first..first + T exist.
    unsafe {
        let mut weighing = Weighing::<F32x16, G>::new(query, reference);
        let n_groups = block.n_tokens.div_ceil(GROUP_TOKENS);
        let mut first = 0;
        while first + GROUPS <= n_groups {
            groups_avx512::<G, GROUPS>(block, query, first, &mut weighing, out);
            first += GROUPS;
        }
        while first < n_groups {
            groups_avx512::<G, 1>(block, query, first, &mut weighing, out);
            first += 1;
        }
        weighing.done()
    }
}

/// Groups first..first + T of the block's tokens.
///
/// # Safety
/// As [`dot_avx512`], and these groups exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn groups_avx512<const G: usize, const T: usize>(
    block: &Block,
    query: &Quantised,
    first: usize,
    weighing: &mut Weighing<F32x16, G>,
    out: *mut f32,
) {
    let (units4, units2) = (block.shape.n4 / 8, block.shape.n2 / 16);
    let group_bytes = block.shape.group_bytes();
    let (nibble, pair) = (_mm512_set1_epi8(15), _mm512_set1_epi8(3));
    let mut sums = [[_mm512_setzero_si512(); T]; G];
    // SAFETY: a group of tokens has units4 + units2 units, each query two or four dwords for
    // each, and each line room for 16 tokens.
    unsafe {
        let at = block.codes.as_ptr().add(first * group_bytes);
        for u in 0..units4 {
            let units = units::<T>(at.add(u * UNIT_BYTES), group_bytes);
            add_dots(&mut sums, masked::<T, 0>(units, nibble), query, 2 * u);
            add_dots(&mut sums, masked::<T, 4>(units, nibble), query, 2 * u + 1);
        }
        for u in 0..units2 {
            let units = units::<T>(at.add((units4 + u) * UNIT_BYTES), group_bytes);
            let i = 2 * units4 + 4 * u;
            add_dots(&mut sums, masked::<T, 0>(units, pair), query, i);
            add_dots(&mut sums, masked::<T, 2>(units, pair), query, i + 1);
            add_dots(&mut sums, masked::<T, 4>(units, pair), query, i + 2);
            add_dots(&mut sums, masked::<T, 6>(units, pair), query, i + 3);
        }
        let (token, n_left) = (first * GROUP_TOKENS, block.n_tokens - first * GROUP_TOKENS);
        for (g, sums) in sums.into_iter().enumerate() {
            weighing.take(g, sums, n_left, out.add(g * block.stride + token));
        }
    }
}

/// One unit of each of T groups of tokens.
///
/// # Safety
/// AVX-512 is there, and so are these units.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn units<const T: usize>(at: *const u8, group_bytes: usize) -> [__m512i; T] {
    let mut units = [_mm512_setzero_si512(); T];
    for (t, unit) in units.iter_mut().enumerate() {
        // SAFETY: by the contract.
        *unit = unsafe { _mm512_loadu_si512(at.add(t * group_bytes).cast()) };
    }
    units
}

/// The codes of four neighbouring channels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn masked<const T: usize, const SHIFT: u32>(units: [__m512i; T], mask: __m512i) -> [__m512i; T] {
    let mut codes = units;
    for code in &mut codes {
        *code = _mm512_and_si512(_mm512_srli_epi16::<SHIFT>(*code), mask);
    }
    codes
}

/// Adds the products of codes with dword i of each query.
///
/// # Safety
/// AVX-512 VNNI is there, and this dword of G queries is written.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn add_dots<const G: usize, const T: usize>(
    sums: &mut [[__m512i; T]; G],
    codes: [__m512i; T],
    query: &Quantised,
    i: usize,
) {
    for (g, sums) in sums.iter_mut().enumerate() {
        // SAFETY: by the contract.
        let quad = _mm512_set1_epi32(unsafe { query.quad(g, i) });
        for (sum, codes) in sums.iter_mut().zip(codes) {
            *sum = _mm512_dpbusd_epi32(*sum, codes, quad);
        }
    }
}

/// The largest sum that a unit of 4-bit or of 2-bit channels adds to one lane of i16: two
/// neighbouring products a quad.
const UNIT4_SUM: usize = 2 * 2 * 15 * 127;
const UNIT2_SUM: usize = 4 * 2 * 3 * 127;

/// Dwords of a query at the most where whole sums stay within i16.
const WIDE_QUADS: usize = 40;

const _: () = assert!(WIDE_QUADS >= 4 * (i16::MAX as usize / UNIT2_SUM));
const _: () = assert!(WIDE_QUADS >= 2 * (i16::MAX as usize / UNIT4_SUM) + 4);

/// Each of the queries' dwords, eight times over.
type Wide = [[MaybeUninit<__m256i>; GROUP]; WIDE_QUADS];

/// Eight tokens at a time, by queries' dwords that are laid out as vectors before: they are then
/// operands in memory, and sums, codes and products stay in registers. The whole sum must stay
/// within i16, which it does up to 16 channels of 4 bits and 80 of 2; others go another way.
///
/// # Safety
/// As [`dot_avx512`], with AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_avx2<const G: usize>(
    block: &Block,
    query: &Quantised,
    reference: &[f32; GROUP],
    out: *mut f32,
) -> Weighed {
    let (units4, units2) = (block.shape.n4 / 8, block.shape.n2 / 16);
    if units4 * UNIT4_SUM + units2 * UNIT2_SUM > i16::MAX as usize {
        // SAFETY: the same contract.
        return unsafe { dot_halves_avx2::<G>(block, query, reference, out) };
    }
    let mut wide: Wide = [const { [MaybeUninit::uninit(); GROUP] }; WIDE_QUADS];
    for (i, wide) in wide.iter_mut().enumerate().take(2 * units4 + 4 * units2) {
        for (g, wide) in wide.iter_mut().enumerate().take(G) {
            // SAFETY: G queries are quantised, this many dwords each.
            wide.write(_mm256_set1_epi32(unsafe { query.quad(g, i) }));
        }
    }
    let (nibble, pair) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
    let ones = _mm256_set1_epi16(1);
    let group_bytes = block.shape.group_bytes();
    // SAFETY: this function has the features.
    let mut weighing = unsafe { Weighing::<F32x8, G>::new(query, reference) };
    for half in (0..block.n_tokens).step_by(GROUP_TOKENS / 2) {
        let mut sums = [_mm256_setzero_si256(); G];
        // SAFETY: as in dot_avx512; a half's bytes are each unit's first or second 32.
        unsafe {
            let mut at = block.codes.as_ptr().add(half / GROUP_TOKENS * group_bytes);
            at = at.add(half % GROUP_TOKENS * 4);
            for u in 0..units4 {
                let unit = _mm256_loadu_si256(at.cast());
                at = at.add(UNIT_BYTES);
                let low = _mm256_and_si256(unit, nibble);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(unit), nibble);
                add_products(&mut sums, &wide, 2 * u, low, high);
            }
            for u in 0..units2 {
                let unit = _mm256_loadu_si256(at.cast());
                at = at.add(UNIT_BYTES);
                let i = 2 * units4 + 4 * u;
                let first = _mm256_and_si256(unit, pair);
                let second = _mm256_and_si256(_mm256_srli_epi16::<2>(unit), pair);
                add_products(&mut sums, &wide, i, first, second);
                let third = _mm256_and_si256(_mm256_srli_epi16::<4>(unit), pair);
                let fourth = _mm256_and_si256(_mm256_srli_epi16::<6>(unit), pair);
                add_products(&mut sums, &wide, i + 2, third, fourth);
            }
            for (g, sum) in sums.into_iter().enumerate() {
                let n_left = block.n_tokens.saturating_sub(half);
                let to = out.add(g * block.stride + half);
                weighing.take(g, [_mm256_madd_epi16(sum, ones)], n_left, to);
            }
        }
    }
    // SAFETY: this function has the features.
    unsafe { weighing.done() }
}

/// Adds the products of two neighbouring quads of codes with dwords i and i + 1 of each query.
///
/// # Safety
/// AVX2 is there, and these dwords of G queries are laid out.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_products<const G: usize>(
    sums: &mut [__m256i; G],
    wide: &Wide,
    i: usize,
    first: __m256i,
    second: __m256i,
) {
    for (g, sum) in sums.iter_mut().enumerate() {
        // SAFETY: by the contract.
        let (q, next) = unsafe {
            let rows = (wide.get_unchecked(i), wide.get_unchecked(i + 1));
            (rows.0.get_unchecked(g).assume_init(), rows.1.get_unchecked(g).assume_init())
        };
        let products =
            _mm256_add_epi16(_mm256_maddubs_epi16(first, q), _mm256_maddubs_epi16(second, next));
        *sum = _mm256_add_epi16(*sum, products);
    }
}

/// Two halves of 8 tokens. Sums of byte products stay within i16: 4 * 15 * 127 for a 4-bit unit,
/// 8 * 3 * 127 for one of 2 bits.
///
/// # Safety
/// As [`dot_avx512`], with AVX2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_halves_avx2<const G: usize>(
    block: &Block,
    query: &Quantised,
    reference: &[f32; GROUP],
    out: *mut f32,
) -> Weighed {
    let (units4, units2) = (block.shape.n4 / 8, block.shape.n2 / 16);
    let (nibble, pair) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
    let ones = _mm256_set1_epi16(1);
    let group_bytes = block.shape.group_bytes();
    // SAFETY: this function has the features.
    let mut weighing = unsafe { Weighing::<F32x8, G>::new(query, reference) };
    for half in (0..block.n_tokens).step_by(GROUP_TOKENS / 2) {
        let mut sums = [_mm256_setzero_si256(); G];
        // SAFETY: as in dot_avx512; a half's bytes are each unit's first or second 32.
        unsafe {
            let mut at = block.codes.as_ptr().add(half / GROUP_TOKENS * group_bytes);
            at = at.add(half % GROUP_TOKENS * 4);
            for u in 0..units4 {
                let unit = _mm256_loadu_si256(at.cast());
                at = at.add(UNIT_BYTES);
                let low = _mm256_and_si256(unit, nibble);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(unit), nibble);
                for (g, sum) in sums.iter_mut().enumerate() {
                    let quad = |i| _mm256_set1_epi32(query.quad(g, i));
                    let products = _mm256_add_epi16(
                        _mm256_maddubs_epi16(low, quad(2 * u)),
                        _mm256_maddubs_epi16(high, quad(2 * u + 1)),
                    );
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(products, ones));
                }
            }
            for u in 0..units2 {
                let unit = _mm256_loadu_si256(at.cast());
                at = at.add(UNIT_BYTES);
                let first = _mm256_and_si256(unit, pair);
                let second = _mm256_and_si256(_mm256_srli_epi16::<2>(unit), pair);
                let third = _mm256_and_si256(_mm256_srli_epi16::<4>(unit), pair);
                let fourth = _mm256_and_si256(_mm256_srli_epi16::<6>(unit), pair);
                let i = 2 * units4 + 4 * u;
                for (g, sum) in sums.iter_mut().enumerate() {
                    let quad = |i| _mm256_set1_epi32(query.quad(g, i));
                    let products = _mm256_add_epi16(
                        _mm256_add_epi16(
                            _mm256_maddubs_epi16(first, quad(i)),
                            _mm256_maddubs_epi16(second, quad(i + 1)),
                        ),
                        _mm256_add_epi16(
                            _mm256_maddubs_epi16(third, quad(i + 2)),
                            _mm256_maddubs_epi16(fourth, quad(i + 3)),
                        ),
                    );
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(products, ones));
                }
            }
            for (g, sum) in sums.into_iter().enumerate() {
                let n_left = block.n_tokens.saturating_sub(half);
                let to = out.add(g * block.stride + half);
                weighing.take(g, [sum], n_left, to);
            }
        }
    }
    // SAFETY: this function has the features.
    unsafe { weighing.done() }
}
