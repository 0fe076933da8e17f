//! Faults that users of other trainers with tensor parallelism have reported, each as a test. The tests of
//! `tensor_ranks.rs` contain the rest:
//!
//! - Experts' gradients that are doubled by two expert ranks (pytorch#160285, DeepSpeed#5259, megablocks#86):
//!   `tensor_ranks_and_expert_ranks_train_as_one_rank_does`.
//! - Copies of parameters that drift apart, because each group of ranks clips by a norm of its own (Megatron#5916,
//!   Automodel#3816): `twenty_clipped_steps_keep_copies_equal`.
//! - Tied weights that are refused, divided in two ways, or two tensors after a reload (torchtitan#2495, accelerate#4171,
//!   Megatron#1447, hyper-parallel#606): GPT in `other_settings_combine_with_tensor_ranks` and
//!   `checkpoints_go_from_mesh_to_mesh`.
//! - Checkpoints that only their own mesh can read, moments that are dropped, extents that do not divide (Megatron#1517,
//!   AReaL#1468, pytorch#108869): `checkpoints_go_from_mesh_to_mesh`, where three heads are on two and four ranks.
//! - Collectives in other orders on the ranks of a group (pytorch#75373, verl#6405):
//!   `other_collectives_are_refused_on_all_ranks` of the engine's `train/ranks.rs`.

use gapless::alloc::Role;
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, MoeStyle};
use gapless::nn::{Embedding, Linear, Module, VarBuilder, embedding, linear_no_bias};
use gapless::{
    AdamW, MemoryOptions, Mesh, Model, Precision, Result, StepOptions, Tensor, TrainError, TrainOptions, Trainer,
    communicator,
};

use crate::common::{Kind, on_cpu};
use crate::tensor_ranks::{Outcome, case, close, mesh, meshes, options, run, step_of};

fn assert_close(a: f32, b: f32, most: f32, what: &str) {
    assert!((a - b).abs() <= most * b.abs(), "{what}: {a} instead of {b}");
}

/// Norms in which norm weights are counted once for each rank, or without the sums of the pipeline's stages (TE#435,
/// torchtune#2420, NeMo-RL#3788, torchtitan#596, torchtitan#649), also with clipped and clamped gradients. A first loss
/// that depends on the mesh, because ranks draw other initial values (torchtitan's `docs/converging.md`).
#[test]
fn initial_values_first_losses_and_norms_are_those_of_one_rank() {
    let experts = [(Mesh { expert: 2, tensor: 2, ..Mesh::default() }, true)];
    for (turn, (mesh, sequence_parallel)) in meshes().into_iter().chain(experts).enumerate() {
        let dense = [Kind::Gpt, Kind::Llama][turn % 2];
        let kind = if mesh.expert > 1 { Kind::Moe(MoeStyle::Qwen) } else { dense };
        let on = |mesh: Mesh, sequence_parallel: bool, steps: u64| {
            let mut case = case(kind, mesh, sequence_parallel);
            case.options.step.optimizer = AdamW { max_norm: 0.1, ..AdamW::default() }.into();
            case.options.step.update.max_value = (turn % 3 == 2).then_some(0.01);
            case.options.step.keep_gradients = false;
            run(&case, steps)
        };
        let what = format!("{kind:?} on {mesh:?}, sequence parallel: {sequence_parallel}");
        let (start, start_alone) = (on(mesh, sequence_parallel, 0), on(Mesh::default(), false, 0));
        assert!(start.tensors == start_alone.tensors, "{what}: initial values");
        let (ranks, alone) = (on(mesh, sequence_parallel, 1), on(Mesh::default(), false, 1));
        println!(
            "{what}: loss {} and {}, norm {} and {}",
            ranks.losses[0], alone.losses[0], ranks.norms[0], alone.norms[0]
        );
        assert_close(ranks.losses[0], alone.losses[0], 2e-6, &what);
        assert_close(ranks.norms[0], alone.norms[0], 2e-6, &what);
    }
}

/// A vocabulary that no number of ranks divides: the last rank's rows are never updated (pytorch#176076), the loss
/// diverges by padding (Megatron#1754), gradients of the table are not summed (ml-cross-entropy#42).
#[test]
fn every_row_of_a_vocabulary_of_50257_is_trained_as_on_one_rank() {
    let vocabulary = 50_257;
    let config =
        GptConfig { vocabulary, sequence: 8, layers: 1, heads: 3, width: 12, dropout: 0.0, ..GptConfig::default() };
    let tokens: Vec<u32> = (0..16).map(|i| i * i * 3_391 % vocabulary as u32).collect();
    let on = |mesh, sequence_parallel, steps| {
        step_of(|vb| Gpt::new(&config, vb), &options(mesh, sequence_parallel, 2, 8), (&tokens, steps))
    };
    let table = "wte.weight";
    let (start, alone) = (on(mesh(1), false, 0), on(mesh(1), false, 2));
    for (ranks, sequence_parallel) in [(2, true), (3, false), (4, false)] {
        let what = format!("{ranks} ranks, sequence parallel: {sequence_parallel}");
        let outcome = on(mesh(ranks), sequence_parallel, 2);
        assert!(outcome.split.iter().any(|name| name == table), "{what}");
        close(&outcome, &alone, &what);
        let rows = |outcome: &Outcome| outcome.tensors[table].chunks(12).map(<[f32]>::to_vec).collect::<Vec<_>>();
        let (before, after) = (rows(&start), rows(&outcome));
        assert!(before.iter().zip(&after).all(|(before, after)| before != after), "{what}: a row was not trained");
    }
}

