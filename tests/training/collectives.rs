//! All ranks of a group have the same collectives in the same order, whatever the sizes of their own parts are.

use std::collections::{BTreeMap, VecDeque};

use gapless::engine::compile::step::{RankPlan, boxed_build, compile_step};
use gapless::engine::compile::{InstrKind, Program, Target};
use gapless::models::{Gpt, GptConfig, Llama, LlamaConfig, Moe, MoeConfig, MoeStyle};
use gapless::nn::{Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear};
use gapless::parallel::{Axes, by_name};
use gapless::{Mesh, Model, Pipeline, Recompute, StepOptions, Tensor};
use gapless_testing::{every_other, few};

use crate::common::moe;
use crate::tensor_ranks::options;

const SEQUENCE: usize = 24;
/// A vocabulary that no number of ranks divides.
const VOCABULARY: usize = 19;

/// A change of a step's options.
type Setting = (&'static str, fn(&mut StepOptions));

/// A model that adds a parameter with an element for each position, and reads it in no other way. Its hidden elements and
/// its tied vocabulary are divided into unequal parts.
struct Placed {
    table: Embedding,
    places: Tensor,
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Placed {
    fn new(vb: VarBuilder) -> gapless::Result<Self> {
        const WIDTH: usize = 16;
        let (up, down) = (linear(WIDTH, 37, vb.pp("h.0.up"))?, linear(37, WIDTH, vb.pp("h.0.down"))?);
        let table = embedding(VOCABULARY, WIDTH, vb.pp("table"))?;
        let (places, norm) = (vb.get((SEQUENCE, WIDTH), "places")?, layer_norm(WIDTH, 1e-5, vb.pp("norm"))?);
        Ok(Self { table, places, norm, up, down })
    }
}

impl Model for Placed {
    fn forward(&self, tokens: &Tensor, _train: bool) -> gapless::Result<Tensor> {
        let x = self.table.forward(tokens)?.broadcast_add(&self.places)?;
        let y = self.up.forward(&self.norm.forward(&x)?)?.gelu()?;
        let x = x.add(&self.down.forward(&y)?)?;
        Linear::new(self.table.embeddings().clone(), None, "head").forward(&x)
    }
}

/// Heads that four ranks do not divide equally.
fn gpt(vb: VarBuilder) -> gapless::Result<Gpt> {
    let config = GptConfig {
        vocabulary: VOCABULARY,
        sequence: SEQUENCE,
        layers: 2,
        heads: 6,
        width: 30,
        ..GptConfig::default()
    };
    Gpt::new(&config, vb)
}

/// Key heads with two query heads each, and hidden elements that no number of ranks divides.
fn llama(vb: VarBuilder) -> gapless::Result<Llama> {
    let config = LlamaConfig {
        vocabulary: VOCABULARY,
        layers: 2,
        heads: 10,
        kv_heads: 5,
        width: 40,
        hidden: 37,
        ..LlamaConfig::default()
    };
    Llama::new(&config, vb)
}

fn mixture(vb: VarBuilder) -> gapless::Result<Moe> {
    let small = moe(MoeStyle::Qwen);
    let llama = LlamaConfig { vocabulary: VOCABULARY, heads: 6, kv_heads: 3, width: 24, ..small.llama };
    Moe::new(&MoeConfig { llama, expert_hidden: 21, shared_hidden: 23, ..small }, vb)
}

/// The train program of a rank, and the collectives of all of its programs.
type Compiled = (Program, BTreeMap<Axes, String>);

fn compiled<M: Model>(
    build: impl Fn(VarBuilder) -> gapless::Result<M>,
    step: &StepOptions,
    target: Target,
) -> Vec<Compiled> {
    let build = boxed_build(build);
    let on_rank = |rank| {
        let (executable, compiled) = compile_step(&build, step, &RankPlan::of(step, rank).unwrap(), target).unwrap();
        (compiled.program.unwrap(), executable.collectives())
    };
    (0..step.mesh.ranks().unwrap()).map(on_rank).collect()
}

/// Checks that the ranks of each group have the same collectives, and that no rank waits for another forever even if each
/// waits for a collective before it starts the next one.
fn expect_agreement(what: &str, mesh: Mesh, ranks: &[Compiled]) {
    let color = |rank: usize, axes| mesh.color(mesh.coordinate(rank), axes);
    for axes in Axes::sets() {
        for (rank, (_, lists)) in ranks.iter().enumerate() {
            let first = (0..rank).find(|&other| color(other, axes) == color(rank, axes)).unwrap_or(rank);
            let [here, there] = [lists, &ranks[first].1].map(|lists| lists.get(&axes));
            assert_eq!(here, there, "{what}: ranks {rank} and {first} along {axes:?}");
        }
    }
    let axes_of = |program: &Program| {
        let collectives = program.instrs.iter().filter_map(|instr| match instr.kind {
            InstrKind::Collective(collective, _) => Some(collective.axes()),
            _ => None,
        });
        collectives.collect::<VecDeque<Axes>>()
    };
    let mut left: Vec<VecDeque<Axes>> = ranks.iter().map(|(program, _)| axes_of(program)).collect();
    assert!(left.iter().all(|left| !left.is_empty()), "{what}: nothing is exchanged");
    while let Some(rank) = (0..left.len()).find(|&rank| {
        let Some(&axes) = left[rank].front() else { return false };
        (0..left.len()).all(|other| color(other, axes) != color(rank, axes) || left[other].front() == Some(&axes))
    }) {
        let axes = left[rank][0];
        (0..left.len()).filter(|&other| color(other, axes) == color(rank, axes)).for_each(|other| {
            left[other].pop_front();
        });
    }
    let waiting: Vec<_> = left.iter().map(|left| (left.len(), left.front())).collect();
    assert!(left.iter().all(VecDeque::is_empty), "{what}: ranks wait for {waiting:?}");
}

/// Ranks whose parts have different sizes: of the vocabulary, of heads, and of hidden elements. Programs for CPUs and GPUs
/// are compiled, and not run.
#[test]
fn ranks_with_unequal_parts_have_the_same_collectives() {
    let one = Mesh::default();
    let meshes = [
        Mesh { tensor: 2, context: 2, ..one },
        Mesh { tensor: 3, context: 2, ..one },
        Mesh { tensor: 2, pipeline: 2, ..one },
        Mesh { tensor: 2, context: 3, ..one },
        Mesh { tensor: 2, context: 2, expert: 2, ..one },
        Mesh { tensor: 2, context: 2, shard: 2, ..one },
        Mesh { tensor: 4, context: 2, ..one },
        Mesh { tensor: 2, context: 4, ..one },
        Mesh { tensor: 4, pipeline: 2, ..one },
        Mesh { tensor: 2, context: 2, data: 2, ..one },
        Mesh { tensor: 3, shard: 2, ..one },
        Mesh { tensor: 4, ..one },
    ];
    let settings: [Setting; 5] = [
        ("everything kept", |_| {}),
        ("layers recomputed", |step| step.memory.recompute = "layers".parse().unwrap()),
        ("a split backward", |step| {
            step.micro_batches = 2;
            step.memory.recompute = "layers".parse().unwrap();
            step.pipeline = Pipeline { schedule: by_name("zb-h1").unwrap().into(), ..Pipeline::default() };
        }),
        ("some recomputed", |step| step.memory.recompute = Recompute::Ops(vec!["add".into()])),
        ("a budget", |step| step.memory.budget = Some(1 << 30)),
    ];
    for (turn, &mesh) in few(&meshes, 6).iter().enumerate() {
        for (index, target) in every_other(&[(0, Target::Cpu { threads: 1 }), (1, Target::Cuda)], turn / 2) {
            for sequence_parallel in every_other(&[true, false], turn / 5 + index) {
                for (name, set) in every_other(&settings, turn) {
                    let mut step = options(mesh, sequence_parallel, 24, SEQUENCE).step;
                    step.keep_gradients = false;
                    set(&mut step);
                    let what = format!("{name} on {mesh:?} for {target:?}, sequence parallel: {sequence_parallel}");
                    expect_agreement(&what, mesh, &compiled(mixture, &step, target));
                    if mesh.expert > 1 {
                        continue;
                    }
                    let of_model = match turn % 2 {
                        0 => compiled(gpt, &step, target),
                        _ => compiled(llama, &step, target),
                    };
                    expect_agreement(&what, mesh, &of_model);
                    if mesh.pipeline == 1 {
                        expect_agreement(&what, mesh, &compiled(Placed::new, &step, target));
                    }
                }
            }
        }
    }
}
