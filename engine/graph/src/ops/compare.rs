//! Element-wise comparisons of tensors of one shape. Broadcast operands are views with stride 0.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::{Args, Element, each_row, row_of};

use crate::Op;
use crate::reference::{Array, Reference};

/// The comparison of [`Compare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say it themselves")]
pub enum Comparison {
    Equal,
    Unequal,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

impl Comparison {
    fn holds<T: PartialOrd>(self, a: T, b: T) -> bool {
        match self {
            Self::Equal => a == b,
            Self::Unequal => a != b,
            Self::Less => a < b,
            Self::AtMost => a <= b,
            Self::Greater => a > b,
            Self::AtLeast => a >= b,
        }
    }
}

/// A mask (u8) that is 1 where the comparison holds and 0 elsewhere. The operands are floats, masks or ids. There is no
/// gradient.
#[derive(Debug, Clone, Copy)]
pub struct Compare {
    /// The comparison.
    pub comparison: Comparison,
}

impl Compare {
    fn run_on<T: Element + PartialOrd + 'static>(&self, args: &mut Args<'_>) {
        let out = args.output::<u8>(0);
        let ((a, a_layout), (b, b_layout)) = (args.strided::<T>(0), args.strided::<T>(1));
        each_row(out, a_layout, |row, out| {
            let ((a, a_step), (b, b_step)) = (row_of(a, a_layout, row), row_of(b, b_layout, row));
            for (i, out) in out.iter_mut().enumerate() {
                *out = u8::from(self.comparison.holds(a[i * a_step], b[i * b_step]));
            }
        });
    }
}

impl Op for Compare {
    fn name(&self) -> &'static str {
        match self.comparison {
            Comparison::Equal => "eq",
            Comparison::Unequal => "ne",
            Comparison::Less => "lt",
            Comparison::AtMost => "le",
            Comparison::Greater => "gt",
            Comparison::AtLeast => "ge",
        }
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        super::expect_stored(&inputs[0])?;
        if inputs[0] != inputs[1] {
            return Err(format!(
                "shapes and types must be equal; these are {:?} and {:?}",
                inputs[0].dtype, inputs[1].dtype
            ));
        }
        Ok(vec![Spec { shape: inputs[0].shape.clone(), dtype: DType::U8 }])
    }

    fn reads_strides(&self, _: usize, _: &candle_core::Layout) -> bool {
        true
    }

    fn run(&self, args: &mut Args<'_>) {
        match args.input_dtype(0) {
            DType::U8 => self.run_on::<u8>(args),
            DType::U32 => self.run_on::<u32>(args),
            _ => self.run_on::<f32>(args),
        }
    }

    fn cuda_fusible(&self) -> Option<gapless_kernels::cuda::Fusible> {
        let sign = match self.comparison {
            Comparison::Equal => "==",
            Comparison::Unequal => "!=",
            Comparison::Less => "<",
            Comparison::AtMost => "<=",
            Comparison::Greater => ">",
            Comparison::AtLeast => ">=",
        };
        Some(gapless_kernels::cuda::Fusible::each(format!("$0 {sign} $1 ? 1.0f : 0.0f")))
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        vec![args.input(0).zip(args.input(1), |a, b| f64::from(u8::from(self.comparison.holds(a, b))))]
    }
}
