//! Runs planned programs on a device: everything is put in order once, and a step is one replay; or, of several ranks, one between
//! any two messages.
//!
//! In: an executable whose scratch is a GPU's ([`Target::Cuda`](gapless_compile::Target)), and a device. Out: inputs written, steps
//! replayed, numbers read. Never: device memory beside the arena, the step's key and tickets, or a launch that was not recorded.

use candle_core::{DType, Device as CandleDevice, Tensor};
use gapless_compile::internal::{CompiledProgram, Instruction};
use gapless_compile::{Executable, InstrKind, ProgramId};
use gapless_graph::launches;
use gapless_kernels::Spec;
use gapless_kernels::Stream;
use gapless_kernels::cpu::args::Address;
use gapless_kernels::cuda::{Launch, Operand, Operands, Random};

use super::device::{Device, DeviceError, DeviceMemory, Recording};
use super::staging::Staging;
use crate::error::{Error, Result};
use crate::session::{Backend, RunOptions, Session};
use crate::transfers::Transfers;

/// An arena on a device, and what was recorded to run in it.
#[derive(Debug)]
pub struct CudaBackend {
    /// First to be dropped: communicators may use the device's stream and memory.
    pub(super) staging: Staging,
    pub(super) device: Box<dyn Device>,
    pub(super) place: Place,
    /// By program.
    recordings: Vec<Vec<Part<Recording>>>,
}

/// Launches, each with the instruction that it is for.
pub(super) type Launches = Vec<(usize, Launch)>;

/// What a program does next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part<L> {
    /// Launches.
    Launches(L),
    /// The instruction of this number, which has to do with other ranks.
    Exchange(usize),
}

/// What begins behind the arena is aligned to so many bytes.
const ALIGNMENT: u64 = 256;

/// Bytes behind the arena that hold the key of a step's random numbers: it changes from step to step, a recording doesn't.
const KEY_BYTES: u64 = ALIGNMENT;

/// Bytes of the tickets behind the key, by which blocks find out which of them is the last: launches follow one another, so that all of
/// them share those that one takes.
fn tickets(launches: &[Launch]) -> u64 {
    let of = |launch: &Launch| match launch {
        Launch::Kernel(kernel) => kernel.tickets,
        Launch::Product(_) => 0,
    };
    // There is always one: a write of nothing is another case.
    launches.iter().map(of).max().unwrap_or(0).max(1) as u64 * size_of::<u32>() as u64
}

impl Session<CudaBackend> {
    /// Reserves the arena, records every program and fills the persistent tensors. Micro-batch 0 is part `first_part` of the whole
    /// batch, and the next one is `part_stride` parts on. Programs that were lowered for several ranks run once they are
    /// [connected](Self::connect).
    ///
    /// # Errors
    /// Before anything is reserved, [`Error::NoDeviceKernels`] for what only the CPU can do so far, and for programs that were
    /// lowered for it; [`Error::Device`].
    pub fn on_cuda(
        executable: Executable,
        mut device: Box<dyn Device>,
        seed: u64,
        (first_part, part_stride): (u64, u64),
    ) -> Result<Self> {
        let tickets = tickets(&Self::launches(&executable)?).next_multiple_of(ALIGNMENT);
        Staging::check(&executable, refused)?;
        let bytes = executable.arena_bytes().next_multiple_of(ALIGNMENT);
        let base = device.reserve(bytes + KEY_BYTES + tickets)?;
        let key = base + bytes;
        let place = Place { base, key, tickets: key + KEY_BYTES, first_part, part_stride };
        let mut recordings = Vec::new();
        for program in &executable.programs {
            let mut parts = Vec::new();
            for part in place.parts(program)? {
                parts.push(match part {
                    Part::Exchange(index) => Part::Exchange(index),
                    Part::Launches(launches) => {
                        let (of, launches): (Vec<usize>, Vec<Launch>) = launches.into_iter().unzip();
                        let describe = |launch: usize| program.instructions[of[launch]].describe();
                        Part::Launches(device.record(launches, &describe)?)
                    }
                });
            }
            recordings.push(parts);
        }
        // After the recordings, which may write anywhere.
        device.write(place.tickets, &vec![0; tickets as usize])?;
        Self::with_initial_values(
            executable,
            CudaBackend { staging: Staging::default(), device, place, recordings },
            seed,
        )
    }

