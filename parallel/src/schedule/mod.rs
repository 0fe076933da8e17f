//! One file per schedule, one trait for all of them.

mod gpipe;
mod one_f_one_b;

pub use gpipe::GPipe;
pub use one_f_one_b::OneForwardOneBackward;

use crate::{Action, Error};

/// How many of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Pipeline ranks, P.
    pub ranks: u32,
    /// Chunks (stages) per rank, V.
    pub chunks: u32,
    /// Micro-batches per step, M.
    pub micro_batches: u32,
}

impl Shape {
    fn check(&self, schedule: &'static str) -> Result<(), Error> {
        for (what, value) in [("ranks", self.ranks), ("chunks", self.chunks), ("micro-batches", self.micro_batches)] {
            if value == 0 {
                return Err(Error::Zero { schedule, what });
            }
        }
        Ok(())
    }

    fn check_one_chunk(&self, schedule: &'static str) -> Result<(), Error> {
        self.check(schedule)?;
        if self.chunks == 1 { Ok(()) } else { Err(Error::Chunks { schedule, chunks: self.chunks }) }
    }
}

/// An order of work for every rank.
pub trait Schedule {
    /// The name used on the command line and in reports.
    fn name(&self) -> &'static str;

    /// The compute actions of each rank, in order; index = rank.
    ///
    /// # Errors
    /// When the schedule does not exist for this shape.
    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error>;
}
