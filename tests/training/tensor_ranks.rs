//! Tensors that are divided among ranks give the results of one rank.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use gapless::models::{Llama, LlamaConfig, MoeStyle};
use gapless::nn::{Preference, VarBuilder};
use gapless::{
    AdamW, AdamW8bit, Checkpoint, DType, GenerateOptions, Generation, Lora, Mesh, Model, NextToken, Precision,
    Quantize, QuantizedFormat, Result, StepOptions, TrainOptions, Trainable, Trainer, Window, communicator,
};
use gapless_testing::{in_turn, one_of_each};

use crate::common::{Kind, PLANNING, TinyRun, VOCABULARY, on_cpu};

pub fn mesh(tensor: usize) -> Mesh {
    Mesh { tensor, ..Mesh::default() }
}

pub const STEPS: u64 = 3;

/// The results of a run.
#[derive(Debug)]
pub struct Outcome {
    pub losses: Vec<f32>,
    pub norms: Vec<f32>,
    /// The gathered parameters, optimizer states and gradients, by name.
    pub tensors: BTreeMap<String, Vec<f32>>,
    /// Names of parameters of which no rank holds all.
    pub split: Vec<String>,
    /// The watched values, such as the loads of experts.
    pub watched: Vec<(String, Vec<f32>)>,
}

/// The tensors that a rank has, with the parts of them that these are.
pub type Parts = Vec<(String, Window, Vec<f32>)>;

pub fn parts(trainer: &Trainer) -> Parts {
    let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
    let read = |tensor: candle_core::Tensor| {
        tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
    };
    let mut parts = Parts::new();
    for name in names {
        let window = trainer.window(&name).unwrap();
        if let Ok(gradient) = trainer.gradient(&name) {
            parts.push((format!("gradient of {name}"), window, read(gradient)));
        }
        for name in ["", "exp_avg/", "exp_avg_sq/", "exp_avg_scale/", "master/", "average/"]
            .map(|state| format!("{state}{name}"))
        {
            if let Ok(tensor) = trainer.tensor(&name) {
                parts.push((name.clone(), trainer.window(&name).unwrap(), read(tensor)));
            }
        }
    }
    parts
}

/// Puts the parts of all ranks together. Elements that several ranks have must be equal.
pub fn gather(ranks: Vec<Parts>) -> (BTreeMap<String, Vec<f32>>, Vec<String>) {
    let mut tensors: BTreeMap<String, (Vec<f32>, Vec<bool>)> = BTreeMap::new();
    let mut split = Vec::new();
    for (name, window, values) in ranks.into_iter().flatten() {
        let all = window.whole_dims().iter().product();
        if !window.is_whole() && !split.contains(&name) {
            split.push(name.clone());
        }
        let (gathered, seen) = tensors.entry(name.clone()).or_insert_with(|| (vec![0.0; all], vec![false; all]));
        assert_eq!(window.elements(), values.len(), "{name}");
        for (index, value) in window.runs().flatten().zip(values) {
            assert!(!seen[index] || gathered[index] == value, "copies of element {index} of {name} differ");
            (gathered[index], seen[index]) = (value, true);
        }
    }
    let all = tensors.into_iter().map(|(name, (gathered, seen))| {
        assert!(seen.into_iter().all(|seen| seen), "the ranks hold all of {name}");
        (name, gathered)
    });
    (all.collect(), split)
}

/// Does some steps on all ranks, after `before`.
pub fn run_after(
    run: &TinyRun,
    steps: u64,
    before: impl Fn(&mut Trainer) + Sync,
    after: impl Fn(&mut Trainer) + Sync,
) -> Outcome {
    let each = |mut trainer: Trainer| {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        before(&mut trainer);
        for _ in 0..steps {
            let report = run.step(&mut trainer);
            losses.push(report.loss);
            norms.push(report.gradient_norm);
        }
        after(&mut trainer);
        let values = |name: &str| trainer.watched(name).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let watched = trainer.watched_names().map(|name| (name.to_owned(), values(name)));
        let watched: Vec<(String, Vec<f32>)> = if steps > 0 { watched.collect() } else { Vec::new() };
        (losses, norms, watched, parts(&trainer))
    };
    let ranks = match run.options.step.mesh.ranks().unwrap() {
        1 => vec![each(run.trainer())],
        _ => run.on_ranks(each),
    };
    let (losses, norms, watched, _) = ranks[0].clone();
    for (rank, (own_losses, own_norms, own_watched, _)) in ranks.iter().enumerate() {
        let reported = (own_losses, own_norms, own_watched);
        assert_eq!(reported, (&losses, &norms, &watched), "rank {rank} reports the same");
    }
    let (tensors, split) = gather(ranks.into_iter().map(|(.., parts)| parts).collect());
    Outcome { losses, norms, tensors, split, watched }
}

