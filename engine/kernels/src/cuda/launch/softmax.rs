//! Launches of softmax.cu. Each function returns `None` if the kernels do not support its operands.

use super::{FOLD_BYTES, Kernel, Launch, Operand, Operands, Strides, launches, typed};
use crate::cuda::Family::Softmax;
use crate::{LossTerms, RowLoss};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SoftmaxArguments {
    x: u64,
    y: u64,
    width: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SoftmaxGradArguments {
    y: u64,
    dy: u64,
    dx: u64,
    width: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CrossEntropyArguments {
    logits: u64,
    targets: u64,
    losses: u64,
    lse: u64,
    width: u64,
    terms: RowLoss,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CrossEntropyGradArguments {
    logits: u64,
    targets: u64,
    lse: u64,
    d_losses: u64,
    d_logits: u64,
    width: u64,
    at_d_losses: Strides,
    terms: RowLoss,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct HeadArguments {
    logits: u64,
    targets: u64,
    losses: u64,
    likelihoods: u64,
    d_losses: u64,
    weights: u64,
    width: u64,
    pitch: u64,
    first_row: u64,
    rest: u64,
    entries: u64,
    at_d_losses: Strides,
    d_loss: f32,
    has_gradient: u32,
    cap: f32,
    terms: RowLoss,
    kept: u64,
    first_entry: u64,
    gathered: u64,
    ranks: u64,
    distance: u64,
    statistics: u64,
}

/// A kernel with one block per row of a tensor.
fn kernel(name: &str, of: &Operand, arguments: impl super::Arguments + 'static) -> Option<Kernel> {
    Some(Kernel::rows(Softmax, typed(name, of.dtype)?, of.count() / of.width(), of.packs(), arguments))
}

/// Launches a kernel with one block per row of a tensor.
fn rows(name: &str, of: &Operand, arguments: impl super::Arguments + 'static) -> Option<Vec<Launch>> {
    launches([kernel(name, of, arguments)?])
}

/// Launches a kernel y = f(x) by name. f is the softmax, or the log-sum-exp of each row.
fn forward(name: &str, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([x], [y]) = (operands.inputs, operands.outputs) else { return None };
    rows(name, x, SoftmaxArguments { x: x.address, y: y.address, width: x.width() })
}

/// y = softmax(x).
pub fn softmax(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    forward("softmax", operands)
}

/// ln Σ eˣ of each row.
pub fn log_sum_exp(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    forward("log_sum_exp", operands)
}

/// Computes dx from (y, dy).
pub fn softmax_grad(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([y, dy], [dx]) = (operands.inputs, operands.outputs) else { return None };
    rows("softmax_grad", y, SoftmaxGradArguments { y: y.address, dy: dy.address, dx: dx.address, width: y.width() })
}

/// Computes (losses, log-sum-exps) from (logits, targets).
pub fn cross_entropy(terms: &LossTerms, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([logits, targets], [losses, lse]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = CrossEntropyArguments {
        logits: logits.address,
        targets: targets.address,
        losses: losses.address,
        lse: lse.address,
        width: logits.width(),
        terms: terms.for_row(logits.width() as usize),
    };
    rows("cross_entropy", logits, arguments)
}

/// Computes d_logits from (logits, targets, log-sum-exps, d_losses).
pub fn cross_entropy_grad(terms: &LossTerms, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([logits, targets, lse, d_losses], [d_logits]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = CrossEntropyGradArguments {
        logits: logits.address,
        targets: targets.address,
        lse: lse.address,
        d_losses: d_losses.address,
        d_logits: d_logits.address,
        width: logits.width(),
        at_d_losses: Strides::of(d_losses)?,
        terms: terms.for_row(logits.width() as usize),
    };
    rows("cross_entropy_grad", logits, arguments)
}

/// The gradients of the losses of a head, which determine the gradients of the logits.
#[derive(Debug, Clone, Copy)]
pub enum Upstream<'a> {
    /// Only losses are computed, no gradients.
    None,
    /// The gradient is the same for all rows.
    Everywhere(f32),
    /// A gradient per row, for all rows of the batch, followed by the index of the chunk's first row.
    Each(&'a Operand, u64),
}

/// The addresses of per-row tensors of a chunk of the head.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows {
    /// Targets, u32.
    pub targets: u64,
    /// Losses, f32.
    pub losses: u64,
    /// Losses without regularization terms, f32; 0 if they are not needed.
    pub likelihoods: u64,
    /// Weights of the losses, f32; 0 if there are none. With [`Upstream::Everywhere`], they also weight the gradients.
    pub weights: u64,
    /// The logits of the vocabulary's last entries, if they are stored separately. They are stored eight to a row and
    /// replaced by their gradients. The pair contains their address and the index of the first such entry.
    pub rest: Option<(u64, u64)>,
    /// Number of entries of the whole vocabulary, of which the logits may be a part.
    pub vocabulary: u64,
    /// The vocabulary entry of the first logit.
    pub first_entry: u64,
    /// Statistics of the ranks that divide the vocabulary, from which losses are computed.
    pub gathered: Option<Gathered>,
    /// Statistics of the logits, which are computed instead of losses, f32 [rows, 4]; 0 if they are not needed.
    pub statistics: u64,
}

/// Statistics of the rows of a chunk for all ranks that divide a vocabulary.
#[derive(Debug, Clone, Copy)]
pub struct Gathered {
    /// The address of the first rank's statistics, f32 [rows, 4].
    pub address: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// Distance between the statistics of two ranks, in rows.
    pub distance: u64,
}

/// Processes a chunk of rows of a language model's head: computes the losses of logits [rows, vocabulary], and
/// replaces the logits by their gradient. Rows may have gaps between them. If `cap` is above 0, a logit x is first
/// replaced by cap·tanh(x/cap). If there are statistics of all ranks and no gradients, the logits are not read.
pub fn head(
    logits: &Operand,
    HeadRows { targets, losses, likelihoods, weights, rest, vocabulary, first_entry, gathered, statistics }: HeadRows,
    upstream: Upstream<'_>,
    terms: &LossTerms,
    cap: f64,
) -> Option<Vec<Launch>> {
    let none = HeadArguments {
        logits: logits.address,
        targets,
        losses,
        likelihoods,
        d_losses: 0,
        weights,
        width: logits.width(),
        pitch: logits.layout.stride()[0] as u64,
        first_row: 0,
        rest: rest.map_or(0, |(address, _)| address),
        entries: rest.map_or(logits.width(), |(_, first)| first),
        at_d_losses: Strides::NONE,
        d_loss: 0.0,
        has_gradient: 0,
        cap: cap as f32,
        terms: terms.for_row(vocabulary as usize),
        kept: 0,
        first_entry,
        gathered: gathered.map_or(0, |gathered| gathered.address),
        ranks: gathered.map_or(0, |gathered| gathered.ranks),
        distance: gathered.map_or(0, |gathered| gathered.distance),
        statistics,
    };
    let arguments = match upstream {
        Upstream::None => none,
        Upstream::Everywhere(d_loss) => HeadArguments { d_loss, has_gradient: 1, ..none },
        Upstream::Each(d_losses, first_row) => {
            let at_d_losses = Strides::of(d_losses)?;
            HeadArguments { d_losses: d_losses.address, first_row, at_d_losses, has_gradient: 1, ..none }
        }
    };
    let kept = if arguments.has_gradient == 1 && cap == 0.0 { kept_in_shared(logits) } else { 0 };
    let mut kernel = kernel("head", logits, HeadArguments { kept, ..arguments })?;
    kernel.shared_bytes += (kept * logits.dtype.size_in_bytes() as u64) as u32;
    launches([kernel])
}

/// Shared memory that a block may have on every device of compute capability 8.0 or more.
const MOST_SHARED_BYTES: u64 = 99 << 10;

/// Elements of a row, in whole packs, that shared memory has room for behind what a fold needs.
fn kept_in_shared(rows: &Operand) -> u64 {
    let (pack, pitch) = (rows.pack(), rows.layout.stride()[0] as u64);
    let room = (MOST_SHARED_BYTES - u64::from(FOLD_BYTES)) / 16 * pack;
    let is_packed = rows.address.is_multiple_of(16) && pitch.is_multiple_of(pack);
    if is_packed { (rows.width() / pack * pack).min(room) } else { 0 }
}
