//! Vectors of `f32` for the kernels that are written once and compiled for each instruction set.
//!
//! A kernel is an `#[inline(always)]` function over `Vector`, wrapped for each [`Level`] in a function that has the
//! level's `#[target_feature]`s. The methods are unsafe because calling them without those features is undefined.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// Whether this machine multiplies pairs of bf16 (`vdpbf16ps` of AVX-512), asked once.
pub fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static ANSWER: OnceLock<bool> = OnceLock::new();
        *ANSWER.get_or_init(|| Level::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"))
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// An instruction set that kernels are compiled for. All levels compute the same bits, but for products of which both factors are bf16,
/// which [`Level::Avx512`] may take [in pairs](multiplies_bf16).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Arrays of eight that the compiler vectorises as well as the target allows (NEON on 64-bit Arm).
    Portable,
    /// Eight lanes, AVX2 with fused multiply-add.
    Avx2,
    /// Sixteen lanes, AVX-512F.
    Avx512,
}

impl Level {
    /// Every level, the best last.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f") && Self::Avx2.is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The best level of this machine, asked once.
    pub fn best() -> Self {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(|| Self::ALL.into_iter().rfind(|level| level.is_available()).unwrap_or(Self::Portable))
    }
}

/// Asks for the cache line at an address that will be read soon. The address may be anything; reading it must not be.
#[inline(always)]
pub(super) fn prefetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address has no effect that can be observed.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// A register of `f32` lanes.
///
/// # Safety
/// Every method requires the features of the implementing type's level, and `load` and `store` require
/// [`Vector::LANES`] floats at the pointer, which need not be aligned.
pub(super) trait Vector: Copy {
    const LANES: usize;
    /// Whether a lane of a factor is two neighbours of bf16 along k, which [`Vector::mul_add`] multiplies and adds both.
    const IS_PAIRS: bool = false;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    /// `self` × `factor` + `term`, rounded once.
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self;
    /// Transposes the square block whose rows are `from_row` floats apart: gives `to` each column's index and values.
    unsafe fn transpose(from: *const f32, from_row: usize, to: impl FnMut(usize, Self));
}

/// Implements [`Vector`] by intrinsics that are called as they are.
#[cfg(target_arch = "x86_64")]
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

/// A register of f32 sums, or of pairs of bf16 factors.
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
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller has the level's features.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, term: Self) -> Self {
        // SAFETY: the caller has the level's features and `avx512bf16`; the types are registers of any bits.
        Self(unsafe {
            let [x, y] = [self.0, factor.0].map(|pairs| std::mem::transmute::<__m512, __m512bh>(pairs));
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

/// [`Vector::transpose`] of 8 × 8: interleaves neighbours, then pairs, then halves.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_8(from: *const f32, from_row: usize, mut to: impl FnMut(usize, __m256)) {
    // SAFETY: the caller has AVX and gives eight rows of eight floats.
    unsafe {
        let mut rows = [_mm256_setzero_ps(); 8];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = _mm256_loadu_ps(from.add(i * from_row));
        }
        // Lanes of pairs[i]: columns 2·(i % 2) and the next one, in turns, of rows 2·(i / 2) and the next one.
        let mut pairs = rows;
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        // quads[4·g + c]: column c (and c + 4 in the upper half) of the four rows of group g.
        let mut quads = rows;
        for group in 0..2 {
            for half in 0..2 {
                let (x, y) = (pairs[4 * group + half], pairs[4 * group + 2 + half]);
                quads[4 * group + 2 * half] = _mm256_shuffle_ps::<0b01_00_01_00>(x, y);
                quads[4 * group + 2 * half + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(x, y);
            }
        }
        for column in 0..4 {
            to(column, _mm256_permute2f128_ps::<0x20>(quads[column], quads[4 + column]));
            to(column + 4, _mm256_permute2f128_ps::<0x31>(quads[column], quads[4 + column]));
        }
    }
}

/// [`Vector::transpose`] of 16 × 16: as the one of 8 × 8, with one more round over quarters.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn transpose_16(from: *const f32, from_row: usize, mut to: impl FnMut(usize, __m512)) {
    // SAFETY: the caller has AVX-512F and gives sixteen rows of sixteen floats.
    unsafe {
        let mut rows = [_mm512_setzero_ps(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = _mm512_loadu_ps(from.add(i * from_row));
        }
        let mut pairs = rows;
        for i in 0..8 {
            pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        // quads[4·g + c]: in quarter q, column 4·q + c of the four rows of group g.
        let mut quads = rows;
        for group in 0..4 {
            for half in 0..2 {
                let (x, y) = (pairs[4 * group + half], pairs[4 * group + 2 + half]);
                quads[4 * group + 2 * half] = _mm512_shuffle_ps::<0b01_00_01_00>(x, y);
                quads[4 * group + 2 * half + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(x, y);
            }
        }
        for column in 0..4 {
            let quad = |group: usize| quads[4 * group + column];
            // Quarters 0 and 2 (even) or 1 and 3 (odd) of two groups each.
            let even = [
                _mm512_shuffle_f32x4::<0b10_00_10_00>(quad(0), quad(1)),
                _mm512_shuffle_f32x4::<0b10_00_10_00>(quad(2), quad(3)),
            ];
            let odd = [
                _mm512_shuffle_f32x4::<0b11_01_11_01>(quad(0), quad(1)),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(quad(2), quad(3)),
            ];
            to(column, _mm512_shuffle_f32x4::<0b10_00_10_00>(even[0], even[1]));
            to(column + 8, _mm512_shuffle_f32x4::<0b11_01_11_01>(even[0], even[1]));
            to(column + 4, _mm512_shuffle_f32x4::<0b10_00_10_00>(odd[0], odd[1]));
            to(column + 12, _mm512_shuffle_f32x4::<0b11_01_11_01>(odd[0], odd[1]));
        }
    }
}
