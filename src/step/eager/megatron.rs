//! The allocations of Megatron-LM's modules that differ from those of PyTorch's operations (Megatron-LM d98e8a64,
//! `megatron/core`). The module `rules` describes how to read the functions.

use super::autograd::{Autograd, Var};
use super::tape::{F32, INT64, Tensor};
use crate::step::{DeviceProfile, MegatronConfig};

const MIB: u64 = 1 << 20;

/// How a Megatron run differs from other eager programs.
#[derive(Debug, Clone, Copy)]
pub struct Megatron {
    /// Bytes per element of a stored gradient.
    pub gradient: u64,
    /// Whether the update copies gradients to f32.
    pub copies_gradients: bool,
    /// Number of ranks that share the optimizer's states.
    pub optimizer_ranks: u64,
    pub is_unfused: bool,
    pub is_ring: bool,
    /// Bytes of the workspaces that live through the step.
    pub workspaces: u64,
}

impl Megatron {
    pub fn new(config: &MegatronConfig, data_ranks: usize, device: &DeviceProfile) -> Self {
        Self {
            gradient: if config.fp16 { 2 } else { F32 },
            copies_gradients: config.fp16,
            optimizer_ranks: config.optimizer_ranks.unwrap_or(data_ranks) as u64,
            is_unfused: config.unfused_attention,
            is_ring: config.ring_attention,
            workspaces: workspaces(config, device.capability),
        }
    }
}

/// Returns the bytes of the workspaces of cuBLAS and Transformer Engine.
///
/// - PyTorch has a workspace for each thread's handle, and autograd has a thread of its own: 8,519,680 bytes, on Hopper 32
///   MiB (`getChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp`). A deterministic run sets
///   `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which is 32 MiB.
/// - Transformer Engine has one of 32 MiB from Hopper on, else of 4 MiB (`get_cublas_workspace_size_bytes` in
///   `transformer_engine/pytorch/module/base.py`).
fn workspaces(config: &MegatronConfig, capability: f64) -> u64 {
    let is_hopper = (9.0..10.0).contains(&capability);
    let handle = if config.deterministic || is_hopper { 32 * MIB } else { 8_519_680 };
    let engine = match config.local_layers {
        true => 0,
        false if capability >= 9.0 => 32 * MIB,
        false => 4 * MIB,
    };
    2 * handle + engine
}

impl Autograd {
    /// `gather_from_sequence_parallel_region` of `parts` ranks: the backward scatters the sum of the gradients.
    pub fn gather(&self, x: &Var, parts: u64) -> Var {
        let (elements, width) = (x.data.elements, x.data.width);
        let whole = self.tape.new_tensor(parts * elements, width, x.data.dtype);
        let whole = Tensor { part: Some(x.data.storage.clone()), ..whole };
        self.record(&[x]).output(whole, move |t, g| vec![Some(t.new_tensor(elements, width, g.dtype))])
    }

    /// `reduce_scatter_to_sequence_parallel_region` over `parts` ranks: the backward gathers the gradients.
    pub fn reduce_scatter(&self, x: &Var, parts: u64) -> Var {
        let (elements, width) = (x.data.elements, x.data.width);
        let part = self.tape.new_tensor(elements / parts, width, x.data.dtype);
        self.record(&[x]).output(part, move |t, g| vec![Some(t.new_tensor(elements, width, g.dtype))])
    }

    /// RMS norm as one kernel; saves the input and a statistic of each row.
    pub fn fused_rms_norm(&self, x: &Var, weight: &Var) -> Var {
        let (width, rows, dtype) = (x.data.width, x.data.rows(), weight.data.dtype);
        let mut op = self.record(&[x, weight]);
        op.save(&x.data);
        let y = self.tape.like(&x.data);
        op.save(&self.tape.new_tensor(rows, 1, F32));
        op.output(y, move |t, g| {
            let of_x = t.like(g);
            vec![Some(of_x), Some(t.new_tensor(width, width, dtype))]
        })
    }

    /// `bias_swiglu_impl`: silu(gate) · x as one kernel, which saves its inputs.
    pub fn fused_swiglu(&self, gate: &Var, x: &Var) -> Var {
        let mut op = self.record(&[gate, x]);
        op.save(&gate.data);
        op.save(&x.data);
        op.output(self.tape.like(&gate.data), |t, g| [(); 2].map(|()| Some(t.like(g))).to_vec())
    }

    /// Fused rotary positions, which save nothing but their angles.
    pub fn fused_rope(&self, x: &Var) -> Var {
        self.record(&[x]).output(self.tape.like(&x.data), |t, g| vec![Some(t.like(g))])
    }

    /// `DotProductAttention.forward`: the product of `rows` queries and `keys` keys, a fused scale, mask and softmax,
    /// dropout, and the product with the values.
    pub fn unfused_attention(&self, [q, k, v]: [&Var; 3], rows: u64, keys: u64, drops: bool) -> Var {
        let mut op = self.record(&[q, k, v]);
        let dtype = q.data.dtype;
        let new = |dtype| self.tape.new_tensor(rows * keys, keys, dtype);
        op.save(&q.data);
        op.save(&k.data);
        {
            let scores = new(dtype);
            let probabilities = new(dtype);
            drop(scores);
            op.save(&probabilities);
            if drops {
                let dropped = new(dtype);
                op.save(&new(1));
                op.save(&dropped);
            }
        }
        op.save(&v.data);
        let context = self.tape.like(&q.data);
        // The heads of a token are put next to each other.
        let y = self.tape.like(&q.data);
        drop(context);
        let like = [q, k, v].map(|x| (x.data.elements, x.data.width, x.data.is_transposed));
        op.output(y, move |t, g| {
            let new =
                |(elements, width, is_transposed)| Tensor { is_transposed, ..t.new_tensor(elements, width, g.dtype) };
            let of_values = new(like[2]);
            let of_dropped = t.new_tensor(rows * keys, keys, g.dtype);
            let of_scores = drops.then(|| t.like(&of_dropped));
            drop(of_dropped);
            let of_queries = new(like[0]);
            let of_keys = new(like[1]);
            drop(of_scores);
            vec![Some(of_queries), Some(of_keys), Some(of_values)]
        })
    }

    /// Flash attention of a context rank (`AttnFuncWithCP` of Transformer Engine), which also keeps a copy of its keys
    /// and values, as it sent them.
    pub fn ring_attention(&self, [q, k, v]: [&Var; 3], sums: u64) -> Var {
        let pair = self.tape.new_tensor(k.data.elements + v.data.elements, k.data.width, k.data.dtype);
        let received = self.tape.like(&pair);
        let y = self.attention_and([q, k, v], sums, &[&pair]);
        drop(received);
        y
    }

    /// `vocab_parallel_cross_entropy`: the logits are copied to f32, and become probabilities in place. The backward
    /// writes their gradient over them, and autograd casts it to the type of the logits.
    pub fn split_cross_entropy(&self, logits: &Var) -> Var {
        let mut op = self.record(&[logits]);
        let rows = logits.data.rows();
        let probabilities = self.tape.cast(&logits.data, F32);
        let [mask, targets] = [1, INT64].map(|dtype| self.tape.new_tensor(rows, 1, dtype));
        for saved in [&probabilities, &mask, &targets] {
            op.save(saved);
        }
        let (elements, width, dtype) = (logits.data.elements, logits.data.width, logits.data.dtype);
        let losses = self.tape.new_tensor(rows, 1, F32);
        op.output(losses, move |t, _| vec![Some(t.new_tensor(elements, width, dtype))])
    }
}
