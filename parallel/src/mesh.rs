//! The mesh: the role of each rank.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Error;

/// The division of the work among ranks. There are copies of the model that share the batch, pipeline stages of each
/// copy, and shares of the experts of each layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Mesh {
    /// The number of model copies. They share the batch and the optimizer states (ZeRO stage 1).
    pub data: usize,
    /// The number of pipeline ranks, each of which holds some of the layers.
    pub pipeline: usize,
    /// The number of ranks that share the experts of a layer.
    pub expert: usize,
}

/// A rank's place in a [`Mesh`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coordinate {
    /// Index of the copy of the model.
    pub data: usize,
    /// Index of the rank in its pipeline.
    pub pipeline: usize,
    /// Index of the share of the experts.
    pub expert: usize,
}

impl Default for Mesh {
    /// Returns a mesh of one rank, which does everything.
    fn default() -> Self {
        Self { data: 1, pipeline: 1, expert: 1 }
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
        let Self { data, pipeline, expert } = *self;
        let ranks = data.checked_mul(pipeline).and_then(|ranks| ranks.checked_mul(expert));
        ranks.filter(|&ranks| ranks > 0).ok_or(Error::Mesh { data, pipeline, expert })
    }

    /// Returns the coordinate of a rank. From one rank to the next, the share of the experts changes first, then the
    /// pipeline stage, then the copy of the model. So the ranks that communicate most are nearest to each other.
    ///
    /// # Panics
    /// Panics if an extent is 0. [`Mesh::ranks`] returns an error in that case.
    pub fn coordinate(&self, rank: usize) -> Coordinate {
        let Self { pipeline, expert, .. } = *self;
        Coordinate { expert: rank % expert, pipeline: rank / expert % pipeline, data: rank / expert / pipeline }
    }

    /// Returns the rank at a coordinate: the inverse of [`Mesh::coordinate`].
    pub fn rank(&self, at: Coordinate) -> usize {
        (at.data * self.pipeline + at.pipeline) * self.expert + at.expert
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_and_ranks_are_each_others_inverse() {
        for (data, pipeline, expert) in [(1, 1, 1), (2, 3, 4), (4, 1, 2), (1, 5, 1)] {
            let mesh = Mesh { data, pipeline, expert };
            for rank in 0..mesh.ranks().unwrap() {
                let at = mesh.coordinate(rank);
                assert!(at.data < data && at.pipeline < pipeline && at.expert < expert);
                assert_eq!(mesh.rank(at), rank);
            }
        }
        assert!(Mesh { data: 0, ..Mesh::default() }.ranks().is_err());
        assert!(Mesh { data: usize::MAX, pipeline: 2, expert: 1 }.ranks().is_err());
    }
}
