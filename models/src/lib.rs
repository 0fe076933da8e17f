//! Language models, written as in a textbook, on top of the gapless engine.
//!
//! There are two: [`Gpt`], and [`Decoder`], whose traits make it a Llama, a mixture of experts or one of the other
//! families. Both are written in candle's vocabulary. Parameters have the names of the Hugging Face checkpoints of the
//! same architecture, which [`hf`] reads and writes.
//!
//! ```
//! use gapless_engine::{StepOptions, Trainer};
//! use gapless_models::{Gpt, GptConfig};
//!
//! let config = GptConfig { vocabulary: 256, sequence: 16, layers: 2, heads: 2, width: 32, ..GptConfig::default() };
//! let options = StepOptions { batch: 2, sequence: 16, ..StepOptions::default() };
//! let trainer = Trainer::new(|vb| Gpt::new(&config, vb), options)?;
//! assert_eq!(trainer.report().parameters, config.parameters());
//! # Ok::<(), gapless_engine::TrainError>(())
//! ```
//!
//! ```text
//! tokens ─▶ wte + wpe ─▶ │ x + attn(norm(x)) ─▶ x + mlp(norm(x)) │ × layers ─▶ norm ─▶ head ─▶ logits
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod decoder;
mod gpt;
#[cfg(feature = "hugging-face")]
pub mod hf;
mod latent;
pub mod limits;
mod llama;
mod moe;
mod traits;

pub use decoder::{Decoder, Llama, Moe, Settings};
pub use gpt::{Activation, Gpt, GptConfig};
pub use latent::LatentConfig;
pub use llama::{GateActivation, LlamaConfig, Norms, QkNorm};
pub use moe::{MoeConfig, MoeStyle};
pub use traits::{DynamicRope, FusedQkv, LongRope, NormKind, QueryGrowth, Traits};

use gapless_engine::{Error, Result};

/// Returns the width of a head.
fn head_size(width: usize, heads: usize) -> Result<usize> {
    if heads == 0 || !width.is_multiple_of(heads) {
        let why = format!("{heads} heads do not divide a width of {width}");
        return Err(Error::config("model", why, "choose a number of heads that divides the width"));
    }
    Ok(width / heads)
}
