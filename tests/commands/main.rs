//! Tests that run the command line as a user would.

mod compare;
mod docs;
mod folders;
mod generate;
mod pages;
mod plan;
mod report;
mod schedule;
mod sweep;
mod tables;
