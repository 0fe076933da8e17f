//! Estimates a step's time on this machine's CPU by timing each operation alone.
//!
//! In: instructions of programs for the CPU. Out: their nanoseconds. Each operation is measured once per process, while
//! all ranks of the step run the same operation at the same time. Each rank has its own operands. No whole step is run.
//! If the amount of work depends on data (the rows of experts), an operation is timed at the sizes in the program.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use candle_core::Layout;
use gapless_alloc::{Label, Options, Role};
use gapless_communicator::{Communicator, CommunicatorError, Tag, on_threads};
use gapless_engine::compile::{
    BufferId, BufferKind, CompileOptions, Executable, Instr, InstrKind, Operand, Part, Program, ProgramId, compile,
};
use gapless_engine::kernels::cpu::ScratchMemory;
use gapless_engine::kernels::cpu::args::span;
use gapless_engine::kernels::cpu::bf16::{Stored as bf16, widened_layout};
use gapless_engine::kernels::cpu::gemm::{Epilogue, Factor, Gemm, Mode, Strides};
use gapless_engine::nn::{Init, Initializer};
use gapless_engine::runtime::cpu::{CpuBackend, Workers, resolve_threads};
use gapless_engine::runtime::process_memory::available_memory_bytes;
use gapless_engine::runtime::{RunOptions, Session};
use gapless_engine::{DType, Spec, TrainError};
use rayon::prelude::*;

use super::device::{OLDEST_CAPABILITY, Reach};
use super::{CostModel, DeviceProfile, Precision};

/// Number of measured runs of each operation. The result is their median.
const ROUNDS: usize = 5;
/// Maximum number of copies of an operation in one measured run.
const MAX_COPIES: u64 = 48;

/// This machine's CPU, shared by the step's ranks, which are threads of one process.
#[derive(Debug)]
pub struct ThisMachine {
    threads: usize,
    ranks: usize,
    footprint: u64,
    disk: f64,
}

/// Measured nanoseconds by ranks, threads, copies and operation. The lock is held during a measurement, so only one
/// measurement runs at a time.
static MEASURED: Mutex<BTreeMap<(usize, usize, u64, String), u64>> = Mutex::new(BTreeMap::new());

/// Cost of a message from one thread to another.
#[derive(Debug, Clone, Copy)]
struct Link {
    /// Nanoseconds of the smallest message.
    latency: f64,
    /// Nanoseconds per additional byte.
    byte: f64,
}

impl ThisMachine {
    /// Creates the model of a machine on which `ranks` ranks compute at the same time. Each rank has `threads` threads;
    /// 0 uses all cores. `footprint` is the size of the ranks' arenas in bytes. It decides whether an operation finds
    /// its operands in the caches or in memory. `disk` is the rate of the offload file in bytes per second
    /// ([`DeviceProfile::disk`]).
    pub fn new(ranks: usize, threads: usize, footprint: u64, disk: f64) -> Self {
        Self { ranks: ranks.max(1), threads: resolve_threads(threads), footprint, disk }
    }

    /// Returns the number of copies of an operation that are run in a row, each on its own operands. The number is
    /// chosen such that half an arena is touched between two uses of the same operands, as on average in a step.
    fn copies(&self, instr: &Instr) -> u64 {
        let bytes: u64 = buffers(instr).into_values().map(|(bytes, _)| bytes).sum();
        (self.footprint / 2 / bytes.max(1)).clamp(1, MAX_COPIES)
    }

