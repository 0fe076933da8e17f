//! Tests of the command line from the user's side.

mod compare;
mod folders;
mod generate;
mod pages;
mod plan;
mod report;
mod schedule;
