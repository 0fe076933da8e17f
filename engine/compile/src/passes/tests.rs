//! Passes on small programs, compared as text.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use candle_core::DType;
use gapless_graph::autodiff::differentiate;
use gapless_graph::nn::VarBuilder;
use gapless_graph::{Graph, Result, Spec, Tensor, lock};
use gapless_parallel::{Action, Kind, StageId};
use insta::assert_snapshot;

use crate::lower::{Shared, lower_observed};
use crate::lowering::{Lowering, Output, Overlap, Target};
use crate::partition::{StagePartition, partition};
use crate::recompute::{Recompute, Resolving, StorageOptions};

/// A test case: options for the gradients of a loss that depends on `x` [2, 4].
#[derive(Default)]
struct Case {
    stages: usize,
    rank: usize,
    recompute: Recompute,
    /// Whether the backward is split into I and W.
    split: bool,
    /// Whether dropped values are recomputed in both halves.
    twice: bool,
    compress: Vec<String>,
    offload: Vec<String>,
    target: Option<Target>,
}

/// Returns the program after every stage, as text without declarations.
fn stages(case: &Case, f: impl Fn(&Tensor, &VarBuilder) -> Result<Tensor>) -> BTreeMap<&'static str, String> {
    let graph = Arc::new(Mutex::new(Graph::default()));
    let x = lock(&graph).add_input("x", Spec::f32((2, 4))).unwrap();
    let loss = f(&Tensor::of(&graph, x), &VarBuilder::new(&graph, DType::F32)).unwrap();
    let ranks = case.stages.max(1);
    partition(&mut lock(&graph), ranks, &StagePartition::Balanced).unwrap();
    let mut outputs = vec![Output::local("loss", loss.id())];
    for gradient in differentiate(&graph, &loss, 1.0).unwrap() {
        let name = format!("gradient {}", gradient.parameter.index());
        outputs.extend(gradient.summands.iter().map(|&id| Output::local(name.clone(), id)));
    }
    let graph = lock(&graph);
    let kinds: &[Kind] = match case.split {
        true => &[Kind::Forward, Kind::BackwardInput, Kind::BackwardWeight],
        false => &[Kind::Forward, Kind::Backward],
    };
    let row = |stage: u32| kinds.iter().map(|&kind| Action::new(kind, stage, 0)).collect();
    let table: Vec<Vec<Action>> = (0..ranks as u32).map(row).collect();
    let alive = crate::lower::alive_nodes(&graph, &outputs);
    let stashing = StorageOptions { compress: &case.compress, offload: &case.offload };
    let resolving = Resolving { graph: &graph, alive: &alive, row: &table[case.rank], stashing, can_be_twice: true };
    let once = resolving.resolve(&case.recompute, None, |_, _| Ok(0)).unwrap();
    let twice = (0..ranks as u32).map(StageId).filter(|_| case.twice).collect();
    let recomputation = once.recompute_in_both_halves(&graph, &twice);
    let lowering = Lowering {
        name: "case",
        graph: &graph,
        table: &table,
        rank: case.rank,
        outputs: &outputs,
        roles: &HashMap::new(),
        recomputation: &recomputation,
        evicts: false,
        overlap: Overlap::default(),
        target: case.target.unwrap_or(Target::Cpu { threads: 1 }),
    };
    let mut texts = BTreeMap::new();
    let mut observe = |stage, program: &crate::Program| {
        let text = program.to_string();
        let instructions =
            text.lines().filter(|line| !line.starts_with("  %") || line.contains(" = ") || line.contains(" += "));
        texts.insert(stage, instructions.skip(1).collect::<Vec<_>>().join("\n"));
    };
    lower_observed(&lowering, &Shared::new(&lowering), &mut observe).unwrap();
    texts
}

fn two_layers(x: &Tensor, vb: &VarBuilder) -> Result<Tensor> {
    let up = vb.get((4, 4), "up")?;
    let down = vb.get((4, 4), "down")?;
    x.linear(&up, None)?.gelu()?.linear(&down, None)?.tanh()?.sum_all()
}

