//! The implementation of [`Device`] for NVIDIA's driver.
//!
//! - In: calls of the trait.
//! - Out: calls of the driver, all on one stream of the device's primary context.
//! - Never: a call into a library that was not found, or device memory of its own besides the one reserved range.

mod launch;
mod tune;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};
use gapless_communicator::{self as communicator, Communicator, CommunicatorError, Nccl, Sums};
use gapless_kernels::cuda::Family;
use gapless_kernels::cuda::launch::{Features, Launch};

use super::context::{Context, exclusive};
use super::copies::Copies;
use super::cublaslt::CublasLt;
use super::device::{Describe, Device, DeviceError, DeviceMemory, Recording, time_from_here};
use super::event::{self, Event};
use super::function::Function;
use super::libraries::{keep_from_packages, taken};
use super::mapped::{Mapped, used};
use super::named::Named;
use super::stream::Stream;
use super::{Architecture, Cache, KernelError, Nvrtc};

/// A GPU, with one reserved range of its memory and the recordings that run there.
#[derive(Debug)]
pub struct Nvidia {
    /// The driver's name for the card.
    card: String,
    /// The name shown to users: ordinal, card and PCI bus id.
    name: String,
    /// CUDA's index of the GPU, which is only valid in this process.
    ordinal: usize,
    /// PCI bus id.
    bus: String,
    /// The newest CUDA version that the driver supports; 13000 means 13.0.
    driver: i32,
    stream: Arc<Stream>,
    architecture: Architecture,
    nvrtc: &'static Nvrtc,
    cache: Cache,
    products: CublasLt,
    modules: HashMap<Family, sys::CUmodule>,
    functions: HashMap<(Family, String), Function>,
    memory: Option<Mapped>,
    graphs: Vec<sys::CUgraphExec>,
    /// True if products of f32 matrices use TF32.
    uses_tf32: bool,
    /// The folder of the file for offloaded activations; `None` if they stay in host memory.
    offload_to: Option<PathBuf>,
    copies: Option<Copies>,
    /// Device memory used besides the arena: for each cause, the bytes by which the use rose, in order.
    beside: Vec<(&'static str, u64)>,
    device: sys::CUdevice,
    context: Context,
}

// SAFETY: driver handles are valid in all threads of the process, and every method makes the context current before
// it uses the handles.
unsafe impl Send for Nvidia {}

/// The newest CUDA version that the driver supports; 13000 means 13.0.
fn driver_version(device: &str) -> Result<i32, DeviceError> {
    let mut version = 0;
    // SAFETY: the result outlives the call.
    unsafe { sys::cuDriverGetVersion(&mut version).result() }.named(device, "cuDriverGetVersion")?;
    Ok(version)
}

impl Nvidia {
    /// Returns the number of GPUs; 0 if there is no driver.
    pub fn count() -> usize {
        // SAFETY: loading the driver's library has no preconditions.
        let is_there = unsafe { sys::is_culib_present() } && result::init().is_ok();
        let count = if is_there { result::device::get_count().unwrap_or(0) } else { 0 };
        usize::try_from(count).unwrap_or(0)
    }

