//! Spoiled folders end in one error that names what is wrong, and leave nothing behind.

use std::path::Path;

use gapless::engine::data::{ChatTemplate, DataError, Message, Tokenizer};
use gapless::models::hf::{Adapter, Folder, HfError, TensorFile};
use gapless::{DeviceChoice, TrainOptions, Trainer};
use serde_json::Value;

/// What loading takes: from the folder to the weights in an arena.
fn load(folder: &Path) -> Result<(), HfError> {
    let folder = Folder::open(folder)?;
    let options = TrainOptions { batch: 1, sequence: 4, device: DeviceChoice::Cpu, threads: 1, ..Default::default() };
    folder.load(&mut Trainer::new(|vb| folder.model(vb), options)?)
}

/// A template with one message.
fn render(folder: &Path) -> Result<(), DataError> {
    let template = ChatTemplate::open(folder)?.expect("it is there");
    template.render(&[Message::new("user", "Hello")], true).map(drop)
}

/// An adapter and the base that it names.
fn load_adapter(folder: &Path) -> Result<(), HfError> {
    let adapter = Adapter::open(folder)?;
    let base = Folder::open(adapter.base()?)?;
    let options = TrainOptions { batch: 1, sequence: 4, device: DeviceChoice::Cpu, threads: 1, ..Default::default() };
    let options = TrainOptions { trainable: adapter.trainable(), ..options };
    let mut trainer = Trainer::new(|vb| base.model(vb), options)?;
    base.load(&mut trainer)?;
    adapter.load(&base, &mut trainer)
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
                "file" => {
                    let opened = TensorFile::open(folder.join("model.safetensors"));
                    opened.map(drop).map_err(|error| error.to_string())
                }
                "checkpoint" => load(&folder).map_err(|error| error.to_string()),
                "adapter" => load_adapter(&folder).map_err(|error| error.to_string()),
                "tokenizer" => Tokenizer::open(&folder).map(drop).map_err(|error| error.to_string()),
                "template" => render(&folder).map_err(|error| error.to_string()),
                _ => continue,
            };
            checked += 1;
            match (text("expect"), result) {
                ("ok", result) => result.unwrap_or_else(|error| panic!("{}: {error}", text("name"))),
                ("error" | "error-or-warning", Ok(())) => panic!("{} was loaded", text("name")),
                (_, Ok(())) => {}
                (_, Err(message)) => {
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