    /// The device's name.
    pub fn device(&self) -> String {
        self.backend.device.name()
    }

    /// All that the programs of an executable launch, as if its arena began at address 0: what has to be compiled for it.
    ///
    /// # Errors
    /// [`Error::NoDeviceKernels`], as [`Self::on_cuda`].
    pub fn launches(executable: &Executable) -> Result<Vec<Launch>> {
        let parts =
            executable.programs.iter().map(|program| Place::NOWHERE.parts(program)).collect::<Result<Vec<_>>>()?;
        let launches = parts.into_iter().flatten().filter_map(|part| match part {
            Part::Launches(launches) => Some(launches),
            Part::Exchange(_) => None,
        });
        Ok(launches.flatten().map(|(_, launch)| launch).collect())
    }
}

impl CudaBackend {
    /// What of the device's memory is in use, and for what.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn memory(&self) -> Result<DeviceMemory> {
        Ok(self.device.memory()?)
    }

    /// Replays what was recorded of a program.
    fn replay(&mut self, executable: &Executable, id: ProgramId) -> Result<()> {
        let Self { device, place, recordings, staging } = self;
        let mut exchanging = staging.run(id.0)?;
        let CompiledProgram { name, instructions, .. } = &executable.programs[id.0];
        // Nobody knows which of the launches failed.
        let during =
            |error: DeviceError| error.during(&format!("{name}, all at once (compute-sanitizer names the kernel)"));
        let mut replay = || {
            for part in &recordings[id.0] {
                match *part {
                    Part::Launches(recording) => device.replay(recording).map_err(during)?,
                    Part::Exchange(index) => {
                        exchanging.exchange(id.0, &instructions[index], &mut **device, place.base)?;
                    }
                }
            }
            let settled = exchanging.settle();
            // A kernel that failed is heard of by whoever asks the driver first.
            device.wait().map_err(during)?;
            settled
        };
        let ran = replay();
        exchanging.end(ran)
    }

    pub(super) fn write_key(&mut self, options: RunOptions) -> Result<()> {
        let key = Stream::new(options.seed, options.step, 0).key();
        Ok(self.device.write(self.place.key, &key.to_ne_bytes())?)
    }

    /// Runs a program's instructions and shows each when it has run.
    fn run_one_by_one(
        &mut self,
        executable: &Executable,
        id: ProgramId,
        mut show: impl FnMut(&dyn Device, Place, &Instruction) -> Result<()>,
    ) -> Result<()> {
        let Self { device, place, staging, .. } = self;
        let mut exchanging = staging.run(id.0)?;
        let mut run = |instruction: &Instruction| {
            if instruction.is_exchange() {
                exchanging.exchange(id.0, instruction, &mut **device, place.base)?;
                exchanging.settle()?;
            } else {
                let launches = place.of(instruction).ok_or_else(|| refused(instruction))?;
                device.run(&launches, &|_| instruction.describe())?;
            }
            show(&**device, *place, instruction)
        };
        let ran = executable.programs[id.0].instructions.iter().try_for_each(&mut run);
        exchanging.end(ran)
    }
}

impl Backend for CudaBackend {
    // Where micro-batches lie in the batch was said when it was recorded.
    fn run(&mut self, executable: &Executable, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        self.write_key(options)?;
        if !options.watch {
            return self.replay(executable, id).map(|()| None);
        }
        let mut culprit = None;
        self.run_one_by_one(executable, id, |device, place, instruction| {
            for address in instruction.made().iter().filter(|address| address.dtype.is_float()) {
                if culprit.is_none() && !all_finite(&read(device, place, address)?)? {
                    culprit = Some(instruction.describe());
                }
            }
            Ok(())
        })?;
        Ok(culprit)
    }

    fn connect(&mut self, executable: &Executable, transfers: Transfers) -> Result<()> {
        self.staging = Staging::new(executable, transfers)?;
        Ok(())
    }

    fn read(&self, addresses: &[&Address], show: &mut dyn FnMut(&[&[u8]])) -> Result<()> {
        let copies = addresses.iter().map(|address| bytes(&*self.device, self.place, address));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        show(&copies.iter().map(Vec::as_slice).collect::<Vec<_>>());
        Ok(())
    }

    fn modify(&mut self, address: &Address, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let mut copy = bytes(&*self.device, self.place, address)?;
        change(&mut copy);
        self.write(address, &copy)
    }

