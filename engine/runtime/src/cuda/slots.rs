//! Where counted rows lie on a device while a program runs: places that are found as on the CPU, and a table of them in device memory,
//! of which launches have the addresses.
//!
//! In: instructions, in the order in which they run. Out: slots, as `slots.cuh` reads them, and addresses. Never: a call of the device.

use std::ops::Range;

use gapless_compile::Executable;
use gapless_compile::internal::Instruction;
use gapless_kernels::cpu::args::{Address, DynamicAddress, Places};
use gapless_kernels::cpu::overflow_heap::OverflowHeap;
use gapless_kernels::cuda::launch::SLOT;

use super::place::Place;
use crate::routed::DynamicBuffers;

/// What the device reads of a place: address and bytes.
type Slot = [u64; 2];

/// The places of one run after another, and their slots.
#[derive(Debug)]
pub(super) struct Slots {
    pub routed: DynamicBuffers,
    /// What is to be in device memory.
    slots: Vec<Slot>,
    /// Which of them are not there yet.
    changed: Range<usize>,
    place: Place,
}

/// Where operands lie now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Located<'r> {
    base: u64,
    places: Places<'r>,
}

impl Located<'_> {
    /// The first byte of an operand, and its number of bytes.
    pub fn of(&self, address: &Address) -> (u64, usize) {
        let (offset, span) = self.places.find(address);
        (self.base + offset, span * address.dtype.size_in_bytes())
    }
}

/// Bytes of an executable's table.
pub(super) fn table_bytes(executable: &Executable) -> u64 {
    (requests(executable) * size_of::<Slot>()) as u64
}

fn requests(executable: &Executable) -> usize {
    executable.routing().map_or(0, |plan| plan.requests().len())
}

/// The address of an operand's slot in a table, as kernels are given it.
pub(super) fn slot(table: u64, counted: DynamicAddress) -> u64 {
    SLOT | (table + u64::from(counted.request) * size_of::<Slot>() as u64)
}

impl Slots {
    /// For the programs of an executable, run one at a time.
    pub fn new(executable: &Executable, place: Place) -> Self {
        // Rows outside of the arena are in memory that goes on behind it.
        let routed = DynamicBuffers::new(executable, OverflowHeap::elsewhere());
        let slots = vec![[0; 2]; requests(executable)];
        Self { routed, changed: 0..slots.len(), slots, place }
    }

    pub fn located(&self) -> Located<'_> {
        Located { base: self.place.base, places: self.routed.places() }
    }

    /// Notes where what an instruction asks for has its place.
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

    /// What has changed since this was last asked: where it is to be written, and what.
    pub fn changes(&mut self) -> Option<(u64, Vec<u8>)> {
        let changed = std::mem::take(&mut self.changed);
        let at = self.place.slots + (changed.start * size_of::<Slot>()) as u64;
        let slots = self.slots[changed].as_flattened();
        (!slots.is_empty()).then(|| (at, slots.iter().flat_map(|word| word.to_ne_bytes()).collect()))
    }
}
