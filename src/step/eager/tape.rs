//! Reference-counted storage, and the table of its allocations and frees.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use gapless_alloc::Buffer;

/// Bytes per float32 element.
pub const F32: u64 = 4;
pub const BF16: u64 = 2;
/// Bytes per token id: PyTorch's int64.
pub const INT64: u64 = 8;

/// The allocations so far. Each allocation and each free takes one tick.
#[derive(Debug, Clone, Default)]
pub struct Tape(Rc<RefCell<Events>>);

#[derive(Debug, Default)]
struct Events {
    now: u64,
    /// Lifetimes and bytes, and whether the buffer is allocated on a stream of collectives.
    buffers: Vec<(Range<u64>, u64, bool)>,
    is_muted: bool,
}

/// The memory of one allocation, which is freed when the last reference to it is dropped.
#[derive(Debug)]
pub struct Storage {
    tape: Tape,
    /// Index of the allocation's buffer; `None` if no memory was allocated.
    index: Option<usize>,
}

impl Storage {
    /// Whether memory was allocated.
    pub fn has_memory(&self) -> bool {
        self.index.is_some()
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            let mut events = self.tape.0.borrow_mut();
            events.buffers[index].0.end = events.now;
            events.now += 1;
        }
    }
}

/// A tensor of eager mode: its shape, and a reference to its memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub storage: Rc<Storage>,
    pub elements: u64,
    /// Extent of the last dimension.
    pub width: u64,
    /// Bytes per element.
    pub dtype: u64,
    /// Whether the tensor is a view. The base of a view holds its own reference to the memory.
    pub is_view: bool,
    /// The part of this rank, if the tensor was gathered from several ranks. Autograd saves the part, and the backward
    /// gathers it again.
    pub part: Option<Rc<Storage>>,
    /// Whether the two middle dimensions are swapped in memory. If true, a change of the shape needs a copy.
    pub is_transposed: bool,
}

impl Tensor {
    /// Number of rows, each of which extends over the last dimension.
    pub fn rows(&self) -> u64 {
        self.elements / self.width
    }

    /// True if a gradient may be added to this tensor in place, because it has the only reference to its memory
    /// (`can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp).
    pub fn is_stealable(&self) -> bool {
        Rc::strong_count(&self.storage) == 1 && !self.is_view
    }

    /// Returns a view of the tensor.
    pub fn view(&self) -> Self {
        Self { is_view: true, ..self.clone() }
    }
}

impl Tape {
    /// Allocates a tensor of `elements` elements.
    pub fn new_tensor(&self, elements: u64, width: u64, dtype: u64) -> Tensor {
        let index = self.allocate(elements * dtype);
        let storage = Rc::new(Storage { tape: self.clone(), index });
        Tensor { storage, ..self.without_memory(elements, width, dtype) }
    }

    /// Allocates a tensor on a stream of collectives.
    pub fn beside(&self, elements: u64, dtype: u64) -> Tensor {
        let tensor = self.new_tensor(elements, 1, dtype);
        if let Some(index) = tensor.storage.index {
            self.0.borrow_mut().buffers[index].2 = true;
        }
        tensor
    }

    /// Returns for each buffer whether it is allocated on a stream of collectives.
    pub fn are_beside(&self) -> Vec<bool> {
        self.0.borrow().buffers.iter().map(|buffer| buffer.2).collect()
    }

    /// Returns a tensor without memory of its own.
    pub fn without_memory(&self, elements: u64, width: u64, dtype: u64) -> Tensor {
        let storage = Rc::new(Storage { tape: self.clone(), index: None });
        Tensor { storage, elements, width, dtype, is_view: false, part: None, is_transposed: false }
    }

    /// Allocates a tensor of the same shape and strides.
    pub fn like(&self, tensor: &Tensor) -> Tensor {
        self.cast(tensor, tensor.dtype)
    }

    /// Allocates a tensor of the same shape and strides with another element type.
    pub fn cast(&self, tensor: &Tensor, dtype: u64) -> Tensor {
        let new = self.new_tensor(tensor.elements, tensor.width, dtype);
        Tensor { is_transposed: tensor.is_transposed, ..new }
    }

    /// Allocates `bytes` bytes, which are freed when the result is dropped.
    pub fn bytes(&self, bytes: u64) -> Tensor {
        self.new_tensor(bytes, 1, 1)
    }

    fn allocate(&self, bytes: u64) -> Option<usize> {
        let mut events = self.0.borrow_mut();
        if events.is_muted || bytes == 0 {
            return None;
        }
        let now = events.now;
        events.buffers.push((now..u64::MAX, bytes, false));
        events.now += 1;
        Some(events.buffers.len() - 1)
    }

    /// Turns recording of allocations off or on.
    pub fn mute(&self, is_muted: bool) {
        self.0.borrow_mut().is_muted = is_muted;
    }

    /// The tick of the next allocation or free.
    pub fn now(&self) -> u64 {
        self.0.borrow().now
    }

    /// Returns the table of lifetimes. A buffer that is never freed counts as alive until the last tick; if `is_steady`,
    /// also from the first.
    pub fn into_buffers(self, is_steady: bool) -> Vec<Buffer> {
        let events = self.0.borrow();
        let buffer = |(lifetime, bytes, _): &(Range<u64>, u64, bool)| match lifetime.end {
            u64::MAX => Buffer::new(if is_steady { 0 } else { lifetime.start }..events.now, *bytes),
            _ => Buffer::new(lifetime.clone(), *bytes),
        };
        events.buffers.iter().map(buffer).collect()
    }
}
