//! Tests of the lower layers that have to run a compiled program.

mod autodiff;
mod cache;
mod compress;
#[cfg(feature = "cuda")]
mod cuda;
mod optimizers;
mod vocabulary_parts;
