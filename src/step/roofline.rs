//! Estimates a step on a GPU kernel by kernel, without a GPU: launches, arithmetic, memory traffic, and a lower bound
//! of the time.
//!
//! In: a planned rank of a step, lowered for CUDA. Out: a list of rows. Each row is for all instructions that launch
//! the same kernels. The model is the roofline (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual
//! performance model"), at the rates of a [`DeviceProfile`](super::DeviceProfile). A launch takes the longest of three
//! times: the time of its arithmetic, of its memory traffic, and of the launch itself. The model ignores caches, and
//! ignores that the clock rate changes under load.

use std::collections::BTreeMap;
use std::fmt;

use gapless_engine::compile::{Executable, Target};
use gapless_engine::cuda::{CudaBackend, LaunchWork, Work};
use gapless_engine::runtime::{Error as RuntimeError, Session};
use serde::Serialize;

use super::device::is_attention;
use super::{DeviceProfile, Precision, Step};
use crate::TrainError;

/// The resource that limits an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Arithmetic throughput.
    Flops,
    /// Memory bandwidth.
    Bytes,
    /// Launch overhead.
    Launches,
}

/// All instructions that launch the same kernels.
#[derive(Debug, Clone, Serialize)]
pub struct RooflineRow {
    /// Name of the operation.
    pub operation: String,
    /// Names of the kernels that each instruction launches. The name of a product contains its sizes.
    pub kernels: Vec<String>,
    /// Number of instructions.
    pub count: usize,
    /// Number of launches of all these instructions.
    pub launches: usize,
    /// Floating-point operations of all these instructions.
    pub flops: u64,
    /// Bytes that all these instructions read and write.
    pub bytes: u64,
    /// Estimated time of all these instructions.
    pub milliseconds: f64,
    /// The resource that limits these instructions.
    pub bound: Bound,
}

/// The estimate of a rank's step.
#[derive(Debug, Clone, Serialize)]
pub struct Roofline {
    /// Name of the device.
    pub device: String,
    /// Number of launches per step.
    pub launches: usize,
    /// Floating-point operations per step.
    pub flops: u64,
    /// Bytes read and written per step.
    pub bytes: u64,
    /// Bytes read and written by everything except products and attention.
    pub other_bytes: u64,
    /// Estimated time, without messages to other ranks.
    pub milliseconds: f64,
    /// One row for each group of kernels, sorted by time, the longest first.
    pub rows: Vec<RooflineRow>,
}

impl Step {
    /// Returns the reason why a planned rank does not run on the GPU that it was lowered for: every operation without CUDA
    /// kernels, with its layers and the remedy. Returns `None` if it runs there, or if it was lowered for the CPU.
    pub fn missing_kernels(&self, executable: &Executable) -> Option<String> {
        if matches!(self.target(), Target::Cpu { .. }) {
            return None;
        }
        let error = Session::launches(executable).err();
        error.filter(|error| matches!(error, RuntimeError::NoDeviceKernels { .. })).map(|error| error.to_string())
    }

    /// Estimates the kernels that a planned rank launches on a GPU, and their time on the step's device.
    ///
    /// # Errors
    /// Returns [`TrainError::Runtime`] if the rank was not lowered for CUDA.
    pub fn roofline(&self, executable: &Executable) -> Result<Roofline, TrainError> {
        let mut rows: BTreeMap<(&str, Vec<String>, Bound), RooflineRow> = BTreeMap::new();
        for work in CudaBackend::work(executable)?.into_iter().flatten() {
            let (seconds, bound) = seconds(&work, &self.device, self.precision());
            let kernels: Vec<String> = work.kernels().map(str::to_owned).collect();
            let Work { operation, flops, bytes, .. } = work;
            let row = rows.entry((operation, kernels.clone(), bound)).or_insert_with(|| {
                let operation = operation.to_owned();
                RooflineRow { operation, kernels, count: 0, launches: 0, flops: 0, bytes: 0, milliseconds: 0.0, bound }
            });
            row.count += 1;
            row.launches += row.kernels.len();
            (row.flops, row.bytes) = (row.flops + flops, row.bytes + bytes);
            row.milliseconds += 1e3 * seconds;
        }
        let mut rows: Vec<RooflineRow> = rows.into_values().collect();
        rows.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        let is_other = |row: &&RooflineRow| {
            !is_attention(&row.operation) && !row.kernels.iter().any(|kernel| kernel.starts_with("product"))
        };
        Ok(Roofline {
            device: self.device.name.clone(),
            launches: rows.iter().map(|row| row.launches).sum(),
            flops: rows.iter().map(|row| row.flops).sum(),
            bytes: rows.iter().map(|row| row.bytes).sum(),
            other_bytes: rows.iter().filter(is_other).map(|row| row.bytes).sum(),
            milliseconds: rows.iter().map(|row| row.milliseconds).sum(),
            rows,
        })
    }
}

