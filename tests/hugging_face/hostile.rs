//! Spoiled folders end in one error that names what is wrong, and leave nothing behind.

use std::path::Path;

use gapless::models::hf::{Folder, HfError, TensorFile};
use gapless::{DeviceChoice, TrainOptions, Trainer};
use serde_json::Value;

/// What loading takes: from the folder to the weights in an arena.
fn load(folder: &Path) -> Result<(), HfError> {
    let folder = Folder::open(folder)?;
    let options = TrainOptions { batch: 1, sequence: 4, device: DeviceChoice::Cpu, threads: 1, ..Default::default() };
    folder.load(&mut Trainer::new(|vb| folder.model(vb), options)?)
}

#[test]
fn spoiled_folders_are_refused() {
    for root in crate::roots() {
        let path = root.join("hostile/cases.json");
        let Ok(cases) = std::fs::read(&path) else {
            gapless_testing::not_checked(format_args!("there is no {}", path.display()));
            continue;
        };
        let cases: Value = serde_json::from_slice(&cases).unwrap();
        let mut checked = 0;
        for case in cases.as_array().unwrap() {
            let text = |key: &str| case[key].as_str().unwrap_or_default();
            let folder = root.join("hostile").join(text("name")).join(text("path"));
            let result = match text("load") {
                "file" => TensorFile::open(folder.join("model.safetensors")).map(drop),
                "checkpoint" => load(&folder),
                _ => continue,
            };
            checked += 1;
            match (text("expect"), result) {
                ("ok", result) => result.unwrap_or_else(|error| panic!("{}: {error}", text("name"))),
                ("error" | "error-or-warning", Ok(())) => panic!("{} was loaded", text("name")),
                (_, Ok(())) => {}
                (_, Err(error)) => {
                    let message = error.to_string();
                    println!("{:<32} {message}", text("name"));
                    for word in case["must_mention"].as_array().into_iter().flatten() {
                        assert!(message.contains(word.as_str().unwrap()), "{}: {word} in {message}", text("name"));
                    }
                }
            }
        }
        assert!(checked > 0);
    }
}
