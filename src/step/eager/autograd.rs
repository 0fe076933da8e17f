//! A model of PyTorch's autograd, limited to its effects on memory:
//! - nodes that hold the tensors they saved;
//! - an engine that runs nodes in descending order of creation, and accumulates a gradient in place if it has the only
//!   reference to the gradient;
//! - checkpoints, which recompute all of their tensors when the backward reads the first of these tensors.
//!
//! The model follows `torch/csrc/autograd/engine.cpp`, `input_buffer.cpp` and, for checkpoints without reentry,
//! `torch/utils/checkpoint.py`.

use std::cell::{Cell, RefCell};
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use gapless_engine::graph::ValueId;

use super::tape::{Tape, Tensor};

/// A tensor with its position in the backward graph.
#[derive(Debug, Clone)]
pub struct Var {
    pub data: Tensor,
    /// The node input to which the tensor's gradient is passed; `None` if the tensor needs no gradient.
    pub edge: Option<Edge>,
}

/// A node of the backward graph, and the index of one of its inputs.
pub type Edge = (Rc<Node>, usize);

/// Computes the gradients of an operation's inputs from the gradients of its outputs.
type Formula = Box<dyn Fn(&Tape, &[Option<Tensor>]) -> Vec<Option<Tensor>>>;

/// A node of the backward graph.
pub struct Node {
    /// Position in the order of creation; nodes with a higher number run first.
    order: u64,
    outputs: usize,
    next: Vec<Option<Edge>>,
    saved: RefCell<Vec<Slot>>,
    /// `None` for a leaf.
    formula: Option<Formula>,
    leaf: Leaf,
}

/// The gradient of a leaf.
#[derive(Debug, Default)]
pub struct Leaf {
    /// Whether the gradient is kept as a tensor until the step ends. If false, it is added to a sum that was allocated
    /// before the step.
    keeps: bool,
    pub grad: RefCell<Option<Tensor>>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("order", &self.order).field("next", &self.next.len()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Slot {
    #[expect(dead_code, reason = "it is held, not read")]
    Kept(Tensor),
    /// A tensor that a checkpoint recomputes, given by its index among the tensors that the checkpoint would save.
    Again(Rc<Checkpoint>, usize),
}

/// A checkpoint: a part of the forward that saves only its inputs.
#[derive(Debug)]
pub struct Checkpoint {
    /// Positions of the checkpoint's nodes within the stage.
    pub nodes: Range<usize>,
    pub inputs: Vec<(ValueId, Var)>,
    saves: Cell<usize>,
    /// The recomputed tensors; empty until the first of them is needed.
    tensors: RefCell<Vec<Option<Tensor>>>,
    /// Whether results of some operations are kept, and not recomputed.
    selects: bool,
    /// The kept results, in the order of their operations.
    results: RefCell<VecDeque<Tensor>>,
    /// Number of products so far, in the forward or when it runs again.
    products: Cell<usize>,
}

impl Checkpoint {
    pub fn new(nodes: Range<usize>, inputs: Vec<(ValueId, Var)>, selects: bool) -> Rc<Self> {
        let (saves, products) = (Cell::new(0), Cell::new(0));
        Rc::new(Self {
            nodes,
            inputs,
            saves,
            tensors: RefCell::default(),
            selects,
            results: RefCell::default(),
            products,
        })
    }

    /// Frees the last kept result: that of a block's last product, which no formula of the block reads.
    pub fn drop_last_result(&self) {
        self.results.borrow_mut().pop_back();
    }
}

/// The treatment of tensors that operations save.
#[derive(Debug, Clone, Default)]
pub enum Mode {
    /// The tensors are saved.
    #[default]
    Keep,
    /// The tensors are dropped. The checkpoint can recompute them.
    Drop(Rc<Checkpoint>),
    /// The forward of the checkpoint is running again, until all of its dropped tensors have been recomputed.
    Recompute(Rc<Checkpoint>),
}

/// Records operations and runs their backward.
#[derive(Debug, Default)]
pub struct Autograd {
    pub tape: Tape,
    orders: Cell<u64>,
    mode: RefCell<Mode>,
}

/// An operation that is being recorded.
pub struct Recording<'a> {
    autograd: &'a Autograd,
    next: Vec<Option<Edge>>,
    saved: Vec<Slot>,
}

impl Autograd {
    pub fn set_mode(&self, mode: Mode) {
        *self.mode.borrow_mut() = mode;
    }

