//! The allocations of Megatron-LM's modules that differ from those of PyTorch's operations (Megatron-LM d98e8a64,
//! `megatron/core`). The module `rules` describes how to read the functions.

use gapless_engine::StepOptions;

use super::autograd::{Autograd, Var};
use super::tape::{F32, INT64, Tensor};
use crate::step::{DeviceProfile, MegatronConfig};

const MIB: u64 = 1 << 20;

/// Properties in which a Megatron run differs from other eager programs.
#[derive(Debug, Clone, Copy)]
pub struct Megatron {
    /// Bytes per element of a stored gradient.
    pub gradient: u64,
    /// Whether the update copies gradients to f32.
    pub copies_gradients: bool,
    /// Number of ranks that share the optimizer's states.
    pub optimizer_ranks: u64,
    /// Whether attention consists of separate operations.
    pub is_unfused: bool,
    /// Whether norms, gates and rotary positions consist of separate operations.
    pub has_unfused_layers: bool,
    /// Whether products gather their tokens into one buffer that lives through the step (`GlobalMemoryBuffer`), as those of
    /// `megatron/core/tensor_parallel/layers.py` do.
    pub has_gather_buffer: bool,
    pub is_ring: bool,
    /// Whether the output of flash attention is copied to the layout of the layers.
    pub copies_output: bool,
    /// Bytes of the workspaces that live through the step.
    pub workspaces: u64,
}

impl Megatron {
    pub fn new(config: &MegatronConfig, options: &StepOptions, device: &DeviceProfile) -> Self {
        Self {
            gradient: if config.fp16 { 2 } else { F32 },
            copies_gradients: config.fp16,
            optimizer_ranks: config.optimizer_ranks.unwrap_or(options.mesh.data) as u64,
            is_unfused: config.unfused_attention,
            has_unfused_layers: config.unfused_layers,
            has_gather_buffer: config.local_layers && options.sequence_parallel,
            is_ring: config.ring_attention,
            copies_output: !is_hopper(device.capability),
            workspaces: workspaces(config, device.capability),
        }
    }
}

/// Whether a device has compute capability 9. Transformer Engine then prefers cuDNN's attention, which has tokens first as
/// Megatron's layers have. On other devices it prefers flash-attn, which has sequences first: `FlashAttention.forward` in
/// `transformer_engine/pytorch/attention` copies the output, of which autograd keeps both.
fn is_hopper(capability: f64) -> bool {
    (9.0..10.0).contains(&capability)
}

/// Returns the bytes of the workspaces of cuBLAS and Transformer Engine.
///
/// - PyTorch has a workspace for each thread's handle, and autograd has a thread of its own: 8,519,680 bytes, on Hopper 32
///   MiB (`getChosenWorkspaceSize` in `aten/src/ATen/cuda/CublasHandlePool.cpp`). A deterministic run sets
///   `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which is 32 MiB.
/// - Transformer Engine has one of 32 MiB from Hopper on, else of 4 MiB (`get_cublas_workspace_size_bytes` in
///   `transformer_engine/pytorch/module/base.py`).
fn workspaces(config: &MegatronConfig, capability: f64) -> u64 {
    let handle = if config.deterministic || is_hopper(capability) { 32 * MIB } else { 8_519_680 };
    let engine = match config.local_layers {
        true => 0,
        false if capability >= 9.0 => 32 * MIB,
        false => 4 * MIB,
    };
    2 * handle + engine
}

