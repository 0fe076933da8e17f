//! Compares fused kernels with the same operations unfused.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_alloc::lower_bound;
use gapless_graph::Stream;
use gapless_parallel::{Action, Kind};
use gapless_testing::prelude::*;

use super::processor::{Processor, device};
use super::rounding::{Judged, distance, judged};
use super::small::{BATCH, SEQUENCE, Small, Style};
use super::step::executable;
use super::{gpu, host};
use crate::autodiff::differentiate;
use crate::compile::{CompileOptions, Executable, Lowering, Output, Overlap, Target, compile, lower};
use crate::cuda::{CudaBackend, Device, Family, Launch};
use crate::graph::{Graph, ValueId, lock};
use crate::nn::{Init, VarBuilder};
use crate::recompute::RematPlan;
use crate::reference::Array;
use crate::runtime::cpu::Workers;
use crate::runtime::{RunOptions, Session};
use crate::{Result, StepOptions, Tensor, TrainOptions};

/// Dimensions whose product is not a multiple of the pack size. So few rows are aligned.
const SHAPE: [usize; 3] = [3, 5, 7];

const NORMAL: Init = Init::Randn { mean: 0.0, stdev: 1.0 };

/// A function of parameters and its gradient, with the outputs of both that are compared.
pub(super) struct Function {
    pub graph: Arc<Mutex<Graph>>,
    pub outputs: Vec<Output>,
}

impl Function {
    pub fn new(dtype: DType, f: impl Fn(&dyn Fn(&str, &[usize]) -> Tensor) -> Result<Tensor>) -> Result<Self> {
        let Self { graph, mut outputs } = Self::forward(dtype, f)?;
        let y = Tensor::of(&graph, outputs[0].value);
        let weights = VarBuilder::new(&graph, dtype).get_with_hints(y.dims().to_vec(), "weights", NORMAL)?;
        let gradients = differentiate(&graph, &y.mul(&weights)?.sum_all()?, 1.0)?;
        for (index, id) in gradients.iter().flat_map(|gradient| &gradient.summands).enumerate() {
            let summand = Tensor::of(&graph, *id).contiguous()?;
            outputs.push(Output::local(format!("gradient {index}"), summand.id()));
        }
        Ok(Self { graph, outputs })
    }

    /// Creates a function without its gradient.
    fn forward(dtype: DType, f: impl Fn(&dyn Fn(&str, &[usize]) -> Tensor) -> Result<Tensor>) -> Result<Self> {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let vb = VarBuilder::new(&graph, dtype);
        let parameter = |name: &str, dims: &[usize]| vb.get_with_hints(dims.to_vec(), name, NORMAL).unwrap();
        let y = f(&parameter)?.contiguous()?;
        Ok(Self { outputs: vec![Output::local("y", y.id())], graph })
    }

    pub fn executable(&self, target: Target) -> Executable {
        let program = lower(&Lowering {
            evicts: false,
            overlap: Overlap::default(),
            name: "function",
            graph: &lock(&self.graph),
            table: &[vec![Action::new(Kind::Forward, 0, 0), Action::new(Kind::Backward, 0, 0)]],
            rank: 0,
            outputs: &self.outputs,
            roles: &HashMap::new(),
            recomputation: &RematPlan::default(),
            target,
        });
        compile(&[program.unwrap()], &CompileOptions::default()).unwrap()
    }

    pub fn on_device(&self, target: Target, device: Box<dyn Device>) -> Session<CudaBackend> {
        let mut session = Session::on_cuda(self.executable(target), device, 3, (0, 1)).unwrap();
        let program = session.executable().program("function").unwrap();
        session.run(program, RunOptions { seed: 3, ..RunOptions::default() }).unwrap();
        session
    }

    /// Runs the function, and returns the values of all outputs.
    pub fn results(&self, session: &mut Session<CudaBackend>) -> Vec<Vec<f64>> {
        let program = session.executable().program("function").unwrap();
        self.outputs.iter().map(|output| numbers(&session.output(program, &output.name).unwrap())).collect()
    }

    /// Returns the values of the session's parameters.
    fn parameters(&self, session: &Session<CudaBackend>) -> HashMap<String, Array> {
        let is_there = |name: &str| session.executable().persistent().iter().any(|p| p.label.tensor == name);
        let graph = lock(&self.graph);
        let parameter = |(id, name): (ValueId, &str)| {
            let dims = graph.value(id).spec.dims();
            // Parameters that no operation reads have no buffer.
            let data = match is_there(name) {
                true => numbers(&session.tensor(name).unwrap()),
                false => vec![0.0; dims.iter().product()],
            };
            (name.to_owned(), Array::new(dims, data))
        };
        graph.persistent().map(parameter).collect()
    }

