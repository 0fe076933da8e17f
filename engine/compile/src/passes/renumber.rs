//! Renumbers the buffers in the order of their first use, and removes unused ones.

use super::Context;
use crate::error::Result;
use crate::program::{Buffer, BufferId, Program};

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    // The order of first use.
    let mut order: Vec<BufferId> = Vec::with_capacity(program.buffers.len());
    let mut is_known = vec![false; program.buffers.len()];
    program.each_use(|buffer| {
        if !std::mem::replace(&mut is_known[buffer.index()], true) {
            order.push(*buffer);
        }
    });
    // The new id of each buffer.
    let mut number = vec![BufferId(u32::MAX); program.buffers.len()];
    for (new, old) in order.iter().enumerate() {
        number[old.index()] = BufferId(new as u32);
    }
    program.each_use(|buffer| *buffer = number[buffer.index()]);
    let mut buffers: Vec<Option<Buffer>> = std::mem::take(&mut program.buffers).into_iter().map(Some).collect();
    program.buffers = order.into_iter().filter_map(|old| buffers[old.index()].take()).collect();
    Ok(())
}