/// Fewer key heads than ranks (transformers#48307, torchtitan#2577, sglang#19086). On four ranks, the four queries of each
/// key head are divided. On eight, each rank has one query, and attends to its key head.
#[test]
fn two_key_heads_train_on_eight_ranks() {
    let config = LlamaConfig {
        vocabulary: 50,
        layers: 2,
        heads: 8,
        kv_heads: 2,
        width: 48,
        hidden: 80,
        ..LlamaConfig::default()
    };
    let tokens: Vec<u32> = (0..48).map(|i| i * i * 7 % 50).collect();
    let on = |ranks, sequence_parallel| {
        step_of(|vb| Llama::new(&config, vb), &options(mesh(ranks), sequence_parallel, 2, 24), (&tokens, 2))
    };
    let alone = on(1, false);
    for (ranks, sequence_parallel) in [(2, true), (4, true), (4, false), (8, true), (8, false)] {
        let outcome = on(ranks, sequence_parallel);
        let is_split = |end: &str| outcome.split.iter().any(|name| name.ends_with(end));
        let held = (is_split("q_proj.weight"), is_split("k_proj.weight"), is_split("up_proj.weight"));
        assert_eq!(held, (true, ranks == 2, true), "{ranks} ranks");
        close(&outcome, &alone, &format!("{ranks} ranks, sequence parallel: {sequence_parallel}"));
    }
}

/// A model that shows its dropout masks, on activations that ranks divide by tokens and by the width of a layer.
struct Masked {
    embed: Embedding,
    up: Linear,
    down: Linear,
}

impl Masked {
    const WIDTH: usize = 8;

    fn new(vb: VarBuilder) -> Result<Self> {
        let width = Self::WIDTH;
        Ok(Self {
            embed: embedding(11, width, vb.pp("embed"))?,
            up: linear_no_bias(width, 4 * width, vb.pp("up"))?,
            down: linear_no_bias(4 * width, width, vb.pp("down"))?,
        })
    }
}

impl Model for Masked {
    fn forward(&self, tokens: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.embed.forward(tokens)?;
        let _layer = x.enter("blocks.0");
        let dropped = |x: Tensor, name: &str| -> Result<Tensor> {
            if !train {
                return Ok(x);
            }
            let mask = x.ones_like()?.dropout(0.5)?;
            mask.watch(name);
            x.mul(&mask)
        };
        let hidden = dropped(self.up.forward(&x)?.gelu()?, "mask of the width")?;
        let y = dropped(self.down.forward(&hidden)?, "mask of the tokens")?;
        x.add(&y)?.linear(self.embed.embeddings(), None)
    }
}

/// Masks that differ from those of one rank, or are the same on several (Megatron#206, FleetX#1005, tt-metal#55947,
/// anemoi#595).
#[test]
fn dropout_masks_are_those_of_one_rank() {
    let tokens: Vec<u32> = (0..32).map(|i| i * i % 11).collect();
    let on =
        |mesh, sequence_parallel| step_of(Masked::new, &options(mesh, sequence_parallel, 4, 8), (&tokens, 1)).watched;
    let alone = on(mesh(1), false);
    for (name, mask) in &alone {
        // A mask is the sum over two micro-batches. No two rows of tokens are equal.
        let mut rows: Vec<Vec<u32>> =
            mask.chunks(mask.len() / 16).map(|row| row.iter().map(|x| *x as u32).collect()).collect();
        rows.sort_unstable();
        rows.dedup();
        assert_eq!(rows.len(), 16, "{name}");
    }
    let data = Mesh { data: 2, tensor: 2, ..Mesh::default() };
    for (mesh, sequence_parallel) in [(mesh(2), false), (mesh(2), true), (mesh(4), true), (data, true)] {
        assert!(on(mesh, sequence_parallel) == alone, "{mesh:?}, sequence parallel: {sequence_parallel}");
    }
}

