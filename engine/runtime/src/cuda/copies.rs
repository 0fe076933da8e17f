//! Copies of offloaded activations between the device and the host, on a stream of their own.
//!
//! - In: copies and the ends of copies, in the order of the program.
//! - Out: calls of the driver, ordered by events. If the device's main stream is being captured, the copies become part
//!   of the graph.
//! - Never: a wait of the host.

use std::collections::HashMap;
use std::ffi::c_void;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};
use gapless_alloc::draw::Bytes;
use gapless_kernels::cuda::HostCopy;

use super::context::{Context, exclusive};
use super::device::DeviceError;
use super::event::Event;
use super::named::Named;
use super::stream::Stream;
use crate::offload::OffloadFile;
use crate::process_memory::available_memory;

/// The host's memory or file for offloaded activations, and the stream of the copies.
#[derive(Debug)]
pub(super) struct Copies {
    stream: Stream,
    /// Recorded on the main stream where a copy may start.
    start: Event,
    /// Recorded on the stream of the copies where a copy has ended, by the copy's index.
    ends: HashMap<u32, Event>,
    /// The copies whose ends the main stream has not waited for, in order.
    under_way: Vec<u32>,
    /// Host memory for all activations, or for the largest one if there is a file.
    memory: *mut u8,
    file: Option<Arc<SharedFile>>,
    /// The arguments of host functions, which must stay valid as long as a graph calls the functions.
    in_file: HashMap<(u64, u64, bool), Box<InFile>>,
    context: Context,
    device: String,
}

/// The offload file, which the driver's threads read and write.
#[derive(Debug)]
struct SharedFile {
    file: Mutex<OffloadFile>,
    /// The first error since the last check.
    failed: Mutex<Option<io::Error>>,
}

/// A copy between host memory and the file.
#[derive(Debug)]
struct InFile {
    file: Arc<SharedFile>,
    memory: *mut u8,
    copy: HostCopy,
}

impl Copies {
    /// Reserves pinned host memory of `bytes` bytes or, if a folder is given, a file of that size and pinned memory for
    /// one copy of at most `largest` bytes. The context must be current.
    pub fn new(
        context: Context,
        device: &str,
        folder: Option<&Path>,
        (bytes, largest): (u64, u64),
    ) -> Result<Self, DeviceError> {
        let file = |folder: &Path| {
            let failed = |source| {
                let what = format!("cannot create a file of {bytes} bytes in {}", folder.display());
                DeviceError::Offload { what, source }
            };
            let file = OffloadFile::of_bytes(folder, bytes).map_err(failed)?;
            Ok::<_, DeviceError>(Arc::new(SharedFile { file: Mutex::new(file), failed: Mutex::default() }))
        };
        let file = folder.map(file).transpose()?;
        let needed = if file.is_some() { largest } else { bytes };
        // Without this check, the operating system might end the process when the memory is first used.
        let too_little = |why| DeviceError::HostMemory { needed, why };
        if let Some((available, _)) = available_memory().filter(|&(available, _)| available < needed) {
            return Err(too_little(format!("{} ({available} bytes) are available", Bytes(available))));
        }
        let (stream, start) = (Stream::new(context, device)?, Event::new(device)?);
        let memory = {
            let _exclusive = exclusive();
            // SAFETY: the context is current.
            unsafe { result::malloc_host(needed.max(1) as usize, 0) }
        };
        let memory = memory.map_err(|error| too_little(format!("cuMemHostAlloc failed on {device}: {error}")))?.cast();
        tracing::info!(bytes = needed, file = ?folder, "pinned host memory reserved for offloaded activations");
        let (ends, under_way, in_file) = (HashMap::new(), Vec::new(), HashMap::new());
        Ok(Self { stream, start, ends, under_way, memory, file, in_file, context, device: device.into() })
    }

    /// Creates the event of a copy, and the argument of its host function. They may not be created while a stream is
    /// captured.
    pub fn prepare(&mut self, copy: &HostCopy) -> Result<(), DeviceError> {
        if !self.ends.contains_key(&copy.index) {
            self.ends.insert(copy.index, Event::new(&self.device)?);
        }
        if let Some(file) = &self.file {
            let argument = || Box::new(InFile { file: file.clone(), memory: self.memory, copy: *copy });
            self.in_file.entry((copy.offset, copy.bytes, copy.to_host)).or_insert_with(argument);
        }
        Ok(())
    }

    /// Starts a copy after all work on the main stream, and after all earlier copies.
    ///
    /// # Safety
    /// The copy's addresses must be inside device memory, and its offset inside the reserved bytes.
    pub unsafe fn start(&mut self, copy: &HostCopy, main: sys::CUstream) -> Result<(), DeviceError> {
        let stream = self.stream.handle();
        self.start.record(&self.device, main)?;
        self.start.make_wait(&self.device, stream)?;
        // With a file, all copies pass through the beginning of the memory, one after another.
        let offset = if self.file.is_some() { 0 } else { copy.offset as usize };
        if !copy.to_host {
            self.use_file(copy)?;
        }
        // SAFETY: the memory has room for the copy, and only this stream's work and the host functions on it use the memory.
        unsafe {
            let memory = self.memory.add(offset).cast::<c_void>();
            match copy.to_host {
                true => sys::cuMemcpyDtoHAsync_v2(memory, copy.address, copy.bytes as usize, stream),
                false => sys::cuMemcpyHtoDAsync_v2(copy.address, memory, copy.bytes as usize, stream),
            }
        }
        .result()
        .named(&self.device, "copying an offloaded activation")?;
        if copy.to_host {
            self.use_file(copy)?;
        }
        self.ends[&copy.index].record(&self.device, stream)?;
        self.under_way.push(copy.index);
        Ok(())
    }

