//! Vectors of f32 on x86-64, so that a kernel is written once for both widths.
//!
//! A kernel generic over [`Vector`] is `#[inline(always)]` and is instantiated inside a function
//! that has the matching `#[target_feature]`; there, and only there, its methods become single
//! instructions. [`Level`](super::Level) proves that the machine has them.

use std::arch::x86_64::*;

/// # Safety
/// Every method may be called only where the vector's instructions exist: AVX2, FMA and F16C for
/// [`F32x8`], and AVX-512 F, BW, VL and DQ for [`F32x16`]. Pointers need no alignment and are
/// valid for the `LANES` elements, or the `n <= LANES` of a `_part` method, that it names; lanes
/// beyond a part are 0 and their memory is not touched.
pub(super) trait Vector: Copy {
    const LANES: usize;
    /// As many whole numbers.
    type Sums: Copy;
    unsafe fn from_sums(sums: Self::Sums) -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_part(from: *const f32, n: usize) -> Self;
    /// LANES signed bytes.
    unsafe fn load_i8(from: *const u8) -> Self;
    unsafe fn load_i8_part(from: *const u8, n: usize) -> Self;
    /// LANES f16.
    unsafe fn load_f16(from: *const u8) -> Self;
    unsafe fn load_f16_part(from: *const u8, n: usize) -> Self;
    /// LANES 2-bit codes, from LANES / 4 bytes.
    unsafe fn load_u2(from: *const u8) -> Self;
    /// n 2-bit codes, n a multiple of 4.
    unsafe fn load_u2_part(from: *const u8, n: usize) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn store_part(self, to: *mut f32, n: usize);
    /// LANES f16, to nearest even.
    unsafe fn store_f16(self, to: *mut u8);
    /// The lowest byte of each lane's bits.
    unsafe fn store_low_bytes(self, to: *mut u8);
    /// The larger of |self| and |other|.
    unsafe fn max_abs(self, other: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn min(self, other: Self) -> Self;
    /// self * factor + add.
    unsafe fn fma(self, factor: Self, add: Self) -> Self;
    unsafe fn round(self) -> Self;
    /// self * 2^n for whole n in -126..=128, self in 0.7..1.42, the product finite.
    unsafe fn scale(self, n: Self) -> Self;
    /// As `scale`, with n in the lowest bits of `bits`.
    unsafe fn scale_by_low_bits(self, bits: Self) -> Self;
    /// self where x >= limit, else 0 (NaN is not).
    unsafe fn where_at_least(self, x: Self, limit: Self) -> Self;
    /// One bit for each lane that is greater than `limit`'s.
    unsafe fn above(self, limit: Self) -> u32;
    /// Writes the lanes whose bit is set, without gaps. LANES of them may be overwritten.
    unsafe fn store_some(self, lanes: u32, to: *mut f32);
    /// Writes the numbers, from `first` on, of the lanes whose bit is set. LANES of them may be
    /// overwritten.
    unsafe fn numbers_of(lanes: u32, first: u32, to: *mut u32);
    /// The sum of each vector's lanes.
    unsafe fn sum4(vectors: [Self; 4]) -> __m128;
    /// The largest of each vector's lanes.
    unsafe fn max4(vectors: [Self; 4]) -> __m128;
}

#[derive(Clone, Copy)]
pub(super) struct F32x8(__m256);

#[derive(Clone, Copy)]
pub(super) struct F32x16(__m512);

/// Wraps each body in the one `unsafe` block that the trait's contract covers.
macro_rules! methods {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident : $kind:ty),*) -> $result:ty $body:block)*) => {
        $($(#[$attribute])*
        #[inline(always)]
        unsafe fn $name($($argument: $kind),*) -> $result {
            // SAFETY: the trait's contract: the instructions exist, the pointers are valid.
            unsafe { $body }
        })*
    };
}

/// `n` elements of `T` and zeros up to `N`.
///
/// # Safety
/// `from` is valid for `n <= N` elements.
#[inline(always)]
unsafe fn padded<T: Copy + Default, const N: usize>(from: *const T, n: usize) -> [T; N] {
    let mut buffer = [T::default(); N];
    // SAFETY: by the contract; a byte-wise copy asks nothing of alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(
            from.cast::<u8>(),
            buffer.as_mut_ptr().cast::<u8>(),
            n * size_of::<T>(),
        )
    };
    buffer
}

/// The numbers of the bits that are set, for each byte.
static SET_BITS: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut bit, mut n) = (0, 0);
        while bit < 8 {
            if byte >> bit & 1 == 1 {
                table[byte][n] = bit;
                n += 1;
            }
            bit += 1;
        }
        byte += 1;
    }
    table
};