/// Returns the time of an instruction's launches in seconds, and the resource that limits the longest of these
/// launches.
fn seconds(work: &Work, device: &DeviceProfile, precision: Precision) -> (f64, Bound) {
    let rates = device.rates_of(work.operation, precision);
    let of_launch = |launch: &LaunchWork| {
        let by_flops = (launch.flops as f64 / rates.flops, Bound::Flops);
        let others = [(launch.bytes as f64 / rates.bytes, Bound::Bytes), (device.launch, Bound::Launches)];
        others.into_iter().fold(by_flops, |most, other| if other.0 > most.0 { other } else { most })
    };
    let times: Vec<_> = work.launches.iter().map(of_launch).collect();
    let longest = times.iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(Bound::Launches, |&(_, bound)| bound);
    (times.iter().map(|(seconds, _)| seconds).sum(), longest)
}

impl fmt::Display for Roofline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, launches, milliseconds, .. } = self;
        let (teraflops, gigabytes) = (self.flops as f64 / 1e12, self.bytes as f64 / 1e9);
        writeln!(
            f,
            "on {device}, estimated: {milliseconds:.2} ms per step; {launches} launches, {teraflops:.2} TFLOP, {gigabytes:.2} GB moved, {:.2} GB besides products and attention",
            self.other_bytes as f64 / 1e9
        )?;
        writeln!(f, "{:>9} {:>6} {:>9} {:>10} {:>9}  {:8}  kernels", "ms", "%", "launches", "GFLOP", "MB", "bound")?;
        for row in &self.rows {
            let bound = match row.bound {
                Bound::Flops => "flops",
                Bound::Bytes => "bytes",
                Bound::Launches => "launches",
            };
            writeln!(
                f,
                "{:9.3} {:6.1} {:9} {:10.1} {:9.1}  {bound:8}  {}× {}: {}",
                row.milliseconds,
                100.0 * row.milliseconds / milliseconds,
                row.launches,
                row.flops as f64 / 1e9,
                row.bytes as f64 / 1e6,
                row.count,
                row.operation,
                Counted(&row.kernels)
            )?;
        }
        Ok(())
    }
}

/// Displays each name once, in order, with its number of occurrences.
struct Counted<'a>(&'a [String]);

