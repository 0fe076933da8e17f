//! Corruptions of checkpoint files that a disk or a person may cause.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gapless::engine::checkpoint::Checkpoint;

use crate::{Budget, Checker, Draw, copy, two_steps};

/// The contents of every file in a folder of checkpoints, by path.
type Files = BTreeMap<PathBuf, Vec<u8>>;

pub fn are_seen() {
    let (template, mut judge) = (two_steps(), Checker::new());
    let originals = files(&template.path().join("checkpoints"));
    let work = tempfile::tempdir().unwrap();
    let dir = work.path().join("checkpoints");
    copy(&template.path().join("checkpoints"), &dir);
    let (budget, mut draw) = (Budget::new(1000, 50), Draw::new());
    let (mut case, mut resumed, mut refused) = (0, [0; 3], 0);
    while budget.allows(case) {
        // In one of four cases, the corruption happens after the checkpoint is opened and before it is loaded.
        let opened = (draw.below(4) == 0).then(|| Checkpoint::latest(&dir).unwrap().expect("two are sound"));
        let mut damaged = originals.clone();
        let told: Vec<String> = (0..1 + draw.below(3)).map(|_| corrupt(&mut damaged, &mut draw)).collect();
        replace(&dir, &originals, &damaged);
        let checkpoint = opened.map_or_else(|| Checkpoint::latest(&dir), |opened| Ok(Some(opened)));
        let outcome = match checkpoint {
            Err(error) => Err(error.to_string()),
            Ok(None) => Err(format!("nothing in {}", dir.display())),
            Ok(Some(checkpoint)) => judge.goes_on(&checkpoint),
        };
        match outcome {
            Ok(step) => resumed[step as usize] += 1,
            Err(error) => {
                assert!(error.contains("step-0000") || damaged.is_empty(), "case {case}, {told:?}: {error}");
                refused += 1;
            }
        }
        replace(&dir, &damaged, &originals);
        case += 1;
    }
    println!("{case} corruptions: resumed from step 1 {}, from step 2 {}, refused {refused}", resumed[1], resumed[2]);
    assert!(case < 1000 || (resumed[1] > 0 && resumed[2] > 0 && refused > 0), "{resumed:?} {refused}");
}

fn files(dir: &Path) -> Files {
    let folders = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let all = folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()));
    all.map(|path| (path.strip_prefix(dir).unwrap().to_owned(), fs::read(&path).unwrap())).collect()
}

/// Changes a folder's files from `from` to `to`.
fn replace(dir: &Path, from: &Files, to: &Files) {
    for path in from.keys().filter(|path| !to.contains_key(*path)) {
        fs::remove_file(dir.join(path)).unwrap();
        let _ = fs::remove_dir(dir.join(path).parent().unwrap()); // unless there are others in it
    }
    for (path, bytes) in to.iter().filter(|(path, bytes)| from.get(*path) != Some(bytes)) {
        fs::create_dir_all(dir.join(path).parent().unwrap()).unwrap();
        fs::write(dir.join(path), bytes).unwrap();
    }
}

/// Applies one corruption to the files, and returns its description.
fn corrupt(files: &mut Files, draw: &mut Draw) -> String {
    if files.is_empty() {
        return "nothing is left".into();
    }
    let mut any = |files: &Files| files.keys().nth(draw.below(files.len())).expect("below their number").clone();
    let (path, other) = (any(files), any(files));
    let bytes = files.get_mut(&path).expect("one of them");
    let (at, length) = (draw.below(bytes.len()), draw.below(64));
    let what = match draw.below(8) {
        0 | 1 if !bytes.is_empty() => {
            bytes[at] ^= 1 << draw.below(8);
            format!("bit flipped at {at} of")
        }
        2 => {
            bytes.truncate(at);
            format!("cut off at {at}:")
        }
        3 => {
            bytes.extend(vec![0; length]);
            format!("{length} zeros behind")
        }
        4 => {
            let end = bytes.len().min(at + length);
            bytes[at.min(end)..end].fill(0);
            format!("zeros from {at} to {end} of")
        }
        5 => {
            files.remove(&path);
            "removed".into()
        }
        6 => {
            let (one, two) = (files[&path].clone(), files[&other].clone());
            files.extend([(path.clone(), two), (other.clone(), one)]);
            format!("swapped with {}:", other.display())
        }
        _ => {
            // Renames the folder to that of another step. If that folder exists, swaps the two.
            let folder = path.parent().expect("files are in folders").to_owned();
            let name = PathBuf::from(format!("step-{:08}", 1 + draw.below(4)));
            let renamed = |file: PathBuf| match file.parent() {
                Some(parent) if parent == folder => name.join(file.file_name().expect("a file")),
                Some(parent) if parent == name => folder.join(file.file_name().expect("a file")),
                _ => file,
            };
            *files = std::mem::take(files).into_iter().map(|(file, bytes)| (renamed(file), bytes)).collect();
            format!("folder becomes {}:", name.display())
        }
    };
    format!("{what} {}", path.display())
}
