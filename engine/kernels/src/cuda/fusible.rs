//! The ways in which an operation can be fused with others into one kernel.

/// The part that an operation can contribute to a fused kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum Fusible {
    /// An elementwise operation: each element of an output depends on the inputs' elements at the same index. If the
    /// operation has more than ten inputs or constants, it is not fused.
    Each {
        /// One C expression in f32 per output. In it, `$0` is the element of input 0, `%0` is constant 0, and `i` is
        /// the element's index. If an expression names an input or constant that does not exist, the operation is not
        /// fused.
        outputs: Vec<String>,
        /// The values of `%0`, `%1`, ….
        constants: Vec<Constant>,
    },
    /// One matrix product with one contiguous output. Elementwise operations can be applied to the output before it
    /// is stored.
    Product,
    /// Normalization of input 0 along rows. Input 1 is the weight and, if centered, input 2 is the bias. The second
    /// output holds the rows' statistics.
    Norm {
        /// True for layer normalization, false for RMS normalization.
        is_centred: bool,
        /// Epsilon, which is added to the variance.
        eps: f64,
    },
    /// The input gradient of a normalization, from (x, weight, statistics, dy).
    NormGradInput {
        /// True for layer normalization, false for RMS normalization.
        is_centred: bool,
    },
    /// The gradient of an embedding table, from (ids, dy). Can be added in place to another tensor.
    EmbeddingGrad {
        /// The id of padding, whose row gets no gradient; `None` if there is no padding.
        padding: Option<u32>,
        /// The id of the table's first row.
        first: u32,
    },
    /// The gradients of a normalization's weight and bias, from (x, statistics, dy). They can be computed in the same
    /// pass over the rows as the input gradient.
    NormGradWeight,
}

impl Fusible {
    /// True if all expressions only refer to inputs and constants that exist.
    pub fn is_well_formed(&self, inputs: usize) -> bool {
        let Self::Each { outputs, constants } = self else { return true };
        let names = |expression: &String, mark: char, count: usize| {
            expression.split(mark).skip(1).all(|rest| {
                rest.chars().next().and_then(|digit| digit.to_digit(10)).is_some_and(|index| (index as usize) < count)
            })
        };
        outputs.iter().all(|output| names(output, '$', inputs) && names(output, '%', constants.len()))
    }

    /// Creates an elementwise operation with one output and no constants.
    pub fn each(expression: impl Into<String>) -> Self {
        Self::Each { outputs: vec![expression.into()], constants: Vec::new() }
    }
}

/// A constant that is passed to a fused kernel when it is launched, so that one kernel serves all layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Constant {
    /// An f32.
    Number(f32),
    /// A `u64`.
    Bits(u64),
    /// A sequence of random numbers. The kernel constructs a `Numbers` from it.
    Place {
        /// The place in the model.
        key: u64,
        /// The count of numbers per micro-batch, if the kernel computes a part of the elements that draw them. If it is
        /// `None`, each element of the output draws one number.
        elements: Option<u64>,
    },
}
