//! Checks an operation against its f64 reference: compares the gradient with finite differences of the reference, and
//! the kernel with the reference itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_compile::recompute::RematPlan;
use gapless_compile::{CompileOptions, Lowering, Output, Overlap, Target, compile, lower};
use gapless_graph::autodiff::differentiate;
use gapless_graph::nn::{Init, VarBuilder};
use gapless_graph::reference::{Array, Reference, evaluate};
use gapless_graph::{Graph, Source, Spec, Tensor, ValueId, lock};
use gapless_kernels::{Numbers, Stream};
use gapless_parallel::{Action, Kind};
use gapless_runtime::cpu::{CpuBackend, Workers};
use gapless_runtime::{RunOptions, Session};
use half::bf16;

use crate::error::Result;

/// The errors that [`gradient_check`] measures. `finite_difference` and `kernel` are relative errors ‖a − b‖ / ‖b‖ of
/// whole tensors; each is the maximum over all tensors that are compared.
#[derive(Debug, Clone, Copy)]
pub struct GradientError {
    /// Error of the recorded gradient, evaluated in f64, against central differences of the f64 reference.
    pub finite_difference: f64,
    /// Error of the output and gradients of the compiled f32 program against the f64 reference.
    pub kernel: f64,
    /// The largest error of an element in the compiled bf16 program, as a fraction of the allowed error, so a correct
    /// operation stays below 1. Each operation is compared with its f64 reference on the same bf16 inputs. `None` if
    /// the function only supports f32.
    ///
    /// The allowed error of an element is one rounding (2⁻⁸ of the element) plus a fraction of the whole tensor's norm.
    /// This fraction is 2⁻⁸ if the operation [rounds operands of products](gapless_graph::Op::rounds_intermediates).
    /// Otherwise the operation sums in f32, and the fraction is 1e-5.
    pub bf16: Option<f64>,
}

/// Records the function `f`, and measures the errors of its output and gradients. `parameters` gives the shapes of the
/// first argument's tensors, which are filled with standard normal values. `ids` gives the shapes and values of the
/// second argument's tensors. If the output of `f` is a scalar, it is the loss. Otherwise it is multiplied by random
/// weights and summed to a loss.
///
/// ```
/// use gapless_engine::gradient_check;
///
/// let error = gradient_check(&[&[2, 3], &[2, 3]], &[], |x, _| x[0].mul(&x[1]))?;
/// assert!(error.finite_difference < 1e-6 && error.kernel < 1e-5 && error.bf16 < Some(1.0), "{error:?}");
/// # Ok::<(), gapless_engine::Error>(())
/// ```
///
/// # Errors
/// Passes on errors of building, compiling or running the function.
pub fn gradient_check(
    parameters: &[&[usize]],
    ids: &[(&[usize], &[u32])],
    f: impl Fn(&[Tensor], &[Tensor]) -> gapless_graph::Result<Tensor>,
) -> Result<GradientError> {
    let Recorded { graph, given, y, loss } = Recorded::new(DType::F32, parameters, ids, &f)?;
    let gradients = differentiate(&graph, &loss, 1.0)?;
    let graph = lock(&graph);

    let stream = Stream::new(1, 1, 0);
    let exact = evaluate(&graph, &given, stream);
    let name_of = |id: ValueId| graph.persistent().find(|p| p.0 == id).map(|p| p.1.to_owned()).expect("a parameter");
    let total = |summands: &[ValueId]| {
        let arrays = summands.iter().map(|id| &exact[id.index()]);
        arrays.cloned().reduce(|a, b| a.zip(&b, |a, b| a + b)).expect("at least one summand")
    };
    let mut error = GradientError { finite_difference: 0.0, kernel: 0.0, bf16: None };
    for gradient in &gradients {
        let numeric = differences(&graph, &given, &name_of(gradient.parameter), loss.id(), stream);
        error.finite_difference = worse(error.finite_difference, distance(&total(&gradient.summands).data, &numeric));
    }
    let mut outputs = vec![Output::local("y", y.id())];
    for gradient in &gradients {
        outputs.extend(gradient.summands.iter().map(|&id| Output::local(format!("gradient {}", id.index()), id)));
    }
    let found = run(&graph, &given, &outputs)?;
    for (data, Output { value: id, .. }) in found.iter().zip(&outputs) {
        error.kernel = worse(error.kernel, distance(data, &exact[id.index()].data));
    }
    drop(graph);
    if let Ok(recorded) = Recorded::new(DType::BF16, parameters, ids, &f) {
        error.bf16 = Some(check_bf16(recorded, stream)?);
    }
    Ok(error)
}

