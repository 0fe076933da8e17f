//! Steps in bf16. They need half of the bytes, except for scratch, and compute the same as in f32, except for
//! rounding.

use std::collections::BTreeMap;

use gapless::engine::Role;
use gapless::engine::checkpoint::Checkpoint;
use gapless::engine::compile::{Executable, Program};
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, MoeStyle};
use gapless::nn::{Embedding, Module, VarBuilder, embedding};
use gapless::{
    AdamW, DType, Layers, LearningRate, Mesh, Model, Precision, Recompute, Result, StepOptions, Tensor, TrainOptions,
    Trainer,
};

use crate::common::{Kind, TinyRun, VOCABULARY, on_cpu};

fn options(precision: Precision, mesh: Mesh) -> TrainOptions {
    TrainOptions {
        step: StepOptions { batch: 8, micro_batches: 2, sequence: 16, mesh, precision, ..on_cpu().step },
        threads: 1,
        ..on_cpu()
    }
}

fn gpt(vb: VarBuilder) -> Result<Gpt> {
    let vocabulary = VOCABULARY as usize;
    Gpt::new(
        &GptConfig { vocabulary, sequence: 16, layers: 4, heads: 2, width: 32, dropout: 0.1, ..GptConfig::default() },
        vb,
    )
}

fn llama(vb: VarBuilder) -> Result<Llama> {
    let vocabulary = VOCABULARY as usize;
    let (layers, heads, kv_heads, width, hidden) = (4, 4, 2, 32, 48);
    Llama::new(&LlamaConfig { vocabulary, layers, heads, kv_heads, width, hidden, ..LlamaConfig::default() }, vb)
}

/// True for tensors that are f32 or wider in every precision. They are statistics of norms, log-sum-exps, losses,
/// squares for the gradient norm, and scalars such as mean losses and the gradient norm.
fn is_wide(tensor: &str, bytes: u64) -> bool {
    let wide =
        ["layer_norm.1", "rms_norm.1", "attention.1", "linear_cross_entropy.0", "squared_norms.0", "all_gather.0"];
    let made = tensor.rsplit_once('/').map_or(tensor, |(_, made)| made);
    let made = made.split_once(' ').map_or(made, |(made, _)| made);
    // Only the squares for the gradient norm are gathered into a buffer; parameters are gathered in place.
    wide.contains(&made) || bytes == 4
}

fn check(name: &str, [f32, bf16]: [Program; 2]) {
    // The f32 copies that are scratch, or that ranks exchange, are excluded, and the scratch of attention, which keeps sums
    // there only in bf16.
    let stored = |program: &Program| {
        let buffers = program.buffers.iter().filter(|buffer| {
            let label = &buffer.label;
            let has_sums = label.role == Role::Workspace && label.op.starts_with("attention");
            !has_sums && !label.tensor.contains(" in f32 of micro-batch ")
        });
        buffers.cloned().collect::<Vec<_>>()
    };
    let [f32, bf16] = [f32, bf16].map(|program| stored(&program));
    assert_eq!(f32.len(), bf16.len(), "{name}");
    let mut halved: BTreeMap<Role, u64> = BTreeMap::new();
    for (f32, bf16) in f32.iter().zip(&bf16) {
        let label = &f32.label;
        assert_eq!(label.tensor, bf16.label.tensor, "{name}");
        let same = match label.role {
            // Inputs are ids and the optimizer's scalars. Scratch is for kernels that compute in f32. Constants are
            // single elements.
            Role::Input | Role::Workspace => !label.tensor.starts_with("constant"),
            _ => is_wide(&label.tensor, f32.bytes),
        };
        assert_eq!(bf16.bytes, if same { f32.bytes } else { f32.bytes / 2 }, "{label:?} of {name}");
        *halved.entry(label.role).or_default() += f32.bytes - bf16.bytes;
    }
    for role in [Role::Parameter, Role::OptimizerState, Role::Gradient, Role::Activation] {
        assert!(halved[&role] > 0, "{role:?} of {name}");
    }
}

