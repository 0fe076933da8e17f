//! Fusion of a matrix product with the operation that follows it.

use std::collections::BTreeSet;

use gapless_kernels::cuda::launch::Epilogue;
use gapless_kernels::cuda::{Launch, Operand, Operands};

use gapless_kernels::cuda::generate::Source;

use super::{Fused, Fusible, Fusion, count};
use crate::program::{BufferId, Instr, InstrKind, Operand as Placed};

/// An operation that can follow a product in one kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EpilogueKind {
    /// GELU of the product.
    Gelu,
    /// The gradient of GELU, with the product as input 1.
    GeluGrad,
    /// The sum of the product and another tensor. The product may be either summand.
    Add,
}

impl EpilogueKind {
    /// Classifies an operation that reads a product. Returns `None` if the operation cannot be fused with the product.
    pub fn from_fusible(fusible: &Fusible) -> Option<Self> {
        let Fusible::Each { outputs, .. } = fusible else { return None };
        match &outputs[..] {
            [only] if only == "of_gelu($0)" => Some(Self::Gelu),
            [only] if only == "of_gelu_grad($0, $1)" => Some(Self::GeluGrad),
            [only] if only == "$0 + $1" => Some(Self::Add),
            _ => None,
        }
    }

    /// Returns the indices of the inputs at which the operation may read the product.
    pub fn inputs(self) -> &'static [usize] {
        match self {
            Self::Gelu => &[0],
            Self::GeluGrad => &[1],
            Self::Add => &[0, 1],
        }
    }
}

impl Fusion<'_> {
    /// True if `last` can be the epilogue of the product. An additional tensor that the library reads or writes must
    /// have rows whose length is a multiple of 8 elements (cuBLASLt, `CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`). A tensor
    /// to which the product is added must be contiguous, like the result.
    pub(super) fn fits_epilogue(&self, product: usize, last: usize) -> bool {
        const PACK: usize = 8;
        let Some(follows) = self.fusible[last].as_ref().and_then(EpilogueKind::from_fusible) else { return false };
        let (from, to) = (&self.program.instrs[product].outputs[0], &self.program.instrs[last].outputs[0]);
        let version = self.written[product][0];
        let places: Vec<usize> = (0..self.read[last].len()).filter(|&i| self.read[last][i] == version).collect();
        let is_only = places.len() == 1 && follows.inputs().contains(&places[0]);
        let is_kept = !self.is_private(&BTreeSet::from([product, last]), version);
        let fits = from.layout.dims() == to.layout.dims() && from.dtype == to.dtype;
        let columns = from.layout.dims().last().is_some_and(|columns| columns.is_multiple_of(PACK));
        let beside = || self.program.instrs[last].inputs.iter().zip(&self.read[last]).filter(|(_, v)| **v != version);
        is_only
            && match follows {
                EpilogueKind::Gelu => fits && columns,
                // Before it applies the gradient of GELU, the library cannot also store the product.
                EpilogueKind::GeluGrad => fits && columns && !is_kept,
                // The shapes may differ, because both tensors are contiguous.
                EpilogueKind::Add => {
                    let lies_alike = |(other, _): (&Placed, _)| {
                        other.layout.is_contiguous() && other.dtype == to.dtype && count(other) == count(to)
                    };
                    from.dtype == to.dtype && !is_kept && beside().all(lies_alike)
                }
            }
    }

    /// True if `last` adds an embedding gradient to another tensor in place, and nothing else reads that gradient.
    pub(super) fn adds_in_place(&self, rows: usize, last: usize) -> bool {
        let version = self.written[rows][0];
        let of_last = &self.program.instrs[last];
        let over: Vec<&usize> = self.read[last]
            .iter()
            .zip(&of_last.inputs)
            .filter(|(_, operand)| operand.overwritten_by == Some(0))
            .map(|(v, _)| v)
            .collect();
        let is_other = matches!(over[..], [&other] if other != version);
        let is_sum = self.fusible[last].as_ref().and_then(EpilogueKind::from_fusible) == Some(EpilogueKind::Add);
        let is_alike = self.program.instrs[rows].outputs[0].dtype == of_last.outputs[0].dtype;
        is_sum && is_other && is_alike && self.is_private(&BTreeSet::from([rows, last]), version)
    }

    /// True if `rows` is an embedding gradient, and only computation runs from `rows` to `last`. In this case, `last`
    /// may be in the update, although the gradient is in an action before it.
    pub(super) fn adds_in_update(&self, rows: usize, last: usize) -> bool {
        let computes = |instr: &Instr| matches!(instr.kind, InstrKind::Compute(_)) && instr.predicate.is_none();
        let is_rows = matches!(self.fusible[rows], Some(Fusible::EmbeddingGrad { .. }));
        is_rows && self.program.instrs[rows..=last].iter().all(computes)
    }

    /// True if a sum is better fused with the product that it reads than with the sum's own reader. The product then
    /// accumulates into the other summand, which saves a read and a write of that summand.
    pub(super) fn prefers_product(&self, sum: usize) -> bool {
        let makers = self.read[sum].iter().filter_map(|&version| self.versions[version].written_by);
        let mut products =
            makers.map(|(maker, _)| maker).filter(|&maker| self.fusible[maker] == Some(Fusible::Product));
        products.any(|product| self.joins(&BTreeSet::from([sum]), product))
    }

    /// True if fused instructions may overwrite a buffer that they read. The library for matrix products writes
    /// elements in its own order. So a fused product may overwrite only the tensor to which the product is added.
    pub(super) fn may_overwrite(&self, order: &[usize], buffer: BufferId) -> bool {
        let [first, .., last] = *order else { return true };
        let is_sum = || self.fusible[last].as_ref().and_then(EpilogueKind::from_fusible) == Some(EpilogueKind::Add);
        let is_read = || self.program.instrs[first].inputs.iter().any(|input| input.buffer == buffer);
        self.fusible[first] != Some(Fusible::Product) || is_sum() && !is_read()
    }
}

/// Returns the launches of a product and the operation that follows it, of which the last one is the library's call for
/// both. Returns `None` if there is no such call.
pub(super) fn product(fused: &Fused, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let [first, second] = &fused.members[..] else { return None };
    let output = |member: usize| {
        let index = fused.outputs.iter().position(|made| made.0 == member)?;
        Some(operands.outputs[index].clone())
    };
    let from_memory = |source: Source| match source {
        Source::Memory(input) => Some(operands.inputs[input].clone()),
        Source::Member(..) => None,
    };
    let inputs: Vec<Operand> = first.inputs.iter().map(|(source, _)| from_memory(*source)).collect::<Option<_>>()?;
    let alone = Operands { inputs: &inputs, outputs: &[output(1)?], accumulate: 0, ..*operands };
    let mut launches = first.op.cuda(&alone)?;
    let Some(Launch::Product(product)) = launches.last_mut() else { return None };
    match EpilogueKind::from_fusible(&second.op.cuda_fusible()?)? {
        EpilogueKind::Gelu => product.epilogue = Epilogue::Gelu { kept: output(0).map(|kept| kept.address) },
        EpilogueKind::GeluGrad => {
            product.epilogue = Epilogue::GeluGrad { of: from_memory(second.inputs[0].0)?.address }
        }
        EpilogueKind::Add => {
            let other = second.inputs.iter().find_map(|(source, _)| from_memory(*source))?;
            product.onto = Some(other.address);
        }
    }
    Some(launches)
}
