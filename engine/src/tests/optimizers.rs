//! Compares every update rule with the f64 reference of the same graph. Before each step, the reference gets the state
//! that the kernels have computed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_alloc::Role;
use gapless_compile::recompute::RematPlan;
use gapless_compile::{CompileOptions, Lowering, Overlap, ProgramId, Target, compile, lower};
use gapless_graph::nn::Init;
use gapless_graph::optim::{
    Adafactor, AdamW, AdamW8bit, GaLore, Lion, Muon, Optimizer, ParameterInfo, ParameterUpdate, SCALARS, State,
    StateInit,
};
use gapless_graph::reference::{Array, evaluate};
use gapless_graph::{Graph, Phase, Source, Spec, Tensor, lock};
use gapless_graph::{Numbers, Stream};
use gapless_parallel::{Action, Kind};
use gapless_runtime::cpu::{CpuBackend, Workers};
use gapless_runtime::{RunOptions, Session};

const LR: f64 = 1e-2;

/// The compiled update of one parameter.
struct Update {
    graph: Arc<Mutex<Graph>>,
    session: Session<CpuBackend>,
    program: ProgramId,
    rule: Arc<dyn Optimizer>,
    /// Names of the parameter and its states.
    names: Vec<String>,
    dims: Vec<usize>,
    step: u64,
}

impl Update {
    fn new(rule: impl Into<Arc<dyn Optimizer>>, dims: &[usize], threads: usize) -> Self {
        let rule = rule.into();
        rule.check().unwrap();
        let graph = Arc::new(Mutex::new(Graph::default()));
        let mut names = vec!["weight".to_owned()];
        let persistent = |name: &str, spec, init| {
            let id = lock(&graph).add_persistent(name, spec, init).unwrap();
            Tensor::of(&graph, id)
        };
        let input = |name, spec| {
            let id = lock(&graph).add_input(name, spec).unwrap();
            Tensor::of(&graph, id)
        };
        lock(&graph).set_phase(Phase::Update);
        let weight = persistent("weight", Spec::f32(dims), Init::Randn { mean: 0.0, stdev: 1.0 });
        let info = ParameterInfo {
            name: "weight",
            dims,
            dtype: DType::F32,
            looked_up: false,
            head: false,
            vectors: false,
            masters: true,
        };
        let states: Vec<Tensor> = rule
            .states(&info)
            .into_iter()
            .map(|State { name, spec, init }| {
                names.push(name.to_owned());
                let StateInit::Init(init) = init else { panic!("{name} begins as the parameter, which is f32") };
                persistent(name, spec, init)
            })
            .collect();
        let (norm, scalars) = (input("norm", Spec::f32(())), input("scalars", Spec::f32(SCALARS)));
        let gradient = input("gradient", Spec::f32(dims));
        let update = ParameterUpdate {
            parameter: &weight,
            info,
            part: Some(0),
            gradient: &gradient,
            states: &states,
            norm: &norm,
            scalars: &scalars,
        };
        rule.update(update).unwrap();
        let workers = Workers::new(threads).unwrap();
        let roles: HashMap<_, _> = states.iter().map(|state| (state.id(), Role::OptimizerState)).collect();
        let program = lower(&Lowering {
            evicts: false,
            overlap: Overlap::default(),
            name: "update",
            graph: &lock(&graph),
            table: &[vec![Action::new(Kind::Forward, 0, 0), Action::new(Kind::Backward, 0, 0)]],
            rank: 0,
            outputs: &[],
            roles: &roles,
            recomputation: &RematPlan::default(),
            target: Target::Cpu { threads },
        })
        .unwrap();
        let executable = compile(&[program], &CompileOptions::default()).unwrap();
        let session = Session::on_cpu(executable, workers, 5).unwrap();
        let program = session.executable().program("update").unwrap();
        Self { graph, session, program, rule, names, dims: dims.to_vec(), step: 0 }
    }

    fn read(&self, name: &str) -> Array {
        let tensor = self.session.tensor(name).unwrap();
        let data = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
        Array::new(tensor.dims(), data)
    }

    fn all(&self) -> Vec<Array> {
        self.names.iter().map(|name| self.read(name)).collect()
    }

    /// Returns a gradient whose columns have different magnitudes, and the gradient's norm, which is large enough to be
    /// clipped.
    fn gradient(&self) -> (Vec<f32>, f32) {
        let numbers = Numbers::from_seed(100 + self.step);
        let columns = self.dims.last().copied().unwrap_or(1);
        let size = |i: usize| 1e-2 * (1.5 * Numbers::from_seed(9).normal(i % columns)).exp();
        let g: Vec<f32> = (0..self.dims.iter().product()).map(|i| (size(i) * numbers.normal(i)) as f32).collect();
        let norm = g.iter().map(|x| x * x).sum::<f32>().sqrt();
        (g, norm)
    }

