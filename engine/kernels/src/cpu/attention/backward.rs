//! The backward: recomputes the probabilities tile by tile, and computes five products on each tile.
//!
//! With P the probabilities and D the row sums of dO ∘ O: dV = Pᵀ·dO, dP = dO·Vᵀ, dS = scale · P ∘ (dP − D), dQ =
//! dS·K, dK = dSᵀ·Q (FlashAttention-2, algorithm 2). If scores S are capped at c, dS has the additional factor 1 −
//! (S/c)².
//!
//! With many heads, a task computes all three gradients for a key head and the query heads that share it. With few
//! heads, some tasks compute dK and dV of one block of keys, and others compute dQ of a range of queries. Both ways
//! give the same bits: dQ is summed over the blocks of keys in order, and dK and dV over the heads and the tiles of
//! queries in order.

use std::ops::Range;
use std::slice::from_raw_parts_mut;

use super::forward::queries_per_task;
use super::rows::padded;
use super::{Attention, Backward, Head, Instructions, PANEL_ROWS, Sums, packed_keys_len, packed_len};
use crate::cpu::gemm::kernel::{Layout, Product, ROW_STRIDE};
use crate::cpu::gemm::{Factor, Strides};
use crate::cpu::scratch::{PartLayout, Scratch};
use crate::cpu::tasks::{for_each, slot};

/// Number of queries of a tile. Two tiles and their packed operands fit a level-2 cache of 1 MiB.
const TILE_QUERIES: usize = 96;

/// Returns the number of rows of scratch for a tile: whole panels, but no more panels than the queries require.
fn tile_rows(job: &Attention) -> usize {
    TILE_QUERIES.min(job.queries.next_multiple_of(PANEL_ROWS))
}

/// The scratch of each thread, in the order of [`Arrays`].
pub(super) fn parts<T: Factor>(job: &Attention, threads: usize) -> [PartLayout; 12] {
    let (keys, queries) = (packed_keys_len(job), packed_len(job, tile_rows(job)));
    let (tile, panel) = (tile_rows(job) * ROW_STRIDE, PANEL_ROWS * ROW_STRIDE);
    let dq_rows = match takes_whole_heads(job, threads) {
        true => job.queries,
        false => job.queries.min(queries_per_task(job, TILE_QUERIES, threads)),
    };
    let dq = Sums::<T>::scratch_len(job.group() * dq_rows, job.head_size);
    let [dk, dv] =
        [job.head_size, job.value_size].map(|size| Sums::<T>::scratch_len(job.key_block().min(job.keys), size));
    PartLayout::of_kinds(threads, [keys, keys, keys, queries, queries, tile, tile, panel, panel, dq, dk, dv])
}

/// True if a task computes all gradients of a key head. If there are so few heads that threads would be idle, this is
/// divided among tasks.
fn takes_whole_heads(job: &Attention, threads: usize) -> bool {
    threads == 1 || job.batch * job.kv_heads >= 4 * threads
}

// SAFETY: tasks write disjoint rows of dq, dk and dv, and only read the rest.
unsafe impl<T> Send for Backward<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Backward<T> {}

/// # Safety
/// The requirements of [`Attention::backward_raw`] apply.
pub(super) unsafe fn run<T: Factor>(
    job: &Attention,
    instructions: &Instructions,
    operands: Backward<T>,
    scratch: &Scratch<'_>,
) {
    let threads = rayon::current_num_threads();
    let parts = parts::<T>(job, threads);
    let heads = job.batch * job.kv_heads;
    let all = BackwardPart { queries: 0..job.queries, keys: 0..job.keys, dq: true, dk_dv: true };
    let run = |pair: usize, part: BackwardPart| {
        let operands = &operands;
        let arrays = Arrays::new(parts.map(|part| part.start(scratch, slot())));
        // SAFETY: the gradients of this part, and the thread's arrays, belong to this task alone.
        unsafe {
            let (batch, kv_head) = (pair / job.kv_heads, pair % job.kv_heads);
            let task = Task { job, instructions, operands, batch, kv_head, arrays };
            task.run(part);
        }
    };
    if takes_whole_heads(job, threads) {
        for_each(heads, &|pair| run(pair, all.clone()));
        return;
    }
    let blocks = job.keys.div_ceil(job.key_block());
    let per_task = queries_per_task(job, TILE_QUERIES, threads);
    let chunks = job.queries.div_ceil(per_task);
    for_each(heads * (blocks + chunks), &|task| {
        let (pair, part) = (task / (blocks + chunks), task % (blocks + chunks));
        if part < blocks {
            let keys = part * job.key_block()..job.keys.min((part + 1) * job.key_block());
            run(pair, BackwardPart { keys, dq: false, ..all.clone() });
        } else {
            let first = (part - blocks) * per_task;
            run(pair, BackwardPart { queries: first..job.queries.min(first + per_task), dk_dv: false, ..all.clone() });
        }
    });
}

