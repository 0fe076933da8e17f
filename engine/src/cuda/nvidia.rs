//! NVIDIA's driver behind [`Device`]. It compiles and says what is missing; it has not met a GPU yet (docs/gpu.md).
//!
//! In: what a step asks of a device. Out: calls of the driver, all on one stream of the device's primary context. Never: a call of
//! a library that was not found, or memory beside the one range that is reserved.

use std::collections::HashMap;
use std::ffi::CString;

use cudarc::driver::{result, sys};

use super::cublaslt::CublasLt;
use super::device::{Device, DeviceError, Recording};
use super::launch::{Kernel, Launch};
use super::{Architecture, Cache, Family, KernelError, Nvrtc};

/// A GPU, with a range of its memory and what was recorded there.
#[derive(Debug)]
pub struct Nvidia {
    name: String,
    stream: sys::CUstream,
    architecture: Architecture,
    cache: Cache,
    products: CublasLt,
    modules: HashMap<Family, sys::CUmodule>,
    functions: HashMap<String, sys::CUfunction>,
    memory: Option<Mapped>,
    graphs: Vec<sys::CUgraphExec>,
    /// Last to be dropped: all the others live in it.
    context: Context,
}

// SAFETY: the driver's handles belong to the process, and every method makes the context the thread's own before it uses them.
unsafe impl Send for Nvidia {}

