//! Folders with quantized weights, and weights that are quantized when they are loaded. Compares them with the weights that
//! bitsandbytes and transformers dequantize.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use gapless::models::hf::{Adapter, Config, Folder, HfError};
use gapless::nn::{Quantize, QuantizedFormat};
use gapless::{DType, Lora, StepOptions, TrainOptions, Trainable, Trainer};
use serde_json::{Value, json};

use crate::case::{options, read};
use crate::lora::{Case, logits};
use crate::numbers::{LOGITS, LOSS, relative, values};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evidence/hf/quantized").join(name)
}

fn lora(trainable: Trainable) -> Lora {
    match trainable {
        Trainable::Lora(lora) => lora,
        other => panic!("{other:?}"),
    }
}

/// The cases with an adapter, and the storage that they have by the names of their folders.
fn cases() -> Vec<(Case, Quantize)> {
    let quantize = |format, double| Quantize { format, double, ..Quantize::default() };
    let formats = [
        ("llama_nf4", quantize(QuantizedFormat::Nf4, true)),
        ("llama_nf4_single", quantize(QuantizedFormat::Nf4, false)),
        ("llama_int8", quantize(QuantizedFormat::Int8, true)),
    ];
    formats.into_iter().map(|(name, quantize)| (Case::read(folder(name)), quantize)).collect()
}

/// The codes and scales of a quantized folder are those with which the trainer computes. Weights that are quantized when
/// they are loaded have the same codes and scales.
#[test]
fn training_equals_that_of_weights_which_bitsandbytes_dequantizes() {
    for (case, quantize) in cases() {
        let base = case.folder.join("base");
        let adapter = Adapter::open(case.folder.join("adapter")).unwrap();
        let complete = |folder: &Path, quantize: Option<Quantize>| {
            let lora = Lora { quantize, ..lora(adapter.trainable()) };
            Trainable::Lora(Config::read(folder).unwrap().complete(lora))
        };
        let (_, _, mut read) = case.trainer_of(&base, complete(&base, None)).unwrap();
        let plain = folder("plain");
        let (_, _, mut own) = case.trainer_of(&plain, complete(&plain, Some(quantize))).unwrap();
        let mut codes = 0;
        for name in read.parameter_names() {
            let [a, b] = [&read, &own].map(|trainer| trainer.tensor(name).unwrap());
            assert_eq!(a.dtype(), b.dtype(), "{}: {name}", case.name);
            let (a, b, is_codes) = (values(&a), values(&b), a.dtype() == DType::U8);
            codes += usize::from(is_codes);
            match is_codes {
                // bitsandbytes finds the code of a scale by a table, which errs if the scale is almost that of the mean.
                true => {
                    let different = a.iter().zip(&b).filter(|(a, b)| a != b).count();
                    assert!(a.len() == b.len() && different <= 1, "{}: {different} codes of {name}", case.name);
                }
                false => assert!(relative(&b, &a) < 1e-6, "{}: {name}", case.name),
            }
        }
        assert!(codes >= 14, "{}: {codes} tensors of codes for 14 linear layers", case.name);
        case.compare(&mut read, &format!("{}, read", case.name));
        case.compare(&mut own, &format!("{}, quantized", case.name));
        // Without `quantize`, the weights of the folder are dequantized.
        let (_, _, mut wide) = case.trainer_of(&base, adapter.trainable()).unwrap();
        assert!(wide.parameter_names().all(|name| wide.tensor(name).unwrap().dtype() == DType::F32));
        case.compare(&mut wide, &format!("{}, dequantized", case.name));
    }
}

/// Saving a quantized folder writes dequantized weights, here with an adapter merged, and rounded to bf16.
#[test]
fn a_quantized_folder_is_saved_without_quantization() {
    for (case, _) in cases() {
        let base = case.folder.join("base");
        let adapter = Adapter::open(case.folder.join("adapter")).unwrap();
        let quantized = Trainable::Lora(Config::read(&base).unwrap().complete(lora(adapter.trainable())));
        for trainable in [quantized, adapter.trainable()] {
            let (base, _, trainer) = case.trainer_of(&base, trainable).unwrap();
            let out = tempfile::tempdir().unwrap();
            let out = out.path().join("saved");
            base.save(&trainer, &out, None).unwrap();
            let saved = Folder::open(&out).unwrap();
            let mut trainer = Trainer::new(|vb| saved.model(vb), options(case.ids()[0].len() - 1)).unwrap();
            saved.load(&mut trainer).unwrap();
            let off = logits(&mut trainer, &case.ids(), &case.expected["logits"]);
            assert!(off < 2e-2, "{}: {off:e}", case.name);
        }
    }
}