    /// Opens a GPU by its ordinal. Compiled kernels are kept in `cache`.
    ///
    /// # Errors
    /// Returns [`DeviceError::Missing`] if the driver or cuBLASLt is missing, [`DeviceError::Kernel`] if NVRTC is
    /// missing, and [`DeviceError::Unusable`] if the driver or the kernels do not support the GPU. Returns other
    /// errors if the driver fails.
    pub fn new(ordinal: usize, cache: Cache) -> Result<Self, DeviceError> {
        // SAFETY: loading the driver's library has no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::Missing { what: "NVIDIA driver", remedy: "install it, or train on the CPU" });
        }
        let number = format!("GPU {ordinal}");
        let unusable =
            |error: result::DriverError| DeviceError::Unusable { device: number.clone(), what: error.to_string() };
        result::init().map_err(unusable)?;
        let device = result::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX)).map_err(unusable)?;
        let card = result::device::get_name(device).named(&number, "cuDeviceGetName")?;
        let attribute = |attribute| {
            // SAFETY: the driver returned this device.
            unsafe { result::device::get_attribute(device, attribute) }.named(&number, "cuDeviceGetAttribute")
        };
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
        };
        let bus =
            [CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID];
        let [domain, bus, slot] = bus.map(attribute);
        // CUDA ordinals are only valid in one process. The PCI bus id is what nvidia-smi shows, also in its list of
        // processes that hold memory.
        let bus = format!("{:08X}:{:02X}:{:02X}.0", domain?, bus?, slot?);
        let name = format!("{number} ({card}, {bus})");
        let architecture = Architecture::new(
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        );
        if architecture < Architecture::OLDEST {
            let what = format!("it is {architecture}, and kernels need {} or later", Architecture::OLDEST);
            return Err(DeviceError::Unusable { device: name, what });
        }
        let context = Context::of(device, &name)?;
        context.enter(&name)?;
        let before = used(&name)?.in_use;
        let driver = driver_version(&name)?;
        let nvrtc = Nvrtc::load(Some(driver / 1000))?;
        let products = CublasLt::new(&name, driver / 1000)?;
        let stream = Arc::new(Stream::new(context, &name)?);
        let libraries = used(&name)?.in_use.saturating_sub(before);
        let beside = vec![("driver's context, and other processes", before), ("cuBLASLt", libraries)];
        let (modules, functions) = (HashMap::new(), HashMap::new());
        let (memory, graphs) = (None, Vec::new());
        tracing::info!(device = name, libraries = ?taken(&LIBRARIES), "using a GPU");
        Ok(Self {
            card,
            name,
            ordinal,
            bus,
            driver,
            stream,
            architecture,
            nvrtc,
            cache,
            products,
            modules,
            functions,
            memory,
            graphs,
            uses_tf32: false,
            offload_to: None,
            copies: None,
            beside,
            device,
            context,
        })
    }

    /// The driver's name for the card; equal models have the same name.
    pub fn card(&self) -> &str {
        &self.card
    }

    /// The architecture that kernels are compiled for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The newest CUDA version that the driver supports, such as "13.0".
    pub fn driver(&self) -> String {
        format!("{}.{}", self.driver / 1000, self.driver % 1000 / 10)
    }

    /// The files that the driver, cuBLASLt and NVRTC were loaded from.
    pub fn libraries(&self) -> Vec<String> {
        taken(&LIBRARIES)
    }

    /// Allocates host memory that the device can access at the same address.
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn mapped_host_memory(&self, bytes: usize) -> Result<u64, DeviceError> {
        self.enter()?;
        let (mut address, flags) = (0, sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP);
        let _exclusive = exclusive();
        // SAFETY: the context is current; the result outlives the call.
        let found = unsafe {
            let memory = result::malloc_host(bytes.max(1), flags).named(&self.name, "cuMemHostAlloc")?;
            sys::cuMemHostGetDevicePointer_v2(&mut address, memory, 0).result().map(|()| memory)
        };
        let memory = found.named(&self.name, "cuMemHostGetDevicePointer")?;
        // This holds wherever host and device share one address space, as on every 64-bit Linux.
        assert_eq!(address, memory.expose_provenance() as u64, "the device has it at another address");
        Ok(address)
    }

    /// Frees memory of [`Self::mapped_host_memory`].
    #[cfg(feature = "testing")]
    #[doc(hidden)]
    pub fn free_host_memory(&self, address: u64) {
        let memory = std::ptr::with_exposed_provenance_mut(address as usize);
        let _exclusive = exclusive();
        // SAFETY: the caller no longer uses the memory.
        let _ = self.enter().map(|()| unsafe { result::free_host(memory) });
    }

    /// Makes the device's context current in this thread.
    fn enter(&self) -> Result<(), DeviceError> {
        self.context.enter(&self.name)
    }

    /// Returns an error if a copy would access bytes outside the reserved memory.
    fn expect_inside(&self, address: u64, bytes: usize, call: &str) -> Result<(), DeviceError> {
        let inside = self.memory.as_ref().is_some_and(|memory| memory.holds(address, bytes));
        let what = || format!("{bytes} bytes at {address:#x} are outside the reserved memory");
        let error = || DeviceError::Driver { device: self.name.clone(), call: call.into(), what: what() };
        if inside { Ok(()) } else { Err(error()) }
    }

    /// Records an event after all work that is on the stream.
    fn mark(&self) -> Result<Event, DeviceError> {
        let event = Event::new(&self.name)?;
        event.record(&self.name, self.stream.handle())?;
        Ok(event)
    }

    /// Waits for all work, and returns the bytes of device memory in use.
    fn in_use(&self) -> Result<u64, DeviceError> {
        self.stream.synchronize()?;
        Ok(used(&self.name)?.in_use)
    }
}

