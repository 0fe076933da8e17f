//! Launches of attention.cu, attention_tensor_cores.cu, attention_warpgroups.cu and attention_grad_warpgroups.cu.

use candle_core::{DType, Layout};

use super::{Features, Kernel, Launch, MULTIPROCESSORS, Operand, Operands, launches, pack};
use crate::cuda::Family::{
    self, Attention, AttentionFolded, AttentionGradWarpgroups, AttentionGradWarpgroupsFolded, AttentionTensorCores,
    AttentionTensorCoresFolded, AttentionWarpgroups, AttentionWarpgroupsFolded,
};
use crate::{Fold, Spec};

#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct HeadStrides {
    batch: u64,
    head: u64,
    token: u64,
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct AttentionArguments {
    pub(super) q: u64,
    pub(super) k: u64,
    pub(super) v: u64,
    pub(super) out: u64,
    pub(super) lse: u64,
    pub(super) d_out: u64,
    pub(super) delta: u64,
    pub(super) dq: u64,
    pub(super) dk: u64,
    pub(super) dv: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) queries: u64,
    pub(super) keys: u64,
    pub(super) head_size: u64,
    pub(super) value_size: u64,
    pub(super) at_q: HeadStrides,
    pub(super) at_k: HeadStrides,
    pub(super) at_v: HeadStrides,
    pub(super) at_out: HeadStrides,
    pub(super) at_dq: HeadStrides,
    pub(super) at_dk: HeadStrides,
    pub(super) at_dv: HeadStrides,
    pub(super) starts: u64,
    pub(super) window: u64,
    pub(super) chunk_size: u32,
    pub(super) chunk_inverse: u32,
    pub(super) scale: f32,
    pub(super) cap: f32,
    pub(super) is_causal: u32,
    pub(super) is_by_size: u32,
    pub(super) chunk: u32,
    pub(super) near: u32,
    pub(super) far: u32,
    pub(super) round: u32,
}

/// The settings that turn products of queries and keys into scores.
#[derive(Debug, Clone, Copy)]
pub struct Scores {
    /// The factor that products are multiplied by.
    pub scale: f32,
    /// The bound of the scores' soft cap; 0 if scores are not capped.
    pub cap: f32,
    /// True if a query does not see keys at later positions than its own.
    pub is_causal: bool,
    /// The number of most recent keys that a query of causal attention sees; `None` if it sees all earlier keys.
    pub window: Option<usize>,
    /// The number of keys of a chunk, of which a query of causal attention sees its own; `None` if it sees all earlier keys.
    pub chunk: Option<usize>,
    /// The tokens of the keys' sequence that the queries of causal attention are; `None` if they are its last tokens.
    pub places: Option<Fold>,
}

/// Threads per block, and per warpgroup: `ATTENTION_THREADS` of attention.cuh, `WARPGROUP_THREADS` of warpgroup.cuh.
pub(super) const THREADS: u32 = 128;

/// Tokens that a warpgroup processes: `WARPGROUP_ROWS` of warpgroup.cuh.
const WARPGROUP_ROWS: u64 = 64;

impl HeadStrides {
    /// Returns the strides of a tensor [batch, heads, tokens, head size]. Returns `None` if elements of a row are not
    /// contiguous.
    fn of(layout: &Layout) -> Option<Self> {
        match *layout.stride() {
            [batch, head, token, 1] => Some(Self { batch: batch as u64, head: head as u64, token: token as u64 }),
            _ => None,
        }
    }

    /// Returns the strides of a tensor [batch, tokens, heads, head size]. Returns `None` if elements of a row are not
    /// contiguous.
    fn by_token(layout: &Layout) -> Option<Self> {
        Self::of(layout).map(|of| Self { head: of.token, token: of.head, ..of })
    }

    /// True if all strides are whole packs, so that every row starts at a pack if the first row does.
    fn are_packs(&self, dtype: DType) -> bool {
        [self.batch, self.head, self.token].iter().all(|stride| stride % pack(dtype) == 0)
    }

