//! The temporary memory of a kernel, as several pieces that need not be adjacent.
//!
//! An operation declares the size of each piece (`Op::workspace`), and each piece is a buffer of the plan. Small pieces
//! fit between the tensors of a small step. One large buffer would need room above all tensors.
//!
//! In: the pieces' planned places. Out: slices and addresses. Never: a heap allocation while a kernel runs.

use std::marker::PhantomData;

use super::args::Element;

/// The place of a piece in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Byte offset of its first byte.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// The pieces that a kernel may write to while it runs. At first, their contents are arbitrary. Each begins at a
/// multiple of 64 bytes.
#[derive(Debug)]
pub struct Scratch<'a> {
    base: *mut u8,
    pieces: &'a [Piece],
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Scratch` is used like a `&mut [u8]`. A shared reference to it only returns addresses.
unsafe impl Send for Scratch<'_> {}
// SAFETY: as above.
unsafe impl Sync for Scratch<'_> {}

impl<'a> Scratch<'a> {
    /// # Safety
    /// The pieces must lie in memory at `base`, each aligned to 64 bytes and disjoint from the others. During `'a`,
    /// no other code may access them.
    pub unsafe fn new(base: *mut u8, pieces: &'a [Piece]) -> Self {
        Self { base, pieces, memory: PhantomData }
    }

    /// Takes the first of the remaining pieces as a slice.
    ///
    /// # Panics
    /// Panics on a bug in the kernel: if no pieces are left.
    pub fn take<T: Element>(&mut self) -> &'a mut [T] {
        let (first, rest) = self.pieces.split_first().expect("more pieces are taken than `Op::workspace` asks for");
        self.pieces = rest;
        // SAFETY: by `new`'s contract, the piece exists and is aligned for every `Element`, and all elements are plain
        // data. The piece is removed from the list, so no piece is returned twice.
        unsafe {
            let start = self.base.add(first.offset as usize).cast();
            std::slice::from_raw_parts_mut(start, first.bytes as usize / size_of::<T>())
        }
    }

    /// Returns the needed size and the actual size, in floats, of the first piece that is too small. If the piece does
    /// not exist, the actual size is 0. Returns `None` if all pieces are large enough.
    pub(super) fn too_short(&self, needed_bytes: impl Iterator<Item = u64>) -> Option<(usize, usize)> {
        let floats = |bytes: u64| bytes as usize / size_of::<f32>();
        let given = self.pieces.iter().map(|piece| piece.bytes).chain(std::iter::repeat(0));
        needed_bytes.zip(given).find(|(needed, given)| given < needed).map(|(n, g)| (floats(n), floats(g)))
    }

    /// Returns the address of a piece's first byte.
    fn address(&self, piece: usize) -> *mut u8 {
        // The address is in bounds of the memory by `new`'s contract.
        self.base.wrapping_add(self.pieces[piece].offset as usize)
    }
}

/// Returns the sizes of pieces that suffice for each of several kernels, which run one after another.
pub fn for_each_of(kernels: impl IntoIterator<Item = Vec<u64>>) -> Vec<u64> {
    let mut pieces: Vec<u64> = Vec::new();
    for kernel in kernels {
        pieces.resize(kernel.len().max(pieces.len()), 0);
        pieces.iter_mut().zip(kernel).for_each(|(bytes, needed)| *bytes = needed.max(*bytes));
    }
    pieces
}

/// Scratch outside of an arena, for kernels that are called directly.
#[derive(Debug)]
pub struct ScratchMemory {
    /// The memory, in cache lines.
    lines: Vec<Line>,
    pieces: Vec<Piece>,
}

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE_LEN]);

/// Floats in a cache line.
const LINE_LEN: usize = 16;

impl ScratchMemory {
    /// Allocates pieces of the given sizes in bytes, filled with NaN. They lie in reverse order with gaps between
    /// them, so that [`Self::is_intact`] detects a kernel that writes beyond a piece.
    ///
    /// # Panics
    /// Panics if the pieces exceed the address space.
    pub fn new(bytes: &[u64]) -> Self {
        let mut pieces = Vec::new();
        let mut lines = 1;
        for &bytes in bytes.iter().rev() {
            pieces.push(Piece { offset: lines * size_of::<Line>() as u64, bytes });
            // Saturates, so that neither the sum nor an offset can wrap.
            lines = lines.saturating_add(bytes.div_ceil(size_of::<Line>() as u64) + 1);
            assert!(lines <= isize::MAX as u64 / size_of::<Line>() as u64, "capacity overflow");
        }
        pieces.reverse();
        Self { lines: vec![Line([f32::NAN; LINE_LEN]); lines as usize], pieces }
    }

    /// Lends all pieces.
    pub fn lend(&mut self) -> Scratch<'_> {
        // SAFETY: `new` has placed the pieces within the lines, with whole lines between them. The lines are borrowed
        // exclusively.
        unsafe { Scratch::new(self.lines.as_mut_ptr().cast(), &self.pieces) }
    }

    /// True if the gaps between the pieces are unchanged.
    pub fn is_intact(&self) -> bool {
        let before = |piece: &Piece| &self.lines[piece.offset as usize / size_of::<Line>() - 1];
        self.pieces.iter().map(before).chain(self.lines.last()).all(|line| line.0.iter().all(|x| x.is_nan()))
    }
}

