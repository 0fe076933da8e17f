//! Device memory at addresses of its own: made in whole pages, and given back.
//!
//! In: how many bytes. Out: a range that is mapped, or who holds the memory that it would take. Never: a pool.

use std::process::Command;

use cudarc::driver::{result, sys};

use super::device::{DeviceError, DeviceMemory};
use super::named::Named;

/// Device memory at a range of addresses.
#[derive(Debug)]
pub(super) struct Mapped {
    address: sys::CUdeviceptr,
    /// Addresses that are set aside, for as much as the device has.
    reserved: usize,
    granularity: usize,
    /// Its own device, and those that may reach it too.
    devices: Vec<sys::CUdevice>,
    /// What is mapped, from the first address on.
    bytes: usize,
    handles: Vec<sys::CUmemGenericAllocationHandle>,
}

impl Mapped {
    /// Memory of at least so many bytes, in the context that is the thread's own.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], with who holds it, and what the driver says.
    pub fn new(name: &str, device: sys::CUdevice, bytes: u64) -> Result<Self, DeviceError> {
        let kind = kind(device);
        let (mut granularity, mut address) = (0, 0);
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: it writes one number.
        unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &kind, minimum).result() }
            .named(name, "cuMemGetAllocationGranularity")?;
        let granularity = granularity.max(1);
        let reserved = (used(name)?.total.max(bytes) as usize).next_multiple_of(granularity);
        // SAFETY: it writes one number.
        unsafe { sys::cuMemAddressReserve(&mut address, reserved, 0, 0, 0).result() }
            .named(name, "cuMemAddressReserve")?;
        // From here on it is given back when it is dropped.
        let mut mapped = Self { address, reserved, granularity, devices: vec![device], bytes: 0, handles: Vec::new() };
        mapped.extend(name, bytes)?;
        Ok(mapped)
    }

    /// Maps what it lacks to so many bytes.
    ///
    /// # Errors
    /// As [`Self::new`].
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
        // SAFETY: it writes one number.
        let created = unsafe { sys::cuMemCreate(&mut handle, lacking, &kind, 0) };
        if created == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(out_of_memory());
        }
        created.result().named(name, "cuMemCreate")?;
        self.handles.push(handle);
        // SAFETY: the addresses are reserved, and nothing is mapped there yet; what is mapped is unmapped when this is dropped.
        unsafe { sys::cuMemMap(address, lacking, 0, handle, 0).result() }.named(name, "cuMemMap")?;
        self.bytes += lacking;
        let all = self.devices.iter().try_for_each(|&device| allow(device, address, lacking));
        all.named(name, "cuMemSetAccess")
    }

    /// Lets this host's other devices reach it, as far as they can: NCCL has the GPUs of one process read and write each other's
    /// memory (NCCL's guide, `NCCL_P2P_DIRECT_DISABLE`), and memory that is mapped is otherwise its own device's.
    ///
    /// # Errors
    /// What the driver says.
    pub fn share(&mut self, name: &str) -> Result<(), DeviceError> {
        let count = result::device::get_count().named(name, "cuDeviceGetCount")?;
        for ordinal in 0..count {
            let peer = result::device::get(ordinal).named(name, "cuDeviceGet")?;
            let mut reaches = 0;
            // SAFETY: it writes one number.
            unsafe { sys::cuDeviceCanAccessPeer(&mut reaches, peer, self.devices[0]).result() }
                .named(name, "cuDeviceCanAccessPeer")?;
            if !self.devices.contains(&peer) && reaches != 0 {
                allow(peer, self.address, self.bytes).named(name, "cuMemSetAccess")?;
                self.devices.push(peer);
            }
        }
        Ok(())
    }

    /// Where it begins.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How much it is.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// Whether bytes from this address on all lie in it.
    pub fn holds(&self, address: u64, bytes: usize) -> bool {
        let start = address.checked_sub(self.address);
        start.and_then(|start| start.checked_add(bytes as u64)).is_some_and(|end| end <= self.bytes())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: it was mapped when this was made or extended, and whoever had it has waited for what was under way: other devices reach
        // it through communicators alone, which are dropped before.
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

/// Lets a device read and write bytes that are mapped.
fn allow(device: sys::CUdevice, address: sys::CUdeviceptr, bytes: usize) -> Result<(), result::DriverError> {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: kind(device).location, flags };
    // SAFETY: all of it is mapped.
    unsafe { sys::cuMemSetAccess(address, bytes, &access, 1).result() }
}

/// Memory of a device.
fn kind(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    // SAFETY: a struct of numbers and a pointer that may be null, of which zeros mean nothing special.
    let mut kind: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device;
    kind
}

/// What there is and what is in use by anybody, as the driver says.
pub(super) fn used(name: &str) -> Result<DeviceMemory, DeviceError> {
    let (free, total) = result::mem_get_info().named(name, "cuMemGetInfo")?;
    let (free, total) = (free as u64, total as u64);
    Ok(DeviceMemory { total, in_use: total - free, arena: 0, beside: Vec::new() })
}

/// The processes that hold memory of GPUs, a line each: the GPU's place on the bus, the process and its bytes.
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
