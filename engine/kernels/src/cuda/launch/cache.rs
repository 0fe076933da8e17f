//! Launches of cache.cu.

use candle_core::DType;

use super::attention::{AttentionArguments, Scores, THREADS};
use super::{Kernel, Launch, MULTIPROCESSORS, Operands, Strides, launches, typed};
use crate::Spec;
use crate::cuda::Family::Cache;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CacheWriteArguments {
    x: u64,
    positions: u64,
    cache: u64,
    elements: u64,
    heads: u64,
    tokens: u64,
    size: u64,
    window: u64,
    at_x: Strides,
}

/// Writes x [batch, heads, tokens, size] to rows of the cache [batch, heads, window, size], from (cache, x, positions).
pub fn cache_write(operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([_, x, positions], [cache]) = (operands.inputs, operands.outputs) else { return None };
    let (&[_, heads, tokens, size], &[_, _, window, _]) = (x.dims(), cache.dims()) else { return None };
    let [heads, tokens, size, window] = [heads, tokens, size, window].map(|extent| extent as u64);
    let arguments = CacheWriteArguments {
        x: x.address,
        positions: positions.address,
        cache: cache.address,
        elements: x.count(),
        heads,
        tokens,
        size,
        window,
        at_x: Strides::of(x)?,
    };
    launches([Kernel::flat(Cache, typed("cache_write", x.dtype)?, x.count(), arguments)])
}

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CachedAttentionArguments {
    attention: AttentionArguments,
    positions: u64,
    /// The sink of each head, f32; 0 without sinks.
    sinks: u64,
    parts: u64,
    tickets: u64,
    splits: u32,
    is_packed: u32,
}

/// Number of neighbouring elements of a head that a lane processes: `OWN` of cache.cu.
const OWN: u64 = 8;

/// Number of blocks that keep a card busy: two for each multiprocessor.
const BUSY: u64 = 2 * MULTIPROCESSORS;

/// The smallest number of keys in a split. With fewer, a block would take longer to start and to combine its result
/// with the others than to process the keys.
const LEAST_KEYS: u64 = 128;

/// The division of an attention over caches into blocks.
#[derive(Debug)]
struct Division {
    /// Number of rows per block. A row is a query of one head.
    rows: u64,
    /// Number of blocks that the rows of one key head are divided into.
    blocks: u64,
    /// Number of blocks that share the keys of a row. With few rows, it is above 1, so that the card is not idle.
    splits: u64,
}

impl Division {
    /// Returns the division for queries of these extents over caches of these extents.
    fn of(q: &[usize], k: &[usize]) -> Option<Self> {
        let (&[batch, heads, queries, _], &[_, kv_heads, keys, _]) = (q, k) else { return None };
        let of_kv_head = (queries * heads).checked_div(kv_heads)? as u64;
        let rows = if of_kv_head == 1 { 1 } else { 4 };
        let blocks = of_kv_head.div_ceil(rows);
        let idle = BUSY / (blocks * (batch * kv_heads) as u64).max(1);
        Some(Self { rows, blocks, splits: idle.min((keys as u64).div_ceil(LEAST_KEYS)).max(1) })
    }
}

/// Returns the workspace of [`cached_attention`]: if the keys are split, the parts of all rows.
pub fn cached_attention_workspace(inputs: &[Spec]) -> Vec<u64> {
    let (q, v) = (inputs[0].dims(), inputs[2].dims());
    let parts = Division::of(q, inputs[1].dims()).filter(|division| division.splits > 1);
    let of_rows = q.iter().take(3).product::<usize>() as u64;
    let bytes = |division: Division| of_rows * division.splits * (2 + crate::width(v) as u64) * 4;
    parts.map(bytes).into_iter().collect()
}

/// Returns the launch that computes attention over caches, from (q, keys, values, positions) and, optionally, the sinks
/// (f32) of the heads.
pub fn cached_attention(of: Scores, operands: &Operands<'_>) -> Option<Vec<Launch>> {
    let ([q, k, v, positions, sinks @ ..], [out]) = (operands.inputs, operands.outputs) else { return None };
    let sinks = match sinks {
        [] => 0,
        [sinks] if sinks.dtype == DType::F32 && sinks.layout.is_contiguous() => sinks.address,
        _ => return None,
    };
    let attention = AttentionArguments { out: out.address, ..AttentionArguments::new(of, [q, k, v], None)? };
    let Division { rows, blocks, splits } = Division::of(q.dims(), k.dims())?;
    let most = [64, 128, 256].into_iter().find(|&most| attention.widest() <= most)?;
    let own = [attention.head_size, attention.value_size].iter().all(|size| size.is_multiple_of(OWN));
    let arguments = CachedAttentionArguments {
        attention,
        positions: positions.address,
        sinks,
        parts: operands.workspace.first().copied().unwrap_or(0),
        tickets: operands.tickets,
        splits: splits as u32,
        is_packed: u32::from(own && attention.are_packs(q.dtype)),
    };
    let of_kv = (k.dims()[0] * k.dims()[1]) as u64;
    let teams = u64::from(THREADS) / (most / OWN);
    launches([Kernel {
        family: Cache,
        name: typed(&format!("cached_attention_{most}_{rows}"), q.dtype)?,
        grid: [blocks, splits, of_kv].map(|blocks| blocks as u32),
        block: THREADS,
        shared_bytes: (rows * teams * (2 + most) * DType::F32.size_in_bytes() as u64) as u32,
        tickets: if splits > 1 { (blocks * of_kv) as u32 } else { 0 },
        arguments: Box::new(arguments),
    }])
}