/// Scratch that is divided into equal parts, such as one per thread. A piece holds one or more whole parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartLayout {
    /// The piece that holds the first part.
    first: usize,
    count: usize,
    /// Number of floats of a part. A part has whole cache lines, so that no two threads share one.
    len: usize,
    /// Binary logarithm of the number of parts in a piece.
    shift: u32,
}

/// Size in floats below which smaller pieces bring no benefit: 32 KiB.
const ENOUGH_LEN: usize = 8 << 10;
/// Maximum number of pieces for parts of one kind. More pieces would cost the planner time, and a sixteenth of a
/// kernel's scratch is already small.
const MAX_PIECES: usize = 16;

impl PartLayout {
    /// Creates `count` parts of at least `len` floats, or none if `len` is 0. Their pieces follow the first `first` pieces
    /// of the scratch.
    pub fn new(first: usize, count: usize, len: usize) -> Self {
        let count = if len == 0 { 0 } else { count };
        let len = len.max(1).next_multiple_of(LINE_LEN);
        let by_len = (ENOUGH_LEN / len).max(1).ilog2();
        let by_count = count.div_ceil(MAX_PIECES).next_power_of_two().ilog2();
        Self { first, count, len, shift: by_len.max(by_count) }
    }

    /// Creates parts of several kinds, in consecutive pieces: `count` parts for each length.
    pub fn of_kinds<const KINDS: usize>(count: usize, lengths: [usize; KINDS]) -> [Self; KINDS] {
        let mut first = 0;
        lengths.map(|len| {
            let parts = Self::new(first, count, len);
            first = parts.end();
            parts
        })
    }

    /// Returns the index after the last piece of these parts.
    pub fn end(&self) -> usize {
        self.first + self.count.div_ceil(1 << self.shift)
    }

    /// Returns the size in bytes of each piece.
    pub fn bytes(self) -> impl Iterator<Item = u64> {
        let per_piece = 1 << self.shift;
        let parts = (0..self.count).step_by(per_piece).map(move |part| per_piece.min(self.count - part));
        parts.map(move |parts| (parts * self.len * size_of::<f32>()) as u64)
    }

    /// Returns the address of a part's first float, in scratch whose pieces have the sizes of [`Self::bytes`]. If there are
    /// no parts, the address is null.
    pub fn start(&self, scratch: &Scratch<'_>, part: usize) -> *mut f32 {
        if self.count == 0 {
            return std::ptr::null_mut();
        }
        assert!(part < self.count, "part {part} of {self:?}");
        let within = part & ((1 << self.shift) - 1);
        scratch.address(self.first + (part >> self.shift)).cast::<f32>().wrapping_add(within * self.len)
    }
}

#[cfg(test)]
mod tests {
    use gapless_testing::prelude::*;

    use super::*;

    generated! {
        #[test]
        fn parts_lie_apart_and_within_their_pieces(count in 0..200usize, lengths in [0..40_000usize, 0..300, 1..9]) {
            let kinds = PartLayout::of_kinds(count, lengths);
            let bytes: Vec<u64> = kinds.iter().flat_map(|parts| parts.bytes()).collect();
            prop_assert!(bytes.len() <= kinds.len() * MAX_PIECES);
            let mut memory = ScratchMemory::new(&bytes);
            let scratch = memory.lend();
            prop_assert_eq!(scratch.too_short(bytes.iter().copied()), None);
            for (kind, (parts, len)) in kinds.iter().zip(lengths).enumerate() {
                for part in (0..count).filter(|_| len > 0) {
                    // SAFETY: this is what the test checks. A write beyond a piece would show in `is_intact`, and a
                    // write into another part in the NaN check.
                    let part = unsafe { std::slice::from_raw_parts_mut(parts.start(&scratch, part), len) };
                    prop_assert!(part.as_ptr().addr().is_multiple_of(64));
                    prop_assert!(part.iter().all(|x| x.is_nan()), "nobody else has written here");
                    part.fill(kind as f32);
                }
            }
            prop_assert!(memory.is_intact());
        }
    }

    #[test]
    fn pieces_are_taken_one_by_one() {
        let mut memory = ScratchMemory::new(&[12, 0, 8]);
        let mut scratch = memory.lend();
        assert_eq!(scratch.too_short([12, 0, 4].into_iter()), None);
        assert_eq!(scratch.too_short([12, 4].into_iter()), Some((1, 0)));
        assert_eq!(scratch.too_short([12, 0, 8, 16].into_iter()), Some((4, 0)));
        scratch.take::<u32>().copy_from_slice(&[1, 2, 3]);
        assert_eq!(scratch.take::<f32>().len(), 0);
        scratch.take::<f64>()[0] = 1.0;
        assert!(memory.is_intact());
    }

    #[test]
    #[should_panic(expected = "capacity overflow")]
    fn pieces_beyond_the_address_space_are_refused() {
        // In cache lines, these sizes add up to 2^64.
        ScratchMemory::new(&[u64::MAX; 64]);
    }

    #[test]
    fn pieces_are_small_but_few() {
        let pieces = |count, len| PartLayout::new(0, count, len).bytes().collect::<Vec<u64>>();
        assert_eq!(pieces(3, 20_000), [80_000; 3]);
        assert_eq!(pieces(5, 4096), [32_768, 32_768, 16_384]);
        assert_eq!(pieces(64, 16_384), [262_144; 16]);
        assert_eq!(pieces(3, 1), [192]);
        assert_eq!(pieces(0, 100), [0; 0]);
        assert_eq!(pieces(3, 0), [0; 0]);
    }
}
