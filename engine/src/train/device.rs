//! Where a trainer runs: chosen by its options, found when it is made.
//!
//! In: a choice, and what the options ask for. Out: an executor on that device, with a word on why it is no other. Never: a silent
//! change of device, or a GPU asked for in vain that is not an error.

use std::fmt;
use std::str::FromStr;

#[cfg(not(feature = "cuda"))]
use crate::error::TrainError;

/// Which device a trainer is to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// An NVIDIA GPU if there is one that can do what the options ask for, else the CPU;
    /// [`Trainer::device`](super::Trainer::device) says which, and why. It is the first; of several ranks each takes the one
    /// of its own number, and where there are fewer GPUs they take turns.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU of this number, or an error. Of several ranks each says which is its own; they may share one.
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
pub struct RunsOn {
    /// The device, in words.
    pub name: String,
    /// Whether it is a GPU.
    pub is_gpu: bool,
    /// Why it is not the GPU that was to be used if there is one.
    pub because: Option<String>,
}

impl RunsOn {
    pub(super) fn cpu(threads: usize, because: Option<String>) -> Self {
        let name = format!("the CPU, {threads} {}", if threads == 1 { "thread" } else { "threads" });
        Self { name, is_gpu: false, because }
    }
}

impl fmt::Display for RunsOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "runs on {}", self.name)?;
        match &self.because {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

/// That this build knows no GPU.
#[cfg(not(feature = "cuda"))]
pub(super) fn without_cuda() -> TrainError {
    let why = "this program was built without the feature cuda";
    TrainError::config("device", why, "build it with cuda, which is on by default, or use the CPU")
}