pub fn run(run: &TinyRun, steps: u64) -> Outcome {
    run_after(run, steps, |_| {}, |_| {})
}

/// Does some steps of a model on all ranks.
pub fn step_of<M: Model>(
    build: impl Fn(VarBuilder) -> Result<M> + Sync,
    options: &TrainOptions,
    (tokens, steps): (&[u32], usize),
) -> Outcome {
    let ranks = communicator::on_threads(options.step.mesh.ranks().unwrap(), |world| {
        let mut trainer = Trainer::builder(&build, options.clone()).distributed(world).build()?;
        let mut reports = Vec::new();
        for _ in 0..steps {
            reports.push(trainer.step(tokens, tokens)?);
        }
        let values = |name: &str| trainer.watched(name).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let watched: Vec<(String, Vec<f32>)> =
            trainer.watched_names().map(|name| (name.to_owned(), values(name))).collect();
        Ok((reports, watched, parts(&trainer)))
    });
    let ranks = ranks.unwrap();
    let (reports, watched, _) = &ranks[0];
    let losses = reports.iter().map(|report| report.loss).collect();
    let norms = reports.iter().map(|report| report.gradient_norm).collect();
    let watched = watched.clone();
    let (tensors, split) = gather(ranks.into_iter().map(|(.., parts)| parts).collect());
    Outcome { losses, norms, tensors, split, watched }
}

/// The options of a step of this size.
pub fn options(mesh: Mesh, sequence_parallel: bool, batch: usize, sequence: usize) -> TrainOptions {
    let mut options = on_cpu();
    options.step.memory.planning = PLANNING;
    (options.threads, options.step.batch, options.step.sequence) = (1, batch, sequence);
    (options.step.mesh, options.step.sequence_parallel) = (mesh, sequence_parallel);
    options.step.micro_batches = if mesh.data == 1 { 2 } else { 1 };
    options.step.keep_gradients = mesh.data == 1;
    options
}

/// Compares results that only differ in the order of summation. AdamW divides gradients by their size, so where a
/// gradient is rounding alone (the biases of keys, to which a softmax is blind), the steps of a parameter are, too.
pub fn close(outcome: &Outcome, expected: &Outcome, what: &str) {
    within(outcome, expected, (1e-5, 1e-3), what);
}

/// Compares losses, norms, gradients and their means with the first tolerance, other tensors with the second. Both are
/// relative: to the number, or to the norm of the tensor.
pub fn within(outcome: &Outcome, expected: &Outcome, (of_gradients, of_others): (f64, f64), what: &str) {
    let pairs = outcome.losses.iter().zip(&expected.losses).chain(outcome.norms.iter().zip(&expected.norms));
    for (at, (a, b)) in pairs.enumerate() {
        let is_close = f64::from((a - b).abs()) <= of_gradients * f64::from(b.abs());
        assert!(is_close, "{what}: loss or norm {at} is {a} instead of {b}");
    }
    assert!(outcome.watched == expected.watched, "{what}: {:?} instead of {:?}", outcome.watched, expected.watched);
    assert!(outcome.tensors.keys().eq(expected.tensors.keys()), "{what}");
    for ((name, a), b) in outcome.tensors.iter().zip(expected.tensors.values()) {
        assert_eq!(a.len(), b.len(), "{what}: {name}");
        let distance = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        let norm = b.iter().map(|&b| f64::from(b).powi(2)).sum::<f64>().sqrt();
        let is_gradient = name.starts_with("gradient") || name.starts_with("exp_avg/");
        let most = if is_gradient { of_gradients } else { of_others };
        assert!(distance <= most * norm.max(1e-3), "{what}: {name} is off by {distance} of {norm}");
    }
}

