//! The command line, as its users see it.

mod compare;
mod folders;
mod generate;
mod pages;
mod plan;
mod report;
mod schedule;
