//! Judges of kernels and trainers, with the double in the place of a GPU.

use super::{expect_well, folder};

/// Names the judges that are run, as a test's arguments do.
const VARIABLE: &str = "GAPLESS_DOUBLE_JUDGES";

/// Without it a few are: two kinds of models, replayed and instruction by instruction, expert ranks whose arenas grow, and products with
/// epilogues in both types.
const FEW: [&str; 4] = [
    "trainer::a_profile_is_a_step",
    "routing::a_rank_may_have_all_rows",
    "trainer::a_broken_step_is_named",
    "fused::products_with_epilogues_do_what_both_did",
];

/// Trainers, one after another and side by side.
#[test]
fn judges_hold_on_the_double() {
    let Some(folder) = folder() else { return };
    match std::env::var(VARIABLE) {
        Ok(judges) => {
            expect_well(folder, &judges.split(' ').collect::<Vec<_>>(), &[], false);
        }
        Err(_) => {
            let judges = FEW.map(|judge| format!("tests::cuda::{judge}"));
            let judges: Vec<&str> = ["--exact"].into_iter().chain(judges.iter().map(String::as_str)).collect();
            let said = expect_well(folder, &judges, &[], true);
            assert!(said.contains(&format!("{} passed", FEW.len())), "{said}");
        }
    }
}

/// Steps of models with GELU, as a library computes it on a device: what is allowed there is enough.
#[test]
fn tolerances_are_those_of_a_device() {
    let Some(folder) = folder() else { return };
    let judges = ["trainer::trains_as_on_the_cpu", "fused::products_with_epilogues_do_what_both_did"];
    let judges = judges.map(|judge| format!("tests::cuda::{judge}"));
    let said = expect_well(folder, &["--exact", &judges[0], &judges[1]], &["APPROXIMATE_TANH"], true);
    assert!(said.contains("2 passed"), "{said}");
}

/// Single kernels, in memory that the processor reaches too.
#[test]
fn kernels_on_the_double() {
    if let Some(folder) = folder() {
        expect_well(folder, &["tests::cuda::norm::rms_norm"], &[], false);
    }
}
