//! Launches of adamw.cu.

use std::any::Any;

use candle_core::DType;

use super::{BLOCK, FOLD_BYTES, Kernel, Launch, Operand, Operands, blocks, launches, typed};
use crate::Spec;
use crate::cuda::Family::AdamW;

/// Most tensors of a launch of updates: `MAX_UPDATED` of adamw.cu.
const MAX_UPDATED: usize = 60;

/// Most tensors of a launch of norms: `MAX_TENSORS` of adamw.cu.
const MAX_TENSORS: usize = 160;

/// Elements of a block: `ADAMW_LENGTH` of adamw.cu.
const ADAMW_LENGTH: u64 = 2048;

/// Elements of a block: `NORM_LENGTH` of adamw.cu.
const NORM_LENGTH: u64 = 16384;

/// A parameter with all that its update reads and writes: addresses on the device.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct AdamWTensor {
    /// The parameter.
    pub parameter: u64,
    /// The parameter in f32, where it is stored in less; else 0.
    pub master: u64,
    /// The gradient.
    pub gradient: u64,
    /// The first moment, f32.
    pub m: u64,
    /// The second moment, f32.
    pub v: u64,
    /// Elements.
    pub count: u64,
    /// Filled in when it is launched.
    pub first_block: u64,
    /// Weight decay.
    pub decay: f32,
}

