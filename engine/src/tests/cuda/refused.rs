//! The operations that a GPU refuses, because they have no kernels.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The page says that nothing is refused but operations without kernels, and that all operations of gapless have some:
/// they launch kernels, or are views. Collectives are exchanged by communicators.
#[test]
fn every_operation_has_kernels() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("../docs/gpu.md")).unwrap();
    assert!(page.contains("**Nothing runs on the CPU alone.**"), "docs/gpu.md says what GPUs refuse");
    let mut operations = 0;
    for path in sources(&root.join("graph/src")).into_iter().filter(|path| !path.ends_with("tests.rs")) {
        let text = fs::read_to_string(&path).unwrap();
        for (before, after) in text.match_indices(" Op for ").map(|(at, _)| text.split_at(at)) {
            if before.lines().last().is_some_and(|line| line.starts_with("impl")) {
                let body = &after[..after.find("\n}\n").unwrap()];
                let name = after.split_whitespace().nth(2).unwrap();
                let is_launched =
                    ["fn cuda(", "fn cuda_fusible(", "view_only!();"].iter().any(|way| body.contains(way));
                let at = path.display();
                assert!(is_launched || name == "Collective", "{name} in {at} has no kernels: list it in docs/gpu.md");
                operations += 1;
            }
        }
    }
    assert!(operations > 60, "{operations} operations were found");
}
