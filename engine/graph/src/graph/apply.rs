//! Creation of nodes: applies an operation to values and adds its outputs to the graph.
//!
//! In: an operation and its inputs. Out: a node at the end of the graph, preceded by a contiguous copy of each input
//! whose strides the operation cannot read. An existing node can also be given additional outputs, or another type for
//! an output. Never: an output that differs from what the operation declares.

use std::sync::Arc;

use candle_core::{DType, Layout};
use gapless_kernels::Spec;

use super::{Graph, Node, NodeId, Phase, RowCount, Source, ValueId, check};
use crate::error::{Error, Result};
use crate::op::{Op, RowUse};
use crate::ops::Contiguous;

impl Graph {
    /// Applies `op` in the phase, the place and the layer of `like`, a node that may be another graph's.
    ///
    /// # Errors
    /// Returns the errors of [`Self::apply`].
    pub(crate) fn apply_like(&mut self, like: &Node, op: Arc<dyn Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        self.set_phase(like.phase);
        self.set_place(like.place);
        self.enter_layer(like.layer.clone());
        let applied = self.apply(op, inputs);
        self.leave_layer();
        applied
    }

    /// Applies `op`, preceded by a contiguous copy of each input whose strides `op` cannot read. Returns one value per
    /// output.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] with the operation's message, the layer and the shapes.
    pub fn apply(&mut self, op: Arc<dyn Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>> {
        let out_specs = self.infer(&*op, inputs)?;
        // A view that these strides do not allow is one of a copy.
        if let [input, others @ ..] = inputs
            && op.view(&self.value(*input).layout).is_none()
            && op.view(&Layout::contiguous(self.value(*input).spec.shape.clone())).is_some()
        {
            let copy = self.apply(Arc::new(Contiguous), &[*input])?;
            return self.apply(op, &[&copy, others].concat());
        }
        let viewed = inputs.first().map(|&input| self.value(input));
        if let Some((input, layout)) = viewed.and_then(|input| Some((input, op.view(&input.layout)?))) {
            let root = input.root;
            let shown = check::view(&layout, &out_specs, &self.value(root).spec);
            let spec = shown.map_err(|what| self.refused(&*op, inputs, what))?.clone();
            let id = self.push_view(root, spec, layout);
            self.push_node(op, inputs.to_vec(), vec![id]);
            return Ok(vec![id]);
        }
        let mut inputs = inputs.to_vec();
        for (index, id) in inputs.iter_mut().enumerate() {
            let layout = &self.value(*id).layout;
            if !layout.is_contiguous() && !op.reads_strides(index, layout) {
                *id = self.apply(Arc::new(Contiguous), &[*id])?[0];
            }
        }
        let outputs: Vec<ValueId> = out_specs
            .into_iter()
            .enumerate()
            .map(|(output, spec)| {
                let node = NodeId(self.nodes.len() as u32);
                self.push_value(spec, Source::Node { node, output })
            })
            .collect();
        for &output in &outputs {
            self.values[output.index()].row_count = self.rows_of(&*op, &inputs, output);
        }
        self.push_node(op, inputs, outputs.clone());
        Ok(outputs)
    }

    /// Returns the row count of an output, or `None` if the output has a fixed number of rows.
    fn rows_of(&self, op: &dyn Op, inputs: &[ValueId], output: ValueId) -> Option<RowCount> {
        let dims = self.value(output).spec.dims();
        match op.rows() {
            RowUse::DynamicOutputs { offsets, balanced } => {
                inputs.get(offsets).map(|&offsets| RowCount { offsets, balanced }).filter(|_| !dims.is_empty())
            }
            RowUse::InheritsRows if dims.is_empty() => None,
            RowUse::InheritsRows => inputs.iter().find_map(|&input| {
                let input = self.value(input);
                (input.spec.dims() == dims).then_some(self.value(input.root).row_count).flatten()
            }),
            RowUse::Unaware | RowUse::FixedOutputs => None,
        }
    }

    /// Runs the shape rule of `op`, and checks everything else that `op` declares about the operands.
    fn infer(&self, op: &dyn Op, inputs: &[ValueId]) -> Result<Vec<Spec>> {
        let specs = self.specs(inputs);
        // A broadcast value may have a large shape although it occupies few bytes. A contiguous copy of it would occupy
        // the bytes of the whole shape.
        if specs.iter().any(|spec| spec.checked_bytes().is_none()) {
            return Err(self.refused(op, inputs, "an input has more than 2^63 bytes"));
        }
        let out_specs = op.infer(&specs).map_err(|what| self.refused(op, inputs, what))?;
        self.check_sizes(op.name(), &out_specs)?;
        check::operands(op, &specs, &out_specs).map_err(|what| self.refused(op, inputs, what))?;
        Ok(out_specs)
    }

    fn refused(&self, op: &dyn Op, inputs: &[ValueId], what: impl Into<String>) -> Error {
        let shapes = inputs.iter().map(|&id| self.value(id).spec.shape.clone()).collect();
        Error::Shape { op: op.name().into(), layer: self.layer().to_string(), what: what.into(), shapes }
    }

    /// Replaces the operation of a node by `op`, which takes the same inputs in the same layouts and has `new`
    /// additional outputs after the existing ones. Returns the additional outputs.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if `op` rejects the inputs, needs other layouts, or changes the existing outputs.
    pub fn extend_node(&mut self, id: NodeId, op: Arc<dyn Op>, new: usize) -> Result<Vec<ValueId>> {
        let Node { inputs, outputs, .. } = self.node(id).clone();
        let out_specs = self.infer(&*op, &inputs)?;
        let kept = outputs.iter().map(|&output| &self.value(output).spec);
        if out_specs.len() != outputs.len() + new || !kept.eq(&out_specs[..outputs.len()]) {
            let what = format!("its outputs must be those of {} and {new} more", self.node(id).op.name());
            return Err(self.refused(&*op, &inputs, what));
        }
        let readable = |(index, &input): (usize, &ValueId)| {
            let layout = &self.value(input).layout;
            layout.is_contiguous() || op.reads_strides(index, layout)
        };
        if !inputs.iter().enumerate().all(readable) {
            let what = format!("it must read the strides that {} reads", self.node(id).op.name());
            return Err(self.refused(&*op, &inputs, what));
        }
        let first = outputs.len();
        let new = out_specs.into_iter().enumerate().skip(first);
        let new: Vec<ValueId> =
            new.map(|(output, spec)| self.push_value(spec, Source::Node { node: id, output })).collect();
        let node = &mut self.nodes[id.index()];
        node.op = op;
        node.outputs.extend(&new);
        Ok(new)
    }

    /// Changes the float type in which a node produces a value. The value must not have a reader yet. If the operation
    /// cannot produce the type, returns false and changes nothing.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if the changed operation would also change anything else.
    pub fn change_output_dtype(&mut self, id: ValueId, dtype: DType) -> Result<bool> {
        let Source::Node { node, output } = self.value(id).source else { return Ok(false) };
        let Node { op, inputs, outputs, .. } = self.node(node);
        let Some(op) = op.with_output_dtype(output, dtype).filter(|_| outputs[output] == id) else { return Ok(false) };
        let mut expected = self.specs(outputs);
        expected[output].dtype = dtype;
        if self.infer(&*op, inputs)? != expected {
            return Err(self.refused(&*op, inputs, format!("only the type of output {output} may change")));
        }
        self.nodes[node.index()].op = op;
        self.values[id.index()].spec.dtype = dtype;
        Ok(true)
    }

    fn push_node(&mut self, op: Arc<dyn Op>, inputs: Vec<ValueId>, outputs: Vec<ValueId>) {
        if let [output] = outputs[..]
            && self.is_view(output)
        {
            let node = NodeId(self.nodes.len() as u32);
            self.values[output.index()].source = Source::Node { node, output: 0 };
        }
        let (layer, phase) = (self.layer(), self.phase.unwrap_or(Phase::Forward));
        self.nodes.push(Node { op, inputs, outputs, layer, phase, place: self.place });
    }
}
