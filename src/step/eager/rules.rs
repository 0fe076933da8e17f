//! The allocations of PyTorch's operations. There is one function per operation, which can be read as a table:
//!
//! | in a function | meaning |
//! |---|---|
//! | `save` | a tensor that autograd saves, from `tools/autograd/derivatives.yaml`; inputs are saved before the output is allocated, outputs after |
//! | a variable | a temporary; temporaries are freed in reverse order when the function or formula ends |
//! | the last line | the output, and in its formula the gradients, in the order in which they are allocated |
//!
//! An argument that is passed by value is a temporary without further references. Sizes of workspaces are those of
//! PyTorch 2.15 on a device like an A100, as recorded. A comment at each size names the PyTorch code that computes it.

use super::autograd::{Autograd, Var};
use super::tape::{F32, INT64, Tape, Tensor};

/// cuBLAS's workspace, allocated for each product (`aten/src/ATen/cuda/CublasHandlePool.cpp`).
const CUBLAS: u64 = 8_519_680;
/// The workspace of cublasLt, which adds a bias while it stores the product (`aten/src/ATen/cuda/CUDABlas.cpp`).
const CUBLAS_LT: u64 = 1 << 20;

/// The recorded bytes of workspace that `cub::DeviceRadixSort` takes to sort `count` int64 values by int64 keys.
/// Operands are not included. A short array is sorted in one block.
pub fn sort_workspace(count: u64) -> u64 {
    if count > 2300 { count * 65 / 4 + 5631 } else { 1 }
}

/// `torch::sum` over rows: partial sums of several blocks in float32, and a counter for each block's columns
/// (`global_memory_size` in `aten/src/ATen/native/cuda/Reduce.cuh`: 128 columns and 4 rows per block, 1,728 blocks, at least 16 rows per
/// thread).
pub fn sum_rows(tape: &Tape, tensor: &Tensor, dtype: u64) -> Tensor {
    let sum = tape.new_tensor(tensor.width, tensor.width, dtype);
    let columns = tensor.width.div_ceil(128);
    let blocks = 1728u64.div_ceil(columns).min((tensor.rows() / 4).div_ceil(16));
    let _partial = tape.bytes(if blocks > 1 { F32 * tensor.width * 128 * blocks } else { 0 });
    let _counters = tape.bytes(if blocks > 1 { F32 * columns } else { 0 });
    sum
}

impl Autograd {
    /// `torch.Tensor.to`; saves nothing.
    pub fn cast(&self, x: &Var, dtype: u64) -> Var {
        if x.data.dtype == dtype {
            return x.clone();
        }
        let (op, back) = (self.record(&[x]), x.data.dtype);
        op.output(self.tape.cast(&x.data, dtype), move |t, g| vec![Some(t.cast(g, back))])
    }

    /// A view with another width that keeps the order of the elements. A transposed tensor must be copied for this.
    pub fn view(&self, x: &Var, width: u64) -> Var {
        let copies = x.data.is_transposed;
        let y = if copies { self.tape.new_tensor(x.data.elements, width, x.data.dtype) } else { x.data.clone() };
        let back = x.data.width;
        self.record(&[x]).output(Tensor { width, ..y }, move |t, g| {
            let new = if g.is_transposed { t.new_tensor(g.elements, back, g.dtype) } else { g.view() };
            vec![Some(Tensor { width: back, ..new })]
        })
    }

    /// `transpose(1, 2)`.
    pub fn transpose(&self, x: &Var) -> Var {
        let swapped = |x: &Tensor| Tensor { is_transposed: !x.is_transposed, ..x.clone() };
        let view = move |g: &Tensor| Tensor { is_view: true, ..swapped(g) };
        self.record(&[x]).output(swapped(&x.data), move |_, g| vec![Some(view(g))])
    }

    /// `split` or `chunk` of the last dimension; the gradients of all parts are written into one tensor.
    pub fn split(&self, x: &Var, parts: u64) -> Vec<Var> {
        let part = Tensor { elements: x.data.elements / parts, width: x.data.width / parts, ..x.data.view() };
        let like = (x.data.elements, x.data.width, x.data.dtype);
        self.record(&[x])
            .outputs(vec![part; parts as usize], move |t, _| vec![Some(t.new_tensor(like.0, like.1, like.2))])
    }