/// The primary context of a device, which is shared with whoever else uses the device in this process.
#[derive(Debug)]
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained when this was made.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Device memory at a range of addresses of its own.
#[derive(Debug, Clone, Copy)]
struct Mapped {
    address: sys::CUdeviceptr,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

/// Shared memory of a block that a kernel need not ask for.
const USUAL_SHARED_BYTES: u32 = 48 << 10;

/// Names a call, and the device that failed at it.
trait Named<T> {
    fn named(self, device: &str, call: &str) -> Result<T, DeviceError>;
}

impl<T> Named<T> for Result<T, result::DriverError> {
    fn named(self, device: &str, call: &str) -> Result<T, DeviceError> {
        let what = |error: result::DriverError| error.to_string();
        self.map_err(|error| DeviceError::Driver { device: device.into(), call: call.into(), what: what(error) })
    }
}

impl Nvidia {
    /// The GPU of this number, with kernels kept in `cache`.
    ///
    /// # Errors
    /// [`DeviceError::Missing`] where there is no driver or no cuBLASLt, and what the driver says of the device.
    pub fn new(ordinal: i32, cache: Cache) -> Result<Self, DeviceError> {
        // SAFETY: the driver's library is one that may be loaded at any time.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::Missing { what: "NVIDIA driver", remedy: "install it, or train on the CPU" });
        }
        let number = format!("GPU {ordinal}");
        result::init().named(&number, "cuInit")?;
        let device = result::device::get(ordinal).named(&number, "cuDeviceGet")?;
        let name = result::device::get_name(device).named(&number, "cuDeviceGetName")?;
        let name = format!("{number} ({})", name);
        let attribute = |attribute| {
            // SAFETY: the device was found by the driver.
            unsafe { result::device::get_attribute(device, attribute) }.named(&name, "cuDeviceGetAttribute")
        };
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        };
        let architecture = Architecture {
            major: attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            minor: attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        };
        // SAFETY: as above; the context is released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.named(&name, "cuDevicePrimaryCtxRetain")?;
        let context = Context { device, context };
        // SAFETY: the context has just been retained.
        unsafe { result::ctx::set_current(context.context) }.named(&name, "cuCtxSetCurrent")?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking).named(&name, "cuStreamCreate")?;
        let products = CublasLt::new(&name)?;
        let (modules, functions) = (HashMap::new(), HashMap::new());
        let (memory, graphs) = (None, Vec::new());
        Ok(Self { name, stream, architecture, cache, products, modules, functions, memory, graphs, context })
    }

    /// Makes the context the thread's own.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: it is retained as long as this is there.
        unsafe { result::ctx::set_current(self.context.context) }.named(&self.name, "cuCtxSetCurrent")
    }

    fn wait(&self) -> Result<(), DeviceError> {
        // SAFETY: the stream is there as long as this is.
        unsafe { result::stream::synchronize(self.stream) }.named(&self.name, "cuStreamSynchronize")
    }

    /// Where memory is made.
    fn kind(&self) -> sys::CUmemAllocationProp {
        // SAFETY: a struct of numbers and a pointer that may be null, of which zeros mean nothing special.
        let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        kind.location.id = self.context.device;
        kind
    }

    /// Memory of at least so many bytes at addresses of its own.
    fn map(&self, bytes: u64) -> Result<Mapped, DeviceError> {
        let (name, kind) = (&self.name, self.kind());
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: it writes one number.
        unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &kind, minimum).result() }
            .named(name, "cuMemGetAllocationGranularity")?;
        let bytes = (bytes as usize).next_multiple_of(granularity.max(1));
        let (free, total) = result::mem_get_info().named(name, "cuMemGetInfo")?;
        if bytes > free {
            let (needed, free, total) = (bytes as u64, free as u64, total as u64);
            return Err(DeviceError::OutOfMemory { device: name.clone(), needed, free, total });
        }
        let (mut handle, mut address) = (0, 0);
        // SAFETY: each writes one number; what was made before is given back where a later one fails.
        unsafe {
            sys::cuMemCreate(&mut handle, bytes, &kind, 0).result().named(name, "cuMemCreate")?;
            let reserved = sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0).result();
            if let Err(error) = reserved.named(name, "cuMemAddressReserve") {
                let _ = sys::cuMemRelease(handle);
                return Err(error);
            }
            let mapped = sys::cuMemMap(address, bytes, 0, handle, 0).result().named(name, "cuMemMap");
            let access = sys::CUmemAccessDesc {
                location: kind.location,
                flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            };
            let all = mapped.and_then(|()| {
                sys::cuMemSetAccess(address, bytes, &access, 1).result().named(name, "cuMemSetAccess").inspect_err(
                    |_| {
                        let _ = sys::cuMemUnmap(address, bytes);
                    },
                )
            });
            if let Err(error) = all {
                let _ = sys::cuMemAddressFree(address, bytes);
                let _ = sys::cuMemRelease(handle);
                return Err(error);
            }
        }
        Ok(Mapped { address, bytes, handle })
    }

    /// Whether a copy stays within the memory that is there.
    fn expect_inside(&self, address: u64, bytes: usize, call: &str) -> Result<(), DeviceError> {
        let inside = self.memory.is_some_and(|memory| {
            address >= memory.address && address - memory.address + bytes as u64 <= memory.bytes as u64
        });
        let what = || format!("{bytes} bytes at {address:#x} are not in the memory that was reserved");
        let error = || DeviceError::Driver { device: self.name.clone(), call: call.into(), what: what() };
        if inside { Ok(()) } else { Err(error()) }
    }

    /// Compiles and loads a kernel, if that has not been done.
    fn load(&mut self, kernel: &Kernel) -> Result<(), DeviceError> {
        if self.functions.contains_key(&kernel.name) {
            return Ok(());
        }
        let module = match self.modules.get(&kernel.family) {
            Some(&module) => module,
            None => {
                let code = self.cache.load(Nvrtc::load()?, kernel.family, self.architecture)?;
                // SAFETY: the code is a whole CUBIN, which says itself how long it is.
                let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
                let module = module.named(&self.name, &format!("loading {}", kernel.family.file()))?;
                self.modules.insert(kernel.family, module);
                module
            }
        };
        let symbol = CString::new(kernel.name.as_str()).expect("names of kernels are words");
        // SAFETY: the module is never unloaded before this is dropped.
        let function = unsafe { result::module::get_function(module, symbol) };
        let function = function.named(&self.name, &format!("finding {}", kernel.name))?;
        self.functions.insert(kernel.name.clone(), function);
        Ok(())
    }

    /// Starts a kernel on the stream.
    ///
    /// # Safety
    /// The addresses in its arguments are those of memory that is as large as the kernel takes it to be.
    unsafe fn start(&self, kernel: &Kernel) -> Result<(), DeviceError> {
        let &Kernel { grid: [x, y, z], block, shared_bytes, .. } = kernel;
        // Tensors of nothing.
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let call =
            || format!("launching {} as {x} × {y} × {z} blocks of {block}, {shared_bytes} bytes shared", kernel.name);
        let function = self.functions[&kernel.name];
        if shared_bytes > USUAL_SHARED_BYTES {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe { sys::cuFuncSetAttribute(function, attribute, shared_bytes as i32).result() }
                .named(&self.name, &call())?;
        }
        let mut arguments = [kernel.arguments.as_ref().address().cast_mut()];
        let (grid, block) = ((x, y, z), (block, 1, 1));
        // SAFETY: the kernel takes one struct, which the driver copies before it returns; the rest is this function's contract.
        unsafe { result::launch_kernel(function, grid, block, shared_bytes, self.stream, &mut arguments) }
            .named(&self.name, &call())
    }
}

