//! Errors of recording a graph.

use candle_core::Shape;

/// `Result` with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of recording a model, its gradients and its update.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    #[error("{op} in {}: {what} (inputs: {})", layer_or_root(.layer), list(.shapes))]
    Shape { op: String, layer: String, what: String, shapes: Vec<Shape> },
    #[error("{op} has no gradient with respect to its input {input}, which depends on a parameter")]
    NoGradient { op: String, input: usize },
    #[error("{op} has no gradient for its output {output}, which the loss depends on")]
    NoOutputGradient { op: String, output: usize },
    #[error("the loss has shape {shape:?}; it must be a scalar (use mean_all or sum_all)")]
    LossNotScalar { shape: Shape },
    #[error("the loss depends on no parameter, so there is nothing to train")]
    NothingToTrain,
    #[error(
        "parameter {name:?} is requested with shape {asked:?}, but has shape {made:?}; use one shape, or another name"
    )]
    ParameterShape { name: String, asked: Shape, made: Shape },
    #[error("{name:?} is declared twice with different types; rename one")]
    TypeClash { name: String },
    #[error("{op} has inputs of two different graphs; record them in one")]
    TwoGraphs { op: String },
    #[error("{what}: {why}; {remedy}")]
    Config { what: &'static str, why: String, remedy: &'static str },
    /// An error of candle's shapes, dimensions or layouts.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An error from a model's own source, or from code that the model calls.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Creates the error for a refused setting. `what` is the name of the setting, `why` is the reason for the refusal,
    /// and `remedy` tells what to do.
    pub fn config(what: &'static str, why: impl Into<String>, remedy: &'static str) -> Self {
        Self::Config { what, why: why.into(), remedy }
    }

    /// Creates an error with a message of the model's own.
    pub fn msg(text: impl Into<String>) -> Self {
        Self::Other(text.into().into())
    }

    /// Wraps an error of another type.
    pub fn wrap(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Other(Box::new(error))
    }
}

fn layer_or_root(layer: &str) -> &str {
    if layer.is_empty() { "the model" } else { layer }
}

fn list(shapes: &[Shape]) -> String {
    shapes.iter().map(|s| format!("{:?}", s.dims())).collect::<Vec<_>>().join(", ")
}
