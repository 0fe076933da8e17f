//! The backend that runs planned programs on a GPU. Each program is recorded once, and a step replays the recording.
//! A program is recorded in several parts if the host has something to do between them: exchange messages, or place
//! dynamic rows after they were counted.
//!
//! - In: an executable lowered for a GPU ([`Target::Cuda`](gapless_compile::Target)), and a device.
//! - Out: inputs written, steps replayed, tensors read.
//! - Never: device memory besides one range, which contains the key, the tickets, the slots and the arena. Never a
//!   launch that was not recorded, except when instructions are watched or profiled one by one.

use candle_core::{Device as CandleDevice, Tensor};
use gapless_alloc::arena::ArenaReport;
use gapless_compile::{Executable, ProgramId};
use gapless_kernels::cpu::args::Address;
use gapless_kernels::cuda::Launch;

use super::device::{Device, DeviceError, DeviceMemory, Recording};
use super::place::{ALIGNMENT, Launches, Part, Persistents, Place};
use super::refused::Refused;
use super::runner::{Runner, is_finite};
use super::slots::{Slots, table_bytes};
use super::staging::Staging;
use crate::error::Result;
use crate::session::{Backend, RunOptions, Session};
use crate::transfers::Transfers;

/// An arena on a device, and the recordings that run in it.
#[derive(Debug)]
pub struct CudaBackend {
    pub(super) runner: Runner,
    /// The recorded parts of each program, indexed by program.
    recordings: Vec<Vec<Part<Recording>>>,
}

/// Bytes reserved before the arena for the key of a step's random numbers. The key changes at every step, while a
/// recording cannot change. So kernels read the key from device memory.
const KEY_BYTES: u64 = ALIGNMENT;

/// Returns the bytes of the tickets, which lie after the key. The blocks of a kernel take tickets to find out which of
/// them is the last to finish. Launches run one after another, so they share the tickets. The number of tickets is the
/// maximum over the launches.
fn tickets(launches: &[Launch]) -> u64 {
    let of = |launch: &Launch| match launch {
        Launch::Kernel(kernel) => kernel.tickets,
        Launch::Product(_) | Launch::Copy(_) | Launch::CopyEnd(_) => 0,
    };
    // At least one ticket, because a write of zero bytes would be a special case.
    launches.iter().map(of).max().unwrap_or(0).max(1) as u64 * size_of::<u32>() as u64
}

impl Session<CudaBackend> {
    /// Reserves the arena, records every program and fills the persistent tensors with their initial values. In the
    /// whole batch, this rank's micro-batch 0 has index `first_part`, and its consecutive micro-batches are
    /// `part_stride` apart. Programs that were lowered for several ranks only run once the session is
    /// [connected](Self::connect).
    ///
    /// # Errors
    /// Returns [`Error::NoDeviceKernels`](crate::Error::NoDeviceKernels), which lists every operation without GPU kernels,
    /// if there is one or if the programs were lowered for the CPU. In these cases, nothing has been reserved. If
    /// activations are offloaded, host memory or a file is reserved for them ([`Device::offload_to`]). Returns
    /// [`Error::Device`](crate::Error::Device) if the device fails.
    pub fn on_cuda(
        executable: Executable,
        mut device: Box<dyn Device>,
        seed: u64,
        (first_part, part_stride): (u64, u64),
    ) -> Result<Self> {
        let launches = Self::launches(&executable)?;
        let tickets = tickets(&launches).next_multiple_of(ALIGNMENT);
        let table = table_bytes(&executable).next_multiple_of(ALIGNMENT);
        let arena = executable.arena_bytes().next_multiple_of(ALIGNMENT);
        // The arena comes last in the range because it may grow.
        let key = device.reserve(KEY_BYTES + tickets + table + arena)?;
        if executable.host_bytes() > 0 {
            let largest = launches.iter().map(|of| if let Launch::Copy(copy) = of { copy.bytes } else { 0 });
            device.reserve_host(executable.host_bytes(), largest.max().unwrap_or(0))?;
        }
        let slots = key + KEY_BYTES + tickets;
        let (base, tickets_at, features) = (slots + table, key + KEY_BYTES, device.features());
        let has_offload_file = device.has_offload_file();
        let place =
            Place { base, key, tickets: tickets_at, slots, first_part, part_stride, features, has_offload_file };
        let persistent = Persistents::of(&executable);
        let mut recordings = Vec::new();
        for program in executable.programs() {
            let record = |part: Part<Launches>| {
                part.try_map(|launches| {
                    let (of, launches): (Vec<usize>, Vec<Launch>) = launches.into_iter().unzip();
                    let describe = |launch: usize| program.instructions[of[launch]].describe();
                    Ok(device.record(launches, &describe)?)
                })
            };
            recordings.push(place.parts(program, &persistent)?.into_iter().map(record).collect::<Result<Vec<_>>>()?);
        }
        // Recording may overwrite any of this memory, so it is initialized afterwards.
        device.write(place.tickets, &vec![0; tickets as usize])?;
        let slots = Slots::new(&executable, place);
        let runner = Runner { staging: Staging::default(), device, place, slots };
        Self::with_initial_values(executable, CudaBackend { runner, recordings }, seed)
    }

