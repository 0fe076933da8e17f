//! Vectors of `f32` for kernels that are written once and compiled for each instruction set.
//!
//! A kernel is an `#[inline(always)]` function that is generic over `Vector`. For each [`Level`], a function with the
//! level's `#[target_feature]`s calls it. The methods of `Vector` are unsafe, because calling them without these
//! features is undefined behavior.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::sync::OnceLock;

use half::bf16;

use super::bf16::rounded;

/// An instruction set that kernels are compiled for. Results have the same bits on all levels, with one exception:
/// [`Level::Avx512`] may multiply bf16 operands [in pairs](super::peak::Bf16Products).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Arrays of eight floats, which the compiler vectorizes as far as the target allows.
    Portable,
    /// NEON, which every 64-bit Arm has: four lanes.
    Neon,
    /// AVX2 with fused multiply-add: eight lanes.
    Avx2,
    /// AVX-512F: sixteen lanes.
    Avx512,
}

impl Level {
    /// Every level, best last.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Neon, Self::Avx2, Self::Avx512];

    /// True if this machine supports the level.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Neon => cfg!(target_arch = "aarch64"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f") && Self::Avx2.is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// Returns the best level that this machine supports. Detected once.
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Self::ALL.into_iter().rfind(|level| level.is_available()).unwrap_or(Self::Portable))
    }
}

/// Prefetches the cache line at an address that will be read soon, into the second-level cache. Few lines may be on their
/// way to the first level at a time, and reads would wait for them. Any address is allowed, because it is not dereferenced.
#[inline(always)]
pub(super) fn prefetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address has no effect that can be observed.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Prefetches `len` elements that begin `ahead` elements after `from`. They need not exist.
#[inline(always)]
pub fn prefetch_row<T>(from: *const T, ahead: usize, len: usize) {
    for line in (0..len).step_by(64 / size_of::<T>()) {
        prefetch(from.wrapping_add(ahead + line).cast());
    }
}

/// A register of `f32` lanes.
///
/// # Safety
/// Every method requires the features of the implementing type's level. `load` and `store` require [`Vector::LANES`]
/// floats at the pointer, which need not be aligned.
pub(super) trait Vector: Copy {
    const LANES: usize;
    /// True if a lane of an operand holds two bf16 values, adjacent along k. [`Vector::mul_add`] then adds both
    /// products to a sum.
    const IS_PAIRS: bool = false;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Rounds a lane to bf16.
    #[inline(always)]
    fn round(lane: f32) -> bf16 {
        rounded(lane)
    }
    /// Stores the lanes rounded to bf16 (see [`Vector::round`]). If the compiler vectorizes the loop, the lanes stay in a
    /// register.
    #[inline(always)]
    unsafe fn store_rounded(self, to: *mut bf16) {
        let mut lanes = [0.0; 16];
        // SAFETY: the caller has the level's features, and passes room for `LANES` bf16. No vector has more lanes
        // than the buffer.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (i, &lane) in lanes[..Self::LANES].iter().enumerate() {
                *to.add(i) = Self::round(lane);
            }
        }
    }
    unsafe fn add(self, other: Self) -> Self;
    /// Returns `self` × `factor` + `term`, rounded once.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// Transposes a square block of floats, whose rows are `from_row` floats apart. Calls `to` with each column's
    /// index and values, in order.
    unsafe fn transpose(from: *const f32, from_row: usize, to: impl FnMut(usize, Self));
}

