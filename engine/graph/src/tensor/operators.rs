//! Operators between tensors, numbers and results of tensors, like candle's.

use std::borrow::Borrow;
use std::ops::{Add, Div, Mul, Sub};

use super::Tensor;
use crate::error::Result;

/// Implements one operator: first its trait and method, then `(a, b) => value` for each pair of operand types.
macro_rules! operator {
    ($operator:ident, $method:ident; $($left:ty, $right:ty $([$borrowed:ident])?: |$a:ident, $b:ident| $value:expr;)*) => {
        $(impl$(<$borrowed: Borrow<Tensor>>)? $operator<$right> for $left {
            type Output = Result<Tensor>;

            fn $method(self, rhs: $right) -> Result<Tensor> {
                let ($a, $b) = (self, rhs);
                $value
            }
        })*
    };
}

/// Implements the operand types that all four operators have. The operand on either side may be a tensor or the result
/// of a tensor. The right operand may also be a number, which is applied as x·scale + shift.
macro_rules! operators {
    ($($operator:ident, $method:ident, |$number:ident| $scale:expr, $shift:expr;)*) => {
        $(operator! {
            $operator, $method;
            Tensor, B [B]: |a, b| Tensor::$method(&a, b.borrow());
            &Tensor, B [B]: |a, b| Tensor::$method(a, b.borrow());
            Tensor, Result<B> [B]: |a, b| Tensor::$method(&a, b?.borrow());
            &Tensor, Result<B> [B]: |a, b| Tensor::$method(a, b?.borrow());
            Result<B>, Tensor [B]: |a, b| Tensor::$method(a?.borrow(), &b);
            Result<B>, &Tensor [B]: |a, b| Tensor::$method(a?.borrow(), b);
            Tensor, f64: |a, $number| a.affine($scale, $shift);
            &Tensor, f64: |a, $number| a.affine($scale, $shift);
        })*
    };
}

operators! {
    Add, add, |number| 1.0, number;
    Sub, sub, |number| 1.0, -number;
    Mul, mul, |number| number, 0.0;
    Div, div, |number| 1.0 / number, 0.0;
}

operator! { Add, add; f64, Tensor: |number, x| &x + number; f64, &Tensor: |number, x| x + number; }
operator! { Mul, mul; f64, Tensor: |number, x| &x * number; f64, &Tensor: |number, x| x * number; }
operator! { Sub, sub; f64, Tensor: |number, x| number - &x; f64, &Tensor: |number, x| x.affine(-1.0, number); }
operator! { Div, div; f64, Tensor: |number, x| number / &x; f64, &Tensor: |number, x| x.recip()?.affine(number, 0.0); }
