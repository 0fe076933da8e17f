//! Device profiles: the published peak rates of a device, and the fractions of these peaks that a step is assumed to
//! reach.
//!
//! Peaks are the vendor's dense peaks (without sparsity) per GPU. The source of each assumed fraction is next to it. A
//! profile in a TOML file has its own values for all of these.

use std::path::Path;

use gapless_engine::compile::{Instr, InstrKind};
use gapless_parallel::Rates;
use serde::{Deserialize, Serialize};

use super::{ConfigError, Precision, machine};
use crate::run::{EstimateConfig, RunConfig};

/// The device for which time is estimated: one of [`DeviceProfile::known`], `this-machine`, or a TOML file that has
/// these fields as keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// Name in reports.
    pub name: String,
    /// Memory in bytes.
    pub memory: u64,
    /// Peak FLOP/s in f32.
    pub f32_flops: f64,
    /// Peak FLOP/s in bf16.
    pub bf16_flops: f64,
    /// Fraction of the peak FLOP/s that matrix products reach.
    pub products: f64,
    /// Fraction of the peak FLOP/s that attention reaches.
    pub attention: f64,
    /// Memory bandwidth that operations reach, in bytes read and written per second.
    pub bytes: f64,
    /// Minimum time of an operation, in seconds.
    pub launch: f64,
    /// Link bandwidth that messages reach: bytes per second from a rank to its neighbor, in one direction.
    pub link: f64,
    /// Seconds until the first byte of a message arrives.
    pub latency: f64,
    /// Fraction of the time of collectives over data ranks that is hidden by computation.
    pub overlap: f64,
}

/// The reason why a device profile cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum UnknownDevice {
    /// The name is neither a known profile nor a file.
    #[error("unknown device {name:?}; use {known}, this-machine, or a file of your own", known = DeviceProfile::known().map(|known| known.name).join(", "))]
    Name {
        /// The name as given.
        name: String,
    },
    /// The file is not a valid profile.
    #[error("{path}: {why}")]
    File {
        /// Path of the file.
        path: String,
        /// The fault in the file.
        why: String,
    },
}

const GIB: u64 = 1 << 30;

/// Values that are assumed for every GPU whose profile has no other value. An operation replayed from a CUDA graph
/// takes at least 2 µs. A message over NVLink begins to arrive after 10 µs, and reaches 80 % of the link's bandwidth.
/// Computation hides half of the gradient reduction.
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

/// NVIDIA A100 Tensor Core GPU datasheet (2021), 80 GB SXM: 312 TFLOP/s in bf16, 19.5 in f32, 2,039 GB/s, NVLink 600
/// GB/s as the sum of both directions. Large products reach four fifths of the tensor cores' peak; FlashAttention-2
/// (arXiv 2307.08691, figures 5 and 6) reaches up to 73 % in the forward and 63 % in the backward.
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

/// NVIDIA H100 Tensor Core GPU datasheet (2023), SXM: 989.4 TFLOP/s in bf16, 67 in f32, 3.35 TB/s, NVLink 900 GB/s as
/// the sum of both directions. A large product reaches 770 TFLOP/s and a copy 3.0 TB/s; FlashAttention-3 (arXiv
/// 2407.08608, figures 5 and 6) reaches up to 75 % in the forward, less in the backward.
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

/// NVIDIA H200 Tensor Core GPU datasheet (2024), SXM: like an H100, but with 141 GB of memory at 4.8 TB/s.
fn h200() -> DeviceProfile {
    DeviceProfile { name: "h200".to_owned(), memory: 141_000_000_000, bytes: 0.9 * 4.8e12, ..h100() }
}

/// NVIDIA HGX B200 datasheet (2025), an eighth of the board: 2.25 PFLOP/s in bf16, 75 TFLOP/s in f32, 180 GB of memory
/// at 7.7 TB/s, NVLink 1.8 TB/s as the sum of both directions. The assumed fractions are those for every GPU.
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

/// True if an operation is attention or its gradient.
pub(super) fn is_attention(operation: &str) -> bool {
    operation.contains("attention")
}

impl DeviceProfile {
    /// Returns the built-in profiles.
    pub fn known() -> [Self; 4] {
        [a100_80(), h100(), h200(), b200()]
    }

    /// True if the device is this machine's CPU, on which each operation is timed.
    pub fn is_measured(&self) -> bool {
        self.name == machine::NAME
    }

    /// Returns the device that a run's `[estimate]` describes. It is the profile that `[estimate]` names, with the
    /// values of the table's other keys in place of the profile's values.
    ///
    /// # Errors
    /// Returns a [`ConfigError::Value`] if there is no such profile, or if a value is not above 0.
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

    /// Returns a device profile. `name` is the name of a known profile, or `this-machine`, or the path of a file with a
    /// profile.
    ///
    /// # Errors
    /// Returns an [`UnknownDevice`] if `name` is neither the name of a profile nor the path of a valid file.
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

    /// Returns the FLOP/s that matrix products reach, and the memory bandwidth.
    pub fn rates(&self, precision: Precision) -> Rates {
        Rates { flops: self.products * self.peak(precision), bytes: self.bytes }
    }

    /// Returns the FLOP/s that this operation reaches, and the memory bandwidth.
    pub(super) fn rates_of(&self, operation: &str, precision: Precision) -> Rates {
        let reached = if is_attention(operation) { self.attention } else { self.products };
        Rates { flops: reached * self.peak(precision), bytes: self.bytes }
    }

    /// Sets the FLOP/s that products reach, both in f32 and in bf16.
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

/// The times of operations, messages and collectives of a step.
pub trait CostModel {
    /// Returns the nanoseconds of an operation; 0 for any other instruction.
    fn nanoseconds(&self, instr: &Instr, precision: Precision) -> u64;

    /// Returns the nanoseconds until a message of `bytes` bytes has arrived at a neighbor.
    fn transfer(&self, bytes: u64) -> u64;

    /// Returns the nanoseconds of a collective for which a rank sends `bytes` bytes. If `can_hide` is true, as for
    /// gradients and parameters, the time that computation hides is subtracted. It is false for the rows of experts,
    /// because the next operation waits for these rows.
    fn collective(&self, bytes: f64, can_hide: bool) -> u64;
}

impl CostModel for DeviceProfile {
    /// Returns the longest of three times: the time of the arithmetic, of the memory traffic, and of the launch.
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
