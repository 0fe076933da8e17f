//! The arguments of a CPU kernel: typed slices of the arena instead of addresses.

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
    /// Byte offset of the layout's first element.
    pub offset: u64,
    /// The tensor's shape and strides; the layout's start offset is already included in `offset`.
    pub layout: Layout,
    /// Element type.
    pub dtype: DType,
    /// Number of elements from the layout's first to its last, including gaps.
    pub span: usize,
    /// For an input that an output overwrites, the index of that output.
    pub overwritten_by: Option<usize>,
    /// For a dynamic buffer, the request that determines its place and rows while the program runs.
    pub dynamic: Option<DynamicAddress>,
    /// For a bf16 operand of a kernel that only supports f32, the f32 copy that the kernel uses instead.
    pub widened: Option<Box<Widened>>,
}

/// The f32 copy of a bf16 tensor.
#[derive(Debug, Clone)]
pub struct Widened {
    /// Byte offset of its first element.
    pub offset: u64,
    /// The copy's layout: see [`widened_layout`](super::bf16::widened_layout).
    pub layout: Layout,
    /// The elements that are copied: see [`distinct`](super::bf16::distinct).
    pub distinct: Layout,
}

/// Returns the range of bytes, within its storage, that a layout covers from the first element to the last. Every
/// tensor with an address has passed this check. So comparing the range with the buffer is enough to check that the
/// tensor lies in the buffer.
///
/// Returns `None` if no tensor can have this layout, because
/// - its elements are not whole bytes,
/// - it has another number of strides than of dimensions, or
/// - its elements or their offsets exceed the address space.
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

/// Returns the number of elements from the layout's first to its last. The layout must have a [`byte_range`].
pub fn span(layout: &Layout) -> usize {
    let reach = layout.dims().iter().zip(layout.stride()).map(|(&dim, &stride)| dim.saturating_sub(1) * stride);
    if layout.dims().contains(&0) { 0 } else { 1 + reach.sum::<usize>() }
}

/// The request that places a dynamic buffer.
#[derive(Debug, Clone, Copy)]
pub struct DynamicAddress {
    /// Index of the request.
    pub request: u32,
    /// Elements of a row.
    pub row: usize,
}

/// The places and row counts of the dynamic buffers that were placed so far in this run.
#[derive(Debug, Clone, Copy)]
pub struct Places<'a> {
    /// Byte offset of every request's buffer.
    pub offsets: &'a [u64],
    /// The row count for which each request was placed; 0 if it was not placed in this run.
    pub rows: &'a [usize],
    /// The buffers that are placed outside of the arena.
    pub outside: Option<&'a OverflowHeap>,
}

impl Places<'_> {
    /// No dynamic buffers.
    pub const NONE: Self = Self { offsets: &[], rows: &[], outside: None };

    /// Returns a tensor's byte offset and element count.
    pub fn find(&self, address: &Address) -> (u64, usize) {
        match address.dynamic {
            Some(DynamicAddress { request, row }) => {
                (self.offsets[request as usize], self.rows[request as usize] * row)
            }
            None => (address.offset, address.span),
        }
    }

    /// Returns the address of a tensor's first byte, and its element count.
    ///
    /// # Safety
    /// A planned tensor must lie in the arena at `base`. A dynamic buffer must lie in the arena or outside of it, at
    /// its recorded place.
    pub unsafe fn locate(&self, base: *mut u8, address: &Address) -> (*mut u8, usize) {
        let (offset, span) = self.find(address);
        let outside = self.outside.filter(|_| address.dynamic.is_some()).and_then(|outside| outside.find(offset));
        // By this function's contract, the address is in bounds. If the tensor has no rows, the address is not
        // dereferenced.
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
    /// Bit i is set if the kernel rounds output i itself.
    rounded: u64,
    arena: PhantomData<&'a mut [u8]>,
}

/// The bit of [`Args::taken`] that stands for the workspace.
const WORKSPACE: usize = 63;

/// The maximum number of outputs of an operation: each has a bit in [`Args`], and one bit is for the workspace.
pub const MAX_OUTPUTS: usize = WORKSPACE;