    /// `cat` of two halves; its gradients are views.
    fn cat(&self, a: Var, b: &Var) -> Var {
        let y = self.tape.new_tensor(2 * a.data.elements, 2 * a.data.width, a.data.dtype);
        self.record(&[&a, b]).output(y, |_, g| {
            let half = Tensor { elements: g.elements / 2, width: g.width / 2, ..g.view() };
            vec![Some(half.clone()), Some(half)]
        })
    }

    /// An elementwise operation whose gradient needs no saved tensor: `neg`, the addition of a number, or the
    /// multiplication by a number.
    pub fn scale(&self, x: &Var) -> Var {
        self.record(&[x]).output(self.tape.like(&x.data), |t, g| vec![Some(t.like(g))])
    }

    /// `add`. Both inputs get the same gradient, which is cast to the input's type and summed to its shape if they
    /// differ (`validate_outputs`).
    pub fn add(&self, a: &Var, b: &Var) -> Var {
        let dtype = a.data.dtype.max(b.data.dtype);
        let long = if a.data.elements >= b.data.elements { a } else { b };
        let operands = [a, b].map(|x| (x.data.elements, x.data.width, x.data.dtype));
        self.record(&[a, b]).output(self.tape.cast(&long.data, dtype), move |t, g| {
            let to = |(elements, width, dtype)| match () {
                () if elements < g.elements => t.new_tensor(elements, width, dtype),
                () if dtype != g.dtype => t.cast(g, dtype),
                () => g.clone(),
            };
            operands.map(|x| Some(to(x))).to_vec()
        })
    }

    /// `mul`. The backward computes the gradient of the second operand, then that of the first. If an operand has a
    /// smaller shape than the product, its gradient is then summed to this shape.
    pub fn mul(&self, a: &Var, b: &Var) -> Var {
        let mut op = self.record(&[a, b]);
        let needs = [op.needs(0), op.needs(1)];
        if needs[0] {
            op.save(&b.data);
        }
        if needs[1] {
            op.save(&a.data);
        }
        let long = if a.data.elements >= b.data.elements { a } else { b };
        let operands = [a, b].map(|x| (x.data.elements, x.data.width, x.data.dtype));
        let dtype = a.data.dtype.max(b.data.dtype);
        op.output(self.tape.cast(&long.data, dtype), move |t, g| {
            let of_b = needs[1].then(|| t.like(g));
            let of_a = needs[0].then(|| t.like(g));
            let sum = |x: Option<Tensor>, (elements, width, dtype): (u64, u64, u64)| match x {
                Some(whole) if elements == width && elements < whole.elements => Some(sum_rows(t, &whole, dtype)),
                Some(whole) if elements < whole.elements => Some(t.new_tensor(elements, width, whole.dtype)),
                x => x,
            };
            vec![sum(of_a, operands[0]), sum(of_b, operands[1])]
        })
    }

    /// An elementwise operation whose gradient reads the input: `gelu`, `silu`.
    pub fn activation(&self, x: &Var) -> Var {
        let mut op = self.record(&[x]);
        op.save(&x.data);
        op.output(self.tape.like(&x.data), |t, g| vec![Some(t.like(g))])
    }

    /// `native_dropout`; saves a mask of one byte per element.
    pub fn dropout(&self, x: &Var) -> Var {
        let mut op = self.record(&[x]);
        let y = self.tape.like(&x.data);
        op.save(&self.tape.cast(&x.data, 1));
        op.output(y, |t, g| vec![Some(t.like(g))])
    }

    /// `pow(2)`; the gradient 2·g·xⁿ⁻¹ is computed factor by factor.
    fn square(&self, x: &Var) -> Var {
        let mut op = self.record(&[x]);
        op.save(&x.data);
        op.output(self.tape.like(&x.data), |t, g| {
            let _power = t.like(g);
            let _doubled = t.like(g);
            vec![Some(t.like(g))]
        })
    }

    /// `mean(-1, keepdim=True)`.
    fn mean(&self, x: Var) -> Var {
        let (elements, width) = (x.data.elements, x.data.width);
        let y = self.tape.new_tensor(x.data.rows(), 1, x.data.dtype);
        self.record(&[&x]).output(y, move |t, g| vec![Some(t.new_tensor(elements, width, g.dtype))])
    }

    /// `x + eps`.
    fn add_number(&self, x: Var) -> Var {
        self.record(&[&x]).output(self.tape.like(&x.data), |_, g| vec![Some(g.clone())])
    }

