//! PyTorch's FSDP2 (`torch/distributed/fsdp/_fully_shard`, PyTorch 2.6) on the layers of torchtitan: parameters are gathered
//! unit by unit, and their gradients are reduced and scattered.
//!
//! A unit is a block of the model; all other parameters are the root's unit. The bytes of a unit:
//!
//! | time | allocated | freed |
//! |---|---|---|
//! | a gather (`foreach_all_gather`) | the shards in the type of the parameters, the gathered flat buffer | the shards |
//! | its end (`foreach_all_gather_copy_out`) | the whole parameters | in the backward the flat buffer; in the forward that of the unit before |
//! | after a block's forward | | its parameters, except in stage 2, and except those of the last block and of the root |
//! | before a block's backward | its parameters, and the flat buffer of the block before it | |
//! | after a block's backward (`foreach_reduce`) | the reduce-scatter's input and output | parameters, gradients, the input of the reduction before |
//!
//! In a pipeline (`backward_maybe_with_nosync` in `torch/distributed/pipelining/stage.py`), gradients of micro-batches are added
//! up whole, in the type of the reduction, parameters stay, and all units are reduced after the last backward. Outputs of
//! reduce-scatters are the gradients of shards, which live until the end of the step.
//!
//! Flat buffers and the outputs of reduce-scatters are allocated on streams of their own, for which PyTorch's allocator has
//! separate memory.

use std::cell::RefCell;
use std::rc::Rc;

use gapless_engine::StepOptions;

use super::autograd::{Autograd, Var};
use super::tape::{BF16, F32, Tape, Tensor};
use crate::run::Fsdp2Config;

/// Properties in which a run with FSDP2 differs from other eager programs.
#[derive(Debug, Clone, Copy)]
pub struct Fsdp {
    /// Number of ranks that divide each parameter.
    pub ranks: u64,
    /// Whether blocks free their parameters after the forward.
    pub reshards: bool,
    /// Bytes per element of gradients while they are reduced.
    pub reduction: u64,
    /// Whether checkpoints keep the results of every second product and of attention.
    pub selects: bool,
    /// Whether layers are compiled, so that norms, rotations and gates are one kernel each.
    pub is_compiled: bool,
    /// Whether gathers over tensor ranks are parts of products.
    pub is_async: bool,
    /// Whether gradients are reduced once per step, after the last micro-batch of a pipeline.
    pub reduces_last: bool,
}

impl Fsdp {
    pub fn new(config: &Fsdp2Config, step: &StepOptions) -> Self {
        Self {
            ranks: step.mesh.shard as u64,
            reshards: step.zero_stage == 3,
            reduces_last: step.mesh.pipeline > 1,
            reduction: if config.reduce_bf16 { BF16 } else { F32 },
            selects: config.selective,
            is_compiled: config.compiled,
            is_async: config.async_tensor,
        }
    }
}

/// Parameters that are gathered together.
#[derive(Debug)]
struct Unit {
    /// The block, or `None` for the root.
    block: Option<String>,
    /// The parameters, each of which is a leaf without memory.
    leaves: Vec<Var>,
    /// Elements of the shards of this rank.
    shard: u64,
    /// The whole parameters while they exist.
    whole: Option<Vec<Tensor>>,
    /// The flat buffer of a gather that has not ended.
    flat: Option<Tensor>,
    /// The sums of whole gradients over micro-batches, if they are reduced last.
    sums: Vec<Tensor>,
    /// The gradients of the shards.
    gradients: Option<Tensor>,
}

/// The units of a rank, in the order of the forward. The root is the first.
#[derive(Debug)]
pub struct Units {
    fsdp: Fsdp,
    tape: Tape,
    units: Vec<Unit>,
    /// The flat buffer of the last gather of a forward.
    gathered: Option<Tensor>,
    /// The input of the last reduce-scatter.
    reduced: Option<Tensor>,
}

impl Units {
    pub fn new(fsdp: Fsdp, tape: &Tape) -> Self {
        let root = Unit::new(None);
        Self { fsdp, tape: tape.clone(), units: vec![root], gathered: None, reduced: None }
    }

    /// Adds a parameter of a block, or of the root. `rows` is its first dimension, which ranks divide. Returns the elements of
    /// the shard.
    pub fn add(&mut self, block: Option<&str>, leaf: &Var, rows: u64) -> u64 {
        let index = self.index(block);
        let index = index.unwrap_or_else(|| {
            self.units.push(Unit::new(block));
            self.units.len() - 1
        });
        let shard = rows.div_ceil(self.fsdp.ranks) * (leaf.data.elements / rows.max(1));
        let unit = &mut self.units[index];
        unit.leaves.push(leaf.clone());
        unit.shard += shard;
        shard
    }

    /// Returns the index of a block's unit; that of the root is 0.
    pub fn index(&self, block: Option<&str>) -> Option<usize> {
        self.units.iter().position(|unit| unit.block.as_deref() == block)
    }

