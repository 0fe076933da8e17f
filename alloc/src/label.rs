//! The names and the role of a buffer, which reports and pictures show.

/// The purpose of a tensor. Every byte of a plan is accounted to one role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Role {
    /// Trained weights.
    Parameter,
    /// Accumulated weight gradients.
    Gradient,
    /// State that the optimizer keeps between steps.
    OptimizerState,
    /// Batches and per-step scalars written by the host.
    Input,
    /// Values of the forward and backward pass.
    Activation,
    /// Scratch of one instruction.
    Workspace,
    /// Send and receive buffers.
    Communication,
    /// Expert buffers whose size depends on the data.
    Routing,
    /// Keys and values of past tokens.
    Cache,
}

impl Role {
    /// All roles, in the order of reports.
    pub const ALL: [Self; 9] = [
        Self::Parameter,
        Self::Gradient,
        Self::OptimizerState,
        Self::Input,
        Self::Activation,
        Self::Workspace,
        Self::Communication,
        Self::Routing,
        Self::Cache,
    ];

    /// The name of the role.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parameter => "parameter",
            Self::Gradient => "gradient",
            Self::OptimizerState => "optimizer state",
            Self::Input => "input",
            Self::Activation => "activation",
            Self::Workspace => "workspace",
            Self::Communication => "communication",
            Self::Routing => "routing",
            Self::Cache => "cache",
        }
    }
}

/// The names of one buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Label {
    /// The tensor, e.g. `h.3.attn.c_attn.weight` or `h.3.attn#17`.
    pub tensor: String,
    /// The operation that first writes the tensor, e.g. `linear`.
    pub op: String,
    /// The layer of the tensor, e.g. `h.3`; empty outside of layers.
    pub layer: String,
    /// The role of the tensor.
    pub role: Role,
}