    /// `rsqrt`; the gradient is −½·g·y³.
    fn rsqrt(&self, x: Var) -> Var {
        let mut op = self.record(&[&x]);
        let y = self.tape.like(&x.data);
        op.save(&y);
        op.output(y, |t, g| {
            let _cube = t.like(g);
            let _half = t.like(g);
            vec![Some(t.like(g))]
        })
    }

    /// RMS norm as written in `transformers` (`LlamaRMSNorm.forward`), in float32 throughout.
    pub fn rms_norm(&self, x: &Var, weight: &Var) -> Var {
        let normed = {
            let x32 = self.cast(x, F32);
            let factor = self.rsqrt(self.add_number(self.mean(self.square(&x32))));
            self.mul(&x32, &factor)
        };
        let rounded = self.cast(&normed, x.data.dtype);
        self.mul(weight, &rounded)
    }

    /// `native_layer_norm`: row statistics are float32, and all three gradients are computed by one kernel.
    pub fn layer_norm(&self, x: &Var, weight: &Var, bias: &Var) -> Var {
        let x = &self.cast(x, weight.data.dtype);
        let (width, rows, dtype) = (x.data.width, x.data.rows(), weight.data.dtype);
        let mut op = self.record(&[x, weight, bias]);
        op.save(&x.data);
        let y = self.tape.like(&x.data);
        let [mean, rstd] = [(); 2].map(|()| self.tape.new_tensor(rows, 1, F32));
        op.save(&mean);
        op.save(&rstd);
        let needs = [0, 1, 2].map(|input| op.needs(input));
        op.output(y, move |t, g| {
            let x = needs[0].then(|| t.like(g));
            vec![
                x,
                needs[1].then(|| t.new_tensor(width, width, dtype)),
                needs[2].then(|| t.new_tensor(width, width, dtype)),
            ]
        })
    }

    /// `F.linear` of a tensor with more than two dimensions: a two-dimensional product between two views.
    pub fn linear(&self, x: &Var, weight: &Var, bias: Option<&Var>) -> Var {
        let (inner, outer) = (x.data.width, weight.data.elements / x.data.width);
        let turned = self.turned(weight);
        let y = self.product(&self.view(x, inner), &turned, bias);
        self.view(&y, outer)
    }

    /// `F.linear` of two dimensions.
    pub fn flat_linear(&self, x: &Var, weight: &Var) -> Var {
        self.product(x, &self.turned(weight), None)
    }

    /// `t()`, the transposed view of a weight.
    fn turned(&self, weight: &Var) -> Var {
        self.record(&[weight]).output(weight.data.clone(), |_, g| vec![Some(g.view())])
    }

    /// `addmm` with a bias, otherwise `mm`. In `mm`, the weight's gradient is computed before the input's gradient. In
    /// `addmm`, it is computed after it.
    fn product(&self, flat: &Var, turned: &Var, bias: Option<&Var>) -> Var {
        let (inner, outer) = (flat.data.width, turned.data.elements / flat.data.width);
        let mut op = match bias {
            Some(bias) => self.record(&[flat, turned, bias]),
            None => self.record(&[flat, turned]),
        };
        let needs = [op.needs(0), op.needs(1), bias.is_some() && op.needs(2)];
        if needs[1] {
            op.save(&flat.data);
        }
        if needs[0] {
            op.save(&turned.data);
        }
        let y = self.product_result(|| self.tape.new_tensor(flat.data.rows() * outer, outer, turned.data.dtype));
        drop(self.tape.bytes(if bias.is_some() { CUBLAS_LT } else { CUBLAS }));
        let has_bias = bias.is_some();
        let is_gathered = flat.data.part.is_some() && flat.data.storage.has_memory();
        let gathered = is_gathered.then_some((flat.data.elements, flat.data.dtype));
        let product = |t: &Tape, elements, width, dtype| {
            let product = t.new_tensor(elements, width, dtype);
            drop(t.bytes(CUBLAS));
            product
        };
        op.output(y, move |t, g| {
            let _gathered = gathered.map(|(elements, dtype)| t.new_tensor(elements, inner, dtype));
            let of_x = || needs[0].then(|| product(t, g.rows() * inner, inner, g.dtype));
            let of_weight = || needs[1].then(|| product(t, inner * outer, inner, g.dtype));
            if has_bias {
                vec![of_x(), of_weight(), needs[2].then(|| sum_rows(t, g, g.dtype))]
            } else {
                let weight = of_weight();
                vec![of_x(), weight]
            }
        })
    }