impl Vector for F32x8 {
    const LANES: usize = 8;
    type Sums = __m256i;
    methods! {
        fn from_sums(sums: __m256i) -> Self { Self(_mm256_cvtepi32_ps(sums)) }
        fn splat(value: f32) -> Self { Self(_mm256_set1_ps(value)) }
        fn load(from: *const f32) -> Self { Self(_mm256_loadu_ps(from)) }
        fn load_part(from: *const f32, n: usize) -> Self {
            if n == 8 { Self::load(from) } else { Self::load(padded::<f32, 8>(from, n).as_ptr()) }
        }
        fn load_i8(from: *const u8) -> Self {
            Self(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))))
        }
        fn load_i8_part(from: *const u8, n: usize) -> Self {
            Self::load_i8(padded::<u8, 8>(from, n).as_ptr())
        }
        fn load_f16(from: *const u8) -> Self {
            Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())))
        }
        fn load_f16_part(from: *const u8, n: usize) -> Self {
            if n == 8 {
                return Self::load_f16(from);
            }
            Self::load_f16(padded::<u16, 8>(from.cast(), n).as_ptr().cast())
        }
        fn load_u2(from: *const u8) -> Self {
            let bits = i32::from(from.cast::<u16>().read_unaligned());
            let shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
            let codes = _mm256_srlv_epi32(_mm256_set1_epi32(bits), shifts);
            Self(_mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(3))))
        }
        fn load_u2_part(from: *const u8, n: usize) -> Self {
            Self::load_u2(padded::<u8, 2>(from, n / 4).as_ptr())
        }
        fn store(self: Self, to: *mut f32) -> () { _mm256_storeu_ps(to, self.0) }
        fn store_part(self: Self, to: *mut f32, n: usize) -> () {
            let mut buffer = [0.0f32; 8];
            self.store(buffer.as_mut_ptr());
            std::ptr::copy_nonoverlapping(buffer.as_ptr(), to, n);
        }
        fn store_f16(self: Self, to: *mut u8) -> () {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
        }
        fn store_low_bytes(self: Self, to: *mut u8) -> () {
            let low = _mm256_and_si256(_mm256_castps_si256(self.0), _mm256_set1_epi32(255));
            let high = _mm256_extracti128_si256::<1>(low);
            let words = _mm_packus_epi32(_mm256_castsi256_si128(low), high);
            _mm_storel_epi64(to.cast(), _mm_packus_epi16(words, words));
        }
        fn max_abs(self: Self, other: Self) -> Self {
            let sign = _mm256_set1_ps(-0.0);
            Self(_mm256_max_ps(_mm256_andnot_ps(sign, self.0), _mm256_andnot_ps(sign, other.0)))
        }
        fn add(self: Self, other: Self) -> Self { Self(_mm256_add_ps(self.0, other.0)) }
        fn sub(self: Self, other: Self) -> Self { Self(_mm256_sub_ps(self.0, other.0)) }
        fn mul(self: Self, other: Self) -> Self { Self(_mm256_mul_ps(self.0, other.0)) }
        fn max(self: Self, other: Self) -> Self { Self(_mm256_max_ps(self.0, other.0)) }
        fn min(self: Self, other: Self) -> Self { Self(_mm256_min_ps(self.0, other.0)) }
        fn fma(self: Self, factor: Self, add: Self) -> Self {
            Self(_mm256_fmadd_ps(self.0, factor.0, add.0))
        }
        fn round(self: Self) -> Self {
            Self(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0))
        }
        fn scale(self: Self, n: Self) -> Self {
            let exponent = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n.0));
            Self(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(self.0), exponent)))
        }
        fn scale_by_low_bits(self: Self, bits: Self) -> Self {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(bits.0));
            Self(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(self.0), exponent)))
        }
        fn where_at_least(self: Self, x: Self, limit: Self) -> Self {
            Self(_mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_GE_OQ>(x.0, limit.0)))
        }
        fn above(self: Self, limit: Self) -> u32 {
            _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(self.0, limit.0)) as u32
        }
        fn store_some(self: Self, lanes: u32, to: *mut f32) -> () {
            let places = _mm_loadl_epi64(SET_BITS[lanes as usize & 255].as_ptr().cast());
            Self(_mm256_permutevar8x32_ps(self.0, _mm256_cvtepu8_epi32(places))).store(to)
        }
        fn numbers_of(lanes: u32, first: u32, to: *mut u32) -> () {
            let places = _mm_loadl_epi64(SET_BITS[lanes as usize & 255].as_ptr().cast());
            let first = _mm256_set1_epi32(first as i32);
            let numbers = _mm256_add_epi32(_mm256_cvtepu8_epi32(places), first);
            _mm256_storeu_si256(to.cast(), numbers);
        }
        fn sum4(vectors: [Self; 4]) -> __m128 {
            let [a, b, c, d] = vectors;
            let (ab, cd) = (_mm256_hadd_ps(a.0, b.0), _mm256_hadd_ps(c.0, d.0));
            let halves = _mm256_hadd_ps(ab, cd);
            _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves))
        }
        fn max4(vectors: [Self; 4]) -> __m128 {
            let [a, b, c, d] = vectors;
            let ab = _mm256_max_ps(_mm256_unpacklo_ps(a.0, b.0), _mm256_unpackhi_ps(a.0, b.0));
            let cd = _mm256_max_ps(_mm256_unpacklo_ps(c.0, d.0), _mm256_unpackhi_ps(c.0, d.0));
            // abab and cdcd in each half.
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let halves = _mm256_max_ps(low, high);
            _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves))
        }
    }
}

