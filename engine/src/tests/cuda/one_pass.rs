//! Gradients of a norm's rows, weight and bias by one kernel.

use candle_core::DType;

use super::fused::{Function, launched};
use super::processor::{Processor, device};
use super::{gpu, host};
use crate::compile::Target;

/// One pass over the rows makes what two kernels do, in the same order: sums for weight and bias have their bits, in f32 the rows'
/// gradients too, whichever blocks and threads come first. Rows are packs or none; of some pieces and of some runs; of as many
/// elements as a thread has registers for. Wider ones keep their two kernels.
#[test]
fn gradients_of_a_norm_are_made_in_one_pass() {
    if !host::is_there() {
        return;
    }
    let cases = [
        ([2, 70, 96], [true, true]),
        ([2, 70, 100], [true, true]),
        ([2, 1030, 3], [true, true]),
        ([1, 5, 2504], [false, true]),
        ([1, 3, 4100], [false, false]),
    ];
    for ((shape, is_merged), is_centred) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        for (dtype, is_merged) in [DType::F32, DType::BF16].into_iter().zip(is_merged) {
            let function = Function::new(dtype, |parameter| {
                // A gradient of several summands.
                let (x, width) = (parameter("x", &shape).sigmoid()?, [shape[2]]);
                let scale = parameter("scale", &width);
                let normal = match is_centred {
                    true => x.layer_norm(&scale, &parameter("shift", &width), 1e-5)?,
                    false => x.rms_norm(&scale, 1e-5)?,
                };
                x.add(&normal.tanh()?)
            });
            let function = function.unwrap();
            let is_one_pass = |(_, name): &(_, String)| name.starts_with("fused_norm_grad_weight_norm_grad_input_add");
            let merged = launched(&function.executable(Target::Cuda)).iter().filter(|one| is_one_pass(one)).count();
            assert_eq!(merged, usize::from(is_merged), "{shape:?} {dtype:?}");
            let run = |target, device| function.results(&mut function.on_device(target, device));
            let apart = run(Target::CudaUnfused, device());
            let fused = run(Target::Cuda, device());
            assert!(fused == run(Target::Cuda, gpu::another().unwrap_or_else(|| Box::new(Processor::reversed()))));
            for (index, (fused, apart)) in fused.iter().zip(&apart).enumerate() {
                assert!(fused.iter().all(|x| x.is_finite()), "{shape:?} {dtype:?}: {index}");
                let are_sums = fused.len() == shape[2];
                let off = fused.iter().zip(apart).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f64::max);
                // The rows' gradient is rounded before it is added to another, or it is not.
                let rounding = if dtype == DType::F32 || are_sums { 0.0 } else { 2e-2 };
                assert!(
                    off <= gpu::allowed(rounding, 2e-2),
                    "{shape:?} {dtype:?} {is_centred}: {index} is off by {off}"
                );
            }
        }
    }
}
