//! Launches of adamw.cu.

use std::any::Any;

use candle_core::DType;

use super::{BLOCK, FOLD_BYTES, Kernel, Launch, Operand, Operands, blocks, launches, typed};
use crate::cuda::Family::{AdamW, AdamW8bit};
use crate::{Spec, StochasticRounding};

/// Most tensors that one launch updates: `MAX_UPDATED` of adamw.cu.
const MAX_UPDATED: usize = 60;

/// Most tensors whose norms one launch computes: `MAX_TENSORS` of adamw.cu.
const MAX_TENSORS: usize = 160;

/// Elements that a block updates: `ADAMW_LENGTH` of adamw.cu.
const ADAMW_LENGTH: u32 = 2048;

/// Elements whose squares a block adds up: `NORM_LENGTH` of adamw.cu.
const NORM_LENGTH: u64 = 16384;

/// A parameter, and everything that its update reads and writes, as device addresses.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct AdamWTensor {
    /// The parameter.
    pub parameter: u64,
    /// The f32 master copy of a parameter that is stored in bf16. It is 0 for a parameter stored in f32.
    pub master: u64,
    /// The gradient.
    pub gradient: u64,
    /// The first moment, f32. It has the type of a parameter that is stored in bf16 without a master.
    pub m: u64,
    /// The second moment, with the type of the first.
    pub v: u64,
    /// Number of elements.
    pub count: u64,
    /// The index of the tensor's first block in the launch. It is set when the launch is built.
    pub first_block: u32,
    /// The weight decay.
    pub decay: f32,
    /// The tensor and the part of [`StochasticRounding`], if there is any.
    pub tensor: u32,
    /// See `tensor`.
    pub part: u32,
}