/// An element type that kernels read and write in the arena.
pub trait Element: Copy + Send + Sync + private::Sealed + 'static {
    /// The candle name of the type.
    const DTYPE: DType;

    /// Returns the elements as bytes.
    fn bytes(data: &[Self]) -> &[u8] {
        // SAFETY: the types have no padding, so all of their bytes are initialized.
        unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
    }

    /// Returns the bytes as elements, or `None` if they are not aligned or do not form whole elements.
    fn elements(bytes: &[u8]) -> Option<&[Self]> {
        // SAFETY: every bit pattern is a valid value of these types.
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
    /// - `base` must point to an arena that outlives `'a`. During `'a`, no other code may access it.
    /// - Every operand and every piece of the workspace must lie inside the arena, aligned to its type and to 64
    ///   bytes.
    /// - Outputs and pieces must be disjoint from each other and from all inputs, with one exception: an input that
    ///   an output overwrites must have the output's offset.
    /// - Outputs must be contiguous.
    /// - The last pieces must be those of [`Address::widened`], one for each.
    ///
    /// A compiled program whose plan was checked guarantees all of this.
    pub unsafe fn new(
        base: *mut u8,
        inputs: &'a [Address],
        outputs: &'a [Address],
        workspace: &'a [Piece],
        places: Places<'a>,
        accumulate: u64,
        stream: Stream,
    ) -> Self {
        // The last pieces hold the f32 copies, and are not part of the kernel's own scratch.
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

    /// Returns the elements of a contiguous input.
    ///
    /// # Panics
    /// Panics if the kernel has a bug: if the type is wrong, if the input is not contiguous (see `Op::reads_strides`),
    /// or if an output overwrites the input (see [`Self::is_overwritten`]).
    pub fn input<T: Element>(&self, index: usize) -> &'a [T] {
        let (data, layout) = self.strided(index);
        assert!(layout.is_contiguous(), "input {index} has gaps: read it with `strided`");
        data
    }

    /// Returns an input's storage, from its first element to its last, and the layout with which to read it.
    ///
    /// # Panics
    /// Panics under the same conditions as [`Self::input`], except that the input need not be contiguous.
    pub fn strided<T: Element>(&self, index: usize) -> (&'a [T], &'a Layout) {
        let operand = &self.inputs[index];
        let (dtype, layout) = seen(operand);
        assert_eq!(dtype, T::DTYPE, "type of input {index}");
        assert!(operand.overwritten_by.is_none(), "input {index} is overwritten: read it from the output");
        // SAFETY: by `new`'s contract, the span lies in the arena and is aligned for its type. It is disjoint from
        // every output except one that overwrites it, which the assertion above excludes. T is plain data.
        let slice = unsafe {
            let (start, span) = self.locate(operand);
            std::slice::from_raw_parts(start.cast_const().cast(), span)
        };
        (slice, layout)
    }

    /// Returns the address of the first byte and the element count of a tensor or, if the tensor has an f32 copy, of
    /// that copy.
    ///
    /// # Safety
    /// The operand must belong to this instruction.
    unsafe fn locate(&self, operand: &Address) -> (*mut u8, usize) {
        // SAFETY: by `new`'s contract.
        let (start, elements) = unsafe { self.places.locate(self.base, operand) };
        match &operand.widened {
            None => (start, elements),
            Some(widened) => {
                let elements = if operand.dynamic.is_some() { elements } else { span(&widened.layout) };
                // The address is in bounds of the arena by `new`'s contract.
                (self.base.wrapping_add(widened.offset as usize), elements)
            }
        }
    }

    /// Fills the f32 copies of bf16 operands that the kernel reads or adds to.
    ///
    /// # Safety
    /// Must be called before any slice of an operand was returned.
    pub unsafe fn widen(&mut self) {
        let read = self.inputs.iter().filter(|input| input.overwritten_by.is_none());
        let changed = self.outputs.iter().enumerate().filter(|&(index, _)| {
            self.accumulate(index) || self.inputs.iter().any(|input| input.overwritten_by == Some(index))
        });
        for operand in read.chain(changed.map(|(_, output)| output)).filter(|operand| operand.widened.is_some()) {
            // SAFETY: by `new`'s contract, both lie in the arena and are disjoint. By this function's contract, no
            // slice of an operand was returned yet.
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

    /// Rounds the results in f32 copies to bf16, except those that the kernel has rounded itself.
    ///
    /// # Safety
    /// Slices that were returned earlier must not be used any more.
    pub unsafe fn round(self) {
        let is_left =
            |(index, operand): &(usize, &Address)| operand.widened.is_some() && self.rounded >> index & 1 == 0;
        for (_, operand) in self.outputs.iter().enumerate().filter(is_left) {
            // SAFETY: by `new`'s contract, both lie in the arena and are disjoint. By this function's contract, no
            // other slice of them is in use.
            unsafe {
                let (to, len) = self.places.locate(self.base, operand);
                let (from, wide) = self.locate(operand);
                let x = std::slice::from_raw_parts(from.cast_const().cast::<f32>(), wide);
                round(x, std::slice::from_raw_parts_mut(to.cast::<bf16>(), len));
            }
        }
    }

    /// True if an output overwrites this input. The kernel must then read the input's values from that output.
    pub fn is_overwritten(&self, index: usize) -> bool {
        self.inputs[index].overwritten_by.is_some()
    }

    /// Number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the shape of an input.
    pub fn input_dims(&self, index: usize) -> &'a [usize] {
        self.inputs[index].layout.dims()
    }

    /// Returns the element type of an input as the kernel sees it, which is f32 if there is an f32 copy.
    pub fn input_dtype(&self, index: usize) -> DType {
        seen(&self.inputs[index]).0
    }

    /// Returns the element type of an output as the kernel sees it, which is f32 if there is an f32 copy.
    pub fn output_dtype(&self, index: usize) -> DType {
        seen(&self.outputs[index]).0
    }

    /// Returns the shape of an output.
    pub fn output_dims(&self, index: usize) -> &'a [usize] {
        self.outputs[index].layout.dims()
    }

    /// Returns an output, every element of which the kernel must write. If the output overwrites an input, it holds the
    /// values of that input. If the output accumulates, it holds the values to add to. In all other cases, its contents
    /// are arbitrary.
    ///
    /// # Panics
    /// Panics on a bug in the kernel: if the type is wrong, or if the output was already taken.
    pub fn output<T: Element>(&mut self, index: usize) -> &'a mut [T] {
        let operand = &self.outputs[index];
        assert_eq!(seen(operand).0, T::DTYPE, "type of output {index}");
        self.take(index);
        // SAFETY: by `new`'s contract, outputs lie in the arena, are aligned, and are disjoint from each other and
        // from the inputs. `take` returns each output only once.
        unsafe {
            let (start, span) = self.locate(operand);
            std::slice::from_raw_parts_mut(start.cast(), span)
        }
    }

    /// Returns an output in f32, like [`Self::output`]. If the output is stored in bf16, also returns the stored
    /// tensor. The kernel must then round its results into the stored tensor.
    ///
    /// # Panics
    /// Panics under the same conditions as [`Self::output`].
    pub fn output_rounded(&mut self, index: usize) -> (&'a mut [f32], Option<&'a mut [bf16]>) {
        let wide = self.output::<f32>(index);
        let operand = &self.outputs[index];
        if operand.widened.is_none() {
            return (wide, None);
        }
        self.rounded |= 1 << index;
        // SAFETY: as in `output`. The stored tensor is disjoint from the f32 copy.
        let stored = unsafe {
            let (start, len) = self.places.locate(self.base, operand);
            std::slice::from_raw_parts_mut(start.cast(), len)
        };
        (wide, Some(stored))
    }

    /// Returns the pieces of `Op::workspace`, whose contents are arbitrary.
    ///
    /// # Panics
    /// Panics on a bug in the kernel: if the workspace was already taken.
    pub fn workspace(&mut self) -> Scratch<'a> {
        self.take(WORKSPACE);
        // SAFETY: as for outputs.
        unsafe { Scratch::new(self.base, self.workspace) }
    }

    /// True if the kernel must add to the output instead of overwriting it. Only outputs that `Op::accumulates` names
    /// can be added to.
    pub fn accumulate(&self, index: usize) -> bool {
        self.accumulate >> index & 1 == 1
    }

    /// The random numbers of this step and micro-batch.
    pub fn random(&self) -> Stream {
        self.stream
    }

    fn take(&self, bit: usize) {
        assert!(bit <= WORKSPACE && self.taken.get() >> bit & 1 == 0, "output {bit} is taken twice");
        self.taken.set(self.taken.get() | 1 << bit);
    }
}

/// Returns the element type and layout of a tensor as a kernel sees it: those of its f32 copy if it has one.
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
