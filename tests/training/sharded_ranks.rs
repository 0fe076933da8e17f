//! Ranks that divide gradients, optimizer states and parameters (ZeRO stages 2 and 3, hybrid sharding) give the results of
//! one rank.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;

use gapless::alloc::Role;
use gapless::alloc::draw::Bytes;
use gapless::communicator::on_threads;
use gapless::engine::compile::{Buffer, BufferKind, CompileOptions, Instr, InstrKind, Operand, Program, compile};
use gapless::engine::ops::Collective;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, MoeStyle};
use gapless::parallel::{Axes, by_name};
use gapless::{
    AdamW, GenerateOptions, Layers, Lora, Mesh, Overflow, Precision, Recompute, StepOptions, TrainOptions, Trainable,
    Trainer,
};
use gapless_testing::in_turn;

use crate::common::{Kind, TinyRun, on_cpu};
use crate::tensor_ranks::{Outcome, STEPS, checkpoints_go_around, close, run};

/// Number of parts of a batch: micro-batches of all ranks together.
const PARTS: usize = 8;

fn mesh(data: usize, shard: usize, tensor: usize) -> Mesh {
    Mesh { data, shard, tensor, ..Mesh::default() }
}

fn case(kind: Kind, mesh: Mesh) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.threads = 1;
    run.options.step.micro_batches = PARTS / (mesh.data * mesh.shard * mesh.expert);
    run.options.step.mesh = mesh;
    run
}