/// A save that hangs because one rank fails (transformers#48569).
#[test]
fn a_rank_that_cannot_save_is_named_on_all() {
    let place = tempfile::tempdir().unwrap();
    let run = case(Kind::Gpt, mesh(2), true);
    let answers = communicator::on_threads(2, |world| {
        let rank = world.rank();
        let mut trainer = run.rank(Some(world));
        run.step(&mut trainer);
        let dir = if rank == 1 { place.path().join("nowhere") } else { place.path().to_owned() };
        Ok(trainer.save(&dir, serde_json::Value::Null))
    });
    for answer in answers.unwrap() {
        assert!(matches!(answer, Err(TrainError::NotSaved { rank: 1, .. })), "{answer:?}");
    }
}

/// The bytes of activations that one layer keeps from the forward to the backward, in units of sequence × batch × width,
/// beside the formula of Korthikanti et al. (arXiv 2205.05198, section 4.2). The table is in docs/ranks.md.
#[test]
fn activations_of_a_layer_follow_from_the_papers_formula() {
    let (sequence, width, heads) = (512, 256, 8);
    let kept = |layers: usize, ranks: usize, sequence_parallel: bool, recompute: &str| {
        let vocabulary = 512;
        let config = GptConfig { vocabulary, sequence, layers, heads, width, dropout: 0.1, ..GptConfig::default() };
        let step = StepOptions {
            batch: 1,
            sequence,
            precision: Precision::PureBf16,
            mesh: mesh(ranks),
            sequence_parallel,
            memory: MemoryOptions { recompute: recompute.parse().unwrap(), ..on_cpu().step.memory },
            ..on_cpu().step
        };
        let plan = gapless::plan::step(|vb| Gpt::new(&config, vb), &TrainOptions { step, ..on_cpu() }, 0).unwrap();
        let all = plan.labels().iter().zip(plan.problem().buffers());
        let activations = all.filter(|(label, _)| label.role == Role::Activation).map(|(_, buffer)| buffer);
        let mut changes: Vec<(u64, i64)> = Vec::new();
        for buffer in activations {
            let bytes = buffer.bytes as i64;
            changes.extend([(buffer.lifetime.start, bytes), (buffer.lifetime.end, -bytes)]);
        }
        changes.sort_unstable();
        let mut alive = 0;
        let alive = changes.into_iter().map(|(_, bytes)| {
            alive += bytes;
            alive
        });
        alive.max().unwrap()
    };
    for (ranks, sequence_parallel) in [(1, false), (2, false), (2, true), (4, false), (4, true), (8, false), (8, true)]
    {
        let added =
            |layers, how| kept(layers + 1, ranks, sequence_parallel, how) - kept(layers, ranks, sequence_parallel, how);
        let of_layer = added(3, "none");
        let (s, h, a, t) = (sequence as f64, width as f64, heads as f64, ranks as f64);
        let of_rows = if sequence_parallel { t } else { 1.0 };
        // Whole, or divided by tokens: the inputs of two norms, and of the projections behind them. By heads and widths: q,
        // k, v, what attention and GELU read and make. Two f32 statistics per token and norm, one per token and head.
        let here = 8.0 / of_rows + 24.0 / t;
        let statistics = (2.0 * 2.0 * 4.0 / of_rows + 4.0 * a / t) / h;
        assert_eq!(
            of_layer as f64,
            (here + statistics) * s * h,
            "{ranks} ranks, sequence parallel: {sequence_parallel}"
        );
        // If layers are recomputed, their inputs are kept. Gathers and scatters of tokens are repeated, sums are not: the
        // one before the second norm is kept.
        let of_sums = if ranks > 1 && !sequence_parallel { 2.0 } else { 0.0 };
        assert_eq!(added(8, "layers") as f64, (2.0 / of_rows + of_sums) * s * h);
        let (paper, scores) = (10.0 / of_rows + 24.0 / t, 5.0 * a * s / (h * t));
        let yes = if sequence_parallel { "yes" } else { "no" };
        let line = format!("| {ranks} | {yes} | {here} | {statistics:.3} | {paper} | {scores} |");
        println!("{line}");
        gapless_testing::assert_on_page("docs/ranks.md", &line);
    }
}

/// The first of two tensor ranks has one of three heads, and the second has two. A plan of all ranks is that of the second.
#[test]
fn a_plan_of_all_ranks_is_that_of_the_fullest() {
    let config = GptConfig { vocabulary: 50, sequence: 24, layers: 2, heads: 3, width: 24, ..GptConfig::default() };
    let options = options(mesh(2), false, 2, 24);
    let builder = || Trainer::builder(|vb| Gpt::new(&config, vb), options.clone());
    let [first, second] = [0, 1].map(|rank| builder().plan(rank).unwrap().arena_bytes);
    let all: Vec<u64> = builder().plan_all().unwrap().iter().map(|report| report.arena_bytes).collect();
    assert!(first < second && all == [second; 2], "{first}, {second}, {all:?}");
}