    /// Times an operation while all ranks run it at the same time. Returns the mean over the ranks, in nanoseconds.
    fn measured(&self, instr: &Instr, copies: u64) -> Result<u64, TrainError> {
        let rank = |mut world: Box<dyn Communicator>| -> Result<u64, TrainError> {
            let mut session = self.session(instr, copies)?;
            world.barrier()?;
            let mut run = || -> Result<u64, TrainError> {
                let begun = Instant::now();
                session.run(ProgramId(0), RunOptions::default())?;
                Ok(nanoseconds(begun.elapsed()) / copies)
            };
            run()?;
            let mut times = (0..ROUNDS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
            times.sort_unstable();
            Ok(times[ROUNDS / 2])
        };
        Ok(on_threads(self.ranks, rank)?.iter().sum::<u64>() / self.ranks as u64)
    }

    /// A session whose program contains only copies of the operation.
    fn session(&self, instr: &Instr, copies: u64) -> Result<Session<CpuBackend>, TrainError> {
        let workers = Workers::new(self.threads)?;
        let mut program = Program { name: "one operation".into(), ..Program::default() };
        (0..copies).for_each(|copy| add_copy(&mut program, instr, copy, workers.threads()));
        session(program, workers)
    }
}

/// A session that runs a program of one part.
fn session(mut program: Program, workers: Workers) -> Result<Session<CpuBackend>, TrainError> {
    program.parts = vec![Part { instrs: 0..program.instrs.len(), name: String::new(), action: None }];
    let options = CompileOptions { planner: Options::quick(), ..CompileOptions::default() };
    let executable: Executable = compile(&[program], &options)?;
    Ok(Session::on_cpu(executable, workers, 0)?)
}

impl CostModel for ThisMachine {
    /// Returns the measured time. If an operation cannot be run alone, returns 0 and logs a warning.
    fn nanoseconds(&self, instr: &Instr, _: Precision) -> u64 {
        let InstrKind::Compute(op) = &instr.kind else { return 0 };
        let operands = |operands: &[Operand]| {
            let describe =
                |operand: &Operand| format!("{:?} {:?} {:?};", operand.layout, operand.dtype, operand.overwritten_by);
            operands.iter().map(describe).collect::<String>()
        };
        let key = format!("{op:?} {} > {} {}", operands(&instr.inputs), operands(&instr.outputs), instr.accumulate);
        let copies = self.copies(instr);
        let mut known = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = known.entry((self.ranks, self.threads, copies, key));
        *entry.or_insert_with(|| {
            self.measured(instr, copies).unwrap_or_else(|error| {
                tracing::warn!(operation = op.name(), layer = &*instr.layer, %error, "cannot be timed alone: it counts as 0");
                0
            })
        })
    }

    fn transfer(&self, bytes: u64, _: Reach) -> u64 {
        Link::known().nanoseconds(bytes as f64)
    }

    /// Returns the full time. Summing on this CPU uses cores that would otherwise compute, so no part of the time is
    /// hidden.
    fn collective(&self, bytes: f64, _: Reach, _: bool) -> u64 {
        Link::known().nanoseconds(bytes)
    }