impl fmt::Display for Counted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |name: &String| self.0.iter().filter(|other| *other == name).count();
        let firsts = self.0.iter().enumerate().filter(|(index, name)| !self.0[..*index].contains(name));
        for (place, (_, name)) in firsts.enumerate() {
            let comma = if place == 0 { "" } else { ", " };
            match count(name) {
                1 => write!(f, "{comma}{name}")?,
                count => write!(f, "{comma}{count} × {name}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use gapless_engine::cuda::CudaBackend;

    use crate::run::RunConfig;
    use crate::step::Step;

    /// The launches and bytes of GPT-2 124M with 16 sequences of 1024 tokens, when they were first listed. The bytes
    /// are those that everything except products and attention reads and writes. They are computed from a later version
    /// with 446 launches, which had 10.75 GB. The first version had 36 more copies of 16384 × 768 bf16 elements, each
    /// of which was read and written.
    const AT_FIRST: (usize, u64) = (507, 10_746_000_000 + 36 * 2 * 2 * 16_384 * 768);

    #[test]
    fn a_step_of_gpt2_launches_little_and_moves_little() {
        let text = "model = \"gpt2\"\ndevice = \"cuda\"\nestimate.profile = \"h200\"\n\
                    step = { batch = 16, sequence = 1024, precision = \"bf16\" }";
        let step = Step::new(&RunConfig::parse(text, &[]).unwrap()).unwrap();
        let program = step.program(&step.record().unwrap(), 0).unwrap();
        let roofline = step.roofline(&step.plan(&program).unwrap()).unwrap();
        let (launches, bytes) = AT_FIRST;
        println!(
            "{} launches, at first {launches}; {} bytes besides products and attention, at first {bytes}; {:.2} ms",
            roofline.launches, roofline.other_bytes, roofline.milliseconds
        );
        assert!(roofline.launches <= 323, "{roofline}");
        assert!(roofline.other_bytes < bytes / 100 * 65, "{roofline}");
        assert!(roofline.milliseconds <= 32.0, "{roofline}");
    }

    /// If an extent or a pitch of a product is not a multiple of 8 elements, the library falls back to slow kernels.
    /// Only two kinds of products may have such extents: those of the last entries of a vocabulary, and those of a LoRA
    /// whose rank is below 8.
    #[test]
    fn products_are_aligned() {
        const LLAMA: &str =
            "vocabulary = 128256, layers = 1, heads = 32, kv_heads = 8, head_size = 128, width = 4096, hidden = 14336";
        const QWEN: &str =
            "vocabulary = 151936, layers = 1, heads = 32, kv_heads = 4, head_size = 128, width = 2048, hidden = 6144";
        let llama = format!("model.llama = {{ {LLAMA} }}");
        let lora = format!("{llama}\ntrainable.lora = {{ rank = 8 }}");
        let qwen = format!(
            "model.moe = {{ llama = {{ {QWEN} }}, expert_hidden = 768, router = {{ experts = 128, top_k = 8 }} }}"
        );
        for (model, has_rest) in [("model = \"gpt2\"", true), (&llama, false), (&lora, false), (&qwen, false)] {
            let text =
                format!("{model}\ndevice = \"cuda\"\nstep = {{ batch = 2, sequence = 1024, precision = \"bf16\" }}");
            let step = Step::new(&RunConfig::parse(&text, &[]).unwrap()).unwrap();
            let program = step.program(&step.record().unwrap(), 0).unwrap();
            let work = CudaBackend::work(&step.plan(&program).unwrap()).unwrap();
            let products =
                work.iter().flatten().flat_map(|work| work.launches.iter().map(|launch| (work.operation, launch)));
            let (aligned, off): (Vec<_>, Vec<_>) =
                products.filter(|(_, launch)| launch.is_product).partition(|(_, launch)| launch.is_aligned);
            let is_rest =
                |name: &str| has_rest && name.trim_start_matches("product ").split('×').any(|extent| extent == "1");
            for (operation, launch) in &off {
                assert!(
                    *operation == "linear_cross_entropy" && is_rest(&launch.name),
                    "{model}: {operation}: {}",
                    launch.name
                );
            }
            assert!(aligned.len() > 10, "{model}");
        }
    }

    #[test]
    fn a_step_is_as_long_as_what_holds_it_up() {
        let planned = |device: &str| {
            let text = format!(
                "model = \"gpt:vocabulary=64,layers=2,heads=2,width=64\"\ndevice = \"{device}\"\n\
                 step = {{ batch = 2, sequence = 64, precision = \"bf16\" }}"
            );
            let step = Step::new(&RunConfig::parse(&text, &[]).unwrap()).unwrap();
            let program = step.program(&step.record().unwrap(), 0).unwrap();
            let flops = program.flops();
            let executable = step.plan(&program).unwrap();
            (step.roofline(&executable), flops, step)
        };
        let (roofline, flops, step) = planned("cuda");
        let roofline = roofline.unwrap();
        assert_eq!(roofline.flops, flops);
        let least = |row: &super::RooflineRow| row.launches as f64 * step.device.launch * 1e3;
        assert!(roofline.rows.iter().all(|row| row.milliseconds >= 0.9999 * least(row)));
        assert!(roofline.milliseconds >= 0.9999e3 * roofline.bytes as f64 / step.device.bytes);
        let shown = roofline.to_string();
        assert!(shown.contains("12× adamw") || shown.contains("adamw"), "{shown}");
        assert!(
            roofline.rows.iter().any(|row| row.kernels.iter().any(|name| name.starts_with("product 128×"))),
            "{shown}"
        );
        // A program that was lowered for the CPU has no kernels.
        assert!(planned("cpu").0.is_err());
    }
}