    /// Starts the gather of a unit, unless it is gathered.
    fn start(&mut self, index: usize) {
        let Self { fsdp, tape, units, .. } = self;
        let unit = &mut units[index];
        if unit.whole.is_none() && unit.flat.is_none() && !unit.leaves.is_empty() {
            let _cast = tape.beside(unit.shard, BF16);
            unit.flat = Some(tape.beside(unit.shard * fsdp.ranks, BF16));
        }
    }

    /// Ends the gather of a unit and returns its flat buffer.
    fn end(&mut self, index: usize) -> Option<Tensor> {
        let unit = &mut self.units[index];
        let flat = unit.flat.take()?;
        unit.whole = Some(unit.leaves.iter().map(|leaf| self.tape.like(&leaf.data)).collect());
        Some(flat)
    }

    /// Gathers a unit before its forward.
    pub fn before_forward(&mut self, index: usize) {
        self.start(index);
        if self.units[index].flat.is_some() {
            self.gathered = None;
            self.gathered = self.end(index);
        }
    }

    /// Frees a unit's parameters after its forward.
    pub fn after_forward(&mut self, index: usize) {
        if self.fsdp.reshards && index > 0 && index + 1 < self.units.len() {
            self.units[index].whole = None;
        }
    }

    /// Frees the gradients of shards.
    pub fn zero_grad(&mut self) {
        self.units.iter_mut().for_each(|unit| unit.gradients = None);
    }

    /// Gathers a unit before its backward, and starts the gather of the unit before it.
    fn before_backward(&mut self, index: usize) {
        self.gathered = None;
        self.start(index);
        drop(self.end(index));
        if index > 1 {
            self.start(index - 1);
        }
    }

    /// Frees a unit's parameters and reduces its gradients.
    fn after_backward(&mut self, index: usize) {
        let Self { fsdp, tape, units, .. } = self;
        let unit = &mut units[index];
        let gradients = unit.leaves.iter().filter_map(|leaf| leaf.leaf()?.grad.take());
        let gradients: Vec<Tensor> = gradients.collect();
        if gradients.is_empty() {
            return;
        }
        if fsdp.reduces_last {
            if unit.sums.is_empty() {
                unit.sums = gradients.iter().map(|gradient| tape.cast(gradient, fsdp.reduction)).collect();
            }
            return;
        }
        self.reduce(index, gradients);
    }

    /// Reduces whole gradients of a unit.
    fn reduce(&mut self, index: usize, gradients: Vec<Tensor>) {
        let Self { fsdp, tape, units, reduced, .. } = self;
        let unit = &mut units[index];
        unit.whole = None;
        *reduced = None;
        let input = tape.new_tensor(unit.shard * fsdp.ranks, 1, fsdp.reduction);
        drop(gradients);
        let output = tape.beside(unit.shard, fsdp.reduction);
        let output = if fsdp.reduction == F32 { output } else { tape.beside(unit.shard, F32) };
        unit.gradients.get_or_insert(output);
        *reduced = Some(input);
    }

    /// Ends the backward of a micro-batch: the root reduces last.
    pub fn end_backward(&mut self) {
        (0..self.units.len()).rev().for_each(|index| self.after_backward(index));
        self.reduced = None;
    }

    /// Reduces the sums over micro-batches, after the last.
    pub fn end_step(&mut self) {
        for index in (0..self.units.len()).rev() {
            let sums = std::mem::take(&mut self.units[index].sums);
            if !sums.is_empty() {
                self.reduce(index, sums);
            }
        }
        self.reduced = None;
    }
}

impl Unit {
    fn new(block: Option<&str>) -> Self {
        let block = block.map(str::to_owned);
        Self { block, leaves: Vec::new(), shard: 0, whole: None, flat: None, sums: Vec::new(), gradients: None }
    }
}

/// Allocates the tensor of `elements` elements that is gathered from parts like `part`.
fn gathered(tape: &Tape, elements: u64, part: &Tensor, fsdp: Fsdp) -> Tensor {
    let flat = (!fsdp.is_async).then(|| tape.new_tensor(elements, part.width, part.dtype));
    let whole = tape.new_tensor(elements, part.width, part.dtype);
    drop(flat);
    whole
}

impl Autograd {
    /// Gathers a unit as soon as the gradient of this output is known (`_pre_backward`).
    pub fn before_backward(&self, y: &Var, units: &Rc<RefCell<Units>>, index: usize) -> Var {
        let units = units.clone();
        self.record(&[y]).output(y.data.clone(), move |_, g| {
            units.borrow_mut().before_backward(index);
            vec![Some(g.clone())]
        })
    }

    /// Reduces a unit's gradients as soon as those of these inputs are known (`RegisterPostBackwardFunction`).
    pub fn after_backward(&self, inputs: &[&Var], units: &Rc<RefCell<Units>>, index: usize) -> Vec<Var> {
        let units = units.clone();
        let data = inputs.iter().map(|x| x.data.clone()).collect();
        self.record(inputs).outputs(data, move |_, gradients| {
            units.borrow_mut().after_backward(index);
            gradients.to_vec()
        })
    }

