//! The operations of a program that have no kernels for a GPU, and the error that names them all at once.

use std::fmt;

use candle_core::DType;
use gapless_compile::internal::Instruction;

use crate::error::Error;

/// An operation without GPU kernels for its operands, with the layers that contain it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingKernel {
    /// Name of the operation.
    pub operation: String,
    /// Types of its inputs.
    pub dtypes: Vec<DType>,
    /// The layers, in the order of the program.
    pub layers: Vec<String>,
}

/// Most layers that a message names.
const NAMED: usize = 3;

impl fmt::Display for MissingKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, dtypes, layers } = self;
        write!(f, "{operation} in {}", layers[..layers.len().min(NAMED)].join(", "))?;
        if layers.len() > NAMED {
            write!(f, " and {} more", layers.len() - NAMED)?;
        }
        write!(f, ", for inputs of {dtypes:?}")
    }
}

/// The operations without kernels that were found in the programs of an executable.
#[derive(Debug, Default)]
pub(super) struct Refused(Vec<MissingKernel>);

impl Refused {
    /// Adds an instruction without kernels.
    pub fn add(&mut self, instruction: &Instruction) {
        let layer = if instruction.layer.is_empty() { "the model" } else { &instruction.layer };
        let (operation, layer) = (instruction.kind.name(), layer.to_owned());
        let dtypes: Vec<DType> = instruction.inputs.iter().map(|input| input.dtype).collect();
        let known = self.0.iter_mut().find(|missing| missing.operation == operation && missing.dtypes == dtypes);
        match known {
            Some(missing) if missing.layers.contains(&layer) => {}
            Some(missing) => missing.layers.push(layer),
            None => self.0.push(MissingKernel { operation: operation.to_owned(), dtypes, layers: vec![layer] }),
        }
    }

    /// Returns an error if instructions were added.
    pub fn check(self) -> Result<(), Error> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::NoDeviceKernels { missing: self.0 }) }
    }
}