/// A captured graph.
struct Captured(sys::CUgraph);

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: this struct is the graph's only owner.
        let _ = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// The environment variable that disables NCCL between ranks if its value is "off".
const NCCL_VARIABLE: &str = "GAPLESS_NCCL";

/// `off` makes a GPU with `wgmma` use the kernels for all tensor cores (`mma.sync`).
const WGMMA_VARIABLE: &str = "GAPLESS_WGMMA";

/// File name prefixes of the driver, cuBLASLt and NVRTC.
const LIBRARIES: [&str; 3] = ["libcuda.so", "libcublasLt.so", "libnvrtc.so"];

impl Device for Nvidia {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn features(&self) -> Features {
        let is_off = std::env::var(WGMMA_VARIABLE).is_ok_and(|value| value == "off");
        Features { warpgroups: self.architecture == Architecture::WARPGROUPS && !is_off, tf32: self.uses_tf32 }
    }

    fn use_tf32(&mut self) {
        self.uses_tf32 = true;
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        self.enter()?;
        if self.memory.is_some() {
            let (device, what) = (self.name.clone(), "memory is reserved already".into());
            return Err(DeviceError::Driver { device, call: "reserving memory".into(), what });
        }
        let mapped = Mapped::new(&self.name, self.device, bytes)?;
        let address = mapped.address();
        self.memory = Some(mapped);
        Ok(address)
    }

    fn extend(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.enter()?;
        match &mut self.memory {
            Some(memory) => memory.extend(&self.name, bytes),
            None => self.reserve(bytes).map(drop),
        }
    }

    fn offload_to(&mut self, folder: &Path) {
        self.offload_to = Some(folder.into());
    }

    fn has_offload_file(&self) -> bool {
        self.offload_to.is_some()
    }

