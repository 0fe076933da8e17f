//! Tests of operations that one kernel or product computes together: all gradients of a norm, products and the
//! residuals added to them, and sums of gradients of embedding tables.

use candle_core::DType;

use super::fused::{Function, devices, launched};
use super::processor::{Processor, device};
use super::small::{BATCH, SEQUENCE, Small, Style};
use super::step::executable;
use super::{gpu, host};
use crate::compile::Target;
use crate::runtime::{RunOptions, Session};
use crate::{StepOptions, TrainOptions};

/// One pass over the rows computes the gradients of a norm's weight and bias together with its input gradient. The
/// order of summation is the same as with two kernels.
///
/// - The gradients of weight and bias have the same bits as with two kernels. In f32, the input gradient has the
///   same bits as well.
/// - The order of blocks and threads does not change the results.
/// - The shapes cover rows with and without packs, sequences of several pieces and several runs, and rows that just
///   fit a thread's registers. For wider rows, two kernels still run.
#[test]
fn gradients_of_a_norm_are_made_in_one_pass() {
    if !host::is_there() {
        return;
    }
    let cases = [
        ([2, 70, 96], [true, true]),
        ([2, 70, 100], [true, true]),
        ([2, 1030, 3], [true, true]),
        ([1, 35, 768], [true, true]),
        ([1, 5, 2504], [true, true]),
        ([1, 3, 4100], [false, true]),
        ([1, 2, 8200], [false, false]),
    ];
    for ((shape, is_merged), is_centred) in cases.into_iter().flat_map(|case| [(case, true), (case, false)]) {
        for (dtype, is_merged) in [DType::F32, DType::BF16].into_iter().zip(is_merged) {
            let function = Function::new(dtype, |parameter| {
                // The gradient of x has two summands.
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
                // The input gradient may be rounded before the other summand is added, or not.
                let rounding = if dtype == DType::F32 || are_sums { 0.0 } else { 2e-2 };
                assert!(
                    off <= gpu::allowed(rounding, 2e-2),
                    "{shape:?} {dtype:?} {is_centred}: {index} is off by {off}"
                );
            }
        }
    }
}

/// The addition of a residual is fused with the preceding product: either the library adds the residual, or a kernel
/// does so after the product. So the product without the residual is neither written nor read. The norm after the sum
/// has a kernel of its own. If another operation reads the product, the addition is not fused.
#[test]
fn products_are_added_to_residuals() {
    if !host::is_there() {
        return;
    }
    for (dtype, is_read) in [(DType::F32, false), (DType::BF16, false), (DType::F32, true)] {
        let function = Function::new(dtype, |parameter| {
            let x = parameter("x", &[3, 5, 7]).sigmoid()?;
            let branch = x.linear(&parameter("weight", &[7, 7]), Some(&parameter("bias", &[7])))?;
            let sum = if is_read { branch.add(&x)?.mul(&branch)? } else { x.add(&branch)? };
            sum.add(&sum.layer_norm(&parameter("scale", &[7]), &parameter("shift", &[7]), 1e-5)?)
        });
        let function = function.unwrap();
        let apart = function.results(&mut function.on_device(Target::CudaUnfused, device()));
        let norms = launched(&function.executable(Target::Cuda));
        let is_alone = norms.iter().any(|(_, name)| name.starts_with("layer_norm"));
        assert_eq!(is_alone, !is_read, "{norms:?}");
        for device in devices() {
            let fused = function.results(&mut function.on_device(Target::Cuda, device));
            for (fused, apart) in fused.iter().flatten().zip(apart.iter().flatten()) {
                // When fused, the sum of products is not rounded before the residual is added.
                let allowed = if dtype == DType::F32 { 2e-5 } else { 4e-2 };
                assert!((fused - apart).abs() <= allowed * (1.0 + apart.abs()), "{dtype:?}: {fused}, unfused {apart}");
            }
        }
    }
}

/// An embedding table may also be used as a matrix. Then the gradient of the lookups is added in place to the
/// gradient of the matrix, and the result has the bits of the sum of both. Nothing is cleared first, and rows whose
/// ids do not occur are not touched. Gradients of several micro-batches are accumulated in the same way as without
/// fusion.
#[test]
fn gradients_of_a_table_are_added_in_place() {
    if !host::is_there() {
        return;
    }
    for micro_batches in [1, 2] {
        let options = TrainOptions {
            step: StepOptions { batch: BATCH, micro_batches, sequence: SEQUENCE, ..StepOptions::default() },
            ..TrainOptions::default()
        };
        let planned = |target| executable(&options, target, |vb| Small::new(Style::Gpt, vb));
        let cleared = launched(&planned(Target::Cuda)).iter().filter(|(_, name)| name.starts_with("fill")).count();
        assert_eq!(cleared, usize::from(micro_batches > 1));
        if micro_batches > 1 {
            continue;
        }
        let [fused, apart] = [Target::Cuda, Target::CudaUnfused].map(|target| {
            let mut session = Session::on_cuda(planned(target), device(), 3, (0, 1)).unwrap();
            let program = session.executable().program("train").unwrap();
            let ids: Vec<u32> = (0..BATCH * SEQUENCE).map(|i| (i * 5 % 7) as u32).collect();
            session.write_input(program, "tokens", 0, &ids).unwrap();
            session.write_input(program, "targets", 0, &ids).unwrap();
            session.write_input(program, "step.scalars", 0, &options.step.optimizer.scalars(0, 1e-2)).unwrap();
            session.run(program, RunOptions { seed: 3, ..RunOptions::default() }).unwrap();
            let moment = session.tensor("exp_avg/embedding.weight").unwrap();
            moment.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        });
        let off = fused.iter().zip(&apart).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Fused products are not rounded before GELU, so the gradients differ slightly.
        assert!(fused.iter().any(|&x| x != 0.0) && f64::from(off) <= gpu::allowed(1e-6, 1e-3), "{off}");
    }
}