impl Device for Nvidia {
    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        self.enter()?;
        if self.memory.is_some() {
            let (device, what) = (self.name.clone(), "there is memory already".into());
            return Err(DeviceError::Driver { device, call: "reserving memory".into(), what });
        }
        let mapped = self.map(bytes)?;
        self.memory = Some(mapped);
        Ok(mapped.address)
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.enter()?;
        self.expect_inside(address, bytes.len(), "cuMemcpyHtoD")?;
        self.wait()?;
        // SAFETY: the range lies in memory that is mapped, and nothing that was started is under way.
        unsafe { result::memcpy_htod_sync(address, bytes) }.named(&self.name, "cuMemcpyHtoD")
    }

    fn read(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.enter()?;
        self.expect_inside(address, bytes.len(), "cuMemcpyDtoH")?;
        self.wait()?;
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_sync(bytes, address) }.named(&self.name, "cuMemcpyDtoH")
    }

    fn record(&mut self, launches: Vec<Launch>) -> Result<Recording, DeviceError> {
        self.enter()?;
        // Nothing may be loaded, compiled or chosen while a graph is captured.
        for launch in &launches {
            match launch {
                Launch::Kernel(kernel) => self.load(kernel)?,
                Launch::Product(product) => self.products.choose(product)?,
            }
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is this device's own, and captures nothing yet.
        unsafe { result::stream::begin_capture(self.stream, mode) }.named(&self.name, "cuStreamBeginCapture")?;
        let started = launches.iter().try_for_each(|launch| match launch {
            // SAFETY: the addresses come from a plan that has passed the checker, in memory of its size.
            Launch::Kernel(kernel) => unsafe { self.start(kernel) },
            // SAFETY: as above.
            Launch::Product(product) => unsafe { self.products.start(product, self.stream) },
        });
        // Ended in any case: a stream that goes on capturing could do nothing else.
        // SAFETY: the capture was begun above.
        let graph = unsafe { result::stream::end_capture(self.stream) }.named(&self.name, "cuStreamEndCapture");
        started?;
        let graph = graph?;
        // SAFETY: the graph is whole; what is made of it does not need it any more.
        let ready = unsafe {
            let ready = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = sys::cuGraphDestroy(graph);
            ready
        };
        self.graphs.push(ready.named(&self.name, "cuGraphInstantiate")?);
        Ok(Recording(self.graphs.len() - 1))
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: the graph's memory is mapped as long as this is there, and one run ends before the next begins.
        unsafe { result::graph::launch(self.graphs[recording.0], self.stream) }.named(&self.name, "cuGraphLaunch")?;
        self.wait()
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        // What fails here leaves memory to the end of the process.
        let _ = self.enter().and_then(|()| self.wait());
        // SAFETY: nothing is under way, and nobody else has these handles.
        unsafe {
            for graph in self.graphs.drain(..) {
                let _ = sys::cuGraphExecDestroy(graph);
            }
            for (_, module) in self.modules.drain() {
                let _ = sys::cuModuleUnload(module);
            }
            if let Some(Mapped { address, bytes, handle }) = self.memory.take() {
                let _ = sys::cuMemUnmap(address, bytes);
                let _ = sys::cuMemAddressFree(address, bytes);
                let _ = sys::cuMemRelease(handle);
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// The device has no say in how a kernel is compiled.
impl From<KernelError> for DeviceError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Here, or on a machine with a GPU, one of the two has something to judge.
    #[test]
    fn a_machine_has_a_gpu_or_the_error_says_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let mut device = match Nvidia::new(0, Cache::new(folder.path())) {
            Ok(device) => device,
            Err(error) => {
                println!("not judged: {error}");
                let text = error.to_string();
                assert!(matches!(error, DeviceError::Missing { .. } | DeviceError::Driver { .. }), "{text}");
                return;
            }
        };
        let address = device.reserve(1000).unwrap();
        let bytes: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        device.write(address, &bytes).unwrap();
        let mut back = vec![0; 1000];
        device.read(address, &mut back).unwrap();
        assert_eq!(bytes, back);
        assert!(device.read(address + (1 << 40), &mut back).is_err());
    }
}
