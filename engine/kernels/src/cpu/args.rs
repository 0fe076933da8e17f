//! What a CPU kernel is given: typed slices of the arena, never an address.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

use candle_core::{DType, Layout};
use half::bf16;

use super::bf16::{round, widen, widen_strided};
use super::overflow_heap::OverflowHeap;
use super::scratch::{Piece, Scratch};
use crate::random::Stream;
use crate::spec::{MAX_BYTES, Spec};

/// One tensor of an instruction, at its planned address.
#[derive(Debug, Clone)]
pub struct Address {
    /// Byte offset of the first element that the layout shows.
    pub offset: u64,
    /// Strides; the start is already in `offset`.
    pub layout: Layout,
    /// Element type.
    pub dtype: DType,
    /// Elements from the first to the last that the layout shows.
    pub span: usize,
    /// For an input: the output that overwrites it.
    pub overwritten_by: Option<usize>,
    /// If its place and its rows are known only while the program runs.
    pub counted: Option<CountedAddress>,
    /// For a bf16 of a kernel that knows f32 alone: where it is f32 while the kernel runs.
    pub widened: Option<Box<Widened>>,
}

/// A copy in f32 of a tensor of bf16.
#[derive(Debug, Clone)]
pub struct Widened {
    /// Byte offset of its first element.
    pub offset: u64,
    /// How it lies there: see [`widened_layout`](super::bf16::widened_layout).
    pub layout: Layout,
    /// What is copied: see [`distinct`](super::bf16::distinct).
    pub distinct: Layout,
}

/// The bytes of its storage that a layout shows, from the first element to the last. None if a tensor cannot lie so: a type whose
/// elements are no whole bytes, another number of strides than of dimensions, more elements or a longer reach than there are addresses.
/// All that is given an address has passed this; whether the range lies in the tensor's buffer is then one comparison.
pub fn byte_range(layout: &Layout, dtype: DType) -> Option<Range<u64>> {
    let (dims, strides) = (layout.dims(), layout.stride());
    Spec { shape: layout.shape().clone(), dtype }.checked_bytes().filter(|_| dims.len() == strides.len())?;
    let in_bytes = |elements: usize| elements.checked_mul(dtype.size_in_bytes()).map(|bytes| bytes as u64);
    let first = layout.start_offset();
    let end = match dims.contains(&0) {
        true => first,
        false => dims
            .iter()
            .zip(strides)
            .try_fold(first.checked_add(1)?, |end, (&dim, &stride)| end.checked_add((dim - 1).checked_mul(stride)?))?,
    };
    Some(in_bytes(first)?..in_bytes(end).filter(|&end| end <= MAX_BYTES)?)
}

/// Elements from the first that a layout shows to the last, of a layout that has a [`byte_range`].
pub fn span(layout: &Layout) -> usize {
    let reach = layout.dims().iter().zip(layout.stride()).map(|(&dim, &stride)| dim.saturating_sub(1) * stride);
    if layout.dims().contains(&0) { 0 } else { 1 + reach.sum::<usize>() }
}

/// A tensor whose rows are counted, and whose place is asked for, while the program runs.
#[derive(Debug, Clone, Copy)]
pub struct CountedAddress {
    /// Index of the request for its place.
    pub request: u32,
    /// Elements of a row.
    pub row: usize,
}

/// What has been counted and placed so far.
#[derive(Debug, Clone, Copy)]
pub struct Places<'a> {
    /// Byte offset of every request.
    pub offsets: &'a [u64],
    /// Rows that every request was served for; 0 of those that were not served in this run.
    pub rows: &'a [usize],
    /// What lies behind the arena.
    pub outside: Option<&'a OverflowHeap>,
}

