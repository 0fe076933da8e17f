//! Loaded kernels, and the amounts of shared memory that their blocks may use.

use cudarc::driver::sys;
use gapless_kernels::cuda::launch::Kernel;

use super::device::DeviceError;
use super::named::Named;

/// The first driver version that has `cuFuncLoad`.
const FIRST_WITH_LOAD: i32 = 12_040;

/// A loaded kernel.
#[derive(Debug)]
pub(super) struct Function {
    handle: sys::CUfunction,
    /// The shared memory that a block is allowed to use.
    shared_bytes: u32,
}

/// The shared memory that a block may use unless a launch has been allowed more.
const USUAL_SHARED_BYTES: u32 = 48 << 10;

impl Function {
    /// Ensures that a function's code is on the device. By default, the driver loads it at the first launch
    /// (`CUDA_MODULE_LOADING=LAZY`), which could happen while a stream is being captured. `driver` is the driver's
    /// version.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn loaded(handle: sys::CUfunction, name: &str, device: &str, driver: i32) -> Result<Self, DeviceError> {
        let loaded = if driver >= FIRST_WITH_LOAD {
            // SAFETY: the caller's function belongs to a module that is loaded.
            unsafe { sys::cuFuncLoad(handle).result() }
        } else {
            let (mut registers, attribute) = (0, sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
            // Only loaded code has this attribute, so asking for it loads the code.
            // SAFETY: as above; the result outlives the call.
            unsafe { sys::cuFuncGetAttribute(&mut registers, attribute, handle).result() }
        };
        loaded.named(device, &format!("loading {name}"))?;
        Ok(Self { handle, shared_bytes: USUAL_SHARED_BYTES })
    }

    /// The driver's handle.
    pub fn handle(&self) -> sys::CUfunction {
        self.handle
    }

    /// Allows the kernel's blocks to use as much shared memory as this launch requests.
    ///
    /// # Errors
    /// Returns the driver's error, for example if the device has less shared memory.
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
