//! The outputs: keys in blocks, queries in panels of a micro-kernel's height.

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::rows::{Running, padded};
use super::{Attention, Forward, Head, Instructions, PANEL_ROWS, packed_len};
use crate::cpu::gemm::Strides;
use crate::cpu::gemm::kernel::{Layout, Product, ROW_STRIDE};
use crate::cpu::gemm::pack::Source;
use crate::cpu::simd::prefetch;
use crate::cpu::tasks::{for_each, slot};

/// Most queries of a head between two packings of the same keys.
const MAX_CHUNK: usize = 4096;

/// Floats of scratch per thread: keys and values packed, a panel of queries, one of scores, and the running softmax.
pub(super) fn slot_len(job: &Attention) -> usize {
    let running = 2 * job.group() * job.queries.next_multiple_of(PANEL_ROWS).min(MAX_CHUNK);
    2 * packed_len(job, job.key_block()) + 2 * PANEL_ROWS * ROW_STRIDE + running
}

// SAFETY: tasks read q, k and v, and write disjoint rows of out and lse.
unsafe impl Send for Forward {}
// SAFETY: as above.
unsafe impl Sync for Forward {}

/// Scratch as an address that threads share, each using its own part.
#[derive(Clone, Copy)]
pub(super) struct Slots {
    pub start: *mut f32,
    pub len: usize,
}

// SAFETY: a task uses only its thread's part.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    /// # Safety
    /// The scratch has a part for every thread of the pool.
    pub unsafe fn mine(&self) -> *mut f32 {
        // SAFETY: the caller's promise.
        unsafe { self.start.add(slot() * self.len) }
    }
}

/// Queries of a task: all of a head, unless there are so few heads that threads would be idle. A whole number of
/// panels, so that a row's panel, and with it its bits, stays the same.
pub(super) fn queries_per_task(job: &Attention, panels: usize) -> usize {
    let heads = job.batch * job.kv_heads;
    let wanted = (4 * rayon::current_num_threads()).div_ceil(heads.max(1));
    let queries = job.queries.div_ceil(wanted).max(2 * PANEL_ROWS);
    queries.next_multiple_of(panels).min(MAX_CHUNK / panels * panels)
}

/// # Safety
/// As [`Attention::forward_raw`].
pub(super) unsafe fn run(job: &Attention, instructions: &Instructions, operands: Forward, scratch: *mut f32) {
    let slots = Slots { start: scratch, len: slot_len(job) };
    let per_task = queries_per_task(job, PANEL_ROWS);
    let chunks = job.queries.div_ceil(per_task);
    for_each(job.batch * job.kv_heads * chunks, |task| {
        let (pair, chunk) = (task / chunks, task % chunks);
        let queries = chunk * per_task..job.queries.min((chunk + 1) * per_task);
        let (operands, slots) = (&operands, &slots);
        // SAFETY: the rows of these heads and queries are this task's alone, and so is its thread's slot.
        unsafe {
            let task = Task { job, instructions, operands, batch: pair / job.kv_heads, kv_head: pair % job.kv_heads };
            task.run(queries, slots.mine());
        }
    });
}

/// Some queries of all heads that share a key head.
struct Task<'a> {
    job: &'a Attention,
    instructions: &'a Instructions,
    operands: &'a Forward,
    batch: usize,
    kv_head: usize,
}

/// The current block of keys, packed.
struct Block {
    keys: Range<usize>,
    /// Kᵀ: panels of keys, `head_size` deep.
    k: *mut f32,
    /// V: panels of elements, as deep as there are keys.
    v: *mut f32,
}

