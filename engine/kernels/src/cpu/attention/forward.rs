//! The forward: loops over blocks of keys, and over panels of queries that are as tall as a micro-kernel.

use std::ops::Range;
use std::slice::from_raw_parts_mut;

use super::rows::{Running, padded};
use super::{Attention, Forward, Head, Instructions, Mask, PANEL_ROWS, Sums, packed_keys_len};
use crate::cpu::gemm::kernel::{Layout, Product, ROW_STRIDE};
use crate::cpu::gemm::pack::{PackedA, Source};
use crate::cpu::gemm::{Factor, Strides};
use crate::cpu::scratch::{PartLayout, Scratch};
use crate::cpu::tasks::{for_each, slot};

/// Maximum number of queries of a head that are processed with one packing of the keys.
const MAX_CHUNK: usize = 4096;

/// Returns the scratch of each thread: packed keys, packed values, a panel of queries, a panel of scores, the running
/// softmax of each query, and the sums of outputs.
pub(super) fn parts<T: Factor>(job: &Attention, threads: usize) -> [PartLayout; 6] {
    let (packed, panel) = (packed_keys_len(job), PANEL_ROWS * ROW_STRIDE);
    let rows = job.group() * job.queries.min(queries_per_task(job, PANEL_ROWS, threads));
    let sums = Sums::<T>::scratch_len(rows, job.value_size);
    PartLayout::of_kinds(threads, [packed, packed, panel, panel, 2 * rows, sums])
}

// SAFETY: tasks read q, k and v, and write disjoint rows of out and lse.
unsafe impl<T> Send for Forward<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Forward<T> {}

/// Returns the number of queries per task: all queries of a head, or fewer if there are so few heads that threads would
/// be idle. The number is a multiple of `panels`. So each row is always at the same place in a panel, and its result
/// always has the same bits.
pub(super) fn queries_per_task(job: &Attention, panels: usize, threads: usize) -> usize {
    let heads = job.batch * job.kv_heads;
    let wanted = (4 * threads).div_ceil(heads.max(1));
    let queries = job.queries.div_ceil(wanted).max(2 * PANEL_ROWS);
    queries.next_multiple_of(panels).min(MAX_CHUNK / panels * panels)
}

/// # Safety
/// The requirements of [`Attention::forward_raw`] apply.
pub(super) unsafe fn run<T: Factor>(
    job: &Attention,
    instructions: &Instructions,
    operands: Forward<T>,
    scratch: &Scratch<'_>,
) {
    let threads = rayon::current_num_threads();
    let parts = parts::<T>(job, threads);
    let per_task = queries_per_task(job, PANEL_ROWS, threads);
    let chunks = job.queries.div_ceil(per_task);
    for_each(job.batch * job.kv_heads * chunks, &|task| {
        let (pair, chunk) = (task / chunks, task % chunks);
        let queries = chunk * per_task..job.queries.min((chunk + 1) * per_task);
        let operands = &operands;
        // SAFETY: the rows of these heads and queries, and the thread's scratch parts, belong to this task alone.
        unsafe {
            let (batch, kv_head) = (pair / job.kv_heads, pair % job.kv_heads);
            let job = &operands.placed(job, batch);
            let task = Task { job, instructions, operands, batch, kv_head };
            task.run(queries, parts.map(|part| part.start(scratch, slot())));
        }
    });
}

impl<T> Forward<T> {
    /// Returns the attention of one sequence. If there are positions, the mask starts at the sequence's own position.
    ///
    /// # Safety
    /// The sequence must exist.
    unsafe fn placed(&self, job: &Attention, batch: usize) -> Attention {
        if self.positions.is_null() {
            return *job;
        }
        // SAFETY: by this function's contract.
        let offset = unsafe { *self.positions.add(batch * job.queries) } as usize;
        Attention { mask: Mask::Causal { offset }, ..*job }
    }
}

/// A range of queries, for all heads that share a key head.
struct Task<'a, T> {
    job: &'a Attention,
    instructions: &'a Instructions,
    operands: &'a Forward<T>,
    batch: usize,
    kv_head: usize,
}

/// The current block of packed keys and values.
struct Block {
    keys: Range<usize>,
    /// Kᵀ, packed as panels of keys with a depth of `head_size`.
    k: *mut f32,
    /// V, packed as panels of elements with a depth of the number of keys.
    v: *mut f32,
}