#[test]
fn a_plan_in_bf16_has_half_the_bytes_of_all_that_is_not_f32_in_any_case() {
    let meshes = [Mesh::default(), Mesh::pipeline(2), Mesh { data: 2, ..Mesh::default() }];
    for (mesh, rank) in meshes.into_iter().flat_map(|mesh| (0..mesh.ranks().unwrap()).map(move |rank| (mesh, rank))) {
        let dtypes = [Precision::F32, Precision::PureBf16].map(|precision| options(precision, mesh));
        let name = format!("rank {rank} of {mesh:?}");
        check(
            &format!("gpt, {name}"),
            dtypes.clone().map(|options| gapless::plan::program(gpt, &options, rank).unwrap()),
        );
        check(&format!("llama, {name}"), dtypes.map(|options| gapless::plan::program(llama, &options, rank).unwrap()));
    }
}

/// The bytes of all buffers of a role in a plan.
fn bytes(plan: &Executable, role: Role) -> u64 {
    let all = plan.labels().iter().zip(plan.problem().buffers());
    all.filter(|(label, _)| label.role == role).map(|(_, buffer)| buffer.bytes).sum()
}

/// With masters, each bf16 parameter has 12 bytes of states, and sums over micro-batches are f32. The masters are
/// also divided among data ranks.
#[test]
fn masters_take_what_they_are_said_to() {
    for (mesh, parts) in [(Mesh::default(), 1), (Mesh { data: 2, ..Mesh::default() }, 2)] {
        let pure = options(Precision::PureBf16, mesh);
        let mixed =
            TrainOptions { step: StepOptions { precision: Precision::Bf16, ..pure.step.clone() }, ..pure.clone() };
        let [pure, mixed] = [pure, mixed].map(|options| gapless::plan::step(gpt, &options, 0).unwrap());
        assert_eq!(bytes(&pure, Role::Parameter), bytes(&mixed, Role::Parameter));
        let elements = |plan: &Executable, name: &str| -> u64 {
            let specs = plan.specs(Role::OptimizerState).filter(|(state, _)| state.starts_with(name));
            specs.map(|(_, spec)| spec.elements() as u64).sum()
        };
        assert_eq!(elements(&pure, "master/"), 0);
        let parameters: u64 = mixed.specs(Role::Parameter).map(|(_, spec)| spec.elements() as u64).sum();
        for state in ["master/", "exp_avg/", "exp_avg_sq/"] {
            let of_state = elements(&mixed, state);
            assert_eq!(of_state, elements(&pure, "exp_avg/"), "{state}");
            assert!(of_state * parts >= parameters && of_state <= parameters, "{state}");
        }
        assert!(mixed.specs(Role::OptimizerState).all(|(_, spec)| spec.dtype == DType::F32));
        assert!(bytes(&mixed, Role::Gradient) > bytes(&pure, Role::Gradient));
        assert_eq!(mixed.solution().height, mixed.solution().lower_bound);
    }
}

/// Creates a small run of a model in bf16.
fn run(kind: Kind) -> TinyRun {
    let mut run = TinyRun { kind, ..TinyRun::default() };
    run.options.step.precision = Precision::Bf16;
    run
}

/// Models that together contain all operations of the other models.
const KINDS: [Kind; 3] = [Kind::Gpt, Kind::Llama, Kind::Moe(MoeStyle::Mixtral)];

/// The number of threads, the contents of dead memory and recomputation change no bit.
#[test]
fn what_changes_no_bit_in_f32_changes_none_in_bf16() {
    for kind in KINDS {
        let plain = run(kind).steps(3);
        let mut other = run(kind);
        other.options.threads = 3;
        assert_eq!(plain, other.steps(3), "threads, {kind:?}");
        other.options.poison = true;
        other.options.step.memory.recompute = Recompute::Layers(Layers::All);
        assert_eq!(plain, other.steps(3), "poison and everything computed again, {kind:?}");
    }
}