/// Runs the compiled program on the given inputs, and returns its outputs.
fn run(graph: &Graph, given: &HashMap<String, Array>, outputs: &[Output]) -> Result<Vec<Vec<f64>>> {
    let mut session = session(graph, outputs)?;
    let program = session.executable().program("check").expect("it was compiled");
    for (name, array) in given {
        let data: Vec<f32> = array.data.iter().map(|&x| x as f32).collect();
        if name.starts_with('x') {
            // A function need not use all of its parameters.
            let _ = session.write_tensor(name, &data);
        } else if name.starts_with("ids") {
            let data: Vec<u32> = array.data.iter().map(|&x| x as u32).collect();
            session.write_input(program, name, 0, &data)?;
        } else if session.write_input(program, name, 0, &data).is_err() {
            let data: Vec<bf16> = data.into_iter().map(bf16::from_f32).collect();
            session.write_input(program, name, 0, &data)?;
        }
    }
    session.run(program, RunOptions { seed: 1, step: 1, poison: true, ..RunOptions::default() })?;
    let read = |output: &Output| -> Result<Vec<f64>> {
        Ok(session.output(program, &output.name)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
    };
    outputs.iter().map(read).collect()
}

/// Runs a function and its gradient in bf16, and returns [`GradientError::bf16`]. The reference of each operation gets
/// the inputs that the operation had in this run.
fn check_bf16(Recorded { graph, mut given, y, loss }: Recorded, stream: Stream) -> Result<f64> {
    let gradients = differentiate(&graph, &loss, 1.0)?;
    let graph = lock(&graph);
    let rounded = |x: &f64| f64::from(bf16::from_f64(*x));
    for (_, array) in given.iter_mut().filter(|(name, _)| !name.starts_with("ids")) {
        array.data = array.data.iter().map(rounded).collect();
    }
    // The first run keeps the results of all operations as outputs. The second run outputs only `y` and the gradients,
    // so that the buffers of the other results are reused.
    let made = graph.nodes().iter().flat_map(|node| &node.outputs).filter(|&&id| !graph.is_view(id));
    let all: Vec<Output> = made.map(|&id| Output::local(format!("made {}", id.index()), id)).collect();
    let asked = [y.id()].into_iter().chain(gradients.iter().flat_map(|gradient| gradient.summands.iter().copied()));
    let asked: Vec<Output> = asked.map(|id| Output::local(format!("asked {}", id.index()), id)).collect();
    let found = run(&graph, &given, &all)?;
    let stored = |id: ValueId, x: &f64| if graph.value(id).spec.dtype == DType::BF16 { rounded(x) } else { *x };
    let value_of = |id: ValueId| {
        let root = graph.value(id).root;
        let data = match &graph.value(root).source {
            Source::Node { .. } => {
                let index = all.iter().position(|output| output.value == root).expect("every result is an output");
                found[index].clone()
            }
            Source::Persistent { name, .. } | Source::Input { name } | Source::Cache { name } => {
                given[name].data.clone()
            }
            Source::Constant(number) => vec![stored(root, number)],
            Source::Data { elements, .. } => elements.iter().map(|x| stored(root, x)).collect(),
        };
        Array { dims: vec![data.len()], data }.view(&graph.value(id).layout)
    };
    for (output, data) in asked.iter().zip(run(&graph, &given, &asked)?) {
        assert_eq!(data, value_of(output.value).data, "what is overwritten changes no bit");
    }
    let mut worst = 0.0;
    for node in graph.nodes().iter().filter(|node| !graph.is_view(node.outputs[0])) {
        let inputs: Vec<Array> = node.inputs.iter().map(|&id| value_of(id)).collect();
        let exact = node.op.reference(&Reference { inputs: inputs.iter().collect(), stream });
        let of_sums = if node.op.rounds_intermediates() { 1.0 / 256.0 } else { 1e-5 };
        for (&id, exact) in node.outputs.iter().zip(exact) {
            let unit = if graph.value(id).spec.dtype == DType::BF16 { 1.0 / 256.0 } else { 0.0 };
            let whole = exact.data.iter().map(|x| x * x).sum::<f64>().sqrt();
            for (&found, &exact) in value_of(id).data.iter().zip(&exact.data) {
                let error =
                    if found == exact { 0.0 } else { (found - exact).abs() / (unit * exact.abs() + of_sums * whole) };
                worst = worse(worst, error);
            }
        }
    }
    Ok(worst)
}

/// A session that runs a graph's forward and backward once.
pub(crate) fn session(graph: &Graph, outputs: &[Output]) -> Result<Session<CpuBackend>> {
    let workers = Workers::new(2)?;
    let program = lower(&Lowering {
        evicts: false,
        overlap: Overlap::default(),
        name: "check",
        graph,
        table: &[vec![Action::new(Kind::Forward, 0, 0), Action::new(Kind::Backward, 0, 0)]],
        rank: 0,
        outputs,
        roles: &HashMap::new(),
        recomputation: &RematPlan::default(),
        target: Target::Cpu { threads: workers.threads() },
    })?;
    Ok(Session::on_cpu(compile(&[program], &CompileOptions::default())?, workers, 0)?)
}

/// Central differences of the loss with respect to every element of a parameter.
fn differences(graph: &Graph, given: &HashMap<String, Array>, name: &str, loss: ValueId, stream: Stream) -> Vec<f64> {
    // The error of central differences is about h²/6·f‴ + ε/h, where ε is the rounding error of f. This error is
    // smallest near h = ε^⅓.
    const H: f64 = 1e-5;
    let mut given = given.clone();
    let mut at = |index: usize, shift: f64| {
        let x = &mut given.get_mut(name).expect("given").data[index];
        let before = *x;
        *x += shift;
        let value = evaluate(graph, &given, stream)[loss.index()].data[0];
        given.get_mut(name).expect("given").data[index] = before;
        value
    };
    let elements = graph.persistent().find(|p| p.1 == name).map_or(0, |p| graph.value(p.0).spec.elements());
    (0..elements).map(|i| (at(i, H) - at(i, -H)) / (2.0 * H)).collect()
}

/// Returns the larger error. NaN counts as the largest.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

/// Returns ‖a − b‖ / ‖b‖, or ‖a − b‖ if b is close to zero.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| a - b));
    let scale = norm(&mut b.iter().copied());
    if scale < 1e-12 { difference } else { difference / scale }
}