/// Compares the first moments after one step, which are gradients times a number that is equal for all.
fn same_gradients(outcome: &Outcome, expected: &Outcome, what: &str) {
    let moments = |outcome: &Outcome| outcome.tensors.keys().filter(|name| name.starts_with("exp_avg/")).count();
    assert!(moments(expected) > 0 && moments(outcome) == moments(expected), "{what}");
    for (name, a) in outcome.tensors.iter().filter(|(name, _)| name.starts_with("exp_avg/")) {
        let b = &expected.tensors[name];
        let distance = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let norm = b.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
        assert!(distance <= 1e-5 * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
    }
}

/// Bits of everything that a run computes.
fn bits(outcome: &Outcome) -> Vec<(&str, Vec<u32>)> {
    let of = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    let tensors = outcome.tensors.iter().map(|(name, values)| (name.as_str(), of(values)));
    [("losses", of(&outcome.losses)), ("norms", of(&outcome.norms))].into_iter().chain(tensors).collect()
}

/// Asserts that two runs compute the same bits.
fn same_bits(outcome: &Outcome, expected: &Outcome, what: &str) {
    for ((name, a), (other, b)) in bits(outcome).into_iter().zip(bits(expected)) {
        assert_eq!(name, other, "{what}");
        assert!(a == b, "{what}: {name}");
    }
}

#[test]
fn shard_ranks_train_as_one_rank_does() {
    let meshes = [mesh(1, 2, 1), mesh(1, 4, 1), mesh(2, 2, 1), mesh(1, 2, 2)];
    for (turn, kind) in [Kind::Gpt, Kind::Llama, Kind::Moe(MoeStyle::Qwen)].into_iter().enumerate() {
        let one = case(kind, Mesh::default());
        let (first, all) = (run(&one, 1), run(&one, STEPS));
        for &mesh in in_turn(&meshes, turn) {
            let what = format!("{kind:?} on {mesh:?}");
            let sharded = case(kind, mesh);
            same_gradients(&run(&sharded, 1), &first, &what);
            let outcome = run(&sharded, STEPS);
            assert!(!outcome.split.is_empty(), "{what}");
            close(&outcome, &all, &what);
        }
    }
}

/// Stages and tensor ranks beside shard ranks; a tied table is read by two stages.
#[test]
fn stages_tensor_ranks_and_shard_ranks_train_as_one_rank_does() {
    let meshes = [
        (Kind::Llama, Mesh { pipeline: 2, ..mesh(1, 2, 2) }, "1f1b"),
        (Kind::Gpt, Mesh { pipeline: 2, ..mesh(1, 2, 1) }, "zb-h1"),
        (Kind::Gpt, Mesh { pipeline: 2, ..mesh(2, 2, 1) }, "gpipe"),
    ];
    for (kind, mesh, schedule) in meshes {
        let one = case(kind, Mesh::default());
        let mut sharded = case(kind, mesh);
        sharded.options.step.pipeline.schedule = by_name(schedule).unwrap().into();
        let what = format!("{kind:?} on {mesh:?}, {schedule}");
        same_gradients(&run(&sharded, 1), &run(&one, 1), &what);
        close(&run(&sharded, STEPS), &run(&one, STEPS), &what);
    }
}

/// Each expert's gradient is that of one rank, and copies stay equal.
#[test]
fn experts_are_divided_too() {
    let kind = Kind::Moe(MoeStyle::Qwen);
    let sharded = case(kind, Mesh { expert: 2, ..mesh(1, 2, 1) });
    let (first, all) = (run(&case(kind, Mesh { expert: 2, ..mesh(1, 1, 1) }), 1), run(&sharded, 1));
    same_gradients(&all, &first, "experts");
    let is_divided = |name: &&String| name.contains("experts");
    assert!(all.split.iter().any(|name| is_divided(&name)), "{:?}", all.split);
}

/// Every row of a tied table whose number of rows is odd changes as on one rank.
#[test]
fn a_tied_table_of_odd_rows_is_updated_in_all_rows() {
    let config = GptConfig { vocabulary: 51, sequence: 24, layers: 1, heads: 2, width: 48, ..GptConfig::default() };
    let losses = |shard: usize| {
        let step =
            StepOptions { batch: 4, micro_batches: 4 / shard, sequence: 24, mesh: mesh(1, shard, 1), ..on_cpu().step };
        let options = TrainOptions { threads: 1, seed: 3, step, ..on_cpu() };
        let ids: Vec<u32> = (0..4 * 24).map(|i| i * 7 % 51).collect();
        let ranks = on_threads(shard, |world| {
            let mut trainer =
                Trainer::builder(|vb| Gpt::new(&config, vb), options.clone()).distributed(world).build()?;
            for _ in 0..2 {
                trainer.step(&ids, &ids)?;
            }
            let window = trainer.window("wte.weight")?;
            let table = trainer.tensor("wte.weight")?.flatten_all()?.to_vec1::<f32>()?;
            Ok((window, table))
        });
        let mut all = vec![0.0; 51 * 48];
        for (window, table) in ranks.unwrap() {
            window.runs().flatten().zip(table).for_each(|(index, value)| all[index] = value);
        }
        all
    };
    let one = losses(1);
    for shard in [2, 4] {
        let other = losses(shard);
        let distance = one.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(distance <= 1e-4, "{shard} ranks: {distance}");
    }
}

/// Stage 3 computes the bits of stage 2, whatever is recomputed, and however much is under way.
#[test]
fn stages_2_and_3_and_any_overlap_have_the_same_bits() {
    let cases = [
        (Kind::Gpt, mesh(1, 2, 1), "1f1b", Recompute::None),
        (Kind::Llama, mesh(2, 2, 1), "1f1b", Recompute::Layers(Layers::All)),
        (Kind::Moe(MoeStyle::Qwen), mesh(1, 2, 2), "1f1b", Recompute::None),
        (Kind::Gpt, Mesh { pipeline: 2, ..mesh(1, 2, 1) }, "zb-h1", Recompute::Layers(Layers::First(1))),
    ];
    for (kind, mesh, schedule, recompute) in cases {
        let what = format!("{kind:?} on {mesh:?}, {recompute:?}");
        let with = |zero_stage, prefetch, reductions| {
            let mut case = case(kind, mesh);
            let step = &mut case.options.step;
            step.memory.recompute = recompute.clone();
            step.pipeline.schedule = by_name(schedule).unwrap().into();
            (step.zero_stage, step.prefetch, step.reductions) = (zero_stage, prefetch, reductions);
            run(&case, 2)
        };
        let expected = with(2, 1, 1);
        for (prefetch, reductions) in [(0, 0), (1, 1), (3, 2)] {
            same_bits(&with(3, prefetch, reductions), &expected, &format!("{what}: {prefetch}, {reductions}"));
        }
        same_bits(&with(2, 1, 3), &expected, &what);
    }
}

#[test]
fn bf16_with_masters_recomputed_layers_and_adapters_train_as_one_rank_does() {
    let targets = ["q_proj", "down_proj"].map(str::to_owned).to_vec();
    let lora = Trainable::Lora(Lora { rank: 8, alpha: 16.0, targets, ..Lora::default() });
    type Change<'a> = &'a dyn Fn(&mut StepOptions);
    let changes: [(&str, Change<'_>); 3] = [
        ("bf16", &|step| step.precision = Precision::Bf16),
        ("recomputed layers", &|step| step.memory.recompute = Recompute::Layers(Layers::All)),
        ("adapters", &|step| step.trainable = lora.clone()),
    ];
    for (what, change) in changes {
        let of = |mesh| {
            let mut case = case(Kind::Llama, mesh);
            change(&mut case.options.step);
            case
        };
        let (one, sharded) = (run(&of(Mesh::default()), 1), run(&of(mesh(1, 2, 1)), 1));
        same_gradients(&sharded, &one, what);
        assert!((sharded.losses[0] - one.losses[0]).abs() <= 1e-6 * one.losses[0], "{what}");
        assert!(sharded.split.iter().any(|name| name.ends_with("gate_proj.weight")), "{what}: {:?}", sharded.split);
    }
}

/// The meshes among which checkpoints go.
fn meshes() -> [Mesh; 6] {
    [mesh(1, 2, 1), mesh(1, 4, 1), mesh(2, 1, 1), Mesh::default(), mesh(1, 2, 2), mesh(2, 2, 1)]
}

#[test]
fn checkpoints_go_from_sharded_mesh_to_mesh() {
    checkpoints_go_around(meshes().len(), |_, mesh| case(Kind::Llama, meshes()[mesh]));
}

/// Clipping by value and by norm, and an average of the weights, go by parts.
#[test]
fn clipped_steps_and_averages_are_those_of_one_rank() {
    let of = |mesh| {
        let mut case = case(Kind::Llama, mesh);
        case.options.step.optimizer = AdamW { max_norm: 0.1, ..AdamW::default() }.into();
        case.options.step.update.max_value = Some(0.02);
        case.options.step.update.average = Some(0.9);
        run(&case, 8)
    };
    let (one, sharded) = (of(Mesh::default()), of(mesh(2, 2, 1)));
    assert!(one.tensors.keys().any(|name| name.starts_with("average/")));
    for (a, b) in sharded.losses.iter().zip(&one.losses).chain(sharded.norms.iter().zip(&one.norms)) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{a} instead of {b}");
    }
}

/// All ranks evaluate and continue texts together, as one rank does.
#[test]
fn shard_ranks_evaluate_and_generate_together() {
    let one = case(Kind::Llama, Mesh::default());
    let (tokens, targets) = one.batch(0);
    let with = |mut trainer: Trainer| {
        let count = trainer.options().step.evaluation_batch() * trainer.options().step.sequence;
        let loss = trainer.evaluate(&tokens[..count], &targets[..count]).unwrap();
        let logits = trainer.logits(&tokens[..24]).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let greedy = GenerateOptions::greedy(6);
        let text = trainer.generate(&[&tokens[..5]], &greedy, |_| ControlFlow::Continue(())).unwrap();
        (loss, logits, text)
    };
    let expected = with(one.trainer());
    for caches in [false, true] {
        let mut sharded = case(Kind::Llama, mesh(1, 2, 1));
        sharded.options.step.generation = caches.then(gapless::Generation::default);
        for found in sharded.on_ranks(with) {
            assert!(found == expected, "caches: {caches}");
        }
    }
}

fn program(layers: usize, mesh: Mesh, change: impl Fn(&mut StepOptions)) -> Program {
    program_of((layers, 64), mesh, change)
}

fn program_of((layers, width): (usize, usize), mesh: Mesh, change: impl Fn(&mut StepOptions)) -> Program {
    let config =
        LlamaConfig { vocabulary: 64, layers, heads: 4, kv_heads: 2, width, hidden: 96, ..LlamaConfig::default() };
    let mut options = case(Kind::Llama, mesh).options;
    options.step.memory.recompute = Recompute::Layers(Layers::All);
    change(&mut options.step);
    gapless::plan::program(|vb| Llama::new(&config, vb), &options, 0).unwrap()
}

/// True for a collective that gathers a parameter, and for one that sums a gradient over shard ranks.
fn kinds(program: &Program, index: usize) -> [bool; 2] {
    let instr = &program.instrs[index];
    let InstrKind::Collective(collective, _) = instr.kind else { return [false; 2] };
    let is_persistent = matches!(program.buffers[instr.inputs[0].buffer.index()].kind, BufferKind::Persistent { .. });
    let scatters = matches!(collective, Collective::ReduceScatter { axes, .. } if axes == Axes::SHARD);
    [matches!(collective, Collective::AllGather { .. }) && is_persistent, scatters]
}

/// Returns the greatest numbers of gathers and of sums of gradients that are under way at a computation.
fn under_way(program: &Program) -> [usize; 2] {
    let (mut now, mut most) = ([const { Vec::new() }; 2], [0; 2]);
    for (index, instr) in program.instrs.iter().enumerate() {
        match instr.kind {
            InstrKind::Collective(_, request) => {
                for (now, _) in now.iter_mut().zip(kinds(program, index)).filter(|(_, is_one)| *is_one) {
                    now.push(request);
                }
            }
            InstrKind::Finish(request) => now.iter_mut().for_each(|now| now.retain(|&other| other != request)),
            _ => {
                for (most, now) in most.iter_mut().zip(&now) {
                    *most = now.len().max(*most);
                }
            }
        }
    }
    most
}

/// Returns the greatest number of bytes of gathered parameters, and of gradients that are summed over ranks, at one
/// instruction.
fn transient(program: &Program) -> [u64; 2] {
    let mut buffers = [(); 2].map(|()| HashSet::new());
    for index in 0..program.instrs.len() {
        let [gathers, scatters] = kinds(program, index);
        buffers[0].extend(program.instrs[index].outputs.iter().filter(|_| gathers).map(|o| o.buffer));
        buffers[1].extend(program.instrs[index].inputs.iter().filter(|_| scatters).map(|o| o.buffer));
    }
    buffers.map(|buffers| {
        let mut uses: BTreeMap<_, (usize, usize)> = BTreeMap::new();
        for (index, instr) in program.instrs.iter().enumerate() {
            for operand in instr.inputs.iter().chain(&instr.outputs).filter(|o| buffers.contains(&o.buffer)) {
                uses.entry(operand.buffer).or_insert((index, index)).1 = index;
            }
        }
        let mut changes: BTreeMap<usize, i64> = BTreeMap::new();
        for (buffer, (first, last)) in uses {
            let bytes = program.buffers[buffer.index()].bytes as i64;
            *changes.entry(first).or_default() += bytes;
            *changes.entry(last + 1).or_default() -= bytes;
        }
        let alive = changes.values().scan(0, |now, change| {
            *now += change;
            Some(*now as u64)
        });
        alive.max().unwrap_or(0)
    })
}

/// As many collectives are under way as the options say, and their bytes do not depend on the number of layers.
#[test]
fn the_options_bound_what_is_under_way_in_any_number_of_layers() {
    let of = |layers, prefetch, reductions| {
        program(layers, mesh(1, 2, 1), |step| (step.prefetch, step.reductions) = (prefetch, reductions))
    };
    let mut bytes = HashMap::new();
    for (prefetch, reductions) in [(0, 0), (1, 1), (2, 1), (3, 2)] {
        let (few, many) = (of(2, prefetch, reductions), of(6, prefetch, reductions));
        assert_eq!(under_way(&few), [prefetch, reductions]);
        assert_eq!(under_way(&many), [prefetch, reductions]);
        assert_eq!(transient(&few), transient(&many), "{prefetch}, {reductions}");
        bytes.insert((prefetch, reductions), transient(&many));
    }
    assert!(bytes[&(0, 0)][0] < bytes[&(1, 1)][0] && bytes[&(0, 0)][1] < bytes[&(3, 2)][1], "{bytes:?}");
}

/// A budget chooses what is recomputed. Gathered parameters are no choice: they never wait for the backward.
#[test]
fn a_budget_leaves_gathers_alone() {
    let of = |layers: usize, budget: Option<u64>| {
        program(layers, mesh(1, 2, 1), |step| {
            (step.memory.recompute, step.memory.budget, step.sequence) = (Recompute::None, budget, 256);
        })
    };
    let height = |program: &Program| {
        compile(std::slice::from_ref(program), &CompileOptions::default()).unwrap().solution().height
    };
    let all = of(4, None);
    let budget = height(&all) * 3 / 4;
    let within = of(4, Some(budget));
    assert!(height(&within) <= budget && within.rematerialized_flops() > 0);
    // What is recomputed for a layer's backward reads the parameters of that layer.
    let layers = program(4, mesh(1, 2, 1), |step| step.sequence = 256);
    assert!(transient(&all)[0] <= transient(&within)[0] && transient(&within)[0] <= transient(&layers)[0]);
    assert_eq!(under_way(&within), under_way(&all));
    assert_eq!(transient(&all), transient(&of(2, None)));
}

/// One shard rank has no gather. If all ranks are shard ranks, parameters that they divide have no all-reduce.
#[test]
fn collectives_are_those_of_the_mesh() {
    let sums = |program: &Program| {
        let is_sum = |instr: &&Instr| match instr.kind {
            InstrKind::Collective(Collective::AllReduce { .. }, _) => instr.inputs[0].layout.shape().elem_count() > 64,
            _ => false,
        };
        program.instrs.iter().filter(is_sum).count()
    };
    let gathers = |program: &Program| (0..program.instrs.len()).filter(|&index| kinds(program, index)[0]).count();
    let one = program(2, Mesh::default(), |_| {});
    assert_eq!((gathers(&one), sums(&one)), (0, 0));
    let data = program(2, mesh(2, 1, 1), |_| {});
    assert_eq!((gathers(&data), sums(&data)), (0, 0));
    // Of this width, every parameter is divided.
    let all = program_of((2, 1024), mesh(1, 4, 1), |_| {});
    assert!(gathers(&all) > 0 && sums(&all) == 0, "{} {}", gathers(&all), sums(&all));
    assert!(all.parts.iter().any(|part| part.name == "update"), "parameters change once per step");
    let second = program(2, mesh(1, 4, 1), |step| step.zero_stage = 2);
    assert_eq!((gathers(&second), sums(&second)), (0, 0));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let refused = |change: &dyn Fn(&mut StepOptions), key: &str| {
        let mut step = case(Kind::Llama, mesh(1, 2, 1)).options.step;
        change(&mut step);
        let error = step.check().unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    };
    refused(&|step| step.zero_stage = 1, "step.zero_stage");
    refused(&|step| step.memory.overflow = Overflow::Recompute, "memory.overflow");
    refused(&|step| step.keep_gradients = true, "keep_gradients");
    refused(&|step| step.mesh.shard = 0, "mesh.shard");
    refused(&|step| step.mesh.shard = 3, "step.micro_batches");
}

/// Returns the bytes that a rank sends in a step, with rings, and the bytes that it keeps between steps.
fn sent_and_kept(program: &Program, mesh: Mesh) -> [u64; 2] {
    let bytes = |operand: &Operand| (operand.layout.shape().elem_count() * operand.dtype.size_in_bytes()) as u64;
    let sent = program.instrs.iter().map(|instr| {
        let InstrKind::Collective(collective, _) = instr.kind else { return 0 };
        let whole = match collective {
            Collective::AllReduce { .. } => 2 * bytes(&instr.inputs[0]),
            Collective::ReduceScatter { .. } => bytes(&instr.inputs[0]),
            _ => bytes(&instr.outputs[0]),
        };
        let ranks = mesh.size(collective.axes()) as u64;
        whole / ranks * (ranks - 1)
    });
    let is_kept = |buffer: &&Buffer| matches!(buffer.label.role, Role::Parameter | Role::OptimizerState);
    let kept = program.buffers.iter().filter(is_kept).map(|buffer| buffer.bytes);
    [sent.sum(), kept.sum()]
}

/// Prints the table of docs/ranks.md.
#[test]
fn stages_keep_and_send_what_the_formulas_say() {
    let config = GptConfig { vocabulary: 50_304, sequence: 256, ..GptConfig::default() };
    let (micro_batches, of_all) = (4, 16);
    let meshes = [
        ("`mesh.data = 4`", mesh(4, 1, 1), 3),
        ("`mesh.shard = 4`, `zero_stage = 2`", mesh(1, 4, 1), 2),
        ("`mesh.shard = 4`", mesh(1, 4, 1), 3),
        ("`mesh.data = 2`, `mesh.shard = 2`", mesh(2, 2, 1), 3),
        ("`mesh.context = 4`", Mesh { context: 4, ..Mesh::default() }, 3),
        ("`mesh.context = 2`, `mesh.shard = 2`", Mesh { context: 2, ..mesh(1, 2, 1) }, 3),
    ];
    let planned = |mesh: Mesh, zero_stage| {
        let sizes = StepOptions { batch: of_all, micro_batches, sequence: 256, ..on_cpu().step };
        let step = StepOptions { precision: Precision::Bf16, mesh, zero_stage, ..sizes };
        let options = TrainOptions { threads: 1, step, ..on_cpu() };
        (gapless::plan::program(|vb| Gpt::new(&config, vb), &options, 0).unwrap(), options.step.planning())
    };
    // All of the model, in 14 bytes for each parameter.
    let parameters = sent_and_kept(&planned(Mesh::default(), 3).0, Mesh::default())[1] as f64 / 14.0;
    let mut lines = Vec::new();
    for (name, mesh, zero_stage) in meshes {
        let (program, planning) = planned(mesh, zero_stage);
        let [sent, kept] = sent_and_kept(&program, mesh);
        let peak = compile(&[program], &planning).unwrap().solution().height;
        // Parameters of 2 bytes, and f32 masters and moments. Gradients are summed in f32.
        let (shard, context) = (mesh.shard as f64, mesh.context as f64);
        // Context ranks have copies of the model, like data ranks.
        let copies = mesh.data as f64 * context;
        let ranks = copies * shard;
        let gathered = if zero_stage == 3 { shard } else { 1.0 };
        let kept_by_formula = parameters * (2.0 / gathered + 12.0 / ranks);
        let ring = |ranks: f64| (ranks - 1.0) / ranks;
        // Both uses of the tied table have a gradient. Only the forward reads the table.
        let (table, micro_batches) = ((50_304 * 768) as f64, micro_batches as f64);
        let summed = 4.0 * micro_batches * (parameters + table);
        let gathers = micro_batches * 2.0 * (2.0 * parameters - table);
        let filled = if zero_stage == 3 { gathers } else { 2.0 * parameters };
        let of_copies = (4.0 + 2.0) * parameters / gathered * ring(copies);
        // Keys and values of 12 layers, whose heads have 768 elements together: gathered twice in bf16, and their gradients
        // summed in f32.
        let tokens = of_all as f64 * 256.0 / (mesh.data as f64 * shard);
        let keys_and_values = 12.0 * 2.0 * (2.0 + 2.0 + 4.0) * tokens * 768.0 * ring(context);
        let sent_by_formula = (summed + filled) * ring(shard) + of_copies + keys_and_values;
        for (what, found, formula) in [("kept", kept, kept_by_formula), ("sent", sent, sent_by_formula)] {
            assert!((found as f64 / formula - 1.0).abs() < 0.01, "{name}: {found} bytes {what}, {formula} by formula");
        }
        let [kept_by_formula, sent_by_formula] = [kept_by_formula, sent_by_formula].map(|bytes| Bytes(bytes as u64));
        let line = format!(
            "| {name} | {kept_by_formula} | {} | {} | {sent_by_formula} | {} |",
            Bytes(kept),
            Bytes(peak),
            Bytes(sent)
        );
        println!("{line}");
        lines.push(line);
    }
    lines.iter().for_each(|line| gapless_testing::assert_on_page("docs/ranks.md", line));
}
