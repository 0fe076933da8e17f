//! Operations that describe themselves wrongly. Whatever an operation claims, there are two allowed outcomes. Either
//! the operation is refused by the graph or the program, or the compiled step is sound.
//!
//! The operation's kernel checks for soundness: every output and piece of scratch must keep its own bytes while all
//! others are written. `.ci/sanitizers` runs the same tests under the address sanitizer, which also detects accesses
//! outside of any allocation.
#![forbid(unsafe_code)]

mod operation;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Layout};
use gapless_alloc::arena::Reserve;
use gapless_alloc::{Label, Options, Role};
use gapless_compile::recompute::RematPlan;
use gapless_compile::{
    BufferKind, CompileOptions, DynamicRows, Instr, InstrKind, Lowering, Operand, Output, Overlap, Program, Target,
    compile, lower,
};
use gapless_graph::ops::Contiguous;
use gapless_graph::{Graph, Phase, RowUse, Spec, ValueId, lock};
use gapless_parallel::{Action, Kind};
use gapless_runtime::cpu::{CpuBackend, Workers};
use gapless_runtime::{RunOptions, Session};
use gapless_testing::prelude::*;

use operation::{Answers, Hostile};

/// The outcome of compiling and running a list of operations.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The operations were refused when the graph, the program or the session was built.
    Refused(String),
    /// The run ended with an error.
    Stopped(String),
    /// A kernel panicked.
    Panicked,
    Ran,
}

const DIMS: (usize, usize) = (8, 4);

/// Builds and runs a graph that consists of a parameter, a copy of the parameter, the operations, and a copy of the
/// last output, which the host reads. The inputs of each operation are the parameter's copy, the row offsets, and the
/// outputs of all earlier operations that the graph has accepted. The methods of an operation return the same results
/// before and after the operation is recorded.
fn outcome(dtype: DType, operations: &[Answers], reserve: Reserve, micro_batches: u32) -> Outcome {
    let operations: Vec<_> = operations.iter().map(|answers| [answers.clone(), answers.clone()]).collect();
    changing(dtype, &operations, reserve, micro_batches)
}

/// Like [`outcome`], but an operation's methods return the first [`Answers`] until the operation is recorded, and the
/// second ones afterwards.
fn changing(dtype: DType, operations: &[[Answers; 2]], reserve: Reserve, micro_batches: u32) -> Outcome {
    let refused = |error: &dyn std::fmt::Display| Outcome::Refused(error.to_string());
    let graph = Arc::new(Mutex::new(Graph::default()));
    let mut graph = lock(&graph);
    let spec = Spec { shape: DIMS.into(), dtype };
    let parameter = graph.add_persistent("parameter", spec, gapless_graph::nn::Init::Const(1.0)).unwrap();
    let starts = graph.add_input("starts", Spec { shape: 3.into(), dtype: DType::U32 }).unwrap();
    let copy = graph.apply(Arc::new(Contiguous), &[parameter]).unwrap()[0];
    let mut inputs = vec![copy, starts];
    let is_recorded = Arc::new(AtomicBool::new(false));
    let mut refusal = None;
    for answers in operations {
        let op = Hostile { answers: answers.clone(), is_recorded: is_recorded.clone() };
        match graph.apply(Arc::new(op), &inputs) {
            Ok(outputs) => inputs.extend(outputs),
            Err(error) => refusal = Some(error),
        }
    }
    if let (2, Some(error)) = (inputs.len(), refusal) {
        return refused(&error);
    }
    is_recorded.store(true, Ordering::Relaxed);
    graph.set_phase(Phase::Update);
    let last = inputs[inputs.len() - 1];
    let total = match graph.apply(Arc::new(Contiguous), &[last]) {
        Ok(total) => total[0],
        Err(error) => return refused(&error),
    };
    lower_and_run(&graph, total, reserve, micro_batches)
}