impl Places<'_> {
    /// Nothing is.
    pub const NONE: Self = Self { offsets: &[], rows: &[], outside: None };

    /// The byte offset and the number of elements of a tensor.
    pub fn find(&self, address: &Address) -> (u64, usize) {
        match address.counted {
            Some(CountedAddress { request, row }) => {
                (self.offsets[request as usize], self.rows[request as usize] * row)
            }
            None => (address.offset, address.span),
        }
    }

    /// The first byte and the number of elements of a tensor.
    ///
    /// # Safety
    /// A planned tensor lies in the arena at `base`; one that is placed while a program runs, there or outside.
    pub unsafe fn locate(&self, base: *mut u8, address: &Address) -> (*mut u8, usize) {
        let (offset, span) = self.find(address);
        let outside = self.outside.filter(|_| address.counted.is_some()).and_then(|outside| outside.find(offset));
        // In bounds by this function's contract, unless the tensor has no rows.
        (outside.unwrap_or_else(|| base.wrapping_add(offset as usize)), span)
    }
}

/// The arguments of one instruction.
#[derive(Debug)]
pub struct Args<'a> {
    base: *mut u8,
    inputs: &'a [Address],
    outputs: &'a [Address],
    workspace: &'a [Piece],
    places: Places<'a>,
    accumulate: u64,
    stream: Stream,
    taken: Cell<u64>,
    /// Outputs that the kernel rounds, as bits.
    rounded: u64,
    arena: PhantomData<&'a mut [u8]>,
}

/// Bit of [`Args::taken`] that stands for the workspace.
const WORKSPACE: usize = 63;

/// Outputs that an operation may have: each has a bit in [`Args`], beside that of the workspace.
pub const MAX_OUTPUTS: usize = WORKSPACE;

/// Types that lie in an arena as they are.
pub trait Element: Copy + Send + Sync + private::Sealed + 'static {
    /// candle's name of the type.
    const DTYPE: DType;

    /// Elements as they lie in memory.
    fn bytes(data: &[Self]) -> &[u8] {
        // SAFETY: the types are numbers without padding, and every byte of one is a byte.
        unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
    }

    /// The elements that some bytes are, if they are aligned and whole.
    fn elements(bytes: &[u8]) -> Option<&[Self]> {
        // SAFETY: the types are numbers of which every pattern of bits is one.
        let (before, elements, behind) = unsafe { bytes.align_to() };
        (before.is_empty() && behind.is_empty()).then_some(elements)
    }
}

mod private {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u32 {}
    impl Sealed for f64 {}
    impl Sealed for u8 {}
    impl Sealed for half::bf16 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}

impl Element for f64 {
    const DTYPE: DType = DType::F64;
}

impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}

impl<'a> Args<'a> {
    /// # Safety
    /// `base` points to an arena that outlives `'a` and is not touched by anyone else during it; every operand and
    /// every piece of the workspace lies inside it, aligned for its type and to 64 bytes; outputs and pieces are disjoint
    /// from each other and from all inputs but those that they overwrite, which have the same offset; outputs have no gaps. The last
    /// pieces are those of [`Address::widened`], one for each. A compiled program whose plan was checked guarantees all of it.
    pub unsafe fn new(
        base: *mut u8,
        inputs: &'a [Address],
        outputs: &'a [Address],
        workspace: &'a [Piece],
        places: Places<'a>,
        accumulate: u64,
        stream: Stream,
    ) -> Self {
        // Copies that the kernel reads are no scratch of its own.
        let copies = inputs.iter().chain(outputs).filter(|operand| operand.widened.is_some()).count();
        let workspace = &workspace[..workspace.len() - copies];
        Self {
            base,
            inputs,
            outputs,
            workspace,
            places,
            accumulate,
            stream,
            taken: Cell::new(0),
            rounded: 0,
            arena: PhantomData,
        }
    }

