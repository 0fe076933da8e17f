//! Device profiles: the memory of a device, its published peak rates, and the fractions of these peaks that a step is
//! assumed to reach. The built-in profiles are in `cards`. A profile in a TOML file has its own values.

use std::collections::BTreeSet;
use std::path::Path;

use gapless_engine::DeviceChoice;
use gapless_engine::compile::{Instr, InstrKind};
use gapless_parallel::{Axes, Axis, Coordinate, Mesh, Rates};
use serde::{Deserialize, Serialize};

use super::fits::OverheadSources;
use super::{ConfigError, Overheads, Precision, cards, machine};
use crate::run::{EstimateConfig, RunConfig};

/// The device for which time is estimated: one of [`DeviceProfile::known`], `this-machine`, or a TOML file that has
/// these fields as keys.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// Name in reports.
    pub name: String,
    /// Memory in bytes, as the driver reports it to a program.
    pub memory: u64,
    /// Bytes of the memory that the CUDA context takes.
    #[serde(default)]
    pub context: u64,
    /// Bytes of the memory that the kernels of a step take.
    #[serde(default)]
    pub kernels: u64,
    /// Bytes of the memory that NCCL takes for each rank with which a rank exchanges data.
    #[serde(default)]
    pub neighbor: u64,
    /// Bytes of the memory that no arena can use for other reasons.
    #[serde(default)]
    pub reserve: u64,
    /// Compute capability. Steps run on GPUs of 8.0 or later; a step can be planned for any.
    #[serde(default = "oldest_capability")]
    pub capability: f64,
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
    /// Number of ranks of a node. Ranks with adjacent numbers are on the same node.
    #[serde(default = "usual_node")]
    pub node: usize,
    /// Bandwidth that messages between nodes reach: bytes per second for each rank of a node, in one direction.
    #[serde(default = "usual_network")]
    pub network: f64,
    /// Seconds until the first byte of a message arrives.
    pub latency: f64,
    /// Fraction of the time of collectives over data ranks that is hidden by computation. Of collectives over shard ranks, at
    /// most this fraction is hidden, and at most the time of the operations between their start and their wait.
    pub overlap: f64,
    /// Bandwidth of the link to the host's memory that copies reach: bytes per second, in one direction.
    #[serde(default = "usual_host")]
    pub host: f64,
    /// Bandwidth that the offload file reaches: bytes written or read per second. In a profile of a GPU, this is the rate
    /// of a disk. On this machine, it is the measured rate of a file of 64 MiB, which usually is that of the page cache.
    #[serde(default = "usual_disk")]
    pub disk: f64,
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

/// The oldest compute capability for which there are kernels.
pub(super) const OLDEST_CAPABILITY: f64 = 8.0;

fn oldest_capability() -> f64 {
    OLDEST_CAPABILITY
}

fn usual_node() -> usize {
    cards::assumed().node
}

fn usual_network() -> f64 {
    cards::assumed().network
}

fn usual_host() -> f64 {
    cards::assumed().host
}

fn usual_disk() -> f64 {
    cards::assumed().disk
}

/// Returns the number of ranks with which a rank of this mesh exchanges data, each counted once for every communicator
/// that connects them: the next and the previous rank of the pipeline, both neighbors in each ring, and all other expert
/// ranks.
fn neighbors(mesh: Mesh) -> u64 {
    let in_ring = |axes| mesh.size(axes).saturating_sub(1).min(2);
    let in_rings: usize = rings(mesh).map(in_ring).sum();
    (in_ring(Axes::PIPELINE) + in_rings + mesh.size(mesh.experts()).saturating_sub(1)) as u64
}

