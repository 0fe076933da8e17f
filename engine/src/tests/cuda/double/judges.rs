//! Runs tests of kernels and trainers on the fake driver.

use super::{expect_well, folder};

/// The environment variable that selects the tests, in the form of a test program's arguments.
const VARIABLE: &str = "GAPLESS_DOUBLE_JUDGES";

/// The tests that run if the variable is not set: replayed steps, steps of two kinds of models that run instruction
/// by instruction, expert ranks whose arenas grow, products with epilogues in both types, and copies to the host.
const FEW: [&str; 5] = [
    "trainer::a_profile_is_a_step",
    "routing::a_rank_may_have_all_rows",
    "trainer::a_broken_step_is_named",
    "fused::products_with_epilogues_do_what_both_did",
    "storage::offloaded_steps_are_those_without",
];

/// Runs the selected tests, or those of [`FEW`].
#[test]
fn judges_hold_on_the_double() {
    if folder().is_none() {
        return;
    }
    match std::env::var(VARIABLE) {
        Ok(judges) => {
            expect_well(&judges.split(' ').collect::<Vec<_>>(), &[], false);
        }
        Err(_) => {
            let judges = FEW.map(|judge| format!("tests::cuda::{judge}"));
            let judges: Vec<&str> = ["--exact"].into_iter().chain(judges.iter().map(String::as_str)).collect();
            let said = expect_well(&judges, &[], true);
            assert!(said.contains(&format!("{} passed", FEW.len())), "{said}");
        }
    }
}

/// The fake library uses the approximate GELU of a real device's library, and errors stay within the tolerances.
#[test]
fn tolerances_are_those_of_a_device() {
    if folder().is_none() {
        return;
    }
    let judges = ["trainer::trains_as_on_the_cpu", "fused::products_with_epilogues_do_what_both_did"];
    let judges = judges.map(|judge| format!("tests::cuda::{judge}"));
    let said = expect_well(&["--exact", &judges[0], &judges[1]], &["APPROXIMATE_TANH"], true);
    assert!(said.contains("2 passed"), "{said}");
}

/// Runs a test of single kernels, in host memory that is mapped for the device.
#[test]
fn kernels_on_the_double() {
    if folder().is_some() {
        expect_well(&["tests::cuda::norm::rms_norm"], &[], false);
    }
}
