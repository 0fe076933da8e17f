//! Programs that a user has changed. If a change would let two tensors share memory that each of them needs, the
//! program does not compile.
#![forbid(unsafe_code)]

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};
use gapless_communicator::Tag;
use gapless_compile::{
    BufferId, BufferKind, CompileOptions, DynamicRows, Error, Instr, InstrKind, IoTensor, Message, OffloadBuffer,
    Operand, Part, Program, compile,
};
use gapless_graph::Spec;
use gapless_graph::nn::{Init, Initializer};
use gapless_graph::ops::{Collective, Contiguous};
use gapless_parallel::Axes;

const COUNT: usize = 32;
const BYTES: u64 = 4 * COUNT as u64;

fn label(tensor: &str) -> Label {
    Label { tensor: tensor.into(), op: "test".into(), layer: String::new(), role: Role::Activation }
}

fn spec() -> Spec {
    Spec::f32(COUNT)
}

fn always(name: &str, spec: Spec) -> BufferKind {
    // A size that cannot be counted has no window.
    let dims = spec.checked_bytes().map_or(&[][..], |_| spec.dims());
    let fill = Initializer::whole(Init::Const(1.0), name, dims);
    BufferKind::Persistent { fill, spec }
}

fn operand(buffer: BufferId, spec: &Spec) -> Operand {
    let layout = Layout::contiguous(spec.shape.clone());
    Operand { buffer, layout, dtype: spec.dtype, overwritten_by: None, widened: None }
}

fn instr(kind: InstrKind, inputs: Vec<Operand>, outputs: Vec<Operand>) -> Instr {
    Instr::plain(kind, inputs, outputs, 0, "layer".into())
}

fn copy(from: BufferId, to: BufferId) -> Instr {
    instr(InstrKind::Compute(Arc::new(Contiguous)), vec![operand(from, &spec())], vec![operand(to, &spec())])
}

fn message(request: usize) -> Message {
    Message { peer: 1, tag: Tag::default(), request }
}

