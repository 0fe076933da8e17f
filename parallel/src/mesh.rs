//! The mesh: the role of each rank, and the groups of ranks that communicate.

use std::fmt;
use std::ops::{BitAnd, BitOr, Not};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Error;

/// The division of the work among ranks. There are copies of the model that share the batch, pipeline stages of each
/// copy, ranks that share the batch and the tensors of a stage, shares of the experts of each layer, parts of each
/// sequence, and parts of each tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Mesh {
    /// The number of model copies. They share the batch and the optimizer states (ZeRO stage 1).
    pub data: usize,
    /// The number of pipeline ranks, each of which holds some of the layers.
    pub pipeline: usize,
    /// The number of ranks that share the batch and divide gradients, optimizer states and parameters (ZeRO stages 2 and
    /// 3). With several data ranks, each copy of the model is divided (hybrid sharding).
    pub shard: usize,
    /// The number of ranks that share the experts of a layer.
    pub expert: usize,
    /// The number of ranks that share the tokens of a sequence.
    pub context: usize,
    /// The number of ranks that share the tensors of a layer.
    pub tensor: usize,
    /// Axes along which ranks divide the experts of a layer, in addition to `expert` (parallel folding, Liu et al., arXiv
    /// 2504.14960). With `["tensor"]`, a tensor rank holds whole experts, and not parts of the width of each. All axes but
    /// `pipeline` can be named.
    #[serde(skip_serializing_if = "Axes::is_empty")]
    #[schemars(with = "Vec<Axis>", extend("default" = []))]
    pub fold: Axes,
}

/// A rank's place in a [`Mesh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Coordinate {
    /// Index of the copy of the model.
    pub data: usize,
    /// Index of the rank in its pipeline.
    pub pipeline: usize,
    /// Index of the shard of the parameters.
    pub shard: usize,
    /// Index of the share of the experts.
    pub expert: usize,
    /// Index of the part of a sequence.
    pub context: usize,
    /// Index of the part of a layer's tensors.
    pub tensor: usize,
}

/// An axis of a [`Mesh`]. The order of the variants is that of the numbering of ranks: along the last axis, ranks have
/// adjacent numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// [`Mesh::data`].
    Data,
    /// [`Mesh::pipeline`].
    Pipeline,
    /// [`Mesh::shard`].
    Shard,
    /// [`Mesh::expert`].
    Expert,
    /// [`Mesh::context`].
    Context,
    /// [`Mesh::tensor`].
    Tensor,
}

/// A set of axes. It divides the ranks of a [`Mesh`] into groups: the ranks of a group have different coordinates along
/// these axes, and equal coordinates along all other axes.
///
/// ```
/// use gapless_parallel::{Axes, Mesh};
///
/// let mesh = Mesh { data: 2, pipeline: 3, expert: 2, ..Mesh::default() };
/// let at = mesh.coordinate(8);
/// assert_eq!((at.data, at.pipeline, at.expert), (1, 1, 0));
/// // The ranks that share the batch of stage 1 are 2, 3, 8 and 9. Rank 8 is the third of them.
/// assert_eq!((mesh.size(Axes::BATCH), mesh.index(at, Axes::BATCH), mesh.color(at, Axes::BATCH)), (4, 2, 1));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(from = "Vec<Axis>", into = "Vec<Axis>")]
pub struct Axes(u8);

impl Axis {
    const ALL: [Self; 6] = [Self::Data, Self::Pipeline, Self::Shard, Self::Expert, Self::Context, Self::Tensor];
}

impl Axes {
    /// No axis: every rank is a group of its own.
    pub const NONE: Self = Self::of(&[]);
    /// All axes: all ranks are one group.
    pub const ALL: Self = Self::of(&Axis::ALL);
    /// The ranks of a pipeline.
    pub const PIPELINE: Self = Self::of(&[Axis::Pipeline]);
    /// The ranks that hold the same stages and that process different tokens of the batch.
    pub const BATCH: Self = Self::of(&[Axis::Data, Axis::Shard, Axis::Expert, Axis::Context]);
    /// The ranks that process different sequences of the batch.
    pub const SEQUENCES: Self = Self::of(&[Axis::Data, Axis::Shard, Axis::Expert]);
    /// The ranks of [`Mesh::expert`].
    pub const EXPERT: Self = Self::of(&[Axis::Expert]);
    /// The ranks of [`Mesh::data`].
    pub const DATA: Self = Self::of(&[Axis::Data]);
    /// The ranks that divide the tokens of sequences.
    pub const CONTEXT: Self = Self::of(&[Axis::Context]);
    /// The ranks that divide gradients, optimizer states and parameters.
    pub const SHARD: Self = Self::of(&[Axis::Shard]);
    /// The ranks among which the tensors of a layer are divided.
    pub const TENSOR: Self = Self::of(&[Axis::Tensor]);

