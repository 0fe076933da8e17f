//! If a folder is loaded and saved again, every file keeps its bits.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use gapless::Trainer;
use gapless::models::hf::{Folder, HfError};

use crate::case::{Case, on_disk};

/// Returns the tensors of all files of a folder. Each comes with the name of its file.
fn tensors(folder: &Path) -> BTreeMap<String, (String, Tensor)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let file = entry.file_name().into_string().unwrap();
        if file.ends_with(".safetensors") {
            for (name, tensor) in candle_core::safetensors::load(entry.path(), &Device::Cpu).unwrap() {
                assert!(all.insert(name, (file.clone(), tensor)).is_none());
            }
        }
    }
    all
}

pub fn bits(tensor: &Tensor) -> (candle_core::DType, Vec<usize>, Vec<u64>) {
    let wide = tensor.flatten_all().unwrap().to_dtype(candle_core::DType::F64).unwrap();
    let bits = wide.to_vec1::<f64>().unwrap().iter().map(|x| x.to_bits()).collect();
    (tensor.dtype(), tensor.dims().to_vec(), bits)
}

/// The supported cases.
fn supported() -> Vec<Case> {
    Case::all().into_iter().filter(|case| case.trainer(4).is_ok()).collect()
}

#[test]
fn a_round_trip_keeps_all_bits() {
    for case in supported() {
        let (folder, trainer) = case.trainer(4).unwrap();
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("saved");
        folder.save(&trainer, &out, None).unwrap();
        let (before, after) = (tensors(&case.checkpoint), tensors(&out));
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "{}", case.name);
        for (name, (file, tensor)) in &before {
            assert_eq!(*file, after[name].0, "{}: {name}", case.name);
            assert!(bits(tensor) == bits(&after[name].1), "{}: {name} has changed", case.name);
        }
        // All other files are unchanged. The exception is the index, whose total size is recomputed.
        for entry in std::fs::read_dir(&case.checkpoint).unwrap().map(Result::unwrap) {
            let name = entry.file_name().into_string().unwrap();
            if !name.contains("safetensors") {
                assert!(std::fs::read(entry.path()).unwrap() == std::fs::read(out.join(&name)).unwrap(), "{name}");
            }
        }
        assert!(!out.with_extension("partial").exists());
        assert!(matches!(folder.save(&trainer, &out, None), Err(HfError::Exists { .. })));
    }
}

#[test]
fn shards_of_a_given_size_hold_the_same() {
    for case in supported() {
        let (folder, mut trainer) = case.trainer(4).unwrap();
        trainer.step(&[1; 8], &[2; 8]).unwrap();
        let out = tempfile::tempdir().unwrap();
        let out = out.path().join("saved");
        let most = 40_000;
        folder.save(&trainer, &out, Some(most)).unwrap();
        let saved = tensors(&out);
        let files: std::collections::BTreeSet<&str> = saved.values().map(|(file, _)| file.as_str()).collect();
        assert!(files.len() > 1 && out.join("model.safetensors.index.json").exists(), "{}: {files:?}", case.name);
        for file in files {
            let of_file = saved.values().filter(|(stored_in, _)| stored_in == file).map(|(_, tensor)| tensor);
            let sizes: Vec<usize> =
                of_file.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).collect();
            assert!(sizes.len() == 1 || sizes.iter().sum::<usize>() <= most as usize, "{}: {file}", case.name);
        }
        // The saved tensors have the trainer's values in the stored type. Loading them gives the same values again.
        let is_ours = |name: &str, tensor: &Tensor| {
            let is_mask = name.ends_with(".attn.bias") && tensor.rank() == 4;
            !is_mask && !["experts.gate_up_proj", "experts.down_proj"].iter().any(|fused| name.ends_with(fused))
        };
        for (name, (_, tensor)) in saved.iter().filter(|(name, (_, tensor))| is_ours(name, tensor)) {
            let ours = on_disk(name, |parameter| trainer.tensor(parameter)).to_dtype(tensor.dtype()).unwrap();
            assert!(bits(&ours) == bits(tensor), "{}: {name}", case.name);
        }
        let stored = saved.values().next().unwrap().1.dtype();
        let names: Vec<String> = trainer.parameter_names().map(str::to_owned).collect();
        let trained = |trainer: &Trainer, name: &str| trainer.tensor(name).unwrap().copy().unwrap();
        let before: Vec<Tensor> = names.iter().map(|name| trained(&trainer, name)).collect();
        Folder::open(&out).unwrap().load(&mut trainer).unwrap();
        for (name, before) in names.iter().zip(before) {
            // The load bias of DeepSeek stays f32 in bf16 files.
            let stored = saved.get(name).map_or(stored, |(_, tensor)| tensor.dtype());
            let rounded = before.to_dtype(stored).unwrap().to_dtype(before.dtype()).unwrap();
            assert!(bits(&rounded) == bits(&trained(&trainer, name)), "{}: {name} after loading", case.name);
        }
    }
}