    fn offload(&self, bytes: u64) -> u64 {
        (bytes as f64 / self.disk * 1e9) as u64
    }
}

/// Name of the device that [`profile`] returns.
pub(super) const NAME: &str = "this-machine";

/// Returns this machine as a device profile, with its free memory and with the rates of large products and copies.
/// These rates are measured on first use. The arena is in the host's memory, so no link leads there, and the rate of the
/// offload file depends on its folder ([`offload_rate`]).
pub(super) fn profile() -> DeviceProfile {
    static PROFILE: OnceLock<DeviceProfile> = OnceLock::new();
    let measured = || {
        let link = Link::known();
        DeviceProfile {
            name: NAME.to_owned(),
            memory: available_memory_bytes().unwrap_or(u64::MAX),
            context: 0,
            kernels: 0,
            neighbor: 0,
            reserve: 0,
            capability: OLDEST_CAPABILITY,
            f32_flops: products_per_second::<f32>(),
            bf16_flops: products_per_second::<bf16>(),
            products: 1.0,
            attention: 0.5,
            bytes: bytes_per_second(),
            launch: 1e-6,
            link: 1e9 / link.byte.max(1e-3),
            node: usize::from(u16::MAX),
            network: f64::INFINITY,
            latency: link.latency / 1e9,
            overlap: 0.0,
            host: f64::INFINITY,
            disk: f64::INFINITY,
        }
    };
    PROFILE.get_or_init(measured).clone()
}

/// Returns the bytes per second that the offload file reaches in this folder, written and read as a step does. The rate
/// of a folder is measured on first use, with a file of 64 MiB that has no name. Like a step, the measurement does not
/// wait for the disk. So the rate usually is that of the page cache.
///
/// # Errors
/// Returns the runtime's message if the file cannot be created, written or read.
pub(super) fn offload_rate(folder: &Path) -> Result<f64, String> {
    static RATES: Mutex<BTreeMap<PathBuf, f64>> = Mutex::new(BTreeMap::new());
    const BYTES: u64 = 64 << 20;
    let mut known = RATES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&rate) = known.get(folder) {
        return Ok(rate);
    }
    let measured = || -> Result<f64, TrainError> {
        let spec = Spec { shape: (BYTES as usize / size_of::<f32>()).into(), dtype: DType::F32 };
        let fill = Initializer::whole(Init::Const(1.0), "kept", spec.dims());
        let mut program = Program { name: "offload".into(), ..Program::default() };
        let kept = BufferKind::Persistent { fill, spec: spec.clone() };
        let operand = |buffer| Operand {
            buffer,
            layout: Layout::contiguous(spec.shape.clone()),
            dtype: spec.dtype,
            overwritten_by: None,
            widened: None,
        };
        let from = operand(program.add(BYTES, label("kept".into(), "offload"), kept));
        let to = operand(program.add(BYTES, label("fetched".into(), "offload"), BufferKind::Temporary));
        let id = program.add_offload(BYTES);
        program.instrs = vec![
            Instr::plain(InstrKind::Offload(id), vec![from], vec![], 0, "".into()),
            Instr::plain(InstrKind::Fetch(id), vec![], vec![to], 0, "".into()),
        ];
        let mut session = session(program, Workers::new(1)?)?;
        session.offload_to(folder)?;
        let mut run = || -> Result<f64, TrainError> {
            let begun = Instant::now();
            session.run(ProgramId(0), RunOptions::default())?;
            Ok(begun.elapsed().as_secs_f64())
        };
        // The first run also allocates the file's pages, as the first step does.
        run()?;
        let mut times = (0..ROUNDS).map(|_| run()).collect::<Result<Vec<_>, _>>()?;
        times.sort_by(f64::total_cmp);
        Ok(2.0 * BYTES as f64 / times[ROUNDS / 2])
    };
    let rate = measured().map_err(|error| error.to_string())?;
    known.insert(folder.to_owned(), rate);
    Ok(rate)
}

/// FLOP/s of a large product on all cores.
fn products_per_second<T: Factor>() -> f64 {
    const SIZE: usize = 1024;
    let gemm = Gemm::new(SIZE, SIZE, SIZE, Strides::row_major(SIZE), Strides::row_major(SIZE));
    let factor = vec![T::store(0.5); SIZE * SIZE];
    let mut product = vec![0.0; SIZE * SIZE];
    let mut memory = ScratchMemory::new(&gemm.scratch(rayon::current_num_threads()));
    let mut run = || {
        let begun = Instant::now();
        let scratch = &mut memory.lend();
        gemm.run(&factor, &factor, &mut product, Mode::Overwrite, Epilogue::default(), scratch)
            .expect("the operands fit");
        begun.elapsed().as_secs_f64()
    };
    let least = (0..ROUNDS).map(|_| run()).fold(f64::INFINITY, f64::min);
    gemm.flops() as f64 / least
}

/// Bytes per second that all cores together read and write.
fn bytes_per_second() -> f64 {
    const BYTES: usize = 64 << 20;
    let (from, mut to) = (vec![1u8; BYTES], vec![0u8; BYTES]);
    let part = BYTES.div_ceil(rayon::current_num_threads());
    let mut run = || {
        let begun = Instant::now();
        let copy = |(to, from): (&mut [u8], &[u8])| to.copy_from_slice(from);
        to.par_chunks_mut(part).zip(from.par_chunks(part)).for_each(copy);
        begun.elapsed().as_secs_f64()
    };
    let least = (0..ROUNDS).map(|_| run()).fold(f64::INFINITY, f64::min);
    2.0 * BYTES as f64 / least
}

impl Link {
    /// Returns the link between two threads, which is measured on first use.
    fn known() -> Self {
        static LINK: OnceLock<Link> = OnceLock::new();
        *LINK.get_or_init(Self::measured)
    }

    fn nanoseconds(self, bytes: f64) -> u64 {
        (self.latency + self.byte * bytes) as u64
    }

