//! Folders and adapters that gapless saves, opened by transformers and PEFT: every name and shape fits, and losses are equal.
//!
//! `GAPLESS_HF_PYTHON` names a Python with transformers 5 and PEFT. The default is `python3`.

use std::path::Path;
use std::process::Command;

use gapless::models::hf::{Folder, HfError, NewFolder};
use gapless::{Lora, StepOptions, TrainOptions, Trainable, Trainer};
use serde_json::{Value, json};

use crate::case::options;
use crate::families::{Family, SEQUENCE};

/// Trains the model or an adapter by one step, saves it as the folder `what`, without the other parts of a multimodal model
/// if this is `text`, and returns the case that `reload.py` checks.
fn case(family: &Family, path: &Path, what: &str, lora: Option<Lora>) -> Result<Value, HfError> {
    let folder = Folder::open(path)?;
    let trainable = lora.map_or(Trainable::All, |lora| Trainable::Lora(folder.config().complete(lora)));
    let is_adapter = trainable != Trainable::All;
    let options = TrainOptions { step: StepOptions { trainable, ..options(SEQUENCE).step }, ..options(SEQUENCE) };
    let mut trainer = Trainer::new(|vb| folder.model(vb), options)?;
    folder.load(&mut trainer)?;
    let [tokens, targets] = family.sequences(folder.config().vocabulary() as u64);
    trainer.step(&tokens, &targets)?;
    let loss = trainer.evaluate(&tokens, &targets)?;
    let out = path.join(what);
    match what {
        _ if is_adapter => folder.save_adapter(&trainer, &out)?,
        "text" => NewFolder::like(path)?.save(&out, || Ok(trainer), |_| Ok::<_, HfError>(()))?,
        _ => folder.save(&trainer, &out, None)?,
    }
    let (folder, adapter) = if is_adapter { (path, Some(&out)) } else { (out.as_path(), None) };
    let name = format!("{}, {what}", family.name);
    Ok(
        json!({ "name": name, "folder": folder, "adapter": adapter, "tokens": tokens, "targets": targets, "loss": loss }),
    )
}

#[test]
fn transformers_and_peft_open_what_is_saved() {
    let python = std::env::var_os("GAPLESS_HF_PYTHON").unwrap_or_else(|| "python3".into());
    let check = "import peft, transformers; assert int(transformers.__version__.split('.')[0]) >= 5";
    if !Command::new(&python).args(["-c", check]).output().is_ok_and(|output| output.status.success()) {
        return gapless_testing::not_checked(format_args!("{} has no transformers 5 and PEFT", python.display()));
    }
    let families = Family::all();
    let folders = tempfile::tempdir().unwrap();
    let mut cases = Vec::new();
    for family in &families {
        let path = folders.path().join(&family.name);
        std::fs::create_dir(&path).unwrap();
        family.write(&path);
        let lora = Lora { rank: 3, alpha: 6.0, targets: Vec::new(), ..Lora::default() };
        let text = family.is_multimodal().then_some(("text", None));
        let whats = [("saved", None), ("lora", Some(lora.clone())), ("dora", Some(Lora { dora: true, ..lora }))];
        for (what, lora) in whats.into_iter().chain(text) {
            let made = case(family, &path, what, lora);
            cases.push(made.unwrap_or_else(|error| panic!("{}, {what}: {error}", family.name)));
        }
    }
    let list = folders.path().join("cases.json");
    std::fs::write(&list, serde_json::to_vec(&cases).unwrap()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/reload.py");
    let output = Command::new(&python).arg(script).arg(list).output().unwrap();
    let [found, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{errors}");
    assert!(found.is_empty(), "{found}");
}