    /// Makes the main stream wait for a copy, unless it has waited already.
    pub fn end(&mut self, index: u32, main: sys::CUstream) -> Result<(), DeviceError> {
        let Some(at) = self.under_way.iter().position(|&other| other == index) else { return Ok(()) };
        // Copies run in order, so earlier ones have ended as well.
        self.under_way.drain(..=at);
        self.ends[&index].make_wait(&self.device, main)
    }

    /// Makes the main stream wait for all copies.
    pub fn end_all(&mut self, main: sys::CUstream) -> Result<(), DeviceError> {
        self.under_way.last().copied().map_or(Ok(()), |last| self.end(last, main))
    }

    /// Waits for all copies and forgets them, after an error on the main stream.
    pub fn abandon(&mut self) -> Result<(), DeviceError> {
        self.under_way.clear();
        self.stream.synchronize()
    }

    /// Returns the error of the file if a copy has failed since the last call.
    pub fn check(&self) -> Result<(), DeviceError> {
        let failed = self.file.as_ref().and_then(|file| lock(&file.failed).take());
        let what = || "an offloaded activation was not written to its file or not read back".into();
        failed.map_or(Ok(()), |source| Err(DeviceError::Offload { what: what(), source }))
    }

    /// Writes host memory to the file, or reads it back, when the stream gets there.
    fn use_file(&self, copy: &HostCopy) -> Result<(), DeviceError> {
        let Some(argument) = self.in_file.get(&(copy.offset, copy.bytes, copy.to_host)) else { return Ok(()) };
        let argument = (&raw const **argument).cast_mut().cast();
        // SAFETY: the argument lives as long as `self`, which outlives the graphs and the work on the stream.
        unsafe { sys::cuLaunchHostFunc(self.stream.handle(), Some(copy_in_file), argument) }
            .result()
            .named(&self.device, "cuLaunchHostFunc")
    }
}

/// Copies between host memory and the file. The driver calls this function on a thread of its own. It cannot stop the
/// graph, so after the first error, every activation that is copied back is zero, which is a valid element of every type:
/// an index still lies inside its table. The host [checks](Copies::check) the copies before the model changes.
unsafe extern "C" fn copy_in_file(argument: *mut c_void) {
    // SAFETY: `use_file` passes this type. Nothing changes it.
    let InFile { file, memory, copy } = unsafe { &*argument.cast_const().cast::<InFile>() };
    // SAFETY: the memory has room for the largest copy, and work on the stream uses it one after another.
    let bytes = unsafe { std::slice::from_raw_parts_mut(*memory, copy.bytes as usize) };
    let mut failed = lock(&file.failed);
    if failed.is_none() {
        let mut file = lock(&file.file);
        let copied = if copy.to_host { file.write(copy.offset, bytes) } else { file.read(copy.offset, bytes) };
        *failed = copied.err();
    }
    if failed.is_some() && !copy.to_host {
        bytes.fill(0);
    }
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Copies {
    fn drop(&mut self) {
        // If the wait fails, the memory stays in use until the process ends.
        let waited = self.context.enter(&self.device).and_then(|()| self.stream.synchronize());
        let _exclusive = exclusive();
        // SAFETY: no work uses the memory any more.
        let _ = waited.map(|()| unsafe { result::free_host(self.memory.cast()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs copies of 8 bytes, given their offsets in a file of 16 bytes and whether they are to the host. Returns the
    /// memory after each, and the error.
    fn run(copies: &[(u64, bool)]) -> (Vec<[u8; 8]>, Option<io::Error>) {
        let folder = tempfile::tempdir().unwrap();
        let file = Mutex::new(OffloadFile::of_bytes(folder.path(), 16).unwrap());
        let file = Arc::new(SharedFile { file, failed: Mutex::default() });
        let after = copies.iter().zip(1..).map(|(&(offset, to_host), value)| {
            let mut memory = [value; 8];
            let copy = HostCopy { index: 0, address: 0, offset, bytes: 8, to_host };
            let mut argument = InFile { file: file.clone(), memory: memory.as_mut_ptr(), copy };
            // SAFETY: the argument and its memory live until the call returns.
            unsafe { copy_in_file((&raw mut argument).cast()) };
            memory
        });
        let after = after.collect();
        (after, lock(&file.failed).take())
    }

    #[test]
    fn activations_are_zero_once_a_copy_in_the_file_has_failed() {
        let (after, error) = run(&[(0, true), (8, true), (0, false), (8, false)]);
        assert!(error.is_none() && after[2..] == [[1; 8], [2; 8]], "{after:?}");
        // No file has bytes at such an offset.
        for to_host in [true, false] {
            let (after, error) = run(&[(0, true), (0, false), (u64::MAX - 8, to_host), (0, false)]);
            assert!(error.is_some());
            assert_eq!([after[1], after[3]], [[1; 8], [0; 8]]);
            assert_eq!(after[2], if to_host { [3; 8] } else { [0; 8] });
        }
    }
}