pub fn case(kind: Kind, mesh: Mesh, sequence_parallel: bool) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.threads = 1;
    run.options.step.mesh = mesh;
    run.options.step.sequence_parallel = sequence_parallel;
    run.options.step.keep_gradients = mesh.data * mesh.pipeline * mesh.expert == 1;
    run.options.step.micro_batches = 4 / (mesh.data * mesh.expert);
    run
}

#[test]
fn tensor_ranks_train_as_one_rank_does() {
    for (turn, kind) in [Kind::Gpt, Kind::Llama, Kind::Latent, Kind::Moe(MoeStyle::Qwen)].into_iter().enumerate() {
        let alone = run(&case(kind, mesh(1), false), STEPS);
        for &(ranks, sequence_parallel) in
            in_turn(&[(2, false), (2, true), (3, false), (4, true), (4, false), (8, true)], turn)
        {
            let what = format!("{kind:?} on {ranks} ranks, sequence parallel: {sequence_parallel}");
            let ranks = run(&case(kind, mesh(ranks), sequence_parallel), STEPS);
            assert!(!ranks.split.is_empty(), "{what}");
            close(&ranks, &alone, &what);
        }
    }
}

/// The meshes of the tests of checkpoints, with sequence parallelism or without.
pub fn meshes() -> [(Mesh, bool); 8] {
    let mesh = |data, pipeline, tensor| Mesh { data, pipeline, tensor, ..Mesh::default() };
    [
        (mesh(1, 1, 1), false),
        (mesh(1, 1, 2), false),
        (mesh(1, 1, 3), true),
        (mesh(1, 1, 4), true),
        (mesh(2, 1, 1), false),
        (mesh(2, 1, 2), true),
        (mesh(1, 2, 2), false),
        (mesh(2, 2, 2), false),
    ]
}

/// Saves a checkpoint of each mesh (by default of one of two), and resumes it on the same mesh, on the next one, and on one
/// half a round further. All have the same bits of parameters and moments, and go on alike. `case` gives the run of the
/// mesh with the second index, of the model that the first index chooses.
pub fn checkpoints_go_around(meshes: usize, case: impl Fn(usize, usize) -> TinyRun) {
    let turns: Vec<usize> = (0..meshes).collect();
    for &turn in one_of_each(&turns, 2) {
        let dir = tempfile::tempdir().unwrap();
        let save = |trainer: &mut Trainer| drop(trainer.save(dir.path(), serde_json::Value::Null).unwrap());
        let resume = |trainer: &mut Trainer| {
            trainer.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
        };
        let saved = run_after(&case(turn, turn), 2, |_| {}, save);
        let next = run_after(&case(turn, turn), 1, resume, |_| {});
        for further in in_turn(&[1, meshes / 2], turn) {
            let case = case(turn, (turn + further) % meshes);
            let what = format!("{:?} on mesh {turn}, then on {:?}", case.kind, case.options.step.mesh);
            let resumed = run_after(&case, 0, resume, |_| {});
            for (name, tensor) in resumed.tensors.iter().filter(|(name, _)| !name.starts_with("gradient")) {
                assert!(saved.tensors[name] == *tensor, "{what}: {name}");
            }
            let went_on = run_after(&case, 1, resume, |_| {});
            assert!((went_on.losses[0] - next.losses[0]).abs() <= 1e-5 * next.losses[0].abs(), "{what}");
        }
    }
}

#[test]
fn checkpoints_go_from_mesh_to_mesh() {
    let meshes = meshes();
    checkpoints_go_around(meshes.len(), |model, mesh| {
        let (mesh, sequence_parallel) = meshes[mesh];
        case([Kind::Gpt, Kind::Llama][model % 2], mesh, sequence_parallel)
    });
}

