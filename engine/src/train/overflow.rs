//! When there is no room for rows that expert ranks receive.

use std::str::FromStr;

use crate::error::Error;

/// What becomes of a step in which a rank receives more rows than [`TrainOptions::routing`](super::TrainOptions::routing) has
/// room for. A capacity of the router leaves rows out before that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Overflow {
    /// It ends with [`Error::Routing`].
    #[default]
    Error,
    /// The rows that find no room have room outside of the arena, and the step goes on. Behind it the rank plans the reserve
    /// again, for the most uneven rows of that step and a quarter more, and goes on in a larger arena.
    /// [`Recompute::Budget`](crate::recompute::Recompute::Budget) limits both; where they do not fit, [`Error::Growth`] says so.
    Grow,
}

/// As `error` or `grow`.
impl FromStr for Overflow {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "error" => Ok(Self::Error),
            "grow" => Ok(Self::Grow),
            _ => Err(Error::Config {
                what: "overflow",
                why: format!("{text:?} is no policy"),
                remedy: "use error or grow",
            }),
        }
    }
}