    /// Evaluates the function in f64, and returns the values with the allowed errors of the outputs.
    fn judged(&self, parameters: &HashMap<String, Array>) -> Judged {
        let outputs: Vec<ValueId> = self.outputs.iter().map(|output| output.value).collect();
        judged(&lock(&self.graph), parameters, Stream::new(3, 0, 0), &outputs)
    }
}

fn numbers(tensor: &candle_core::Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// A step of a random function: the operation, and the indices of its operands among the tensors that exist before
/// it.
pub(super) type Chosen = (u8, usize, usize);

/// Builds a random function from tensors with all kinds of strides. Each step uses these tensors or the results of
/// earlier steps. Returns the sum of the tensors that no step has read.
pub(super) fn random_function(chosen: &[Chosen], parameter: &dyn Fn(&str, &[usize]) -> Tensor) -> Result<Tensor> {
    let [a, b, c] = SHAPE;
    let mut there = vec![
        parameter("dense", &SHAPE),
        parameter("column", &[c]).broadcast_as(SHAPE.to_vec())?,
        parameter("row", &[b, 1]).broadcast_as(SHAPE.to_vec())?,
        parameter("number", &[1]).broadcast_as(SHAPE.to_vec())?,
        parameter("transposed", &[a, c, b]).transpose(1, 2)?,
        // This tensor is contiguous, but its address is not aligned to a pack.
        parameter("part", &[a + 1, b, c]).narrow(0, 1, a)?,
    ];
    let mut is_read = vec![true; there.len()];
    for &(kind, x, y) in chosen {
        let pick = |index: usize, recent: bool| match recent {
            true => there.len() - 1 - index % there.len().min(4),
            false => index % there.len(),
        };
        let (first, second) = (pick(x, true), pick(y, y % 2 == 0));
        let (x, y) = (there[first].clone(), there[second].clone());
        let reads_second = matches!(kind, 0..=3);
        let made = match kind {
            0 => x.add(&y)?,
            1 => x.sub(&y)?,
            2 => x.mul(&y)?,
            3 => x.contiguous()?.swiglu(&y.contiguous()?)?,
            4 => x.gelu()?,
            5 => x.tanh()?,
            6 => x.sigmoid()?,
            7 => x.affine(0.5, 0.25)?,
            8 => x.dropout(0.25)?,
            9 => x.contiguous()?.reshape((a * b, c))?.silu()?.reshape(SHAPE.to_vec())?,
            10 => x.to_dtype(DType::F32)?.sigmoid()?.to_dtype(x.dtype())?,
            11 => x.contiguous()?.rms_norm(&parameter("scale", &[c]), 1e-5)?,
            _ => x.contiguous()?.layer_norm(&parameter("scale", &[c]), &parameter("shift", &[c]), 1e-5)?,
        };
        is_read[first] = true;
        is_read[second] |= reads_second;
        is_read.push(false);
        there.push(made);
    }
    let ends = there.into_iter().zip(is_read).filter(|(_, is_read)| !is_read).map(|(end, _)| Ok(end));
    ends.reduce(|sum, end| sum?.add(&end?)).expect("the last one is not read")
}

/// Checks a random function and its gradient, fused and unfused. In f32, both have the same bits, because the
/// simulated device rounds a product before it is added to a sum. In f32 and bf16, both are as close to f64 as their
/// roundings allow. Fusing does not increase the peak of live bytes.
fn check(chosen: &[Chosen], dtype: DType) {
    let function = Function::new(dtype, |parameter| random_function(chosen, parameter)).unwrap();
    let [mut fused, mut apart] = [Target::Cuda, Target::CudaUnfused].map(|target| function.on_device(target, device()));
    let [most, most_apart] = [&fused, &apart].map(|session| lower_bound(session.executable().problem()));
    assert!(most <= most_apart, "{most} bytes are alive, and {most_apart} unfused");
    let judged = function.judged(&function.parameters(&apart));
    let [of_fused, of_apart] = [&mut fused, &mut apart].map(|session| function.results(session));
    for (index, Output { name, value, .. }) in function.outputs.iter().enumerate() {
        let (result, apart) = (&of_fused[index], &of_apart[index]);
        // A GPU may compute a product and a sum as a fused multiply-add, which rounds only once.
        if dtype == DType::F32 && !gpu::is_asked_for() {
            let is_same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
            assert!(result.iter().zip(apart).all(is_same), "{name}: {result:?}, unfused {apart:?}");
        }
        let (exact, allowed) = (&judged.exact[value.index()].data, judged.allowed[index]);
        for (how, result) in [("fused", result), ("unfused", apart)] {
            let error = distance(result, exact);
            assert!(allowed.is_infinite() || error <= allowed, "{name}, {how}: {error}, allowed {allowed}: {chosen:?}");
        }
    }
}

/// The gradients of queries, keys and values are written directly into their parts of the projection's gradient,
/// without copies.
#[test]
fn parts_are_written_where_they_would_be_copied_to() {
    if !host::is_there() {
        return;
    }
    for (dtype, [heads, kv_heads, size]) in
        [(DType::F32, [2, 2, 8]), (DType::BF16, [4, 2, 16]), (DType::BF16, [3, 1, 5])]
    {
        let function = Function::new(dtype, |parameter| {
            let x = parameter("x", &[2, 21, 8]);
            let rows = x.linear(&parameter("weight", &[(heads + 2 * kv_heads) * size, 8]), None)?;
            let part = |first: usize, heads: usize| {
                rows.narrow(2, first * size, heads * size)?.reshape((2, 21, heads, size))?.transpose(1, 2)
            };
            let (k, v) = (part(heads, kv_heads)?, part(heads + kv_heads, kv_heads)?);
            part(0, heads)?.causal_attention(&k, &v, 0.3)
        });
        let function = function.unwrap();
        let targets = [Target::Cuda, Target::CudaUnfused];
        let copies = targets.map(|target| {
            let launched = launched(&function.executable(target));
            launched.iter().filter(|(_, name)| name.starts_with("copy")).count()
        });
        assert_eq!(copies, [copies[1] - 3, copies[1]], "{dtype:?}");
        let [joined, apart] = targets.map(|target| function.results(&mut function.on_device(target, device())));
        assert!(joined.iter().flatten().all(|x| x.is_finite()) && joined == apart, "{dtype:?}");
    }
}

pub(super) fn any_function() -> impl Strategy<Value = Vec<Chosen>> {
    prop::collection::vec((0..13u8, 0..64usize, 0..64usize), 2..16)
}

generated! {
    // There are few cases, because the kernels of each case take a second to compile.
    #![cases(4)]

    #[test]
    fn fused_operations_do_what_they_did(
        chosen in any_function(),
        dtype in prop_oneof![Just(DType::F32), Just(DType::BF16)],
    ) {
        if host::is_there() {
            check(&chosen, dtype);
        }
    }
}

/// Ill-conditioned functions, whose gradients lose most of their digits to bf16 rounding.
#[test]
fn functions_of_bad_condition_are_judged_by_it() {
    if !host::is_there() {
        return;
    }
    for chosen in [
        [
            (3, 3, 6),
            (8, 45, 52),
            (2, 14, 2),
            (6, 42, 20),
            (7, 27, 49),
            (10, 42, 63),
            (2, 54, 30),
            (8, 1, 18),
            (8, 35, 8),
            (2, 58, 46),
            (9, 38, 18),
            (11, 14, 43),
        ]
        .as_slice(),
        &[
            (0, 3, 7),
            (12, 7, 28),
            (10, 5, 27),
            (8, 17, 47),
            (3, 0, 52),
            (7, 29, 48),
            (9, 10, 23),
            (12, 49, 53),
            (5, 1, 46),
            (6, 36, 32),
        ],
    ] {
        check(chosen, DType::BF16);
    }
}

/// Values in registers are not rounded. A stored value is the nearest bf16, whether it is stored alone or as part of
/// a pack. So its relative error is at most 2⁻⁸.
#[test]
fn what_is_stored_is_rounded_once() {
    if !host::is_there() {
        return;
    }
    let function = Function::forward(DType::BF16, |parameter| {
        let x = parameter("x", &SHAPE);
        x.tanh()?.mul(&x.affine(3.0, 0.1)?)?.gelu()?.dropout(0.25)
    });
    let function = function.unwrap();
    assert_eq!(launched(&function.executable(Target::Cuda)).len(), 1);
    let mut fused = function.on_device(Target::Cuda, device());
    let exact = &function.judged(&function.parameters(&fused)).exact[function.outputs[0].value.index()];
    for (stored, exact) in function.results(&mut fused)[0].iter().zip(&exact.data) {
        // The tolerance also covers the roundings of f32 before the value is stored.
        assert!((stored - exact).abs() <= exact.abs() / 256.0 + 1e-6, "{stored}, not {exact}");
    }
}

/// Returns the GPU that the tests use, or two simulated devices, one with epilogues and one without.
pub(super) fn devices() -> Vec<Box<dyn Device>> {
    match gpu::another() {
        Some(gpu) => vec![gpu],
        None => vec![Box::<Processor>::default(), Box::new(Processor::without_epilogues())],
    }
}

/// GELU after a product, and the gradient of GELU before the next product. One device's library fuses them, and the
/// other's does not. If the number of columns is not a multiple of the pack size, a product is not fused.
#[test]
fn products_with_epilogues_do_what_both_did() {
    if !host::is_there() {
        return;
    }
    for (dtype, inner, has_bias, merged) in
        [(DType::F32, 16, true, 2), (DType::BF16, 24, true, 2), (DType::F32, 8, false, 2), (DType::F32, 12, true, 0)]
    {
        let function = Function::new(dtype, |parameter| {
            let bias = has_bias.then(|| parameter("bias", &[inner]));
            let up = parameter("x", &SHAPE).linear(&parameter("up", &[inner, SHAPE[2]]), bias.as_ref())?;
            up.gelu()?.linear(&parameter("down", &[SHAPE[2], inner]), None)
        });
        let function = function.unwrap();
        let count = |target| launched(&function.executable(target)).len();
        assert_eq!(count(Target::CudaUnfused) - count(Target::Cuda), merged);
        let mut apart = function.on_device(Target::CudaUnfused, device());
        let results_apart = function.results(&mut apart);
        for device in devices() {
            let results = function.results(&mut function.on_device(Target::Cuda, device));
            for ((result, apart), output) in results.iter().zip(&results_apart).zip(&function.outputs) {
                let norm = distance(apart, &vec![0.0; apart.len()]);
                // The library applies GELU before it rounds the sums.
                let allowed = if dtype == DType::F32 { gpu::allowed(1e-6, 2e-3) } else { 1e-2 };
                assert!(distance(result, apart) <= allowed * norm, "{}", output.name);
            }
        }
    }
}

/// On the CPU backend, fused operations run their reference implementation.
#[test]
fn the_reference_of_fused_operations_is_that_of_each() {
    let function = every_kind(DType::F32);
    let all = launched(&function.executable(Target::Cuda));
    let texts: Vec<&str> = all.iter().filter_map(|(family, _)| family.map(Family::source)).collect();
    for part in ["// swiglu, affine, rms_norm.", "norm_grad_input, ", " dropout, "] {
        assert!(texts.iter().any(|text| text.contains(part)), "{part:?} is in none");
    }
    let run = |target| {
        let executable = function.executable(target);
        let workers = Workers::new(1).unwrap();
        let mut session = Session::on_cpu(executable, workers, 3).unwrap();
        let program = session.executable().program("function").unwrap();
        session.run(program, RunOptions { seed: 3, micro_batch_stride: 1, ..RunOptions::default() }).unwrap();
        let output = |output: &Output| numbers(&session.output(program, &output.name).unwrap());
        function.outputs.iter().map(output).collect::<Vec<_>>()
    };
    let (fused, apart) = (run(Target::Cuda), run(Target::CudaUnfused));
    for ((fused, apart), output) in fused.iter().zip(&apart).zip(&function.outputs) {
        let norm = distance(apart, &vec![0.0; apart.len()]);
        // The CPU's kernels compute in f32, and the references in f64.
        assert!(distance(fused, apart) <= 1e-5 * norm, "{}", output.name);
    }
}

/// A launch: its kernel family (`None` for products) and its name.
pub(super) type Launched = (Option<Family>, String);

/// The launches of an executable's programs.
pub(super) fn launched(executable: &Executable) -> Vec<Launched> {
    let name = |launch: Launch| match launch {
        Launch::Kernel(kernel) => (Some(kernel.family), kernel.name),
        _ => (None, "product".to_owned()),
    };
    Session::<CudaBackend>::launches(executable).unwrap().into_iter().map(name).collect()
}

/// Returns the generated kernel sources of small models' steps, and of a function with every kind of operand in f32
/// and bf16.
pub(super) fn generated() -> BTreeSet<Family> {
    let options = TrainOptions {
        step: StepOptions { batch: BATCH, sequence: SEQUENCE, ..StepOptions::default() },
        ..TrainOptions::default()
    };
    let steps = [Style::Gpt, Style::Llama].map(|style| executable(&options, Target::Cuda, |vb| Small::new(style, vb)));
    let functions = [DType::F32, DType::BF16].map(|dtype| every_kind(dtype).executable(Target::Cuda));
    let all = steps.into_iter().chain(functions).flat_map(|executable| launched(&executable));
    all.filter_map(|(family, _)| family.filter(|family| matches!(family, Family::Generated(_)))).collect()
}

/// A function that contains every operation once.
fn every_kind(dtype: DType) -> Function {
    let chosen: Vec<Chosen> = (0..13).map(|kind| (kind, kind as usize, 3 * kind as usize)).collect();
    Function::new(dtype, |parameter| random_function(&chosen, parameter)).unwrap()
}

/// Fused steps have fewer launches and move fewer bytes. Unfused operations can overwrite their inputs as well, so
/// the peak of live bytes need not fall; it must not grow.
#[test]
fn steps_launch_less_and_move_less() {
    for (style, launches) in [(Style::Gpt, [71, 51]), (Style::Llama, [70, 59])] {
        let options = TrainOptions {
            step: StepOptions { batch: BATCH, sequence: SEQUENCE, ..StepOptions::default() },
            ..TrainOptions::default()
        };
        let [apart, fused] =
            [Target::CudaUnfused, Target::Cuda].map(|target| executable(&options, target, |vb| Small::new(style, vb)));
        let [most_apart, most] = [&apart, &fused].map(|executable| lower_bound(executable.problem()));
        let [moved_apart, moved] = [&apart, &fused].map(moved);
        let [of_apart, of_fused] = [&apart, &fused].map(launched);
        let launches_of = format!("{} → {}", of_apart.len(), of_fused.len());
        let line = format!(
            "| {style:?}, one block{} | {launches_of} | {moved_apart} → {moved} | {most_apart} → {most} |",
            if style == Style::Gpt { ", dropout" } else { "" }
        )
        .replace("Gpt", "GPT");
        println!("{line}");
        gapless_testing::assert_on_page("docs/gpu.md", &line);
        let is_generated = |family: &Option<Family>| matches!(family, Some(Family::Generated(_)));
        of_fused.iter().filter(|(family, _)| is_generated(family)).for_each(|(_, name)| println!("  {name}"));
        assert_eq!([of_apart.len(), of_fused.len()], launches, "{style:?}");
        assert!(moved < moved_apart && most <= most_apart, "{style:?}");
    }
}

/// Returns the bytes that the operations of a step read and write, with each operand counted once per operation.
fn moved(executable: &Executable) -> usize {
    let instructions = executable.programs().iter().flat_map(|program| &program.instructions);
    let operands = instructions.flat_map(|instruction| instruction.inputs.iter().chain(&*instruction.outputs));
    operands.map(|operand| operand.span * operand.dtype.size_in_bytes()).sum()
}

/// Values that stay in registers have no buffers. Without fusion, three functions of a parameter have three buffers,
/// and only one is left.
#[test]
fn fused_intermediates_have_no_buffer() {
    let function = Function::forward(DType::F32, |parameter| {
        let x = parameter("x", &SHAPE);
        x.tanh()?.mul(&x.sigmoid()?)?.add(&x.gelu()?)
    });
    let function = function.unwrap();
    let bytes = |target| lower_bound(function.executable(target).problem());
    let tensor = 448; // 105 elements, in whole cache lines.
    assert_eq!([bytes(Target::CudaUnfused), bytes(Target::Cuda)], [3 * tensor, 2 * tensor]);
}

/// Equal layers share a kernel, whatever their constants and addresses are. The name of the kernel lists its
/// operations.
#[test]
fn equal_layers_share_a_kernel() {
    let function = Function::new(DType::BF16, |parameter| {
        let mut x = parameter("x", &SHAPE);
        for layer in 0..3 {
            let more = x.add(&parameter("bias", &[SHAPE[2]]).broadcast_as(SHAPE.to_vec())?)?.tanh()?;
            x = more.affine(0.5 + f64::from(layer), 0.0)?.dropout(0.1)?.contiguous()?.reshape(SHAPE.to_vec())?;
            // The matrix products keep the layers from being fused into one kernel.
            x = x.matmul(&parameter(&format!("matrix {layer}"), &[SHAPE[0], SHAPE[2], SHAPE[2]]))?;
        }
        Ok(x)
    })
    .unwrap();
    let names = |target| -> Vec<String> {
        let listed = launched(&function.executable(target)).into_iter();
        listed.map(|(_, name)| name).filter(|name| name.starts_with("fused_add_")).collect()
    };
    let fused = names(Target::Cuda);
    assert_eq!(fused.len(), 3, "{fused:?}");
    assert!(fused.iter().all(|name| *name == fused[0]), "{fused:?}");
    assert!(fused[0].starts_with("fused_add_tanh_affine_dropout_bf16_"), "{fused:?}");
    assert_eq!(fused, names(Target::Cuda));
    assert!(names(Target::CudaUnfused).is_empty());
}
