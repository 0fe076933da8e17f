//! The addresses of dynamic rows on a device while a program runs. Rows are placed as on the CPU, and the resulting
//! addresses are stored in a table of slots in device memory. Recorded launches contain the addresses of slots, and
//! their kernels read the rows' addresses from the slots.
//!
//! - In: instructions, in the order in which they run.
//! - Out: slots in the format that `slots.cuh` reads, and addresses.
//! - Never: a call of the device.

use std::ops::Range;

use gapless_compile::Executable;
use gapless_compile::internal::Instruction;
use gapless_kernels::cpu::args::{Address, DynamicAddress, Places};
use gapless_kernels::cpu::overflow_heap::OverflowHeap;
use gapless_kernels::cuda::launch::SLOT;

use super::place::Place;
use crate::routed::DynamicBuffers;

/// One entry of the table in device memory: the address of the rows and their size in bytes.
type Slot = [u64; 2];

/// The places of dynamic rows in the current run, and a copy of the table of slots.
#[derive(Debug)]
pub(super) struct Slots {
    pub routed: DynamicBuffers,
    /// The table's contents.
    slots: Vec<Slot>,
    /// The range of entries that have changed since they were last written to device memory.
    changed: Range<usize>,
    place: Place,
}

/// Resolves the operands of the current run to addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Located<'r> {
    base: u64,
    places: Places<'r>,
}

impl Located<'_> {
    /// Returns the current address of an operand, and its size in bytes.
    pub fn of(&self, address: &Address) -> (u64, usize) {
        let (offset, span) = self.places.find(address);
        (self.base + offset, span * address.dtype.size_in_bytes())
    }
}

/// Returns the size of an executable's table in bytes.
pub(super) fn table_bytes(executable: &Executable) -> u64 {
    (requests(executable) * size_of::<Slot>()) as u64
}

fn requests(executable: &Executable) -> usize {
    executable.routing().map_or(0, |plan| plan.requests().len())
}

/// Returns the address of an operand's slot in a table, with the tag by which kernels recognize slots.
pub(super) fn slot(table: u64, counted: DynamicAddress) -> u64 {
    SLOT | (table + u64::from(counted.request) * size_of::<Slot>() as u64)
}

impl Slots {
    /// Creates the slots of an executable, whose programs run one at a time.
    pub fn new(executable: &Executable, place: Place) -> Self {
        // On a device, rows outside of the arena lie in memory that is mapped after its end.
        let routed = DynamicBuffers::new(executable, OverflowHeap::elsewhere());
        let slots = vec![[0; 2]; requests(executable)];
        Self { routed, changed: 0..slots.len(), slots, place }
    }

    pub fn located(&self) -> Located<'_> {
        Located { base: self.place.base, places: self.routed.places() }
    }

    /// Updates the slots of the buffers that an instruction is the first to write.
    pub fn note(&mut self, instruction: &Instruction) {
        let Places { offsets, rows, .. } = self.routed.places();
        for asked in &*instruction.requests {
            let index = asked.slot.index();
            let slot = [self.place.base + offsets[index], rows[index] as u64 * asked.row_bytes];
            if self.slots[index] != slot {
                self.slots[index] = slot;
                let Range { start, end } = self.changed;
                self.changed = if start == end { index..index + 1 } else { start.min(index)..end.max(index + 1) };
            }
        }
    }

    /// Returns the address and the bytes of the table's changes since the last call, or `None` if nothing has
    /// changed.
    pub fn changes(&mut self) -> Option<(u64, Vec<u8>)> {
        let changed = std::mem::take(&mut self.changed);
        let at = self.place.slots + (changed.start * size_of::<Slot>()) as u64;
        let slots = self.slots[changed].as_flattened();
        (!slots.is_empty()).then(|| (at, slots.iter().flat_map(|word| word.to_ne_bytes()).collect()))
    }
}