fn lower_and_run(graph: &Graph, total: ValueId, reserve: Reserve, micro_batches: u32) -> Outcome {
    let refused = |error: &dyn std::fmt::Display| Outcome::Refused(error.to_string());
    let actions = (0..micro_batches)
        .flat_map(|micro_batch| [Kind::Forward, Kind::Backward].map(|kind| Action::new(kind, 0, micro_batch)));
    let lowered = lower(&Lowering {
        evicts: false,
        overlap: Overlap::default(),
        name: "hostile",
        graph,
        table: &[actions.collect()],
        rank: 0,
        outputs: &[Output::everywhere("total", total)],
        roles: &HashMap::new(),
        recomputation: &RematPlan::default(),
        target: Target::Cpu { threads: 1 },
    });
    match lowered {
        Ok(program) => run_program(program, reserve),
        Err(error) => refused(&error),
    }
}

fn run_program(program: Program, reserve: Reserve) -> Outcome {
    let refused = |error: &dyn std::fmt::Display| Outcome::Refused(error.to_string());
    let executable = match compile(&[program], &CompileOptions { planner: Options::quick(), reserve }) {
        Ok(executable) => executable,
        Err(error) => return refused(&error),
    };
    // The machine may have this much memory, but a test should not take it.
    if executable.arena_bytes() > 1 << 30 {
        return Outcome::Refused("large".into());
    }
    let mut session: Session<CpuBackend> = match Session::on_cpu(executable, Workers::new(1).unwrap(), 0) {
        Ok(session) => session,
        Err(error) => return refused(&error),
    };
    let program = session.executable().program("hostile").unwrap();
    let options = RunOptions { poison: true, watch: true, micro_batch_stride: u64::MAX, ..RunOptions::default() };
    for _ in 0..2 {
        match catch_unwind(AssertUnwindSafe(|| session.run(program, options))) {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Outcome::Stopped(error.to_string()),
            Err(panic) => {
                let said = panic.downcast_ref::<String>().cloned();
                let said = said.unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap_or(&"").to_string());
                assert!(!said.contains("another"), "{said}");
                return Outcome::Panicked;
            }
        }
        session.check_run().expect("no two of the run's tensors share a byte");
    }
    Outcome::Ran
}

fn same() -> Spec {
    Spec::f32(DIMS)
}

fn u32s(count: usize) -> Spec {
    Spec { shape: count.into(), dtype: DType::U32 }
}

fn layout(dims: &[usize], strides: &[usize], start: usize) -> Layout {
    Layout::new(dims.into(), strides.to_vec(), start)
}