impl F32x16 {
    methods! {
        /// The sum of the lower and the upper half.
        fn halves(self: Self) -> F32x8 {
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            F32x8(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
        /// The larger of the lower and the upper half, lane by lane.
        fn larger_half(self: Self) -> F32x8 {
            let high = _mm512_extractf32x8_ps::<1>(self.0);
            F32x8(_mm256_max_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
}

/// The lowest `n` bits.
#[inline(always)]
fn lowest(n: usize) -> u16 {
    ((1u32 << n) - 1) as u16
}

impl Vector for F32x16 {
    const LANES: usize = 16;
    type Sums = __m512i;
    methods! {
        fn from_sums(sums: __m512i) -> Self { Self(_mm512_cvtepi32_ps(sums)) }
        fn splat(value: f32) -> Self { Self(_mm512_set1_ps(value)) }
        fn load(from: *const f32) -> Self { Self(_mm512_loadu_ps(from)) }
        fn load_part(from: *const f32, n: usize) -> Self {
            Self(_mm512_maskz_loadu_ps(lowest(n), from))
        }
        fn load_i8(from: *const u8) -> Self {
            Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))))
        }
        fn load_i8_part(from: *const u8, n: usize) -> Self {
            let bytes = _mm_maskz_loadu_epi8(lowest(n), from.cast());
            Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
        }
        fn load_f16(from: *const u8) -> Self {
            Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())))
        }
        fn load_f16_part(from: *const u8, n: usize) -> Self {
            Self(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lowest(n), from.cast())))
        }
        fn load_u2(from: *const u8) -> Self {
            let bits = from.cast::<i32>().read_unaligned();
            let shifts =
                _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let codes = _mm512_srlv_epi32(_mm512_set1_epi32(bits), shifts);
            Self(_mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(3))))
        }
        fn load_u2_part(from: *const u8, n: usize) -> Self {
            Self::load_u2(padded::<u8, 4>(from, n / 4).as_ptr())
        }
        fn store(self: Self, to: *mut f32) -> () { _mm512_storeu_ps(to, self.0) }
        fn store_part(self: Self, to: *mut f32, n: usize) -> () {
            _mm512_mask_storeu_ps(to, lowest(n), self.0)
        }
        fn store_f16(self: Self, to: *mut u8) -> () {
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm256_storeu_si256(to.cast(), halves)
        }
        fn store_low_bytes(self: Self, to: *mut u8) -> () {
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(self.0)))
        }
        fn max_abs(self: Self, other: Self) -> Self {
            // Larger magnitude, sign cleared.
            Self(_mm512_range_ps::<0b1011>(self.0, other.0))
        }
        fn add(self: Self, other: Self) -> Self { Self(_mm512_add_ps(self.0, other.0)) }
        fn sub(self: Self, other: Self) -> Self { Self(_mm512_sub_ps(self.0, other.0)) }
        fn mul(self: Self, other: Self) -> Self { Self(_mm512_mul_ps(self.0, other.0)) }
        fn max(self: Self, other: Self) -> Self { Self(_mm512_max_ps(self.0, other.0)) }
        fn min(self: Self, other: Self) -> Self { Self(_mm512_min_ps(self.0, other.0)) }
        fn fma(self: Self, factor: Self, add: Self) -> Self {
            Self(_mm512_fmadd_ps(self.0, factor.0, add.0))
        }
        fn round(self: Self) -> Self {
            Self(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0))
        }
        fn scale(self: Self, n: Self) -> Self { Self(_mm512_scalef_ps(self.0, n.0)) }
        fn scale_by_low_bits(self: Self, bits: Self) -> Self {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(bits.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(self.0), exponent)))
        }
        fn where_at_least(self: Self, x: Self, limit: Self) -> Self {
            Self(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x.0, limit.0), self.0))
        }
        fn above(self: Self, limit: Self) -> u32 {
            u32::from(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, limit.0))
        }
        fn store_some(self: Self, lanes: u32, to: *mut f32) -> () {
            // To a register: written to memory by the instruction itself, it takes 100 cycles.
            Self(_mm512_maskz_compress_ps(lanes as u16, self.0)).store(to)
        }
        fn numbers_of(lanes: u32, first: u32, to: *mut u32) -> () {
            let count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let numbers = _mm512_add_epi32(count, _mm512_set1_epi32(first as i32));
            _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi32(lanes as u16, numbers));
        }
        fn sum4(vectors: [Self; 4]) -> __m128 {
            // Written out: a closure would be a function without the vectors' features.
            let [a, b, c, d] = vectors;
            F32x8::sum4([a.halves(), b.halves(), c.halves(), d.halves()])
        }
        fn max4(vectors: [Self; 4]) -> __m128 {
            let [a, b, c, d] = vectors;
            F32x8::max4([a.larger_half(), b.larger_half(), c.larger_half(), d.larger_half()])
        }
    }
}

/// The lanes of a small vector.
#[inline(always)]
pub(super) fn four(vector: __m128) -> [f32; 4] {
    // SAFETY: both are four f32.
    unsafe { std::mem::transmute(vector) }
}
