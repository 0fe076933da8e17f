//! A product of matrices with what follows it.

use gapless_kernels::cuda::launch::Epilogue;
use gapless_kernels::cuda::{Launch, Operand, Operands, Product};

use super::{Fused, Fusible};
use gapless_kernels::cuda::generate::Source;

/// What may follow a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// GELU of it.
    Gelu,
    /// The gradient of GELU, with the product for input 1.
    GeluGrad,
}

impl Follows {
    /// What an operation is to the product in front of it; none if it cannot follow.
    pub fn of(fusible: &Fusible) -> Option<Self> {
        let Fusible::Each { outputs, .. } = fusible else { return None };
        match &outputs[..] {
            [only] if only == "of_gelu($0)" => Some(Self::Gelu),
            [only] if only == "of_gelu_grad($0, $1)" => Some(Self::GeluGrad),
            _ => None,
        }
    }

    /// The input that the product is.
    pub fn input(self) -> usize {
        match self {
            Self::Gelu => 0,
            Self::GeluGrad => 1,
        }
    }
}

/// What is asked for, for a product and the one operation that follows.
pub(super) fn product(fused: &Fused, operands: &Operands<'_>) -> Option<Product> {
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
    let Ok([Launch::Product(product)]) = <[Launch; 1]>::try_from(first.op.cuda(&alone)?) else { return None };
    let epilogue = match Follows::of(&second.op.cuda_fusible()?)? {
        Follows::Gelu => Epilogue::Gelu { kept: output(0).map(|kept| kept.address) },
        Follows::GeluGrad => Epilogue::GeluGrad { of: from_memory(second.inputs[0].0)?.address },
    };
    Some(Product { epilogue, ..product })
}
