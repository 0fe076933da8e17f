//! Checks fusion on random programs. Each instruction computes a hash of itself and its inputs, and fusion must not
//! change any hash that is read afterwards.

use std::any::Any;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_alloc::{Label, Role};
use gapless_graph::Op;
use gapless_graph::ops::{Binary, BinaryKind, LayerNorm, Softmax, Unary, UnaryKind};
use gapless_testing::prelude::*;

use super::fuse;
use super::fused::Fused;
use crate::program::{BufferId, BufferKind, Instr, InstrKind, Operand, Program};
use crate::test_support::{in_parts, peak};
use gapless_kernels::cuda::generate::Source;

/// Number of elements of a tensor.
const WIDTH: usize = 4;

fn buffer(program: &mut Program, elements: usize, kind: BufferKind) -> BufferId {
    let tensor = format!("buffer {}", program.buffers.len());
    let label = Label { tensor, op: String::new(), layer: String::new(), role: Role::Activation };
    program.add(4 * elements as u64, label, kind)
}

fn operand(buffer: BufferId, dims: &[usize]) -> Operand {
    Operand {
        buffer,
        layout: Layout::contiguous(dims.to_vec()),
        dtype: DType::F32,
        overwritten_by: None,
        widened: None,
    }
}

/// Returns random programs of elementwise functions, normalizations, and a function that cannot be fused. Each
/// instruction reads some of the latest buffers. It writes a new buffer, overwrites a buffer that it reads, or rewrites
/// another buffer. Parts have `part` instructions each.
fn any_program(instrs: std::ops::Range<usize>, part: usize) -> impl Strategy<Value = Program> {
    let instr = (0..9u8, 0..8u8, any::<[u8; 4]>());
    prop::collection::vec(instr, instrs).prop_map(move |described| {
        let mut program = Program::default();
        let mut there =
            vec![buffer(&mut program, WIDTH, BufferKind::Input), buffer(&mut program, WIDTH, BufferKind::Input)];
        for (kind, to, picks) in described {
            let pick = |i: usize| there[there.len() - 1 - picks[i] as usize % there.len().min(5)];
            let (op, reads): (Arc<dyn Op>, usize) = match kind {
                0..=2 => (Arc::new(Unary { kind: UnaryKind::Tanh }), 1),
                3..=5 => (Arc::new(Binary { kind: BinaryKind::Sub }), 2),
                6 => (Arc::new(LayerNorm { eps: 1e-5 }), 3),
                _ => (Arc::new(Softmax), 1),
            };
            let mut inputs: Vec<Operand> = (0..reads).map(|i| operand(pick(i), &[WIDTH])).collect();
            let over = inputs.iter().filter(|input| input.buffer == inputs[0].buffer).count() == 1;
            let anew = (0..4).map(pick).find(|&other| inputs.iter().all(|input| input.buffer != other));
            let output = match (to, anew) {
                (0..=2, _) if over && kind != 6 => {
                    inputs[0].overwritten_by = Some(0);
                    inputs[0].buffer
                }
                (3, Some(other)) if kind != 6 => other,
                (4, _) => buffer(&mut program, WIDTH, BufferKind::Output),
                _ => buffer(&mut program, WIDTH, BufferKind::Temporary),
            };
            there.push(output);
            let mut outputs = vec![operand(output, &[WIDTH])];
            if kind == 6 {
                outputs.push(operand(buffer(&mut program, 2, BufferKind::Temporary), &[1, 2]));
            }
            // Recomputed instructions may only be fused with each other.
            let mut instr = Instr::plain(InstrKind::Compute(op), inputs, outputs, 0, "".into());
            instr.rematerialized = picks[3] < 16;
            program.instrs.push(instr);
        }
        in_parts(program, part)
    })
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Returns the hashes of an operation's outputs, given the hashes of its inputs.
fn made(op: &dyn Op, inputs: &[u64], outputs: usize) -> Vec<u64> {
    let Some(fused) = (op as &dyn Any).downcast_ref::<Fused>() else {
        return (0..outputs).map(|output| hash((format!("{op:?}"), inputs, output))).collect();
    };
    let mut all: Vec<Vec<u64>> = Vec::new();
    for member in &fused.members {
        let source = |(source, _): &(Source, Vec<usize>)| match *source {
            Source::Memory(input) => inputs[input],
            Source::Member(member, output) => all[member][output],
        };
        let inputs: Vec<u64> = member.inputs.iter().map(source).collect();
        all.push(made(&*member.op, &inputs, 2));
    }
    fused.outputs.iter().map(|&(member, output)| all[member][output]).collect()
}

/// Returns the visible results of a program: the contents of buffers that the host reads, and the inputs of
/// instructions that cannot be fused.
fn shown(program: &Program) -> (Vec<(String, u64)>, Vec<Vec<u64>>) {
    let name = |buffer: BufferId| program.buffers[buffer.index()].label.tensor.clone();
    let mut there: HashMap<String, u64> = HashMap::new();
    let mut seen = Vec::new();
    for instr in &program.instrs {
        let InstrKind::Compute(op) = &instr.kind else { continue };
        let read =
            |operand: &Operand| there.get(&name(operand.buffer)).copied().unwrap_or_else(|| hash(name(operand.buffer)));
        let inputs: Vec<u64> = instr.inputs.iter().map(read).collect();
        if op.name() == "softmax_last_dim" {
            seen.push(inputs.clone());
        }
        for (output, value) in instr.outputs.iter().zip(made(&**op, &inputs, instr.outputs.len())) {
            there.insert(name(output.buffer), value);
        }
    }
    let read = program.buffers.iter().filter(|buffer| matches!(buffer.kind, BufferKind::Output));
    let read =
        read.map(|buffer| buffer.label.tensor.clone()).filter_map(|name| Some((name.clone(), *there.get(&name)?)));
    (read.collect(), seen)
}

generated! {
    #![cases(512)]

    #[test]
    fn fusing_keeps_values_and_does_not_raise_the_peak(program in any_program(1..60, 25)) {
        let mut merged = program.clone();
        fuse(&mut merged);
        prop_assert_eq!(shown(&merged), shown(&program));
        prop_assert!(peak(&merged) <= peak(&program), "{} bytes, before {}", peak(&merged), peak(&program));
        // Checks that parts are adjacent, and that nothing is computed twice or left out.
        let mut end = 0;
        for part in &merged.parts {
            prop_assert_eq!(part.instrs.start, end);
            end = part.instrs.end;
        }
        prop_assert_eq!(end, merged.instrs.len());
        let members = |program: &Program| -> usize {
            let count = |instr: &Instr| match &instr.kind {
                InstrKind::Compute(op) => (&**op as &dyn Any).downcast_ref::<Fused>().map_or(1, |fused| fused.members.len()),
                _ => 1,
            };
            program.instrs.iter().map(count).sum()
        };
        prop_assert_eq!(members(&merged), program.instrs.len());
        // Checks that operands that share a buffer are marked as overwritten.
        for instr in &merged.instrs {
            for output in &instr.outputs {
                let same = instr.inputs.iter().filter(|input| input.buffer == output.buffer);
                prop_assert!(same.clone().count() <= 1 && same.clone().all(|input| input.overwritten_by.is_some()));
            }
        }
    }
}

/// Fuses a chain and a diamond, and checks that certain instructions in between prevent fusion.
#[test]
fn chains_and_diamonds_are_fused() {
    let check = |instrs: &[(&str, &[usize], usize)], expected: usize| {
        let mut program = Program::default();
        let all: Vec<BufferId> = (0..8)
            .map(|index| {
                let kind = match index {
                    0 => BufferKind::Input,
                    7 => BufferKind::Output,
                    _ => BufferKind::Temporary,
                };
                buffer(&mut program, WIDTH, kind)
            })
            .collect();
        for &(name, inputs, output) in instrs {
            let op: Arc<dyn Op> = match name {
                "tanh" => Arc::new(Unary { kind: UnaryKind::Tanh }),
                "sub" => Arc::new(Binary { kind: BinaryKind::Sub }),
                _ => Arc::new(Softmax),
            };
            let inputs: Vec<Operand> = inputs
                .iter()
                .map(|&input| Operand {
                    overwritten_by: (input == output).then_some(0),
                    widened: None,
                    ..operand(all[input], &[WIDTH])
                })
                .collect();
            let outputs = vec![operand(all[output], &[WIDTH])];
            program.instrs.push(Instr::plain(InstrKind::Compute(op), inputs, outputs, 0, "".into()));
        }
        let mut program = in_parts(program, instrs.len());
        fuse(&mut program);
        assert_eq!(program.instrs.len(), expected, "{instrs:?}");
    };
    check(&[("tanh", &[0], 1), ("tanh", &[1], 7)], 1);
    check(&[("tanh", &[0], 1), ("tanh", &[1], 1), ("sub", &[0, 1], 7)], 1);
    check(&[("tanh", &[0], 1), ("tanh", &[1], 2), ("tanh", &[1], 3), ("sub", &[2, 3], 7)], 1);
    // The softmax needs the result of the first instruction, and the last instruction needs the softmax.
    check(&[("tanh", &[0], 1), ("softmax", &[1], 2), ("sub", &[1, 2], 7)], 3);
    // The softmax does not depend on the other instructions, so these instructions can be fused across the softmax.
    check(&[("tanh", &[0], 1), ("softmax", &[0], 2), ("sub", &[1, 2], 7)], 2);
    // The softmax overwrites an input of the first instruction.
    check(&[("tanh", &[0], 1), ("softmax", &[1], 0), ("tanh", &[1], 7), ("softmax", &[0], 2)], 4);
}