impl<T: Factor> Task<'_, T> {
    /// # Safety
    /// The requirements of [`Attention::forward_raw`] apply; `scratch` must be this thread's [`parts`].
    unsafe fn run(&self, queries: Range<usize>, scratch: [*mut f32; 6]) {
        let &Self { job, operands, batch, kv_head, .. } = self;
        let [k, v, query_panel, scores, running, sums] = scratch;
        let running = running.cast::<Running>();
        let keys = job.visible(queries.end - 1);
        // SAFETY: the parts have the sizes that `parts` returns; heads and tokens exist.
        unsafe {
            if keys == 0 {
                self.write_empty(queries);
                return;
            }
            // Blocks of keys that no query of the task sees are skipped.
            let first_block =
                job.first_key_of(operands.starts, batch, queries.clone()) / job.key_block() * job.key_block();
            for first_key in (first_block..keys).step_by(job.key_block()) {
                let block = Block { keys: first_key..keys.min(first_key + job.key_block()), k, v };
                let len = block.keys.len();
                let source = Head::new(operands.k.cast_mut(), job.k, batch, kv_head);
                self.instructions.pack(source.at(first_key), Strides::transposed(source.token), job.head_size, len, k);
                let source = Head::new(operands.v.cast_mut(), job.v, batch, kv_head);
                self.instructions.pack(source.at(first_key), Strides::row_major(source.token), len, job.value_size, v);

                for member in 0..job.group() {
                    let head = kv_head * job.group() + member;
                    let out = Head::new(operands.out, job.out, batch, head);
                    let sums = sums.wrapping_add(member * queries.len() * job.value_size);
                    let out = Sums::new(out, queries.start, job.value_size, sums);
                    for first in queries.clone().step_by(self.instructions.products.rows()) {
                        let rows = first..queries.end.min(first + self.instructions.products.rows());
                        let running = running.add(member * queries.len() + first - queries.start);
                        let running = from_raw_parts_mut(running, rows.len());
                        let begin = job.first_key_of(operands.starts, batch, rows.clone());
                        if block.keys.end <= begin {
                            continue;
                        }
                        let is_first = first_key <= begin;
                        if is_first {
                            running.fill(Running::EMPTY);
                        }
                        self.panel((head, &out), rows, (&block, is_first), running, query_panel, scores);
                    }
                }
            }
        }
    }

    /// Adds the contribution of a block of keys to the outputs of one panel of queries. `is_first` is true for the
    /// first block that the panel sees. After the last visible block, finishes the outputs.
    unsafe fn panel(
        &self,
        (head, out): (usize, &Sums<T>),
        rows: Range<usize>,
        (block, is_first): (&Block, bool),
        running: &mut [Running],
        query_panel: *mut f32,
        scores: *mut f32,
    ) {
        let &Self { job, operands, batch, .. } = self;
        let Instructions { products, rows: row_kernels } = self.instructions;
        let columns = self.seen(rows.end - 1, block);
        if columns == 0 {
            return;
        }
        // SAFETY: the panels hold `PANEL_ROWS` rows of `ROW_STRIDE`. Columns, depths and rows are within the packed
        // operands.
        unsafe {
            let q = Head::new(operands.q.cast_mut(), job.q, batch, head);
            q.prefetch(rows.end..(rows.end + rows.len()).min(job.queries), job.head_size);
            let (panel, panel_row) = self.instructions.rows_of::<T>(q, rows.clone(), job.head_size, query_panel);
            // Scaled queries would have to be rounded to bf16, so with bf16 the scores are scaled instead.
            if !T::IS_BF16 {
                for i in 0..rows.len() {
                    let row = from_raw_parts_mut(query_panel.add(i * ROW_STRIDE), job.head_size);
                    (row_kernels.scale)(row, job.scale);
                }
            }
            let lines = products.lines(job.head_size);
            let product = Product {
                a: panel,
                a_row: panel_row,
                b: block.k,
                depth: lines,
                k: lines,
                c: scores,
                c_row: ROW_STRIDE,
                columns: columns.next_multiple_of(products.columns),
                accumulate: false,
            };
            products.block(Layout::Rows, rows.len(), &product);

            self.weights(rows.clone(), (block, is_first), running, scores, out);
            if products.k_of_line > 1 {
                self.instructions.round_rows(scores, rows.len(), columns, scores);
            }
            let product = Product {
                a: scores,
                a_row: ROW_STRIDE,
                b: block.v,
                depth: products.lines(block.keys.len()),
                k: products.lines(columns),
                c: out.at(rows.start),
                c_row: out.stride,
                columns: job.value_size,
                accumulate: !is_first,
            };
            products.block(Layout::Rows, rows.len(), &product);

            if job.visible(rows.end - 1) <= block.keys.end {
                self.finish(head, rows, running, out);
            }
        }
    }

    /// Returns how many keys, from the start of a block on, the mask lets a query see.
    fn seen(&self, query: usize, block: &Block) -> usize {
        self.job.visible(query).saturating_sub(block.keys.start).min(block.keys.len())
    }

    /// Replaces a panel's scores by exponentials relative to the rows' running maxima. If a maximum has risen, also
    /// rescales the row's outputs so far to the new maximum.
    unsafe fn weights(
        &self,
        rows: Range<usize>,
        (block, is_first): (&Block, bool),
        running: &mut [Running],
        scores: *mut f32,
        out: &Sums<T>,
    ) {
        let &Self { job, operands, batch, .. } = self;
        let (row_kernels, columns) = (self.instructions.rows, self.seen(rows.end - 1, block));
        let mut scale = if T::IS_BF16 { job.scale } else { 1.0 };
        // SAFETY: as in `panel`.
        unsafe {
            let row = |i: usize| from_raw_parts_mut(scores.add(i * ROW_STRIDE), padded(columns));
            if let Some(cap) = job.cap {
                for i in 0..rows.len() {
                    if scale != 1.0 {
                        (row_kernels.scale)(row(i), scale);
                    }
                    (row_kernels.cap)(row(i), 1.0, cap);
                }
                scale = 1.0;
            }
            // All maxima come first: a row's exponentials wait for its maximum, and other rows do not.
            let mut maxima = [None; PANEL_ROWS];
            for (i, query) in rows.clone().enumerate() {
                let visible = self.seen(query, block);
                let hidden = job.first_key(operands.starts, batch, query).saturating_sub(block.keys.start);
                if hidden >= visible {
                    row(i).fill(0.0);
                    continue;
                }
                row(i)[..hidden].fill(f32::NEG_INFINITY);
                maxima[i] = Some((row_kernels.max)(row(i), visible));
            }
            for (i, query) in rows.enumerate() {
                let Some(max) = maxima[i] else { continue };
                let factor = (row_kernels.softmax)(row(i), max, scale, &mut running[i]);
                if !is_first && factor != 1.0 {
                    (row_kernels.scale)(out.row(query), factor);
                }
            }
        }
    }

    /// Called after the last visible key. Divides the outputs of a panel by their sums of weights, and writes the
    /// log-sum-exp.
    unsafe fn finish(&self, head: usize, rows: Range<usize>, running: &[Running], out: &Sums<T>) {
        let &Self { job, operands, batch, .. } = self;
        // SAFETY: heads and queries exist and are this task's.
        unsafe {
            for (query, running) in rows.zip(running) {
                out.finish(self.instructions.rows, query, 1.0 / running.sum);
                if !operands.lse.is_null() {
                    let row = (batch * job.heads + head) * job.queries + query;
                    *operands.lse.add(row) = running.max + running.sum.ln();
                }
            }
        }
    }

    /// Writes the outputs of queries that see no key.
    unsafe fn write_empty(&self, queries: Range<usize>) {
        let &Self { job, operands, batch, .. } = self;
        for head in self.kv_head * job.group()..(self.kv_head + 1) * job.group() {
            // SAFETY: heads and queries exist and are this task's.
            unsafe {
                let out = Head::new(operands.out, job.out, batch, head);
                for query in queries.clone() {
                    from_raw_parts_mut(out.at(query), job.value_size).fill(T::store(0.0));
                    if !operands.lse.is_null() {
                        *operands.lse.add((batch * job.heads + head) * job.queries + query) = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

impl Instructions {
    /// Packs a `k` × `columns` matrix as panels of B, the right operand of a product.
    ///
    /// # Safety
    /// The matrix must be readable, and `to` must have room for its panels.
    pub(super) unsafe fn pack<T: Factor>(
        &self,
        start: *const T,
        strides: Strides,
        k: usize,
        columns: usize,
        to: *mut f32,
    ) {
        let (width, lines) = (self.products.columns, self.products.lines(k));
        for column in (0..columns).step_by(width) {
            // SAFETY: by this function's contract.
            unsafe {
                let source = Source { start: start.add(column * strides.column), strides };
                T::pack_panel(self.products, &source, k, width.min(columns - column), to.add(column * lines));
            }
        }
    }

    /// Rounds the first `columns` elements of each row to pairs of bf16. The rows are those of A, the left operand of a
    /// product. `to` may equal `from`.
    ///
    /// # Safety
    /// `from` and `to` must have `rows` rows, which are [`ROW_STRIDE`] floats apart.
    pub(super) unsafe fn round_rows(&self, from: *const f32, rows: usize, columns: usize, to: *mut f32) {
        for row in (0..rows).map(|row| row * ROW_STRIDE) {
            // SAFETY: by this function's contract.
            unsafe { (self.rows.round)(from.add(row), columns.next_multiple_of(2), to.add(row).cast()) };
        }
    }

    /// Returns the rows of A, the left operand of a product, that have `size` elements of each of a head's tokens, and the
    /// distance between them. If they cannot be read in place, they are packed into `panel`.
    ///
    /// # Safety
    /// The tokens must exist, and `panel` must have room for their rows.
    pub(super) unsafe fn rows_of<T: Factor>(
        &self,
        head: Head<T>,
        tokens: Range<usize>,
        size: usize,
        panel: *mut f32,
    ) -> (*const f32, usize) {
        // SAFETY: by this function's contract.
        unsafe {
            let source = Source { start: head.at(tokens.start).cast_const(), strides: Strides::row_major(head.token) };
            T::rows_in_place(self.products, &source, size).unwrap_or_else(|| {
                T::pack_rows(self.products, &source, tokens.len(), size, Layout::Rows, &PackedA::of(panel));
                (panel.cast_const(), ROW_STRIDE)
            })
        }
    }
}
