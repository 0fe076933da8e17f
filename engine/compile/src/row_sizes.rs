//! The sizes of buffers of dynamic rows as functions of the rows that a rank receives.
//!
//! - In: a program.
//! - Out: its buffers that are sized by a row count, each with the layer and micro-batch of the count.
//! - Never: an address.

use std::collections::HashMap;
use std::sync::Arc;

use gapless_alloc::arena::RequestId;

use crate::program::{BufferId, Program};

/// Returns the number of rows that a rank receives, given the layer of the experts, the micro-batch, and the number of
/// rows if all ranks receive equally many.
pub type ReceivedRows<'a> = dyn Fn(&str, u32, u64) -> u64 + 'a;

/// A buffer of an executable that is sized by a row count.
#[derive(Debug)]
pub(crate) struct DynamicBuffer {
    /// The buffer's index in the planning problem.
    pub index: usize,
    /// The request that is made for the buffer if its rows are not evicted.
    pub request: RequestId,
    pub size: SizedByRows,
}

/// The size of a buffer of dynamic rows.
#[derive(Debug)]
pub(crate) struct SizedByRows {
    layer: Arc<str>,
    micro_batch: u32,
    row_bytes: u64,
    balanced_rows: u64,
    most_bytes: u64,
}

impl SizedByRows {
    /// Returns the bytes of the buffer for the rows that the rank receives.
    pub fn bytes(&self, rows: &ReceivedRows<'_>) -> u64 {
        let rows = rows(&self.layer, self.micro_batch, self.balanced_rows);
        rows.saturating_mul(self.row_bytes).min(self.most_bytes)
    }
}

/// Returns the buffers of dynamic rows that are in use in a step that evicts no rows.
pub(crate) fn sized_by_rows(program: &Program) -> Vec<(BufferId, SizedByRows)> {
    let mut counted = HashMap::new();
    let mut is_used = vec![false; program.buffers.len()];
    for instr in &program.instrs {
        if let Some(count) = instr.defines_count {
            counted.entry(count).or_insert((&instr.layer, instr.micro_batch));
        }
        if instr.predicate.is_none() {
            instr.inputs.iter().chain(&instr.outputs).for_each(|operand| is_used[operand.buffer.index()] = true);
        }
    }
    let sized = |(index, buffer): (usize, &crate::Buffer)| {
        let rows = buffer.dynamic_rows.filter(|_| is_used[index])?;
        let &(layer, micro_batch) = counted.get(&rows.count)?;
        let balanced_rows = rows.balanced / rows.row_bytes.max(1);
        let size = SizedByRows {
            layer: layer.clone(),
            micro_batch,
            row_bytes: rows.row_bytes,
            balanced_rows,
            most_bytes: buffer.bytes,
        };
        Some((BufferId(index as u32), size))
    };
    program.buffers.iter().enumerate().filter_map(sized).collect()
}
