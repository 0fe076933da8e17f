//! Tables of the documentation, compared with what tests compute.

use std::path::Path;

/// Panics unless a page of the documentation has this line. `page` is its path in the repository, for example
/// `docs/arena.md`. The message has the line, so that the page can be corrected.
#[track_caller]
pub fn assert_on_page(page: &str, line: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    assert!(text.lines().any(|known| known == line), "{page} has no such line; correct its table:\n{line}");
}
