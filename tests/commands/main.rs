//! The command line, as its users see it.

mod compare;
mod plan;
mod schedule;