/// The settings of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct AdamWRule {
    /// The largest global norm of the gradients. Gradients with a larger norm are scaled down to it.
    pub max_norm: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the square root of the second moment.
    pub eps: f32,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AdamWArguments {
    tensors: [AdamWTensor; MAX_UPDATED],
    tensor_count: u64,
    norm: u64,
    scalars: u64,
    key: u64,
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

/// Returns the launch that computes the outputs (parameter, m, v) from the inputs (parameter, gradient, m, v, norm,
/// scalars). If the moments are f32 and the parameter is bf16, an f32 master is an additional last input and output.
/// Norm and scalars are read when the kernel runs. With `rounding`, all of them are bf16. Returns `None` if the operands do
/// not match this description.
pub fn adamw(
    rule: AdamWRule,
    decay: f64,
    rounding: Option<StochasticRounding>,
    operands: &Operands<'_>,
) -> Option<Vec<Launch>> {
    let [parameter, gradient, m, v, norm, scalars, master @ ..] = operands.inputs else { return None };
    // States have the parameter's type, or a parameter in bf16 has f32 states, among them a master.
    let is_pure = m.dtype == parameter.dtype;
    if is_pure != master.is_empty() || !(is_pure || m.dtype == DType::F32) {
        return None;
    }
    let is_pure_bf16 = is_pure && m.dtype == DType::BF16;
    let name = match (is_pure_bf16, rounding) {
        (true, Some(_)) => "adamw_stochastic",
        (true, None) => "adamw_pure",
        (false, None) => "adamw",
        (false, Some(_)) => return None,
    };
    let tensor = AdamWTensor {
        parameter: parameter.address,
        master: master.first().map_or(0, |master| master.address),
        gradient: gradient.address,
        m: m.address,
        v: v.address,
        count: parameter.count(),
        decay: decay as f32,
        tensor: rounding.map_or(0, |rounding| rounding.tensor),
        part: rounding.map_or(0, |rounding| rounding.part),
        ..AdamWTensor::default()
    };
    let update = Updates {
        name: typed(name, parameter.dtype)?,
        rule,
        norm: norm.address,
        scalars: scalars.address,
        key: rounding.map_or(0, |_| operands.random.key),
        sums_in_f32: u32::from(gradient.dtype == DType::F32),
    };
    launches([update.of(&[tensor])])
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct AdamW8bitArguments {
    parameter: u64,
    gradient: u64,
    m: u64,
    v: u64,
    m_scales: u64,
    v_scales: u64,
    norm: u64,
    scalars: u64,
    count: u64,
    rule: AdamWRule,
    decay: f32,
}

/// Returns the launch that computes the outputs (parameter, m, v, scales of m, scales of v) from the inputs (parameter,
/// gradient, m, v, scales of m, scales of v, norm, scalars). A scale belongs to `sharing` neighbouring elements, which
/// must be `SHARING` of adamw_8bit.cu.
pub fn adamw_8bit(rule: AdamWRule, decay: f64, sharing: usize, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [parameter, gradient, m, v, m_scales, v_scales, norm, scalars] = operands.inputs else { return None };
    if gradient.dtype != parameter.dtype || sharing != 256 {
        return None;
    }
    let count = parameter.count();
    let arguments = AdamW8bitArguments {
        parameter: parameter.address,
        gradient: gradient.address,
        m: m.address,
        v: v.address,
        m_scales: m_scales.address,
        v_scales: v_scales.address,
        norm: norm.address,
        scalars: scalars.address,
        count,
        rule,
        decay: decay as f32,
    };
    // A warp updates the elements of one scale.
    let threads = 32 * count.div_ceil(sharing as u64);
    launches([Kernel::flat(AdamW8bit, typed("adamw_8bit", parameter.dtype)?, threads, arguments)])
}

/// Returns the launch that computes the new weight average, in f32, from (average, parameter, norm).
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

/// Everything that the tensors of one launch share.
#[derive(Debug, Clone, PartialEq)]
struct Updates {
    name: String,
    rule: AdamWRule,
    norm: u64,
    scalars: u64,
    /// The address of the key of random numbers; 0 without stochastic rounding.
    key: u64,
    sums_in_f32: u32,
}

impl Updates {
    /// Returns the shared settings of a launch and the tensors that it updates. Returns `None` if [`adamw`] did not
    /// create the launch.
    fn read(launch: &Launch) -> Option<(Self, &[AdamWTensor])> {
        let Launch::Kernel(Kernel { name, arguments, .. }) = launch else { return None };
        let arguments = (arguments.as_ref() as &dyn Any).downcast_ref::<AdamWArguments>()?;
        let &AdamWArguments { rule, norm, scalars, key, sums_in_f32, ref tensors, tensor_count } = arguments;
        Some((Self { name: name.clone(), rule, norm, scalars, key, sums_in_f32 }, &tensors[..tensor_count as usize]))
    }

    fn of(&self, tensors: &[AdamWTensor]) -> Kernel {
        let &Self { rule, norm, scalars, key, sums_in_f32, .. } = self;
        let mut of_all = [AdamWTensor::default(); MAX_UPDATED];
        let mut first_block: u32 = 0;
        for (to, tensor) in of_all.iter_mut().zip(tensors) {
            *to = AdamWTensor { first_block, ..*tensor };
            first_block += blocks(tensor.count, ADAMW_LENGTH);
        }
        let tensor_count = tensors.len() as u64;
        Kernel {
            family: AdamW,
            name: self.name.clone(),
            grid: [first_block, 1, 1],
            block: BLOCK,
            shared_bytes: 0,
            tickets: 0,
            arguments: Box::new(AdamWArguments {
                tensors: of_all,
                tensor_count,
                norm,
                scalars,
                key,
                rule,
                sums_in_f32,
            }),
        }
    }
}

/// Combines the updates of consecutive launches into as few launches as possible. Each launch is given with the index
/// of its instruction. This does not change results, because the update of a parameter does not depend on other
/// parameters.
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

/// Returns the number of blocks that add up the squares of this many elements. It is at least 1, because the sum of
/// an empty tensor, 0, must also be stored.
fn norm_blocks(count: u64) -> u64 {
    count.div_ceil(NORM_LENGTH).max(1)
}

/// Returns the tensors as a table for a launch's arguments, the number of tensors, and the number of blocks that
/// process them.
fn table(tensors: &[Operand]) -> ([NormTensor; MAX_TENSORS], u64, u64) {
    let (mut table, mut first_block) = ([NormTensor::default(); MAX_TENSORS], 0);
    for (to, tensor) in table.iter_mut().zip(tensors) {
        let count = tensor.count();
        *to = NormTensor { x: tensor.address, count, first_block };
        first_block += norm_blocks(count);
    }
    (table, tensors.len() as u64, first_block)
}

/// Returns the size of the workspace for [`squared_norms`]: one f32 for each block of its largest launch.
pub fn squared_norms_workspace(elements: impl Iterator<Item = usize>) -> Vec<u64> {
    let blocks: Vec<u64> = elements.map(|count| norm_blocks(count as u64)).collect();
    vec![blocks.chunks(MAX_TENSORS).map(|blocks| 4 * blocks.iter().sum::<u64>()).max().unwrap_or(0)]
}

/// Returns the launches that compute Σ x² of each input, as an f64.
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

/// Returns the sizes of the workspace for [`global_norm`]. The first piece holds the sorted values. If there are more
/// tensors than one launch takes, a second piece holds the concatenated values.
pub fn global_norm_workspace(inputs: &[Spec]) -> Vec<u64> {
    let bytes = inputs.iter().map(Spec::bytes).sum();
    if inputs.len() > MAX_TENSORS { vec![bytes; 2] } else { vec![bytes] }
}

/// Returns the launches that compute √(Σ x) over all elements of all inputs, which are f64.
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
