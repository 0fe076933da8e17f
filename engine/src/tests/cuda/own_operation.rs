//! A user's elementwise operation that is one `impl Op`, as described in CONTRIBUTING.md, has a GPU kernel.

use gapless_kernels::cpu::map;
use gapless_kernels::cuda::Fusible;

use super::judge::check;
use crate::reference::{Array, Reference};
use crate::{Args, Gradient, Op, Result, Spec, Tensor, gradient_check};

/// y = log(1 + exp(x)).
#[derive(Debug)]
struct Softplus;

impl Op for Softplus {
    fn name(&self) -> &'static str {
        "softplus"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(vec![inputs[0].clone()])
    }

    fn gradient(&self, g: &mut Gradient) -> Result<(), gapless_graph::Error> {
        let dx = g.input(0).sigmoid()?.mul(&g.grad(0))?;
        g.accumulate(0, dx);
        Ok(())
    }

    fn run(&self, args: &mut Args<'_>) {
        map(args, |x| x.max(0.0) + (-x.abs()).exp().ln_1p());
    }

    fn cuda_fusible(&self) -> Option<Fusible> {
        Some(Fusible::each("fmaxf($0, 0.0f) + log1pf(expf(-fabsf($0)))"))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).map(|x| x.max(0.0) + (-x.abs()).exp().ln_1p())]
    }
}

#[test]
fn a_new_operation_is_one_implementation() {
    let softplus = |x: &Tensor| Tensor::apply_op::<1>(Softplus, &[x]).map(|[y]| y);
    let error = gradient_check(&[&[3, 7]], &[], |x, _| softplus(&x[0])).unwrap();
    assert!(error.finite_difference <= 1e-6 && error.kernel <= 1e-5, "{error:?}");
    check(&["softplus"], &[&[3, 5, 17]], &[], |x, _| softplus(&x[0]));
}
