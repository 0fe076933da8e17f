//! What an operation can bring into a kernel that several of them share.

/// What an operation can bring into a kernel that several of them share.
#[derive(Debug, Clone, PartialEq)]
pub enum Fusible {
    /// Each element of its outputs is made of those at the same place of its inputs. Of more than ten inputs or constants it
    /// stays by itself.
    Each {
        /// For each output an expression in C, in f32: `$0` is the element of input 0, `%0` constant 0, and `i` its place. An
        /// operation whose expressions name others than there are stays by itself.
        outputs: Vec<String>,
        /// What `%0`, `%1`, … are.
        constants: Vec<Constant>,
    },
    /// One product of matrices, with one output that has no gaps: what follows it may be done before that is stored.
    Product,
    /// Rows of input 0 normalised by inputs 1 and, if centred, 2; with their statistics.
    Norm {
        /// Whether it is layer normalisation, rather than by the root of mean squares.
        is_centred: bool,
        /// Added to the variance.
        eps: f64,
    },
    /// The gradient of the rows, from (x, weight, statistics, dy).
    NormGradInput {
        /// As above.
        is_centred: bool,
    },
    /// A table's gradient from (ids, dy), which can be added to a tensor in place.
    EmbeddingGrad {
        /// The id that adds nothing.
        padding: Option<u32>,
    },
    /// The gradients of weight and bias, from (x, statistics, dy): made in the pass over the rows that makes theirs.
    NormGradWeight,
}

impl Fusible {
    /// Whether its expressions, if it has any, are of inputs and constants that there are.
    pub fn is_well_formed(&self, inputs: usize) -> bool {
        let Self::Each { outputs, constants } = self else { return true };
        let names = |expression: &String, mark: char, count: usize| {
            expression.split(mark).skip(1).all(|rest| {
                rest.chars().next().and_then(|digit| digit.to_digit(10)).is_some_and(|index| (index as usize) < count)
            })
        };
        outputs.iter().all(|output| names(output, '$', inputs) && names(output, '%', constants.len()))
    }

    /// One output by an expression of the inputs.
    pub fn each(expression: impl Into<String>) -> Self {
        Self::Each { outputs: vec![expression.into()], constants: Vec::new() }
    }
}

/// What a kernel is told when it is launched, so that one kernel does for all layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Constant {
    /// An f32.
    Number(f32),
    /// A `u64`.
    Bits(u64),
    /// A sequence of random numbers, by its place in the model: the kernel has a `Numbers` of it.
    Place(u64),
}
