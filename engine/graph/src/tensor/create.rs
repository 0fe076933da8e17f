//! Creation of tensors from values in the model's source.

use std::ops::Deref;
use std::sync::{Arc, Mutex};

use candle_core::shape::ShapeWithOneHole;
use candle_core::{DType, Device as Host, NdArray, Shape, WithDType};

use super::Tensor;
use crate::Spec;
use crate::error::{Error, Result};
use crate::graph::{Graph, lock};

/// The graph in which new tensors are created. It takes the place of candle's device, and does not depend on the device
/// on which the graph will run. [`Tensor::device`] and [`VarBuilder::device`](crate::nn::VarBuilder::device) return it.
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

    /// Creates a constant with the shape and type of an existing tensor. The size is not checked again.
    pub(super) fn constant(&self, number: f64, spec: Spec) -> Tensor {
        let id = lock(self).constant_like(number, spec);
        Tensor::of(self, id)
    }

    fn new_constant<S: Into<Shape>>(&self, number: f64, shape: S, dtype: DType) -> Result<Tensor> {
        let id = lock(self).add_constant(number, Spec { shape: shape.into(), dtype: type_here(dtype) })?;
        Ok(Tensor::of(self, id))
    }
}

/// Returns the type in which elements of a candle type are stored in a graph.
fn type_here(dtype: DType) -> DType {
    match dtype {
        DType::U8 | DType::BF16 => dtype,
        float if float.is_float() => DType::F32,
        _ => DType::U32,
    }
}

/// Creation of tensors. The elements are stored once per program, like parameters, and never change.
impl Tensor {
    /// Copies a candle tensor. f64 and f16 become f32. Integers become u32, except that u8 stays u8.
    ///
    /// # Errors
    /// Returns an error if an integer does not fit u32, or if the tensor cannot be read.
    pub fn from_candle(tensor: &candle_core::Tensor, device: &Device) -> Result<Self> {
        let dtype = type_here(tensor.dtype());
        let elements: Vec<f64> = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
        if let Some(x) = elements.iter().find(|&&x| dtype == DType::U32 && !(0.0..=f64::from(u32::MAX)).contains(&x)) {
            return Err(Error::msg(format!("{x} does not fit u32, the type of integers in a graph; use a float")));
        }
        let id = lock(device).add_data(elements, Spec { shape: tensor.shape().clone(), dtype });
        Ok(Self::of(device, id))
    }

    /// Creates a tensor from a number or nested arrays of numbers.
    ///
    /// # Errors
    /// Returns an error if nested arrays have different lengths.
    pub fn new<A: NdArray>(array: A, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::new(array, &Host::Cpu)?, device)
    }

    /// Creates a tensor from its elements in row-major order.
    ///
    /// # Errors
    /// Returns an error if `data` does not have as many elements as the shape.
    pub fn from_slice<S: ShapeWithOneHole, D: WithDType>(data: &[D], shape: S, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::from_slice(data, shape, &Host::Cpu)?, device)
    }

    /// Like [`Self::from_slice`], but takes a vector.
    ///
    /// # Errors
    /// Returns the errors of [`Self::from_slice`].
    pub fn from_vec<S: ShapeWithOneHole, D: WithDType>(data: Vec<D>, shape: S, device: &Device) -> Result<Self> {
        Self::from_slice(&data, shape, device)
    }

    /// Creates a vector of the numbers from `start` up to, but not including, `end`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::from_candle`].
    pub fn arange<D: WithDType>(start: D, end: D, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::arange(start, end, &Host::Cpu)?, device)
    }

    /// Creates a vector of every `step`th number from `start` up to, but not including, `end`.
    ///
    /// # Errors
    /// Returns an error if the step is zero.
    pub fn arange_step<D: WithDType>(start: D, end: D, step: D, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::arange_step(start, end, step, &Host::Cpu)?, device)
    }

    /// Creates a matrix [n, n] with ones on and below the diagonal.
    ///
    /// # Errors
    /// Returns the errors of [`Self::to_dtype`].
    pub fn tril2(n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::tril2(n, DType::U8, &Host::Cpu)?, device)?.to_dtype(dtype)
    }

    /// Creates a matrix [n, n] with ones on and above the diagonal.
    ///
    /// # Errors
    /// Returns the errors of [`Self::to_dtype`].
    pub fn triu2(n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::triu2(n, DType::U8, &Host::Cpu)?, device)?.to_dtype(dtype)
    }

    /// Creates a matrix [n, n] with ones on the diagonal.
    ///
    /// # Errors
    /// Returns the errors of [`Self::to_dtype`].
    pub fn eye(n: usize, dtype: DType, device: &Device) -> Result<Self> {
        Self::from_candle(&candle_core::Tensor::eye(n, DType::U8, &Host::Cpu)?, device)?.to_dtype(dtype)
    }

    /// Creates a tensor whose elements all equal `number`. It is stored as one element.
    ///
    /// # Errors
    /// Returns an error if an extent is 0, or if the shape is too large.
    pub fn full<D: WithDType, S: Into<Shape>>(number: D, shape: S, device: &Device) -> Result<Self> {
        device.new_constant(number.to_f64(), shape, D::DTYPE)
    }

    /// Creates a tensor of zeros, stored as one element.
    ///
    /// # Errors
    /// Returns an error if an extent is 0, or if the shape is too large.
    pub fn zeros<S: Into<Shape>>(shape: S, dtype: DType, device: &Device) -> Result<Self> {
        device.new_constant(0.0, shape, dtype)
    }

    /// Creates a tensor of ones, stored as one element.
    ///
    /// # Errors
    /// Returns an error if an extent is 0, or if the shape is too large.
    pub fn ones<S: Into<Shape>>(shape: S, dtype: DType, device: &Device) -> Result<Self> {
        device.new_constant(1.0, shape, dtype)
    }

    /// Creates zeros of this shape and type.
    ///
    /// # Errors
    /// Never returns an error; the signature is candle's.
    pub fn zeros_like(&self) -> Result<Self> {
        Ok(self.graph.constant(0.0, self.spec.clone()))
    }

    /// Creates ones of this shape and type.
    ///
    /// # Errors
    /// Never returns an error; the signature is candle's.
    pub fn ones_like(&self) -> Result<Self> {
        Ok(self.graph.constant(1.0, self.spec.clone()))
    }

    /// If the elements of this tensor are known when the model is recorded, returns a tensor with these elements in
    /// another type. Returns `None` if the elements are not known, or if this tensor is not contiguous.
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