/// The name of a change or a part of the expected message, and the change itself.
type Change = (&'static str, fn(&mut Case));

/// A program that copies `parameter` to `x`, and then `x` to `y`. The host reads `y`.
struct Case {
    program: Program,
    parameter: BufferId,
    x: BufferId,
    y: BufferId,
}

impl Case {
    fn new() -> Self {
        let mut program = Program { name: "case".into(), ..Program::default() };
        let parameter = program.add(BYTES, label("parameter"), always("parameter", spec()));
        let x = program.add(BYTES, label("x"), BufferKind::Temporary);
        let y = program.add(BYTES, label("y"), BufferKind::Output);
        program.instrs = vec![copy(parameter, x), copy(x, y)];
        let workspace = program.add(64, label("workspace"), BufferKind::Temporary);
        program.instrs[0].workspace.push(workspace);
        let output = IoTensor { name: "y".into(), micro_batch: 0, operand: operand(y, &spec()), spec: spec() };
        program.outputs.push(output);
        program.parts.push(Part { instrs: 0..2, name: "all".into(), action: None });
        Self { program, parameter, x, y }
    }

    fn buffer(&mut self, bytes: u64) -> BufferId {
        self.program.add(bytes, label("more"), BufferKind::Temporary)
    }

    fn layout(&mut self, strides: &[usize], start: usize) {
        let dims = if strides.is_empty() { vec![] } else { vec![COUNT / strides.len(); strides.len()] };
        self.program.instrs[1].inputs[0].layout = Layout::new(dims.into(), strides.to_vec(), start);
    }

    /// Makes the rows of `x` dynamic, at 16 bytes each.
    fn dynamic_rows(&mut self, rows: DynamicRows) {
        self.program.row_counts = 1;
        self.program.buffers[self.x.index()].dynamic_rows = Some(rows);
    }

    /// Inserts the instruction `begin` and the wait `end` after the first instruction.
    fn exchange(&mut self, begin: Instr, end: InstrKind) {
        let held = begin.inputs.iter().chain(&begin.outputs).cloned().collect();
        self.program.requests = 1;
        self.program.instrs.splice(1..1, [begin, instr(end, held, vec![])]);
        self.program.parts.clear();
    }

    fn receive(&mut self) {
        let into = self.buffer(BYTES);
        let begin = instr(InstrKind::Receive(message(0)), vec![], vec![operand(into, &spec())]);
        self.exchange(begin, InstrKind::Wait(message(0)));
    }

    fn collective(&mut self, collective: Collective, inputs: &[Spec], output: Spec) {
        let mut add = |spec: &Spec| operand(self.program.add(spec.bytes(), label("more"), BufferKind::Temporary), spec);
        let begin =
            instr(InstrKind::Collective(collective, 0), inputs.iter().map(&mut add).collect(), vec![add(&output)]);
        self.exchange(begin, InstrKind::Finish(0));
    }

    fn rows(&mut self, starts: [Spec; 2], rows: usize, ranks: usize) {
        let collective =
            Collective::AllToAllRows { axes: Axes::EXPERT, ranks, rows, receives_dynamic_rows: false, balanced: 1 };
        let [sent, received] = starts;
        self.collective(collective, &[Spec::f32((8, 4)), sent, received], Spec::f32((8, 4)));
    }
}

const ROWS: DynamicRows = DynamicRows { count: 0, row_bytes: 16, balanced: 64 };

fn compiled(case: Case) -> Result<(), Error> {
    compile(&[case.program], &CompileOptions::default()).map(drop)
}

#[test]
fn sound_programs_compile() {
    let u32s = |count: usize| Spec { shape: count.into(), dtype: DType::U32 };
    let sound: [Change; 6] = [
        ("as it is", |_| {}),
        ("a view", |case| case.layout(&[1, 0], 16)),
        ("rows that are counted", |case| case.dynamic_rows(ROWS)),
        ("a message", Case::receive),
        ("a gathering", |case| {
            let collective = Collective::AllGather { axes: Axes::BATCH, ranks: 2 };
            case.collective(collective, &[Spec::f32(8)], Spec::f32(16));
        }),
        ("a constant that a shape repeats", |case| case.layout(&[0], 31)),
    ];
    for (name, change) in sound {
        let mut case = Case::new();
        change(&mut case);
        compiled(case).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let mut case = Case::new();
    case.rows([u32s(3), u32s(5)], 8, 2);
    compiled(case).unwrap();
}

/// Each change, with a part of the expected message.
const UNSOUND: [Change; 60] = [
    // Positions of operands.
    ("beyond its buffer", |case| case.layout(&[1 << 62], 0)),
    ("beyond its buffer", |case| case.layout(&[usize::MAX], 0)),
    ("beyond its buffer", |case| case.layout(&[1 << 31, 1 << 31], 0)),
    ("beyond its buffer", |case| case.layout(&[2], 0)),
    ("beyond its buffer", |case| case.layout(&[1], 1)),
    ("beyond its buffer", |case| case.layout(&[0], usize::MAX)),
    ("beyond its buffer", |case| case.layout(&[0], 1 << 62)),
    ("beyond its buffer", |case| {
        case.program.instrs[1].inputs[0].layout = Layout::new(COUNT.into(), vec![], 0);
    }),
    ("beyond its buffer", |case| {
        case.program.instrs[1].inputs[0].layout = Layout::new((1 << 40, 1 << 40).into(), vec![0, 0], 0);
    }),
    ("beyond its buffer", |case| case.program.instrs[1].inputs[0].dtype = DType::F64),
    ("beyond its buffer", |case| case.program.instrs[1].inputs[0].dtype = DType::F4),
    ("beyond its buffer", |case| case.program.buffers[case.x.index()].bytes = BYTES - 1),
    ("it names buffer 4 of 4", |case| case.program.instrs[1].inputs[0].buffer = Case::another()),
    ("it names buffer 4 of 4", |case| case.program.instrs[0].workspace[0] = Case::another()),
    ("beyond its buffer", |case| case.program.outputs[0].operand.layout = Layout::contiguous_with_offset(COUNT, 1)),
    ("has gaps or is not", |case| case.program.outputs[0].operand.dtype = DType::U32),
    ("has gaps or is not", |case| case.program.outputs[0].spec = Spec::f32(COUNT + 1)),
    ("too few for", |case| {
        case.program.buffers[case.parameter.index()].kind = always("parameter", Spec::f32(COUNT + 1))
    }),
    ("too few for", |case| {
        case.program.buffers[case.parameter.index()].kind = always("parameter", Spec::f32((1 << 40, 1 << 40)))
    }),
    // Sizes.
    ("2^60", |case| case.program.buffers[3].bytes = u64::MAX),
    ("2^60", |case| case.program.buffers[3].bytes = u64::MAX - 63),
    ("2^60", |case| case.program.buffers[3].bytes = 1 << 62),
    ("2^60", |case| (0..20).for_each(|_| _ = case.buffer(1 << 60))),
    ("2^60", |case| case.program.offload.push(OffloadBuffer { bytes: u64::MAX })),
    // Overlap of operands.
    ("the same bytes", |case| {
        let output = case.program.instrs[0].outputs[0].clone();
        case.program.instrs[0].outputs.push(output);
    }),
    ("an input that it does not overwrite", |case| case.program.instrs[1].outputs[0].buffer = case.x),
    ("another shape or use", |case| case.program.instrs[1].inputs[0].overwritten_by = Some(0)),
    ("another shape or use", |case| case.program.instrs[1].inputs[0].overwritten_by = Some(usize::MAX)),
    ("another shape or use", |case| {
        let instr = &mut case.program.instrs[1];
        instr.inputs[0].overwritten_by = Some(0);
        instr.inputs.push(operand(case.x, &spec()));
        instr.outputs[0].buffer = case.x;
    }),
    ("another operand's", |case| case.program.instrs[0].workspace[0] = case.x),
    ("another operand's", |case| case.program.instrs[0].workspace[0] = case.parameter),
    ("another operand's", |case| {
        let piece = case.program.instrs[0].workspace[0];
        case.program.instrs[0].workspace.push(piece);
    }),
    ("in f32", |case| {
        let instr = &mut case.program.instrs[0];
        instr.inputs[0].dtype = DType::BF16;
        instr.inputs[0].widened = Some(instr.workspace[0]);
    }),
    ("last pieces of its scratch", |case| {
        let piece = case.buffer(BYTES);
        let instr = &mut case.program.instrs[1];
        (instr.inputs[0].dtype, instr.inputs[0].widened) = (DType::BF16, Some(piece));
    }),
    ("it has 64 outputs", |case| {
        let more: Vec<Operand> = (0..63).map(|_| operand(case.buffer(BYTES), &spec())).collect();
        case.program.instrs[0].outputs.extend(more);
    }),
    ("are named \"parameter\"", |case| {
        let again = case.program.add(BYTES, label("parameter"), always("parameter", spec()));
        case.program.instrs.push(copy(case.x, again));
    }),
    ("are named \"parameter\"", |case| {
        let again = case.program.add(BYTES, label("parameter"), BufferKind::Cache);
        case.program.instrs.push(copy(case.x, again));
    }),
    // Dynamic rows.
    ("cannot have", |case| case.dynamic_rows(DynamicRows { count: 1, ..ROWS })),
    ("cannot have", |case| case.dynamic_rows(DynamicRows { row_bytes: 0, ..ROWS })),
    ("cannot have", |case| case.dynamic_rows(DynamicRows { row_bytes: 1 << 62, ..ROWS })),
    ("only a part of a tensor", |case| case.dynamic_rows(DynamicRows { row_bytes: 2, ..ROWS })),
    ("only a part of a tensor", |case| {
        case.dynamic_rows(ROWS);
        case.program.instrs[1].inputs[0].layout = Layout::contiguous(COUNT / 2);
    }),
    ("cannot have", |case| {
        case.dynamic_rows(ROWS);
        case.program.buffers[case.x.index()].kind = BufferKind::Output;
    }),
    ("cannot be count", |case| {
        case.dynamic_rows(ROWS);
        case.program.instrs[0].defines_count = Some(0);
    }),
    ("depends on count", |case| case.program.instrs[0].predicate = Some(0)),
    ("do not fit this kind", |case| {
        case.program.row_counts = 1;
        let number = Operand::scalar(case.buffer(4));
        case.program.instrs.push(instr(InstrKind::ApplyVote(0), vec![number], vec![]));
    }),
    ("do not fit this kind", |case| {
        case.program.row_counts = 1;
        let number = Operand { dtype: DType::U8, ..Operand::scalar(case.buffer(1)) };
        case.program.instrs.push(instr(InstrKind::Vote(0), vec![], vec![number]));
    }),
    // Messages and collectives.
    ("never waited for", |case| {
        case.receive();
        case.program.instrs.remove(2);
    }),
    ("was not started", |case| {
        case.receive();
        case.program.instrs.remove(1);
    }),
    ("lacks its operands", |case| {
        case.receive();
        case.program.instrs[2].inputs[0].buffer = case.x;
    }),
    ("being sent, received or copied", |case| {
        case.receive();
        let received = case.program.instrs[1].outputs[0].buffer;
        case.program.instrs.insert(2, copy(received, case.y));
    }),
    ("is used twice", |case| {
        case.receive();
        case.program.requests = 0;
    }),
    ("do not fit this kind", |case| {
        case.collective(Collective::AllGather { axes: Axes::BATCH, ranks: 3 }, &[Spec::f32(8)], Spec::f32(16));
    }),
    ("do not fit this kind", |case| {
        let bytes = Spec { shape: 16.into(), dtype: DType::U8 };
        case.collective(
            Collective::ReduceScatter { axes: Axes::BATCH, ranks: 1 },
            std::slice::from_ref(&bytes),
            bytes.clone(),
        );
    }),
    ("do not fit this kind", |case| {
        case.collective(Collective::AllToAll { axes: Axes::EXPERT, ranks: 2 }, &[Spec::f32(8)], Spec::f32(16));
    }),
    ("do not fit this kind", |case| {
        let bytes = Spec { shape: 3.into(), dtype: DType::U8 };
        case.rows([bytes.clone(), bytes], 8, 2);
    }),
    ("do not fit this kind", |case| {
        let starts = Spec { shape: 3.into(), dtype: DType::U32 };
        case.rows([starts.clone(), starts], 0, 2);
    }),
    // Copies of offloaded tensors.
    ("being sent, received or copied", |case| {
        let (id, x) = (case.program.add_offload(BYTES), operand(case.x, &spec()));
        case.program.instrs.insert(1, instr(InstrKind::Fetch(id), vec![], vec![x.clone()]));
        case.program.instrs.push(instr(InstrKind::Fetched(id), vec![x], vec![]));
        case.program.parts.clear();
    }),
    ("was not started", |case| {
        let (id, x) = (case.program.add_offload(BYTES), operand(case.x, &spec()));
        case.program.instrs.insert(1, instr(InstrKind::Offloaded(id), vec![x], vec![]));
        case.program.parts.clear();
    }),
    ("covers instructions", |case| case.program.parts[0].instrs = 0..3),
];

impl Case {
    /// The id of a buffer that only another program has.
    fn another() -> BufferId {
        let mut case = Self::new();
        case.buffer(64)
    }
}

#[test]
fn unsound_programs_are_refused() {
    for (index, (expected, change)) in UNSOUND.iter().enumerate() {
        let mut case = Case::new();
        change(&mut case);
        let error = compiled(case).expect_err(&format!("case {index}: {expected}"));
        assert!(matches!(error, Error::Unsound { .. } | Error::TooLarge { .. }), "case {index}: {error}");
        assert!(error.to_string().contains(expected), "case {index}: {error}");
    }
}

/// Tensors that programs share by name must have the same kind, size and type in all of them.
#[test]
fn tensors_of_one_name_are_one() {
    let kinds = [
        BufferKind::Cache,
        always("parameter", Spec::f32(COUNT + 1)),
        always("parameter", Spec { shape: COUNT.into(), dtype: DType::U32 }),
    ];
    for kind in kinds {
        let (case, mut other) = (Case::new(), Case::new());
        let changed = &mut other.program.buffers[other.parameter.index()];
        (changed.kind, changed.bytes) = (kind, BYTES + 4);
        let error = compile(&[case.program, other.program], &CompileOptions::default()).unwrap_err();
        assert!(error.to_string().contains("is a different tensor in an earlier program"), "{error}");
    }
}
