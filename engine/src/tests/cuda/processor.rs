//! A device simulated on the host: its memory is host memory, and launches run on the CPU.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{gpu, host};
use crate::cuda::{Describe, Device, DeviceError, DeviceMemory, Features, HostCopy, Launch, Recording};

/// A file that fails.
#[derive(Debug)]
struct File {
    /// Number of copies that succeed before one fails.
    good: Arc<AtomicUsize>,
    has_failed: bool,
}

/// A device simulated on the host.
#[derive(Debug, Default)]
pub struct Processor {
    memory: Vec<u64>,
    recorded: Vec<Arc<[Launch]>>,
    /// Host memory for offloaded activations, and the copies that have not ended, in order.
    host: Vec<u8>,
    under_way: Vec<HostCopy>,
    /// The file for offloaded activations, if it can fail.
    file: Option<File>,
    /// True if the device has no algorithms for products with epilogues.
    has_no_epilogues: bool,
    /// True if products of f32 matrices use TF32.
    uses_tf32: bool,
    /// True if blocks and threads run in descending order.
    is_reversed: bool,
    /// The number of bytes that were set to a value other than 0.
    filled: Arc<AtomicUsize>,
}

/// Returns the selected GPU, or a simulated device if none is selected.
pub fn device() -> Box<dyn Device> {
    gpu::another().unwrap_or_else(|| Box::<Processor>::default())
}

impl Processor {
    /// Creates a device that runs a product's epilogue as a separate kernel.
    pub fn without_epilogues() -> Self {
        Self { has_no_epilogues: true, ..Self::default() }
    }

    /// Creates a device whose file for offloaded activations fails after this number of copies.
    pub fn with_file(good: Arc<AtomicUsize>) -> Self {
        Self { file: Some(File { good, has_failed: false }), ..Self::default() }
    }

    /// Creates a device that counts the bytes that are set to a value other than 0.
    pub fn counting(filled: Arc<AtomicUsize>) -> Self {
        Self { filled, ..Self::default() }
    }

    /// Creates a device whose blocks and threads run in descending order.
    pub fn reversed() -> Self {
        Self { is_reversed: true, ..Self::default() }
    }

    fn at(&self, address: u64, bytes: usize) -> *mut u8 {
        let base = self.memory.as_ptr().expose_provenance() as u64;
        assert!(base <= address && address + bytes as u64 <= base + 8 * self.memory.len() as u64, "beside the memory");
        std::ptr::with_exposed_provenance_mut(address as usize)
    }
}

impl Processor {
    fn run_all(&mut self, launches: &[Launch]) {
        for launch in launches {
            match *launch {
                Launch::Copy(copy) => {
                    // Every float is NaN until the copy back has ended.
                    if !copy.to_host {
                        self.write(copy.address, &vec![0xff; copy.bytes as usize]).expect("it does not fail");
                    }
                    self.under_way.push(copy);
                }
                Launch::CopyEnd(index) => {
                    let ended = self.under_way.iter().position(|copy| copy.index == index);
                    self.end_copies(ended.map_or(0, |at| at + 1));
                }
                // SAFETY: the addresses come from a checked plan in this memory.
                _ => unsafe { host::run(launch, self.is_reversed) }.unwrap_or_else(|why| panic!("{launch:?}: {why}")),
            }
        }
    }

    /// Makes the first copies, as late as possible.
    fn end_copies(&mut self, count: usize) {
        for copy in self.under_way.drain(..count).collect::<Vec<_>>() {
            if let Some(file) = &mut self.file {
                let left = |good: usize| good.checked_sub(1);
                file.has_failed |= file.good.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_err();
                if file.has_failed {
                    if !copy.to_host {
                        self.write(copy.address, &vec![0; copy.bytes as usize]).expect("it does not fail");
                    }
                    continue;
                }
            }
            let mut host = std::mem::take(&mut self.host);
            let bytes = &mut host[copy.offset as usize..][..copy.bytes as usize];
            let copied = if copy.to_host { self.read(copy.address, bytes) } else { self.write(copy.address, bytes) };
            copied.expect("it does not fail");
            self.host = host;
        }
    }
}

/// Returns the number of 8-byte words that hold this many bytes, with padding for the alignment.
fn words(bytes: u64) -> usize {
    bytes as usize / 8 + 64
}

impl Device for Processor {
    fn name(&self) -> String {
        "a stand-in for a GPU".into()
    }

    fn features(&self) -> Features {
        Features { warpgroups: true, tf32: self.uses_tf32 }
    }

    fn use_tf32(&mut self) {
        self.uses_tf32 = true;
    }

    fn reserve(&mut self, bytes: u64) -> Result<u64, DeviceError> {
        assert!(self.memory.is_empty(), "reserved once");
        // With the extra capacity, extending the memory does not move it.
        self.memory = Vec::with_capacity(4 * words(bytes));
        self.extend(bytes)?;
        Ok((self.memory.as_mut_ptr().expose_provenance() as u64).next_multiple_of(256))
    }

    fn extend(&mut self, bytes: u64) -> Result<(), DeviceError> {
        let (needed, total) = (8 * words(bytes) as u64, 8 * self.memory.capacity() as u64);
        if needed > total {
            let (device, free) = (self.name(), total - 8 * self.memory.len() as u64);
            return Err(DeviceError::OutOfMemory { device, needed, free, total, holders: String::new() });
        }
        // Every float is NaN.
        self.memory.resize(self.memory.len().max(words(bytes)), u64::MAX);
        Ok(())
    }

    fn offload_to(&mut self, _: &Path) {}

    fn has_offload_file(&self) -> bool {
        self.file.is_some()
    }

    fn reserve_host(&mut self, bytes: u64, _: u64) -> Result<(), DeviceError> {
        self.host = vec![0xff; bytes as usize];
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: `at` has checked that the range is in this memory, to which `&mut self` gives exclusive access.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(address, bytes.len()), bytes.len()) };
        Ok(())
    }

    fn fill(&mut self, address: u64, bytes: usize, value: u8) -> Result<(), DeviceError> {
        self.filled.fetch_add(if value == 0 { 0 } else { bytes }, Ordering::Relaxed);
        self.write(address, &vec![value; bytes])
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.at(address, bytes.len()), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn record(&mut self, launches: Vec<Launch>, _: Describe<'_>) -> Result<Recording, DeviceError> {
        let launches = launches.into_iter().flat_map(|launch| match launch {
            Launch::Product(product) if self.has_no_epilogues => product.apart(),
            launch => vec![launch],
        });
        self.recorded.push(launches.collect());
        Ok(Recording(self.recorded.len() - 1))
    }

    fn run(&mut self, launches: &[Launch], _: Describe<'_>) -> Result<(), DeviceError> {
        self.run_all(launches);
        Ok(())
    }

    fn replay(&mut self, recording: Recording) -> Result<(), DeviceError> {
        let launches = self.recorded[recording.0].clone();
        self.run_all(&launches);
        self.end_copies(self.under_way.len());
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        let has_failed = self.file.as_mut().is_some_and(|file| std::mem::take(&mut file.has_failed));
        let error = || DeviceError::Offload { what: "a copy".into(), source: io::ErrorKind::StorageFull.into() };
        if has_failed { Err(error()) } else { Ok(()) }
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        let arena = 8 * self.memory.len() as u64;
        Ok(DeviceMemory { total: u64::MAX, in_use: arena, arena, beside: Vec::new() })
    }
}
