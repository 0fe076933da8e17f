//! A damaged folder leads to a single error that names the fault, and leaves nothing behind.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use gapless::engine::data::{ChatTemplate, DataError, Message, Tokenizer};
use gapless::models::hf::{Adapter, Folder, HfError, TensorFile};
use gapless::{DeviceChoice, StepOptions, TrainOptions, Trainer};
use serde_json::Value;

/// Loads a folder completely, up to the weights in an arena.
fn load(folder: &Path) -> Result<(), HfError> {
    let folder = Folder::open(folder)?;
    let options = TrainOptions {
        step: StepOptions { batch: 1, sequence: 4, ..StepOptions::default() },
        device: DeviceChoice::Cpu,
        threads: 1,
        ..Default::default()
    };
    folder.load(&mut Trainer::new(|vb| folder.model(vb), options)?)
}

/// Renders one message with the folder's template.
fn render(folder: &Path) -> Result<(), DataError> {
    let template = ChatTemplate::open(folder)?.expect("it is there");
    template.render(&[Message::new("user", "Hello")], true).map(drop)
}

/// Loads an adapter, and the base model that the adapter names.
fn load_adapter(folder: &Path) -> Result<(), HfError> {
    let adapter = Adapter::open(folder)?;
    let base = Folder::open(adapter.base()?)?;
    let options = TrainOptions {
        step: StepOptions { batch: 1, sequence: 4, ..StepOptions::default() },
        device: DeviceChoice::Cpu,
        threads: 1,
        ..Default::default()
    };
    let options = TrainOptions { step: StepOptions { trainable: adapter.trainable(), ..options.step }, ..options };
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

/// Copies a checkpoint, with one tensor changed or added.
fn changed(from: &Path, to: &Path, name: &str, change: impl Fn(Option<&Tensor>) -> Tensor) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    let mut tensors = candle_core::safetensors::load(from.join("model.safetensors"), &Device::Cpu).unwrap();
    let tensor = change(tensors.get(name));
    tensors.insert(name.to_owned(), tensor);
    candle_core::safetensors::save(&tensors, to.join("model.safetensors")).unwrap();
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    for (name, value) in [("model.norm.weight", f32::NAN), ("lm_head.weight", f32::NEG_INFINITY)] {
        let folder = tempfile::tempdir().unwrap();
        changed(&from, folder.path(), name, |tensor| {
            let tensor = tensor.unwrap();
            let flat = vec![value; tensor.elem_count()];
            Tensor::from_vec(flat, tensor.shape(), &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap()
        });
        let error = load(folder.path()).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(&value.to_string()), "{error}");
    }
}

/// DeepSeek-V3 may have layers that predict further tokens. If config.json declares them, they are skipped, and the
/// user is told.
#[test]
fn layers_for_further_tokens_are_left_out() {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/deepseek_v3_bf16/checkpoint");
    let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    let layers = config["num_hidden_layers"].as_u64().unwrap();
    let name = format!("model.layers.{layers}.eh_proj.weight");
    let folder = tempfile::tempdir().unwrap();
    changed(&from, folder.path(), &name, |_| Tensor::ones((2, 3), DType::BF16, &Device::Cpu).unwrap());
    for (option, count) in [("num_nextn_predict_layers", 1), ("num_mtp_layers", 1), ("num_nextn_predict_layers", 0)] {
        let options = config.as_object_mut().unwrap();
        options.retain(|name, _| !name.starts_with("num_nextn") && !name.starts_with("num_mtp"));
        options.insert(option.into(), count.into());
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        match Folder::open(folder.path()) {
            Ok(opened) => {
                assert_eq!(count, 1);
                let notices = opened.notices();
                assert!(notices.len() == 1 && notices[0].contains(&format!("model.layers.{layers} ")), "{notices:?}");
                load(folder.path()).unwrap();
            }
            Err(error) => assert!(count == 0 && error.to_string().contains(&name), "{error}"),
        }
    }
}

/// Ranks that are threads load from one folder at the same time.
#[test]
fn threads_load_from_one_folder() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/models/mixtral_bf16/checkpoint");
    let folder = Folder::open(path).unwrap();
    let loaded = || {
        let options = TrainOptions {
            step: StepOptions { batch: 1, sequence: 4, ..StepOptions::default() },
            device: DeviceChoice::Cpu,
            threads: 1,
            ..Default::default()
        };
        let mut trainer = Trainer::new(|vb| folder.model(vb), options).unwrap();
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        (0..20)
            .map(|_| {
                folder.load(&mut trainer).unwrap();
                let elements = |name: &String| {
                    trainer
                        .tensor(name)
                        .unwrap()
                        .flatten_all()
                        .unwrap()
                        .to_dtype(DType::F32)
                        .unwrap()
                        .to_vec1::<f32>()
                        .unwrap()
                };
                names.iter().map(elements).collect::<Vec<_>>()
            })
            .collect::<Vec<_>>()
    };
    let expected = loaded().remove(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(loaded)).collect();
        for thread in threads {
            assert!(thread.join().unwrap().iter().all(|found| *found == expected));
        }
    });
}