    /// Measures messages from one thread to another and back. If the measurement fails, logs a warning and returns a
    /// link without cost.
    fn measured() -> Self {
        const LARGE: usize = 4 << 20;
        let there_and_back = |bytes: usize| {
            let pass = |mut rank: Box<dyn Communicator>| -> Result<f64, CommunicatorError> {
                let mut data = vec![1u8; bytes];
                let (me, other) = (rank.rank(), 1 - rank.rank());
                let mut times = Vec::new();
                for _ in 0..2 * ROUNDS {
                    let begun = Instant::now();
                    if me == 0 {
                        rank.send(&data, other, Tag::default())?;
                        rank.receive(&mut data, other, Tag::default())?;
                    } else {
                        rank.receive(&mut data, other, Tag::default())?;
                        rank.send(&data, other, Tag::default())?;
                    }
                    times.push(nanoseconds(begun.elapsed()) as f64 / 2.0);
                }
                times.sort_by(f64::total_cmp);
                Ok(times[ROUNDS])
            };
            on_threads(2, pass).map(|times| times[0])
        };
        match there_and_back(4).and_then(|latency| Ok((latency, there_and_back(LARGE)?))) {
            Ok((latency, large)) => Self { latency, byte: (large - latency).max(0.0) / LARGE as f64 },
            Err(error) => {
                tracing::warn!(%error, "messages between ranks cannot be timed: they count as 0");
                Self { latency: 0.0, byte: 0.0 }
            }
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the size in bytes and the element type of each buffer that an operation reads or writes.
fn buffers(instr: &Instr) -> HashMap<BufferId, (u64, DType)> {
    let mut buffers = HashMap::new();
    for operand in instr.inputs.iter().chain(&instr.outputs) {
        let reach = operand.layout.start_offset() + span(&operand.layout);
        let (bytes, _) = buffers.entry(operand.buffer).or_insert((0, operand.dtype));
        *bytes = (*bytes).max((reach * operand.dtype.size_in_bytes()) as u64);
    }
    buffers
}

/// Adds a copy of an operation to a program. The copy has its own buffers, which hold values of ordinary magnitude.
fn add_copy(program: &mut Program, instr: &Instr, copy: u64, threads: usize) {
    let InstrKind::Compute(op) = &instr.kind else { return };
    let mut own = HashMap::new();
    for (buffer, (bytes, dtype)) in buffers(instr) {
        let name = format!("{copy}/{}", buffer.index());
        let elements = bytes as usize / dtype.size_in_bytes();
        let init = if dtype.is_float() { Init::Uniform { lo: 0.25, up: 0.75 } } else { Init::Const(0.0) };
        let kind = match dtype {
            // Buffers of f64 are sums, which only the program itself writes.
            DType::F64 => BufferKind::Input,
            _ => BufferKind::Persistent {
                fill: Initializer::whole(init, name.clone(), &[elements]),
                spec: Spec { shape: elements.into(), dtype },
            },
        };
        own.insert(buffer, program.add(bytes, label(name, op.name()), kind));
    }
    let pieces = op.workspace(&Instr::specs(&instr.inputs), &Instr::specs(&instr.outputs), threads);
    let mut workspace: Vec<BufferId> = pieces
        .into_iter()
        .enumerate()
        .map(|(piece, bytes)| {
            program.add(bytes, label(format!("{copy}/workspace.{piece}"), op.name()), BufferKind::Temporary)
        })
        .collect();
    let mut placed = |operand: &Operand| {
        let widened = operand.widened.map(|buffer| {
            let bytes = (span(&widened_layout(&operand.layout)) * size_of::<f32>()) as u64;
            let piece = program.add(
                bytes,
                label(format!("{copy}/{} in f32", buffer.index()), op.name()),
                BufferKind::Temporary,
            );
            workspace.push(piece);
            piece
        });
        Operand { buffer: own[&operand.buffer], widened, ..operand.clone() }
    };
    let inputs = instr.inputs.iter().map(&mut placed).collect();
    let outputs = instr.outputs.iter().map(&mut placed).collect();
    let kind = InstrKind::Compute(op.clone());
    let plain = Instr::plain(kind, inputs, outputs, instr.micro_batch, instr.layer.clone());
    program.instrs.push(Instr { workspace, accumulate: instr.accumulate, ..plain });
}

fn label(tensor: String, op: &str) -> Label {
    Label { tensor, op: op.into(), layer: String::new(), role: Role::Workspace }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;
    use crate::step::Step;

    /// Covers f32, bf16 with its scratch memory, and operations that overwrite an input or add to an output.
    #[test]
    fn every_operation_of_a_step_can_be_run_alone() {
        for keys in [
            "step.micro_batches = 2\noptimizer.name = \"adamw8bit\"",
            "step.precision = \"bf16\"\nstep.micro_batches = 2\nmesh.pipeline = 2",
        ] {
            let keys = format!(
                "model = \"gpt:vocabulary=32,layers=2,heads=2,width=16\"\nstep.batch = 4\nstep.sequence = 8\nestimate.profile = \"{NAME}\"\n{keys}"
            );
            let step = Step::new(&RunConfig::parse(&keys, &[]).unwrap()).unwrap();
            let programs = step.programs(&step.record().unwrap()).unwrap();
            let machine = ThisMachine::new(1, 1, 1 << 16, f64::INFINITY);
            for instr in programs.iter().flat_map(|program| &program.instrs) {
                if let InstrKind::Compute(op) = &instr.kind {
                    machine.measured(instr, 2).unwrap_or_else(|error| panic!("{}: {error}", op.name()));
                }
            }
            assert!(step.timing(&programs).unwrap().nanoseconds() > 0);
        }
    }

    /// The rate of the file is measured in its folder, and its copies count in the step's time.
    #[test]
    fn offloading_is_timed_in_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let step = |folder: &Path| {
            let keys = format!(
                "model = \"gpt:vocabulary=32,layers=1,heads=2,width=16\"\nstep = {{ batch = 2, sequence = 8 }}\n\
                 estimate.profile = \"{NAME}\"\nmemory = {{ offload = [\"gelu\"], offload_to = {folder:?} }}"
            );
            Step::new(&RunConfig::parse(&keys, &[]).unwrap())
        };
        let step_here = step(folder.path()).unwrap();
        let DeviceProfile { disk, host, .. } = step_here.device;
        assert!(disk > 0.0 && disk.is_finite() && host.is_infinite(), "{disk} {host}");
        let programs = step_here.programs(&step_here.record().unwrap()).unwrap();
        let busy = step_here.busy_time(&programs[0]);
        // 2 × 8 tokens × 4 × 16 elements, written once and read once.
        assert_eq!(busy.offloaded, 2 * ThisMachine::new(1, 1, 0, disk).offload(4 * 2 * 8 * 4 * 16));
        assert!(busy.all > busy.offloaded);
        let error = step(&folder.path().join("missing")).unwrap_err();
        assert!(error.to_string().contains("memory.offload_to"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// On a GPU, computation hides a part of the copies. A file behind host memory makes them longer.
    #[test]
    fn copies_of_a_gpu_are_partly_hidden() {
        let exposed = |folder: &str| {
            let keys = format!(
                "model = \"gpt:vocabulary=64,layers=3,heads=2,width=128\"\nstep = {{ batch = 2, sequence = 64 }}\n\
                 device = \"cuda\"\nestimate.profile = \"h200\"\nmemory = {{ offload = [\"gelu\"]{folder} }}"
            );
            let step = Step::new(&RunConfig::parse(&keys, &[]).unwrap()).unwrap();
            let programs = step.programs(&step.record().unwrap()).unwrap();
            // 2 × 64 tokens × 4 × 128 elements of each of 3 layers, copied out once and back once.
            let all = 6 * step.device.offload(4 * 2 * 64 * 4 * 128);
            (step.busy_time(&programs[0]).offloaded, all)
        };
        let [(exposed, all), (in_file, all_in_file)] = ["", ", offload_to = \"/tmp\""].map(exposed);
        assert!(
            0 < exposed && exposed < all && exposed < in_file && in_file < all_in_file,
            "{exposed} {all} {in_file}"
        );
    }

    #[test]
    fn kernels_of_another_device_are_refused() {
        let keys = format!("model = \"small\"\ndevice = \"cuda\"\nestimate.profile = \"{NAME}\"");
        let error = Step::new(&RunConfig::parse(&keys, &[]).unwrap()).unwrap_err();
        assert!(error.to_string().contains("this-machine"), "{error}");
    }
}