/// A function recorded as a graph up to a loss, with the values of its parameters and inputs.
pub(crate) struct Recorded {
    pub graph: Arc<Mutex<Graph>>,
    /// Values by name: the parameters `x0`, `x1`, …, the ids `ids0`, `ids1`, …, and the `weights` by which the output
    /// is multiplied.
    pub given: HashMap<String, Array>,
    /// The output of the function.
    pub y: Tensor,
    pub loss: Tensor,
}

impl Recorded {
    /// Records a function and its loss as [`gradient_check`] describes. The parameters have the type `dtype`.
    pub fn new(
        dtype: DType,
        parameters: &[&[usize]],
        ids: &[(&[usize], &[u32])],
        f: impl Fn(&[Tensor], &[Tensor]) -> gapless_graph::Result<Tensor>,
    ) -> Result<Self> {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let vb = VarBuilder::new(&graph, dtype);
        let mut given: HashMap<String, Array> = HashMap::new();
        let mut xs = Vec::new();
        for (index, dims) in parameters.iter().enumerate() {
            let name = format!("x{index}");
            xs.push(vb.get_with_hints(dims.to_vec(), &name, Init::Const(0.0))?);
            given.insert(name, random_array(dims, index as u64));
        }
        let mut id_tensors = Vec::new();
        for (index, (dims, data)) in ids.iter().enumerate() {
            let name = format!("ids{index}");
            id_tensors.push(input(&graph, &name, Spec { shape: dims.to_vec().into(), dtype: DType::U32 })?);
            given.insert(name, Array::new(dims, data.iter().map(|&x| f64::from(x)).collect()));
        }
        let y = f(&xs, &id_tensors)?.contiguous()?;
        let loss = if y.rank() == 0 {
            y.clone()
        } else {
            let weights = input(&graph, "weights", Spec { shape: y.shape().clone(), dtype: y.dtype() })?;
            given.insert("weights".into(), random_array(y.dims(), 99));
            y.mul(&weights)?.sum_all()?
        };
        Ok(Self { graph, given, y, loss })
    }
}

/// An array of standard normal values, rounded to f32.
pub(crate) fn random_array(dims: &[usize], seed: u64) -> Array {
    let numbers = Numbers::from_seed(seed + 1);
    // Without this rounding, the f32 program would start from other values than the f64 reference.
    let normal = |i| f64::from(numbers.normal(i) as f32);
    Array::new(dims, (0..dims.iter().product()).map(normal).collect())
}

fn input(graph: &Arc<Mutex<Graph>>, name: &str, spec: Spec) -> Result<Tensor> {
    let id = lock(graph).add_input(name, spec)?;
    Ok(Tensor::of(graph, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_hides_a_nan() {
        assert!(worse(0.0, f64::NAN).is_nan());
        assert!(worse(f64::NAN, 1.0).is_nan());
        assert_eq!(worse(1.0, 2.0), 2.0);
        assert_eq!(worse(2.0, 1.0), 2.0);
    }
}
