//! Tests of the lower layers that need a compiled program to run.

mod autodiff;
mod cache;
mod compress;
#[cfg(feature = "cuda")]
mod cuda;
mod optimizers;
