//! A loaded kernel, and how much shared memory its blocks may have.

use cudarc::driver::sys;
use gapless_kernels::cuda::launch::Kernel;

use super::device::DeviceError;
use super::nvidia::Named;

/// A loaded kernel.
#[derive(Debug)]
pub(super) struct Function {
    handle: sys::CUfunction,
    /// Shared memory that a block of it may have.
    shared_bytes: u32,
}

/// Shared memory of a block that a kernel need not ask for.
const USUAL_SHARED_BYTES: u32 = 48 << 10;

impl Function {
    /// As the driver has it.
    pub fn new(handle: sys::CUfunction) -> Self {
        Self { handle, shared_bytes: USUAL_SHARED_BYTES }
    }

    /// What the driver launches, as long as its module is loaded.
    pub fn handle(&self) -> sys::CUfunction {
        self.handle
    }

    /// Allows a block as much shared memory as a launch of it wants.
    ///
    /// # Errors
    /// What the driver says: the device may not have as much.
    pub fn allow(&mut self, kernel: &Kernel, device: &str) -> Result<(), DeviceError> {
        let &Kernel { shared_bytes, ref name, .. } = kernel;
        if shared_bytes > self.shared_bytes {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { sys::cuFuncSetAttribute(self.handle, attribute, shared_bytes as i32).result() }
                .named(device, &format!("allowing {name} {shared_bytes} bytes of shared memory"))?;
            self.shared_bytes = shared_bytes;
        }
        Ok(())
    }
}