/// Returns the sets of axes along which ranks of this mesh reduce or gather values in rings.
fn rings(mesh: Mesh) -> impl Iterator<Item = Axes> {
    let has = move |axes: Axes| mesh.size(axes) > 1;
    let experts = mesh.experts();
    let shards_experts = has(Axes::SHARD) && has(experts);
    let batch = [
        (Axes::BATCH, true),
        (Axes::SHARD, true),
        (experts | Axes::SHARD, shards_experts),
        // Copies of a sharded model, and copies of experts, reduce parts of gradients.
        (Axes::BATCH & !Axes::SHARD, has(Axes::SHARD)),
        (Axes::BATCH & !experts, has(experts)),
        (Axes::BATCH & !(experts | Axes::SHARD), shards_experts),
    ];
    // The norm gathers what each rank has of parameters that tensor ranks divide and that other ranks divide further.
    let joint = [(Axes::BATCH, true), (Axes::SHARD, true), (experts, true), (experts | Axes::SHARD, shards_experts)]
        .map(|(axes, is_used)| (axes | Axes::TENSOR, is_used && has(axes) && has(Axes::TENSOR)));
    let own = [(Axes::TENSOR, true), (Axes::CONTEXT, true)];
    let all = batch.into_iter().chain(joint).chain(own).filter(|&(axes, is_used)| is_used && has(axes));
    // Axes of one rank do not matter.
    let distinct: BTreeSet<Vec<Axis>> =
        all.map(|(axes, _)| axes.iter().filter(|&axis| has(Axes::of(&[axis]))).collect()).collect();
    distinct.into_iter().map(|axes| Axes::of(&axes))
}

/// The distribution over nodes of the ranks that exchange data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// Number of nodes.
    pub nodes: usize,
    /// The most ranks on one node.
    pub ranks_per_node: usize,
}

impl Reach {
    /// Returns the reach of ranks with these numbers, in ascending order, if a node has `node` ranks.
    fn of(ranks: impl Iterator<Item = usize>, node: usize) -> Self {
        let nodes: Vec<usize> = ranks.map(|rank| rank / node.max(1)).collect();
        let ranks_on = nodes.chunk_by(|a, b| a == b).map(<[usize]>::len);
        Self { nodes: ranks_on.clone().count(), ranks_per_node: ranks_on.max().unwrap_or(1) }
    }

    /// Returns the reach of the group along these axes to which the first rank of a pipeline stage belongs.
    pub(super) fn of_group(mesh: Mesh, stage: usize, axes: Axes, node: usize) -> Self {
        let color = mesh.color(Coordinate { pipeline: stage, ..Coordinate::default() }, axes);
        let ranks = 0..mesh.ranks().unwrap_or(0);
        Self::of(ranks.filter(|&rank| mesh.color(mesh.coordinate(rank), axes) == color), node)
    }

    /// Returns the reach of a message between the first ranks of two pipeline stages.
    pub(super) fn of_message(mesh: Mesh, stages: [usize; 2], node: usize) -> Self {
        let mut ranks = stages.map(|pipeline| mesh.rank(Coordinate { pipeline, ..Coordinate::default() }));
        ranks.sort_unstable();
        Self::of(ranks.into_iter(), node)
    }
}

/// True if an operation is attention or its gradient.
pub(super) fn is_attention(operation: &str) -> bool {
    operation.contains("attention")
}

impl DeviceProfile {
    /// Returns the built-in profiles, in the order of the sizes on their datasheets.
    pub fn known() -> [Self; 13] {
        cards::all()
    }

    /// Returns the memory of the device that an arena of a rank of this mesh cannot use.
    pub fn overheads(&self, mesh: Mesh) -> Overheads {
        Overheads {
            context_bytes: self.context,
            kernels_bytes: self.kernels,
            cublaslt_bytes: 0,
            nccl_bytes: neighbors(mesh) * self.neighbor,
            other_bytes: self.reserve,
            sources: OverheadSources::new(&self.name, self.has_built_in_overheads()),
        }
    }

