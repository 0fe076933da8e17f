//! What a device does per second, and how much of its published peaks a step reaches.
//!
//! Peaks are the vendor's, dense (without sparsity), per GPU. What is reached of them is an assumption, written beside each; a file
//! of one's own replaces all of it.

use std::path::Path;

use gapless_engine::compile::{Instr, InstrKind};
use gapless_parallel::Rates;
use serde::{Deserialize, Serialize};

use super::{ConfigError, Precision, machine};
use crate::run::{EstimateConfig, RunConfig};

/// A device, for estimates of time: a name of [`DeviceProfile::known`], `this-machine`, or a TOML file with these keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// The name in reports.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// FLOP/s in f32, at the peak.
    pub f32_flops: f64,
    /// FLOP/s in bf16, at the peak.
    pub bf16_flops: f64,
    /// The part of them that matrix products reach.
    pub products: f64,
    /// The part of them that attention reaches.
    pub attention: f64,
    /// Bytes of memory that are read and written per second, as reached.
    pub bytes: f64,
    /// Seconds that an operation takes at least.
    pub launch: f64,
    /// Bytes per second from a rank to its neighbour, one way, as reached.
    pub link: f64,
    /// Seconds until the first of them arrives.
    pub latency: f64,
    /// The part of the sums and gatherings over data ranks that is hidden behind computation.
    pub overlap: f64,
}

/// There is no such profile.
#[derive(Debug, thiserror::Error)]
pub enum UnknownDevice {
    /// Neither a name nor a file.
    #[error("unknown device {name:?}; use {known}, this-machine, or a file of your own", known = DeviceProfile::known().map(|known| known.name).join(", "))]
    Name {
        /// As given.
        name: String,
    },
    /// A file that is none.
    #[error("{path}: {why}")]
    File {
        /// Which.
        path: String,
        /// Why not.
        why: String,
    },
}

const GIB: u64 = 1 << 30;

/// What is assumed where a device has nothing of its own: an operation of a recorded graph of launches takes 2 µs at least, a message
/// over NVLink begins to arrive after 10 µs and reaches 80 % of the link, half of the gradients' sums are hidden.
fn assumed() -> DeviceProfile {
    DeviceProfile {
        name: String::new(),
        memory: 0,
        f32_flops: 0.0,
        bf16_flops: 0.0,
        products: 0.75,
        attention: 0.6,
        bytes: 0.0,
        launch: 2e-6,
        link: 0.0,
        latency: 10e-6,
        overlap: 0.5,
    }
}

/// NVIDIA A100 Tensor Core GPU datasheet (2021), 80 GB SXM: 312 TFLOP/s in bf16, 19.5 in f32, 2,039 GB/s, NVLink 600 GB/s both ways
/// together. Of its tensor cores large products reach four fifths; FlashAttention-2 (arXiv 2307.08691, figures 5 and 6) reaches up to
/// 73 % in the forward and 63 % in the backward.
fn a100_80() -> DeviceProfile {
    DeviceProfile {
        name: "a100-80".to_owned(),
        memory: 80 * GIB,
        f32_flops: 19.5e12,
        bf16_flops: 312e12,
        products: 0.8,
        attention: 0.6,
        bytes: 0.9 * 2.039e12,
        link: 0.8 * 300e9,
        ..assumed()
    }
}

/// NVIDIA H100 Tensor Core GPU datasheet (2023), SXM: 989.4 TFLOP/s in bf16, 67 in f32, 3.35 TB/s, NVLink 900 GB/s both ways together.
/// 770 TFLOP/s and 3.0 TB/s are what a large product and a copy reach; FlashAttention-3 (arXiv 2407.08608, figures 5 and 6) reaches up
/// to 75 % in the forward, less in the backward.
fn h100() -> DeviceProfile {
    DeviceProfile {
        name: "h100".to_owned(),
        memory: 80 * GIB,
        f32_flops: 67e12,
        bf16_flops: 989.4e12,
        products: 770.0 / 989.4,
        attention: 0.6,
        bytes: 3.0e12,
        link: 0.8 * 450e9,
        ..assumed()
    }
}

/// NVIDIA H200 Tensor Core GPU datasheet (2024), SXM: an H100 with 141 GB of 4.8 TB/s.
fn h200() -> DeviceProfile {
    DeviceProfile { name: "h200".to_owned(), memory: 141_000_000_000, bytes: 0.9 * 4.8e12, ..h100() }
}

/// NVIDIA HGX B200 datasheet (2025), an eighth of the board: 2.25 PFLOP/s in bf16, 75 TFLOP/s in f32, 180 GB of 7.7 TB/s, NVLink 1.8 TB/s
/// both ways together. The parts reached are assumed to be an H100's.
fn b200() -> DeviceProfile {
    DeviceProfile {
        name: "b200".to_owned(),
        memory: 180_000_000_000,
        f32_flops: 75e12,
        bf16_flops: 2250e12,
        attention: 0.6,
        bytes: 0.9 * 7.7e12,
        link: 0.8 * 900e9,
        ..assumed()
    }
}

