//! What only a run of the compiled whole can show of the layers below.

mod autodiff;
mod cache;
mod compress;
#[cfg(feature = "cuda")]
mod cuda;
mod optimizers;