impl Autograd {
    /// `gather_from_sequence_parallel_region` of `parts` ranks: the backward scatters the sum of the gradients.
    /// With a buffer that exists already, the whole has no memory of its own.
    pub fn gather(&self, x: &Var, parts: u64, has_buffer: bool) -> Var {
        let (elements, width, dtype) = (x.data.elements, x.data.width, x.data.dtype);
        let whole = match has_buffer {
            true => self.tape.without_memory(parts * elements, width, dtype),
            false => self.tape.new_tensor(parts * elements, width, dtype),
        };
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

#[cfg(test)]
mod tests {
    use gapless_alloc::Buffer;

    use crate::run::RunConfig;
    use crate::step::eager::assert_refused;
    use crate::step::{EagerBytes, Step};

    const TOKENS: u64 = 2 * 128;
    const WIDTH: u64 = 256;
    const HEADS: u64 = 4;

    fn step(layers: u64, keys: &str) -> Step {
        let text = format!(
            "[model.gpt]\nvocabulary = 8100\nsequence = 128\nlayers = {layers}\nheads = {HEADS}\nwidth = {WIDTH}\ndropout = 0.1\n\
             [step]\nbatch = 2\nsequence = 128\nprecision = \"bf16\"\n[estimate]\nlowering = \"megatron\"\n"
        );
        let keys: Vec<String> = keys.split_whitespace().map(str::to_owned).collect();
        Step::new(&RunConfig::parse(&text, &keys).unwrap()).unwrap()
    }

    fn bytes(layers: u64, keys: &str) -> EagerBytes {
        let step = step(layers, keys);
        step.eager_bytes(&step.record().unwrap(), 0).unwrap()
    }

    /// The activations that a layer keeps are those of Korthikanti et al. (arXiv 2205.05198, equations 1 to 4), and what
    /// they leave out: two statistics for each row of a norm, and for flash attention one for each row and head.
    #[test]
    fn a_layer_keeps_what_the_formulas_say() {
        let elements = TOKENS * WIDTH;
        let scores = HEADS * 128 * TOKENS;
        for tensor in [1, 2, 4] {
            for (sequence_parallel, unfused) in [(false, false), (false, true), (true, false), (true, true)] {
                if sequence_parallel && tensor == 1 {
                    continue;
                }
                let keys = format!(
                    "mesh.tensor={tensor} step.sequence_parallel={sequence_parallel} estimate.megatron.unfused_attention={unfused}"
                );
                let [less, more] = [2, 3].map(|layers| bytes(layers, &keys));
                let whole = if sequence_parallel { tensor } else { 1 };
                let formula =
                    elements * 10 / whole + elements * 24 / tensor + if unfused { 5 * scores / tensor } else { 0 };
                let statistics = 16 * TOKENS / whole + if unfused { 0 } else { 4 * HEADS * TOKENS / tensor + 24 };
                let kept = (more.peak - more.states) - (less.peak - less.states);
                assert_eq!(kept, formula + statistics, "{keys}");
            }
        }
    }

    /// A layer gathers the tokens of two products in the forward and again in the backward: into new tensors, or into a buffer
    /// of all layers.
    #[test]
    fn products_of_local_layers_gather_into_one_buffer() {
        let table = |layers, keys: &str| {
            let step = step(layers, &format!("mesh.tensor=2 step.sequence_parallel=true {keys}"));
            step.eager(&step.record().unwrap(), 0).unwrap()
        };
        let requests = |layers, keys: &str| table(layers, keys).buffers().len();
        let [of_two, of_three] =
            [2, 3].map(|layers| requests(layers, "") - requests(layers, "estimate.megatron.local_layers=true"));
        assert_eq!(of_three - of_two, 4);
        let table = table(2, "estimate.megatron.local_layers=true");
        let is_kept = |buffer: &&Buffer| buffer.lifetime == (0..table.end()) && buffer.bytes == TOKENS * WIDTH * 2;
        assert_eq!(table.buffers().iter().filter(is_kept).count(), 1);
    }

    /// Each separate operation saves what its gradient reads.
    #[test]
    fn unfused_layers_keep_more() {
        let kept = |keys: &str| {
            let text = "model = \"llama:vocabulary=128,layers=2,heads=4,kv_heads=4,width=256\"\n[step]\nbatch = 2\nsequence = 128\nprecision = \"bf16\"\n[estimate]\nlowering = \"megatron\"\n";
            let keys: Vec<String> = keys.split_whitespace().map(str::to_owned).collect();
            let step = Step::new(&RunConfig::parse(text, &keys).unwrap()).unwrap();
            let EagerBytes { peak, states } = step.eager_bytes(&step.record().unwrap(), 0).unwrap();
            peak - states
        };
        // At least the product of the gate's activation, and a copy in f32 of the input of each norm.
        assert!(kept("estimate.megatron.unfused_layers=true") > kept("") + 2 * TOKENS * WIDTH * (2 + 2 * 4));
    }

    /// Bytes per parameter: arXiv 1910.02054, section 3.1, with gradients in f32 in bf16 and copied to f32 in fp16.
    #[test]
    fn states_have_known_bytes_per_parameter() {
        // 8,100 tokens are padded to a multiple of 128.
        let parameters = 8192 * WIDTH + 128 * WIDTH + 2 * (12 * WIDTH * WIDTH + 13 * WIDTH) + 2 * WIDTH;
        for (keys, per_parameter) in [
            ("", 18),
            ("mesh.data=2", 12),
            ("mesh.data=2 estimate.megatron.optimizer_ranks=1", 18),
            ("estimate.megatron.fp16=true", 20),
            ("mesh.data=2 estimate.megatron.fp16=true", 12),
        ] {
            assert_eq!(bytes(2, keys).states, parameters * per_parameter, "{keys}");
        }
    }

    #[test]
    fn what_megatron_does_not_do_is_refused() {
        let refuse =
            |keys: &[&str], words: &str| assert_refused("model = \"small\"\nstep = { sequence = 16 }\n", keys, words);
        refuse(&["estimate.lowering=megatron"], "step.precision: megatron and fsdp2 require bf16");
        let bf16 = ["estimate.lowering=megatron", "step.precision=bf16"];
        refuse(&[&bf16[..], &["model=mixtral8x7b"]].concat(), "megatron and fsdp2 have no experts");
        refuse(&[&bf16[..], &["estimate.megatron.optimizer_ranks=0"]].concat(), "optimizer_ranks: is 0");
        refuse(&["estimate.lowering=eager", "mesh.tensor=2"], "mesh.tensor: is supported by megatron and fsdp2 alone");
    }
}
