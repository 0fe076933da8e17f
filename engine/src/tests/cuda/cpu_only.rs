//! The features that only the CPU has.

use std::path::Path;

use crate::cuda::CPU_ONLY;

/// The table in docs/gpu.md is the list from which errors take their remedies.
#[test]
fn the_page_lists_what_is_refused() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu.md");
    let rows = CPU_ONLY.iter().map(|only| format!("| {} | {} | {} |\n", only.feature, only.why, only.remedy));
    let table = format!("| on the CPU alone | why | instead |\n| --- | --- | --- |\n{}", rows.collect::<String>());
    let text = std::fs::read_to_string(page).unwrap();
    assert!(text.ends_with(&format!("\n{table}")), "the last table of docs/gpu.md must be\n{table}");
}