/// Implements [`Vector`] for a type whose intrinsics have the signatures of the methods.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! vector {
    (
        $register:ty, $lanes:literal, $splat:ident, $load:ident, $store:ident, $add:ident, $mul_add:ident,
        $transpose:ident
    ) => {
        impl Vector for $register {
            const LANES: usize = $lanes;

            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the caller has the level's features.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: the caller has the level's features and gives `LANES` readable floats.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: the caller has the level's features and gives `LANES` writable floats.
                unsafe { $store(to, self) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller has the level's features.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
                // SAFETY: the caller has the level's features.
                unsafe { $mul_add(self, factor, term) }
            }
            #[inline(always)]
            unsafe fn transpose(from: *const f32, from_row: usize, to: impl FnMut(usize, Self)) {
                // SAFETY: the caller has the level's features and gives `LANES` rows of `LANES` floats.
                unsafe { $transpose(from, from_row, to) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vector!(__m512, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps, transpose_16);
#[cfg(target_arch = "x86_64")]
vector!(__m256, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_fmadd_ps, transpose_8);

#[cfg(target_arch = "aarch64")]
vector!(float32x4_t, 4, vdupq_n_f32, vld1q_f32, vst1q_f32, vaddq_f32, mul_add_4, transpose_4);

/// A register of f32 sums, or of pairs of bf16 operands, depending on the use.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Pairs(__m512);

#[cfg(target_arch = "x86_64")]
impl Vector for Pairs {
    const LANES: usize = 16;
    const IS_PAIRS: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller has the level's features.
        Self(unsafe { _mm512_set1_ps(x) })
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives sixteen readable floats.
        Self(unsafe { _mm512_loadu_ps(from) })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives sixteen writable floats.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    /// Subnormals become zeros, because products of pairs read them as zeros.
    #[inline(always)]
    fn round(lane: f32) -> bf16 {
        rounded(if lane.is_subnormal() { 0.0f32.copysign(lane) } else { lane })
    }
    #[inline(always)]
    unsafe fn store_rounded(self, to: *mut bf16) {
        // SAFETY: the caller has the level's features and `avx512bf16`, and gives sixteen writable bf16.
        unsafe { to.cast::<__m256bh>().write_unaligned(_mm512_cvtneps_pbh(self.0)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has the level's features.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller has the level's features and `avx512bf16`. Each register type is valid for any bits.
        Self(unsafe {
            // `[..].map` would not be inlined at every optimization level, and then each product would be a call.
            let x = std::mem::transmute::<__m512, __m512bh>(self.0);
            let y = std::mem::transmute::<__m512, __m512bh>(factor.0);
            _mm512_dpbf16_ps(term.0, x, y)
        })
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_row: usize, mut to: impl FnMut(usize, Self)) {
        // SAFETY: the caller gives sixteen rows of sixteen floats.
        unsafe { transpose_16(from, from_row, |column, register| to(column, Self(register))) }
    }
}

/// The register of [`Level::Portable`].
pub(super) type Lanes = [f32; 8];

impl Vector for Lanes {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives eight readable floats.
        unsafe { from.cast::<Self>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives eight writable floats.
        unsafe { to.cast::<Self>().write_unaligned(self) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] + other[i])
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        std::array::from_fn(|i| self[i].mul_add(factor[i], term[i]))
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_row: usize, mut to: impl FnMut(usize, Self)) {
        for column in 0..Self::LANES {
            // SAFETY: the caller gives eight rows of eight floats.
            to(column, std::array::from_fn(|row| unsafe { *from.add(row * from_row + column) }));
        }
    }
}

/// [`Vector::mul_add`] for four lanes. The intrinsic takes the term as its first argument.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn mul_add_4(x: float32x4_t, factor: float32x4_t, term: float32x4_t) -> float32x4_t {
    // SAFETY: the caller has NEON.
    unsafe { vfmaq_f32(term, x, factor) }
}

/// [`Vector::transpose`] for 4 × 4. First pairs the even and the odd columns of two rows each, and then combines the
/// pairs of all four rows.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn transpose_4(from: *const f32, from_row: usize, mut to: impl FnMut(usize, float32x4_t)) {
    // SAFETY: the caller has NEON and gives four rows of four floats.
    unsafe {
        let row = |i: usize| vld1q_f32(from.add(i * from_row));
        let rows = [row(0), row(1), row(2), row(3)];
        let even = [vtrn1q_f32(rows[0], rows[1]), vtrn1q_f32(rows[2], rows[3])].map(|x| vreinterpretq_f64_f32(x));
        let odd = [vtrn2q_f32(rows[0], rows[1]), vtrn2q_f32(rows[2], rows[3])].map(|x| vreinterpretq_f64_f32(x));
        to(0, vreinterpretq_f32_f64(vtrn1q_f64(even[0], even[1])));
        to(1, vreinterpretq_f32_f64(vtrn1q_f64(odd[0], odd[1])));
        to(2, vreinterpretq_f32_f64(vtrn2q_f64(even[0], even[1])));
        to(3, vreinterpretq_f32_f64(vtrn2q_f64(odd[0], odd[1])));
    }
}

/// [`Vector::transpose`] for 8 × 8, four columns at a time. Each load puts halves of two rows next to each other.
/// Then single floats are interleaved, and then pairs of floats.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_8(from: *const f32, from_row: usize, mut to: impl FnMut(usize, __m256)) {
    // SAFETY: the caller has AVX and gives eight rows of eight floats.
    unsafe {
        for quad in 0..2 {
            let first = 4 * quad;
            let quarter = |row: usize| _mm_loadu_ps(from.add(row * from_row + first));
            let mut rows = [_mm256_setzero_ps(); 4];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(quarter(i)), quarter(4 + i));
            }
            let [low, low_2] = [_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpacklo_ps(rows[2], rows[3])];
            let [high, high_2] = [_mm256_unpackhi_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[2], rows[3])];
            to(first, _mm256_shuffle_ps::<0b01_00_01_00>(low, low_2));
            to(first + 1, _mm256_shuffle_ps::<0b11_10_11_10>(low, low_2));
            to(first + 2, _mm256_shuffle_ps::<0b01_00_01_00>(high, high_2));
            to(first + 3, _mm256_shuffle_ps::<0b11_10_11_10>(high, high_2));
        }
    }
}

/// [`Vector::transpose`] for 16 × 16. It works like [`Vector::transpose`] for 8 × 8, but with quarters of four rows
/// next to each other. Masked loads put the quarters there without shuffles.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_16(from: *const f32, from_row: usize, mut to: impl FnMut(usize, __m512)) {
    // SAFETY: the caller has AVX-512F and gives sixteen rows of sixteen floats.
    unsafe {
        for quad in 0..4 {
            let first = 4 * quad;
            let quarter = |row: usize| _mm_loadu_ps(from.add(row * from_row + first));
            let mut rows = [_mm512_setzero_ps(); 4];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = _mm512_castps128_ps512(quarter(i));
                *row = _mm512_mask_broadcast_f32x4(*row, 0x00f0, quarter(4 + i));
                *row = _mm512_mask_broadcast_f32x4(*row, 0x0f00, quarter(8 + i));
                *row = _mm512_mask_broadcast_f32x4(*row, 0xf000, quarter(12 + i));
            }
            let [low, low_2] = [_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpacklo_ps(rows[2], rows[3])];
            let [high, high_2] = [_mm512_unpackhi_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[2], rows[3])];
            to(first, _mm512_shuffle_ps::<0b01_00_01_00>(low, low_2));
            to(first + 1, _mm512_shuffle_ps::<0b11_10_11_10>(low, low_2));
            to(first + 2, _mm512_shuffle_ps::<0b01_00_01_00>(high, high_2));
            to(first + 3, _mm512_shuffle_ps::<0b11_10_11_10>(high, high_2));
        }
    }
}
