//! The policy for steps whose received rows exceed the reserve.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The behaviour of a step in which a rank receives more rows than
/// [`MemoryOptions::routing`](super::MemoryOptions::routing) reserves. A router with a capacity already drops rows
/// beyond the capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Overflow {
    /// The step fails with an error that names the layer.
    #[default]
    Error,
    /// The excess rows are allocated outside of the arena, and the step continues. After the step, the rank plans the
    /// reserve again, for the most uneven rows of that step plus a quarter. If the excess rows or the new reserve
    /// exceed [`MemoryOptions::budget`](super::MemoryOptions::budget), the step fails with an error.
    Grow,
    /// Rows that do not fit are recomputed. The reserve always has space for the rows that one layer needs for one
    /// micro-batch, even if their number is the largest possible. The rest of the reserve is for rows that are saved
    /// from the forward to the backward. If the saved rows of a layer do not fit on some rank, all ranks that share the
    /// experts free these rows after the forward. In the backward, these ranks exchange the rows again and recompute
    /// them. [`MemoryOptions::routing`](super::MemoryOptions::routing) must be a multiple of balanced routing or
    /// `"worst"`. With `"worst"`, all rows are saved.
    Recompute,
}

/// Parses `error`, `grow` or `recompute`.
impl FromStr for Overflow {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "error" => Ok(Self::Error),
            "grow" => Ok(Self::Grow),
            "recompute" => Ok(Self::Recompute),
            _ => Err(Error::config(
                "memory.overflow",
                format!("{text:?} is not a policy"),
                "use error, grow or recompute",
            )),
        }
    }
}
