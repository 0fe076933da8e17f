//! Shared by the tests of all crates: generated cases that are the same everywhere, reports of skipped checks, and
//! access to files next to the repository, and to the pages of the documentation.
//!
//! [`fake_driver`] makes a program see a GPU that is simulated.
//!
//! In: cases, as proptest's strategies describe them. Out: tests whose verdict depends neither on the machine nor on
//! the day, and on request (`GAPLESS_EXPLORE`) tests that look for new cases. This crate makes no assertions about
//! gapless.
//!
//! ```
//! use gapless_testing::prelude::*;
//!
//! generated! {
//!     #![cases(64)]
//!
//!     #[test]
//!     fn sums_do_not_depend_on_the_order(a: u32, b in 0..10u32) {
//!         prop_assert_eq!(u64::from(a) + u64::from(b), u64::from(b) + u64::from(a));
//!     }
//! }
//! ```
//!
//! ```text
//!                        cases         seed            regression cases
//! cargo test             a quarter     SEED            replayed
//! GAPLESS_SLOW_TESTS=1   as declared   SEED            replayed
//! GAPLESS_SEED=N         as above      N               replayed
//! GAPLESS_EXPLORE=60     for 60 s      new, printed    replayed, and added
//! ```
//!
//! A test whose combinations take seconds each can go through them in turn ([`in_turn`], [`every_other`]), or run only the
//! first ones ([`few`]), unless `GAPLESS_SLOW_TESTS` is set.

#![warn(missing_docs)]
#![allow(clippy::test_attr_in_doctest, reason = "the example shows how a test is declared")]

mod evidence;
pub mod fake_driver;
mod generated;
mod only;
mod page;
mod processes;
mod skipped;

pub use evidence::{evidence, open, table_name};
pub use generated::{Generated, SEED};
pub use only::only_test;
pub use page::assert_on_page;
pub use processes::mpirun;
pub use proptest;
pub use skipped::{every_other, few, in_turn, next_to_repository, not_checked, one_of_each, slow_tests_enabled};

/// The imports for a file with generated tests. `proptest!` itself is not included, because it draws different cases
/// in every run.
pub mod prelude {
    pub use proptest::prelude::{
        Just, Strategy, TestCaseError, any, prop, prop_assert, prop_assert_eq, prop_assert_ne, prop_assume, prop_oneof,
    };

    pub use crate::generated;
}
