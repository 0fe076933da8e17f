//! The primary context of a device, which whoever uses the device in this process shares: retained by the first, and by nobody else.
//!
//! In: a device. Out: its context, which stays until the process ends. Never: a release. What libraries keep in a context, cuBLASLt's
//! own runtime among them, may outlive the handles that they gave, and does not survive a context that is made anew.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use super::device::DeviceError;
use super::named::Named;

/// A context's handle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Context(sys::CUcontext);

// SAFETY: the driver's handles belong to the process, and the driver locks what is behind them.
unsafe impl Send for Context {}

impl Context {
    /// The primary context of a device that the driver has found.
    ///
    /// # Errors
    /// What the driver says.
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

    /// Makes it the thread's own.
    ///
    /// # Errors
    /// What the driver says.
    pub fn enter(self, name: &str) -> Result<(), DeviceError> {
        // SAFETY: it is retained until the process ends.
        unsafe { result::ctx::set_current(self.0) }.named(name, "cuCtxSetCurrent")
    }
}
