//! Values that no node produces: parameters, optimizer states, inputs, caches, and constants.
//!
//! In: a name, a shape and a type. Out: a new value, or the existing value of that name. Never: two values with one
//! name.

use candle_core::Layout;
use gapless_kernels::{Spec, Window};

use super::{Graph, Source, Value, ValueId};
use crate::error::{Error, Result};
use crate::nn::{Init, Initializer};

impl Graph {
    /// Declares a tensor that outlives the step. If a tensor of that name is already declared, returns it.
    ///
    /// # Errors
    /// Returns [`Error::ParameterShape`] if the declared tensor has another shape, and [`Error::TypeClash`] if it has
    /// another type.
    pub fn add_persistent(&mut self, name: &str, spec: Spec, init: Init) -> Result<ValueId> {
        self.check_sizes(name, std::slice::from_ref(&spec))?;
        if let Some(&id) = self.names.get(name) {
            let made = &self.value(id).spec;
            if made.shape != spec.shape {
                let (asked, made) = (spec.shape, made.shape.clone());
                return Err(Error::ParameterShape { name: name.into(), asked, made });
            }
            return if made.dtype == spec.dtype { Ok(id) } else { Err(Error::TypeClash { name: name.into() }) };
        }
        let fill = Initializer::whole(init, name, spec.dims());
        let id = self.push_value(spec, Source::Persistent { name: name.into(), fill });
        self.names.insert(name.into(), id);
        Ok(id)
    }

    /// Declares this rank's part of a tensor: the elements of `window`, stored as `spec`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::add_persistent`], and [`Error::ParameterShape`] if `spec` has another number of
    /// elements than the window.
    pub fn add_part(&mut self, name: &str, spec: Spec, init: Init, window: Window) -> Result<ValueId> {
        if spec.elements() != window.elements() {
            let (asked, made) = (spec.shape, window.elements().into());
            return Err(Error::ParameterShape { name: name.into(), asked, made });
        }
        self.add_filled(name, spec, Initializer { init, name: name.into(), window, given: None })
    }

    /// Declares a tensor that outlives the step, with these initial values.
    ///
    /// # Errors
    /// Returns the errors of [`Self::add_persistent`].
    pub(crate) fn add_filled(&mut self, name: &str, spec: Spec, fill: Initializer) -> Result<ValueId> {
        let id = self.add_persistent(name, spec, fill.init)?;
        if let Source::Persistent { fill: made, .. } = &mut self.values[id.index()].source {
            *made = fill;
        }
        Ok(id)
    }

    /// Declares a value that no node produces, as another graph has declared it.
    pub(crate) fn adopt(&mut self, value: &Value) -> ValueId {
        let name = match &value.source {
            Source::Constant(number) => return self.constant_like(*number, value.spec.clone()),
            Source::Persistent { name, .. } | Source::Input { name } | Source::Cache { name } => Some(name.clone()),
            Source::Data { name, .. } => Some(name.clone()),
            Source::Node { .. } => None,
        };
        let id = self.push_value(value.spec.clone(), value.source.clone());
        self.names.extend(name.map(|name| (name, id)));
        id
    }

    /// Initializes the persistent tensor `id` with the initial values of `parameter`. Both must be parts of tensors of
    /// equal extents. They may be different parts, and may have different types.
    pub fn initialize_from(&mut self, id: ValueId, parameter: ValueId) {
        let Source::Persistent { fill, .. } = &self.value(parameter).source else { return };
        let like = fill.clone();
        if let Source::Persistent { fill, .. } = &mut self.values[id.index()].source {
            *fill = Initializer { window: fill.window.clone(), ..like };
        }
    }

    /// Returns the part of a persistent tensor that this rank holds. For any other value, returns a window of the whole
    /// value.
    pub fn window(&self, id: ValueId) -> Window {
        match &self.value(id).source {
            Source::Persistent { fill, .. } => fill.window.clone(),
            _ => Window::whole(self.value(id).spec.dims()),
        }
    }

    /// Declares a tensor that the host writes. If an input of that name is already declared, returns it.
    ///
    /// # Errors
    /// Returns [`Error::TypeClash`] if the declared input has another shape or type.
    pub fn add_input(&mut self, name: &str, spec: Spec) -> Result<ValueId> {
        self.check_sizes(name, std::slice::from_ref(&spec))?;
        if let Some(&id) = self.names.get(name) {
            let same = self.value(id).spec == spec && matches!(self.value(id).source, Source::Input { .. });
            return if same { Ok(id) } else { Err(Error::TypeClash { name: name.into() }) };
        }
        let id = self.push_value(spec, Source::Input { name: name.into() });
        self.names.insert(name.into(), id);
        Ok(id)
    }

    /// Declares a cache of past tokens. Its name is the current layer's, followed by `what`.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if an extent is 0 or the tensor is too large.
    pub fn add_cache(&mut self, what: &str, spec: Spec) -> Result<ValueId> {
        let name = self.free_name(&format!("{}/{what}", self.layer()), |graph, name| graph.names.contains_key(name));
        self.add_named_cache(name, spec)
    }

    /// Declares a cache of past tokens of this name, which no other value has.
    pub(crate) fn add_named_cache(&mut self, name: String, spec: Spec) -> Result<ValueId> {
        self.check_sizes(&name, std::slice::from_ref(&spec))?;
        let id = self.push_value(spec, Source::Cache { name: name.clone() });
        self.names.insert(name, id);
        Ok(id)
    }

    /// Adds a tensor whose elements all equal `number`. It is stored as one element that is broadcast to the shape.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if an extent is 0 or the tensor would be too large.
    pub fn add_constant(&mut self, number: f64, spec: Spec) -> Result<ValueId> {
        self.check_sizes("a constant", std::slice::from_ref(&spec))?;
        Ok(self.constant_like(number, spec))
    }

    /// Like [`Self::add_constant`], for the shape of an existing tensor, whose size has already been checked.
    pub(crate) fn constant_like(&mut self, number: f64, spec: Spec) -> ValueId {
        let key = (number.to_bits(), spec.dtype);
        let stored = match self.constants.get(&key) {
            Some(&id) => id,
            None => self.push_value(spec.in_shape(()), Source::Constant(number)),
        };
        self.constants.insert(key, stored);
        if spec.shape.rank() == 0 {
            return stored;
        }
        let layout = Layout::new(spec.shape.clone(), vec![0; spec.shape.rank()], 0);
        self.push_view(stored, spec, layout)
    }

    /// Adds a tensor with the given elements. Equal tensors are stored once.
    pub fn add_data(&mut self, elements: Vec<f64>, spec: Spec) -> ValueId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{:?}", (spec.dtype, spec.dims())).as_bytes());
        let mut bytes = Vec::with_capacity(8 * elements.len());
        elements.iter().for_each(|x| bytes.extend_from_slice(&x.to_le_bytes()));
        hasher.update(&bytes);
        let name = format!("data {}", &hasher.finalize().to_hex()[..16]);
        if let Some(&id) = self.names.get(&name) {
            return id;
        }
        let id = self.push_value(spec, Source::Data { name: name.clone(), elements: elements.into() });
        self.names.insert(name, id);
        id
    }
}