#[test]
fn outputs_take_over_what_nobody_reads_any_more() {
    let stages = stages(&Case::default(), two_layers);
    assert_snapshot!(stages["messages"], @r"
    0F0:
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0
      %7 f32[2,4] = linear %5 f32[2,4], %6 f32[4,4] scratch %8, %9 @ the model, micro-batch 0
      %10 f32[2,4] = tanh %7 f32[2,4] @ the model, micro-batch 0
      %11 f32[] = scaled_sum %10 f32[2,4] scratch %12 @ the model, micro-batch 0
    0B0:
      %14 f32[2,4] = contiguous %13 f32[2,4]/0,0 @ the model, micro-batch 0
      %15 f32[2,4] = tanh_grad %7 f32[2,4], %14 f32[2,4] @ the model, micro-batch 0
      %16 f32[4,4] = linear_grad_weight %5 f32[2,4], %15 f32[2,4] scratch %17, %18 @ the model, micro-batch 0
      %19 f32[2,4] = linear_grad_input %15 f32[2,4], %6 f32[4,4] scratch %20, %21 @ the model, micro-batch 0
      %22 f32[2,4] = gelu_grad %2 f32[2,4], %19 f32[2,4] @ the model, micro-batch 0
      %23 f32[4,4] = linear_grad_weight %0 f32[2,4], %22 f32[2,4] scratch %24, %25 @ the model, micro-batch 0
    loss = %11 f32[]
    gradient 1 = %23 f32[4,4]
    gradient 2 = %16 f32[4,4]
    ");
    assert_snapshot!(stages["in_place"], @r"
    0F0:
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0
      %7 f32[2,4] = linear %5 f32[2,4], %6 f32[4,4] scratch %8, %9 @ the model, micro-batch 0
      %10 f32[2,4] = tanh %7 f32[2,4] @ the model, micro-batch 0
      %11 f32[] = scaled_sum %10 f32[2,4] scratch %12 @ the model, micro-batch 0
    0B0:
      %14 f32[2,4] = contiguous %13 f32[2,4]/0,0 @ the model, micro-batch 0
      %14 f32[2,4] = tanh_grad %7 f32[2,4], %14 f32[2,4]! @ the model, micro-batch 0
      %16 f32[4,4] = linear_grad_weight %5 f32[2,4], %14 f32[2,4] scratch %17, %18 @ the model, micro-batch 0
      %19 f32[2,4] = linear_grad_input %14 f32[2,4], %6 f32[4,4] scratch %20, %21 @ the model, micro-batch 0
      %19 f32[2,4] = gelu_grad %2 f32[2,4], %19 f32[2,4]! @ the model, micro-batch 0
      %23 f32[4,4] = linear_grad_weight %0 f32[2,4], %19 f32[2,4] scratch %24, %25 @ the model, micro-batch 0
    loss = %11 f32[]
    gradient 1 = %23 f32[4,4]
    gradient 2 = %16 f32[4,4]
    ");
}

#[test]
fn ranks_exchange_what_they_read_of_each_other() {
    let program_of = |rank| stages(&Case { stages: 2, rank, ..Case::default() }, two_layers);
    assert_snapshot!(program_of(0)["messages"], @r"
    0F0:
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0
      send to rank 1 %5 f32[2,4] @ the model, micro-batch 0
    0B0:
      %6 f32[2,4] = receive from rank 1 @ the model, micro-batch 0
      wait #1 %6 f32[2,4] @ the model, micro-batch 0
      wait #0 %5 f32[2,4] @ the model, micro-batch 0
      %7 f32[2,4] = gelu_grad %2 f32[2,4], %6 f32[2,4] @ the model, micro-batch 0
      %8 f32[4,4] = linear_grad_weight %0 f32[2,4], %7 f32[2,4] scratch %9, %10 @ the model, micro-batch 0
    gradient 1 = %8 f32[4,4]
    ");
    assert_snapshot!(program_of(1)["messages"], @r"
    1F0:
      %0 f32[2,4] = receive from rank 0 @ the model, micro-batch 0
      wait #0 %0 f32[2,4] @ the model, micro-batch 0
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = tanh %2 f32[2,4] @ the model, micro-batch 0
      %6 f32[] = scaled_sum %5 f32[2,4] scratch %7 @ the model, micro-batch 0
    1B0:
      %9 f32[2,4] = contiguous %8 f32[2,4]/0,0 @ the model, micro-batch 0
      %10 f32[2,4] = tanh_grad %2 f32[2,4], %9 f32[2,4] @ the model, micro-batch 0
      %11 f32[4,4] = linear_grad_weight %0 f32[2,4], %10 f32[2,4] scratch %12, %13 @ the model, micro-batch 0
      %14 f32[2,4] = linear_grad_input %10 f32[2,4], %1 f32[4,4] scratch %15, %16 @ the model, micro-batch 0
      send to rank 0 %14 f32[2,4] @ the model, micro-batch 0
    update:
      wait #1 %14 f32[2,4] @ the model, micro-batch 0
    loss = %6 f32[]
    gradient 2 = %11 f32[4,4]
    ");
}

#[test]
fn activations_wait_in_eight_bits() {
    let case = Case { compress: vec!["gelu".into()], ..Case::default() };
    assert_snapshot!(stages(&case, two_layers)["offload"], @r"
    0F0:
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0
      %7 f32[2,4] = linear %5 f32[2,4], %6 f32[4,4] scratch %8, %9 @ the model, micro-batch 0
      %27 u8[2,4], %28 f32[2,2] = compress %5 f32[2,4] @ the model, micro-batch 0
      %10 f32[2,4] = tanh %7 f32[2,4] @ the model, micro-batch 0
      %11 f32[] = scaled_sum %10 f32[2,4] scratch %12 @ the model, micro-batch 0
    0B0:
      %14 f32[2,4] = contiguous %13 f32[2,4]/0,0 @ the model, micro-batch 0
      %15 f32[2,4] = tanh_grad %7 f32[2,4], %14 f32[2,4] @ the model, micro-batch 0
      %26 f32[2,4] = expand %27 u8[2,4], %28 f32[2,2] @ the model, micro-batch 0
      %16 f32[4,4] = linear_grad_weight %26 f32[2,4], %15 f32[2,4] scratch %17, %18 @ the model, micro-batch 0
      %19 f32[2,4] = linear_grad_input %15 f32[2,4], %6 f32[4,4] scratch %20, %21 @ the model, micro-batch 0
      %22 f32[2,4] = gelu_grad %2 f32[2,4], %19 f32[2,4] @ the model, micro-batch 0
      %23 f32[4,4] = linear_grad_weight %0 f32[2,4], %22 f32[2,4] scratch %24, %25 @ the model, micro-batch 0
    update:
    finish:
    loss = %11 f32[]
    gradient 1 = %23 f32[4,4]
    gradient 2 = %16 f32[4,4]
    ");
}

/// On a GPU, copies run at the same time as other instructions: until the next copy in the same direction starts, or
/// until the activation is used.
#[test]
fn copies_to_the_host_overlap_on_a_gpu() {
    let three = |x: &Tensor, vb: &VarBuilder| {
        let layer = |x: Tensor, name: &str| x.linear(&vb.get((4, 4), name)?, None)?.gelu();
        layer(layer(layer(x.clone(), "a")?, "b")?, "c")?.sum_all()
    };
    let offload = || vec!["gelu".to_owned()];
    let of = |target| stages(&Case { offload: offload(), target, ..Case::default() }, three)["offload"].clone();
    let order = |text: String| {
        let name = |line: &str| {
            let (instr, _) = line.split_once(" @ the model")?;
            let call = instr.split(" = ").last()?.split(" %").next()?;
            Some(call.trim().to_owned())
        };
        text.lines().filter_map(name).collect::<Vec<_>>().join(", ")
    };
    let backward = "linear_grad_weight, linear_grad_input, gelu_grad";
    let on_gpu = format!(
        "linear, gelu, linear, offload @0, gelu, linear, offloaded @0, offload @1, gelu, scaled_sum, contiguous, gelu_grad, \
         offloaded @1, fetch @1, fetch @0, fetched @1, {backward}, fetched @0, {backward}, linear_grad_weight"
    );
    assert_eq!(order(of(Some(Target::Cuda))), on_gpu);
    let on_cpu = format!(
        "linear, gelu, linear, offload @0, gelu, linear, offload @1, gelu, scaled_sum, contiguous, gelu_grad, fetch @1, \
         {backward}, fetch @0, {backward}, linear_grad_weight"
    );
    assert_eq!(order(of(None)), on_cpu);
}

#[test]
fn what_is_dropped_runs_again_in_front_of_its_reader() {
    let case = Case { recompute: Recompute::Ops(vec!["gelu".into()]), ..Case::default() };
    assert_snapshot!(stages(&case, two_layers)["lower"], @r"
    0F0:
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0
      %7 f32[2,4] = linear %5 f32[2,4], %6 f32[4,4] scratch %8, %9 @ the model, micro-batch 0
      %10 f32[2,4] = tanh %7 f32[2,4] @ the model, micro-batch 0
      %11 f32[] = scaled_sum %10 f32[2,4] scratch %12 @ the model, micro-batch 0
    0B0:
      %14 f32[2,4] = contiguous %13 f32[2,4]/0,0 @ the model, micro-batch 0
      %15 f32[2,4] = tanh_grad %7 f32[2,4], %14 f32[2,4] @ the model, micro-batch 0
      %16 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0, recomputed
      %17 f32[4,4] = linear_grad_weight %16 f32[2,4], %15 f32[2,4] scratch %18, %19 @ the model, micro-batch 0
      %20 f32[2,4] = linear_grad_input %15 f32[2,4], %6 f32[4,4] scratch %21, %22 @ the model, micro-batch 0
      %23 f32[2,4] = gelu_grad %2 f32[2,4], %20 f32[2,4] @ the model, micro-batch 0
      %24 f32[4,4] = linear_grad_weight %0 f32[2,4], %23 f32[2,4] scratch %25, %26 @ the model, micro-batch 0
    update:
    finish:
    loss = %11 f32[]
    gradient 1 = %24 f32[4,4]
    gradient 2 = %17 f32[4,4]
    ");
}

/// The first product is recomputed for I, and recomputed once more for W.
#[test]
fn what_is_dropped_runs_again_in_both_halves() {
    let recompute = Recompute::Ops(vec!["linear".into(), "gelu".into()]);
    let case = Case { recompute, split: true, twice: true, ..Case::default() };
    assert_snapshot!(stages(&case, two_layers)["lower"], @r"
    0F0:
      %2 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %3, %4 @ the model, micro-batch 0
      %5 f32[2,4] = gelu %2 f32[2,4] @ the model, micro-batch 0
      %7 f32[2,4] = linear %5 f32[2,4], %6 f32[4,4] scratch %8, %9 @ the model, micro-batch 0
      %10 f32[2,4] = tanh %7 f32[2,4] @ the model, micro-batch 0
      %11 f32[] = scaled_sum %10 f32[2,4] scratch %12 @ the model, micro-batch 0
    0I0:
      %14 f32[2,4] = contiguous %13 f32[2,4]/0,0 @ the model, micro-batch 0
      %15 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %16, %17 @ the model, micro-batch 0, recomputed
      %18 f32[2,4] = gelu %15 f32[2,4] @ the model, micro-batch 0, recomputed
      %19 f32[2,4] = linear %18 f32[2,4], %6 f32[4,4] scratch %20, %21 @ the model, micro-batch 0, recomputed
      %22 f32[2,4] = tanh_grad %19 f32[2,4], %14 f32[2,4] @ the model, micro-batch 0
      %23 f32[2,4] = linear_grad_input %22 f32[2,4], %6 f32[4,4] scratch %24, %25 @ the model, micro-batch 0
      %26 f32[2,4] = gelu_grad %15 f32[2,4], %23 f32[2,4] @ the model, micro-batch 0
    0W0:
      %27 f32[2,4] = linear %0 f32[2,4], %1 f32[4,4] scratch %28, %29 @ the model, micro-batch 0, recomputed
      %30 f32[2,4] = gelu %27 f32[2,4] @ the model, micro-batch 0, recomputed
      %31 f32[4,4] = linear_grad_weight %30 f32[2,4], %22 f32[2,4] scratch %32, %33 @ the model, micro-batch 0
      %34 f32[4,4] = linear_grad_weight %0 f32[2,4], %26 f32[2,4] scratch %35, %36 @ the model, micro-batch 0
    update:
    finish:
    loss = %11 f32[]
    gradient 1 = %34 f32[4,4]
    gradient 2 = %31 f32[4,4]
    ");
}

/// A product that both halves read, and that takes fewer bytes than its operands, is recomputed only once.
#[test]
fn what_is_made_for_weights_on_the_way_is_made_once() {
    let recompute = Recompute::Ops(vec!["linear".into(), "mul".into()]);
    let case = Case { recompute, split: true, ..Case::default() };
    let lowered = stages(&case, |x, vb| {
        let (up, gate) = (x.linear(&vb.get((4, 4), "up")?, None)?, x.linear(&vb.get((4, 4), "gate")?, None)?);
        let product = up.mul(&gate)?;
        product.linear(&vb.get((4, 4), "down")?, None)?.add(&product.gelu()?)?.tanh()?.sum_all()
    });
    let again = lowered["lower"].lines().filter(|line| line.contains(" = mul ") && line.ends_with("recomputed"));
    assert_eq!(again.count(), 1, "{}", lowered["lower"]);
}

#[test]
fn operations_of_elements_share_a_kernel_on_a_gpu() {
    let case = Case { target: Some(Target::Cuda), ..Case::default() };
    assert_snapshot!(stages(&case, |x, vb| x.mul(&vb.get((2, 4), "w")?)?.gelu()?.sum_all())["fuse"], @r"
    0F0:
      %2 f32[2,4], %3 f32[2,4] = fused %0 f32[2,4], %1 f32[2,4] @ the model, micro-batch 0
      %4 f32[] = scaled_sum %3 f32[2,4] scratch %5 @ the model, micro-batch 0
    0B0:
      %7 f32[2,4] = fused %6 f32[2,4]/0,0, %2 f32[2,4], %0 f32[2,4] @ the model, micro-batch 0
    loss = %4 f32[]
    gradient 1 = %7 f32[2,4]
    ");
}
