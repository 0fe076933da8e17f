//! What is to be planned: buffers with sizes and lifetimes.
//!
//! In: buffers as the caller has them. Out: a [`Problem`] in which every buffer is sound. Never: a decision about offsets.

use std::ops::Range;

use crate::Error;

/// Half-open range of ticks `[start, end)` during which a buffer's bytes must not be touched by another.
pub type Lifetime = Range<u64>;

/// Index of a buffer in its [`Problem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

impl BufferId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// One rectangle of bytes × time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Buffer {
    /// Ticks during which the buffer is alive.
    pub lifetime: Lifetime,
    /// Size in bytes; zero is allowed and takes no space.
    pub bytes: u64,
    /// The offset is a multiple of this; at least 1.
    pub alignment: u64,
    /// An offset that the planner must keep, if any.
    pub offset: Option<u64>,
}

impl Buffer {
    /// A buffer that may go anywhere.
    pub fn new(lifetime: Lifetime, bytes: u64) -> Self {
        Self { lifetime, bytes, alignment: 1, offset: None }
    }

    /// The same buffer at multiples of `alignment` only.
    pub fn aligned(self, alignment: u64) -> Self {
        Self { alignment, ..self }
    }

    /// The same buffer, pinned to `offset`.
    pub fn at(self, offset: u64) -> Self {
        Self { offset: Some(offset), ..self }
    }
}

/// A checked table of buffers. Nothing unsound exists in it: lifetimes are not empty, alignments are positive, pinned
/// buffers are aligned, and the live bytes at every tick fit in a `u64`.
#[derive(Debug, Clone, Default)]
pub struct Problem {
    buffers: Vec<Buffer>,
}

impl Problem {
    /// Checks the buffers and takes them over.
    ///
    /// # Errors
    /// The first buffer that has an empty lifetime, a zero alignment or a misaligned or overflowing pinned offset; or
    /// [`Error::TooLarge`] when the live bytes exceed `u64`.
    pub fn new(buffers: Vec<Buffer>) -> Result<Self, Error> {
        if u32::try_from(buffers.len()).is_err() {
            return Err(Error::TooManyBuffers { buffers: buffers.len() });
        }
        for (index, b) in buffers.iter().enumerate() {
            if b.lifetime.start >= b.lifetime.end {
                return Err(Error::EmptyLifetime { buffer: index, start: b.lifetime.start, end: b.lifetime.end });
            }
            if b.alignment == 0 {
                return Err(Error::ZeroAlignment { buffer: index });
            }
            if let Some(offset) = b.offset {
                if offset % b.alignment != 0 {
                    return Err(Error::Misaligned { buffer: index, offset, alignment: b.alignment });
                }
                if offset.checked_add(b.bytes).is_none() {
                    return Err(Error::TooLarge { bytes: u128::from(offset) + u128::from(b.bytes) });
                }
            }
        }
        let problem = Self { buffers };
        let bytes = crate::bound::max_live(&problem);
        if bytes > u128::from(u64::MAX) {
            return Err(Error::TooLarge { bytes });
        }
        Ok(problem)
    }

    /// The buffers, indexed by [`BufferId`].
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// One buffer.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.index()]
    }

    /// All ids, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = BufferId> + use<> {
        (0..self.buffers.len() as u32).map(BufferId)
    }

    /// Number of buffers.
    pub fn len(&self) -> usize {
        self.buffers.len()
    }

    /// Whether there is nothing to plan.
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty()
    }

    /// One past the last tick at which anything is alive; 0 when empty.
    pub fn end(&self) -> u64 {
        self.buffers.iter().map(|b| b.lifetime.end).max().unwrap_or(0)
    }
}