    /// Rotary positions as written in `transformers` (`apply_rotary_pos_emb`): x·cos + cat(−x₂, x₁)·sin.
    pub fn rope(&self, x: &Var) -> Var {
        let a = self.scale(x);
        let rotated = {
            let halves = self.split(x, 2);
            self.cat(self.scale(&halves[1]), &halves[0])
        };
        let b = self.scale(&rotated);
        drop(rotated);
        self.add(&a, &b)
    }

    /// `_flash_attention_forward`; saves the log-sum-exp of each head and token in float32, and the state of the random
    /// number generator. The backward accumulates the queries' gradient in float32.
    pub fn attention(&self, operands: [&Var; 3], sums: u64) -> Var {
        self.attention_and(operands, sums, &[])
    }

    /// Attention that also saves other tensors.
    pub fn attention_and(&self, [q, k, v]: [&Var; 3], sums: u64, others: &[&Tensor]) -> Var {
        let mut op = self.record(&[q, k, v]);
        others.iter().for_each(|other| op.save(other));
        for x in [k, q, v] {
            op.save(&x.data);
        }
        let y = self.selected_result(|| self.tape.like(&q.data));
        let logs = self.selected_result(|| self.tape.new_tensor(sums, 1, F32));
        let [seed, offset] = [16, 8].map(|bytes| self.tape.bytes(bytes));
        for x in [&logs, &y, &seed, &offset] {
            op.save(x);
        }
        let like = [q, k, v].map(|x| (x.data.elements, x.data.width, x.data.dtype, x.data.is_transposed));
        op.output(y, move |t, g| {
            let new = |(elements, width, dtype, is_transposed)| {
                Some(Tensor { is_transposed, ..t.new_tensor(elements, width, dtype) })
            };
            let gradients = like.map(new).to_vec();
            let _products = t.new_tensor(sums, 1, F32);
            let _of_queries = t.cast(g, F32);
            gradients
        })
    }

    /// `embedding`; its dense backward sorts the ids (`aten/src/ATen/native/cuda/Embedding.cu`,
    /// `EmbeddingBackwardKernel.cu`).
    pub fn embedding(&self, table: &Var, ids: &Tensor) -> Var {
        let mut op = self.record(&[table]);
        op.save(ids);
        let (count, width, elements) = (ids.elements, table.data.width, table.data.elements);
        op.output(self.tape.new_tensor(count * width, width, table.data.dtype), move |t, g| {
            let of_table = |t: &Tape| vec![Some(t.new_tensor(elements, width, g.dtype))];
            if count <= 3072 {
                return of_table(t);
            }
            let [_sorted, _order] = [(); 2].map(|()| t.bytes(INT64 * count));
            let range = t.bytes(INT64 * count);
            drop(t.bytes(sort_workspace(count)));
            drop(range);
            let gradient = of_table(t);
            let (_segments, _number) = (t.bytes(INT64 * count), t.bytes(8));
            let flags = t.bytes(INT64 * count);
            drop(t.bytes(1279));
            drop(flags);
            let [_sizes, _parts] = [(); 2].map(|()| t.bytes(INT64 * count));
            drop(t.bytes(1535));
            let parts = count / 10 + count;
            let (_number_of_parts, _offsets) = (t.bytes(8), t.bytes(INT64 * parts));
            let _sums = t.bytes(F32 * parts * width);
            gradient
        })
    }

    /// `cross_entropy`: `log_softmax`, which saves its output, and `nll_loss`. Under autocast, `nll_loss` runs in
    /// float32.
    pub fn cross_entropy(&self, logits: &Var, targets: Tensor, in_f32: bool) -> Var {
        let mut op = self.record(&[logits]);
        let y = self.tape.like(&logits.data);
        op.save(&y);
        let logs = op.output(y, |t, g| vec![Some(t.like(g))]);
        let logs = self.cast(&logs, if in_f32 { F32 } else { logs.data.dtype });
        let mut op = self.record(&[&logs]);
        op.save(&logs.data);
        let (loss, weight) = (self.tape.new_tensor(1, 1, logs.data.dtype), self.tape.new_tensor(1, 1, logs.data.dtype));
        op.save(&targets);
        op.save(&weight);
        let (elements, width, dtype) = (logs.data.elements, logs.data.width, logs.data.dtype);
        op.output(loss, move |t, _| vec![Some(t.new_tensor(elements, width, dtype))])
    }
}