    /// The elements of an input that has no gaps.
    ///
    /// # Panics
    /// On a kernel's own bug: the wrong type, an input with gaps (see `Op::reads_strides`),
    /// or one that an output overwrites (see [`Self::is_overwritten`]).
    pub fn input<T: Element>(&self, index: usize) -> &'a [T] {
        let (data, layout) = self.strided(index);
        assert!(layout.is_contiguous(), "input {index} has gaps: read it with `strided`");
        data
    }

    /// The storage from an input's first element to its last, and the strides to read it with.
    ///
    /// # Panics
    /// As [`Self::input`], gaps aside.
    pub fn strided<T: Element>(&self, index: usize) -> (&'a [T], &'a Layout) {
        let operand = &self.inputs[index];
        let (dtype, layout) = seen(operand);
        assert_eq!(dtype, T::DTYPE, "type of input {index}");
        assert!(operand.overwritten_by.is_none(), "input {index} is overwritten: read it from the output");
        // SAFETY: by `new`'s contract the span lies in the arena, is aligned for its type, and is disjoint from every
        // output but one that overwrites it, which was excluded above; T is plain data.
        let slice = unsafe {
            let (start, span) = self.locate(operand);
            std::slice::from_raw_parts(start.cast_const().cast(), span)
        };
        (slice, layout)
    }

    /// The first byte and the number of elements of a tensor as the kernel sees it.
    ///
    /// # Safety
    /// It is one of this instruction's.
    unsafe fn locate(&self, operand: &Address) -> (*mut u8, usize) {
        // SAFETY: by `new`'s contract.
        let (start, elements) = unsafe { self.places.locate(self.base, operand) };
        match &operand.widened {
            None => (start, elements),
            Some(widened) => {
                let elements = if operand.counted.is_some() { elements } else { span(&widened.layout) };
                // In bounds of the arena by `new`'s contract.
                (self.base.wrapping_add(widened.offset as usize), elements)
            }
        }
    }

    /// Makes the copies in f32 of what the kernel shall read, or add to.
    ///
    /// # Safety
    /// No operand has been handed out yet.
    pub unsafe fn widen(&mut self) {
        let read = self.inputs.iter().filter(|input| input.overwritten_by.is_none());
        let changed = self.outputs.iter().enumerate().filter(|&(index, _)| {
            self.accumulate(index) || self.inputs.iter().any(|input| input.overwritten_by == Some(index))
        });
        for operand in read.chain(changed.map(|(_, output)| output)).filter(|operand| operand.widened.is_some()) {
            // SAFETY: by `new`'s contract both lie in the arena, apart; by this function's, nothing has been handed out yet.
            let (x, out) = unsafe {
                let (from, len) = self.places.locate(self.base, operand);
                let (to, wide) = self.locate(operand);
                let x = std::slice::from_raw_parts(from.cast_const().cast::<bf16>(), len);
                (x, std::slice::from_raw_parts_mut(to.cast::<f32>(), wide))
            };
            match &operand.widened {
                Some(widened) if x.len() != out.len() => widen_strided(x, &widened.distinct, out),
                _ => widen(x, out),
            }
        }
    }

    /// Rounds the results that the kernel has made in f32 and not rounded itself.
    ///
    /// # Safety
    /// What was handed out is not used any more.
    pub unsafe fn round(self) {
        let is_left =
            |(index, operand): &(usize, &Address)| operand.widened.is_some() && self.rounded >> index & 1 == 0;
        for (_, operand) in self.outputs.iter().enumerate().filter(is_left) {
            // SAFETY: by `new`'s contract both lie in the arena, apart; by this function's, nobody reads or writes them.
            unsafe {
                let (to, len) = self.places.locate(self.base, operand);
                let (from, wide) = self.locate(operand);
                let x = std::slice::from_raw_parts(from.cast_const().cast::<f32>(), wide);
                round(x, std::slice::from_raw_parts_mut(to.cast::<bf16>(), len));
            }
        }
    }

    /// Whether an output has this input's bytes, so that its values are to be read from there.
    pub fn is_overwritten(&self, index: usize) -> bool {
        self.inputs[index].overwritten_by.is_some()
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Extents of an input.
    pub fn input_dims(&self, index: usize) -> &'a [usize] {
        self.inputs[index].layout.dims()
    }

    /// Type of an input's elements, as the kernel is given them.
    pub fn input_dtype(&self, index: usize) -> DType {
        seen(&self.inputs[index]).0
    }

    /// Type of an output's elements, as the kernel is given them.
    pub fn output_dtype(&self, index: usize) -> DType {
        seen(&self.outputs[index]).0
    }

    /// Extents of an output.
    pub fn output_dims(&self, index: usize) -> &'a [usize] {
        self.outputs[index].layout.dims()
    }

    /// An output, to be written in full. Holds the old values where it overwrites an input or accumulates, else garbage.
    ///
    /// # Panics
    /// On a kernel's own bug: the wrong type, or asked for twice.
    pub fn output<T: Element>(&mut self, index: usize) -> &'a mut [T] {
        let operand = &self.outputs[index];
        assert_eq!(seen(operand).0, T::DTYPE, "type of output {index}");
        self.take(index);
        // SAFETY: by `new`'s contract outputs lie in the arena, aligned, disjoint from each other and from what inputs
        // show; `take` hands each out once.
        unsafe {
            let (start, span) = self.locate(operand);
            std::slice::from_raw_parts_mut(start.cast(), span)
        }
    }

    /// An output as [`Self::output`] gives it in f32, and, if it is stored in bf16, where the kernel rounds it to by itself.
    ///
    /// # Panics
    /// As [`Self::output`].
    pub fn output_rounded(&mut self, index: usize) -> (&'a mut [f32], Option<&'a mut [bf16]>) {
        let wide = self.output::<f32>(index);
        let operand = &self.outputs[index];
        if operand.widened.is_none() {
            return (wide, None);
        }
        self.rounded |= 1 << index;
        // SAFETY: as of `output`; the copy in f32 lies apart.
        let stored = unsafe {
            let (start, len) = self.places.locate(self.base, operand);
            std::slice::from_raw_parts_mut(start.cast(), len)
        };
        (wide, Some(stored))
    }

    /// The pieces of `Op::workspace`, full of garbage.
    ///
    /// # Panics
    /// On a kernel's own bug: asked for twice.
    pub fn workspace(&mut self) -> Scratch<'a> {
        self.take(WORKSPACE);
        // SAFETY: as for outputs.
        unsafe { Scratch::new(self.base, self.workspace) }
    }

    /// Whether to add to an output instead of setting it. Only for outputs that
    /// `Op::accumulates` names; others hold garbage.
    pub fn accumulate(&self, index: usize) -> bool {
        self.accumulate >> index & 1 == 1
    }

    /// Random numbers of this step and micro-batch.
    pub fn random(&self) -> Stream {
        self.stream
    }

    fn take(&self, bit: usize) {
        assert!(bit <= WORKSPACE && self.taken.get() >> bit & 1 == 0, "output {bit} is taken twice");
        self.taken.set(self.taken.get() | 1 << bit);
    }
}

