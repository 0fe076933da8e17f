//! The device of a trainer. The options choose it, and building the trainer opens it.
//!
//! - In: the requested device, and the options that the device must support.
//! - Out: the device. If `Auto` was requested and the trainer runs on the CPU, also the reason.
//! - Never: a silent change of device. If a GPU was explicitly requested and is missing, building the trainer fails.

use std::fmt;
use std::str::FromStr;

use crate::error::Result as TrainResult;
#[cfg(not(feature = "cuda"))]
use crate::error::TrainError;

/// The requested device of a trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// An NVIDIA GPU if there is one and it supports the options; otherwise the CPU. A GPU that is full or fails is an
    /// error. The GPU of a single rank is the first. With several ranks, the rank with index r on its host uses GPU r
    /// modulo the number of GPUs. [`Trainer::device`](super::Trainer::device) returns the device that is used and, if
    /// it is the CPU, the reason.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this index. If there is no such GPU, building the trainer fails. Ranks may name different
    /// indices, or share a GPU.
    Cuda(usize),
}

impl DeviceChoice {
    /// True if a trainer may run on a GPU: one is named, or one is there to be chosen.
    pub(super) fn may_be_gpu(self) -> bool {
        match self {
            Self::Cpu => false,
            Self::Cuda(_) => true,
            #[cfg(feature = "cuda")]
            Self::Auto => gapless_runtime::cuda::Nvidia::count() > 0,
            #[cfg(not(feature = "cuda"))]
            Self::Auto => false,
        }
    }

    /// Checks that a GPU that is named exists.
    ///
    /// # Errors
    /// Returns the error of building a trainer on this GPU if it is missing.
    pub(super) fn expect_there(self) -> TrainResult<()> {
        let Self::Cuda(_ordinal) = self else { return Ok(()) };
        #[cfg(feature = "cuda")]
        if _ordinal >= gapless_runtime::cuda::Nvidia::count() {
            gapless_runtime::cuda::Nvidia::new(_ordinal, gapless_runtime::cuda::Cache::of_user())?;
        }
        #[cfg(not(feature = "cuda"))]
        return Err(without_cuda());
        #[cfg(feature = "cuda")]
        Ok(())
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| {
            text.parse().map_err(|_| format!("{text:?} is not the number of a GPU; the first GPU is cuda:0"))
        };
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda:") {
                Some(ordinal) => number(ordinal).map(Self::Cuda),
                None => Err(format!("unknown device {text:?}; use auto, cpu, cuda or cuda:0, cuda:1, …")),
            },
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The device that a trainer runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Description of the device.
    pub name: String,
    /// Whether the device is a GPU.
    pub is_gpu: bool,
    /// The reason why the device is the CPU, if [`DeviceChoice::Auto`] was requested. `None` if the device is a GPU, or
    /// if the CPU was requested.
    pub reason: Option<String>,
}

impl DeviceInfo {
    pub(super) fn cpu(threads: usize, reason: Option<String>) -> Self {
        let name = format!("the CPU, {threads} {}", if threads == 1 { "thread" } else { "threads" });
        Self { name, is_gpu: false, reason }
    }
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "runs on {}", self.name)?;
        match &self.reason {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

/// The error for a request for a GPU in a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub(super) fn without_cuda() -> TrainError {
    let why = "this program was built without the feature cuda";
    TrainError::config("device", why, "build it with cuda, which is on by default, or use the CPU")
}
