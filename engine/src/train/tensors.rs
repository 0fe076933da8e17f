//! Access to a trainer's tensors by name: parameters, optimizer states, gradients, and watched values.

use candle_core::DType;
use gapless_compile::step::{self, RankPlan};
use gapless_kernels::Window;
use gapless_parallel::Coordinate;

use gapless_compile::step::StepOptions;

use super::Trainer;
use crate::error::{Result, TrainError};

impl Trainer {
    /// Returns a parameter or an optimizer state (`exp_avg/…`, `exp_avg_sq/…`) by name. On the CPU, an f32 tensor is
    /// a view of the arena. In all other cases the tensor is a copy.
    ///
    /// # Errors
    /// Returns an error if this rank has no tensor of this name.
    pub fn tensor(&self, name: &str) -> Result<candle_core::Tensor> {
        self.session.tensor(name).map_err(|error| self.elsewhere(name).unwrap_or_else(|| error.into()))
    }

    /// Returns the part of a parameter or an optimizer state that this rank holds.
    ///
    /// # Errors
    /// Returns an error if this rank has no tensor of this name.
    pub fn window(&self, name: &str) -> Result<Window> {
        let here = self.session.executable().find_persistent(name).map_err(gapless_runtime::Error::from)?;
        let part = self.layout.parts.get(name);
        Ok(part.map_or_else(|| Window::whole(here.spec.dims()), |part| part.window.clone()))
    }

    /// If the tensor belongs to another rank of the pipeline, returns an error that names this rank. Otherwise returns
    /// `None`.
    fn elsewhere(&self, name: &str) -> Option<TrainError> {
        let stage = *self.layout.stages.get(name)?;
        let StepOptions { mesh, pipeline, micro_batches, .. } = &self.options.step;
        let table = RankPlan::new(*mesh, 0, pipeline, *micro_batches).ok()?.table;
        let rank = table.iter().position(|row| row.iter().any(|action| action.stage == stage))?;
        let rank = mesh.rank(Coordinate { pipeline: rank, ..self.at });
        (rank != mesh.rank(self.at)).then(|| TrainError::OnAnotherRank { name: name.into(), rank })
    }

    /// Returns the gradient of a parameter in the last step, before clipping. Requires
    /// [`StepOptions::keep_gradients`]. On the CPU, an f32 gradient is a view of the arena, valid until the next run.
    /// In all other cases the tensor is a copy.
    ///
    /// # Errors
    /// Returns an error if gradients are not kept, or if no parameter has this name.
    pub fn gradient(&self, name: &str) -> Result<candle_core::Tensor> {
        if !self.options.step.keep_gradients {
            let (why, remedy) = (format!("the gradient of {name:?} is not kept"), "set StepOptions::keep_gradients");
            return Err(TrainError::config("keep_gradients", why, remedy));
        }
        Ok(self.session.output(self.training()?, &step::gradient_output(name))?)
    }

    /// Returns a value of the last step that the model watches under this name
    /// ([`Tensor::watch`](gapless_graph::Tensor::watch)). On the CPU, an f32 value is a view of the arena, valid
    /// until the next run. In all other cases the tensor is a copy.
    ///
    /// # Errors
    /// Returns an error if nothing is watched under this name.
    pub fn watched(&self, name: &str) -> Result<candle_core::Tensor> {
        Ok(self.session.output(self.training()?, &step::watched_output(name))?)
    }

    /// Returns the names of the watched values, in the order in which the model declared them.
    pub fn watched_names(&self) -> impl Iterator<Item = &str> {
        self.watched.iter().map(String::as_str)
    }

    /// Returns the names of the parameters, in the order in which the model declared them.
    pub fn parameter_names(&self) -> impl Iterator<Item = &str> {
        self.session.executable().specs(gapless_alloc::Role::Parameter).map(|(name, _)| name)
    }

    /// Overwrites an optimizer state or a parameter. If the parameter has an f32 master, the master is overwritten too.
    /// If the tensor is divided among ranks, `value` must be this rank's part, flattened.
    ///
    /// # Errors
    /// Returns an error if no tensor has this name and shape.
    pub fn set_tensor(&mut self, name: &str, value: &candle_core::Tensor) -> Result<()> {
        let expected =
            self.session.executable().find_persistent(name).map_err(gapless_runtime::Error::from)?.spec.dims();
        if value.dims() != expected && !self.layout.parts.contains_key(name) {
            let (expected, given) = (expected.to_vec(), value.dims().to_vec());
            return Err(TrainError::Shape { name: name.into(), expected, given });
        }
        self.set_elements(name, &value.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?)
    }

    /// Overwrites a tensor of bytes, such as the codes of a quantized weight. `data` has the bytes of the whole tensor, of
    /// which this rank keeps its part.
    ///
    /// # Errors
    /// Returns an error if no tensor has this name, or if it has another number of bytes.
    pub fn set_bytes(&mut self, name: &str, data: &[u8]) -> Result<()> {
        let window = self.window(name)?;
        let expected = window.whole_dims().iter().product();
        let is_copied = self.session.fill_tensor(name, |bytes| {
            let fits = data.len() == expected && bytes.len() == window.elements();
            let mut to = 0;
            for run in window.runs().filter(|_| fits) {
                bytes[to..to + run.len()].copy_from_slice(&data[run.clone()]);
                to += run.len();
            }
            fits.then_some(()).ok_or(expected)
        })?;
        is_copied.map_err(|expected| TrainError::Shape {
            name: name.into(),
            expected: vec![expected],
            given: vec![data.len()],
        })
    }

    /// Like [`Self::set_tensor`], but takes the elements as a slice, in row-major order.
    ///
    /// # Errors
    /// Returns an error if no tensor has this name and size.
    pub fn set_elements(&mut self, name: &str, data: &[f32]) -> Result<()> {
        for copy in self.layout.copies.get(name).into_iter().flatten() {
            // A stage that only reads the parameter has no master. With several data ranks, each rank has only a part
            // of the master.
            if let (Ok(own), Ok(all)) = (self.window(copy), self.window(name)) {
                let part = own.within(&all).and_then(|range| data.get(range)).unwrap_or(data);
                self.session.write_tensor(copy, part)?;
            }
        }
        Ok(self.session.write_tensor(name, data)?)
    }

    /// Like [`Self::set_elements`], but takes the elements of the whole tensor, of which this rank keeps its part.
    ///
    /// # Errors
    /// Returns an error if no tensor has this name and size.
    pub fn set_whole(&mut self, name: &str, data: &[f32]) -> Result<()> {
        let window = self.window(name)?;
        if window.is_whole() {
            return self.set_elements(name, data);
        }
        let (expected, given) = (window.whole_dims().iter().product::<usize>(), data.len());
        if given != expected {
            return Err(gapless_runtime::Error::ElementCount { name: name.into(), expected, given }.into());
        }
        let part: Vec<f32> = window.runs().flat_map(|run| &data[run]).copied().collect();
        self.set_elements(name, &part)
    }
}
