//! Loads kernels, chooses algorithms, and starts both on the device's stream.
//!
//! - In: launches.
//! - Out: loaded functions and chosen algorithms, and the driver's calls in order.
//! - Never: a wait for the device.

use std::collections::HashMap;
use std::ffi::CString;

use cudarc::driver::result;
use gapless_kernels::cuda::launch::{Kernel, Launch, Product};

use super::Nvidia;
use crate::cuda::context::exclusive;
use crate::cuda::cublaslt::Algorithm;
use crate::cuda::device::{Describe, DeviceError};
use crate::cuda::function::Function;
use crate::cuda::named::Named;

/// Products of forms for which no algorithm was chosen before, each with the index of its launch.
pub(super) type Tried = Vec<(usize, Product)>;

/// Launches that replace products whose epilogues have no algorithm, by index of the replaced launch.
pub(super) type Instead = HashMap<usize, Vec<Launch>>;

/// Returns the launches that replace a launch, or the launch itself.
fn parts<'a>(instead: &'a Instead, index: usize, launch: &'a Launch) -> &'a [Launch] {
    instead.get(&index).map_or(std::slice::from_ref(launch), Vec::as_slice)
}

impl Nvidia {
    /// Compiles and loads a kernel, unless it is loaded already.
    pub(super) fn load(&mut self, kernel: &Kernel) -> Result<(), DeviceError> {
        if let Some(known) = self.functions.get_mut(&(kernel.family, kernel.name.clone())) {
            return known.allow(kernel, &self.name);
        }
        let module = match self.modules.get(&kernel.family) {
            Some(&module) => module,
            None => {
                let architecture = self.architecture.of_family(kernel.family);
                let architecture = architecture.expect("launches are those of the device's features");
                let code = self.cache.load(self.nvrtc, kernel.family, architecture)?;
                let _exclusive = exclusive();
                // SAFETY: the code is a complete CUBIN, whose header contains its length.
                let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
                let module = module.named(&self.name, &format!("loading {}", kernel.family.file()))?;
                self.modules.insert(kernel.family, module);
                module
            }
        };
        let symbol = CString::new(kernel.name.as_str()).expect("names of kernels are words");
        let _exclusive = exclusive();
        // SAFETY: the module stays loaded until this device is dropped.
        let function = unsafe { result::module::get_function(module, symbol) };
        let function = function.named(&self.name, &format!("finding {}", kernel.name))?;
        let mut function = Function::loaded(function, &kernel.name, &self.name, self.driver)?;
        function.allow(kernel, &self.name)?;
        self.functions.insert((kernel.family, kernel.name.clone()), function);
        Ok(())
    }

    /// Compiles and loads all kernels, and chooses an algorithm for every product. If a product with an epilogue has
    /// no algorithm, it is replaced by separate launches of the product and the epilogue. Returns these replacements,
    /// and the products of new forms.
    pub(super) fn prepare(
        &mut self,
        launches: &[Launch],
        describe: Describe<'_>,
    ) -> Result<(Instead, Tried), DeviceError> {
        let (mut instead, mut chosen) = (Instead::new(), Vec::new());
        for (index, launch) in launches.iter().enumerate() {
            let what_for = |error: DeviceError| error.during(&describe(index));
            let product = match launch {
                Launch::Kernel(kernel) => {
                    self.load(kernel).map_err(what_for)?;
                    continue;
                }
                Launch::Product(product) => product,
                Launch::Copy(copy) => {
                    self.copies.as_mut().map_or(Ok(()), |copies| copies.prepare(copy)).map_err(what_for)?;
                    continue;
                }
                Launch::CopyEnd(_) => continue,
            };
            match self.products.choose(product).map_err(what_for)? {
                Algorithm::Known => {}
                Algorithm::New => chosen.push((index, *product)),
                Algorithm::None { why, .. } if !product.is_followed() => return Err(what_for(why)),
                Algorithm::None { why, is_new } => {
                    if is_new {
                        tracing::warn!(product = describe(index), %why, "no algorithm with an epilogue; two launches");
                    }
                    let apart = product.apart();
                    let of_apart = self.prepare(&apart, &|_| describe(index))?.1;
                    chosen.extend(of_apart.into_iter().map(|(_, product)| (index, product)));
                    instead.insert(index, apart);
                }
            }
        }
        Ok((instead, chosen))
    }

    /// Starts launches on the stream, one after another.
    pub(super) fn start_all(
        &mut self,
        launches: &[Launch],
        instead: &Instead,
        describe: Describe<'_>,
    ) -> Result<(), DeviceError> {
        launches.iter().enumerate().try_for_each(|(index, launch)| {
            parts(instead, index, launch).iter().try_for_each(|part| {
                let main = self.stream.handle();
                let started = match part {
                    // SAFETY: the addresses come from a checked plan, in memory as large as the plan.
                    Launch::Kernel(kernel) => unsafe { self.start(kernel) },
                    // SAFETY: as above.
                    Launch::Product(product) => unsafe { self.products.start(product, main) },
                    Launch::Copy(copy) => match &mut self.copies {
                        // SAFETY: as above; host memory was reserved for all copies.
                        Some(copies) => unsafe { copies.start(copy, main) },
                        None => Err(self.unreserved()),
                    },
                    Launch::CopyEnd(index) => self.copies.as_mut().map_or(Ok(()), |copies| copies.end(*index, main)),
                };
                started.map_err(|error| error.during(&describe(index)))
            })
        })
    }

    /// Returns the error for a copy without [`reserve_host`](crate::cuda::Device::reserve_host).
    fn unreserved(&self) -> DeviceError {
        let what = "no host memory was reserved".into();
        DeviceError::Driver { device: self.name.clone(), call: "copying an offloaded activation".into(), what }
    }

    /// Starts a kernel on the stream.
    ///
    /// # Safety
    /// Each address in the kernel's arguments must point to device memory that is as large as the kernel assumes.
    unsafe fn start(&self, kernel: &Kernel) -> Result<(), DeviceError> {
        let &Kernel { grid: [x, y, z], block, shared_bytes, .. } = kernel;
        // An empty tensor.
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let call =
            || format!("launching {} as {x} × {y} × {z} blocks of {block}, {shared_bytes} bytes shared", kernel.name);
        let function = self.functions[&(kernel.family, kernel.name.clone())].handle();
        let mut arguments = [kernel.arguments.as_ref().address().cast_mut()];
        let (grid, block) = ((x, y, z), (block, 1, 1));
        // SAFETY: the kernel takes one struct, which the driver copies before the call returns. The caller guarantees
        // the addresses.
        unsafe { result::launch_kernel(function, grid, block, shared_bytes, self.stream.handle(), &mut arguments) }
            .named(&self.name, &call())
    }
}