    /// Returns the set of these axes.
    pub const fn of(axes: &[Axis]) -> Self {
        let (mut bits, mut index) = (0, 0);
        while index < axes.len() {
            bits |= 1 << axes[index] as u8;
            index += 1;
        }
        Self(bits)
    }

    /// Returns all sets of axes, in ascending order.
    pub fn sets() -> impl Iterator<Item = Self> {
        (0..=Self::ALL.0).map(Self)
    }

    /// Returns whether the set has no axis.
    pub fn is_empty(&self) -> bool {
        *self == Self::NONE
    }

    /// Returns whether the set has this axis.
    pub const fn contains(self, axis: Axis) -> bool {
        (self.0 >> axis as u8) & 1 == 1
    }

    /// Returns the axes of the set, in the order of [`Axis`].
    pub fn iter(self) -> impl Iterator<Item = Axis> {
        Axis::ALL.into_iter().filter(move |&axis| self.contains(axis))
    }
}

impl From<Vec<Axis>> for Axes {
    fn from(axes: Vec<Axis>) -> Self {
        Self::of(&axes)
    }
}

impl From<Axes> for Vec<Axis> {
    fn from(axes: Axes) -> Self {
        axes.iter().collect()
    }
}

/// Returns the axes that are in either set.
impl BitOr for Axes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Returns the axes that are in both sets.
impl BitAnd for Axes {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Returns the axes that are not in the set.
impl Not for Axes {
    type Output = Self;

    fn not(self) -> Self {
        Self(Self::ALL.0 & !self.0)
    }
}

/// Writes the axes, as in `{Data, Expert}`.
impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl Coordinate {
    fn along(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Pipeline => self.pipeline,
            Axis::Shard => self.shard,
            Axis::Expert => self.expert,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
        }
    }
}

impl Default for Mesh {
    /// Returns a mesh of one rank, which does everything.
    fn default() -> Self {
        Self { data: 1, pipeline: 1, shard: 1, expert: 1, context: 1, tensor: 1, fold: Axes::NONE }
    }
}

impl Mesh {
    /// Returns a mesh of pipeline ranks only.
    pub fn pipeline(ranks: usize) -> Self {
        Self { pipeline: ranks, ..Self::default() }
    }

    /// Returns the number of ranks.
    ///
    /// # Errors
    /// Returns [`Error::Mesh`] if an extent is 0 or the number of ranks overflows.
    pub fn ranks(&self) -> Result<usize, Error> {
        let Self { data, pipeline, shard, expert, context, tensor, fold: _ } = *self;
        let ranks = Axis::ALL.into_iter().try_fold(1, |ranks: usize, axis| ranks.checked_mul(self.extent(axis)));
        ranks.filter(|&ranks| ranks > 0).ok_or(Error::Mesh { data, pipeline, shard, expert, context, tensor })
    }

    /// Returns the coordinate of a rank. From one rank to the next, the part of the tensors changes first, then the part
    /// of the sequence, the share of the experts, the shard of the parameters, the pipeline stage, and last the copy of the
    /// model. So the ranks that communicate most are nearest to each other.
    ///
    /// # Panics
    /// Panics if an extent is 0. [`Mesh::ranks`] returns an error in that case.
    pub fn coordinate(&self, mut rank: usize) -> Coordinate {
        let mut next = |extent| {
            let index = rank % extent;
            rank /= extent;
            index
        };
        let (tensor, context, expert) = (next(self.tensor), next(self.context), next(self.expert));
        let (shard, pipeline) = (next(self.shard), next(self.pipeline));
        Coordinate { tensor, context, expert, shard, pipeline, data: rank }
    }

    /// Returns the rank at a coordinate: the inverse of [`Mesh::coordinate`].
    pub fn rank(&self, at: Coordinate) -> usize {
        self.index(at, Axes::ALL)
    }

    /// Returns the rank of a pipeline stage that holds most: the last tensor rank. If an extent does not divide among the tensor
    /// ranks, it has one index more than the first.
    pub fn fullest(&self, pipeline: usize) -> usize {
        self.rank(Coordinate { pipeline, tensor: self.tensor.saturating_sub(1), ..Coordinate::default() })
    }