    /// Returns the strides of a contiguous tensor [batch, tokens, heads, head size].
    fn dense(tokens: u64, heads: u64, head_size: u64) -> Self {
        Self { batch: tokens * heads * head_size, head: head_size, token: heads * head_size }
    }
}

/// A kernel, and how its blocks divide the tokens.
#[derive(Debug)]
struct Form {
    family: Family,
    name: String,
    /// Number of threads per block.
    threads: u32,
    /// Number of tokens per block.
    rows: u64,
    /// True if consecutive blocks process consecutive heads; false if they process consecutive tokens of one head.
    is_by_heads: bool,
    /// Bytes of shared memory per block.
    shared_bytes: u64,
}

/// The part of attention's forward or backward that a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Forward,
    GradQ,
    GradKv,
    GradK,
    GradV,
}

impl Part {
    /// Returns the kernels that compute dk and dv for heads of this size: one for both, or one for each.
    fn of_kv(dtype: DType, head_size: u64) -> &'static [Self] {
        if dtype == DType::BF16 && head_size > 128 { &[Self::GradV, Self::GradK] } else { &[Self::GradKv] }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Forward => "",
            Self::GradQ => "_grad_q",
            Self::GradKv => "_grad_kv",
            Self::GradK => "_grad_k",
            Self::GradV => "_grad_v",
        }
    }
}

impl Form {
    fn of(part: Part, dtype: DType, widest: u64, features: Features) -> Option<Self> {
        let most = [64, 128, 256].into_iter().find(|&most| widest <= most)?;
        match dtype {
            // For the largest heads, the backward's sums and two tiles of scores do not fit into registers.
            DType::BF16 if features.warpgroups && (part == Part::Forward || most <= 128) => {
                Some(Self::warpgroups(part, most))
            }
            DType::BF16 => Some(Self::tensor_cores(part, most)),
            DType::F32 => Some(Self::plain(part, most, widest)),
            _ => None,
        }
    }

    /// The kernels of attention_warpgroups.cu and attention_grad_warpgroups.cu. The numbers of warpgroups per
    /// block and of rows per tile are those in the kernels. In shared memory, two or three stages of tiles start
    /// at the first address that is a multiple of 1024.
    fn warpgroups(part: Part, most: u64) -> Self {
        let warpgroups = 2;
        let rows = WARPGROUP_ROWS * warpgroups;
        let (tile, family) = match (part, most) {
            (Part::Forward, 128) => (128, AttentionWarpgroups),
            (Part::Forward, _) => (64, AttentionWarpgroups),
            _ => (64, AttentionGradWarpgroups),
        };
        let (blocks, stages, statistics) = match part {
            Part::Forward => (1, 2, 0),
            Part::GradQ => (2, 3, 0),
            // One value per thread in each of the three stages.
            _ => (2, 3, 3 * 4 * u64::from(THREADS) * warpgroups),
        };
        Self {
            family,
            name: format!("attention_wg{}_{most}", part.suffix()),
            threads: THREADS * warpgroups as u32,
            rows,
            is_by_heads: true,
            shared_bytes: 1024 + (blocks * rows + 2 * stages * tile) * 2 * most + statistics,
        }
    }

    /// The kernels of attention_tensor_cores.cu. The numbers of bands per warp and of rows per tile are those in the
    /// kernels. Shared memory holds two pairs of tiles that the kernel iterates over.
    fn tensor_cores(part: Part, most: u64) -> Self {
        let (bands, tile) = match (part, most) {
            (Part::Forward, 64) => (2, 64),
            (_, 64) | (Part::Forward, 128) => (2, 32),
            (_, 128) => (1, 32),
            _ => (1, 16),
        };
        let rows = 16 * bands * u64::from(THREADS / 32);
        let blocks = if part == Part::Forward { 1 } else { 2 };
        Self {
            family: AttentionTensorCores,
            name: format!("attention_tc{}_{most}", part.suffix()),
            threads: THREADS,
            rows,
            is_by_heads: false,
            shared_bytes: (blocks * rows + 4 * tile) * 2 * (most + 8),
        }
    }