/// Each case has the results of an operation's methods, and a substring of the expected error or `None` if the step
/// should run.
#[test]
fn what_operations_say_is_checked() {
    let answers = || Answers::of(vec![same()]);
    let view = |dims: &[usize], strides: &[usize], start| Answers {
        view: Some(layout(dims, strides, start)),
        ..Answers::of(vec![Spec::f32(dims)])
    };
    let mutates = |pairs: &[(usize, usize)]| Answers { mutates: pairs.to_vec(), ..answers() };
    let counted = |offsets, balanced| Answers { rows: RowUse::DynamicOutputs { offsets, balanced }, ..answers() };
    let (max, far) = (usize::MAX, 1 << 62);
    for (answers, expected) in [
        (answers(), None),
        (view(&[4, 8], &[1, 4], 0), None),
        (view(&[2], &[far], 0), Some("beyond a tensor")),
        (view(&[2], &[max], 0), Some("beyond a tensor")),
        (view(&[2, 2], &[max, 1], 0), Some("beyond a tensor")),
        (view(&[2], &[1], max), Some("beyond a tensor")),
        (view(&[2], &[1], far), Some("beyond a tensor")),
        (view(&[2], &[31], 1), Some("beyond a tensor")),
        (view(&[2, 2], &[1], 0), Some("beyond a tensor")),
        (view(&[1 << 40, 1 << 40], &[0, 0], 0), Some("more than 2^63 bytes")),
        (Answers { outputs: vec![same(), same()], ..view(&[8, 4], &[4, 1], 0) }, Some("a view has one")),
        (Answers { outputs: vec![], ..view(&[8, 4], &[4, 1], 0) }, Some("has 0 outputs")),
        (Answers { outputs: vec![u32s(32)], ..view(&[32], &[1], 0) }, Some("it views F32")),
        (Answers { outputs: vec![Spec::f32(3)], ..view(&[32], &[1], 0) }, Some("it views F32")),
        (Answers::of(vec![]), Some("has 0 outputs")),
        (Answers::of(vec![Spec::f32(1); 64]), Some("has 64 outputs")),
        (Answers::of(vec![Spec::f32((far, 4))]), Some("more than 2^63 bytes")),
        (Answers::of(vec![Spec { shape: 8.into(), dtype: DType::F4 }]), Some("not whole bytes")),
        (Answers::of(vec![Spec::f32((1 << 59) - 1)]), Some("2^60")),
        (Answers { workspace: vec![64, 0, 3], ..answers() }, None),
        (Answers { workspace: vec![u64::MAX], ..answers() }, Some("2^60")),
        (Answers { workspace: vec![u64::MAX - 63], ..answers() }, Some("2^60")),
        (Answers { workspace: vec![1 << 63, 1 << 63], ..answers() }, Some("2^60")),
        (Answers { inplace: vec![(0, 0)], ..answers() }, None),
        (Answers { inplace: vec![(max, 0)], ..answers() }, Some("takes the bytes of input")),
        (Answers { inplace: vec![(0, max)], ..answers() }, Some("takes the bytes of input")),
        (mutates(&[(0, 0)]), None),
        (mutates(&[(2, 0)]), Some("takes the bytes of input 2")),
        (mutates(&[(1, 0)]), Some("must be")),
        (Answers { outputs: vec![same(), same()], ..mutates(&[(0, 0), (0, 1)]) }, Some("in two pairs of Op::mutates")),
        (mutates(&[(0, 0), (0, 0)]), Some("in two pairs of Op::mutates")),
        (counted(7, 1), Some("counted by input 7")),
        (counted(0, 1), Some("not u32")),
        (Answers { outputs: vec![Spec::f32(())], ..counted(1, 1) }, Some("without dimensions")),
        (counted(1, max), None),
        (Answers { cost: u64::MAX, ..answers() }, None),
    ] {
        let got = outcome(DType::F32, std::slice::from_ref(&answers), Reserve::Worst, 2);
        match (expected, &got) {
            (None, Outcome::Ran) => {}
            (Some(words), Outcome::Refused(error)) if error.contains(words) => {}
            _ => panic!("{expected:?}, but {got:?} of {answers:?}"),
        }
    }
}

/// Row counts come from the data. If a count exceeds the tensor's own rows, the run must fail even if the arena has
/// room, because the f32 copies of bf16 operands are only as large as the tensor.
#[test]
fn rows_are_no_more_than_their_tensors_have() {
    for dtype in [DType::F32, DType::BF16] {
        for (number, is_sound) in [(0, true), (3, true), (8, true), (9, false), (1 << 20, false), (u32::MAX, false)] {
            let spec = Spec { shape: DIMS.into(), dtype };
            let starts = Answers { number, ..Answers::of(vec![u32s(3)]) };
            let rows =
                Answers { rows: RowUse::DynamicOutputs { offsets: 2, balanced: 2 }, ..Answers::of(vec![spec.clone()]) };
            let reader = Answers { rows: RowUse::FixedOutputs, ..Answers::of(vec![spec]) };
            for reserve in [Reserve::Worst, Reserve::Balanced { factor: 1e9 }, Reserve::Bytes(1 << 20)] {
                let got = outcome(dtype, &[starts.clone(), rows.clone(), reader.clone()], reserve, 2);
                match got {
                    Outcome::Ran => assert!(is_sound, "{number} rows of {dtype:?}"),
                    Outcome::Stopped(error) => assert!(!is_sound && error.contains("the bound"), "{number}: {error}"),
                    other => panic!("{number} rows of {dtype:?}: {other:?}"),
                }
            }
        }
    }
}