/// The range of keys and queries that a task reads for one key head, and the gradients that the task writes.
#[derive(Debug, Clone)]
struct BackwardPart {
    queries: Range<usize>,
    keys: Range<usize>,
    dq: bool,
    dk_dv: bool,
}

/// A thread's scratch, with the sizes that [`parts`] returns.
struct Arrays {
    /// Kᵀ: panels of keys.
    k_transposed: *mut f32,
    /// K: panels of elements.
    k: *mut f32,
    /// Vᵀ: panels of keys.
    v_transposed: *mut f32,
    /// Q of a tile, packed as panels of elements.
    q: *mut f32,
    /// dO of a tile, packed as panels of elements.
    dout: *mut f32,
    /// A tile of probabilities, with one row per query and one column per key.
    probabilities: *mut f32,
    /// The gradients of a tile's scores, with the layout of `probabilities`.
    gradients: *mut f32,
    /// Rows of Q for the micro-kernels.
    q_panel: *mut f32,
    /// Rows of dO for the micro-kernels.
    dout_panel: *mut f32,
    /// Sums of dQ, for the queries of a task.
    dq: *mut f32,
    /// Sums of dK, for a block of keys.
    dk: *mut f32,
    /// Sums of dV, for a block of keys.
    dv: *mut f32,
}

impl Arrays {
    fn new(parts: [*mut f32; 12]) -> Self {
        let [k_transposed, k, v_transposed, q, dout, probabilities, gradients, q_panel, dout_panel, dq, dk, dv] = parts;
        Self { k_transposed, k, v_transposed, q, dout, probabilities, gradients, q_panel, dout_panel, dq, dk, dv }
    }
}

/// One key head and the query heads that share it.
struct Task<'a, T> {
    job: &'a Attention,
    instructions: &'a Instructions,
    operands: &'a Backward<T>,
    batch: usize,
    kv_head: usize,
    arrays: Arrays,
}

