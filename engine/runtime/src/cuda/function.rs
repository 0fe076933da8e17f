//! A loaded kernel, and how much shared memory its blocks may have.

use cudarc::driver::sys;
use gapless_kernels::cuda::launch::Kernel;

use super::device::DeviceError;
use super::named::Named;

/// The first version of the driver with `cuFuncLoad`.
const FIRST_WITH_LOAD: i32 = 12_040;

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
    /// A function of a module, once its code is on the device: the driver's own default is to wait for the first launch
    /// (`CUDA_MODULE_LOADING=LAZY`), which may be one that is captured.
    ///
    /// # Errors
    /// What the driver says, of this version.
    pub fn loaded(handle: sys::CUfunction, name: &str, device: &str, driver: i32) -> Result<Self, DeviceError> {
        let loaded = if driver >= FIRST_WITH_LOAD {
            // SAFETY: the function is its module's, which is there.
            unsafe { sys::cuFuncLoad(handle).result() }
        } else {
            let (mut registers, attribute) = (0, sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
            // Only of code that is there can this be said.
            // SAFETY: as above; the result outlives the call.
            unsafe { sys::cuFuncGetAttribute(&mut registers, attribute, handle).result() }
        };
        loaded.named(device, &format!("loading {name}"))?;
        Ok(Self { handle, shared_bytes: USUAL_SHARED_BYTES })
    }

    /// As the driver has it.
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