/// A dynamic buffer keeps the row count for which it was placed, even if its rows are counted again.
#[test]
fn rows_that_are_counted_again_stay_as_many() {
    let mut program = Program { name: "hostile".into(), row_counts: 1, ..Program::default() };
    let mut add = |spec: &Spec, name: &str, kind| {
        let (tensor, op) = (name.into(), "hostile".into());
        let label = Label { tensor, op, layer: String::new(), role: Role::Activation };
        let (buffer, layout) = (program.add(spec.bytes(), label, kind), Layout::contiguous(spec.shape.clone()));
        Operand { buffer, layout, dtype: spec.dtype, overwritten_by: None, widened: None }
    };
    let starts = [0, 1].map(|_| add(&u32s(3), "starts", BufferKind::Temporary));
    let (rows, total) = (add(&same(), "rows", BufferKind::Temporary), add(&same(), "total", BufferKind::Output));
    program.buffers[rows.buffer.index()].dynamic_rows = Some(DynamicRows { count: 0, row_bytes: 16, balanced: 32 });
    let mut lay = |answers: Answers, inputs: &[&Operand], output: &Operand, defines_count| {
        let op = Hostile { answers: [answers.clone(), answers], is_recorded: Arc::default() };
        let inputs = inputs.iter().copied().cloned().collect();
        let instr = Instr::plain(InstrKind::Compute(Arc::new(op)), inputs, vec![output.clone()], 0, "layer".into());
        program.instrs.push(Instr { defines_count, ..instr });
    };
    let count = |number| Answers { number, ..Answers::of(vec![u32s(3)]) };
    lay(count(2), &[], &starts[0], Some(0));
    lay(Answers::of(vec![same()]), &[&starts[0]], &rows, None);
    lay(count(8), &[], &starts[1], Some(0));
    lay(Answers { elements: Some(2 * 4), ..Answers::of(vec![same()]) }, &[&rows, &starts[1]], &total, None);
    assert_eq!(run_program(program, Reserve::Balanced { factor: 1.0 }), Outcome::Ran);
}

/// The f32 copies of bf16 operands are part of the planned scratch, but a kernel must not be able to use these copies
/// as its own scratch.
#[test]
fn scratch_is_no_more_than_was_asked_for() {
    for dtype in [DType::F32, DType::BF16] {
        let answers = Answers { workspace: vec![64], ..Answers::of(vec![Spec { shape: DIMS.into(), dtype }]) };
        assert_eq!(outcome(dtype, std::slice::from_ref(&answers), Reserve::Worst, 1), Outcome::Ran);
        let greedy = Answers { greed: 1, ..answers };
        assert_eq!(outcome(dtype, &[greedy], Reserve::Worst, 1), Outcome::Panicked);
    }
}

#[test]
fn reserves_leave_no_address_space() {
    let starts = Answers::of(vec![u32s(3)]);
    let rows =
        Answers { rows: RowUse::DynamicOutputs { offsets: 2, balanced: usize::MAX }, ..Answers::of(vec![same()]) };
    let reader = Answers { rows: RowUse::FixedOutputs, ..Answers::of(vec![same()]) };
    for reserve in [
        Reserve::Bytes(u64::MAX),
        Reserve::Bytes(1 << 62),
        Reserve::Balanced { factor: f64::NAN },
        Reserve::Balanced { factor: f64::INFINITY },
        Reserve::Balanced { factor: -1.0 },
    ] {
        let got = outcome(DType::F32, &[starts.clone(), rows.clone(), reader.clone()], reserve, 1);
        assert!(matches!(got, Outcome::Refused(_)), "{reserve:?}: {got:?}");
    }
}

/// Small integers, and those at which sums and products overflow.
fn extreme() -> impl Strategy<Value = usize> {
    prop_oneof![
        20 => 0..10_usize,
        1 => prop_oneof![Just(64), Just(1 << 20), Just(1 << 31), Just(1 << 59)],
        1 => prop_oneof![Just(1 << 61), Just(1 << 62), Just(1 << 63), Just(usize::MAX - 63), Just(usize::MAX)],
    ]
}

fn specs() -> impl Strategy<Value = Spec> {
    let dtype = prop_oneof![3 => Just(DType::F32), 2 => Just(DType::BF16), 1 => Just(DType::U32), 1 => Just(DType::U8)];
    let dims = prop_oneof![4 => Just(vec![8, 4]), 1 => prop::collection::vec(extreme(), 0..3)];
    (dims, dtype).prop_map(|(dims, dtype)| Spec { shape: dims.into(), dtype })
}

fn pairs() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let index = || prop_oneof![20 => 0..2_usize, 1 => extreme()];
    prop_oneof![4 => Just(vec![]), 1 => Just(vec![(0, 0)]), 1 => prop::collection::vec((index(), index()), 0..3)]
}

