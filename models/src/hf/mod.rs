//! Reads and writes folders of pretrained weights, as Hugging Face's `save_pretrained` writes them, and adapters in
//! PEFT's format.
//!
//! In: a folder with config.json and safetensors files. Out: a model, its weights in a trainer's arena, and after
//! training a folder with the same names, types and files. Never: an option or a tensor that is silently ignored, or
//! more than one converted tensor at a time in memory besides the arena.
//!
//! ```no_run
//! use gapless_engine::{StepOptions, Trainer};
//! use gapless_models::hf::Folder;
//!
//! let folder = Folder::open("SmolLM-135M")?;
//! let options = StepOptions { batch: 4, sequence: 512, ..StepOptions::default() };
//! let mut trainer = Trainer::new(|vb| folder.model(vb), options)?;
//! folder.load(&mut trainer)?;
//! # let (tokens, targets) = (Vec::new(), Vec::new());
//! trainer.step(&tokens, &targets)?;
//! folder.save(&trainer, "SmolLM-135M-mine", None)?;
//! # Ok::<(), gapless_models::hf::HfError>(())
//! ```
//!
//! ```text
//! config.json ─▶ fields, checked ─▶ Config ─▶ model ─▶ Trainer ◀── load ── layout ◀── names in *.safetensors
//!                                                        └────── save ───▶ temporary folder, then renamed
//! ```

mod adapter;
mod config;
mod error;
mod experts;
mod families;
mod family;
mod fields;
mod folder;
mod generation;
mod gpt2;
mod known;
mod layout;
mod low_rank;
mod multimodal;
mod new_folder;
mod quantized;
mod refused;
mod rope;
mod save;
mod stop;
mod tensors;
mod window;

pub use adapter::Adapter;
pub use config::{Architecture, Config, Pretrained};
pub use error::{ConfigProblem, HfError, Result, WeightProblem};
pub use folder::Folder;
pub use generation::GenerationConfig;
pub use new_folder::NewFolder;
pub use save::{copy_settings, copy_tokenizer};
pub use stop::StopStrings;
pub use tensors::{Dtype, TensorFile};

/// The stored name of the head's weight. A tied head usually has no stored weight.
const HEAD: &str = "lm_head.weight";