/// Whether an operation is attention, or its gradient.
pub(super) fn is_attention(operation: &str) -> bool {
    operation.contains("attention")
}

impl DeviceProfile {
    /// Those that are known by name.
    pub fn known() -> [Self; 4] {
        [a100_80(), h100(), h200(), b200()]
    }

    /// Whether it is the CPU at hand, on which each operation is timed.
    pub fn is_measured(&self) -> bool {
        self.name == machine::NAME
    }

    /// The device of a run's estimates, with what its keys say of it.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub fn of(run: &RunConfig) -> Result<Self, ConfigError> {
        let EstimateConfig { profile, tflops, terabytes, .. } = &run.estimate;
        let mut device = Self::find(profile)
            .map_err(|why| ConfigError::value("estimate.profile", why, "name a profile, or a TOML file of one"))?;
        if let Some(tflops) = tflops {
            device.set_flops(tflops * 1e12);
        }
        if let Some(terabytes) = terabytes {
            device.bytes = terabytes * 1e12;
        }
        let rates = device.rates(run.step.precision);
        if !rates.are_sound() {
            let why = format!("{} TFLOP/s and {} TB/s are not valid rates", rates.flops / 1e12, rates.bytes / 1e12);
            return Err(ConfigError::value("estimate.tflops, estimate.terabytes", why, "set both above 0"));
        }
        Ok(device)
    }

    /// The profile of a name or in a file.
    ///
    /// # Errors
    /// [`UnknownDevice`].
    pub fn find(name: &str) -> Result<Self, UnknownDevice> {
        if let Some(known) = Self::known().into_iter().find(|known| known.name == name) {
            return Ok(known);
        }
        if name == machine::NAME {
            return Ok(machine::profile());
        }
        if !Path::new(name).is_file() {
            return Err(UnknownDevice::Name { name: name.to_owned() });
        }
        let fail = |why: String| UnknownDevice::File { path: name.to_owned(), why };
        let text = std::fs::read_to_string(name).map_err(|error| fail(error.to_string()))?;
        toml::from_str(&text).map_err(|error| fail(crate::run::with_nearest(error.to_string())))
    }

    /// What matrix products and copies reach.
    pub fn rates(&self, precision: Precision) -> Rates {
        Rates { flops: self.products * self.peak(precision), bytes: self.bytes }
    }

    /// What an operation reaches.
    pub(super) fn rates_of(&self, operation: &str, precision: Precision) -> Rates {
        let reached = if is_attention(operation) { self.attention } else { self.products };
        Rates { flops: reached * self.peak(precision), bytes: self.bytes }
    }

    /// Products reach so many FLOP/s, whatever their type.
    pub(super) fn set_flops(&mut self, flops: f64) {
        (self.f32_flops, self.bf16_flops) = (flops / self.products, flops / self.products);
    }

    fn peak(&self, precision: Precision) -> f64 {
        match precision {
            Precision::F32 => self.f32_flops,
            Precision::Bf16 | Precision::PureBf16 => self.bf16_flops,
        }
    }
}

/// What the parts of a step cost in time.
pub trait CostModel {
    /// Nanoseconds of an operation; 0 of what is no operation.
    fn nanoseconds(&self, instr: &Instr, precision: Precision) -> u64;

    /// Nanoseconds until a message of so many bytes is with a neighbour.
    fn transfer(&self, bytes: u64) -> u64;

    /// Nanoseconds of a sum or gathering for which a rank sends so many bytes, as far as nothing hides them. `can_hide`: gradients and
    /// parameters can be computed with meanwhile, experts' rows cannot.
    fn collective(&self, bytes: f64, can_hide: bool) -> u64;
}

impl CostModel for DeviceProfile {
    /// Held up by arithmetic or by memory, whichever takes longer, and at least by its launch.
    fn nanoseconds(&self, instr: &Instr, precision: Precision) -> u64 {
        let InstrKind::Compute(op) = &instr.kind else { return 0 };
        instr.nanoseconds(&self.rates_of(op.name(), precision)).max((self.launch * 1e9) as u64)
    }

    fn transfer(&self, bytes: u64) -> u64 {
        ((self.latency + bytes as f64 / self.link) * 1e9) as u64
    }

    fn collective(&self, bytes: f64, can_hide: bool) -> u64 {
        let hidden = if can_hide { self.overlap } else { 0.0 };
        ((self.latency + bytes / self.link) * (1.0 - hidden) * 1e9) as u64
    }
}