/// Initial values and dropout masks are those of one rank, and clipped steps keep copies equal.
#[test]
fn twenty_clipped_steps_keep_copies_equal() {
    for (kind, mesh, sequence_parallel) in [
        (Kind::Gpt, Mesh { tensor: 2, ..Mesh::default() }, true),
        (Kind::Llama, Mesh { tensor: 4, ..Mesh::default() }, false),
        (Kind::Moe(MoeStyle::Mixtral), Mesh { expert: 2, tensor: 2, ..Mesh::default() }, true),
    ] {
        let start = run(&case(kind, mesh, sequence_parallel), 0);
        let alone = run(&case(kind, Mesh::default(), false), 0);
        assert!(start.tensors.iter().all(|(name, values)| alone.tensors[name] == *values), "{kind:?}: initial values");
        let mut clipped = case(kind, mesh, sequence_parallel);
        clipped.options.step.optimizer = AdamW { max_norm: 0.1, ..AdamW::default() }.into();
        let mut whole = case(kind, Mesh::default(), false);
        whole.options.step.optimizer = clipped.options.step.optimizer.clone();
        let (clipped, whole) = (run(&clipped, 20), run(&whole, 20));
        for (a, b) in clipped.losses.iter().zip(&whole.losses).chain(clipped.norms.iter().zip(&whole.norms)) {
            assert!((a - b).abs() <= 1e-4 * b.abs(), "{kind:?}: {a} instead of {b}");
        }
    }
}

/// Each tensor rank of an expert rank holds a part of the width of its experts. Losses, norms, loads and the gradient of
/// each expert are those of one rank.
#[test]
fn tensor_ranks_and_expert_ranks_train_as_one_rank_does() {
    let mesh = |data, expert, tensor| Mesh { data, expert, tensor, ..Mesh::default() };
    for (turn, kind) in Kind::MOE.into_iter().enumerate() {
        let mut alone = case(kind, mesh(1, 1, 1), false);
        alone.options.step.keep_gradients = false;
        let alone = run(&alone, STEPS);
        let meshes = [(mesh(1, 2, 2), false), (mesh(1, 2, 2), true), (mesh(2, 2, 2), false)];
        for &(mesh, sequence_parallel) in in_turn(&meshes, turn) {
            let what = format!("{kind:?} on {mesh:?}, sequence parallel: {sequence_parallel}");
            let ranks = run(&case(kind, mesh, sequence_parallel), STEPS);
            assert!(ranks.split.iter().any(|name| name.contains(".experts.")), "{what}");
            close(&ranks, &alone, &what);
        }
    }
}

/// Ranks divide caches by heads, and continue texts as one rank does.
#[test]
fn texts_are_continued_with_caches() {
    let prompts: [Vec<u32>; 2] = [4, 13].map(|length| (0..length).map(|i| (i * i * 7 + length) % VOCABULARY).collect());
    let texts = |trainer: &mut Trainer| {
        let go_on = |_: &NextToken<'_>| ControlFlow::Continue(());
        trainer.generate(&prompts.each_ref().map(Vec::as_slice), &GenerateOptions::greedy(20), go_on).unwrap()
    };
    for (kind, ranks, sequence_parallel) in [
        (Kind::Gpt, 2, true),
        (Kind::Llama, 2, false),
        (Kind::Llama, 4, true),
        (Kind::Moe(MoeStyle::Qwen), 2, true),
        (Kind::Latent, 2, false),
    ] {
        let on = |tensor: usize, sequence_parallel: bool| {
            let mut case = case(kind, mesh(tensor), sequence_parallel);
            case.options.step.generation = Some(Generation { batch: 2, window: None, chunk: 5 });
            let each = |mut trainer: Trainer| {
                case.step(&mut trainer);
                let mut plan = Vec::new();
                trainer.write_plan(&mut plan).unwrap();
                (texts(&mut trainer), cached_bytes(&String::from_utf8(plan).unwrap()))
            };
            if tensor == 1 { vec![each(case.trainer())] } else { case.on_ranks(each) }
        };
        let alone = on(1, false).swap_remove(0);
        for (rank, (text, bytes)) in on(ranks, sequence_parallel).into_iter().enumerate() {
            assert_eq!(text, alone.0, "{kind:?}, rank {rank} of {ranks}");
            // All heads share what latent attention caches. Three heads are one and two. Two key heads on four ranks
            // stay whole.
            let share = match kind {
                Kind::Latent => alone.1,
                Kind::Llama if ranks > 2 => alone.1,
                Kind::Gpt => alone.1 * (1 + rank as u64) / 3,
                _ => alone.1 / 2,
            };
            assert_eq!(bytes, share, "{kind:?}, rank {rank} of {ranks}");
        }
    }
}