fn answers() -> impl Strategy<Value = Answers> {
    let view = (prop::collection::vec(extreme(), 0..3), prop::collection::vec(extreme(), 0..3), extreme());
    let view =
        prop_oneof![5 => Just(None), 1 => view.prop_map(|(dims, strides, start)| Some(layout(&dims, &strides, start)))];
    let rows = prop_oneof![
        3 => Just(RowUse::Unaware),
        2 => Just(RowUse::FixedOutputs),
        2 => Just(RowUse::InheritsRows),
        2 => (1..4_usize, extreme()).prop_map(|(offsets, balanced)| RowUse::DynamicOutputs { offsets, balanced }),
    ];
    let workspace = prop::collection::vec(extreme().prop_map(|bytes| bytes as u64), 0..3);
    let outputs = prop_oneof![20 => prop::collection::vec(specs(), 1..4), 1 => Just(vec![])];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), 0..2_usize);
    let number = prop_oneof![4 => 0..10_u32, 1 => any::<u32>()];
    (outputs, view, workspace, pairs(), pairs(), rows, flags, (extreme(), number)).prop_map(
        |(outputs, view, workspace, inplace, mutates, rows, (accumulates, strides, bf16, greed), (cost, number))| {
            // The view has the dimensions of its inferred shape. Its strides and start are arbitrary.
            let outputs = match &view {
                Some(layout) => vec![Spec::f32(layout.dims())],
                None => outputs,
            };
            let greed = greed * usize::from(cost > 1 << 32);
            let cost = cost as u64;
            Answers {
                outputs,
                view,
                workspace,
                inplace,
                mutates,
                rows,
                accumulates,
                strides,
                bf16,
                cost,
                number,
                elements: None,
                greed,
            }
        },
    )
}

generated! {
    #![cases(2000)]

    /// Operations with dynamic rows. The first operation's output is the row count.
    #[test]
    fn rows_are_those_that_there_is_room_for(
        is_bf16: bool,
        number in prop_oneof![8 => 0..10_u32, 1 => any::<u32>()],
        others in prop::collection::vec((1..4_usize, 0..3_usize, any::<bool>(), any::<bool>(), extreme()), 1..6),
        factor in 0..4_u32,
        micro_batches in 1..4_u32,
    ) {
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        let answers = |count| Answers::of(vec![Spec { shape: DIMS.into(), dtype }; count]);
        let mut operations = vec![Answers { number, ..Answers::of(vec![u32s(3)]) }];
        for (count, kind, is_inplace, bf16, balanced) in others {
            let rows = [RowUse::InheritsRows, RowUse::FixedOutputs, RowUse::DynamicOutputs { offsets: 2, balanced }][kind];
            // Input 3 follows the parameter's copy and two row offsets: it is an output of an earlier operation.
            let inplace = if is_inplace { vec![(3, 0)] } else { vec![] };
            operations.push(Answers { rows, inplace, bf16, ..answers(count) });
        }
        operations[1].inplace.clear();
        operations.push(Answers { rows: RowUse::FixedOutputs, ..answers(1) });
        outcome(dtype, &operations, Reserve::Balanced { factor: factor.into() }, micro_batches);
    }

    #[test]
    fn whatever_operations_say_is_refused_or_sound(
        is_bf16: bool,
        operations in prop::collection::vec([answers(), answers()], 1..5),
        is_constant: bool,
        reserve in prop_oneof![
            Just(Reserve::Worst),
            Just(Reserve::Balanced { factor: 1.0 }),
            extreme().prop_map(|bytes| Reserve::Bytes(bytes as u64)),
        ],
        micro_batches in 1..3_u32,
    ) {
        // A panic outside of a kernel fails the test. A kernel that finds a tensor overwritten fails it as well.
        let dtype = if is_bf16 { DType::BF16 } else { DType::F32 };
        let operations: Vec<_> = operations.into_iter().map(|[first, later]| match is_constant {
            true => [first.clone(), first],
            false => [first, later],
        }).collect();
        changing(dtype, &operations, reserve, micro_batches);
    }
}
