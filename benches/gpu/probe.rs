//! Whether there is a GPU, before anything is asked of it: what goes wrong later is a failure, not a reason to skip.

use std::fmt;
use std::str::FromStr;

use gapless::DeviceChoice;
use gapless::engine::cuda::{Cache, Device, Nvidia};
use serde::Serialize;

use super::record::Found;

/// The number of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu(pub usize);

impl Gpu {
    pub fn choice(self) -> DeviceChoice {
        DeviceChoice::Cuda(self.0)
    }

    /// Its name, or why it cannot be used.
    pub fn name(self) -> Result<String, String> {
        match Nvidia::new(self.0, Cache::of_user()) {
            Ok(device) => Ok(device.name()),
            Err(error) => Err(error.to_string()),
        }
    }
}

impl FromStr for Gpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse()? {
            DeviceChoice::Cuda(ordinal) => Ok(Self(ordinal)),
            other => Err(format!("{other} is no GPU; the first is cuda:0")),
        }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.choice().fmt(f)
    }
}

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Which GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
}

#[derive(Debug, Serialize)]
struct Figures {
    device: String,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    match arguments.device.name() {
        Ok(device) => Found::new(true, device.clone(), &Figures { device }),
        Err(why) => Ok(Found::skipped(&why)),
    }
}
