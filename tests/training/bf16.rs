//! A step in bf16: planned in half the bytes, and not run where there are no kernels for it.

use std::collections::BTreeMap;

use gapless::TrainError;
use gapless::engine::Role;
use gapless::engine::compile::{CompileOptions, Executable, Program, compile};
use gapless::engine::optim::AdamW;
use gapless::engine::runtime::Error as RuntimeError;
use gapless::engine::runtime::Session;
use gapless::engine::runtime::cpu::Workers;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig};
use gapless::nn::{Embedding, Module, VarBuilder, embedding};
use gapless::{DType, Mesh, Model, Result, Tensor, TrainOptions, Trainer};

use crate::common::{VOCABULARY, on_cpu};

fn options(dtype: DType, mesh: Mesh) -> TrainOptions {
    let optimizer = AdamW { masters: false, ..AdamW::default() }.into();
    TrainOptions { batch: 8, micro_batches: 2, sequence: 16, mesh, dtype, optimizer, threads: 1, ..on_cpu() }
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

/// What is f32 (or wider) in any case: statistics of norms, log-sum-exps, losses, squares for the gradients' norm. And
/// scalars: means of losses, the norm.
fn is_wide(tensor: &str, bytes: u64) -> bool {
    let wide =
        ["layer_norm.1", "rms_norm.1", "attention.1", "linear_cross_entropy.0", "squared_norms.0", "all_gather.0"];
    let made = tensor.rsplit_once('/').map_or(tensor, |(_, made)| made);
    let made = made.split_once(' ').map_or(made, |(made, _)| made);
    // Gathered are the squares of norms; parameters are gathered in their own place.
    wide.contains(&made) || bytes == 4
}

fn check(name: &str, [f32, bf16]: [Program; 2]) {
    assert_eq!(f32.buffers.len(), bf16.buffers.len(), "{name}");
    let mut halved: BTreeMap<Role, u64> = BTreeMap::new();
    for (f32, bf16) in f32.buffers.iter().zip(&bf16.buffers) {
        let label = &f32.label;
        assert_eq!(label.tensor, bf16.label.tensor, "{name}");
        let same = match label.role {
            // Ids, and the optimizer's numbers; scratch is for kernels that compute in f32. Constants are single elements.
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
        let dtypes = [DType::F32, DType::BF16].map(|dtype| options(dtype, mesh));
        let name = format!("rank {rank} of {mesh:?}");
        check(&format!("gpt, {name}"), dtypes.clone().map(|options| Trainer::program(gpt, &options, rank).unwrap()));
        check(&format!("llama, {name}"), dtypes.map(|options| Trainer::program(llama, &options, rank).unwrap()));
    }
}

/// Bytes of a role in all persistent tensors and at most at a time in others, of a plan.
fn bytes(plan: &Executable, role: Role) -> u64 {
    let all = plan.labels.iter().zip(plan.problem.buffers());
    all.filter(|(label, _)| label.role == role).map(|(_, buffer)| buffer.bytes).sum()
}

/// With masters, 2 bytes of a parameter are 12 more of states, and what is summed over micro-batches is f32; ranks that share the
/// batch share masters too.
#[test]
fn masters_take_what_they_are_said_to() {
    for (mesh, parts) in [(Mesh::default(), 1), (Mesh { data: 2, ..Mesh::default() }, 2)] {
        let pure = options(DType::BF16, mesh);
        let mixed = TrainOptions { optimizer: AdamW::default().into(), ..pure.clone() };
        let [pure, mixed] = [pure, mixed].map(|options| Trainer::plan(gpt, &options).unwrap());
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
        assert_eq!(mixed.solution.height, mixed.solution.lower_bound);
    }
}

#[test]
fn what_the_cpu_cannot_run_is_refused_before_anything_is_reserved() {
    let options = options(DType::BF16, Mesh::default());
    let refused = |error: TrainError| {
        assert!(matches!(error, TrainError::Runtime(RuntimeError::NoKernels { dtype: DType::BF16 })), "{error}")
    };
    refused(Trainer::new(gpt, options.clone()).unwrap_err());
    let plan = Trainer::plan(gpt, &options).unwrap();
    assert_eq!(plan.solution.height, plan.solution.lower_bound);
    refused(Session::on_cpu(plan, Workers::new(1).unwrap(), 0).unwrap_err().into());
    let f32 = Trainer::program(gpt, &TrainOptions { dtype: DType::F32, ..options }, 0).unwrap();
    let f32 = compile(&[f32], &CompileOptions::default()).unwrap();
    Session::on_cpu(f32, Workers::new(1).unwrap(), 0).unwrap();
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
    assert!(Trainer::plan(build, &options(DType::F32, Mesh::default())).is_ok());
    let error = Trainer::plan(build, &options(DType::BF16, Mesh::default())).unwrap_err();
    assert!(error.to_string().contains("input 1 is BF16, input 0 F32"), "{error}");
}