/// Returns the bytes of the caches of a plan, whose columns are a buffer's number and name, the start and end of its
/// lifetime, and its bytes.
fn cached_bytes(plan: &str) -> u64 {
    let row = |line: &str| {
        let row: Vec<&str> = line.split(',').collect();
        let is_cache = ["/keys", "/values", "/latent", "/rotated_keys"].iter().any(|end| row[0].ends_with(end));
        is_cache.then(|| row[3].parse::<u64>().unwrap())
    };
    plan.lines().filter_map(row).sum()
}

/// The relative rounding of a bf16 number.
pub const BF16: f64 = 1.0 / 256.0;

pub fn lora(kind: Kind, step: &mut StepOptions) {
    let targets: &[&str] = match kind {
        Kind::Gpt => &["c_attn", "c_proj", "c_fc"],
        _ => &["q_proj", "v_proj", "up_proj", "down_proj"],
    };
    let targets = targets.iter().map(|&target| target.to_owned()).collect();
    step.trainable = Trainable::Lora(Lora { rank: 3, alpha: 6.0, dropout: 0.1, targets, ..Lora::default() });
}

fn frozen(kind: Kind, step: &mut StepOptions) {
    let trained: &[&str] = match kind {
        Kind::Gpt => &["h.1", "ln_f.bias"],
        _ => &["*norm*", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn"],
    };
    step.trainable = Trainable::Only(trained.iter().map(|&name| name.to_owned()).collect());
}

/// Adapters, frozen parts, mixed precision, recomputation, pipelines, data ranks, packed documents and pairs of answers
/// combine with tensor ranks, with and without sequence parallelism.
///
/// In bf16, a number is rounded once for each operation that it passes. Both ways through the model round some tens of
/// times, each time by at most half a unit, independently of each other. Parameters are not compared then: the gradients
/// of the keys' biases are rounding alone, so their steps have any direction.
#[test]
fn other_settings_combine_with_tensor_ranks() {
    type Setting = (&'static str, (f64, f64), fn(Kind, &mut StepOptions));
    let exact = (1e-5, 1e-3);
    let settings: [Setting; 7] = [
        ("adapters", exact, lora),
        ("frozen parts", exact, frozen),
        ("mixed precision", (4.0 * BF16, f64::INFINITY), |_, step| step.precision = Precision::Bf16),
        ("recomputation of all layers", exact, |_, step| step.memory.recompute = "layers".parse().unwrap()),
        ("a pipeline and data ranks", exact, |_, step| {
            if step.mesh.tensor > 1 {
                step.mesh = Mesh { data: 2, pipeline: 2, tensor: 2, ..Mesh::default() };
                step.micro_batches = 2;
            }
            step.keep_gradients = false;
        }),
        ("packed documents", exact, |_, step| step.documents = true),
        ("pairs of answers", exact, |_, step| {
            (step.documents, step.preference) = (true, Some(Preference::default()));
        }),
    ];
    for (index, (what, tolerance, set)) in settings.into_iter().enumerate() {
        for (turn, kind) in [(index, Kind::Gpt), (index + 2, Kind::Llama)] {
            let on = |tensor: usize, sequence_parallel: bool| {
                let mut case = case(kind, mesh(tensor), sequence_parallel);
                set(kind, &mut case.options.step);
                run(&case, STEPS)
            };
            let alone = on(1, false);
            for &(ranks, sequence_parallel) in in_turn(&[(2, false), (2, true), (3, true), (4, false)], turn) {
                let what = format!("{what}, {kind:?} on {ranks} ranks, sequence parallel: {sequence_parallel}");
                let ranks = on(ranks, sequence_parallel);
                assert!(!ranks.split.is_empty(), "{what}");
                within(&ranks, &alone, tolerance, &what);
            }
        }
    }
}

/// Each tensor rank keeps to its budget, with the results of one rank.
#[test]
fn tensor_ranks_keep_to_their_budgets() {
    for (kind, sequence_parallel) in [(Kind::Gpt, true), (Kind::Llama, false)] {
        let alone = run(&case(kind, mesh(1), false), STEPS);
        let mut case = case(kind, mesh(2), sequence_parallel);
        let arenas = |run: &TinyRun| run.on_ranks(|trainer| trainer.report().arena_bytes);
        let most = arenas(&case).into_iter().max().unwrap();
        case.options.step.memory.recompute = "layers".parse().unwrap();
        let least = arenas(&case).into_iter().max().unwrap();
        assert!(least < most, "{kind:?}");
        case.options.step.memory.recompute = "none".parse().unwrap();
        let budget = most - (most - least) / 4;
        case.options.step.memory.budget = Some(budget);
        let fitted = arenas(&case);
        assert!(fitted.iter().all(|&arena| arena <= budget), "{kind:?}, {budget}: {fitted:?}");
        close(&run(&case, STEPS), &alone, &format!("{kind:?} within {budget} bytes"));
    }
}

/// Adapters of plain and of quantized weights, with and without trained norms. The width is two blocks of quantized
/// weights, and the feed-forward layer three.
#[test]
fn adapters_of_quantized_weights_train_as_on_one_rank() {
    let config = LlamaConfig {
        vocabulary: 50,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        width: 128,
        hidden: 192,
        ..LlamaConfig::default()
    };
    let tokens: Vec<u32> = (0..48).map(|i| i * i * 7 % 50).collect();
    let (int8, nf4) = (QuantizedFormat::Int8, QuantizedFormat::Nf4);
    for (turn, (dora, format, double)) in
        [(true, None, false), (false, Some(int8), false), (true, Some(nf4), false), (true, Some(nf4), true)]
            .into_iter()
            .enumerate()
    {
        let on = |ranks, sequence_parallel| {
            let quantize = format.map(|format| Quantize { format, double, ..Quantize::default() });
            let targets = ["q_proj", "o_proj", "up_proj", "down_proj"].map(str::to_owned).to_vec();
            let mut options = options(mesh(ranks), sequence_parallel, 2, 24);
            options.step.trainable = Trainable::Lora(Lora { rank: 3, targets, dora, quantize, ..Lora::default() });
            step_of(|vb| Llama::new(&config, vb), &options, (&tokens, 2))
        };
        let alone = on(1, false);
        for (ranks, sequence_parallel) in [(2, turn % 2 == 0), (3, turn % 2 == 1)] {
            let what = format!("{format:?}, double: {double}, DoRA: {dora}, {ranks} ranks, {sequence_parallel}");
            let outcome = on(ranks, sequence_parallel);
            let is_split = |end: &str| outcome.split.iter().any(|name| name.ends_with(end));
            assert!(is_split("up_proj.weight") && is_split("down_proj.weight"), "{what}");
            close(&outcome, &alone, &what);
        }
    }
}

/// Each rank's part of a weight consists of whole blocks of eight-bit states, in a run for each row or in one.
#[test]
fn states_of_eight_bits_are_divided_as_their_parameters_are() {
    let config = LlamaConfig {
        vocabulary: 50,
        layers: 1,
        heads: 4,
        kv_heads: 2,
        width: 512,
        hidden: 1024,
        ..LlamaConfig::default()
    };
    let tokens: Vec<u32> = (0..48).map(|i| i * i * 7 % 50).collect();
    let on = |mesh, sequence_parallel| {
        let mut options = options(mesh, sequence_parallel, 2, 24);
        options.step.optimizer = AdamW8bit { smallest: 0, ..AdamW8bit::default() }.into();
        (options.step.micro_batches, options.step.keep_gradients) = (1, false);
        step_of(|vb| Llama::new(&config, vb), &options, (&tokens, 2))
    };
    let alone = on(mesh(1), false);
    for (mesh, sequence_parallel) in [
        (mesh(2), true),
        (Mesh { data: 2, ..mesh(2) }, false),
        (Mesh { shard: 2, ..mesh(2) }, true),
        (Mesh { context: 2, ..mesh(2) }, true),
    ] {
        let outcome = on(mesh, sequence_parallel);
        for state in ["o_proj", "down_proj", "up_proj"] {
            let is_split = |name: &String| name.starts_with("exp_avg_scale/") && name.contains(state);
            assert!(outcome.split.iter().any(is_split), "{state} on {mesh:?}");
        }
        close(&outcome, &alone, &format!("{mesh:?}"));
    }
}
