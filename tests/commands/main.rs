//! The command line, as its users see it.

mod compare;
mod generate;
mod plan;
mod schedule;
