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

    /// What it is, or why it cannot be used.
    pub fn found(self) -> Result<Card, String> {
        let device = Nvidia::new(self.0, Cache::of_user()).map_err(|error| error.to_string())?;
        Ok(Card {
            device: device.name(),
            card: device.card().to_owned(),
            architecture: device.architecture().to_string(),
            cuda: device.driver(),
            libraries: device.libraries(),
        })
    }
}

/// A GPU, and what it is used by.
#[derive(Debug, Clone, Serialize)]
pub struct Card {
    /// In words, with its number and its place on the bus.
    pub device: String,
    /// As its driver names it, and all that are like it.
    pub card: String,
    architecture: String,
    /// The newest that the driver knows.
    cuda: String,
    /// The files of driver, cuBLASLt and NVRTC.
    libraries: Vec<String>,
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device)
    }
}

impl FromStr for Gpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse()? {
            DeviceChoice::Cuda(ordinal) => Ok(Self(ordinal)),
            other => Err(format!("{other} is not a GPU; the first GPU is cuda:0")),
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
    /// The GPU.
    #[arg(long, default_value_t = Gpu(0))]
    device: Gpu,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<Found> {
    match arguments.device.found() {
        Ok(card) => {
            let Card { device, architecture, cuda, libraries, .. } = &card;
            let text = format!("{device}, {architecture}, driver of CUDA {cuda}, with\n{}", libraries.join("\n"));
            Found::new(true, text, &card)
        }
        Err(why) => Ok(Found::skipped(&why)),
    }
}
