//! The names that most models and training programs use: `use gapless::prelude::*;`.
//!
//! ```
//! use gapless::prelude::*;
//!
//! struct Bigram(Embedding, Linear);
//!
//! impl Model for Bigram {
//!     fn forward(&self, tokens: &Tensor, _train: bool) -> gapless::Result<Tensor> {
//!         self.1.forward(&self.0.forward(tokens)?.relu()?)
//!     }
//! }
//!
//! let build = |vb: VarBuilder| Ok(Bigram(embedding(16, 8, vb.pp("embed"))?, linear(8, 16, vb.pp("head"))?));
//! let mut trainer = Trainer::new(build, StepOptions { batch: 2, sequence: 4, ..StepOptions::default() })?;
//! trainer.step(&[0, 1, 2, 3, 4, 5, 6, 7], &[1, 2, 3, 4, 5, 6, 7, 8])?;
//! # Ok::<(), gapless::TrainError>(())
//! ```

pub use crate::nn::{
    Activation, Dropout, Embedding, LayerNorm, Linear, Module, ModuleT, RmsNorm, VarBuilder, embedding, layer_norm,
    linear, linear_no_bias, rms_norm,
};
pub use crate::{
    AdamW, Checkpoint, D, DType, Device, DeviceChoice, IndexOp, LearningRate, MemoryOptions, Model, Precision,
    Recompute, Sampling, StepOptions, StepReport, Tensor, TrainError, TrainOptions, Trainer,
};
#[cfg(feature = "data")]
pub use crate::{DataOptions, Dataset, Source};
