//! Device memory that is mapped to a reserved range of addresses. It is allocated in whole pages and returned to the
//! driver on drop.
//!
//! - In: a number of bytes.
//! - Out: a mapped range, or an error that lists the processes that hold the device's memory.
//! - Never: a memory pool.

use std::process::Command;

use cudarc::driver::{result, sys};

use super::context::exclusive;
use super::device::{DeviceError, DeviceMemory};
use super::named::Named;

/// Device memory at a range of addresses.
#[derive(Debug)]
pub(super) struct Mapped {
    address: sys::CUdeviceptr,
    /// Bytes of the reserved address range: as many as the device has memory.
    reserved: usize,
    granularity: usize,
    /// The device that has the memory, and after it the other devices that may access the memory.
    devices: Vec<sys::CUdevice>,
    /// Mapped bytes, from the first address on.
    bytes: usize,
    handles: Vec<sys::CUmemGenericAllocationHandle>,
}

impl Mapped {
    /// Maps at least this many bytes. The device's context must be current.
    ///
    /// # Errors
    /// Returns [`DeviceError::OutOfMemory`] with the processes that hold memory, or the driver's error.
    pub fn new(name: &str, device: sys::CUdevice, bytes: u64) -> Result<Self, DeviceError> {
        let kind = kind(device);
        let (mut granularity, mut address) = (0, 0);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the call only writes `granularity`.
        unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &kind, minimum).result() }
            .named(name, "cuMemGetAllocationGranularity")?;
        let granularity = granularity.max(1);
        let reserved = (used(name)?.total.max(bytes) as usize).next_multiple_of(granularity);
        // SAFETY: the call only writes `address`.
        unsafe { sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0).result() }
            .named(name, "cuMemAddressReserve")?;
        // From here on, drop releases the range if anything fails.
        let mut mapped = Self { address, reserved, granularity, devices: vec![device], bytes: 0, handles: Vec::new() };
        mapped.extend(name, bytes)?;
        Ok(mapped)
    }

    /// Maps more memory after the current end, so that at least `bytes` are mapped in total.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::new`].
    pub fn extend(&mut self, name: &str, bytes: u64) -> Result<(), DeviceError> {
        let Some(lacking) = (bytes as usize).checked_sub(self.bytes).filter(|&lacking| lacking > 0) else {
            return Ok(());
        };
        let lacking = lacking.next_multiple_of(self.granularity);
        let DeviceMemory { total, in_use, .. } = used(name)?;
        let (needed, free) = (lacking as u64, total - in_use);
        let out_of_memory =
            || DeviceError::OutOfMemory { device: name.into(), needed, free, total, holders: holders() };
        if needed > free || self.bytes + lacking > self.reserved {
            return Err(out_of_memory());
        }
        let (mut handle, address) = (0, self.address + self.bytes as u64);
        let kind = kind(self.devices[0]);
        let exclusive = exclusive();
        // SAFETY: the call only writes `handle`.
        let created = unsafe { sys::cuMemCreate(&mut handle, lacking, &kind, 0) };
        if created == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY {
            drop(exclusive);
            return Err(out_of_memory());
        }
        created.result().named(name, "cuMemCreate")?;
        self.handles.push(handle);
        // SAFETY: the addresses are reserved, and nothing is mapped there yet; drop unmaps them.
        unsafe { sys::cuMemMap(address, lacking, 0, handle, 0).result() }.named(name, "cuMemMap")?;
        self.bytes += lacking;
        let all = self.devices.iter().try_for_each(|&device| allow(device, address, lacking));
        all.named(name, "cuMemSetAccess")
    }

    /// Gives all other devices of the host access to the memory, if they can access this device. This is needed because
    /// NCCL makes the GPUs of one process access each other's memory directly (NCCL's guide,
    /// `NCCL_P2P_DIRECT_DISABLE`), and mapped memory is only accessible to its own device by default.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn share(&mut self, name: &str) -> Result<(), DeviceError> {
        let count = result::device::get_count().named(name, "cuDeviceGetCount")?;
        for ordinal in 0..count {
            let peer = result::device::get(ordinal).named(name, "cuDeviceGet")?;
            let mut reaches = 0;
            // SAFETY: the call only writes `reaches`.
            unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, peer, self.devices[0]).result() }
                .named(name, "cuDeviceCanAccessPeer")?;
            if !self.devices.contains(&peer) && reaches != 0 {
                allow(peer, self.address, self.bytes).named(name, "cuMemSetAccess")?;
                self.devices.push(peer);
            }
        }
        Ok(())
    }

    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The mapped bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// True if all bytes of the given range are mapped here.
    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        let start = address.checked_sub(self.address);
        start.and_then(|start| start.checked_add(bytes as u64)).is_some_and(|end| end <= self.bytes())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _exclusive = exclusive();
        // SAFETY: the range was mapped by `new` or `extend`. The owner has waited for all work that uses it; other
        // devices only access it through communicators, which are dropped first.
        unsafe {
            if self.bytes > 0 {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
            }
            let _ = sys::cuMemAddressFree(self.address, self.reserved);
            for &handle in &self.handles {
                let _ = sys::cuMemRelease(handle);
            }
        }
    }
}

/// Allows a device to read and write mapped bytes.
fn allow(device: sys::CUdevice, address: sys::CUdeviceptr, bytes: usize) -> Result<(), result::DriverError> {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: kind(device).location, flags };
    // SAFETY: all of the range is mapped.
    unsafe { sys::cuMemSetAccess(address, bytes, &access, 1).result() }
}

/// Properties of an allocation on a device.
fn kind(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: the struct consists of integers and a pointer, for which zero is valid and means the default.
    let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device;
    kind
}

/// Returns the device's total memory and the memory in use by all processes, as the driver reports them.
pub(super) fn used(name: &str) -> Result<DeviceMemory, DeviceError> {
    let (free, total) = result::mem_get_info().named(name, "cuMemGetInfo")?;
    let (free, total) = (free as u64, total as u64);
    Ok(DeviceMemory { total, in_use: total - free, arena: 0, beside: Vec::new() })
}

/// Lists the processes that hold GPU memory, one per line: PCI bus id of the GPU, process and bytes.
pub(super) fn holders() -> String {
    let asked = Command::new("nvidia-smi")
        .args(["--query-compute-apps=gpu_bus_id,pid,process_name,used_memory", "--format=csv,noheader"])
        .output();
    let output = match asked {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).into_owned(),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            return format!("unknown: nvidia-smi failed ({}): {said}", output.status);
        }
        Err(error) => return format!("unknown: nvidia-smi cannot be run ({error})"),
    };
    let own = std::process::id().to_string();
    let lines = output.lines().map(str::trim).filter(|line| !line.is_empty());
    let marked = lines.map(|line| match line.split(", ").nth(1) == Some(&own) {
        true => format!("{line} (this process)"),
        false => line.to_owned(),
    });
    let list = marked.collect::<Vec<_>>().join("\n");
    if list.is_empty() { "no process that nvidia-smi shows".into() } else { list }
}
