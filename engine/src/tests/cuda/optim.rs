//! The kernels of adamw.cu.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Layout};
use gapless_graph::{Numbers, Stream};
use gapless_testing::few;

use super::judge::{Stored, judge, judge_graph};
use super::memory::Region;
use super::trainer::numbers;
use super::{gpu, host};
use crate::cuda::launch::{AdamWRule, adamw, together};
use crate::cuda::{Features, Operand, Operands, Random};
use crate::gradient_check::random_array;
use crate::graph::{Graph, Phase, Spec, lock};
use crate::nn::Init;
use crate::optim::{
    Adafactor, AdamW, AdamW8bit, GaLore, GlobalNorm, Lion, LoadBias, Muon, Optimizer, ParameterInfo, ParameterUpdate,
    SCALARS, SquaredNorms, WeightAverage,
};
use crate::reference::Array;
use crate::runtime::RunOptions;
use crate::tests::optimizers::info;
use crate::{Op, Tensor};

fn stored(count: usize, seed: u64, dtype: DType) -> Stored {
    let numbers = Numbers::from_seed(seed);
    let data = (0..count).map(|i| numbers.normal(i)).collect();
    Stored { data, layout: Layout::contiguous(count), dtype }.rounded()
}

fn judge_alone(op: &dyn Op, inputs: &[Stored]) {
    let specs: Vec<Spec> =
        inputs.iter().map(|input| Spec { shape: input.layout.shape().clone(), dtype: input.dtype }).collect();
    let outputs = op.infer(&specs).unwrap();
    assert!(judge(op, inputs, &specs, &outputs, Stream::new(1, 1, 0)), "{op:?} has kernels");
}

#[test]
fn norms_of_many_tensors() {
    if !host::is_there() {
        return;
    }
    // There are more tensors than one launch takes, and some of them take several blocks.
    for dtype in [DType::F32, DType::BF16] {
        let inputs: Vec<Stored> =
            (0..163).map(|i| stored(if i % 81 == 33 { 33_000 } else { 1 + 7 * i as usize }, i, dtype)).collect();
        judge_alone(&SquaredNorms, &inputs);
    }
    let squares = |count, seed| {
        let of = stored(count, seed, DType::F64);
        Stored { data: of.data.iter().map(|x| x * x).collect(), ..of }
    };
    judge_alone(&GlobalNorm, &[squares(300, 1), squares(1, 2), squares(17, 3)]);
    let many: Vec<Stored> = (0..175).map(|i| squares(1 + i as usize % 3, i)).collect();
    judge_alone(&GlobalNorm, &many);
    // Squares that are not finite must make the norm non-finite.
    let broken = Stored { data: vec![1.0, f64::NAN, 3.0, 2.0], ..squares(4, 1) };
    let scalar = [Spec::f32(())];
    let got = super::judge::outputs(&GlobalNorm, &[broken], &scalar, Stream::new(1, 1, 0));
    assert!(got[0][0].is_nan());
}

