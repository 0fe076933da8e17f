//! The primary context of a device. All users of the device in this process share it, and it is retained once.
//!
//! - In: a device.
//! - Out: the device's context, which stays until the process ends.
//! - Never: a release. Libraries, among them the runtime that cuBLASLt contains, may keep state in a context for
//!   longer than their handles live. This state would be lost if the context were released and created anew.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use super::device::DeviceError;
use super::named::Named;

/// Excludes captures, and calls that may wait for the whole context, from each other until the result is dropped, in all
/// threads of the process. Waiting for a context while one of its streams captures fails the capture, whichever thread
/// waits (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations"). Loading code may wait for the context
/// ("Lazy Loading"), and so may the allocation and release of memory ("Implicit Synchronization"). A thread must drop one
/// result before it asks for the next.
pub(super) fn exclusive() -> MutexGuard<'static, ()> {
    static EXCLUSIVE: Mutex<()> = Mutex::new(());
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context's handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context(sys::CUcontext);

// SAFETY: driver handles are valid in all threads of the process, and the driver synchronizes access to the objects.
unsafe impl Send for Context {}

impl Context {
    /// Returns the primary context of a device. The first call retains it.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn of(device: sys::CUdevice, name: &str) -> Result<Self, DeviceError> {
        static RETAINED: Mutex<BTreeMap<sys::CUdevice, Context>> = Mutex::new(BTreeMap::new());
        let mut retained = RETAINED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = retained.get(&device) {
            return Ok(*known);
        }
        // SAFETY: the device was found by the driver.
        let context = unsafe { result::primary_ctx::retain(device) }.named(name, "cuDevicePrimaryCtxRetain")?;
        retained.insert(device, Self(context));
        Ok(Self(context))
    }

    /// Makes this the current context of the calling thread.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn enter(self, name: &str) -> Result<(), DeviceError> {
        // SAFETY: the context is retained until the process ends.
        unsafe { result::ctx::set_current(self.0) }.named(name, "cuCtxSetCurrent")
    }
}