    /// Runs a step, and returns the reference's results from the same state.
    fn step(&mut self) -> Vec<Array> {
        let (gradient, norm) = self.gradient();
        let scalars = self.rule.scalars(self.step, LR);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
        let mut given: HashMap<String, Array> = self.names.iter().cloned().zip(self.all()).collect();
        given.insert("gradient".into(), Array::new(&self.dims, wide(&gradient)));
        given.insert("norm".into(), Array::new(&[], wide(&[norm])));
        given.insert("scalars".into(), Array::new(&[SCALARS], wide(&scalars)));
        self.run(&gradient, norm, &scalars);
        let graph = lock(&self.graph);
        let values = evaluate(&graph, &given, Stream::new(0, 0, 0));
        let mut expected = HashMap::new();
        for node in graph.nodes() {
            for &(input, output) in node.op.mutates() {
                if let Source::Persistent { name, .. } = &graph.value(node.inputs[input]).source {
                    expected.insert(name.as_str(), values[node.outputs[output].index()].clone());
                }
            }
        }
        self.names.iter().map(|name| expected[name.as_str()].clone()).collect()
    }

    fn run(&mut self, gradient: &[f32], norm: f32, scalars: &[f32]) {
        for (name, data) in [("gradient", gradient), ("norm", &[norm]), ("scalars", scalars)] {
            self.session.write_input(self.program, name, 0, data).unwrap();
        }
        self.session.run(self.program, RunOptions { poison: true, ..RunOptions::default() }).unwrap();
        self.step += 1;
    }
}

fn distance(a: &Array, b: &Array) -> f64 {
    a.zip(b, |a, b| a - b).data.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// The tolerance allows for f32 rounding of 6e-8, and for sums of some hundred products, which lose a digit or two.
/// GaLore's new projections lose another digit, because the error of an orthonormalization grows with the condition
/// number of the matrix, which is random here.
fn check(rule: impl Into<Arc<dyn Optimizer>>, dims: &[usize], tolerance: f64) {
    let mut update = Update::new(rule, dims, 2);
    for step in 0..7 {
        let before = update.all();
        let expected = update.step();
        for ((name, got), (before, expected)) in update.names.iter().zip(update.all()).zip(before.iter().zip(&expected))
        {
            let place = format!("{name} of {dims:?} at step {step} of {:?}", update.rule);
            assert_eq!(got.dims, expected.dims, "{place}");
            if name.ends_with("8bit") {
                // A value half way between two codes may be rounded either way.
                let differing = got.data.iter().zip(&expected.data).filter(|(a, b)| a != b).count();
                assert!(differing <= 1 + got.data.len() / 1000, "{place}: {differing} codes differ");
                continue;
            }
            let zeros = Array::zeros(&got.dims);
            let rounding = 6e-8 * distance(&got, &zeros);
            let scale = if name == "weight" { distance(expected, before) } else { distance(expected, &zeros) };
            let error = distance(&got, expected);
            assert!(scale > 0.0, "{place}: nothing happened");
            assert!(error <= tolerance * scale + rounding, "{place}: {error:e} of {scale:e}");
        }
    }
}

#[test]
fn kernels_are_their_references() {
    check(AdamW::default(), &[40, 300], 1e-5);
    let eight_bit = AdamW8bit { smallest: 0, ..AdamW8bit::default() };
    // The sizes give only whole blocks, or a short last block, or a single element.
    for dims in [&[64, 512][..], &[37, 301], &[5000], &[1]] {
        check(eight_bit, dims, 1e-5);
    }
    let galore = GaLore { rank: 8, refresh_steps: 3, ..GaLore::default() };
    for dims in [[40, 100], [100, 40], [64, 64]] {
        check(galore, &dims, 1e-3);
    }
    check(Lion::default(), &[40, 300], 1e-5);
    // Newton–Schulz iterations amplify small components of a matrix by a factor of 500, together with their rounding
    // errors. In a tensor of several experts, each expert is a matrix of its own.
    for dims in [&[40, 100][..], &[100, 40], &[64, 64], &[3, 20, 30]] {
        check(Muon::default(), dims, 1e-4);
    }
    check(Muon::default(), &[40], 1e-5);
    let adafactor = Adafactor { weight_decay: 0.1, max_norm: 1.0, ..Adafactor::default() };
    for dims in [&[40, 300][..], &[3, 20, 30], &[50], &[1], &[7, 1]] {
        check(adafactor, dims, 1e-5);
    }
}

/// Newton–Schulz iterations bring the singular values of Muon's update near 1. The size of the step is the one that is
/// usual for AdamW.
#[test]
fn steps_of_muon_are_nearly_orthogonal() {
    let mut update =
        Update::new(Muon { rule: AdamW { weight_decay: 0.0, ..AdamW::default() }, ..Muon::default() }, &[24, 60], 1);
    let before = update.read("weight");
    update.step();
    let step = update.read("weight").zip(&before, |after, before| (before - after) / LR);
    let mean_square = step.data.iter().map(|x| x * x).sum::<f64>() / step.data.len() as f64;
    assert!((0.15..0.25).contains(&mean_square.sqrt()), "{}", mean_square.sqrt());
    // Apart from the scale, the rows are nearly orthonormal.
    let scale = 0.2 * 60f64.sqrt();
    let row = |i: usize| step.data[i * 60..(i + 1) * 60].iter().map(|x| x / scale);
    for i in 0..24 {
        for j in 0..24 {
            let product: f64 = row(i).zip(row(j)).map(|(a, b)| a * b).sum();
            let expected = if i == j { 0.5..1.5 } else { -0.3..0.3 };
            assert!(expected.contains(&product), "rows {i} and {j}: {product}");
        }
    }
}

/// The description of an f32 parameter that is neither a table, a head nor a list of vectors.
pub(super) fn info(dims: &[usize]) -> ParameterInfo<'_> {
    ParameterInfo {
        name: "parameter",
        dims,
        dtype: DType::F32,
        looked_up: false,
        head: false,
        vectors: false,
        masters: true,
    }
}

