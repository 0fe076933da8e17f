//! Checks the documentation: the book has all pages, links have targets, and comments begin with their subject.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let of_folder = fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = of_folder.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.chain(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root.join(name))).collect()
}

/// Returns the targets of Markdown links outside of code.
fn links(text: &str) -> Vec<String> {
    let prose = text.split("```").step_by(2);
    let found = prose.flat_map(|prose| prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')));
    found.map(|(target, _)| target.to_owned()).filter(|target| !target.contains("://")).collect()
}

/// Returns the anchors of a page's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let prose = text.split("```").step_by(2).flat_map(str::lines);
    let headings = prose.filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| -> String {
        let letters = heading.to_lowercase().replace(' ', "-");
        letters.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut seen = 0;
    for page in pages() {
        for target in links(&fs::read_to_string(&page).unwrap()) {
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(file.exists(), "{} links to {target}, which is not there", page.display());
            if !anchor.is_empty() {
                let has = anchors(&fs::read_to_string(&file).unwrap());
                assert!(has.contains(anchor), "{} links to {target}, of which there are {has:?}", page.display());
            }
            seen += 1;
        }
    }
    assert!(seen > 100, "{seen} links");
}

/// The book contains every page. If a page has Rust examples, src/lib.rs compiles them.
#[test]
fn the_book_has_every_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let summary = links(&fs::read_to_string(root.join("docs/SUMMARY.md")).unwrap());
    let index = links(&fs::read_to_string(root.join("docs/README.md")).unwrap());
    let library = fs::read_to_string(root.join("src/lib.rs")).unwrap();
    for page in pages().iter().filter(|page| page.parent().is_some_and(|folder| folder.ends_with("docs"))) {
        let name = page.file_name().unwrap().to_str().unwrap();
        let is_contents = ["README.md", "SUMMARY.md"].contains(&name);
        assert!(is_contents || summary.iter().any(|link| link == name), "docs/SUMMARY.md has no {name}");
        assert!(is_contents || index.iter().any(|link| link == name), "docs/README.md has no {name}");
        if fs::read_to_string(page).unwrap().contains("```rust") {
            assert!(
                library.contains(&format!("\"../docs/{name}\"")),
                "src/lib.rs does not compile the examples of {name}"
            );
        }
    }
}

/// Words that often begin a clause without a subject, as in "What is kept" or "Of the last step".
const HEADLESS: [&str; 7] = ["What", "Who", "That", "Those", "Of", "Which", "How"];

#[test]
fn documentation_begins_with_its_subject() {
    fn visit(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = entry.file_name().unwrap().to_string_lossy().into_owned();
            if entry.is_dir() && !name.starts_with('.') && name != "target" {
                visit(&entry, found);
            } else if name.ends_with(".rs") {
                for (number, line) in fs::read_to_string(&entry).unwrap().lines().enumerate() {
                    let line = line.trim_start();
                    let Some(text) = line.strip_prefix("/// ").or_else(|| line.strip_prefix("//! ")) else { continue };
                    let first = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
                    if HEADLESS.contains(&first) {
                        found.push(format!("{}:{}: {text}", entry.display(), number + 1));
                    }
                }
            }
        }
    }
    let mut found = Vec::new();
    for folder in ["alloc", "benches", "engine", "examples", "models", "parallel", "src", "tests"] {
        visit(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found);
    }
    assert!(found.is_empty(), "documentation lines without a subject:\n{}", found.join("\n"));
}
