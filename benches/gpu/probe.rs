//! Checks whether a GPU can be used before a command uses it. Errors after this check are failures, and not reasons
//! to skip.

use std::fmt;
use std::str::FromStr;

use gapless::DeviceChoice;
use gapless::engine::cuda::{Cache, Device, Nvidia};
use serde::Serialize;

use super::record::Found;

/// The ordinal of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu(pub usize);

impl Gpu {
    pub fn choice(self) -> DeviceChoice {
        DeviceChoice::Cuda(self.0)
    }

    /// Opens the GPU and describes it, or returns the reason why it cannot be used.
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

/// A GPU, and the libraries with which it is used.
#[derive(Debug, Clone, Serialize)]
pub struct Card {
    /// The GPU's name with ordinal and PCI bus id.
    pub device: String,
    /// The driver's name for the card, which all cards of the model share.
    pub card: String,
    architecture: String,
    /// The newest CUDA version that the driver supports.
    cuda: String,
    /// The files of the driver, cuBLASLt and NVRTC.
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
