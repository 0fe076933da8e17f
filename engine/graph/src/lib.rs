//! Defines what a training step computes: symbolic tensors, operations with their gradients, layers, and optimizers.
//!
//! In: a model's source, in candle's vocabulary. Out: a [`Graph`] of nodes in an order in which they can run, its
//! gradients ([`autodiff`]) and its update ([`optim`]). Never: a buffer, an address, or a device.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//!
//! use gapless_graph::nn::{Module, VarBuilder, linear};
//! use gapless_graph::{DType, Graph, Tensor, autodiff};
//!
//! let graph = Arc::new(Mutex::new(Graph::default()));
//! let vb = VarBuilder::new(&graph, DType::F32);
//! let x = vb.get((2, 4), "x")?;
//! let loss = linear(4, 3, vb.pp("proj"))?.forward(&x)?.gelu()?.mean_all()?;
//! let gradients = autodiff::differentiate(&graph, &loss, 1.0)?;
//! assert_eq!(gradients.len(), 3); // of x, proj.weight and proj.bias
//! # Ok::<(), gapless_graph::Error>(())
//! ```
//!
//! ```text
//! Tensor, nn ─▶ Graph ─▶ autodiff ─▶ optim ─▶ Graph: forward │ input gradients │ weight gradients │ update
//!                 ▲
//!           Op: shape, gradient, cost, kernels, f64 reference
//! ```
#![warn(missing_docs)]
#![allow(clippy::single_range_in_vec_init, reason = "windows hold lists of ranges")]

pub mod autodiff;
mod causality;
mod error;
mod gradient;
mod graph;
#[doc(hidden)]
pub mod launches;
pub mod nn;
mod op;
pub mod ops;
pub mod optim;
pub mod reference;
mod rule;
pub mod shard;
mod tensor;
mod text;

pub use candle_core::DType;
pub use causality::{Causality, Culprit, cache_obstacle, causality};
pub use error::{Error, Result};
pub use gapless_kernels::{Args, Element, Numbers, Spec, Stream, Window};
pub use gradient::Gradient;
#[doc(hidden)]
pub use graph::lock;
pub use graph::{
    FLOATS, Graph, LossPart, Node, NodeId, Phase, Place, ReportedLoss, RowCount, SequenceLoss, Sequences, Source,
    Value, ValueId,
};
pub use nn::Model;
pub use op::{Keys, Op, RowUse};
pub use reference::{Array, Reference};
pub use tensor::{Device, IndexOp, Tensor, TensorIndexer, TensorOrScalar};