    /// The kernels of attention.cu. Shared memory holds tiles of heads, and square tiles of scores.
    fn plain(part: Part, most: u64, widest: u64) -> Self {
        let rows = if most == 256 { 16 } else { 32 };
        let (tiles, squares) = match part {
            // The values overwrite the keys.
            Part::Forward => (2, 1),
            Part::GradQ => (4, 1),
            Part::GradKv | Part::GradK | Part::GradV => (4, 2),
        };
        Self {
            family: Attention,
            name: format!("attention{}_{most}_f32", part.suffix()),
            threads: THREADS,
            rows,
            is_by_heads: false,
            shared_bytes: tiles * rows * 4 * (widest + 1) + squares * 4 * rows * (rows + 1),
        }
    }
}

impl AttentionArguments {
    pub(super) fn new(of: Scores, [q, k, v]: [&Operand; 3], starts: Option<&Operand>) -> Option<Self> {
        let (&[_, heads, queries, head_size], &[_, kv_heads, keys, _]) = (q.dims(), k.dims()) else { return None };
        let &[_, _, _, value_size] = v.dims() else { return None };
        let chunks = |of: Fold| [of.chunk(), of.place(0), of.place(of.chunk()), of.round()].map(|tokens| tokens as u32);
        let chunk_size = of.chunk.map_or(0, |chunk| chunk.min(1 << 31) as u32);
        let [chunk, near, far, round] = of.places.map_or([0; 4], chunks);
        let [heads, queries, head_size, kv_heads, keys, value_size] =
            [heads, queries, head_size, kv_heads, keys, value_size].map(|extent| extent as u64);
        Some(Self {
            q: q.address,
            k: k.address,
            v: v.address,
            out: 0,
            lse: 0,
            d_out: 0,
            delta: 0,
            dq: 0,
            dk: 0,
            dv: 0,
            heads,
            kv_heads,
            queries,
            keys,
            head_size,
            value_size,
            at_q: HeadStrides::of(&q.layout)?,
            at_k: HeadStrides::of(&k.layout)?,
            at_v: HeadStrides::of(&v.layout)?,
            at_out: HeadStrides::dense(queries, heads, value_size),
            at_dq: HeadStrides::default(),
            at_dk: HeadStrides::default(),
            at_dv: HeadStrides::default(),
            starts: starts.map_or(0, |starts| starts.address),
            window: of.window.unwrap_or(0) as u64,
            chunk_size,
            chunk_inverse: u32::MAX / chunk_size.max(1),
            scale: of.scale,
            cap: of.cap,
            is_causal: u32::from(of.is_causal),
            is_by_size: 0,
            chunk,
            near,
            far,
            round,
        })
    }

    /// Returns the larger of the head sizes of queries and of values.
    pub(super) fn widest(&self) -> u64 {
        self.head_size.max(self.value_size)
    }

    /// True if all rows that are read can be copied 16 bytes at a time.
    pub(super) fn are_packs(&self, dtype: DType) -> bool {
        let read = [(self.q, self.at_q), (self.k, self.at_k), (self.v, self.at_v)];
        let of_gradient = (self.d_out != 0).then_some((self.d_out, self.at_out));
        read.iter().chain(&of_gradient).all(|&(address, strides)| address % 16 == 0 && strides.are_packs(dtype))
    }