/// Pipeline stages change no bit. Sums over data ranks are rounded to bf16 once.
#[test]
fn ranks_train_in_bf16() {
    for kind in KINDS {
        let mut one = run(kind);
        (one.options.step.micro_batches, one.options.threads) = (4, 1);
        let plain = one.steps(2);
        let mut ranks = one.clone();
        ranks.options.poison = true;
        ranks.options.step.mesh = Mesh::pipeline(2);
        assert_eq!(plain, ranks.steps_on_ranks(2), "two stages, {kind:?}");
        let mut meshes = vec![(Mesh { data: 2, ..Mesh::default() }, 4), (Mesh { data: 2, ..Mesh::default() }, 1)];
        if KINDS[2] == kind {
            meshes.push((Mesh { expert: 2, ..Mesh::default() }, 2));
        }
        for (mesh, micro_batches) in meshes {
            ranks.options.step.mesh = mesh;
            ranks.options.step.micro_batches = micro_batches;
            // Expert ranks have different parameters, but report the same losses.
            let outcome = &ranks.on_ranks(|mut trainer| ranks.go_on(&mut trainer, 2))[0];
            let pairs = outcome.losses.iter().zip(&plain.losses);
            for (&found, &expected) in pairs.chain(outcome.gradient_norms.iter().zip(&plain.gradient_norms)) {
                let (found, expected) = (f32::from_bits(found), f32::from_bits(expected));
                // The rounding error of a gradient is at most 2⁻⁸, and a step changes a loss by less than this
                // fraction.
                assert!((found - expected).abs() <= 1e-2 * expected, "{kind:?}: {found} instead of {expected}");
            }
        }
    }
}

#[test]
fn a_resumed_run_in_bf16_goes_on_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let run = run(Kind::Gpt);
    let mut straight = run.trainer();
    run.go_on(&mut straight, 2);
    straight.save(dir.path(), serde_json::Value::Null).unwrap();
    let expected = run.go_on(&mut straight, 2);
    let mut resumed = run.trainer();
    resumed.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
    assert_eq!(run.go_on(&mut resumed, 2), expected);
}

/// Stochastic rounding keeps changes that rounding to the nearest value loses. Its bits do not depend on the number of
/// threads, on poison, on pipeline stages or on a resumption.
#[test]
fn stochastic_rounding_keeps_small_changes() {
    let rounding = |stochastic_rounding: bool| {
        let mut run = run(Kind::Gpt);
        run.options.step.precision = Precision::PureBf16;
        run.options.step.optimizer = AdamW { stochastic_rounding, ..AdamW::default() }.into();
        // Far less than half the distance between the bf16 values near a typical weight of 0.02, which is 2⁻¹⁴.
        run.options.learning_rate = LearningRate::constant(1e-6);
        run
    };
    let changed = |run: &TinyRun| {
        let mut trainer = run.trainer();
        let read = |trainer: &Trainer| {
            let tensors = trainer.parameter_names().map(|name| trainer.tensor(name).unwrap());
            let matrices = tensors.filter(|tensor| tensor.rank() >= 2);
            let wide = |of: candle_core::Tensor| of.flatten_all().unwrap().to_dtype(DType::F32).unwrap();
            matrices.flat_map(|tensor| wide(tensor).to_vec1::<f32>().unwrap()).collect::<Vec<_>>()
        };
        let before = read(&trainer);
        run.go_on(&mut trainer, 4);
        let after = read(&trainer);
        let changes = before.iter().zip(&after).filter(|(before, after)| before != after);
        changes.count() as f64 / before.len() as f64
    };
    let [nearest, stochastic] = [false, true].map(|is_stochastic| changed(&rounding(is_stochastic)));
    assert!(nearest < 0.05 && stochastic > 2.0 * nearest + 0.02, "{nearest} and {stochastic} of the elements change");
    let run = rounding(true);
    let plain = run.steps(3);
    let mut other = run.clone();
    (other.options.threads, other.options.poison) = (3, true);
    assert_eq!(plain, other.steps(3), "threads and poison");
    other.options.step.mesh = Mesh::pipeline(2);
    assert_eq!(plain, other.steps_on_ranks(3), "two stages");
    let dir = tempfile::tempdir().unwrap();
    let mut straight = run.trainer();
    run.go_on(&mut straight, 2);
    straight.save(dir.path(), serde_json::Value::Null).unwrap();
    let expected = run.go_on(&mut straight, 2);
    let mut resumed = run.trainer();
    resumed.resume(&Checkpoint::latest(dir.path()).unwrap().unwrap()).unwrap();
    assert_eq!(run.go_on(&mut resumed, 2), expected);
}

