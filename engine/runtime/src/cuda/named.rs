//! Driver results turned into errors that name the failed call.

use cudarc::driver::{result, sys};

use super::device::DeviceError;
use super::mapped::holders;

/// Adds the name of the call and of the device to a driver error.
pub(super) trait Named<T> {
    fn named(self, device: &str, call: &str) -> Result<T, DeviceError>;
}

impl<T> Named<T> for Result<T, result::DriverError> {
    fn named(self, device: &str, call: &str) -> Result<T, DeviceError> {
        let what = |error: result::DriverError| error.to_string();
        self.map_err(|error| match error.0 {
            sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::Full { device: device.into(), call: call.into(), holders: holders() }
            }
            _ => DeviceError::Driver { device: device.into(), call: call.into(), what: what(error) },
        })
    }
}