/// A list of vectors, such as the biases of experts, has the states of a vector, and a head those of AdamW under Muon.
#[test]
fn lists_of_vectors_and_heads_are_no_matrices() {
    let eight_bit: Arc<dyn Optimizer> = AdamW8bit::default().into();
    let galore: Arc<dyn Optimizer> = GaLore { rank: 4, ..GaLore::default() }.into();
    let adam: Arc<dyn Optimizer> = AdamW::default().into();
    let names = |rule: &Arc<dyn Optimizer>, info: &ParameterInfo<'_>| -> Vec<&str> {
        rule.states(info).iter().map(|state| state.name).collect()
    };
    let muon: Arc<dyn Optimizer> = Muon::default().into();
    for rule in [eight_bit, galore, Lion::default().into(), muon.clone(), Adafactor::default().into()] {
        let vectors = ParameterInfo { vectors: true, ..info(&[8, 40]) };
        assert_eq!(names(&rule, &vectors), names(&rule, &info(&[320])), "{rule:?}");
    }
    let matrix = info(&[8, 40]);
    assert_eq!(names(&muon, &matrix), ["momentum"]);
    assert_eq!(names(&muon, &ParameterInfo { head: true, ..matrix }), names(&adam, &matrix));
}

#[test]
fn threads_change_no_bit() {
    let eight_bit: Arc<dyn Optimizer> = AdamW8bit::default().into();
    let galore: Arc<dyn Optimizer> = GaLore { rank: 16, refresh_steps: 2, ..GaLore::default() }.into();
    for rule in [eight_bit, galore, Lion::default().into(), Muon::default().into(), Adafactor::default().into()] {
        let on = |threads| {
            let mut update = Update::new(rule.clone(), &[300, 200], threads);
            (0..4).for_each(|_| _ = update.step());
            update.all()
        };
        assert_eq!(on(1), on(3), "{rule:?}");
    }
}

#[test]
fn a_norm_that_is_not_finite_changes_nothing() {
    let eight_bit: Arc<dyn Optimizer> = AdamW8bit { smallest: 0, ..AdamW8bit::default() }.into();
    let galore: Arc<dyn Optimizer> = GaLore { rank: 4, refresh_steps: 1, ..GaLore::default() }.into();
    for rule in [eight_bit, galore, Lion::default().into(), Muon::default().into(), Adafactor::default().into()] {
        let mut update = Update::new(rule, &[20, 30], 2);
        update.step();
        let before = update.all();
        let (gradient, scalars) = (update.gradient().0, update.rule.scalars(1, LR));
        update.run(&gradient, f32::NAN, &scalars);
        assert_eq!(update.all(), before);
    }
}

#[test]
fn settings_without_sense_are_refused() {
    let adam = AdamW { beta1: 1.0, ..AdamW::default() };
    let rules: [(Arc<dyn Optimizer>, &str); 8] = [
        (Adafactor { clip_threshold: 0.0, ..Adafactor::default() }.into(), "clip_threshold"),
        (Lion { beta2: 1.0, ..Lion::default() }.into(), "beta"),
        (Muon { momentum: 1.0, ..Muon::default() }.into(), "momentum"),
        (Muon { iterations: 0, ..Muon::default() }.into(), "iterations"),
        (adam.into(), "beta"),
        (AdamW8bit { rule: adam, ..AdamW8bit::default() }.into(), "beta"),
        (GaLore { rank: 0, ..GaLore::default() }.into(), "rank 0"),
        (GaLore { alpha: f64::NAN, ..GaLore::default() }.into(), "alpha NaN"),
    ];
    for (rule, word) in rules {
        let error = rule.check().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
}