    /// Returns the axes along which ranks divide the experts of a layer: the ranks of a group hold different experts, and
    /// exchange the rows of their tokens.
    pub fn experts(&self) -> Axes {
        Axes::EXPERT | self.fold
    }

    /// Returns the number of ranks in each group along these axes.
    pub fn size(&self, axes: Axes) -> usize {
        axes.iter().map(|axis| self.extent(axis)).product()
    }

    /// Returns the index of the rank at a coordinate in its group along these axes. A group is in the order of its ranks.
    pub fn index(&self, at: Coordinate, axes: Axes) -> usize {
        axes.iter().fold(0, |index, axis| index * self.extent(axis) + at.along(axis))
    }

    /// Returns the index of the group along these axes to which the rank at a coordinate belongs. This is the color with
    /// which a communicator of all ranks is split into the communicators of the groups.
    pub fn color(&self, at: Coordinate, axes: Axes) -> usize {
        self.index(at, !axes)
    }

    fn extent(&self, axis: Axis) -> usize {
        match axis {
            Axis::Data => self.data,
            Axis::Pipeline => self.pipeline,
            Axis::Shard => self.shard,
            Axis::Expert => self.expert,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_and_ranks_are_each_others_inverse() {
        for [data, pipeline, shard, expert, context, tensor] in
            [[1; 6], [2, 3, 1, 4, 1, 1], [4, 1, 1, 2, 1, 1], [1, 5, 1, 1, 1, 1], [2, 3, 2, 2, 3, 4], [1, 1, 3, 1, 2, 3]]
        {
            let mesh = Mesh { data, pipeline, shard, expert, context, tensor, ..Mesh::default() };
            for rank in 0..mesh.ranks().unwrap() {
                let at = mesh.coordinate(rank);
                assert!(Axis::ALL.into_iter().all(|axis| at.along(axis) < mesh.extent(axis)));
                assert_eq!(mesh.rank(at), rank);
                // Shard, context and tensor ranks subdivide the numbering of the other axes.
                let without = ((at.data * pipeline + at.pipeline) * shard + at.shard) * expert + at.expert;
                assert_eq!(rank, (without * context + at.context) * tensor + at.tensor);
            }
        }
        assert!(Mesh { data: 0, ..Mesh::default() }.ranks().is_err());
        assert!(Mesh { tensor: 0, ..Mesh::default() }.ranks().is_err());
        assert!(Mesh { data: usize::MAX, pipeline: 2, ..Mesh::default() }.ranks().is_err());
    }

    /// The groups along each set of axes, found by comparing coordinates.
    #[test]
    fn ranks_of_a_group_differ_along_its_axes_only() {
        let mesh = Mesh { data: 2, pipeline: 3, shard: 2, expert: 2, context: 3, tensor: 2, ..Mesh::default() };
        let all: Vec<Coordinate> = (0..mesh.ranks().unwrap()).map(|rank| mesh.coordinate(rank)).collect();
        for axes in Axes::sets() {
            for &at in &all {
                let is_member = |other: &Coordinate| {
                    Axis::ALL.into_iter().all(|axis| axes.contains(axis) || at.along(axis) == other.along(axis))
                };
                let members: Vec<Coordinate> = all.iter().copied().filter(is_member).collect();
                assert_eq!(mesh.size(axes), members.len(), "{axes:?}");
                assert_eq!(members[mesh.index(at, axes)], at, "{axes:?}");
                for &other in &all {
                    assert_eq!(mesh.color(at, axes) == mesh.color(other, axes), is_member(&other), "{axes:?}");
                }
            }
        }
    }

    #[test]
    fn sets_of_axes() {
        assert_eq!(Axes::sets().count(), 64);
        let mesh = Mesh { fold: Axes::TENSOR | Axes::DATA, ..Mesh::default() };
        assert_eq!(mesh.experts(), Axes::of(&[Axis::Data, Axis::Expert, Axis::Tensor]));
        let text = serde_json::to_string(&mesh).unwrap();
        assert!(text.ends_with(r#""fold":["data","tensor"]}"#), "{text}");
        assert_eq!(serde_json::from_str::<Mesh>(&text).unwrap(), mesh);
        assert_eq!(!Axes::BATCH, Axes::of(&[Axis::Tensor, Axis::Pipeline]));
        assert_eq!(!Axes::NONE, Axes::ALL);
        assert_eq!(format!("{:?} {:?}", Axes::BATCH, Axes::NONE), "{Data, Shard, Expert, Context} {}");
    }
}
