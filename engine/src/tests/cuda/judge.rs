//! Checks the kernels of all operations of a function and its gradient. The results of each operation are compared
//! with its own reference implementation in f64.
//!
//! - Operands have the layouts of the graph, including strides, in f32 and bf16, with guards around them.
//! - Each operation runs in several variants: with separate outputs, in place of each input that it may overwrite,
//!   and accumulating into each output to which it may add.
//! - Each variant runs twice, with blocks and threads in opposite orders. Both runs must give the same bits.

use std::collections::{BTreeSet, HashMap};

use candle_core::{DType, Layout};
use gapless_graph::Stream;
use gapless_graph::launches;

use super::host;
use super::memory::Region;
use crate::autodiff::differentiate;
use crate::cuda::{Features, Launch, Operand, Operands, Random};
use crate::gradient_check::{Recorded, random_array};
use crate::graph::{Graph, Node, Source, Spec, Tensor, ValueId, lock};
use crate::reference::{Array, Reference, evaluate};
use crate::{Op, Result};

/// Returns the relative tolerance for a type. The error of an f32 sum of some thousand products is a few multiples of
/// 2⁻²⁴ = 6e-8. The error of a value rounded to bf16 is up to 2⁻⁸ = 4e-3.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F32 => 1e-5,
        // These are sums of f32 values, accumulated in f64.
        DType::F64 => 1e-6,
        _ => 0.0,
    }
}

/// Checks a function of tensors and its gradient in f32 and bf16. `parameters` are the shapes of parameters, which
/// are filled with standard normal values. `ids` are shapes with the ids that fill them. Fails if an operation in
/// `named` has no kernels.
pub fn check(
    named: &[&str],
    parameters: &[&[usize]],
    ids: &[(&[usize], &[u32])],
    f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
) {
    for dtype in [DType::F32, DType::BF16] {
        check_in(dtype, named, parameters, ids, &f);
    }
}

/// Like [`check`], but only in the given type.
pub fn check_in(
    dtype: DType,
    named: &[&str],
    parameters: &[&[usize]],
    ids: &[(&[usize], &[u32])],
    f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
) {
    if !host::is_there() {
        return;
    }
    let judged = judge_function(dtype, parameters, ids, f).unwrap();
    for name in named {
        assert!(judged.with_kernels.contains(name), "{name} is not among {judged:?}");
    }
}

/// Checks a function that has no gradient, in f32 and bf16. Fails if one of its operations has no kernels.
pub fn check_forward(
    parameters: &[&[usize]],
    ids: &[(&[usize], &[u32])],
    f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
) {
    for dtype in [DType::F32, DType::BF16] {
        let Recorded { graph, given, .. } = Recorded::new(dtype, parameters, ids, &f).unwrap();
        let judged = judge_graph(&lock(&graph), &given);
        assert!(judged.without.is_empty(), "{judged:?}");
    }
}

/// Checks a function and its gradient like [`check`]. Returns the names of the operations without kernels.
pub fn without_kernels(
    dtype: DType,
    parameters: &[&[usize]],
    ids: &[(&[usize], &[u32])],
    f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
) -> BTreeSet<&'static str> {
    judge_function(dtype, parameters, ids, f).unwrap().without
}

/// The names of the checked operations, and of those without kernels.
#[derive(Debug, Default)]
pub struct Judged {
    pub with_kernels: BTreeSet<&'static str>,
    pub without: BTreeSet<&'static str>,
}

fn judge_function(
    dtype: DType,
    parameters: &[&[usize]],
    ids: &[(&[usize], &[u32])],
    f: impl Fn(&[Tensor], &[Tensor]) -> Result<Tensor>,
) -> Result<Judged> {
    let Recorded { graph, given, loss, .. } = Recorded::new(dtype, parameters, ids, f)?;
    differentiate(&graph, &loss, 1.0)?;
    Ok(judge_graph(&lock(&graph), &given))
}

/// Checks all operations of a graph on the given parameters and inputs.
pub fn judge_graph(graph: &Graph, given: &HashMap<String, Array>) -> Judged {
    let stream = Stream::new(1, 1, 3);
    let exact = evaluate(graph, given, stream);
    let mut judged = Judged::default();
    for node in graph.nodes().iter().filter(|node| !graph.is_view(node.outputs[0])) {
        let has_kernels = judge_node(graph, node, &exact, stream);
        let names = if has_kernels { &mut judged.with_kernels } else { &mut judged.without };
        names.insert(node.op.name());
    }
    judged
}