    /// True if the overheads are those of the built-in profile of this name. A profile of one's own may have its name.
    fn has_built_in_overheads(&self) -> bool {
        let overheads = |profile: &Self| (profile.context, profile.kernels, profile.neighbor);
        Self::known().iter().any(|known| known.name == self.name && overheads(known) == overheads(self))
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
        let EstimateConfig { memory, tflops, terabytes, .. } = &run.estimate;
        let mut device = Self::find(run.estimate.profile_name())
            .map_err(|why| ConfigError::value("estimate.profile", why, "name a profile, or a TOML file of one"))?;
        device.memory = memory.unwrap_or(device.memory);
        if let Some(tflops) = tflops {
            device.set_flops(tflops * 1e12);
        }
        if let Some(terabytes) = terabytes {
            device.bytes = terabytes * 1e12;
        }
        if device.is_measured() && !run.memory.offload.is_empty() {
            let folder = run.memory.offload_to.as_deref().unwrap_or(Path::new("."));
            device.disk = machine::offload_rate(folder)
                .map_err(|why| ConfigError::value("memory.offload_to", why, "name a folder that can be written"))?;
        }
        // A GPU keeps offloaded activations in host memory unless a folder is named.
        if !device.is_measured() && run.memory.offload_to.is_none() && matches!(run.device, DeviceChoice::Cuda(_)) {
            device.disk = f64::INFINITY;
        }
        let rates = device.rates(run.step.precision);
        if !rates.are_sound() {
            let why = format!("{} TFLOP/s and {} TB/s are not valid rates", rates.flops / 1e12, rates.bytes / 1e12);
            return Err(ConfigError::value("estimate.tflops, estimate.terabytes", why, "set both above 0"));
        }
        for (name, rate) in [("host", device.host), ("disk", device.disk), ("network", device.network)] {
            if rate.is_nan() || rate <= 0.0 {
                let why = format!("has {name} = {rate}, which is not a valid rate");
                return Err(ConfigError::value("estimate.profile", why, "set it above 0, in bytes per second"));
            }
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

    /// Returns the bytes per second that a rank sends. Between nodes, the ranks of a node use the network of all of them
    /// for one exchange after another, as NCCL's rings do.
    fn bytes_per_second(&self, reach: Reach) -> f64 {
        match reach.nodes {
            0 | 1 => self.link,
            _ => self.link.min(self.network * reach.ranks_per_node as f64),
        }
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
    fn transfer(&self, bytes: u64, reach: Reach) -> u64;

    /// Returns the nanoseconds of a collective for which a rank sends `bytes` bytes. If `can_hide` is true, as for
    /// gradients and parameters, the time that computation hides is subtracted. It is false for the rows of experts and
    /// for activations of tensor ranks, because the next operation waits for them.
    fn collective(&self, bytes: f64, reach: Reach, can_hide: bool) -> u64;

    /// Returns the nanoseconds of a copy of `bytes` bytes between the arena and the offload file, in either direction. A
    /// CPU computes nothing during a copy, so the whole time counts. On a GPU, the part counts for which computation
    /// waits.
    fn offload(&self, bytes: u64) -> u64;
}

impl CostModel for DeviceProfile {
    /// Returns the longest of three times: the time of the arithmetic, of the memory traffic, and of the launch.
    fn nanoseconds(&self, instr: &Instr, precision: Precision) -> u64 {
        let InstrKind::Compute(op) = &instr.kind else { return 0 };
        instr.nanoseconds(&self.rates_of(op.name(), precision)).max((self.launch * 1e9) as u64)
    }

    fn transfer(&self, bytes: u64, reach: Reach) -> u64 {
        ((self.latency + bytes as f64 / self.bytes_per_second(reach)) * 1e9) as u64
    }

    fn collective(&self, bytes: f64, reach: Reach, can_hide: bool) -> u64 {
        let hidden = if can_hide { self.overlap } else { 0.0 };
        ((self.latency + bytes / self.bytes_per_second(reach)) * (1.0 - hidden) * 1e9) as u64
    }

    /// Returns the time over the link to the host plus that of the file, because the runtime copies over one after the
    /// other.
    fn offload(&self, bytes: u64) -> u64 {
        (bytes as f64 * (1.0 / self.host + 1.0 / self.disk) * 1e9) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Step;

    /// Every collective of a step is in a ring, or an exchange among expert ranks.
    #[test]
    fn rings_are_those_of_programs() {
        let gpt = "gpt:vocabulary=64,layers=2,heads=4,width=32";
        let mixture = "moe:llama.vocabulary=64,llama.layers=2,llama.heads=4,llama.kv_heads=4,llama.width=32,\
                       router.experts=4,router.top_k=2,expert_hidden=32";
        for (model, ranks) in [
            (gpt, "tensor_ranks = 2\ndata_ranks = 2"),
            (gpt, "tensor_ranks = 2\nshard_ranks = 2\ndata_ranks = 2"),
            (gpt, "tensor_ranks = 2\nshard_ranks = 2\nzero_stage = 2"),
            (gpt, "context_ranks = 2\ntensor_ranks = 2"),
            (gpt, "shard_ranks = 2\ndata_ranks = 2\npipeline_ranks = 2"),
            (mixture, "expert_ranks = 2\ntensor_ranks = 2\ndata_ranks = 2"),
            (mixture, "tensor_ranks = 2\ndata_ranks = 2\nfold = ['data', 'tensor']"),
            (mixture, "data_ranks = 2\nshard_ranks = 2\nexpert_ranks = 2"),
            (mixture, "context_ranks = 2\nshard_ranks = 2\nexpert_ranks = 2"),
            (mixture, "data_ranks = 2\nshard_ranks = 2\nexpert_ranks = 2\nzero_stage = 2"),
        ] {
            let text = format!("model = '{model}'\nsequence = 16\nbatch = 16\nmicro_batches = 2\n{ranks}");
            let keys: Vec<String> = text.lines().map(str::to_owned).collect();
            let step = Step::new(&RunConfig::parse("", &keys).unwrap()).unwrap();
            let mesh = step.options.mesh;
            // Axes of one rank do not matter.
            let of_mesh = |axes: Axes| axes.iter().filter(|&axis| mesh.size(Axes::of(&[axis])) > 1).collect::<Vec<_>>();
            let exchanges = [mesh.experts()];
            let known: Vec<_> = rings(mesh).chain(exchanges).map(of_mesh).collect();
            for program in step.programs(&step.record().unwrap()).unwrap() {
                for instr in &program.instrs {
                    let InstrKind::Collective(collective, _) = &instr.kind else { continue };
                    let axes = of_mesh(collective.axes());
                    assert!(axes.is_empty() || known.contains(&axes), "{ranks}: {axes:?} is not one of {known:?}");
                }
            }
        }
    }

    /// 16 ranks on two nodes: 4 tensor ranks next to each other, 2 stages, 2 copies.
    #[test]
    fn groups_reach_over_nodes() {
        let mesh = Mesh { data: 2, pipeline: 2, tensor: 4, ..Mesh::default() };
        let group = |axes| Reach::of_group(mesh, 1, axes, 8);
        let reach = |nodes, ranks_per_node| Reach { nodes, ranks_per_node };
        assert_eq!(group(Axes::TENSOR), reach(1, 4));
        assert_eq!(group(Axes::BATCH), reach(2, 1));
        assert_eq!(group(Axes::BATCH | Axes::TENSOR), reach(2, 4));
        assert_eq!(Reach::of_message(mesh, [1, 0], 8), reach(1, 2));
        assert_eq!(Reach::of_message(mesh, [1, 0], 4), reach(2, 1));
        let device = DeviceProfile { link: 100.0, network: 10.0, latency: 0.0, overlap: 0.5, ..cards::assumed() };
        let seconds = |axes, can_hide| device.collective(200.0, group(axes), can_hide) as f64 / 1e9;
        assert_eq!(seconds(Axes::TENSOR, false), 2.0);
        assert_eq!(seconds(Axes::BATCH, true), 10.0);
        assert_eq!(seconds(Axes::BATCH | Axes::TENSOR, false), 5.0);
        assert_eq!(device.transfer(200, Reach::of_message(mesh, [0, 1], 4)), 20_000_000_000);
    }
}
