//! The reference implementation of graphs: every operation in f64, on plain arrays, one element after another. Kernels
//! and gradients are checked against it.
//!
//! The implementation is slow and simple on purpose. It shares no code with the kernels, the planner or the executor.

use std::collections::HashMap;

use candle_core::Layout;
use gapless_kernels::Stream;

use crate::graph::{Graph, Source, ValueId};

/// A dense row-major array.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Extents of the dimensions.
    pub dims: Vec<usize>,
    /// Elements in row-major order.
    pub data: Vec<f64>,
}

impl Array {
    /// Creates an array from its extents and elements.
    ///
    /// # Panics
    /// Panics if the number of elements is not the product of the extents.
    pub fn new(dims: &[usize], data: Vec<f64>) -> Self {
        assert_eq!(dims.iter().product::<usize>(), data.len(), "extents and elements agree");
        Self { dims: dims.to_vec(), data }
    }

    /// Creates an array of zeros.
    pub fn zeros(dims: &[usize]) -> Self {
        Self { dims: dims.to_vec(), data: vec![0.0; dims.iter().product()] }
    }

    /// Applies a function to every element.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { dims: self.dims.clone(), data: self.data.iter().map(|&x| f(x)).collect() }
    }

    /// Applies a function to every pair of elements at the same index of two arrays of the same shape.
    pub fn zip(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        assert_eq!(self.dims, other.dims, "equal shapes");
        let data = self.data.iter().zip(&other.data).map(|(&a, &b)| f(a, b)).collect();
        Self { dims: self.dims.clone(), data }
    }

    /// Iterates over the rows. A row is a run of elements along the last dimension.
    pub fn rows(&self) -> std::slice::ChunksExact<'_, f64> {
        self.data.chunks_exact(self.dims.last().copied().unwrap_or(1).max(1))
    }

    /// Returns the elements of a view of this array with the given layout.
    pub fn view(&self, layout: &Layout) -> Self {
        Self { dims: layout.dims().to_vec(), data: layout_indices(layout).map(|i| self.data[i]).collect() }
    }
}

/// Returns the storage index of every element of a layout, in row-major order.
pub fn layout_indices(layout: &Layout) -> impl Iterator<Item = usize> + '_ {
    let (dims, strides, start) = (layout.dims(), layout.stride(), layout.start_offset());
    let count: usize = dims.iter().product();
    (0..count).map(move |mut flat| {
        let mut index = start;
        for (&dim, &stride) in dims.iter().zip(strides).rev() {
            index += (flat % dim) * stride;
            flat /= dim;
        }
        index
    })
}

/// The arguments of a reference implementation.
#[derive(Debug)]
pub struct Reference<'a> {
    /// The inputs, in order.
    pub inputs: Vec<&'a Array>,
    /// The generator of random numbers for this step and micro-batch.
    pub stream: Stream,
}

impl<'a> Reference<'a> {
    /// Returns an input as a dense array.
    pub fn input(&self, index: usize) -> &'a Array {
        self.inputs[index]
    }

    /// Returns the number of inputs.
    pub fn inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the generator of random numbers for this step and micro-batch.
    pub fn random(&self) -> Stream {
        self.stream
    }
}

/// Returns the elements of a root that no node produces, and `None` for one that a node produces.
///
/// # Panics
/// Panics if a persistent tensor or an input is not in `given` or has the wrong number of elements.
pub(crate) fn stored(graph: &Graph, given: &HashMap<String, Array>, id: ValueId) -> Option<Array> {
    let value = graph.value(id);
    match &value.source {
        Source::Node { .. } => None,
        Source::Persistent { name, .. } | Source::Input { name } | Source::Cache { name } => {
            let array = given.get(name).unwrap_or_else(|| panic!("{name} is not given")).clone();
            assert_eq!(array.data.len(), value.spec.elements(), "elements of {name}");
            Some(array)
        }
        Source::Constant(number) => Some(Array::new(&[], vec![*number])),
        Source::Data { elements, .. } => Some(Array::new(value.spec.dims(), elements.to_vec())),
    }
}

/// Computes every value of `graph`, and returns the values by index. `given` holds the parameters, optimizer states and
/// inputs by name.
///
/// # Panics
/// Panics if a persistent tensor or an input is not in `given` or has the wrong number of elements.
pub fn evaluate(graph: &Graph, given: &HashMap<String, Array>, stream: Stream) -> Vec<Array> {
    evaluate_with(graph, given, stream, |_, _, x| x)
}

/// Like [`evaluate`], but replaces every element that is read by the result of `read`, which is called with three
/// arguments:
///
/// - the index of the node that reads the element, or `None` if the element is part of the returned arrays;
/// - the value to which the element belongs;
/// - the element.
pub fn evaluate_with(
    graph: &Graph,
    given: &HashMap<String, Array>,
    stream: Stream,
    mut read: impl FnMut(Option<usize>, ValueId, f64) -> f64,
) -> Vec<Array> {
    let mut values: Vec<Option<Array>> = vec![None; graph.values().len()];
    for id in graph.value_ids().filter(|&id| !graph.is_view(id)) {
        values[id.index()] = stored(graph, given, id);
    }
    let mut read = |values: &[Option<Array>], reader: Option<usize>, id: ValueId| {
        let value = graph.value(id);
        let mut seen = values[value.root.index()].as_ref().expect("made before it is used").view(&value.layout);
        seen.data.iter_mut().for_each(|x| *x = read(reader, id, *x));
        seen
    };
    for (index, node) in graph.nodes().iter().enumerate().filter(|(_, node)| !graph.is_view(node.outputs[0])) {
        let inputs: Vec<Array> = node.inputs.iter().map(|&id| read(&values, Some(index), id)).collect();
        let outputs = node.op.reference(&Reference { inputs: inputs.iter().collect(), stream });
        for (&id, output) in node.outputs.iter().zip(outputs) {
            assert_eq!(
                output.dims,
                graph.value(id).spec.dims(),
                "shape rule and reference of {} agree",
                node.op.name()
            );
            values[id.index()] = Some(output);
        }
    }
    graph.value_ids().map(|id| read(&values, None, id)).collect()
}
