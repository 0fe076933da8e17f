//! Runs planned programs on a device: everything is put in order once, and a step is one replay.
//!
//! In: an executable whose scratch is a GPU's ([`Target::Cuda`](crate::compile::Target)), and a device. Out: inputs written, steps
//! replayed, numbers read. Never: memory beside the arena and the step's key, or a launch that was not recorded.

use candle_core::{DType, Device as CandleDevice, Tensor};

use super::device::{Device, Recording};
use super::{Launch, Operand, Operands, Random};
use crate::compile::{CompiledProgram, Executable, Instruction, Work};
use crate::cpu::{Address, Element, ProgramId};
use crate::error::{Error, Result};
use crate::graph::Spec;
use crate::nn::Init;
use crate::random::Stream;

/// An executable on a device.
#[derive(Debug)]
pub struct Executor {
    executable: Executable,
    device: Box<dyn Device>,
    /// Address of the arena.
    base: u64,
    /// Address of the step's key.
    key: u64,
    /// By program.
    recordings: Vec<Recording>,
    seed: u64,
}

/// Bytes behind the arena that hold the key of a step's random numbers: it changes from step to step, a recording doesn't.
const KEY_BYTES: u64 = 256;

impl Executor {
    /// Reserves the arena, fills the persistent tensors and records every program. Micro-batch 0 is part `first_part` of the whole
    /// batch, and the next one is `part_stride` parts on.
    ///
    /// # Errors
    /// [`Error::NoDeviceKernels`] for what only the CPU can do so far, and for programs that were lowered for it;
    /// [`Error::Device`].
    pub fn new(
        executable: Executable,
        mut device: Box<dyn Device>,
        seed: u64,
        (first_part, part_stride): (u64, u64),
    ) -> Result<Self> {
        let bytes = executable.arena_bytes().next_multiple_of(KEY_BYTES);
        let base = device.reserve(bytes + KEY_BYTES)?;
        let place = Place { base, key: base + bytes, first_part, part_stride };
        for persistent in &executable.persistent {
            let (name, address) = (&persistent.label.tensor, &persistent.address);
            let data = filled(persistent.init, seed, name, persistent.first, address)?;
            device.write(base + address.offset, &data)?;
        }
        let mut recordings = Vec::new();
        for program in &executable.programs {
            recordings.push(device.record(place.launches(program)?)?);
        }
        Ok(Self { executable, device, base, key: place.key, recordings, seed })
    }

    /// What it runs.
    pub fn executable(&self) -> &Executable {
        &self.executable
    }

    /// Finds a program by name.
    pub fn program(&self, name: &str) -> Option<ProgramId> {
        ProgramId::of(&self.executable, name)
    }

    /// Runs a program as a step.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn run(&mut self, id: ProgramId, step: u64) -> Result<()> {
        let key = Stream::new(self.seed, step, 0).key();
        self.device.write(self.key, &key.to_ne_bytes())?;
        Ok(self.device.replay(self.recordings[id.index()])?)
    }

    /// Writes an input of a program.
    ///
    /// # Errors
    /// When there is no such input, or it holds another number of elements or another type; [`Error::Device`].
    pub fn write_input<T: Element>(&mut self, id: ProgramId, name: &str, micro_batch: u32, data: &[T]) -> Result<()> {
        let address = self.executable.programs[id.index()].input_for(name, micro_batch, data)?;
        Ok(self.device.write(self.base + address.offset, T::bytes(data))?)
    }

    /// A copy of an output of a program that has run.
    ///
    /// # Errors
    /// When there is no such output; [`Error::Device`].
    pub fn output(&mut self, id: ProgramId, name: &str) -> Result<Tensor> {
        let address = self.executable.programs[id.index()].output(name)?.address.clone();
        self.read(&address)
    }

    /// A copy of a parameter or an optimizer state, by its full name.
    ///
    /// # Errors
    /// When there is none of that name; [`Error::Device`].
    pub fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let address = self.executable.find_persistent(name)?.address.clone();
        self.read(&address)
    }

    fn read(&mut self, address: &Address) -> Result<Tensor> {
        let mut bytes = vec![0; address.span * address.dtype.size_in_bytes()];
        self.device.read(self.base + address.offset, &mut bytes)?;
        Ok(Tensor::from_raw_buffer(&bytes, address.dtype, address.layout.dims(), &CandleDevice::Cpu)?)
    }
}

/// Where a program runs, and on which part of the batch.
#[derive(Debug, Clone, Copy)]
struct Place {
    base: u64,
    key: u64,
    first_part: u64,
    part_stride: u64,
}

impl Place {
    /// All that a program launches.
    fn launches(&self, program: &CompiledProgram) -> Result<Vec<Launch>> {
        let mut launches = Vec::new();
        for instruction in &program.instructions {
            let of_one = self.of(instruction).ok_or_else(|| Error::NoDeviceKernels {
                instruction: instruction.describe(),
                dtypes: instruction.inputs.iter().map(|input| input.dtype).collect(),
            })?;
            launches.extend(of_one);
        }
        Ok(launches)
    }

    /// What an instruction launches; none if there are no kernels for it, or its scratch is not theirs.
    fn of(&self, instruction: &Instruction) -> Option<Vec<Launch>> {
        let (Work::Compute(op), None) = (&instruction.work, instruction.only_if) else { return None };
        let operand = |address: &Address| {
            let Address { offset, ref layout, dtype, .. } = *address;
            address.counted.is_none().then(|| Operand { address: self.base + offset, layout: layout.clone(), dtype })
        };
        let all = |addresses: &[Address]| addresses.iter().map(operand).collect::<Option<Vec<_>>>();
        let specs = |addresses: &[Address]| -> Vec<Spec> {
            let spec = |address: &Address| Spec { shape: address.layout.shape().clone(), dtype: address.dtype };
            addresses.iter().map(spec).collect()
        };
        // A program that was lowered for the CPU has other scratch, which kernels would write beyond.
        let needed = op.cuda_workspace(&specs(&instruction.inputs), &specs(&instruction.outputs));
        let given = instruction.workspace.iter().map(|piece| piece.bytes);
        if needed.len() != given.len() || needed.iter().zip(given).any(|(&needed, given)| needed > given) {
            return None;
        }
        let workspace: Vec<u64> = instruction.workspace.iter().map(|piece| self.base + piece.offset).collect();
        op.cuda(&Operands {
            inputs: &all(&instruction.inputs)?,
            outputs: &all(&instruction.outputs)?,
            workspace: &workspace,
            accumulate: instruction.accumulate,
            random: Random {
                key: self.key,
                micro_batch: self.first_part + self.part_stride * u64::from(instruction.micro_batch),
            },
        })
    }
}

/// A tensor's bytes before the first step.
fn filled(init: Init, seed: u64, name: &str, first: usize, address: &Address) -> Result<Vec<u8>> {
    let mut numbers = vec![0.0; address.span];
    init.fill(seed, name, first, &mut numbers, |x| x);
    Ok(match address.dtype {
        DType::U8 => numbers.into_iter().map(|x| x as u8).collect(),
        DType::F32 => numbers.into_iter().flat_map(|x| (x as f32).to_ne_bytes()).collect(),
        DType::BF16 => numbers.into_iter().flat_map(|x| to_bf16(x as f32).to_ne_bytes()).collect(),
        dtype => {
            let (instruction, dtypes) = (format!("filling {name:?}"), vec![dtype]);
            return Err(Error::NoDeviceKernels { instruction, dtypes });
        }
    })
}

/// The nearest bf16, of two equally near ones the even one; numbers alone.
pub(in crate::cuda) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