    /// The device's name.
    pub fn device(&self) -> String {
        self.backend.runner.device.name()
    }

    /// Returns all launches of an executable's programs, with addresses as if its arena began at 0. These launches name
    /// all kernels that must be compiled for the executable.
    ///
    /// # Errors
    /// Returns [`Error::NoDeviceKernels`](crate::Error::NoDeviceKernels) under the same conditions as
    /// [`Self::on_cuda`].
    pub fn launches(executable: &Executable) -> Result<Vec<Launch>> {
        let mut refused = Refused::default();
        let (programs, persistent) = (executable.programs().iter(), Persistents::of(executable));
        let parts = programs.flat_map(|program| Place::NOWHERE.parts_or(program, &persistent, &mut refused));
        let parts: Vec<_> = parts.collect();
        refused.check()?;
        Ok(parts.into_iter().filter_map(|part| part.launches).flatten().map(|(_, launch)| launch).collect())
    }
}

impl CudaBackend {
    /// The use of the device's memory.
    pub(crate) fn memory(&self) -> Result<DeviceMemory> {
        Ok(self.runner.device.memory()?)
    }

    /// Copies the bytes at a planned address to the host.
    fn bytes(&self, address: &Address) -> Result<Vec<u8>> {
        let mut bytes = vec![0; address.span * address.dtype.size_in_bytes()];
        self.runner.device.read(self.runner.place.base + address.offset, &mut bytes)?;
        Ok(bytes)
    }
}

impl Backend for CudaBackend {
    // `options.first_part` and `options.part_stride` are ignored, because the recordings contain the values passed to
    // `on_cuda`.
    fn run(&mut self, executable: &Executable, id: ProgramId, options: RunOptions) -> Result<Option<String>> {
        let program = &executable.programs()[id.0];
        if !options.watch && !options.poison {
            self.runner.go_through(executable, id, options, &self.recordings[id.0], |run, part| {
                let Some(recording) = part.launches else { return Ok(()) };
                Ok(run.device.replay(recording).map_err(|error| run.at_once(error))?)
            })?;
            return Ok(None);
        }
        let single = |part: Part<Launches>| {
            part.try_map(|launches| Ok(launches.into_iter().map(|(_, launch)| launch).collect()))
        };
        let parts = self.runner.place.single_parts(program, &Persistents::of(executable))?;
        let parts: Vec<Part<Vec<Launch>>> = parts.into_iter().map(single).collect::<Result<_>>()?;
        let mut culprit = None;
        self.runner.go_through(executable, id, options, &parts, |run, part| {
            let instruction = &program.instructions[part.span.start];
            run.settle()?;
            if let Some(launches) = &part.launches {
                run.device.run(launches, &|_| instruction.describe())?;
            }
            for address in instruction.results() {
                if options.watch && culprit.is_none() && !is_finite(run.device, run.located(), address)? {
                    culprit = Some(instruction.describe());
                }
            }
            if options.poison { run.poison(instruction) } else { Ok(()) }
        })?;
        Ok(culprit)
    }

    fn connect(&mut self, executable: &Executable, transfers: Transfers) -> Result<()> {
        self.runner.staging = Staging::new(executable, transfers)?;
        Ok(())
    }

    fn read(&self, addresses: &[&Address], show: &mut dyn FnMut(&[&[u8]])) -> Result<()> {
        let copies = addresses.iter().map(|address| self.bytes(address)).collect::<Result<Vec<_>>>()?;
        show(&copies.iter().map(Vec::as_slice).collect::<Vec<_>>());
        Ok(())
    }

    fn modify(&mut self, address: &Address, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let mut copy = self.bytes(address)?;
        change(&mut copy);
        self.write(address, &copy)
    }

    fn fill(&mut self, address: &Address, make: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        let mut bytes = vec![0; address.span * address.dtype.size_in_bytes()];
        make(&mut bytes);
        self.write(address, &bytes)
    }

    fn write(&mut self, address: &Address, bytes: &[u8]) -> Result<()> {
        Ok(self.runner.device.write(self.runner.place.base + address.offset, bytes)?)
    }

    fn tensor(&self, address: &Address) -> Result<Tensor> {
        let bytes = self.bytes(address)?;
        Ok(Tensor::from_raw_buffer(&bytes, address.dtype, address.layout.dims(), &CandleDevice::Cpu)?)
    }

    fn routing(&self) -> Option<ArenaReport> {
        self.runner.slots.routed.report()
    }

    fn check_run(&self, executable: &Executable) -> Result<usize> {
        self.runner.slots.routed.check(executable)
    }

    fn allow_overflow_heap(&mut self, limit: u64) {
        self.runner.slots.routed.allow_overflow_heap(limit);
    }

    fn grow(&mut self, executable: &mut Executable, limit: u64) -> Result<()> {
        let Runner { device, place, slots, .. } = &mut self.runner;
        let Some(factor) = slots.routed.factor_needed() else { return Ok(()) };
        // The arena is extended at its end, so addresses do not change.
        slots.routed.grow(executable, factor, limit, |bytes| match place.reach(&mut **device, bytes) {
            Ok(()) => Ok(true),
            Err(DeviceError::OutOfMemory { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        })
    }
}
