//! Checks the pass on small programs. The reference is a brute-force search over all valid orders. It measures each
//! peak with the planner's lower bound.

use std::sync::Arc;

use gapless_alloc::{Label, Role};
use gapless_graph::ops::Contiguous;
use gapless_testing::prelude::*;

use super::order;
use crate::program::{BufferId, BufferKind, Instr, InstrKind, Operand, Program};
use crate::test_support::{in_parts, peak};

/// Returns random programs. Each instruction reads some earlier buffers, and writes a new buffer or rewrites an earlier
/// one. Parts have `part` instructions each.
fn any_program(instrs: std::ops::Range<usize>, part: usize) -> impl Strategy<Value = Program> {
    let instr = (1..20u64, any::<u64>(), 0..8u8, prop_oneof![4 => Just(0u64), 1 => 1..20u64]);
    prop::collection::vec(instr, instrs).prop_map(move |described| {
        let mut program = Program::default();
        let buffer = |program: &mut Program, bytes: u64, kind: BufferKind| {
            let label =
                Label { tensor: String::new(), op: String::new(), layer: String::new(), role: Role::Activation };
            program.add(bytes * 64, label, kind)
        };
        let mut there = vec![buffer(&mut program, 3, BufferKind::Input)];
        for (index, (bytes, random, kind, scratch)) in described.into_iter().enumerate() {
            let pick = |shift: u64| there[(random >> shift) as usize % there.len()];
            let inputs: Vec<BufferId> = (0..random as usize % 3).map(|i| pick(8 + 16 * i as u64)).collect();
            let output = match kind {
                0 => pick(4),
                // An output that the host reads.
                1 => buffer(&mut program, bytes, BufferKind::Output),
                _ => buffer(&mut program, bytes, BufferKind::Temporary),
            };
            there.push(output);
            let operand = |buffer: BufferId| Operand {
                buffer,
                layout: candle_core::Layout::contiguous(1),
                dtype: candle_core::DType::F32,
                overwritten_by: None,
                widened: None,
            };
            let inputs = inputs.into_iter().map(operand).collect();
            let work = InstrKind::Compute(Arc::new(Contiguous));
            let mut instr = Instr::plain(work, inputs, vec![operand(output)], index as u32, "".into());
            if scratch > 0 {
                instr.workspace = vec![buffer(&mut program, scratch, BufferKind::Temporary)];
            }
            program.instrs.push(instr);
        }
        in_parts(program, part)
    })
}

/// True if two instructions must keep their order: they use the same buffer, and one of them writes the buffer.
fn in_conflict(a: &Instr, b: &Instr) -> bool {
    let writes = |a: &Instr, b: &Instr| {
        let uses = || b.inputs.iter().chain(&b.outputs);
        a.outputs.iter().any(|output| uses().any(|operand| operand.buffer == output.buffer))
    };
    writes(a, b) || writes(b, a)
}

/// Returns the original indices of the instructions.
fn numbers(program: &Program) -> Vec<usize> {
    program.instrs.iter().map(|instr| instr.micro_batch as usize).collect()
}

/// Returns the lowest peak of all orders that start with `order`.
fn least(program: &Program, order: &mut Vec<usize>) -> u64 {
    let count = program.instrs.len();
    if order.len() == count {
        let mut ordered = program.clone();
        ordered.rearrange(order);
        return peak(&ordered);
    }
    let mut best = u64::MAX;
    for next in (0..count).filter(|next| !order.contains(next)).collect::<Vec<_>>() {
        let waits =
            |before: usize| !order.contains(&before) && in_conflict(&program.instrs[before], &program.instrs[next]);
        if !(0..next).any(waits) {
            order.push(next);
            best = best.min(least(program, order));
            order.pop();
        }
    }
    best
}

generated! {
    #![cases(96)]

    #[test]
    fn no_order_has_less_alive(program in any_program(1..8, 8)) {
        let mut ordered = program.clone();
        order(&mut ordered);
        prop_assert_eq!(peak(&ordered), least(&program, &mut Vec::new()));
    }

    /// Tests programs that are longer than one window and have several parts.
    #[test]
    fn less_is_alive_and_every_step_stays_in_its_part(program in any_program(1..300, 90)) {
        let mut ordered = program.clone();
        order(&mut ordered);
        prop_assert!(peak(&ordered) <= peak(&program));
        let place = numbers(&ordered);
        prop_assert!(place.iter().enumerate().all(|(at, number)| at / 90 == number / 90));
        prop_assert_eq!(ordered.parts.len(), program.parts.len());
        let mut at = vec![usize::MAX; place.len()];
        place.iter().enumerate().for_each(|(place, &number)| at[number] = place);
        for (a, b) in (0..place.len()).flat_map(|b| (0..b).map(move |a| (a, b))) {
            prop_assert!(at[a] < at[b] || !in_conflict(&program.instrs[a], &program.instrs[b]), "{a} and {b}");
        }
        // Checks that the pass is deterministic.
        let mut again = program.clone();
        order(&mut again);
        prop_assert_eq!(numbers(&again), place);
    }
}
