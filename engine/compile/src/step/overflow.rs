//! When there is no room for rows that expert ranks receive.

use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// What becomes of a step in which a rank receives more rows than [`MemoryOptions::routing`](super::MemoryOptions::routing) has
/// room for. A capacity of the router leaves rows out before that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Overflow {
    /// It ends with an error that names the layer.
    #[default]
    Error,
    /// The rows that find no room have room outside of the arena, and the step goes on. Behind it the rank plans the reserve
    /// again, for the most uneven rows of that step and a quarter more, and goes on in a larger arena.
    /// [`MemoryOptions::budget`](super::MemoryOptions::budget) limits both; where they do not fit, an error says so.
    Grow,
    /// There is room at all times for the most rows that a layer can receive in a micro-batch, and in that sense nothing ever runs
    /// out. What `routing` has room for beside that is for rows that wait for their backward: if those of a layer and
    /// micro-batch find none on some rank, all ranks that share its experts let them go behind the forward, and exchange and
    /// compute them again in the backward. Needs a reserve that promises something: `Balanced`, or `Worst`, which always keeps all.
    Recompute,
}

/// As `error`, `grow` or `recompute`.
impl FromStr for Overflow {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "error" => Ok(Self::Error),
            "grow" => Ok(Self::Grow),
            "recompute" => Ok(Self::Recompute),
            _ => {
                Err(Error::config("memory.overflow", format!("{text:?} is no policy"), "use error, grow or recompute"))
            }
        }
    }
}
