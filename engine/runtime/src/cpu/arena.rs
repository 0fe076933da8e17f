//! The arena on the CPU: one candle storage of f32, so that a planned range can be viewed as a candle tensor without
//! a copy.

use std::cell::RefCell;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Tensor};
use gapless_compile::internal::ALIGNMENT;

use crate::error::{Error, Result};

/// Memory that is reserved once. Nothing is allocated while programs run.
#[derive(Debug)]
pub(crate) struct Arena {
    storage: Tensor,
    /// A one-element view of the storage. For an in-place operation, candle passes the *whole* storage under its
    /// write lock. A one-element view keeps candle from computing with a large layout, so the operation does not
    /// allocate.
    handle: Tensor,
    /// Number of elements of the storage before the first aligned one, which is byte 0 of the arena.
    pad: usize,
    /// Total elements of the storage.
    elements: usize,
    bytes: u64,
}

impl Arena {
    /// Reserves `bytes`. The system provides the pages when they are first touched.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let elements = bytes.div_ceil(4) as usize + ALIGNMENT as usize / 4;
        // A trial reservation can return an error. If memory is short, candle's own allocation would abort the
        // process.
        let mut trial: Vec<f32> = Vec::new();
        trial.try_reserve_exact(elements).map_err(|_| Error::Reserve { bytes })?;
        drop(trial);
        let storage = Tensor::zeros(elements, DType::F32, &Device::Cpu)?;
        let handle = storage.narrow(0, 0, 1)?;
        let arena = Self { storage, handle, pad: 0, elements, bytes };
        let address = arena.exclusive(|base| base as usize)?;
        let pad = (ALIGNMENT as usize - address % ALIGNMENT as usize) % ALIGNMENT as usize / 4;
        Ok(Self { pad, ..arena })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns a planned range as a candle tensor that shares the arena's bytes.
    pub(crate) fn view(&self, offset: u64, shape: &Shape) -> Result<Tensor> {
        let range = self.storage.narrow(0, self.pad + (offset / 4) as usize, shape.elem_count())?;
        Ok(range.reshape(shape.clone())?)
    }

    /// Calls `f` with the address of the arena's byte 0 while holding candle's write lock. Allocates nothing.
    pub(crate) fn exclusive<R>(&self, f: impl FnOnce(*mut u8) -> R) -> Result<R> {
        let op =
            Exclusive { f: RefCell::new(Some(f)), result: RefCell::new(None), pad: self.pad, elements: self.elements };
        self.handle.inplace_op1(&op)?;
        op.result.into_inner().ok_or_else(|| Error::BadRun { what: "the operation of the arena did not run".into() })
    }
}

struct Exclusive<F, R> {
    f: RefCell<Option<F>>,
    result: RefCell<Option<R>>,
    pad: usize,
    elements: usize,
}

impl<F: FnOnce(*mut u8) -> R, R> InplaceOp1 for Exclusive<F, R> {
    fn name(&self) -> &'static str {
        "gapless"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let CpuStorage::F32(elements) = storage else { candle_core::bail!("the arena is f32") };
        if elements.len() != self.elements {
            candle_core::bail!("the arena's storage was replaced by one of {} elements", elements.len());
        }
        let base = elements[self.pad..].as_mut_ptr().cast::<u8>();
        *self.result.borrow_mut() = self.f.borrow_mut().take().map(|f| f(base));
        Ok(())
    }
}