/// Checks one operation of a graph, for the input values in `exact`. Returns false if the operation has no kernels.
fn judge_node(graph: &Graph, node: &Node, exact: &[Array], stream: Stream) -> bool {
    let stored = |id: ValueId| {
        let value = graph.value(id);
        let root = graph.value(value.root);
        let data = match root.source {
            Source::Constant(number) => vec![number],
            _ => exact[value.root.index()].data.clone(),
        };
        Stored { data, layout: value.layout.clone(), dtype: value.spec.dtype }
    };
    let inputs: Vec<Stored> = node.inputs.iter().map(|&id| stored(id).rounded()).collect();
    let (specs, outputs) = (graph.specs(&node.inputs), graph.specs(&node.outputs));
    for index in (0..outputs.len()).filter(|&index| outputs[index].dtype == DType::BF16) {
        let Some(op) = node.op.with_output_dtype(index, DType::F32) else { continue };
        assert!(judge(&*op, &inputs, &specs, &op.infer(&specs).unwrap(), stream), "{op:?} has no kernels");
    }
    judge(&*node.op, &inputs, &specs, &outputs, stream)
}

/// A tensor's elements in memory, and its layout.
#[derive(Debug, Clone)]
pub struct Stored {
    pub data: Vec<f64>,
    pub layout: Layout,
    pub dtype: DType,
}

impl Stored {
    /// Rounds the elements to the type.
    pub fn rounded(self) -> Self {
        Self { data: Region::of(&self.data, self.dtype).numbers(), ..self }
    }

    fn seen(&self) -> Array {
        Array { dims: vec![self.data.len()], data: self.data.clone() }.view(&self.layout)
    }
}

/// A variant of running an operation.
#[derive(Debug, Clone, Copy)]
struct Way {
    /// The indices of an input and an output that share memory; `None` if all outputs are separate.
    over: Option<(usize, usize)>,
    accumulate: u64,
    features: Features,
}

impl Way {
    /// The variant with separate outputs, and with kernels for all devices.
    const PLAIN: Self = Self { over: None, accumulate: 0, features: Features { warpgroups: false, tf32: false } };
}

/// Returns the sets of device features for which the operation has different kernels.
fn features(op: &dyn Op, inputs: &[Stored]) -> Vec<Features> {
    let has_others = ["attention", "grouped_linear"].iter().any(|family| op.name().starts_with(family))
        && inputs[0].dtype == DType::BF16
        && host::has_warpgroups();
    [false]
        .into_iter()
        .chain(has_others.then_some(true))
        .map(|warpgroups| Features { warpgroups, tf32: false })
        .collect()
}

/// Checks an operation on inputs, in all of its variants. Returns false if the operation has no kernels.
pub fn judge(op: &dyn Op, inputs: &[Stored], specs: &[Spec], outputs: &[Spec], stream: Stream) -> bool {
    let seen: Vec<Array> = inputs.iter().map(Stored::seen).collect();
    let exact = op.reference(&Reference { inputs: seen.iter().collect(), stream });
    // The head of a language model stores its logits in the type of x. So its losses are computed from rounded
    // logits, even though they are f32.
    let stores = op.name().starts_with("linear_cross_entropy");
    let features = features(op, inputs);
    let plain = features.iter().map(|&features| Way { features, ..Way::PLAIN });
    let over = op.inplace().iter().filter(|&&(input, output)| {
        inputs[input].layout.is_contiguous() && specs[input] == outputs[output] && op.mutates().is_empty()
    });
    let adding = (0..outputs.len()).filter(|&output| op.accumulates(output)).flat_map(|output| {
        features.iter().map(move |&features| Way { accumulate: 1 << output, features, ..Way::PLAIN })
    });
    let ways = plain.chain(over.map(|&pair| Way { over: Some(pair), ..Way::PLAIN }));
    for way in ways.chain(adding) {
        let mut bits: Option<Vec<Vec<u8>>> = None;
        for is_reversed in [false, true] {
            let Some(mut regions) = run(op, inputs, outputs, stream, way, is_reversed) else { return false };
            let got: Vec<Vec<u8>> = regions.iter().map(|region| region.bytes().to_vec()).collect();
            match &bits {
                None => bits = Some(got),
                Some(bits) => assert!(*bits == got, "{op:?}, {way:?}: the order of threads shows; is there a barrier?"),
            }
            for (index, (region, exact)) in regions.iter_mut().zip(&exact).enumerate() {
                let before = before(outputs, index, way);
                let exact: Vec<f64> = exact.data.iter().zip(before.numbers()).map(|(x, b)| x + b).collect();
                let stored = outputs.get(index).into_iter().chain(stores.then_some(&specs[0])).map(|spec| spec.dtype);
                let allowed = stored.map(tolerance).fold(0.0, f64::max);
                // In bf16, values half way between two codes are common, and may be rounded either way.
                let is_code =
                    outputs.get(index).is_some_and(|spec| spec.dtype == DType::U8) && op.name() == "adamw_8bit";
                let allowed = if is_code { tolerance(DType::BF16) } else { allowed };
                // Old values and the values added to them may nearly cancel. If the old values are larger than the
                // sum, the error is therefore relative to the old values.
                let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
                let of_before = norm(&before.numbers());
                let cancelled = if of_before > 0.0 { (norm(&exact) / of_before).min(1.0) } else { 1.0 };
                let error = distance(&region.numbers(), &exact) * cancelled;
                assert!(
                    error <= allowed,
                    "output {index} of {op:?} on {specs:?}, {way:?}: {error:e}, allowed {allowed}"
                );
            }
        }
    }
    true
}