impl<T: Factor> Task<'_, T> {
    /// # Safety
    /// The same as for [`Attention::backward_raw`]; the part's gradients and the arrays must belong to this thread alone.
    unsafe fn run(&self, part: BackwardPart) {
        let &Self { job, instructions, operands, batch, kv_head, ref arrays } = self;
        let heads = kv_head * job.group()..(kv_head + 1) * job.group();
        // SAFETY: heads and tokens exist; packed blocks fit their arrays.
        unsafe {
            if part.dq && job.keys == 0 {
                for head in heads.clone() {
                    let dq = self.dq(head, &part);
                    part.queries.clone().for_each(|query| dq.row(query).fill(0.0));
                }
            }
            let k = Head::new(operands.k.cast_mut(), job.k, batch, kv_head);
            let v = Head::new(operands.v.cast_mut(), job.v, batch, kv_head);
            for first_key in part.keys.clone().step_by(job.key_block()) {
                let keys = first_key..part.keys.end.min(first_key + job.key_block());
                let (d, of_v, len) = (job.head_size, job.value_size, keys.len());
                let dk = Sums::new(Head::new(operands.dk, job.d_k, batch, kv_head), first_key, d, arrays.dk);
                let dv = Sums::new(Head::new(operands.dv, job.d_v, batch, kv_head), first_key, of_v, arrays.dv);
                if part.dk_dv {
                    keys.clone().for_each(|key| [dk, dv].iter().for_each(|sums| sums.row(key).fill(0.0)));
                }
                instructions.pack(k.at(first_key), Strides::transposed(k.token), d, len, arrays.k_transposed);
                instructions.pack(v.at(first_key), Strides::transposed(v.token), of_v, len, arrays.v_transposed);
                if part.dq {
                    instructions.pack(k.at(first_key), Strides::row_major(k.token), len, d, arrays.k);
                }
                for head in heads.clone() {
                    for first in part.queries.clone().step_by(TILE_QUERIES) {
                        let queries = first..part.queries.end.min(first + TILE_QUERIES);
                        let begin = job.first_key_of(operands.starts, batch, queries.clone());
                        if job.visible(queries.end - 1) > first_key && begin < keys.end {
                            self.tile(head, queries, keys.clone(), &part, (&dk, &dv));
                        }
                    }
                }
                if part.dk_dv {
                    self.finish(&dk, keys.clone());
                    self.finish(&dv, keys);
                }
            }
            if part.dq {
                heads.for_each(|head| self.finish(&self.dq(head, &part), part.queries.clone()));
            }
        }
    }

    /// Processes one tile of scores. For each panel of queries, computes P and dS, and the panel's contribution to
    /// dQ. Then computes the tile's contribution to dV and dK.
    unsafe fn tile(
        &self,
        head: usize,
        queries: Range<usize>,
        keys: Range<usize>,
        part: &BackwardPart,
        (dk, dv): (&Sums<T>, &Sums<T>),
    ) {
        let &Self { job, instructions, operands, batch, ref arrays, .. } = self;
        let products = instructions.products;
        // SAFETY: heads and tokens exist; panels and tiles have the sizes that `parts` returns.
        unsafe {
            for first in queries.clone().step_by(products.rows()) {
                let rows = first..queries.end.min(first + products.rows());
                self.scores(head, rows, queries.start, &keys, part);
            }
            if part.dk_dv {
                let q = Head::new(operands.q.cast_mut(), job.q, batch, head);
                let dout = Head::new(operands.dout.cast_mut(), job.out, batch, head);
                let (d, of_v, len) = (job.head_size, job.value_size, queries.len());
                instructions.pack(q.at(queries.start), Strides::row_major(q.token), len, d, arrays.q);
                instructions.pack(dout.at(queries.start), Strides::row_major(dout.token), len, of_v, arrays.dout);
                if products.k_of_line > 1 {
                    self.pair_rows(arrays.probabilities, &queries, &keys);
                    self.pair_rows(arrays.gradients, &queries, &keys);
                }
                self.add_transposed(arrays.probabilities, arrays.dout, &queries, &keys, dv);
                self.add_transposed(arrays.gradients, arrays.q, &queries, &keys, dk);
            }
        }
    }

    /// Computes a panel's rows of P and dS, and their contribution to dQ.
    unsafe fn scores(
        &self,
        head: usize,
        rows: Range<usize>,
        tile_start: usize,
        keys: &Range<usize>,
        part: &BackwardPart,
    ) {
        let &Self { job, instructions, operands, batch, ref arrays, .. } = self;
        let Instructions { products, rows: row_kernels } = instructions;
        let (d, of_v) = (job.head_size, job.value_size);
        let seen = |query: usize| job.visible(query).saturating_sub(keys.start).min(keys.len());
        let columns = seen(rows.end - 1);
        if columns == 0 {
            return;
        }
        // SAFETY: as in `tile`.
        unsafe {
            let q = Head::new(operands.q.cast_mut(), job.q, batch, head);
            let out = Head::new(operands.out.cast_mut(), job.out, batch, head);
            let dout = Head::new(operands.dout.cast_mut(), job.out, batch, head);
            let lse = operands.lse.add((batch * job.heads + head) * job.queries);
            let at = (rows.start - tile_start) * ROW_STRIDE;
            let (probabilities, gradients) = (arrays.probabilities.add(at), arrays.gradients.add(at));

            let next = rows.end..(rows.end + rows.len()).min(job.queries);
            q.prefetch(next.clone(), d);
            out.prefetch(next.clone(), of_v);
            dout.prefetch(next, of_v);
            let q_panel = instructions.rows_of::<T>(q, rows.clone(), d, arrays.q_panel);
            let dout_panel = instructions.rows_of::<T>(dout, rows.clone(), of_v, arrays.dout_panel);
            let product = |(a, a_row): (*const f32, usize), b: *const f32, depth: usize, c: *mut f32| Product {
                a,
                a_row,
                b,
                depth: products.lines(depth),
                k: products.lines(depth),
                c,
                c_row: ROW_STRIDE,
                columns: columns.next_multiple_of(products.columns),
                accumulate: false,
            };
            let score = product(q_panel, arrays.k_transposed, d, probabilities);
            products.block(Layout::Rows, rows.len(), &score);
            let probability_gradient = product(dout_panel, arrays.v_transposed, of_v, gradients);
            products.block(Layout::Rows, rows.len(), &probability_gradient);

            let begin = job.first_key_of(operands.starts, batch, rows.clone());
            for (i, query) in rows.clone().enumerate() {
                let visible = seen(query);
                let probabilities = from_raw_parts_mut(probabilities.add(i * ROW_STRIDE), padded(columns));
                let gradients = from_raw_parts_mut(gradients.add(i * ROW_STRIDE), padded(columns));
                let delta = row_kernels.dot(out.at(query), dout.at(query), of_v);
                let (scale, delta) = match job.cap {
                    None => (job.scale, delta),
                    Some(cap) => {
                        (row_kernels.cap)(probabilities, job.scale, cap);
                        (row_kernels.cap_gradients)(gradients, probabilities, delta, cap);
                        (1.0, 0.0)
                    }
                };
                (row_kernels.probabilities)(probabilities, visible, scale, *lse.add(query));
                let hidden = job.first_key(operands.starts, batch, query).saturating_sub(keys.start).min(visible);
                probabilities[..hidden].fill(0.0);
                (row_kernels.score_gradients)(gradients, visible, probabilities, delta, job.scale);
                gradients[..hidden].fill(0.0);
            }
            if part.dq {
                let dq = self.dq(head, part);
                let mut factor = gradients;
                if products.k_of_line > 1 {
                    // The panel of queries is no longer needed, so its scratch is reused.
                    factor = arrays.q_panel;
                    instructions.round_rows(gradients, rows.len(), columns, factor);
                }
                let product = Product {
                    a: factor,
                    a_row: ROW_STRIDE,
                    b: arrays.k,
                    depth: products.lines(keys.len()),
                    k: products.lines(columns),
                    c: dq.at(rows.start),
                    c_row: dq.stride,
                    columns: d,
                    accumulate: keys.start > begin,
                };
                products.block(Layout::Rows, rows.len(), &product);
            }
        }
    }

    /// Rounds a tile to bf16 in place and pairs its rows: queries 2·i and 2·i + 1 become row i.
    unsafe fn pair_rows(&self, tile: *mut f32, queries: &Range<usize>, keys: &Range<usize>) {
        let seen = |query: usize| self.job.visible(query).saturating_sub(keys.start).min(keys.len());
        for (line, query) in queries.clone().step_by(2).enumerate() {
            let first = tile.wrapping_add(2 * line * ROW_STRIDE);
            let last = (query + 1).min(queries.end - 1);
            let second = if last > query { first.wrapping_add(ROW_STRIDE) } else { std::ptr::null_mut() };
            // SAFETY: rows have `ROW_STRIDE` floats, and each row is read before it is overwritten.
            unsafe {
                (self.instructions.rows.pair)(first, second, padded(seen(last)), tile.add(line * ROW_STRIDE).cast());
            }
        }
    }

    /// `to` += tileᵀ · `packed`, for the rows of `keys`. A query that does not see the first key of a panel sees none
    /// of the panel's keys. For that panel, the query is skipped.
    unsafe fn add_transposed(
        &self,
        tile: *const f32,
        packed: *const f32,
        queries: &Range<usize>,
        keys: &Range<usize>,
        to: &Sums<T>,
    ) {
        let products = self.instructions.products;
        let visible = self.job.visible(queries.end - 1).min(keys.end);
        for first in (keys.start..visible).step_by(products.rows()) {
            let rows = products.rows().min(visible - first);
            let blind = queries.clone().take_while(|&query| self.job.visible(query) <= first).count();
            let (lines, blind) = (products.lines(queries.len()), blind / products.k_of_line);
            // SAFETY: as in `tile`.
            unsafe {
                let product = Product {
                    a: tile.add(blind * ROW_STRIDE + first - keys.start),
                    a_row: 1,
                    b: packed.add(blind * products.columns),
                    depth: lines,
                    k: lines - blind,
                    c: to.at(first),
                    c_row: to.stride,
                    columns: to.size,
                    accumulate: true,
                };
                products.block(Layout::WideColumns, rows, &product);
            }
        }
    }

    /// The rows of dQ of one head.
    ///
    /// # Safety
    /// The head must be one of this task's.
    unsafe fn dq(&self, head: usize, part: &BackwardPart) -> Sums<T> {
        let &Self { job, operands, batch, kv_head, ref arrays, .. } = self;
        let member = head - kv_head * job.group();
        let scratch = arrays.dq.wrapping_add(member * part.queries.len() * job.head_size);
        // SAFETY: by this function's contract.
        unsafe { Sums::new(Head::new(operands.dq, job.d_q, batch, head), part.queries.start, job.head_size, scratch) }
    }

    /// Finishes rows of a gradient.
    ///
    /// # Safety
    /// The requirements of [`Sums::finish`] apply.
    unsafe fn finish(&self, sums: &Sums<T>, tokens: Range<usize>) {
        // SAFETY: by this function's contract.
        tokens.for_each(|token| unsafe { sums.finish(self.instructions.rows, token, 1.0) });
    }
}