    /// A gather of tokens over tensor ranks (`redistribute` of DTensor): ranks are gathered one after another, and copied into
    /// the order of the tokens. The backward reduces and scatters a copy of the gradient.
    pub fn gather_tokens(&self, x: &Var, parts: u64, fsdp: Fsdp) -> Var {
        let (elements, width, dtype) = (x.data.elements, x.data.width, x.data.dtype);
        let whole = gathered(&self.tape, parts * elements, &x.data, fsdp);
        self.record(&[x]).output(whole, move |t, g| {
            let _chunks = (!fsdp.is_async).then(|| t.like(g));
            vec![Some(t.new_tensor(elements, width, dtype))]
        })
    }

    /// A reduce-scatter of tokens over tensor ranks, whose backward gathers.
    pub fn scatter_tokens(&self, x: &Var, parts: u64, fsdp: Fsdp) -> Var {
        let (elements, width) = (x.data.elements, x.data.width);
        let chunks = (!fsdp.is_async).then(|| self.tape.like(&x.data));
        let part = self.tape.new_tensor(elements / parts, width, x.data.dtype);
        drop(chunks);
        self.record(&[x]).output(part, move |t, g| vec![Some(gathered(t, elements, g, fsdp))])
    }

    /// Rotary positions as torchtitan writes them (`apply_rotary_emb`): a product of complex numbers in f32.
    pub fn complex_rope(&self, x: &Var) -> Var {
        let rotated = {
            let wide = self.cast(x, F32);
            self.scale(&wide)
        };
        self.cast(&rotated, x.data.dtype)
    }

    /// `repeat_kv`: each key or value head is copied for the queries that share it.
    pub fn repeat(&self, x: &Var, elements: u64) -> Var {
        if x.data.elements == elements {
            return x.clone();
        }
        let (whole, width, own) = (elements, x.data.width, x.data.elements);
        let y = Tensor { is_transposed: x.data.is_transposed, ..self.tape.new_tensor(whole, width, x.data.dtype) };
        self.record(&[x]).output(y, move |t, g| vec![Some(t.new_tensor(own, width, g.dtype))])
    }
}

#[cfg(test)]
mod tests {
    use crate::run::RunConfig;
    use crate::step::eager::assert_refused;
    use crate::step::{EagerBytes, Step};

    const WIDTH: u64 = 256;
    const HIDDEN: u64 = 512;
    const TOKENS: u64 = 2 * 128;
    /// Parameters of a layer: four projections of attention, three of the gate, two norms.
    const LAYER: u64 = 4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN + 2 * WIDTH;

    fn bytes(layers: u64, keys: &str) -> EagerBytes {
        let text = format!(
            "[model.llama]\nvocabulary = 16384\nlayers = {layers}\nheads = 4\nkv_heads = 4\nwidth = {WIDTH}\nhidden = {HIDDEN}\n\
             [step]\nbatch = 8\nsequence = 128\nprecision = \"bf16\"\n[mesh]\nshard = 4\n[memory]\nrecompute = \"layers\"\n\
             [estimate]\nlowering = \"fsdp2\"\n"
        );
        let keys: Vec<String> = keys.split_whitespace().map(str::to_owned).collect();
        let step = Step::new(&RunConfig::parse(&text, &keys).unwrap()).unwrap();
        step.eager_bytes(&step.record().unwrap(), 0).unwrap()
    }

    /// Shards in f32 and two moments take 12 bytes per parameter, divided by the ranks. With recomputed layers, each further
    /// layer takes these, its input and, in stage 2, its gathered parameters. The peak is in the loss, before any gradient.
    #[test]
    fn a_layer_takes_its_shards_and_its_input() {
        let parameters = |layers: u64| 2 * 16384 * WIDTH + WIDTH + layers * LAYER;
        for (keys, gathered) in [("", 0), ("step.zero_stage=2", 2 * LAYER)] {
            let [less, more] = [4, 5].map(|layers| bytes(layers, keys));
            assert_eq!([less.states, more.states], [4, 5].map(|layers| 12 * parameters(layers) / 4), "{keys}");
            assert_eq!(more.peak - less.peak, 12 * LAYER / 4 + 2 * TOKENS * WIDTH + gathered, "{keys}");
        }
    }

    /// Checkpoints select the results of every second product (q, v, gate and down) and of attention, with its
    /// statistic of each token and head.
    #[test]
    fn checkpoints_keep_selected_results() {
        let kept = |keys: &str| {
            let [less, more] = [4, 5].map(|layers| bytes(layers, keys));
            more.peak - less.peak
        };
        let selected = 2 * TOKENS * (3 * WIDTH + HIDDEN + WIDTH) + 4 * TOKENS * 4;
        assert_eq!(kept("estimate.fsdp2.selective=true") - kept(""), selected);
    }

    #[test]
    fn what_torchtitan_does_not_do_is_refused() {
        let refuse = |keys: &[&str], words: &str| {
            assert_refused("estimate.lowering = \"fsdp2\"\nstep = { sequence = 16 }\n", keys, words)
        };
        refuse(&["model=small"], "step.precision: megatron and fsdp2 require bf16");
        refuse(&["model=gpt2", "step.precision=bf16"], "fsdp2 has the layers of torchtitan's Llama");
        refuse(&["model=mixtral8x7b", "step.precision=bf16"], "megatron and fsdp2 have no experts");
    }
}