/// The rule of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct AdamWRule {
    /// The global norm to which larger gradients are scaled.
    pub max_norm: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AdamWArguments {
    tensors: [AdamWTensor; MAX_UPDATED],
    tensor_count: u64,
    norm: u64,
    scalars: u64,
    rule: AdamWRule,
    sums_in_f32: u32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AverageArguments {
    average: u64,
    parameter: u64,
    norm: u64,
    count: u64,
    part: f32,
}

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct NormTensor {
    x: u64,
    count: u64,
    first_block: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct SquaredNormsArguments {
    tensors: [NormTensor; MAX_TENSORS],
    tensor_count: u64,
    parts: u64,
    tickets: u64,
    out: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct GlobalNormArguments {
    tensors: [NormTensor; MAX_TENSORS],
    tensor_count: u64,
    sorted: u64,
    out: u64,
    count: u64,
}

/// (parameter, m, v) from (parameter, gradient, m, v, norm, scalars), with an f32 master behind both where the parameter is
/// stored in less. Norm and scalars are read when the kernel runs.
pub fn adamw(rule: AdamWRule, decay: f64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [parameter, gradient, m, v, norm, scalars, master @ ..] = operands.inputs else { return None };
    if m.dtype != DType::F32 || (parameter.dtype == DType::F32) != master.is_empty() {
        return None;
    }
    let tensor = AdamWTensor {
        parameter: parameter.address,
        master: master.first().map_or(0, |master| master.address),
        gradient: gradient.address,
        m: m.address,
        v: v.address,
        count: parameter.count(),
        decay: decay as f32,
        ..AdamWTensor::default()
    };
    let update = Updates {
        name: typed("adamw", parameter.dtype)?,
        rule,
        norm: norm.address,
        scalars: scalars.address,
        sums_in_f32: u32::from(gradient.dtype == DType::F32),
    };
    launches([update.of(&[tensor])])
}

/// The average of a parameter after a step, in f32, from (average, parameter, norm).
pub fn weight_average(decay: f64, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [average, parameter, norm] = operands.inputs else { return None };
    let arguments = AverageArguments {
        average: average.address,
        parameter: parameter.address,
        norm: norm.address,
        count: average.count(),
        part: (1.0 - decay) as f32,
    };
    launches([Kernel::flat(AdamW, typed("weight_average", parameter.dtype)?, average.count(), arguments)])
}

/// What all tensors of a launch have in common.
#[derive(Debug, Clone, PartialEq)]
struct Updates {
    name: String,
    rule: AdamWRule,
    norm: u64,
    scalars: u64,
    sums_in_f32: u32,
}

impl Updates {
    /// What a launch updates, if it is one of [`adamw`].
    fn read(launch: &Launch) -> Option<(Self, &[AdamWTensor])> {
        let Launch::Kernel(Kernel { name, arguments, .. }) = launch else { return None };
        let arguments = (arguments.as_ref() as &dyn Any).downcast_ref::<AdamWArguments>()?;
        let &AdamWArguments { rule, norm, scalars, sums_in_f32, ref tensors, tensor_count } = arguments;
        Some((Self { name: name.clone(), rule, norm, scalars, sums_in_f32 }, &tensors[..tensor_count as usize]))
    }

    fn of(&self, tensors: &[AdamWTensor]) -> Kernel {
        let &Self { rule, norm, scalars, sums_in_f32, .. } = self;
        let mut of_all = [AdamWTensor::default(); MAX_UPDATED];
        let mut first_block = 0;
        for (to, tensor) in of_all.iter_mut().zip(tensors) {
            *to = AdamWTensor { first_block, ..*tensor };
            first_block += tensor.count.div_ceil(ADAMW_LENGTH);
        }
        let tensor_count = tensors.len() as u64;
        Kernel {
            family: AdamW,
            name: self.name.clone(),
            grid: [blocks(first_block, 1), 1, 1],
            block: BLOCK,
            shared_bytes: 0,
            tickets: 0,
            arguments: Box::new(AdamWArguments { tensors: of_all, tensor_count, norm, scalars, rule, sums_in_f32 }),
        }
    }
}

/// The same, each with the instruction that it is for, with updates of neighbours in common launches, as many as fit: one
/// parameter has nothing to do with another.
pub fn together(launches: Vec<(usize, Launch)>) -> Vec<(usize, Launch)> {
    let mut all = Vec::with_capacity(launches.len());
    let mut pending: Option<(usize, Updates, Vec<AdamWTensor>)> = None;
    let flush = |pending: &mut Option<(usize, Updates, Vec<AdamWTensor>)>, all: &mut Vec<(usize, Launch)>| {
        if let Some((first, updates, tensors)) = pending.take() {
            all.extend(tensors.chunks(MAX_UPDATED).map(|tensors| (first, Launch::Kernel(updates.of(tensors)))));
        }
    };
    for (index, launch) in launches {
        match (Updates::read(&launch), &mut pending) {
            (Some((updates, tensors)), Some((_, of_pending, together))) if *of_pending == updates => {
                together.extend_from_slice(tensors);
            }
            (Some((updates, tensors)), _) => {
                let tensors = tensors.to_vec();
                flush(&mut pending, &mut all);
                pending = Some((index, updates, tensors));
            }
            (None, _) => {
                flush(&mut pending, &mut all);
                all.push((index, launch));
            }
        }
    }
    flush(&mut pending, &mut all);
    all
}

/// Blocks that square so many elements: one at least, which says that nothing is 0.
fn norm_blocks(count: u64) -> u64 {
    count.div_ceil(NORM_LENGTH).max(1)
}

/// Tensors in a launch's arguments, how many there are, and the blocks that go through them.
fn table(tensors: &[Operand]) -> ([NormTensor; MAX_TENSORS], u64, u64) {
    let (mut table, mut first_block) = ([NormTensor::default(); MAX_TENSORS], 0);
    for (to, tensor) in table.iter_mut().zip(tensors) {
        let count = tensor.count();
        *to = NormTensor { x: tensor.address, count, first_block };
        first_block += norm_blocks(count);
    }
    (table, tensors.len() as u64, first_block)
}

/// Bytes of a number for each block that [`squared_norms`] starts at once.
pub fn squared_norms_workspace(elements: impl Iterator<Item = usize>) -> Vec<u64> {
    let blocks: Vec<u64> = elements.map(|count| norm_blocks(count as u64)).collect();
    vec![blocks.chunks(MAX_TENSORS).map(|blocks| 4 * blocks.iter().sum::<u64>()).max().unwrap_or(0)]
}

/// Σ x² of each input, as f64.
pub fn squared_norms(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([first, ..], [out], &[parts]) = (operands.inputs, operands.outputs, operands.workspace) else { return None };
    let name = typed("squared_norms", first.dtype)?;
    let kernels = operands.inputs.chunks(MAX_TENSORS).enumerate().map(|(chunk, inputs)| {
        let (tensors, tensor_count, part_count) = table(inputs);
        let out = out.address + (chunk * MAX_TENSORS * size_of::<f64>()) as u64;
        let arguments = SquaredNormsArguments { tensors, tensor_count, parts, tickets: operands.tickets, out };
        Launch::Kernel(Kernel {
            family: AdamW,
            name: name.clone(),
            grid: [blocks(part_count, 1), 1, 1],
            block: BLOCK,
            shared_bytes: FOLD_BYTES,
            tickets: inputs.len() as u32,
            arguments: Box::new(arguments),
        })
    });
    Some(kernels.collect())
}

/// Bytes of all numbers in order; and of all of them side by side, where a launch does not take as many tensors.
pub fn global_norm_workspace(inputs: &[Spec]) -> Vec<u64> {
    let bytes = inputs.iter().map(Spec::bytes).sum();
    if inputs.len() > MAX_TENSORS { vec![bytes; 2] } else { vec![bytes] }
}

/// √(Σ x) over all elements of all f64 inputs.
pub fn global_norm(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([out], [sorted, side_by_side @ ..]) = (operands.outputs, operands.workspace) else { return None };
    let count = operands.inputs.iter().map(Operand::count).sum();
    let mut kernels = Vec::new();
    let mut all = table(operands.inputs.get(..MAX_TENSORS).unwrap_or(operands.inputs));
    if let [side_by_side, ..] = *side_by_side {
        let mut to = side_by_side;
        for inputs in operands.inputs.chunks(MAX_TENSORS) {
            let (tensors, tensor_count, _) = table(inputs);
            let count = inputs.iter().map(Operand::count).sum();
            let arguments = GlobalNormArguments { tensors, tensor_count, sorted: to, out: 0, count };
            kernels.push(Kernel::flat(AdamW, "side_by_side".into(), count, arguments));
            to += count * size_of::<f64>() as u64;
        }
        let mut tensors = [NormTensor::default(); MAX_TENSORS];
        tensors[0] = NormTensor { x: side_by_side, count, first_block: 0 };
        all = (tensors, 1, 0);
    }
    let (tensors, tensor_count, _) = all;
    kernels.push(Kernel {
        family: AdamW,
        name: "global_norm".into(),
        grid: [1; 3],
        block: BLOCK,
        shared_bytes: 8 * BLOCK,
        tickets: 0,
        arguments: Box::new(GlobalNormArguments { tensors, tensor_count, sorted: *sorted, out: out.address, count }),
    });
    Some(kernels.into_iter().map(Launch::Kernel).collect())
}
