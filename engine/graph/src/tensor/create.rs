//! Tensors whose numbers the model's source gives.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use candle_core::shape::ShapeWithOneHole;
use candle_core::{DType, Device as Host, NdArray, Shape, WithDType};

use super::Tensor;
use crate::Spec;
use crate::error::{Error, Result};
use crate::graph::{Graph, lock};

/// Where new tensors are made. In candle that is a device; here it is the graph that is being recorded, whatever it runs on:
/// [`Tensor::device`] and [`VarBuilder::device`](crate::nn::VarBuilder::device) name it.
#[derive(Debug, Clone)]
pub struct Device(Arc<Mutex<Graph>>);

impl Deref for Device {
    type Target = Arc<Mutex<Graph>>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Device {
    pub(crate) fn of(graph: &Arc<Mutex<Graph>>) -> Self {
        Self(graph.clone())
    }

    /// A constant of a shape and type that a tensor has.
    pub(super) fn constant(&self, number: f64, spec: Spec) -> Tensor {
        let id = lock(self).constant_like(number, spec);
        Tensor::of(self, id)
    }

    fn new_constant<S: Into<Shape>>(&self, number: f64, shape: S, dtype: DType) -> Result<Tensor> {
        let id = lock(self).add_constant(number, Spec { shape: shape.into(), dtype: type_here(dtype) })?;
        Ok(Tensor::of(self, id))
    }
}

/// The type of elements that stands for one of candle's.
fn type_here(dtype: DType) -> DType {
    match dtype {
        DType::U8 | DType::BF16 => dtype,
        float if float.is_float() => DType::F32,
        _ => DType::U32,
    }
}

/// New tensors. Their numbers are stored once per program, as parameters are, and never change.
impl Tensor {
    /// A copy of a tensor of candle's, which holds numbers already. f64 and f16 become f32; whole numbers, u32.
    ///
    /// # Errors
    /// When a whole number does not fit u32, or the tensor cannot be read.
    pub fn from_candle(tensor: &candle_core::Tensor, device: &Device) -> Result<Self> {
        let dtype = type_here(tensor.dtype());
        let elements: Vec<f64> = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
        if let Some(x) = elements.iter().find(|&&x| dtype == DType::U32 && !(0.0..=f64::from(u32::MAX)).contains(&x)) {
            return Err(Error::msg(format!("{x} does not fit u32, the type of integers in a graph; use a float")));
        }
        let id = lock(device).add_data(elements, Spec { shape: tensor.shape().clone(), dtype });
        Ok(Self::of(device, id))
    }

    /// A tensor from numbers and arrays of them.
    ///
    /// # Errors
    /// When rows have different lengths.
    pub fn new<A: NdArray>(array: A, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::new(array, &Host::Cpu)?, device)
    }

    /// A tensor from its elements, last dimension fastest.
    ///
    /// # Errors
    /// When there are not as many as the shape holds.
    pub fn from_slice<S: ShapeWithOneHole, D: WithDType>(data: &[D], shape: S, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::from_slice(data, shape, &Host::Cpu)?, device)
    }

    /// As [`Self::from_slice`].
    ///
    /// # Errors
    /// As [`Self::from_slice`].
    pub fn from_vec<S: ShapeWithOneHole, D: WithDType>(data: Vec<D>, shape: S, device: &Device) -> Result<Self> {
        Self::from_slice(&data, shape, device)
    }

    /// The numbers from `start` on, below `end`.
    ///
    /// # Errors
    /// As [`Self::from_candle`].
    pub fn arange<D: WithDType>(start: D, end: D, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::arange(start, end, &Host::Cpu)?, device)
    }

    /// Every `step`th number from `start` on, before `end`.
    ///
    /// # Errors
    /// When the step is zero.
    pub fn arange_step<D: WithDType>(start: D, end: D, step: D, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::arange_step(start, end, step, &Host::Cpu)?, device)
    }

    /// [n, n] with ones on the diagonal and below it.
    ///
    /// # Errors
    /// As [`Self::to_dtype`].
    pub fn tril2(n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::tril2(n, DType::U8, &Host::Cpu)?, device)?.to_dtype(dtype)
    }

    /// [n, n] with ones on the diagonal and above it.
    ///
    /// # Errors
    /// As [`Self::to_dtype`].
    pub fn triu2(n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::triu2(n, DType::U8, &Host::Cpu)?, device)?.to_dtype(dtype)
    }

    /// [n, n] with ones on the diagonal.
    ///
    /// # Errors
    /// As [`Self::to_dtype`].
    pub fn eye(n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::eye(n, DType::U8, &Host::Cpu)?, device)?.to_dtype(dtype)
    }

    /// The same number everywhere, stored as one element.
    ///
    /// # Errors
    /// When an extent is 0, or the shape has more bytes than there can be.
    pub fn full<D: WithDType, S: Into<Shape>>(number: D, shape: S, device: &Device) -> Result<Self> {
        device.new_constant(number.to_f64(), shape, D::DTYPE)
    }

    /// Zeros, stored as one element.
    ///
    /// # Errors
    /// When an extent is 0, or the shape has more bytes than there can be.
    pub fn zeros<S: Into<Shape>>(shape: S, dtype: DType, device: &Device) -> Result<Self> {
        device.new_constant(0.0, shape, dtype)
    }

    /// Ones, stored as one element.
    ///
    /// # Errors
    /// When an extent is 0, or the shape has more bytes than there can be.
    pub fn ones<S: Into<Shape>>(shape: S, dtype: DType, device: &Device) -> Result<Self> {
        device.new_constant(1.0, shape, dtype)
    }

    /// Zeros of this shape and type.
    ///
    /// # Errors
    /// None today; candle's has them.
    pub fn zeros_like(&self) -> Result<Self> {
        Ok(self.graph.constant(0.0, self.spec.clone()))
    }

    /// Ones of this shape and type.
    ///
    /// # Errors
    /// None today; candle's has them.
    pub fn ones_like(&self) -> Result<Self> {
        Ok(self.graph.constant(1.0, self.spec.clone()))
    }

    /// The elements that the model's source gave, in another type.
    pub(super) fn data_in(&self, dtype: DType) -> Option<Self> {
        let mut graph = lock(&self.graph);
        let spec = Spec { shape: self.shape().clone(), dtype };
        let id = match graph.number(self.id) {
            Some(number) => graph.add_constant(number, spec).ok()?,
            None if !graph.value(self.id).layout.is_contiguous() => return None,
            None => graph.data(self.id).map(|elements| graph.add_data(elements, spec))?,
        };
        drop(graph);
        Some(Self::of(&self.graph, id))
    }
}
