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

use super::super::exp::powers;
use super::super::simd::{F32x8, F32x16, Vector, four};
use super::{
    BlockSums, Few, GROUP, GROUP_TOKENS, MAX_CHANNELS, ScoredBlock as Block, SketchRun,
    SketchShape, UNIT_BYTES, Weighed,
};
use std::arch::x86_64::*;
use std::f32::consts::LOG2_E;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Dwords of a query's bytes, and a vector's worth to write past them.
const QUADS: usize = MAX_CHANNELS / 4 + 4;

/// Queries as bytes, four channels a dword, and what turns the integer sums into scores.
struct Quantised {
    quads: [[MaybeUninit<i32>; QUADS]; GROUP],
    /// For scores as logarithms to base 2, less the reference.
    step: [f32; GROUP],
    base: [f32; GROUP],
}

impl Quantised {
    /// # Safety
    /// Query `g` has been written as far as dword `i`.
    #[inline(always)]
    unsafe fn quad(&self, g: usize, i: usize) -> i32 {
        // SAFETY: by the contract.
        unsafe { self.quads.get_unchecked(g).get_unchecked(i).assume_init() }
    }
}

/// The entries of one vector width, given its dot product: one block's scores by a few queries, and
/// a run of blocks.
macro_rules! entry {
    ($scores:ident, $run:ident, $vector:ty, $dot:ident, $features:literal) => {
        #[target_feature(enable = $features)]
        pub fn $run(run: &SketchRun, weights: &mut [f32], sums: &mut BlockSums) -> usize {
            run.score(
                weights,
                sums,
                |block, codes, few, out| $scores(block, codes, few, out),
                // SAFETY: this function has the features of the vector, and a line has whole
                // groups of tokens.
                |block, few, lines| unsafe { weigh::<$vector>(block, few, lines) },
            )
        }

        #[target_feature(enable = $features)]
        pub fn $scores(block: &Block, codes: &[u8], few: &Few, out: &mut [f32]) {
            let mut quantised = Quantised {
                quads: [const { [MaybeUninit::uninit(); QUADS] }; GROUP],
                step: [0.0; GROUP],
                base: [0.0; GROUP],
            };
            let out = out.as_mut_ptr();
            // SAFETY: this function has the features of the vector, the door checked the lengths,
            // and these queries and their lines of `out` exist.
            unsafe {
                match few.n {
                    1 => {
                        quantise::<$vector, 1>(block, few, &mut quantised);
                        $dot::<1>(block, codes, &quantised, out)
                    }
                    2 => {
                        quantise::<$vector, 2>(block, few, &mut quantised);
                        $dot::<2>(block, codes, &quantised, out)
                    }
                    3 => {
                        quantise::<$vector, 3>(block, few, &mut quantised);
                        $dot::<3>(block, codes, &quantised, out)
                    }
                    _ => {
                        quantise::<$vector, 4>(block, few, &mut quantised);
                        $dot::<4>(block, codes, &quantised, out)
                    }
                }
            }
        }
    };
}

entry!(scores_avx2, run_avx2, F32x8, dot_avx2, "avx2,fma,f16c");
entry!(
    scores_avx512,
    run_avx512,
    F32x16,
    dot_avx512,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c"
);

/// Turns the lines of a few queries into weights. What a line has beyond the block's tokens, up to
/// a whole group, becomes too small to count.
///
/// # Safety
/// The features of `V` are there, and each line has whole groups of tokens.
#[inline(always)]
unsafe fn weigh<V: Vector>(block: &Block, few: &Few, lines: &mut [f32]) -> Weighed {
    let padded = block.n_tokens.next_multiple_of(GROUP_TOKENS);
    // SAFETY: by the contract; a group is a whole number of vectors.
    unsafe {
        let mut tops = [V::splat(f32::NEG_INFINITY); GROUP];
        let mut sums = [V::splat(0.0); GROUP];
        for (g, line) in lines.chunks_mut(block.stride).enumerate().take(few.n) {
            line[block.n_tokens..padded].fill(f32::NEG_INFINITY);
            (tops[g % GROUP], sums[g % GROUP]) = powers::<V>(&mut line[..padded]);
        }
        Weighed { top: four(V::max4(tops)), sum: four(V::sum4(sums)) }
    }
}

