//! The device of a trainer. The options choose it, and building the trainer opens it.
//!
//! - In: a choice, and the options that the device must support.
//! - Out: the device, and the reason if the trainer runs on the CPU although `Auto` was chosen.
//! - Never: a silent change of device. If a GPU was explicitly requested and is missing, building the trainer fails.

use std::fmt;
use std::str::FromStr;

#[cfg(not(feature = "cuda"))]
use crate::error::TrainError;

/// The requested device of a trainer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first NVIDIA GPU if there is one that supports the options, and the CPU if there is not.
    /// [`Trainer::device`](super::Trainer::device) returns the device and the reason. If there are several ranks, the
    /// rank with index r on its host uses GPU r modulo the number of GPUs.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU with this index. If it is missing, building the trainer fails. Each rank may name another
    /// index, and ranks may share a GPU.
    Cuda(usize),
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
    /// The reason why the device is the CPU, if [`DeviceChoice::Auto`] would have used a GPU; `None` in all other
    /// cases.
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

/// The error for a GPU in a build without GPU support.
#[cfg(not(feature = "cuda"))]
pub(super) fn without_cuda() -> TrainError {
    let why = "this program was built without the feature cuda";
    TrainError::config("device", why, "build it with cuda, which is on by default, or use the CPU")
}