/// Returns the outputs that an operation's kernels compute from these inputs.
pub fn outputs(op: &dyn Op, inputs: &[Stored], outputs: &[Spec], stream: Stream) -> Vec<Vec<f64>> {
    let regions = run(op, inputs, outputs, stream, Way::PLAIN, false).expect("it has kernels");
    regions.iter().map(Region::numbers).collect()
}

/// Returns the values that a run adds to an output: random values if the kernels accumulate into the output, and
/// zeros otherwise.
fn before(outputs: &[Spec], index: usize, way: Way) -> Region {
    let zeros = vec![0.0; outputs[index].elements()];
    match way.accumulate >> index & 1 {
        1 => Region::of(&random_array(outputs[index].dims(), 77).data, outputs[index].dtype),
        _ => Region::of(&zeros, outputs[index].dtype),
    }
}

/// Number of tickets that a launch may use.
const MOST_TICKETS: usize = 4096;

/// Returns the outputs of one run, or `None` if the operation has no kernels.
fn run(
    op: &dyn Op,
    inputs: &[Stored],
    outputs: &[Spec],
    stream: Stream,
    way: Way,
    is_reversed: bool,
) -> Option<Vec<Region>> {
    let of_input: Vec<Region> = inputs.iter().map(|input| Region::of(&input.data, input.dtype)).collect();
    let mut of_output: Vec<Region> = (0..outputs.len())
        .map(|index| match way.accumulate >> index & 1 {
            1 => before(outputs, index, way),
            _ => Region::poisoned(outputs[index].elements(), outputs[index].dtype),
        })
        .collect();
    let pairs: Vec<(usize, usize)> = op.mutates().iter().copied().chain(way.over).collect();
    for &(input, output) in &pairs {
        of_output[output] = Region::of(&inputs[input].data, inputs[input].dtype);
    }
    let bytes = launches::workspace(op, inputs.iter().map(|input| (&input.layout, input.dtype)), outputs);
    let pieces: Vec<Region> = bytes.iter().map(|&bytes| Region::poisoned(bytes as usize, DType::U8)).collect();
    let tickets = Region::from_bytes(vec![0; 4 * MOST_TICKETS], DType::U32);
    let key = Region::from_bytes(stream.key().to_ne_bytes().to_vec(), DType::I64);
    let at = |index: usize, input: &Stored| {
        let region = match pairs.iter().find(|pair| pair.0 == index) {
            Some(&(_, output)) => &of_output[output],
            None => &of_input[index],
        };
        let start = input.layout.start_offset() * input.dtype.size_in_bytes();
        let layout = Layout::new(input.layout.shape().clone(), input.layout.stride().to_vec(), 0);
        Operand { address: region.address() + start as u64, layout, dtype: input.dtype }
    };
    let operands = Operands {
        inputs: &inputs.iter().enumerate().map(|(index, input)| at(index, input)).collect::<Vec<_>>(),
        outputs: &outputs
            .iter()
            .zip(&of_output)
            .map(|(spec, region)| Operand {
                address: region.address(),
                layout: Layout::contiguous(spec.shape.clone()),
                dtype: spec.dtype,
            })
            .collect::<Vec<_>>(),
        workspace: &pieces.iter().map(Region::address).collect::<Vec<_>>(),
        accumulate: way.accumulate,
        tickets: tickets.address(),
        random: Random { key: key.address(), micro_batch: stream.micro_batch },
        features: way.features,
    };
    for launch in launches::launches(op, &operands)? {
        assert!(!matches!(&launch, Launch::Kernel(kernel) if kernel.tickets as usize > MOST_TICKETS), "{launch:?}");
        // SAFETY: the regions are as large as the operands' layouts and the workspace say. No other reference to the
        // regions is used.
        unsafe { host::run(&launch, is_reversed) }.unwrap_or_else(|why| panic!("{launch:?} of {op:?}: {why}"));
    }
    for (index, (region, input)) in of_input.iter().zip(inputs).enumerate() {
        assert!(region.is_intact(), "{op:?} writes beside input {index}");
        let same = Region::of(&input.data, input.dtype);
        assert!(region.bytes() == same.bytes(), "{op:?} writes to input {index}");
    }
    for (index, region) in of_output.iter().enumerate() {
        assert!(region.is_intact(), "{op:?} writes beside output {index}");
    }
    assert!(pieces.iter().all(Region::is_intact), "{op:?} writes beside its workspace");
    let are_back = tickets.is_intact() && tickets.bytes().iter().all(|&byte| byte == 0);
    assert!(are_back, "{op:?} does not reset its tickets to 0, or writes beside them");
    Some(of_output)
}

/// Returns ‖a − b‖ / ‖b‖, or ‖a − b‖ if b is zero. The result is NaN if an element is NaN in a but not in b.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "elements");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| if a == b { 0.0 } else { a - b }));
    let scale = norm(&mut b.iter().copied().filter(|x| x.is_finite()));
    if difference == 0.0 || scale < 1e-12 { difference } else { difference / scale }
}