    fn write(&mut self, address: &Address, bytes: &[u8]) -> Result<()> {
        Ok(self.device.write(self.place.base + address.offset, bytes)?)
    }

    fn tensor(&self, address: &Address) -> Result<Tensor> {
        read(&*self.device, self.place, address)
    }
}

fn bytes(device: &dyn Device, place: Place, address: &Address) -> Result<Vec<u8>> {
    let mut bytes = vec![0; address.span * address.dtype.size_in_bytes()];
    device.read(place.base + address.offset, &mut bytes)?;
    Ok(bytes)
}

fn read(device: &dyn Device, place: Place, address: &Address) -> Result<Tensor> {
    let bytes = bytes(device, place, address)?;
    Ok(Tensor::from_raw_buffer(&bytes, address.dtype, address.layout.dims(), &CandleDevice::Cpu)?)
}

fn all_finite(numbers: &Tensor) -> Result<bool> {
    Ok(numbers.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?.iter().all(|x| x.is_finite()))
}

/// What is at addresses.
pub(super) fn specs(addresses: &[Address]) -> Vec<Spec> {
    let spec = |address: &Address| Spec { shape: address.layout.shape().clone(), dtype: address.dtype };
    addresses.iter().map(spec).collect()
}

fn refused(instruction: &Instruction) -> Error {
    Error::NoDeviceKernels {
        instruction: instruction.describe(),
        dtypes: instruction.inputs.iter().map(|input| input.dtype).collect(),
    }
}

/// Where a program runs, and on which part of the batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) base: u64,
    key: u64,
    tickets: u64,
    first_part: u64,
    part_stride: u64,
}

impl Place {
    /// Before there is a device: as if the arena began at address 0.
    pub(super) const NOWHERE: Self = Self { base: 0, key: 0, tickets: 0, first_part: 0, part_stride: 1 };

    /// All that a program does: launches, each with the instruction that it is for, between what has to do with other ranks.
    pub(super) fn parts(&self, program: &CompiledProgram) -> Result<Vec<Part<Launches>>> {
        let (mut parts, mut launches) = (Vec::new(), Vec::new());
        for (index, instruction) in program.instructions.iter().enumerate() {
            if instruction.is_exchange() {
                parts.extend(part(&mut launches));
                parts.push(Part::Exchange(index));
                continue;
            }
            let of_one = self.of(instruction).ok_or_else(|| refused(instruction))?;
            launches.extend(of_one.into_iter().map(|launch| (index, launch)));
        }
        parts.extend(part(&mut launches));
        Ok(parts)
    }

    /// What an instruction launches; none if there are no kernels for it, or its scratch is not theirs.
    fn of(&self, instruction: &Instruction) -> Option<Vec<Launch>> {
        let (InstrKind::Compute(op), None) = (&instruction.kind, instruction.predicate) else { return None };
        let operand = |address: &Address| {
            let Address { offset, ref layout, dtype, .. } = *address;
            address.counted.is_none().then(|| Operand { address: self.base + offset, layout: layout.clone(), dtype })
        };
        let all = |addresses: &[Address]| addresses.iter().map(operand).collect::<Option<Vec<_>>>();
        let inputs = instruction.inputs.iter().map(|input| (&input.layout, input.dtype));
        // A program that was lowered for the CPU has other scratch, which kernels would write beyond.
        let needed = launches::workspace(&**op, inputs, &specs(&instruction.outputs));
        let given = instruction.workspace.iter().map(|piece| piece.bytes);
        if needed.len() != given.len() || needed.iter().zip(given).any(|(&needed, given)| needed > given) {
            return None;
        }
        let workspace: Vec<u64> = instruction.workspace.iter().map(|piece| self.base + piece.offset).collect();
        let operands = Operands {
            inputs: &all(&instruction.inputs)?,
            outputs: &all(&instruction.outputs)?,
            workspace: &workspace,
            accumulate: instruction.accumulate,
            tickets: self.tickets,
            random: Random {
                key: self.key,
                micro_batch: self.first_part + self.part_stride * u64::from(instruction.micro_batch),
            },
        };
        launches::launches(&**op, &operands)
    }
}

/// The launches so far, if there are any.
fn part(launches: &mut Launches) -> Option<Part<Launches>> {
    let launches = std::mem::take(launches);
    (!launches.is_empty()).then(|| Part::Launches(gapless_kernels::cuda::launch::together(launches)))
}