    fn reserve_host(&mut self, bytes: u64, largest: u64) -> Result<(), DeviceError> {
        self.enter()?;
        let before = self.in_use()?;
        self.copies = Some(Copies::new(self.context, &self.name, self.offload_to.as_deref(), (bytes, largest))?);
        let more = self.in_use()?.saturating_sub(before);
        self.beside.extend((more > 0).then_some(("copies to the host", more)));
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.enter()?;
        self.expect_inside(address, bytes.len(), "cuMemcpyHtoDAsync")?;
        // The copy must be on the stream. Any other copy may return before its last bytes have arrived ("API
        // synchronization behavior"), and the stream would not wait for these bytes.
        //
        // SAFETY: the range is mapped, and the bytes live until the copy has been waited for.
        let started = unsafe { result::memcpy_htod_async(address, bytes, self.stream.handle()) };
        let waited = self.stream.synchronize();
        started.named(&self.name, "cuMemcpyHtoDAsync").and(waited)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.enter()?;
        self.expect_inside(address, bytes.len(), "cuMemcpyDtoH")?;
        self.stream.synchronize()?;
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_sync(bytes, address) }.named(&self.name, "cuMemcpyDtoH")
    }

    fn record(&mut self, launches: Vec<Launch>, describe: Describe<'_>) -> Result<Recording, DeviceError> {
        self.enter()?;
        let before = self.in_use()?;
        // Kernels are compiled and loaded, and algorithms are chosen, before the capture, because a capture forbids all
        // of this.
        let (instead, chosen) = self.prepare(&launches, describe)?;
        self.try_out(&chosen, describe)?;
        let prepared = self.in_use()?;
        let exclusive = exclusive();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream belongs to this device and is not capturing.
        unsafe { result::stream::begin_capture(self.stream.handle(), mode) }
            .named(&self.name, "cuStreamBeginCapture")?;
        // All copies must end within the capture.
        let started = self.start_all(&launches, &instead, describe).and_then(|()| {
            let main = self.stream.handle();
            self.copies.as_mut().map_or(Ok(()), |copies| copies.end_all(main))
        });
        // The capture must end even after an error, because a capturing stream cannot be used for anything else.
        //
        // SAFETY: the capture was begun above.
        let captured = unsafe { result::stream::end_capture(self.stream.handle()) }.map(Captured);
        // If a launch has failed, the capture fails too. The error of the launch comes first, because it says more.
        started?;
        let captured = captured.named(&self.name, "cuStreamEndCapture")?;
        // SAFETY: the capture has ended. The executable graph does not depend on the captured one.
        let ready = unsafe { result::graph::instantiate(captured.0, sys::CUgraphInstantiate_flags(0)) };
        let ready = ready.named(&self.name, "cuGraphInstantiate")?;
        self.graphs.push(ready);
        drop(captured);
        // Without the upload, the graph would allocate its device memory at the first replay, when the bytes in use
        // are no longer measured.
        //
        // SAFETY: the graph and the stream are valid.
        unsafe { result::graph::upload(ready, self.stream.handle()) }.named(&self.name, "cuGraphUpload")?;
        drop(exclusive);
        let after = self.in_use()?;
        for (what, bytes) in [("kernels", prepared.saturating_sub(before)), ("graphs", after.saturating_sub(prepared))]
        {
            match self.beside.iter_mut().find(|(known, _)| *known == what) {
                Some((_, sum)) => *sum += bytes,
                None => self.beside.push((what, bytes)),
            }
        }
        Ok(Recording(self.graphs.len() - 1))
    }

    fn run(&mut self, launches: &[Launch], describe: Describe<'_>) -> Result<(), DeviceError> {
        self.enter()?;
        let (instead, chosen) = self.prepare(launches, describe)?;
        let started = {
            // The first product by an algorithm loads its code.
            let _exclusive = (!chosen.is_empty()).then(exclusive);
            self.start_all(launches, &instead, describe)
        };
        let waited = self.stream.synchronize().map_err(|error| error.during(&describe(0)));
        if started.is_err() {
            // Copies that the main stream does not wait for must not go on in memory that the caller uses.
            self.copies.as_mut().map_or(Ok(()), Copies::abandon)?;
        }
        started.and(waited)
    }

    /// Times launches by events on the stream. All events are recorded before the first wait. So the device does not
    /// wait for the host, as long as running a kernel takes longer than launching it.
    fn time(&mut self, launches: &[&Launch], describe: Describe<'_>) -> Result<Vec<Duration>, DeviceError> {
        if self.driver < event::FIRST_VERSION {
            return time_from_here(self, launches, describe);
        }
        self.enter()?;
        let single = |index: usize| std::slice::from_ref(launches[index]);
        let prepared = (0..launches.len()).map(|index| self.prepare(single(index), &|_| describe(index)));
        let prepared = prepared.collect::<Result<Vec<_>, _>>()?;
        let _exclusive = prepared.iter().any(|(_, chosen)| !chosen.is_empty()).then(exclusive);
        let mut events = vec![self.mark()?];
        for (index, (instead, _)) in prepared.iter().enumerate() {
            self.start_all(single(index), instead, &|_| describe(index))?;
            events.push(self.mark()?);
        }
        let of_all = || format!("from {} on", describe(0));
        self.stream.synchronize().map_err(|error| error.during(&of_all()))?;
        events.windows(2).map(|pair| pair[1].since(&pair[0], &self.name)).collect()
    }

    fn algorithm(&self, launch: &Launch) -> Option<String> {
        let Launch::Product(product) = launch else { return None };
        self.products.algorithm(product)
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: the graph's memory stays mapped while this device exists, and one run ends before the next begins.
        unsafe { result::graph::launch(self.graphs[recording.0], self.stream.handle()) }
            .named(&self.name, "cuGraphLaunch")
    }

    fn fill(&mut self, address: u64, bytes: usize, value: u8) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter()?;
        self.expect_inside(address, bytes, "cuMemsetD8Async")?;
        // SAFETY: the range is mapped.
        unsafe { result::memset_d8_async(address, value, bytes, self.stream.handle()) }
            .named(&self.name, "cuMemsetD8Async")
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.enter()?;
        self.stream.synchronize()?;
        self.copies.as_ref().map_or(Ok(()), Copies::check)
    }

    fn exchange_id(&self) -> Result<String, String> {
        if std::env::var(NCCL_VARIABLE).is_ok_and(|value| value == "off") {
            return Err(format!("{NCCL_VARIABLE} is off"));
        }
        let of_packages = || keep_from_packages(&["libnccl.so.2"]);
        let found = Nccl::is_available().or_else(|error| if of_packages() { Nccl::is_available() } else { Err(error) });
        found.map_err(|error| error.to_string())?;
        Ok(self.bus.clone())
    }

    fn connect(
        &mut self,
        control: Box<dyn Communicator>,
        shares_process: bool,
    ) -> communicator::Result<Box<dyn Communicator>> {
        let entered = self.enter();
        if let Some(memory) = self.memory.as_mut().filter(|_| shares_process) {
            let shared = entered.and_then(|()| memory.share(&self.name));
            let failed = |error: DeviceError| CommunicatorError::Cuda {
                call: "giving other GPUs access to memory",
                what: error.to_string(),
            };
            shared.map_err(failed)?;
        }
        // SAFETY: the stream belongs to the device's primary context, and the `Arc` keeps the stream alive.
        let nccl = unsafe { Nccl::on_stream(control, self.ordinal, self.stream.handle().cast(), self.stream.clone()) };
        nccl.map(|mut nccl| -> Box<dyn Communicator> {
            nccl.set_sums(Sums::AnyOrder);
            Box::new(nccl)
        })
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.enter()?;
        let arena = self.memory.as_ref().map_or(0, Mapped::bytes);
        Ok(DeviceMemory { arena, beside: self.beside.clone(), ..used(&self.name)? })
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        // If this wait fails, device memory stays in use until the process ends.
        let _ = self.enter().and_then(|()| self.stream.synchronize());
        // Dropping this waits for copies that the stream has not waited for, as after an error. They use the memory.
        self.copies = None;
        let _exclusive = exclusive();
        // SAFETY: no work is running, and this struct is the handles' only owner.
        unsafe {
            for graph in self.graphs.drain(..) {
                let _ = sys::cuGraphExecDestroy(graph);
            }
            for (_, module) in self.modules.drain() {
                let _ = sys::cuModuleUnload(module);
            }
        }
    }
}

/// Converts an error of compiling, which does not depend on the device.
impl From<KernelError> for DeviceError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(Box::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a GPU, checks a copy to and from the device. On any other, checks that the error says what
    /// is missing.
    #[test]
    fn a_machine_has_a_gpu_or_the_error_says_what_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let mut device = match Nvidia::new(0, Cache::new(folder.path())) {
            Ok(device) => device,
            Err(error) => {
                gapless_testing::not_checked(&error);
                let text = error.to_string();
                assert!(error.is_absence() || matches!(error, DeviceError::Driver { .. }), "{text}");
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