/// Many parameters at once, in f32 and in bf16 with f32 masters, compared with f64. If the norm is not finite,
/// nothing changes.
#[test]
fn updates_of_many_parameters() {
    if !host::is_there() {
        return;
    }
    let rule = AdamWRule { max_norm: 1.0, beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    let scalars = Region::of(&[1e-2, 0.19, 0.0975], DType::F32);
    let (f32, bf16) = (DType::F32, DType::BF16);
    let ways = [(f32, f32, 2.5), (bf16, bf16, 0.5), (bf16, f32, 2.5), (f32, f32, f64::NAN), (f32, f32, f64::INFINITY)];
    for &(dtype, sums, norm) in few(&ways, 2) {
        let norm_at = Region::of(&[norm], DType::F32);
        let counts: Vec<usize> = (0..62).map(|i| if i == 2 { 5000 } else { 1 + 5 * i }).collect();
        let make = |seed: u64, dtype| -> Vec<Region> {
            counts.iter().zip(0..).map(|(&n, i)| Region::of(&stored(n, seed + i, dtype).data, dtype)).collect()
        };
        let (parameters, gradients) = (make(0, dtype), make(100, sums));
        let (masters, m) = (make(0, DType::F32), make(200, DType::F32));
        let v: Vec<Region> =
            make(300, DType::F32).iter().map(|v| Region::of(&squares(&v.numbers()), DType::F32)).collect();
        let before: Vec<[Vec<f64>; 4]> = (0..counts.len())
            .map(|i| {
                let parameter = if dtype == DType::BF16 { &masters[i] } else { &parameters[i] };
                [parameter.numbers(), gradients[i].numbers(), m[i].numbers(), v[i].numbers()]
            })
            .collect();
        let decay = |i: usize| if i.is_multiple_of(2) { 0.1 } else { 0.0 };
        let one_by_one = (0..counts.len()).flat_map(|i| {
            let operand = |region: &Region, dtype| Operand {
                address: region.address(),
                layout: Layout::contiguous(counts[i]),
                dtype,
            };
            let mut inputs = vec![operand(&parameters[i], dtype), operand(&gradients[i], sums)];
            inputs.extend([&m[i], &v[i], &norm_at, &scalars].map(|region| operand(region, DType::F32)));
            inputs.extend((dtype == DType::BF16).then(|| operand(&masters[i], DType::F32)));
            let random = Random { key: 0, micro_batch: 0 };
            let (outputs, workspace, features) = (&[], &[], Features::default());
            let operands =
                Operands { inputs: &inputs, outputs, workspace, accumulate: 0, tickets: 0, random, features };
            adamw(rule, decay(i), None, &operands).unwrap()
        });
        let launches = together(one_by_one.enumerate().collect());
        assert_eq!(launches.len(), 2, "62 tensors, 60 at a time");
        for (_, launch) in launches {
            // SAFETY: every region has as many elements as its tensor.
            unsafe { host::run(&launch, false) }.unwrap();
        }
        assert!([&parameters, &masters, &m, &v].into_iter().flatten().all(Region::is_intact));
        for (i, [p, g, m_before, v_before]) in before.iter().enumerate() {
            for j in 0..counts[i] {
                let [p, g, m0, v0] = [p[j], g[j], m_before[j], v_before[j]];
                let g = g * (1.0 / (norm + 1e-6)).min(1.0);
                let (mut m1, mut v1) = (0.9 * m0 + 0.1 * g, 0.95 * v0 + 0.05 * g * g);
                let mut p1 = p * (1.0 - 1e-2 * decay(i)) - 1e-2 / 0.19 * m1 / ((v1 / 0.0975).sqrt() + 1e-8);
                if !norm.is_finite() {
                    (m1, v1, p1) = (m0, v0, p);
                }
                // The tolerance is a few f32 roundings, and an additional 2⁻⁸ for parameters stored in bf16.
                let close = |got: f64, exact: f64, error: f64| {
                    assert!((got - exact).abs() <= error * (1.0 + exact.abs()), "{got} is not {exact}");
                };
                close(m[i].numbers()[j], m1, 1e-6);
                close(v[i].numbers()[j], v1, 1e-6);
                close(parameters[i].numbers()[j], p1, if dtype == DType::BF16 { 4e-3 } else { 1e-6 });
                if dtype == DType::BF16 {
                    close(masters[i].numbers()[j], p1, 1e-6);
                }
            }
        }
    }
}

/// The update of one parameter by every rule, in the form that a compiled step contains: in f32, in bf16 with masters,
/// and in bf16 alone. Covers vectors, tall and wide matrices, and tensors of several matrices.
#[test]
fn the_update_of_one_parameter() {
    if !host::is_there() {
        return;
    }
    let eight_bit = AdamW8bit { smallest: 0, ..AdamW8bit::default() };
    let adafactor = Adafactor { weight_decay: 0.1, max_norm: 1.0, ..Adafactor::default() };
    let rules: [(&str, &dyn Optimizer, &[&[usize]]); 5] = [
        ("adamw", &AdamW::default(), &[&[3, 700]]),
        ("adamw_8bit", &eight_bit, &[&[3, 700], &[5]]),
        ("lion", &Lion::default(), &[&[3, 700]]),
        ("muon", &Muon { iterations: 1, ..Muon::default() }, &[&[5, 12], &[2, 9, 4]]),
        ("adafactor", &adafactor, &[&[3, 70], &[2, 40, 5], &[300], &[7, 1]]),
    ];
    for (name, rule, shapes) in rules {
        for &dims in shapes {
            for (dtype, masters) in [(DType::F32, true), (DType::BF16, true), (DType::BF16, false)] {
                let of = [random_array(dims, 1), random_array(dims, 2)];
                judge_update(rule, name, of, 2.5, ParameterInfo { dtype, masters, ..info(dims) });
            }
        }
    }
    // The scalars are those of step 3, which recomputes a projection, or keeps it.
    for refresh_steps in [3, 2] {
        let galore = GaLore { rank: 2, refresh_steps, ..GaLore::default() };
        for dims in [[4, 9], [9, 4], [5, 5]] {
            judge_update(&galore, "galore", [random_array(&dims, 1), random_array(&dims, 2)], 2.5, info(&dims));
        }
    }
}

/// Stochastic rounding gives the bits of the CPU: of a whole parameter and of its parts, in one block and in several, with
/// packs and without, and of several parameters per launch. A GPU rounds a product and the following sum once, so its f32
/// values differ in the last bits. Few of them are then rounded to another bf16 number, with or without stochastic rounding.
#[test]
fn stochastic_rounding_has_the_bits_of_the_cpu() {
    if !host::is_there() {
        return;
    }
    let stream = Stream::new(1, 1, 0);
    let rule = AdamW { stochastic_rounding: true, ..AdamW::default() };
    for dims in [&[3, 700][..], &[5], &[41, 101]] {
        let info = ParameterInfo { dtype: DType::BF16, masters: false, ..info(dims) };
        let bits = |stochastic_rounding: bool| {
            let rule = AdamW { stochastic_rounding, ..rule };
            let (graph, given) = recorded(&rule, [random_array(dims, 1), random_array(dims, 2)], 2.5, info);
            let graph = lock(&graph);
            let node = graph.nodes().last().unwrap();
            let mut session = crate::gradient_check::session(&graph, &[]).unwrap();
            let program = session.executable().program("check").unwrap();
            for (name, array) in &given {
                let data: Vec<f32> = array.data.iter().map(|&x| x as f32).collect();
                match name.as_str() {
                    "norm" | "scalars" => session.write_input(program, name, 0, &data).unwrap(),
                    _ => session.write_tensor(name, &data).unwrap(),
                }
            }
            session.run(program, RunOptions { seed: 1, step: 1, ..RunOptions::default() }).unwrap();
            let on_cpu = ["parameter", "exp_avg", "exp_avg_sq"].map(|name| numbers(&session.tensor(name).unwrap()));
            let names = ["parameter", "gradient", "exp_avg", "exp_avg_sq", "norm", "scalars"];
            let stored = |(name, spec): (&str, &Spec)| {
                let layout = Layout::contiguous(spec.shape.clone());
                Stored { data: given[name].data.clone(), layout, dtype: spec.dtype }.rounded()
            };
            let inputs: Vec<Stored> = names.into_iter().zip(&graph.specs(&node.inputs)).map(stored).collect();
            let on_device = super::judge::outputs(&*node.op, &inputs, &graph.specs(&node.outputs), stream);
            let pairs: Vec<_> = on_cpu.iter().flatten().zip(on_device.iter().flatten()).collect();
            let others = pairs.iter().filter(|(cpu, device)| cpu != device).count();
            let most = if gpu::is_asked_for() { pairs.len().div_ceil(100) } else { 0 };
            assert!(others <= most, "{dims:?}, stochastic: {stochastic_rounding}: {others} of {}", pairs.len());
            assert!(pairs.iter().all(|(cpu, device)| (*cpu - *device).abs() <= cpu.abs() / 128.0));
            on_cpu
        };
        assert_ne!(bits(true), bits(false));
    }
}

#[test]
fn the_average_of_a_parameter() {
    if !host::is_there() {
        return;
    }
    let count = 700;
    for (dtype, norm) in [(DType::F32, 2.5), (DType::BF16, 2.5), (DType::F32, f64::NAN)] {
        let norm = Stored { data: vec![norm], layout: Layout::contiguous(()), dtype: DType::F32 };
        let of = [stored(count, 1, DType::F32), stored(count, 2, dtype), norm];
        judge_alone(&WeightAverage { decay: 0.75 }, &of);
    }
}

/// There are cases with more experts than a block has threads, and with only a few. Some experts have exactly the
/// mean load. If the norm is not finite, nothing changes.
#[test]
fn the_update_of_a_routers_bias() {
    if !host::is_there() {
        return;
    }
    for (experts, norm) in [(5, 2.5), (3000, 2.5), (5, f64::NAN), (5, f64::INFINITY)] {
        let load = Array::new(&[experts], (0..experts).map(|expert| (expert % 5) as f64).collect());
        let of = [random_array(&[experts], 1), load];
        judge_update(&LoadBias { rate: 0.25 }, "load_bias", of, norm, info(&[experts]));
    }
}

/// Records an optimizer's update of a parameter, given (parameter, gradient) and the norm of all gradients. States are
/// random. Returns the graph and the values of its tensors.
fn recorded(
    rule: &dyn Optimizer,
    of: [Array; 2],
    norm: f64,
    info: ParameterInfo<'_>,
) -> (Arc<Mutex<Graph>>, HashMap<String, Array>) {
    let graph = Arc::new(Mutex::new(Graph::default()));
    lock(&graph).set_phase(Phase::Update);
    let mut given = HashMap::new();
    let mut add = |name: &str, array: &Array, dtype: DType, is_persistent: bool| {
        given.insert(name.to_owned(), array.clone());
        let spec = Spec { shape: array.dims.clone().into(), dtype };
        let id = match is_persistent {
            true => lock(&graph).add_persistent(name, spec, Init::Const(0.0)),
            false => lock(&graph).add_input(name, spec),
        };
        Tensor::of(&graph, id.unwrap())
    };
    let [parameter, gradient] = of;
    let parameter = add("parameter", &parameter, info.dtype, true);
    let gradient = add("gradient", &gradient, rule.sum_dtype(&info), true);
    let states = rule.states(&info).into_iter().zip(3..).map(|(state, seed)| {
        let random = random_array(state.spec.dims(), seed);
        let array = match state.name {
            "projection" => {
                // Rows of a projection have length 1; the test does not need them to be orthogonal.
                let width = state.spec.dims()[1];
                Array::new(&random.dims, random.data.iter().map(|x| x / (width as f64).sqrt()).collect())
            }
            _ if state.spec.dtype == DType::U8 => codes(&random),
            name if name.ends_with("sq") || name.ends_with("scale") => random.map(|x| x * x),
            _ => random,
        };
        add(state.name, &array, state.spec.dtype, true)
    });
    let states: Vec<Tensor> = states.collect();
    let scalars = Array::new(&[SCALARS], rule.scalars(3, 1e-2).map(f64::from).to_vec());
    let norm = add("norm", &Array::new(&[], vec![norm]), DType::F32, false);
    let scalars = add("scalars", &scalars, DType::F32, false);
    rule.update(ParameterUpdate {
        parameter: &parameter,
        info,
        part: Some(0),
        gradient: &gradient,
        states: &states,
        norm: &norm,
        scalars: &scalars,
    })
    .unwrap();
    (graph, given)
}

/// Checks an update that [`recorded`] has recorded. If the norm is not finite, nothing may change.
fn judge_update(rule: &dyn Optimizer, name: &str, of: [Array; 2], norm: f64, info: ParameterInfo<'_>) {
    let has_master = info.masters && rule.states(&info).iter().any(|state| state.name == "master");
    let (graph, given) = recorded(rule, of, norm, info);
    let graph = lock(&graph);
    assert!(judge_graph(&graph, &given).with_kernels.contains(name), "{name} has kernels for {info:?}");
    for node in graph.nodes().iter().filter(|node| !node.op.mutates().is_empty()) {
        let (inputs, outputs) = (graph.specs(&node.inputs), graph.specs(&node.outputs));
        let stored = |(seed, spec): (u64, &Spec)| match spec.dims() {
            [] => Stored { data: vec![f64::NAN], layout: Layout::contiguous(()), dtype: DType::F32 },
            dims => {
                let random = random_array(dims, seed);
                let data = if spec.dtype == DType::U8 { codes(&random) } else { random.map(|x| x * x) }.data;
                Stored { data, layout: Layout::contiguous(dims), dtype: spec.dtype }.rounded()
            }
        };
        let inputs: Vec<Stored> = (0..).zip(&inputs).map(stored).collect();
        let got = super::judge::outputs(&*node.op, &inputs, &outputs, Stream::new(1, 1, 0));
        for &(input, output) in node.op.mutates() {
            // A parameter with a master becomes the rounded master, which is its own value in training.
            let has_master = output == 0 && has_master;
            assert!(has_master || got[output] == inputs[input].data, "{name}: a step that is skipped changes {output}");
        }
    }
}

/// Returns 8-bit codes, none of which is 0, from random elements.
fn codes(random: &Array) -> Array {
    random.map(|x| (1.0 + 60.0 * x.abs()).round().min(255.0))
}

fn squares(x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| x * x).collect()
}