impl Task<'_> {
    /// # Safety
    /// As [`Attention::forward_raw`]; `scratch` has [`slot_len`] floats that are this thread's.
    unsafe fn run(&self, queries: Range<usize>, scratch: *mut f32) {
        let &Self { job, operands, batch, kv_head, .. } = self;
        let packed_len = packed_len(job, job.key_block());
        let keys = job.visible(queries.end - 1);
        // SAFETY: the parts of the slot follow each other as `slot_len` counts them; heads and tokens exist.
        unsafe {
            let (k, v) = (scratch, scratch.add(packed_len));
            let query_panel = v.add(packed_len);
            let scores = query_panel.add(PANEL_ROWS * ROW_STRIDE);
            let running = scores.add(PANEL_ROWS * ROW_STRIDE).cast::<Running>();
            if keys == 0 {
                self.write_empty(queries);
                return;
            }
            for first_key in (0..keys).step_by(job.key_block()) {
                let block = Block { keys: first_key..keys.min(first_key + job.key_block()), k, v };
                let len = block.keys.len();
                let source = Head::new(operands.k.cast_mut(), job.k, batch, kv_head);
                self.instructions.pack(source.at(first_key), Strides::transposed(source.token), job.head_size, len, k);
                let source = Head::new(operands.v.cast_mut(), job.v, batch, kv_head);
                self.instructions.pack(source.at(first_key), Strides::row_major(source.token), len, job.head_size, v);

                for member in 0..job.group() {
                    let head = kv_head * job.group() + member;
                    for first in queries.clone().step_by(self.instructions.products.rows()) {
                        let rows = first..queries.end.min(first + self.instructions.products.rows());
                        let running = running.add(member * queries.len() + first - queries.start);
                        let running = from_raw_parts_mut(running, rows.len());
                        if first_key == 0 {
                            running.fill(Running::EMPTY);
                        }
                        self.panel(head, rows, &block, running, query_panel, scores);
                    }
                }
            }
        }
    }

    /// Takes a block of keys into the outputs of one panel of queries, and finishes them with their last visible block.
    unsafe fn panel(
        &self,
        head: usize,
        rows: Range<usize>,
        block: &Block,
        running: &mut [Running],
        query_panel: *mut f32,
        scores: *mut f32,
    ) {
        let &Self { job, operands, batch, .. } = self;
        let Instructions { products, rows: row_kernels } = self.instructions;
        let first_key = block.keys.start;
        let seen = |query: usize| job.visible(query).saturating_sub(first_key).min(block.keys.len());
        let columns = seen(rows.end - 1);
        if columns == 0 {
            return;
        }
        // SAFETY: the panels hold `PANEL_ROWS` rows of `ROW_STRIDE`; packed columns, depths and rows are in range.
        unsafe {
            let q = Head::new(operands.q.cast_mut(), job.q, batch, head);
            let out = Head::new(operands.out, job.out, batch, head);
            for query in rows.end..(rows.end + rows.len()).min(job.queries) {
                for line in (0..job.head_size).step_by(16) {
                    prefetch(q.at(query).add(line));
                }
            }
            for (i, query) in rows.clone().enumerate() {
                let from = from_raw_parts(q.at(query), job.head_size);
                let to = from_raw_parts_mut(query_panel.add(i * ROW_STRIDE), job.head_size);
                (row_kernels.scaled)(from, job.scale, to);
            }
            let product = Product {
                a: query_panel,
                b: block.k,
                depth: job.head_size,
                k: job.head_size,
                c: scores,
                c_row: ROW_STRIDE,
                columns: columns.next_multiple_of(products.columns),
                accumulate: false,
            };
            products.block(Layout::Rows, rows.len(), &product);

            for (i, query) in rows.clone().enumerate() {
                let visible = seen(query);
                let row = from_raw_parts_mut(scores.add(i * ROW_STRIDE), padded(visible));
                if visible == 0 {
                    row.fill(0.0);
                    continue;
                }
                let factor = (row_kernels.softmax)(row, visible, &mut running[i]);
                if first_key > 0 && factor != 1.0 {
                    (row_kernels.scale)(from_raw_parts_mut(out.at(query), job.head_size), factor);
                }
            }
            let product = Product {
                a: scores,
                b: block.v,
                depth: block.keys.len(),
                k: columns,
                c: out.at(rows.start),
                c_row: job.out.token,
                columns: job.head_size,
                accumulate: first_key > 0,
            };
            products.block(Layout::Rows, rows.len(), &product);

            if job.visible(rows.end - 1) <= block.keys.end {
                let lse = operands.lse.add((batch * job.heads + head) * job.queries);
                for (query, running) in rows.zip(running) {
                    let out = from_raw_parts_mut(out.at(query), job.head_size);
                    (row_kernels.scale)(out, 1.0 / running.sum);
                    *lse.add(query) = running.max + running.sum.ln();
                }
            }
        }
    }

    /// The outputs of queries that see nothing.
    unsafe fn write_empty(&self, queries: Range<usize>) {
        let &Self { job, operands, batch, .. } = self;
        for head in self.kv_head * job.group()..(self.kv_head + 1) * job.group() {
            // SAFETY: heads and queries exist and are this task's.
            unsafe {
                let out = Head::new(operands.out, job.out, batch, head);
                for query in queries.clone() {
                    from_raw_parts_mut(out.at(query), job.head_size).fill(0.0);
                    *operands.lse.add((batch * job.heads + head) * job.queries + query) = f32::NEG_INFINITY;
                }
            }
        }
    }
}

impl Instructions {
    /// Packs a `k` × `columns` matrix as panels of B.
    ///
    /// # Safety
    /// The matrix exists; `to` has room for its panels.
    pub(super) unsafe fn pack(&self, start: *const f32, strides: Strides, k: usize, columns: usize, to: *mut f32) {
        let width = self.products.columns;
        for column in (0..columns).step_by(width) {
            // SAFETY: the caller's promise.
            unsafe {
                let source = Source { start: start.add(column * strides.column), strides };
                (self.products.pack_panel)(&source, k, width.min(columns - column), to.add(column * k));
            }
        }
    }
}