/// A quantized multimodal model is read. If its other parts are quantized, it cannot be saved, but its adapters can.
#[test]
fn a_quantized_multimodal_folder_is_read() {
    let (case, _) = cases().swap_remove(0);
    let base = case.folder.join("base");
    let whole = tempfile::tempdir().unwrap();
    let mut text: Value = serde_json::from_slice(&std::fs::read(base.join("config.json")).unwrap()).unwrap();
    let quantization = text.as_object_mut().unwrap().remove("quantization_config").unwrap();
    let config = json!({
        "model_type": "llava", "text_config": text, "vision_config": {}, "quantization_config": quantization, "dtype": "bfloat16",
    });
    std::fs::write(whole.path().join("config.json"), config.to_string()).unwrap();
    let tensors = candle_core::safetensors::load(base.join("model.safetensors"), &Device::Cpu).unwrap();
    let mut tensors: HashMap<String, Tensor> =
        tensors.into_iter().map(|(name, tensor)| (format!("language_model.{name}"), tensor)).collect();
    tensors.insert("vision_tower.weight".to_owned(), Tensor::new(&[[1_u8], [2]], &Device::Cpu).unwrap());
    candle_core::safetensors::save(&tensors, whole.path().join("model.safetensors")).unwrap();

    let found = [base.as_path(), whole.path()].map(|path| {
        let config = Config::read(path).unwrap();
        let lora = Lora { rank: 2, alpha: 4.0, ..Lora::default() };
        let (folder, trainable) = (Folder::open(path).unwrap(), Trainable::Lora(config.complete(lora)));
        let options = options(16);
        let options = TrainOptions { step: StepOptions { trainable, ..options.step.clone() }, ..options };
        let mut trainer = Trainer::new(|vb| folder.model(vb), options).unwrap();
        folder.load(&mut trainer).unwrap();
        let loss = trainer.evaluate(&[5; 32], &[6; 32]).unwrap();
        let out = whole.path().join(if path == base { "plain" } else { "whole" });
        folder.save_adapter(&trainer, out.join("adapter")).unwrap();
        (loss, folder.save(&trainer, out.join("saved"), None).map_err(|error| error.to_string()))
    });
    assert_eq!(found[0].0, found[1].0);
    let error = found[1].1.as_ref().unwrap_err();
    assert!(error.contains("vision_tower.weight") && error.contains("train an adapter"), "{error}");
    assert!(Adapter::open(whole.path().join("whole/adapter")).is_ok());
}

/// FP8 weights in blocks, and MXFP4 weights of experts.
#[test]
fn other_formats_are_dequantized() {
    for name in ["llama_fp8", "gpt_oss_mxfp4"] {
        let (expected, _) = read(&folder(name));
        let ids: Vec<Vec<u32>> = expected["input_ids"].to_dtype(DType::U32).unwrap().to_vec2().unwrap();
        let base = Folder::open(folder(name).join("base")).unwrap();
        let length = ids[0].len();
        let mut trainer = Trainer::new(|vb| base.model(vb), options(length - 1)).unwrap();
        base.load(&mut trainer).unwrap();
        let off = logits(&mut trainer, &ids, &expected["logits"]);
        assert!(off <= LOGITS, "{name}: logits differ by {off:e}");
        let flat =
            |first: usize| ids.iter().flat_map(|ids| &ids[first..first + length - 1]).copied().collect::<Vec<_>>();
        let loss = f64::from(trainer.evaluate(&flat(0), &flat(1)).unwrap());
        assert!((loss - values(&expected["losses"])[0]).abs() <= LOSS, "{name}: {loss}");
        // Saved folders have the dequantized weights in bf16, which are exact.
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("saved");
        base.save(&trainer, &out, None).unwrap();
        let saved = Folder::open(&out).unwrap();
        let mut again = Trainer::new(|vb| saved.model(vb), options(length - 1)).unwrap();
        saved.load(&mut again).unwrap();
        for parameter in trainer.parameter_names() {
            let [a, b] = [&trainer, &again].map(|trainer| values(&trainer.tensor(parameter).unwrap()));
            assert!(a == b, "{name}: {parameter} has changed");
        }
    }
}

#[test]
fn other_quantization_is_refused_by_name() {
    let from = folder("llama_nf4/base");
    let out = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("model.safetensors"), out.path().join("model.safetensors")).unwrap();
    let text = std::fs::read(from.join("config.json")).unwrap();
    let open = |change: &dyn Fn(&mut Value)| -> Result<Folder, HfError> {
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        change(&mut config["quantization_config"]);
        std::fs::write(out.path().join("config.json"), config.to_string()).unwrap();
        Folder::open(out.path())
    };
    open(&|_| {}).unwrap();
    for (field, value) in [
        ("quant_method", json!("gptq")),
        ("bnb_4bit_quant_type", json!("fp4")),
        ("bnb_4bit_quant_storage", json!("bfloat16")),
        ("load_in_8bit", json!(true)),
        ("something_new", json!(1)),
    ] {
        let error = open(&|config| config[field] = value.clone()).unwrap_err().to_string();
        assert!(error.contains(&format!("quantization_config.{field}")) || field == "load_in_8bit", "{field}: {error}");
    }
    // A tensor of a quantized weight is missing.
    let error = open(&|config| *config = Value::Null).unwrap_err().to_string();
    assert!(error.contains("q_proj.weight"), "{error}");
    // Trainers refuse PiSSA with quantized weights.
    let base = Folder::open(&from).unwrap();
    let lora = Lora { init: gapless::nn::LoraInit::Pissa, ..base.config().complete(Lora::default()) };
    let step = StepOptions { trainable: Trainable::Lora(lora), ..options(8).step };
    let error = Trainer::new(|vb| base.model(vb), TrainOptions { step, ..options(8) }).unwrap_err().to_string();
    assert!(error.contains("PiSSA"), "{error}");
}