    /// Returns the result of a product. A checkpoint that selects keeps every second one (`_get_custom_policy` of torchtitan's
    /// `parallelize_llama.py`).
    pub fn product_result(&self, make: impl FnOnce() -> Tensor) -> Tensor {
        let counted = |frame: &Checkpoint| frame.products.replace(frame.products.get() + 1).is_multiple_of(2);
        let is_kept = match &*self.mode.borrow() {
            Mode::Keep => false,
            Mode::Drop(frame) | Mode::Recompute(frame) => counted(frame),
        };
        if is_kept { self.selected_result(make) } else { make() }
    }

    /// Returns the result of an operation that a checkpoint keeps if it selects.
    pub fn selected_result(&self, make: impl FnOnce() -> Tensor) -> Tensor {
        match &*self.mode.borrow() {
            Mode::Drop(frame) if frame.selects => {
                let made = make();
                frame.results.borrow_mut().push_back(made.clone());
                made
            }
            Mode::Recompute(frame) if frame.selects => {
                let kept = frame.results.borrow_mut().pop_front();
                kept.unwrap_or_else(make)
            }
            _ => make(),
        }
    }

    /// Creates a leaf that needs a gradient.
    pub fn leaf(&self, data: Tensor, keeps: bool) -> Var {
        let leaf = Leaf { keeps, grad: RefCell::default() };
        let node = Node { order: u64::MAX, outputs: 1, next: vec![], saved: RefCell::default(), formula: None, leaf };
        Var { data, edge: Some((Rc::new(node), 0)) }
    }

    /// Starts to record an operation on these inputs.
    pub fn record(&self, inputs: &[&Var]) -> Recording<'_> {
        Recording { autograd: self, next: inputs.iter().map(|input| input.edge.clone()).collect(), saved: Vec::new() }
    }

    /// Runs the backward from `roots`, which are outputs with their gradients. `again` runs the forward of a checkpoint
    /// again.
    pub fn backward(&self, roots: Vec<(Edge, Tensor)>, again: &dyn Fn(&Checkpoint)) {
        let nodes: Vec<Rc<Node>> = roots.iter().map(|((node, _), _)| node.clone()).collect();
        let mut waiting = dependencies(&nodes);
        let mut buffers: HashMap<*const Node, Vec<Option<Tensor>>> = HashMap::new();
        for ((node, input), gradient) in roots {
            buffers.entry(Rc::as_ptr(&node)).or_insert_with(|| vec![None; node.outputs])[input] = Some(gradient);
        }
        // Among nodes of equal order, the node that became ready first runs first.
        let (mut ready, mut turn) = (BinaryHeap::new(), u64::MAX);
        for node in nodes {
            if waiting[&Rc::as_ptr(&node)] == 0 && !ready.iter().any(|Ready(_, _, other)| Rc::ptr_eq(other, &node)) {
                turn -= 1;
                ready.push(Ready(node.order, turn, node));
            }
        }
        while let Some(Ready(_, _, node)) = ready.pop() {
            let gradients = buffers.remove(&Rc::as_ptr(&node)).unwrap_or_default();
            let outputs = self.run(&node, gradients, again);
            for (edge, output) in node.next.iter().zip(outputs) {
                let Some((next, input)) = edge else { continue };
                let buffer = buffers.entry(Rc::as_ptr(next)).or_insert_with(|| vec![None; next.outputs]);
                self.accumulate(&mut buffer[*input], output);
                let waits = waiting.get_mut(&Rc::as_ptr(next)).expect("counted from the same root");
                *waits -= 1;
                if *waits == 0 {
                    turn -= 1;
                    ready.push(Ready(next.order, turn, next.clone()));
                }
            }
        }
    }

    /// Computes the gradients of a node's inputs. Afterwards, the gradients of the node's outputs are freed first, and
    /// then the tensors that the node saved.
    fn run(&self, node: &Node, gradients: Vec<Option<Tensor>>, again: &dyn Fn(&Checkpoint)) -> Vec<Option<Tensor>> {
        let Some(formula) = &node.formula else {
            let mut kept = node.leaf.grad.borrow_mut();
            if node.leaf.keeps && kept.is_none() {
                *kept = gradients.into_iter().next().flatten();
            }
            return Vec::new();
        };
        for slot in node.saved.borrow().iter() {
            if let Slot::Again(frame, _) = slot {
                self.recall(frame, again);
            }
        }
        let outputs = formula(&self.tape, &gradients);
        drop(gradients);
        for slot in node.saved.take() {
            if let Slot::Again(frame, number) = &slot {
                frame.tensors.borrow_mut()[*number] = None;
            }
        }
        outputs
    }

