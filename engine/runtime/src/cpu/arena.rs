//! The arena on the CPU: one f32 storage of candle's, so that planned ranges are candle tensors without a copy.

use std::cell::RefCell;

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Tensor};
use gapless_compile::internal::ALIGNMENT;

use crate::error::{Error, Result};

/// Bytes reserved once. Nothing else is allocated afterwards.
#[derive(Debug)]
pub(crate) struct Arena {
    storage: Tensor,
    /// One element of the storage. Candle hands the *whole* storage to an in-place operation on it, under its write
    /// lock; on a one-element view it has nothing to sort out, and allocates nothing.
    handle: Tensor,
    /// Elements in front of the first aligned one.
    pad: usize,
    /// Elements of the storage.
    elements: usize,
    bytes: u64,
}

impl Arena {
    /// Reserves `bytes`. The system gives the pages as they are touched.
    pub(crate) fn new(bytes: u64) -> Result<Self> {
        let elements = bytes.div_ceil(4) as usize + ALIGNMENT as usize / 4;
        // Where the allocator would abort the process, a trial is refused.
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

    /// A planned range as a candle tensor that shares the arena's bytes.
    pub(crate) fn view(&self, offset: u64, shape: &Shape) -> Result<Tensor> {
        let range = self.storage.narrow(0, self.pad + (offset / 4) as usize, shape.elem_count())?;
        Ok(range.reshape(shape.clone())?)
    }

    /// Calls `f` with the address of byte 0, while candle's lock keeps everyone else out. Allocates nothing.
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