/// The first G of these queries as bytes.
///
/// # Safety
/// The features of `V` are there, these queries exist, and lengths are as the door checked them.
#[inline(always)]
unsafe fn quantise<V: Vector, const G: usize>(block: &Block, few: &Few, to: &mut Quantised) {
    let (SketchShape { n4, n2 }, g) = (block.shape, few.first);
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
        let (inverse, step4, step) = (four(inverse), step, four(step));
        to.step = four(_mm_mul_ps(step4, _mm_set1_ps(LOG2_E)));
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
        let reference = _mm_loadu_ps(few.reference.as_ptr());
        let offsets = _mm_sub_ps(_mm_loadu_ps(offsets.as_ptr()), reference);
        let base = _mm_add_ps(V::sum4(base), offsets);
        to.base = four(_mm_mul_ps(base, _mm_set1_ps(LOG2_E)));
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

/// # Safety
/// AVX-512 VNNI is there, G queries are quantised, lengths are as the door checked them and `out`
/// is the first query's line.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_avx512<const G: usize>(
    block: &Block,
    codes: &[u8],
    query: &Quantised,
    out: *mut f32,
) {
    let (units4, units2) = (block.shape.n4 / 8, block.shape.n2 / 16);
    let (nibble, pair) = (_mm512_set1_epi8(15), _mm512_set1_epi8(3));
    let mut at = codes.as_ptr();
    for tokens in (0..block.n_tokens).step_by(GROUP_TOKENS) {
        let mut sums = [_mm512_setzero_si512(); G];
        // SAFETY: a group of tokens has units4 + units2 units, each query two or four dwords for
        // each, and each line room for 16 tokens.
        unsafe {
            for u in 0..units4 {
                let unit = _mm512_loadu_si512(at.cast());
                at = at.add(UNIT_BYTES);
                let low = _mm512_and_si512(unit, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(unit), nibble);
                for (g, sum) in sums.iter_mut().enumerate() {
                    let quad = |i| _mm512_set1_epi32(query.quad(g, i));
                    *sum = _mm512_dpbusd_epi32(*sum, low, quad(2 * u));
                    *sum = _mm512_dpbusd_epi32(*sum, high, quad(2 * u + 1));
                }
            }
            for u in 0..units2 {
                let unit = _mm512_loadu_si512(at.cast());
                at = at.add(UNIT_BYTES);
                let first = _mm512_and_si512(unit, pair);
                let second = _mm512_and_si512(_mm512_srli_epi16::<2>(unit), pair);
                let third = _mm512_and_si512(_mm512_srli_epi16::<4>(unit), pair);
                let fourth = _mm512_and_si512(_mm512_srli_epi16::<6>(unit), pair);
                let i = 2 * units4 + 4 * u;
                for (g, sum) in sums.iter_mut().enumerate() {
                    let quad = |i| _mm512_set1_epi32(query.quad(g, i));
                    *sum = _mm512_dpbusd_epi32(*sum, first, quad(i));
                    *sum = _mm512_dpbusd_epi32(*sum, second, quad(i + 1));
                    *sum = _mm512_dpbusd_epi32(*sum, third, quad(i + 2));
                    *sum = _mm512_dpbusd_epi32(*sum, fourth, quad(i + 3));
                }
            }
            for (g, sum) in sums.into_iter().enumerate() {
                let (step, base) = (_mm512_set1_ps(query.step[g]), _mm512_set1_ps(query.base[g]));
                let scores = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, base);
                _mm512_storeu_ps(out.add(g * block.stride + tokens), scores);
            }
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
unsafe fn dot_avx2<const G: usize>(block: &Block, codes: &[u8], query: &Quantised, out: *mut f32) {
    let (units4, units2) = (block.shape.n4 / 8, block.shape.n2 / 16);
    if units4 * UNIT4_SUM + units2 * UNIT2_SUM > i16::MAX as usize {
        // SAFETY: the same contract.
        return unsafe { dot_halves_avx2::<G>(block, codes, query, out) };
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
    let group_bytes = (units4 + units2) * UNIT_BYTES;
    for half in (0..block.n_tokens).step_by(GROUP_TOKENS / 2) {
        let mut sums = [_mm256_setzero_si256(); G];
        // SAFETY: as in dot_avx512; a half's bytes are each unit's first or second 32.
        unsafe {
            let mut at = codes.as_ptr().add(half / GROUP_TOKENS * group_bytes);
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
                let (step, base) = (_mm256_set1_ps(query.step[g]), _mm256_set1_ps(query.base[g]));
                let sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, ones));
                _mm256_storeu_ps(
                    out.add(g * block.stride + half),
                    _mm256_fmadd_ps(sum, step, base),
                );
            }
        }
    }
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
    codes: &[u8],
    query: &Quantised,
    out: *mut f32,
) {
    let (units4, units2) = (block.shape.n4 / 8, block.shape.n2 / 16);
    let (nibble, pair) = (_mm256_set1_epi8(15), _mm256_set1_epi8(3));
    let ones = _mm256_set1_epi16(1);
    let group_bytes = (units4 + units2) * UNIT_BYTES;
    for half in (0..block.n_tokens).step_by(GROUP_TOKENS / 2) {
        let mut sums = [_mm256_setzero_si256(); G];
        // SAFETY: as in dot_avx512; a half's bytes are each unit's first or second 32.
        unsafe {
            let mut at = codes.as_ptr().add(half / GROUP_TOKENS * group_bytes);
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
                let (step, base) = (_mm256_set1_ps(query.step[g]), _mm256_set1_ps(query.base[g]));
                let scores = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), step, base);
                _mm256_storeu_ps(out.add(g * block.stride + half), scores);
            }
        }
    }
}
