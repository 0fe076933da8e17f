//! The rule of an operation: which dimensions of its operands belong together.

use std::borrow::Cow;

/// The way in which the dimensions of an operation's operands belong together. The rule must hold in the forward and in the backward:
/// an operation that is a gradient has its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rule {
    /// The dimensions by name, as in an Einstein sum: inputs, `->`, outputs; operands are separated by commas.
    ///
    /// - A letter is a dimension. If ranks split one that an output lacks, each rank's output is a summand, and the output
    ///   is the sum over the ranks.
    /// - A capital letter is a dimension that no rank may split in this operation, because it is normalized over, or
    ///   because its index has a meaning.
    /// - A letter with `'` behind it is a dimension of which a rank may hold a single range only. It is split if it is
    ///   neither a product nor a concatenation.
    /// - `*` stands for any number of leading dimensions.
    /// - `(a b)` is one dimension: the product of several, outermost first. It may contain `*`.
    /// - `_` is a dimension on its own, which is not split.
    /// - `[01]` behind an output lists the inputs that it depends on, by index, if these are not all.
    ///
    /// Example: `"* i, o i -> * o"` is a linear layer.
    Labels(Cow<'static, str>),
    /// The elements of input 0, in the same order, in the shape of output 0.
    Reshape,
    /// Output 0 is a range of dimension `dim` of input 0, from `start` on.
    Narrow {
        /// The dimension.
        dim: usize,
        /// The first index.
        start: usize,
    },
    /// Input 0 is a range of dimension `dim` of output 0, from `start` on.
    Widen {
        /// The dimension.
        dim: usize,
        /// The first index.
        start: usize,
    },
    /// The inputs follow each other along dimension `dim` of output 0.
    Cat {
        /// The dimension.
        dim: usize,
    },
}

impl Rule {
    /// The rule of an operation on elements at the same index, for these numbers of inputs and outputs.
    pub fn elementwise(inputs: usize, outputs: usize) -> Self {
        let list = |count: usize| vec!["*"; count].join(", ");
        Self::Labels(format!("{} -> {}", list(inputs), list(outputs)).into())
    }

    /// The rule of these labels.
    pub const fn labels(text: &'static str) -> Self {
        Self::Labels(Cow::Borrowed(text))
    }
}