    /// Returns the kernel that processes this many tokens and heads. Returns `None` if there is none for this type or
    /// head size.
    fn launch(self, part: Part, of: &Operand, tokens: u64, heads: u64, features: Features) -> Option<Kernel> {
        let features = if self.are_packs(DType::BF16) { features } else { Features::default() };
        let form = Form::of(part, of.dtype, self.widest(), features)?;
        let (blocks, batch) = (tokens.div_ceil(form.rows), of.dims()[0] as u64);
        let is_by_size = form.is_by_heads && self.is_by_size(part, heads * blocks * batch);
        let grid = match (form.is_by_heads, is_by_size) {
            (true, true) => [heads, batch, blocks],
            (true, false) => [heads, blocks, batch],
            (false, _) => [blocks, heads, batch],
        };
        Some(Kernel {
            family: if self.chunk > 0 { folded(form.family) } else { form.family },
            shared_bytes: form.shared_bytes as u32,
            tickets: 0,
            name: form.name,
            grid: grid.map(|blocks| blocks as u32),
            block: form.threads,
            arguments: Box::new(Self { is_by_size: u32::from(is_by_size), ..self }),
        })
    }

    /// True if the blocks with the most work start first, of all sequences; false if only of each sequence. The first order
    /// lets all multiprocessors end at about the same time. In the second one, the blocks that run at a time read fewer
    /// different tensors, which counts for the kernels of dk and dv if there are many blocks.
    fn is_by_size(&self, part: Part, blocks: u64) -> bool {
        matches!(part, Part::Forward | Part::GradQ) || self.widest() <= 64 && blocks < 8 * MULTIPROCESSORS
    }
}

/// Returns the family with the same kernels for a rank's chunks of a sequence.
fn folded(family: Family) -> Family {
    match family {
        Attention => AttentionFolded,
        AttentionTensorCores => AttentionTensorCoresFolded,
        AttentionWarpgroups => AttentionWarpgroupsFolded,
        AttentionGradWarpgroups => AttentionGradWarpgroupsFolded,
        other => other,
    }
}

/// Returns the launch that computes (out, log-sum-exp) from (q, k, v) and, optionally, the first key that each query
/// sees.
pub fn attention(of: Scores, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([q, k, v, starts @ ..], [out, lse]) = (operands.inputs, operands.outputs) else { return None };
    let arguments = AttentionArguments::new(of, [q, k, v], starts.first())?;
    let arguments = AttentionArguments { out: out.address, lse: lse.address, ..arguments };
    launches([arguments.launch(Part::Forward, q, arguments.queries, arguments.heads, operands.features)?])
}

/// Returns the size of the workspace for [`attention_grad`]: one f32 per query and head, like the log-sum-exp.
pub fn attention_grad_workspace(lse: &Spec) -> Vec<u64> {
    vec![lse.bytes()]
}

/// Returns the launches that compute (dq, dk, dv) from (q, k, v, out, log-sum-exp, d_out) and, optionally, the first
/// key that each query sees.
pub fn attention_grad(of: Scores, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([q, k, v, out, lse, d_out, starts @ ..], [dq, dk, dv], &[delta]) =
        (operands.inputs, operands.outputs, operands.workspace)
    else {
        return None;
    };
    let arguments = AttentionArguments {
        out: out.address,
        lse: lse.address,
        d_out: d_out.address,
        delta,
        dq: dq.address,
        dk: dk.address,
        dv: dv.address,
        at_dq: HeadStrides::by_token(&dq.layout)?,
        at_dk: HeadStrides::by_token(&dk.layout)?,
        at_dv: HeadStrides::by_token(&dv.layout)?,
        ..AttentionArguments::new(of, [q, k, v], starts.first())?
    };
    let AttentionArguments { heads, kv_heads, queries, keys, .. } = arguments;
    let of_kv = Part::of_kv(q.dtype, arguments.widest()).iter();
    // The kernel for dq runs first, because it computes the workspace delta that the others read.
    std::iter::once(arguments.launch(Part::GradQ, q, queries, heads, operands.features))
        .chain(of_kv.map(|&part| arguments.launch(part, q, keys, kv_heads, operands.features)))
        .map(|kernel| kernel.map(Launch::Kernel))
        .collect()
}
