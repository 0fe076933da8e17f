//! Errors of compiling kernels from source to machine code.

use gapless_communicator::MissingLibrary;

/// The reason why a kernel could not be compiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum KernelError {
    #[error("CUDA kernels cannot be compiled here: there is no {0}")]
    Missing(MissingLibrary),
    #[error(
        "NVRTC {version} cannot compile for {architecture}; it supports {known}; install the NVRTC that came with the driver, or later"
    )]
    UnknownArchitecture { version: String, architecture: String, known: String },
    #[error("{call} failed: {what}")]
    Nvrtc { call: &'static str, what: String },
    #[error("internal error: {file} does not compile for {architecture} with NVRTC {version}\n{log}")]
    DoesNotCompile { file: &'static str, architecture: String, version: String, log: String },
}
