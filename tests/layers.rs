//! Checks that crates and modules only use crates and modules below them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// All crates, from the lowest to the highest. `gapless-testing` is only used in tests.
const CRATES: [&str; 18] = [
    "gapless-testing",
    "gapless-alloc",
    "gapless-allocators",
    "gapless-torch",
    "gapless-parallel",
    "gapless-communicator",
    "gapless-mpi",
    "gapless-data",
    "gapless-checkpoint",
    "gapless-kernels",
    "gapless-graph",
    "gapless-compile",
    "gapless-runtime",
    "gapless-engine",
    "gapless-models",
    "gapless",
    "gapless-bench-generate",
    "gapless-examples",
];

/// Modules that may use each other: a tensor's methods are operations, and operations are built from tensors.
const CIRCLES: [(&str, &[&str]); 1] = [("gapless-graph", &["graph", "nn", "ops", "optim", "tensor"])];

struct Crate {
    name: String,
    source: PathBuf,
    dependencies: Vec<String>,
}

fn crates() -> Vec<Crate> {
    let mut metadata = Command::new(env!("CARGO"));
    metadata.args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path"]);
    let output = metadata.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).output().unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let crate_of = |package: &Value| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let used = package["dependencies"].as_array().unwrap().iter().filter(|used| used["kind"].is_null());
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        Crate {
            name: text(&package["name"]),
            source: manifest.with_file_name("src"),
            dependencies: used.map(|used| text(&used["name"])).filter(|name| name.starts_with("gapless")).collect(),
        }
    };
    metadata["packages"].as_array().unwrap().iter().map(crate_of).collect()
}

#[test]
fn no_crate_depends_on_one_above() {
    let place = |name: &str| CRATES.iter().position(|&known| known == name).unwrap_or_else(|| panic!("{name} is new"));
    let crates = crates();
    assert_eq!(crates.len(), CRATES.len());
    for Crate { name, dependencies, .. } in &crates {
        for used in dependencies {
            assert!(place(used) < place(name), "{name} depends on {used}");
        }
    }
}

/// Returns the Rust files below a folder, except tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_stem().unwrap_or_default();
        if ["tests", "reference", "test_support"].iter().any(|test| name == *test) {
            continue;
        }
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Returns the first components of paths that begin with `crate::`, outside of comments and tests.
fn used_modules(text: &str) -> BTreeSet<String> {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let code = lines.join("\n");
    let word = |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    code.split("crate::").skip(1).map(word).filter(|word| !word.is_empty()).collect()
}

/// Returns the top-level modules of a crate, each with the modules that it uses.
fn modules(source: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in sources(source) {
        let inside = path.strip_prefix(source).unwrap();
        let module = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs").to_owned();
        // These modules are excluded; for example, a crate's error type wraps the errors of all of its modules.
        if !["lib", "main", "bin", "error"].contains(&module.as_str()) {
            uses.entry(module).or_default().extend(used_modules(&std::fs::read_to_string(&path).unwrap()));
        }
    }
    let all: BTreeSet<String> = uses.keys().cloned().collect();
    uses.iter_mut().for_each(|(module, used)| used.retain(|used| used != module && all.contains(used)));
    uses
}

/// Returns the modules that depend on themselves through others.
fn circles(uses: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<&str> {
    let reaches_itself = |module: &&String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*module]);
        while let Some(at) = next.pop() {
            next.extend(uses[at].iter().filter(|used| seen.insert(*used)));
        }
        seen.contains(*module)
    };
    uses.keys().filter(reaches_itself).map(String::as_str).collect()
}

#[test]
fn modules_of_a_crate_use_each_other_one_way() {
    // The package of examples has no src folder.
    for Crate { name, source, .. } in crates().into_iter().filter(|member| member.source.exists()) {
        let uses = modules(&source);
        let allowed = CIRCLES.iter().find(|(member, _)| *member == name).map_or(&[][..], |(_, modules)| modules);
        let circles = circles(&uses);
        assert!(circles.iter().all(|module| allowed.contains(module)), "{name}: {circles:?} of {uses:#?}");
    }
}