    /// Recomputes the tensors of a checkpoint, unless they have been recomputed already.
    fn recall(&self, frame: &Rc<Checkpoint>, again: &dyn Fn(&Checkpoint)) {
        if frame.tensors.borrow().is_empty() {
            let before = self.mode.replace(Mode::Recompute(frame.clone()));
            frame.products.set(0);
            again(frame);
            self.tape.mute(false);
            self.set_mode(before);
        }
    }

    /// Adds a gradient to `sum`. If the sum has the only reference to its memory, the addition is in place; otherwise a
    /// new sum is allocated.
    fn accumulate(&self, sum: &mut Option<Tensor>, new: Option<Tensor>) {
        match (sum.take(), new) {
            (Some(old), Some(_)) if old.is_stealable() => *sum = Some(old),
            (Some(old), Some(_new)) => *sum = Some(self.tape.like(&old)),
            (old, new) => *sum = old.or(new),
        }
    }
}

impl Recording<'_> {
    /// True if the gradient of this input is needed.
    pub fn needs(&self, input: usize) -> bool {
        self.next[input].is_some()
    }

    /// Saves a tensor for the backward. Inputs must be saved before the operation's output is allocated, outputs after
    /// it.
    pub fn save(&mut self, tensor: &Tensor) {
        if self.next.iter().all(Option::is_none) {
            return;
        }
        match &*self.autograd.mode.borrow() {
            Mode::Keep => {
                let kept = tensor.part.as_ref().map_or_else(
                    || tensor.clone(),
                    |part| Tensor { storage: part.clone(), part: None, ..tensor.clone() },
                );
                self.saved.push(Slot::Kept(kept));
            }
            Mode::Drop(frame) => {
                self.saved.push(Slot::Again(frame.clone(), frame.saves.get()));
                frame.saves.set(frame.saves.get() + 1);
            }
            Mode::Recompute(frame) => {
                let mut tensors = frame.tensors.borrow_mut();
                if tensors.len() < frame.saves.get() {
                    tensors.push(Some(tensor.clone()));
                }
                // When all saved tensors have been recomputed, the rest of the forward does not run, as with PyTorch's
                // `_StopRecomputationError`.
                self.autograd.tape.mute(tensors.len() == frame.saves.get());
            }
        }
    }

    /// Ends an operation with several outputs.
    pub fn outputs(
        self,
        outputs: Vec<Tensor>,
        formula: impl Fn(&Tape, &[Option<Tensor>]) -> Vec<Option<Tensor>> + 'static,
    ) -> Vec<Var> {
        let Self { autograd, next, saved } = self;
        if next.iter().all(Option::is_none) {
            return outputs.into_iter().map(|data| Var { data, edge: None }).collect();
        }
        let order = autograd.orders.replace(autograd.orders.get() + 1);
        let (count, saved, leaf) = (outputs.len(), RefCell::new(saved), Leaf::default());
        let node = Rc::new(Node { order, outputs: count, next, saved, formula: Some(Box::new(formula)), leaf });
        outputs.into_iter().enumerate().map(|(output, data)| Var { data, edge: Some((node.clone(), output)) }).collect()
    }

    /// Ends an operation with one output.
    pub fn output(self, output: Tensor, formula: impl Fn(&Tape, &Tensor) -> Vec<Option<Tensor>> + 'static) -> Var {
        let formula = move |tape: &Tape, gradients: &[Option<Tensor>]| match gradients {
            [Some(gradient)] => formula(tape, gradient),
            _ => Vec::new(),
        };
        self.outputs(vec![output], formula).pop().expect("one output")
    }
}

/// Returns the number of gradients that each node waits for before it can run.
fn dependencies(roots: &[Rc<Node>]) -> HashMap<*const Node, usize> {
    let mut counts = HashMap::new();
    let mut stack = Vec::new();
    for root in roots {
        if counts.insert(Rc::as_ptr(root), 0).is_none() {
            stack.push(root.clone());
        }
    }
    while let Some(node) = stack.pop() {
        for (next, _) in node.next.iter().flatten() {
            let count = counts.entry(Rc::as_ptr(next)).or_insert_with(|| {
                stack.push(next.clone());
                0
            });
            *count += 1;
        }
    }
    counts
}

/// A node that can run, with its order and its priority among nodes of equal order.
struct Ready(u64, u64, Rc<Node>);

impl Ord for Ready {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.0, self.1).cmp(&(other.0, other.1))
    }
}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ready {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ready {}

impl Var {
    /// Returns the leaf if the variable is a leaf that needs a gradient, and `None` otherwise.
    pub fn leaf(&self) -> Option<&Leaf> {
        self.edge.as_ref().filter(|(node, _)| node.formula.is_none()).map(|(node, _)| &node.leaf)
    }
}