/// Type and layout of a tensor as a kernel sees it.
fn seen(operand: &Address) -> (DType, &Layout) {
    match &operand.widened {
        Some(widened) => (DType::F32, &widened.layout),
        None => (operand.dtype, &operand.layout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_show_bytes_that_have_addresses() {
        let max = usize::MAX;
        for (dims, strides, start, dtype, expected) in [
            (&[][..], &[][..], 0, DType::F32, Some(0..4)),
            (&[2, 3], &[3, 1], 5, DType::BF16, Some(10..22)),
            (&[2, 3], &[0, 0], 1, DType::F64, Some(8..16)),
            (&[4, 0], &[max, max], 3, DType::U32, Some(12..12)),
            (&[1, 1], &[max, max], 0, DType::U8, Some(0..1)),
            (&[2], &[1 << 62], 0, DType::F32, None),
            (&[2], &[max], 0, DType::U8, None),
            (&[3], &[max / 2 + 1], 0, DType::U8, None),
            (&[1], &[1], max, DType::U8, None),
            (&[1], &[1], 1 << 61, DType::F32, None),
            (&[0], &[1], 1 << 62, DType::F32, None),
            (&[1 << 32, 1 << 32], &[0, 0], 0, DType::U8, None),
            (&[1 << 31, 1 << 31], &[0, 0], 0, DType::BF16, None),
            (&[2], &[], 0, DType::F32, None),
            (&[], &[1], 0, DType::F32, None),
            (&[2], &[1], 0, DType::F4, None),
        ] {
            let layout = Layout::new(dims.into(), strides.to_vec(), start);
            assert_eq!(byte_range(&layout, dtype), expected, "{dims:?} {strides:?} {start} {dtype:?}");
        }
    }
}