/// Losses equal those of f32 within the precision of bf16, with and without masters. Parameters are the rounded
/// masters.
#[test]
fn bf16_follows_f32() {
    for (kind, micro_batches, masters) in
        KINDS.into_iter().flat_map(|kind| [(kind, 1, true), (kind, 4, true), (kind, 1, false)])
    {
        let mut in_bf16 = run(kind);
        in_bf16.options.step.micro_batches = micro_batches;
        if !masters {
            in_bf16.options.step.precision = Precision::PureBf16;
        }
        let mut in_f32 = in_bf16.clone();
        in_f32.options.step.precision = Precision::F32;
        let (mut narrow, mut wide) = (in_bf16.trainer(), in_f32.trainer());
        for _ in 0..6 {
            let (found, expected) = (in_bf16.step(&mut narrow), in_f32.step(&mut wide));
            // The tolerances allow for some roundings of 2⁻⁸ each, with random signs.
            let near = |found: f32, expected: f32, part: f32| (found - expected).abs() <= part * expected;
            assert!(near(found.loss, expected.loss, 1e-2), "{kind:?}: {} instead of {}", found.loss, expected.loss);
            let (found, expected) = (found.gradient_norm, expected.gradient_norm);
            assert!(near(found, expected, 5e-2), "{kind:?}: norm {found} instead of {expected}");
        }
        for name in narrow.parameter_names().filter(|_| masters) {
            let (parameter, Ok(master)) = (narrow.tensor(name).unwrap(), narrow.tensor(&format!("master/{name}")))
            else {
                continue;
            };
            let rounded = master.to_dtype(DType::BF16).unwrap();
            let numbers = |x: &candle_core::Tensor| {
                x.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
            };
            assert_eq!(numbers(&parameter), numbers(&rounded), "{name}");
        }
    }
}

#[test]
fn there_is_no_f16() {
    let error = Precision::try_from(DType::F16).unwrap_err().to_string();
    assert!(error.contains("F16") && error.contains("use f32 or bf16"), "{error}");
}

#[test]
fn two_types_do_not_meet() {
    struct Mixed(Embedding, Tensor);

    impl Model for Mixed {
        fn forward(&self, tokens: &Tensor, _train: bool) -> Result<Tensor> {
            self.0.forward(tokens)
        }

        fn loss(&self, tokens: &Tensor, targets: &Tensor, train: bool) -> Result<Tensor> {
            // Losses are f32.
            self.forward(tokens, train)?.cross_entropy(targets)?.broadcast_mul(&self.1)?.mean_all()
        }
    }

    let build = |vb: VarBuilder| Ok(Mixed(embedding(8, 8, vb.pp("embed"))?, vb.get(1, "factor")?));
    let plan = |precision| {
        let options = options(precision, Mesh::default());
        gapless::plan::step(build, &options, 0)
    };
    assert!(plan(Precision::F32).is_ok());
    let error = plan(Precision::PureBf16).unwrap_err();
    assert!(error.to_string().contains("input 1 is BF16, input 0 F32"), "{error}");
}
