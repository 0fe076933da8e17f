//! Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.3), with Megatron's micro-batch group size.

use super::rank_order::RankOrder;
use super::{Schedule, Shape};
use crate::{Action, Error};

/// The interleaved schedule. Its warm-up has min((V−1)R + 2(P−1−r), VM) forwards; then forwards and backwards
/// alternate. A group of R consecutive micro-batches passes through one chunk before the next chunk has its turn.
///
/// Peak: min(VM, (V−1)P + 2(P−1−r) + 1)/V micro-batches if R = P. With one chunk this is not 1F1B, since its warm-up is
/// twice as long.
#[derive(Debug, Clone, Copy, Default)]
pub struct Interleaved {
    /// R, the number of micro-batches in a group, at least min(P, M). By default, M is divided into ⌊M/P⌋ equal rounds,
    /// as in PyTorch.
    pub micro_batch_group: Option<u32>,
}

impl Schedule for Interleaved {
    fn name(&self) -> &'static str {
        "interleaved"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
        shape.check(self.name())?;
        let group = match self.micro_batch_group {
            Some(group) => checked_group(self.name(), shape, group)?,
            None => round_size(self.name(), shape)?,
        };
        let chunks = chunk_turns(shape, group);
        let rank = |r: u32| {
            let mut order = RankOrder::default();
            let warm_up = warm_up(shape, group, 2 * (shape.ranks - 1 - r));
            let forward_stage = |turn: usize| chunks[turn] * shape.ranks + r;
            let backward_stage = |turn: usize| (shape.chunks - 1 - chunks[turn]) * shape.ranks + r;
            for turn in 0..chunks.len() + warm_up {
                if turn < chunks.len() {
                    order.forward(forward_stage(turn));
                }
                if turn >= warm_up {
                    order.backward(backward_stage(turn - warm_up));
                }
            }
            order.flush()
        };
        Ok((0..shape.ranks).map(rank).collect())
    }
}

/// Returns the chunk of each of a rank's forwards, in order. The chunk of its j-th backward is V − 1 minus the chunk of
/// its j-th forward.
pub(super) fn chunk_turns(shape: &Shape, group: u32) -> Vec<u32> {
    let groups = (0..shape.micro_batches).step_by(group as usize);
    let sizes = groups.map(|first| group.min(shape.micro_batches - first));
    sizes.flat_map(|size| (0..shape.chunks).flat_map(move |chunk| (0..size).map(move |_| chunk))).collect()
}

/// Returns the number of forwards before the first backward. `offset` of them are due to the rank's distance from the
/// last rank.
pub(super) fn warm_up(shape: &Shape, group: u32, offset: u32) -> usize {
    ((shape.chunks - 1) * group + offset).min(shape.chunks * shape.micro_batches) as usize
}

/// Returns R = M / max(1, ⌊M/P⌋), or an error if this is not a whole number.
pub(super) fn round_size(schedule: &'static str, shape: &Shape) -> Result<u32, Error> {
    let rounds = (shape.micro_batches / shape.ranks).max(1);
    if shape.micro_batches.is_multiple_of(rounds) {
        Ok(shape.micro_batches / rounds)
    } else {
        Err(Error::Rounds { schedule, micro_batches: shape.micro_batches, rounds })
    }
}

/// Checks R. If a group were smaller than the pipeline, a micro-batch would get back to the first rank before that rank
/// starts with its next chunk.
fn checked_group(schedule: &'static str, shape: &Shape, group: u32) -> Result<u32, Error> {
    let &Shape { ranks, micro_batches, .. } = shape;
    if group == 0 {
        return Err(Error::Zero { schedule, what: "the micro-batch group" });
    }
    let group = group.min(micro_batches);
    let rest = match micro_batches % group {
        0 => group,
        rest => rest,
    };
    // A single group is an ordinary round, however few micro-batches it has.
    if group < micro_batches && rest.min(group) < ranks {
        return Err(Error::Group { schedule, micro_batches, group, rest, ranks });
    }
    Ok(group)
}
