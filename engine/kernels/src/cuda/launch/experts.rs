//! Launches of route.cu and experts.cu. Each function returns `None` if the kernels do not support its operands.

use candle_core::DType;

use super::{BLOCK, FOLD_BYTES, Kernel, Launch, Operand, Operands, launches, typed};
use crate::cuda::Family::{Experts, Route};

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct TopKArguments {
    scores: u64,
    bias: u64,
    routed: u64,
    values: u64,
    ids: u64,
    tokens: u64,
    experts: u64,
    k: u64,
    groups: u64,
    group_limit: u64,
    ranking: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct TopKGradArguments {
    ids: u64,
    dy: u64,
    d_scores: u64,
    tokens: u64,
    experts: u64,
    k: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RouteArguments {
    ids: u64,
    weights: u64,
    routed: u64,
    limits: u64,
    kept: u64,
    stays: u64,
    places: u64,
    slots: u64,
    starts: u64,
    experts: u64,
    sequences: u64,
    length: u64,
    k: u64,
    rows: u64,
    capacity: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RunsArguments {
    from: u64,
    to: u64,
    runs: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CountArguments {
    from: u64,
    routed: u64,
    out: u64,
    length: u64,
    experts: u64,
    sequences: u64,
    k: u64,
    group: u64,
    accumulate: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct DocumentLoadArguments {
    ids: u64,
    starts: u64,
    shares: u64,
    batch_tokens: u64,
    tokens: u64,
    experts: u64,
    k: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct LoadBiasArguments {
    bias: u64,
    load: u64,
    norm: u64,
    experts: u64,
    rate: f32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RowsArguments {
    from: u64,
    out: u64,
    indices: u64,
    width: u64,
    k: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct GatherArguments {
    from: u64,
    out: u64,
    indices: u64,
    count: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct RoutedSwiGluArguments {
    gate: u64,
    up: u64,
    weights: u64,
    end: u64,
    dy: u64,
    d_gate: u64,
    d_up: u64,
    d_weights: u64,
    y: u64,
    width: u64,
    unit: GatedUnit,
}

/// The gated unit (u + shift)·g·sigmoid(alpha·g), where g is the gate limited to at most `limit`, and u is up limited to
/// −`limit` to `limit`. SwiGLU has alpha 1, shift 0 and an infinite limit.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct GatedUnit {
    /// The factor of the gate in its sigmoid.
    pub alpha: f32,
    /// The limit of gate and up.
    pub limit: f32,
    /// The summand of up.
    pub shift: f32,
}

/// Launches `top_k`: computes (values, ids) from scores and, optionally, a bias per expert and the weight of each
/// token. `groups` contains the number of groups of experts, how many groups a token may use, and of how many best experts the
/// scores rank a group.
pub fn top_k(k: usize, groups: Option<[usize; 3]>, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([scores, others @ ..], [values, ids]) = (operands.inputs, operands.outputs) else { return None };
    let address = |is_bias| others.iter().find(|other| (rank(other) == 1) == is_bias).map_or(0, |other| other.address);
    // A warp marks the chosen experts in 32 words of 32 bits, one word per lane.
    if scores.width() > 1024 {
        return None;
    }
    let tokens = scores.count() / scores.width();
    let [groups, group_limit, ranking] = groups.unwrap_or([0; 3]).map(|number| number as u64);
    let arguments = TopKArguments {
        scores: scores.address,
        bias: address(true),
        routed: address(false),
        values: values.address,
        ids: ids.address,
        tokens,
        experts: scores.width(),
        k: k as u64,
        groups,
        group_limit,
        ranking,
    };
    let launch = Kernel::flat(Route, typed("top_k", scores.dtype)?, 32 * tokens, arguments);
    // Shared memory holds two words per warp and group.
    launches([Kernel { shared_bytes: 8 * (BLOCK / 32) * groups as u32, ..launch }])
}

fn rank(operand: &Operand) -> usize {
    operand.layout.dims().len()
}

/// Computes the gradient of all scores from (ids, gradient of the chosen scores).
pub fn top_k_grad(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([ids, dy], [d_scores]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = TopKGradArguments {
        ids: ids.address,
        dy: dy.address,
        d_scores: d_scores.address,
        tokens: dy.count() / dy.width(),
        experts: d_scores.width(),
        k: dy.width(),
    };
    launches([Kernel::flat(Route, typed("top_k_grad", dy.dtype)?, d_scores.count(), arguments)])
}

/// The parameters of routing.
#[derive(Debug, Clone, Copy)]
pub struct Routing {
    /// Number of experts.
    pub experts: usize,
    /// Number of sequences.
    pub sequences: usize,
    /// Index of the input with the ids of the chosen experts; `None` if experts choose tokens.
    pub ids: Option<usize>,
    /// Index of the input with router weights; `None` unless the rows with the least weight are dropped first.
    pub weights: Option<usize>,
    /// Index of the input with the weight of each token; `None` if all tokens count.
    pub routed: Option<usize>,
    /// Index of the input with the capacity of an expert and sequence, for each number of tokens that count; `None`
    /// if the capacity is fixed.
    pub limits: Option<usize>,
    /// Index of the input with the places of another routing, in which slots without rows get none; `None` if all slots
    /// may have rows.
    pub kept: Option<usize>,
    /// The capacity, which is the maximum number of rows per expert and sequence.
    pub capacity: Option<usize>,
}

/// Computes (places, slots, starts). With weights, the workspace holds one flag per slot.
pub fn route(routing: Routing, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [places, slots, starts] = operands.outputs else { return None };
    let Routing { experts, sequences, ids, weights, routed, limits, kept, capacity } = routing;
    let address = |input: Option<usize>| input.map_or(0, |input| operands.inputs[input].address);
    let (runs, count) = ((experts * sequences) as u64, places.count());
    let arguments = RouteArguments {
        ids: address(ids),
        weights: address(weights),
        routed: address(routed),
        limits: address(limits),
        kept: address(kept),
        stays: operands.workspace.first().copied().unwrap_or(0),
        places: places.address,
        slots: slots.address,
        starts: starts.address,
        experts: experts as u64,
        sequences: sequences as u64,
        length: count / sequences as u64,
        k: places.width(),
        rows: slots.count(),
        capacity: capacity.map_or(u64::MAX, |most| most as u64),
    };
    let clear = typed("route_clear", weights.map_or(DType::F32, |weights| operands.inputs[weights].dtype))?;
    launches([
        Kernel::flat(Route, clear, count.max(slots.count()), arguments),
        Kernel::flat(Route, "route_count".into(), 32 * runs, arguments),
        starts_of(starts, starts, runs),
        Kernel::flat(Route, "route_place".into(), 32 * runs, arguments),
    ])
}

/// Computes row offsets from lengths, with one warp.
fn starts_of(lengths: &Operand, starts: &Operand, runs: u64) -> Kernel {
    let arguments = RunsArguments { from: lengths.address, to: starts.address, runs };
    Kernel { block: 32, ..Kernel::flat(Route, "run_starts".into(), 1, arguments) }
}

/// Row offsets from lengths.
pub fn run_starts(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([lengths], [starts]) = (operands.inputs, operands.outputs) else { return None };
    launches([starts_of(lengths, starts, lengths.count())])
}

/// Lengths from row offsets.
pub fn run_lengths(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([starts], [lengths]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = RunsArguments { from: starts.address, to: lengths.address, runs: lengths.count() };
    launches([Kernel::flat(Route, "run_lengths".into(), lengths.count(), arguments)])
}

/// Counts, for each sequence and expert, the ids that refer to the expert.
pub fn expert_load(experts: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([ids], [load]) = (operands.inputs, operands.outputs) else { return None };
    let sequences = load.count() / experts as u64;
    let arguments = CountArguments {
        from: ids.address,
        routed: 0,
        out: load.address,
        length: ids.count() / sequences,
        experts: experts as u64,
        sequences,
        k: 1,
        group: 1,
        accumulate: operands.accumulate(0),
    };
    launches([Kernel::rows(Route, "expert_load".into(), load.count(), arguments.length.div_ceil(8), arguments)])
}

/// Computes each expert's share of the choices in each token's document, from (ids, document starts).
pub fn document_load(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([ids, starts], [shares]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = DocumentLoadArguments {
        ids: ids.address,
        starts: starts.address,
        shares: shares.address,
        batch_tokens: starts.count(),
        tokens: starts.width(),
        experts: shares.width(),
        k: ids.width(),
    };
    launches([Kernel::flat(Route, "document_load".into(), 32 * shares.count(), arguments)])
}

/// Counts the dropped choices. With `whole_tokens`, counts the tokens of which all choices were dropped. If there is
/// a second input, it contains the weights of tokens, and tokens of weight 0 are ignored.
pub fn unplaced(whole_tokens: bool, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([places, routed @ ..], [count]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = CountArguments {
        from: places.address,
        routed: routed.first().map_or(0, |routed| routed.address),
        out: count.address,
        length: places.count(),
        experts: 1,
        sequences: 1,
        k: places.width(),
        group: if whole_tokens { places.width() } else { 1 },
        accumulate: operands.accumulate(0),
    };
    let launch = Kernel::flat(Route, "unplaced".into(), 1, arguments);
    launches([Kernel { shared_bytes: FOLD_BYTES, ..launch }])
}

/// Computes the router's bias for the next step from (bias, load, norm), all in f32.
pub fn load_bias(rate: f64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [bias, load, norm] = operands.inputs else { return None };
    if [bias, load, norm].iter().any(|operand| operand.dtype != DType::F32) {
        return None;
    }
    let arguments = LoadBiasArguments {
        bias: bias.address,
        load: load.address,
        norm: norm.address,
        experts: bias.count(),
        rate: rate as f32,
    };
    launches([Kernel::rows(Route, "load_bias".into(), 1, bias.count().div_ceil(4), arguments)])
}

/// Launches a kernel, by name, that gathers rows by indices. One block handles one row of the output.
fn rows(name: &str, indices: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([from, places, _], [out]) = (operands.inputs, operands.outputs) else { return None };
    let width = out.width();
    let arguments = RowsArguments {
        from: from.address,
        out: out.address,
        indices: operands.inputs[indices].address,
        width,
        k: places.width(),
    };
    launches([Kernel::rows(Experts, typed(name, out.dtype)?, out.count() / width, out.packs(), arguments)])
}

/// Computes the rows of experts, each a copy of its token, from (x, places, slots).
pub fn dispatch(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    rows("dispatch", 2, operands)
}

/// Computes the sum of each token's expert rows, from (rows, places, slots).
pub fn combine(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    rows("combine", 1, operands)
}

/// Gathers the elements of input 0 at the indices in input `indices`.
pub fn gather(indices: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([from, ..], [out]) = (operands.inputs, operands.outputs) else { return None };
    let (indices, count) = (operands.inputs[indices].address, out.count());
    let arguments = GatherArguments { from: from.address, out: out.address, indices, count };
    launches([Kernel::flat(Experts, typed("gather", out.dtype)?, count, arguments)])
}

/// Returns the device address of the number of used rows, which is the last row offset.
fn end(starts: &Operand) -> u64 {
    starts.address + 4 * (starts.count() - 1)
}

/// Computes y from (gate, up, weights, row offsets).
pub fn routed_gated(unit: GatedUnit, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([gate, up, weights, starts], [y]) = (operands.inputs, operands.outputs) else { return None };
    let width = y.width();
    let arguments = RoutedSwiGluArguments {
        gate: gate.address,
        up: up.address,
        weights: weights.address,
        end: end(starts),
        dy: 0,
        d_gate: 0,
        d_up: 0,
        d_weights: 0,
        y: y.address,
        width,
        unit,
    };
    launches([Kernel::rows(Experts, typed("routed_swiglu", y.dtype)?, y.count() / width, y.packs(), arguments)])
}

/// Computes (d_gate, d_up, d_weights) from (gate, up, weights, row offsets, dy).
pub fn routed_gated_grad(unit: GatedUnit, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([gate, up, weights, starts, dy], [d_gate, d_up, d_weights]) = (operands.inputs, operands.outputs) else {
        return None;
    };
    let width = dy.width();
    let arguments = RoutedSwiGluArguments {
        gate: gate.address,
        up: up.address,
        weights: weights.address,
        end: end(starts),
        dy: dy.address,
        d_gate: d_gate.address,
        d_up: d_up.address,
        d_weights: d_weights.address,
        y: 0,
        width,
        unit,
    };
    launches([Kernel::rows(Experts, typed("routed_swiglu_grad", dy.dtype)?, dy.count() / width, dy.packs(), arguments)])
}
